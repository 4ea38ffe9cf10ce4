# SPDX-License-Identifier: Apache-2.0
"""`tfdp tune`: settings chosen privately, one epsilon for all runs, the best one saved.

The number of runs is random and secret, as is how they end; a progress bar would tell of
both. What is printed at the end may be known at the epsilon that is printed with it, but
for the exact numbers on held-out text. A search that was interrupted goes on when the
command is given again with the same --out; `tune.state/` in it is secret until the end.
"""

import argparse
import math
import sys
from typing import Any, Dict, List

import numpy as np
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive.cli import compare
from tfdp_adaptive.cli import language_model
from tfdp_adaptive.cli import options
from tfdp_adaptive.cli import report as report_lib
from tfdp_adaptive.cli import settings as settings_lib
from tfdp_adaptive.cli import tasks
from tfdp_adaptive.cli import train
from tfdp_adaptive.data import next_word

_BATCH = 512


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
  parser = subparsers.add_parser('tune', description=__doc__)
  compare.add_arguments(parser)
  group = parser.add_argument_group('search')
  group.add_argument('--runs', type=_runs, default=10.0, metavar='K',
                     help='expected number of runs, at least 1 (default: %(default)g)')
  group.add_argument('--shape', type=_shape, default=1.0, metavar='ETA',
                     help='of the distribution of their number: 0 logarithmic, the cheapest, 1 '
                          'geometric, more is more even (default: %(default)g)')
  group.add_argument('--score-noise', type=options.positive_float, default=10.0, metavar='S',
                     help='noise on the score of a run, in validation sentences (default: '
                          '%(default)g)')
  group.add_argument('--grid', action='append', default=[], metavar='NAME=V,V,...',
                     help='values of a setting of the method; may be repeated (default: the '
                          'recorded grid)')
  options.add_data_arguments(parser)
  options.add_privacy_arguments(parser, f'{compare.EPSILON:g}')
  options.add_one_method_arguments(parser, settings_lib.CENTRALIZED)
  parser.set_defaults(tune=False)
  return parser


def run(arguments: argparse.Namespace) -> None:
  method = settings_lib.CENTRALIZED[arguments.method]
  fixed = options.settings(method, arguments.set)
  grid = _grid(arguments.grid, method)
  with report_lib.Report(arguments.out, 'tune') as report:
    task = tasks.load(arguments)
    report.describe(task, arguments)
    search = tfdp.privacy.Search(arguments.runs, arguments.shape, arguments.score_noise)
    plan = compare.make_plan(arguments, task, search=search)
    report.begin({'plan': plan.to_json(), 'method': arguments.method, 'settings': fixed,
                  'grid': grid, **task.identity()})
    print(f'Tuning {method.label} on {math.prod(map(len, grid.values()))} settings; how many runs '
          'it takes is secret.', file=sys.stderr)
    best = tfdp.tune(
        lambda settings, plan: compare.prepare(task, method, {**fixed, **settings}, plan)[0],
        grid, task.train, plan, validation=task.validation, score=sentence_scores,
        directory=report.unfinished / 'search')
    train.publish(best.model, task, report)
    report.state(*report_lib.preamble(task, arguments, _CHOSEN), best.statement())
    report.card(best.model.privacy_card(words={'the data': ' '.join(task.notes)}))
    report.add(report_lib.Row('public word frequencies', compare.PART, *task.baseline))
    loss, accuracy = language_model.Evaluator(best.model, task.test)()
    report.add(report_lib.Row(
        method.label, compare.PART, loss, accuracy, steps=plan.steps,
        settings={**fixed, **(best.settings or {})}, epsilon=plan.epsilon(),
        delta=plan.target_delta, unit='sentence'))
    report.finish(arguments.json)


_CHOSEN = ('Settings were chosen by this command, from a grid that was fixed before, by runs that '
           'the guarantee below counts, on validation sentences that it covers, too.')


def sentence_scores(model: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray:
  """[n]: the share of each sentence's words that the model finds."""
  scores = []
  for start in range(0, len(y), _BATCH):
    logits = model(tf.convert_to_tensor(x[start:start + _BATCH]), training=False)
    targets = np.asarray(y[start:start + _BATCH])
    words = targets != next_word.PADDING
    right = words & (np.asarray(tf.argmax(logits, -1)) == targets)
    scores.append(right.sum(-1) / np.maximum(words.sum(-1), 1))
  return np.concatenate(scores)


def _grid(changes: List[str], method: settings_lib.Method) -> Dict[str, List[float]]:
  """`{name: values}` of the command line, or the recorded one."""
  grid: Dict[str, List[float]] = {}
  for change in changes:
    name, _, values = change.partition('=')
    if name not in method.settings:
      raise options.UsageError(
          f'--grid must name one of {", ".join(method.settings)}. Received: {change}')
    try:
      grid[name] = [options.positive_float(value) for value in values.split(',')]
    except argparse.ArgumentTypeError as error:
      raise options.UsageError(f'--grid {name} {error}') from error
  return grid or {name: list(values) for name, values in method.grid.items()}


def _runs(text: str) -> float:
  return options.number(float, text, lambda value: 1 <= value <= 1e4, 'a number from 1 to 10000')


def _shape(text: str) -> float:
  return options.number(float, text, lambda value: 0 <= value <= 100, 'a number from 0 to 100')
