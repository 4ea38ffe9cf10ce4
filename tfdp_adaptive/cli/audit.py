# SPDX-License-Identifier: Apache-2.0
"""`tfdp audit`: bounds the privacy loss from below by an attack or an inspection.

Without --white-box it trains a language model with canaries and ends with status 1 if
what the final model knows refutes the plan's epsilon. With --white-box it looks at every
step of the optimizer on a model of its own, and ends with status 3 if the claim is violated.
"""

import argparse

from tfdp_adaptive import errors
from tfdp_adaptive.cli import options
from tfdp_adaptive.cli import text_options
from tfdp_adaptive.examples import audit
from tfdp_adaptive.examples import compare
from tfdp_adaptive.examples import settings as settings_lib
from tfdp_adaptive.examples import tasks
from tfdp_adaptive.examples import white_box

VIOLATED = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
  text_options.add_arguments(parser, 'data', 'privacy')
  text_options.add_one_method_arguments(parser, settings_lib.CENTRALIZED, white_box.METHODS)


def run(arguments: argparse.Namespace) -> int:
  if arguments.white_box:
    return _white_box(arguments)
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
    fields = ('epsilon_lower', 'delta', 'confidence', 'canaries', 'guesses', 'correct', 'auc',
              'provable', 'violated')
    print(options.to_json({'method': method.label, 'claimed_epsilon': report.claimed,
                           **{name: getattr(report, name) for name in fields}}))
  else:
    print(f'{method.label}, {task.name}\n{report}')
  return int(report.violated)


def _white_box(arguments: argparse.Namespace) -> int:
  changes = options.changed(
      white_box.settings_of(arguments.method), arguments.set, tuple(white_box.FOLLOWED))
  report = white_box.report(
      arguments.method, changes=changes, epsilon=arguments.epsilon, delta=arguments.delta,
      canaries=arguments.canaries or white_box.CANARIES, confidence=arguments.confidence,
      steps=arguments.steps or white_box.STEPS, unit=arguments.unit,
      batch_size=arguments.batch_size or white_box.BATCH_SIZE)
  options.show(report, arguments.json)
  return VIOLATED * report.violated
