# SPDX-License-Identifier: Apache-2.0
"""`tfdp verify`: checks a privacy card, and lists what cannot be checked.

Epsilon is computed again from the card's terms, by dp_accounting's own accountant. The exit
status is 0 if nothing is wrong, 3 if the card is wrong, and 2 if it cannot be read.
"""

import argparse
import contextlib
import logging
import pathlib
import signal
import threading
import types
from typing import Iterator, Optional

from tfdp_adaptive import errors
from tfdp_adaptive.cli import options

WRONG = 3  # Exit status.
_SECONDS = 600


def add_arguments(parser: argparse.ArgumentParser) -> None:
  add = parser.add_argument
  add('card', metavar='CARD', type=options.path, help='the card to check: card.json, or its folder')
  add('--weights', type=options.path, metavar='PATH',
      help='the .keras, .weights.h5 or .npz file, or the folder of `model.export`, to compare with '
           'the card')
  add('--public-key', type=options.path, metavar='KEY',
      help='the public key (PEM) that the folder of the card must be signed with; needs the extra '
           '`sign`')
  add('--opened', type=options.path, metavar='COINS',
      help='the SECRET file of coins of a run, to draw its batches again; needs --digests')
  add('--digests', type=options.path, metavar='FILE',
      help='the digests of the records of its batches, which the run wrote (digests_to=FILE)')
  add('--seconds', type=options.positive_int, default=_SECONDS, metavar='N',
      help='stop the check after N seconds (default: %(default)s)')
  add('--json', action='store_true', help='print JSON')


def run(arguments: argparse.Namespace) -> int:
  # `--help` does not wait for SciPy, nor a check without batches for TensorFlow.
  from tfdp_adaptive.report import card_checks  # pylint: disable=import-outside-toplevel
  from tfdp_adaptive.report import card_json  # pylint: disable=import-outside-toplevel
  from tfdp_adaptive.report import signing  # pylint: disable=import-outside-toplevel
  if (arguments.opened is None) != (arguments.digests is None):
    raise errors.UsageError('--opened and --digests go together.')
  logging.getLogger('absl').setLevel(logging.ERROR)  # dp_accounting's advice to its callers.
  with _limit(arguments.seconds), errors.usage():
    try:
      card = card_json.read(arguments.card)
      findings = card_checks.check(card, arguments.weights)
      if arguments.public_key is not None:
        findings.append(signing.check(_folder(arguments.card), arguments.public_key))
      if arguments.opened is not None:
        from tfdp_adaptive.report import replay  # pylint: disable=import-outside-toplevel
        findings += replay.check(card, arguments.opened, arguments.digests)
    except card_json.WrongCard as error:
      findings = [card_checks.Finding(card_checks.WRONG, str(error))]
  wrong = sum(one.kind == card_checks.WRONG for one in findings)
  if arguments.json:
    print(options.to_json({'wrong': wrong, 'findings': findings}))
  else:
    order = (card_checks.WRONG, card_checks.VERIFIED, card_checks.WORD, card_checks.UNKNOWN)
    for one in sorted(findings, key=lambda one: order.index(one.kind)):
      print(f'{one.kind + ":":17} {one.text}')
    print(f'\nThe card is wrong in {wrong} point(s).' if wrong else
          '\nNothing that can be checked on this card is wrong.')
  return WRONG if wrong else 0


def _folder(card: pathlib.Path) -> pathlib.Path:
  return card.absolute() if card.is_dir() else card.absolute().parent


@contextlib.contextmanager
def _limit(seconds: int) -> Iterator[None]:
  """Raises after `seconds` of a check; a card can ask for any amount of work."""
  if threading.current_thread() is not threading.main_thread():
    yield  # Signals belong to the main thread.
    return

  def stop(number: int, frame: Optional[types.FrameType]) -> None:
    raise errors.UsageError(f'The card takes more than {seconds} seconds to check. '
                            'Give --seconds for more.')

  before = signal.signal(signal.SIGALRM, stop)
  signal.alarm(min(seconds, 10**8))
  try:
    yield
  finally:
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
