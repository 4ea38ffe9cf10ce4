# SPDX-License-Identifier: Apache-2.0
"""`tfdp card`: the privacy card of a run or of a saved model, as JSON, Markdown and a page."""

import argparse
import pathlib
from typing import Any

from tfdp_adaptive import errors
from tfdp_adaptive.cli import options


def add_arguments(parser: argparse.ArgumentParser) -> None:
  add = parser.add_argument
  add('source', metavar='RUN', type=options.path,
      help='a card, a folder with card.json, or the .keras or .weights.h5 file of a private '
           'model')
  add('--words', action='append', default=[], metavar='ABOUT=TEXT',
      help='your own words for the card, such as "the data=one review a person"; may be '
           'repeated')
  add('--out', type=options.path, metavar='DIR',
      help='folder for card.json, card.md and card.html (default: print the Markdown)')
  add('--json', action='store_true', help='print the JSON')


def run(arguments: argparse.Namespace) -> None:
  from tfdp_adaptive.privacy import card_json  # pylint: disable=import-outside-toplevel
  from tfdp_adaptive.privacy import card_page  # pylint: disable=import-outside-toplevel
  card = load(arguments.source, arguments.words)
  if arguments.out is not None:
    arguments.out.mkdir(parents=True, exist_ok=True)
    for path in card_page.write(card, arguments.out):
      print(path)
  else:
    print(card_json.to_json(card) if arguments.json else card_page.markdown(card), end='')


def load(path: pathlib.Path, words: Any = ()) -> Any:
  """The card that is at `path`, or that follows from the ledger there."""
  from tfdp_adaptive.privacy import card as card_lib  # pylint: disable=import-outside-toplevel
  from tfdp_adaptive.privacy import card_json  # pylint: disable=import-outside-toplevel
  from tfdp_adaptive.privacy import ledger as ledger_lib  # pylint: disable=import-outside-toplevel
  from tfdp_adaptive.privacy import weight_digests  # pylint: disable=import-outside-toplevel
  own = []
  for text in words:
    about, equals, said = text.partition('=')
    if not (about and equals and said):
      raise errors.UsageError(f'--words must be ABOUT=TEXT. Received: {text}')
    own.append(card_lib.Words(card_lib.clean(about), card_lib.clean(said)))
  with errors.usage():
    if path.is_dir():
      path = path / card_json.NAME
    if path.suffix not in ('.keras', '.h5'):
      return card_json.read(path).with_words(own)
    file = weight_digests.of_file(path)
    if not file.ledger:
      raise errors.UsageError(f'{path} holds no ledger. Save the private model itself, by '
                              '`model.save` or `model.save_weights`.')
    ledger = ledger_lib.Ledger.from_json(file.ledger)
    return card_lib.of(ledger, weights=file.weights, words=own)
