# SPDX-License-Identifier: Apache-2.0
"""A card as the README of a model on the Hugging Face Hub.

The folder is one that `huggingface_hub.upload_folder` takes. What only the author can say is left
blank, and said to be the author's.
"""

from __future__ import annotations

import html
import json
import pathlib
import re
from typing import List

from tfdp_adaptive import runfolder
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
  head = ['---', 'library_name: keras', 'tags:', *(f'- {tag}' for tag in _tags(card))]
  for about, field in (('dataset', 'datasets'), ('metrics', 'metrics')):
    if about in words:  # JSON strings are YAML.
      head += [f'{field}:', *(f'- {json.dumps(one.strip())}' for one in words[about].split(','))]
  lines = [*head, '---', '', f'# {_plain(words.get("name", "A privately trained model"))}', '',
           card_page.markdown(card), _OWN, '']
  for section in SECTIONS:
    text = _plain(words[section]) if section in words else _BLANK
    lines += [f'## {section.capitalize()}', '', text, '']
  return '\n'.join(lines)


def write(card: card_lib.Card, folder: pathlib.Path) -> List[pathlib.Path]:
  """Writes the README, and the card that `tfdp verify` checks; returns their paths."""
  texts = {NAME: readme(card), card_json.NAME: card_json.to_json(card)}
  for name, text in texts.items():
    runfolder.replace(folder / name, text.encode(), 0o666)
  return [folder / name for name in texts]


def _tags(card: card_lib.Card) -> List[str]:
  if card.epsilon is None:
    return ['keras']  # It claims no guarantee.
  return ['differential-privacy', 'dp-sgd', 'keras']


def _plain(text: str) -> str:
  return re.sub(r'([\\`*_\[\]#!|~$])', r'\\\1', html.escape(text, quote=False))
