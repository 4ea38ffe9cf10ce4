# SPDX-License-Identifier: Apache-2.0
"""`tfdp card`: the privacy card of a run or of a saved model, as JSON, Markdown and a page."""

from __future__ import annotations

import argparse
import importlib
import pathlib
import shutil
from typing import Sequence, TYPE_CHECKING

from tfdp_adaptive import errors
from tfdp_adaptive.cli import options

if TYPE_CHECKING:  # `tfdp card --help` does not wait for SciPy.
  from tfdp_adaptive.privacy import card as card_lib

_FORMATS = {'tfdp': 'card_page', 'huggingface': 'huggingface', 'registry': 'registry'}


def add_arguments(parser: argparse.ArgumentParser) -> None:
  add = parser.add_argument
  add('source', metavar='RUN', type=options.path,
      help='a card, a folder with a card, or the .keras or .weights.h5 file of a private model')
  add('--words', action='append', default=[], metavar='ABOUT=TEXT',
      help='your own words for the card, such as "the data=one review a person"; may be '
           'repeated')
  add('--format', choices=_FORMATS, default='tfdp',
      help='tfdp: card.json, card.md and card.html; huggingface: README.md and card.json for a '
           "model's folder on the Hub; registry: a draft for the registry of deployments "
           '(default: %(default)s)')
  add('--sign', type=options.path, metavar='KEY',
      help='sign the folder of --out with this private key (PEM); needs the extra `sign`')
  add('--out', type=options.path, metavar='DIR',
      help='folder for card.json, card.md and card.html (default: print the Markdown)')
  add('--json', action='store_true', help='print the JSON')


def run(arguments: argparse.Namespace) -> None:
  from tfdp_adaptive.report import card_json  # pylint: disable=import-outside-toplevel
  from tfdp_adaptive.report import card_page  # pylint: disable=import-outside-toplevel
  from tfdp_adaptive.report import signing  # pylint: disable=import-outside-toplevel
  if arguments.sign is not None and arguments.out is None:
    raise errors.UsageError('--sign needs --out, the folder to sign.')
  with errors.usage():
    sign = None if arguments.sign is None else signing.signer(arguments.sign)
    card = load(arguments.source).with_words([*map(_words, arguments.words)])
    if arguments.out is None and arguments.json:
      print(card_json.to_json(card), end='')
      return
    module = importlib.import_module(f'tfdp_adaptive.report.{_FORMATS[arguments.format]}')
    texts = module.files(card)
    if arguments.out is None:
      print(next(text for name, text in texts.items() if name != card_json.NAME), end='')
      return
    paths = card_page.write(texts, arguments.out)
    if arguments.format == 'huggingface' or sign is not None:
      paths += _with_weights(arguments.source, arguments.out)
    if sign is not None:
      paths.append(sign(arguments.out))
  print(*paths, sep='\n')


def load(path: pathlib.Path) -> card_lib.Card:
  """Returns the card that is at `path`, or that follows from the ledger there."""
  from tfdp_adaptive import privacy  # pylint: disable=import-outside-toplevel
  from tfdp_adaptive.privacy import card as card_lib  # pylint: disable=import-outside-toplevel
  from tfdp_adaptive.privacy import weight_digests  # pylint: disable=import-outside-toplevel
  from tfdp_adaptive.report import card_json  # pylint: disable=import-outside-toplevel
  if path.suffix not in ('.keras', '.h5') and not (path / 'saved_model.pb').exists():
    return card_json.read(path)
  file = weight_digests.of_file(path)
  if not file.ledger:
    raise errors.UsageError(f'{path} holds no ledger. Save the private model itself, by '
                            '`model.save` or `model.save_weights`.')
  ledger = privacy.Ledger.from_json(file.ledger)
  return ledger.card(weights=file.weights, facts=card_lib.about_weights(ledger.entries))


def _words(text: str) -> card_lib.Words:
  from tfdp_adaptive.privacy import card as card_lib  # pylint: disable=import-outside-toplevel
  about, words = (part.strip() for part in text.partition('=')[::2])
  if not (about and words):
    raise errors.UsageError(f'--words must be ABOUT=TEXT. Received: {text}')
  return card_lib.Words(about, words)


def _with_weights(source: pathlib.Path, folder: pathlib.Path) -> Sequence[pathlib.Path]:
  """Copies weights that may be published; a .keras file may hold the optimizer's secrets."""
  if not source.name.endswith('.weights.h5'):
    return []
  copy = folder / source.name
  if not copy.exists() or not copy.samefile(source):
    shutil.copyfile(source, copy)
  return [copy]
