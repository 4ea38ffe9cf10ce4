# SPDX-License-Identifier: Apache-2.0
"""`tfdp audit`: bounds the privacy loss from below by an attack or an inspection.

Without --white-box it trains a language model with canaries and ends with status 1 if
what the final model knows refutes the plan's epsilon. With --white-box it looks at every
step of the optimizer on a model of its own, and ends with status 3 if the claim is violated.
"""

from __future__ import annotations

import json
from typing import Any, TYPE_CHECKING

from tfdp_adaptive import errors
from tfdp_adaptive.cli import options
from tfdp_adaptive.cli import text_options
from tfdp_adaptive.cli import white_box
from tfdp_adaptive.examples import audit
from tfdp_adaptive.examples import compare
from tfdp_adaptive.examples import settings as settings_lib
from tfdp_adaptive.examples import tasks

if TYPE_CHECKING:
  import argparse

VIOLATED = 3


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
  parser = subparsers.add_parser('audit', description=__doc__)
  group = parser.add_argument_group('audit')
  group.add_argument('--white-box', action='store_true',
                     help='inspect every step, noise row and batch; needs seconds and no data')
  group.add_argument('--canaries', type=options.positive_int, metavar='N',
                     help='records included at random; more give a stronger bound (default: '
                          f'1000 training sentences; {white_box.CANARIES} with --white-box)')
  group.add_argument('--confidence', type=options.confidence, default=.95, metavar='P',
                     help='probability of not refuting a correct claim (default: %(default)s)')
  group.add_argument('--unit', choices=('example', 'user'), default='example',
                     help='unit of privacy, with --white-box; a user has several examples')
  group.add_argument('--json', action='store_true', help='print JSON')
  group = parser.add_argument_group('training')
  group.add_argument('--steps', type=options.positive_int, metavar='N',
                     help=f'steps (default: {compare.STEPS}; {white_box.STEPS} with --white-box)')
  group.add_argument('--batch-size', type=options.positive_int, metavar='N',
                     help='expected number of records per step (default: 512; '
                          f'{white_box.BATCH_SIZE} with --white-box)')
  text_options.add_text_arguments(parser)
  text_options.add_privacy_arguments(parser, f'{compare.EPSILON:g}')
  text_options.add_one_method_arguments(parser, settings_lib.CENTRALIZED, white_box.METHODS)
  return parser


def run(arguments: argparse.Namespace) -> int:
  if arguments.white_box:
    return VIOLATED * white_box.run(arguments)
  if arguments.unit != 'example':
    raise errors.UsageError('--unit user needs --white-box: sentences have no users here')
  method = settings_lib.CENTRALIZED.get(arguments.method)
  if method is None:
    raise errors.UsageError(f'--method {arguments.method} needs --white-box: there are recorded '
                            f'settings for {", ".join(settings_lib.CENTRALIZED)} only')
  arguments.steps = arguments.steps or compare.STEPS
  arguments.batch_size = arguments.batch_size or 512
  settings = options.changed(method.settings, arguments.set)
  task = tasks.load(text_options.text(arguments))
  report = audit.run(task, text_options.by_sentence(arguments), method, settings,
                     arguments.canaries or 1000, arguments.confidence)
  if arguments.json:
    print(json.dumps({
        'method': method.label, 'claimed_epsilon': report.claimed,
        'epsilon_lower': report.epsilon_lower, 'delta': report.delta,
        'confidence': report.confidence, 'canaries': report.canaries, 'guesses': report.guesses,
        'correct': report.correct, 'auc': report.auc, 'provable': report.provable,
        'violated': report.violated}, indent=1))
  else:
    print(f'{method.label}, {task.name}\n{report}')
  return int(report.violated)
