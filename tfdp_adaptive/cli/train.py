# SPDX-License-Identifier: Apache-2.0
"""`tfdp train`: trains one private model and saves it with its privacy statement.

The model predicts the next word of a sentence from the three words before it: an embedding of
width 16, a hidden layer of 16 units, and a softmax over the vocabulary. With 1,000 words it has
33,000 parameters. To train your own model, use the library in Python.

To resume an interrupted run, repeat the command with the same --out. The folder `train.state/`
in it is secret. It is removed at the end of the run.
"""

import argparse

from tfdp_adaptive.cli import options
from tfdp_adaptive.cli import text_options
from tfdp_adaptive.examples import settings as settings_lib
from tfdp_adaptive.examples import train


def add_arguments(parser: argparse.ArgumentParser) -> None:
  text_options.add_arguments(parser, 'centralized training')
  parser.add_argument('--save-every', type=options.positive_int, default=100, metavar='N',
                      help='steps between two saved states (default: %(default)s)')
  text_options.add_arguments(parser, 'data', 'output', 'privacy')
  text_options.add_one_method_arguments(parser, settings_lib.CENTRALIZED)
  parser.add_argument(
      '--examples-per-user', type=options.positive_int, metavar='M',
      help='protect users instead of sentences, with at most M sentences of a `client` per step, '
           'each sampled and clipped separately (experimental, see docs/state.md)')


def run(arguments: argparse.Namespace) -> None:
  settings = options.changed(settings_lib.CENTRALIZED[arguments.method].settings, arguments.set)
  with text_options.report(arguments, 'train') as report:
    train.run(report, text_options.text(arguments), text_options.by_sentence(arguments),
              arguments.method, settings, arguments.save_every, arguments.examples_per_user)
