"""`tfdp audit`: trains with canaries and bounds the privacy that was lost from below.

Ends with status 1 if the bound refutes the plan's epsilon.
"""

import json

import numpy as np

import tfdp_adaptive as tfdp
from tfdp_adaptive.cli import compare
from tfdp_adaptive.cli import options
from tfdp_adaptive.cli import settings as settings_lib
from tfdp_adaptive.cli import tasks


def add_parser(subparsers):
  parser = subparsers.add_parser('audit', description=__doc__)
  compare.add_arguments(parser)
  group = parser.add_argument_group('audit')
  group.add_argument('--canaries', type=options.positive_int, default=1000, metavar='N',
                     help='training sentences that get wrong next words and a coin each; more '
                          'prove more (default: %(default)s)')
  group.add_argument('--confidence', type=options.confidence, default=.95, metavar='P',
                     help='with which the bound is valid (default: %(default)s)')
  group.add_argument('--json', action='store_true', help='print JSON')
  options.add_text_arguments(parser)
  options.add_privacy_arguments(parser, f'{compare.EPSILON:g}')
  options.add_one_method_arguments(parser, settings_lib.CENTRALIZED)
  return parser


def run(arguments):
  method = settings_lib.CENTRALIZED[arguments.method]
  settings = options.settings(method, arguments.set)
  task = tasks.load(arguments)
  population_size = len(task.train[0])
  if not 2 <= arguments.canaries <= population_size:
    raise options.UsageError(f'--canaries must be from 2 to the number of training sentences, '
                             f'{population_size}. Received: {arguments.canaries}')
  model, _, optimizer = compare.prepare(
      task, method, settings, compare.make_plan(arguments, task))
  report = tfdp.audit.run(
      lambda: model, task.train, optimizer.plan, confidence=arguments.confidence,
      indices=np.random.default_rng().permutation(population_size)[:arguments.canaries])
  if arguments.json:
    print(json.dumps({
        'method': method.label, 'claimed_epsilon': report.claimed,
        'epsilon_lower': report.epsilon_lower, 'delta': report.delta,
        'confidence': report.confidence, 'canaries': report.canaries, 'guesses': report.guesses,
        'correct': report.correct, 'auc': report.auc, 'violated': report.violated}, indent=1))
  else:
    print(f'{method.label}, {task.name}\n{report}')
  return int(report.violated)
