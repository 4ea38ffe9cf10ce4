# SPDX-License-Identifier: Apache-2.0
"""One private model, saved with what may be said of it; a run that was interrupted goes on."""

from __future__ import annotations

import sys
from typing import Any, Dict, Optional, TYPE_CHECKING

import tfdp_adaptive as tfdp
from tfdp_adaptive import runfolder

from . import compare
from . import language_model
from . import report as report_lib
from . import settings as settings_lib
from . import tasks
from . import training

if TYPE_CHECKING:
  from tfdp_adaptive import compat


def run(
    report: report_lib.Report, text: tasks.Text, target: tasks.Target, name: str,
    settings: Dict[str, Any], save_every: int, examples_per_user: Optional[int] = None) -> None:
  """Trains with the method of that name, and these settings, into the report.

  Args:
    report: Of the run.
    text: Sentences and words.
    target: The run that is asked for; its batches count sentences.
    name: Of the method.
    settings: Of the method's optimizer.
    save_every: Steps between two saved states.
    examples_per_user: None protects single sentences. A number protects users: at most so many
      sentences of each can take part in a step.
  """
  method = settings_lib.CENTRALIZED[name]
  task = tasks.load(text, need_client=examples_per_user is not None)
  fields: Dict[str, Any] = {}
  if examples_per_user is not None:
    with tfdp.experimental('PoissonExamples'):
      fields = dict(unit='user', sampling=tfdp.sampling.PoissonExamples(
          examples_per_user=examples_per_user))
  plan = compare.make_plan(task, target, **fields)
  model, batches, optimizer = compare.prepare(task, method, settings, plan)
  report.begin({'plan': optimizer.plan.to_json(), 'method': name, 'settings': settings,
                **task.identity()})
  try:
    measured = _train(model, batches, task, method, report, save_every)
    publish(model, task, report)
  except KeyboardInterrupt:
    print(f'\nGive the same command with --out {report.path("")} to go on.', file=sys.stderr)
    raise
  report.describe(task, False)
  conclude(model, task, method, report, measured, settings, optimizer.statement(),
           epsilon=optimizer.epsilon(), delta=plan.target_delta,
           unit='sentence' if examples_per_user is None else 'user')


def conclude(
    model: compat.Model, task: tasks.Task, method: settings_lib.Method, report: report_lib.Report,
    measured: report_lib.Run, settings: Dict[str, Any], statement: str, **guarantee: Any) -> None:
  """Reports the one model of a run."""
  report.state(statement)
  report.card(model.privacy_card(words={'the data': ' '.join(task.notes)}))
  report.add(report_lib.Row('public word frequencies', compare.PART, *task.baseline))
  report.add_run(method, compare.PART, measured, settings, **guarantee)
  report.finish()


def _train(
    model: compat.Model, batches: Any, task: tasks.Task, method: settings_lib.Method,
    report: report_lib.Report, save_every: int) -> report_lib.Run:
  """Takes the steps that are left."""
  folder = report.unfinished / 'backup'
  recorder = training.Recorder(
      model.optimizer.plan.steps, language_model.Evaluator(model, task.test), method.label,
      kept=report.unfinished / 'curve')

  class Backup(tfdp.callbacks.BackupAndRestore):
    """Saves before every look at the model: what was shown is not trained again, otherwise."""

    def on_train_begin(self, logs: Any = None) -> None:
      try:
        super().on_train_begin(logs)
      except OSError:
        raise
      except Exception as error:  # Of foreign files: whatever Keras likes.
        raise report_lib.unreadable(folder, error) from error

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
      if recorder.evaluates(epoch + 1) or (epoch + 1) % save_every == 0:
        super().on_epoch_end(epoch, logs)

  return training.fit(model, batches, recorder, Backup(folder, delete_checkpoint=False))


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
