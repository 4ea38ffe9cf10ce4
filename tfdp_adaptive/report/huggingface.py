# SPDX-License-Identifier: Apache-2.0
"""A card as the README of a model on the Hugging Face Hub.

The folder is one that `huggingface_hub.upload_folder` takes. What only the author can say is left
blank, and said to be the author's.
"""

import json
from typing import Dict

from tfdp_adaptive.privacy import card as card_lib
from tfdp_adaptive.report import card_json
from tfdp_adaptive.report import card_page

NAME = 'README.md'
SECTIONS = ('intended use', 'limits', 'utility', 'fairness')
_BLANK = '*To be written by the author.*'
_OWN = 'The next sections are the words of the author. No program has checked them.'


def readme(card: card_lib.Card) -> str:
  """Returns the front matter, the privacy card, and a section for each of `SECTIONS`."""
  words = {own.about: own.text for own in card.words}
  title = card_page.escaped_markdown(words.get('name', 'A privately trained model'))
  head = ['---', 'library_name: keras', 'tags:']
  if card.epsilon is not None:
    head.append('- differential-privacy')
    if any(run.plan is not None and not run.rule.startswith('estimates.') for run in card.runs):
      head.append('- dp-sgd')  # Steps, and not only releases before training.
  head.append('- keras')
  for about, field in (('dataset', 'datasets'), ('metrics', 'metrics')):
    if about in words:  # JSON strings are YAML.
      head += [f'{field}:', *(f'- {json.dumps(one.strip())}' for one in words[about].split(','))]
  lines = [*head, '---', '', f'# {title}', '', card_page.markdown(card), _OWN, '']
  for section in SECTIONS:
    text = card_page.escaped_markdown(words[section]) if section in words else _BLANK
    lines += [f'## {section.capitalize()}', '', text, '']
  return '\n'.join(lines)


def files(card: card_lib.Card) -> Dict[str, str]:
  """Returns the README, and the card that `tfdp verify` checks, by the names of their files."""
  return {NAME: readme(card), card_json.NAME: card_json.to_json(card)}
