# SPDX-License-Identifier: Apache-2.0
"""The same model over users, who keep their text, with a private server.

A run that was interrupted, goes on in the folder of its report.
"""

from __future__ import annotations

import collections
import dataclasses
import sys
from typing import Any, Dict, List, Mapping, Optional, Tuple, TYPE_CHECKING

import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import errors

from . import language_model
from . import report as report_lib
from . import settings as settings_lib
from . import tasks
from . import training

if TYPE_CHECKING:
  import pathlib

PART = 'federated'
ROUNDS, EPSILON = 50, 10.0  # By default.
_LOCAL_BATCH, _LOCAL_SENTENCES = 16, 64


def run(
    report: report_lib.Report, text: tasks.Text, target: tasks.Target,
    methods: Mapping[str, settings_lib.Method], tune: bool) -> None:
  """Trains with every method, on the text, into the report."""
  task = tasks.load(text, need_client=True)
  plan = make_plan(task, target)
  report.describe(task, tune)
  train_all(task, plan, methods, report, tune)
  report.finish()


def train_all(
    task: tasks.Task, plan: tfdp.PrivacyPlan, methods: Mapping[str, settings_lib.Method],
    report: report_lib.Report, tuned: bool) -> None:
  """Trains with every method and reports it."""
  report.begin(task.identity())
  report.add(report_lib.Row('public word frequencies', PART, *task.baseline))
  entries: List[Any] = []  # Runs of all models, also for choosing settings.

  def run_one(*arguments: Any, **more: Any) -> Any:
    result = train(task, method, plan, *arguments, **more)
    entries.extend(result[1].weights.ledger.entries)
    return result

  for method in methods.values():
    settings, _ = settings_lib.settled(
        method, tuned, lambda settings: run_one(settings, task.validation, points=1)[0].loss)
    try:
      measured, simulation, process = run_one(
          settings, task.test, out=report.unfinished / method.optimizer)
    except tfdp.federated.WorkerLostError as error:
      raise errors.UsageError(
          f'{error} Give the same command with --out {report.unfinished.parent} to go on.'
      ) from error
    except tfdp.federated.SavedRunError as error:
      raise errors.UsageError(str(error)) from error
    report.state(f'== {method.label} ({PART}) ==', simulation.statement)
    print('{}: {rounds_per_second:.2f} rounds/s, {clients_per_second:.1f} clients/s, '
          '{state_bytes:,} bytes of server state'.format(method.label, **simulation.speed),
          file=sys.stderr)
    report.add_run(method, PART, measured, settings, delta=plan.target_delta, unit='client',
                   epsilon=process.plan.epsilon(rule=process.rule))
  report.state_together(PART, entries, trust=simulation.described['trust'],
                        facts=simulation.described['facts'])


def make_plan(task: tasks.Task, target: tasks.Target) -> tfdp.PrivacyPlan:
  """The plan of all methods, see `Target.plan`."""
  return target.plan(
      len(task.clients), '--clients-per-round must be at most the number of training clients',
      unit='user')


def train(
    task: tasks.Task, method: settings_lib.Method, plan: tfdp.PrivacyPlan,
    settings: Dict[str, Any], held_out: tasks.Examples, points: int = training.POINTS,
    out: Optional[pathlib.Path] = None) -> Tuple[report_lib.Run, Any, Any]:
  """One run; returns its `Run`, the simulation and the process."""
  settings = dict(settings)
  plan = dataclasses.replace(plan, l2_norm_clip=settings.pop('l2_norm_clip'))
  rates = settings.pop('server_learning_rate'), settings.pop('client_learning_rate')
  users = tfdp.federated.Users(
      {client: collections.OrderedDict(x=x, y=y) for client, (x, y) in task.clients.items()},
      batch_size=_LOCAL_BATCH, max_examples=_LOCAL_SENTENCES)

  def make_model() -> Any:
    return language_model.build(task.num_ids, log_frequencies=task.log_frequencies)

  process = tfdp.federated.build_private_fed_avg(
      make_model, loss=tfdp.federated.tasks.WordLoss(),
      client_optimizer_fn=lambda: tf.keras.optimizers.SGD(rates[1]),
      server_rule=getattr(tfdp.rules, method.optimizer)(**settings), plan=plan,
      server_learning_rate=rates[0])
  model = make_model()
  evaluator = language_model.Evaluator(model, held_out)
  start = evaluator()

  def evaluate(weights: Any) -> Dict[str, float]:
    weights.assign_weights_to(model)
    return dict(zip(('loss', 'accuracy'), evaluator()))

  simulation = tfdp.federated.simulate(
      process, users, evaluate=evaluate, rounds_per_evaluation=-(-plan.steps // points), out=out)
  return training.from_history(start, simulation), simulation, process
