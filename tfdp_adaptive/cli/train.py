# SPDX-License-Identifier: Apache-2.0
"""`tfdp train`: one private model, saved with what may be said of it.

A run that was interrupted goes on when the command is given again with the same
--out. What it keeps there for that (`train.state/`) is secret and is removed at the end.
"""

from __future__ import annotations

import sys
from typing import Any, Optional, TYPE_CHECKING

from tfdp_adaptive import runfolder
from tfdp_adaptive.cli import checkpoint
from tfdp_adaptive.cli import compare
from tfdp_adaptive.cli import language_model
from tfdp_adaptive.cli import options
from tfdp_adaptive.cli import report as report_lib
from tfdp_adaptive.cli import settings as settings_lib
from tfdp_adaptive.cli import tasks
from tfdp_adaptive.cli import training

if TYPE_CHECKING:
  import argparse

  from tfdp_adaptive import compat


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
  parser = subparsers.add_parser('train', description=__doc__)
  compare.add_arguments(parser)
  parser.add_argument('--save-every', type=options.positive_int, default=100, metavar='N',
                      help='steps between two saved states (default: %(default)s)')
  options.add_data_arguments(parser)
  options.add_privacy_arguments(parser, f'{compare.EPSILON:g}')
  options.add_one_method_arguments(parser, settings_lib.CENTRALIZED)
  parser.set_defaults(tune=False)
  return parser


def run(arguments: argparse.Namespace) -> None:
  method = settings_lib.CENTRALIZED[arguments.method]
  settings = options.settings(method, arguments.set)
  with report_lib.Report(arguments.out, 'train') as report:
    task = tasks.load(arguments)
    report.describe(task, arguments)
    plan = compare.make_plan(arguments, task)
    model, _, optimizer = compare.prepare(task, method, settings, plan)
    report.begin({'plan': optimizer.plan.to_json(), 'method': arguments.method,
                  'settings': settings, **task.identity()})
    try:
      measured = _train(model, task, method, report, arguments.save_every)
      publish(model, task, report)
    except KeyboardInterrupt:
      print(f'\nGive the same command with --out {report.path("")} to go on.', file=sys.stderr)
      raise
    report.state(*report_lib.preamble(task, arguments), optimizer.statement())
    report.card(model.privacy_card(words={'the data': ' '.join(task.notes)}))
    report.add(report_lib.Row('public word frequencies', compare.PART, *task.baseline))
    report.add(report_lib.Row(
        method.label, compare.PART, measured.loss, measured.accuracy, steps=plan.steps,
        seconds_per_step=measured.seconds_per_step, settings=settings, curve=measured.curve,
        epsilon=optimizer.epsilon(), delta=plan.target_delta, unit='sentence'))
    report.finish(arguments.json)


def _train(
    model: compat.Model, task: tasks.Task, method: settings_lib.Method, report: report_lib.Report,
    save_every: Optional[int]) -> training.Run:
  """Takes the steps that are left."""
  plan = model.optimizer.plan
  saved = checkpoint.Checkpoint(report.unfinished, model)
  done, curve = saved.restore()
  if not done:
    saved.save(())  # Where no state can be kept, nothing is trained.
  recorder = training.Recorder(
      plan.steps, language_model.Evaluator(model, task.test), method.label, done=done, curve=curve,
      save=saved.save, save_every=save_every)
  left = plan.batches(task.train, start_step=done) if done < plan.steps else None
  return training.fit(model, left, recorder)


def publish(model: compat.Model, task: tasks.Task, report: report_lib.Report) -> None:
  """Saves the weights in a plain model: no optimizer, so nothing secret."""
  plain = language_model.build(
      task.num_ids, log_frequencies=task.log_frequencies)
  plain.set_weights(model.get_weights())
  path = report.file('model.keras')
  new = path.with_name('new.model.keras')  # The suffix says which format.
  try:
    plain.save(new)
    new.replace(path)
  except BaseException:
    new.unlink(missing_ok=True)
    raise
  runfolder.replace(
      report.file('vocabulary.txt'), ('\n'.join(task.vocabulary) + '\n').encode(), 0o666)
