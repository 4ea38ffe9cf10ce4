# SPDX-License-Identifier: Apache-2.0
"""The same model with each private optimizer, sentence by sentence."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Dict, List, Mapping, Tuple

import tensorflow as tf

import tfdp_adaptive as tfdp

from . import language_model
from . import report as report_lib
from . import settings as settings_lib
from . import tasks
from . import training

PART = 'centralized'
STEPS, EPSILON = 150, 4.0  # By default.


def run(
    report: report_lib.Report, text: tasks.Text, target: tasks.Target,
    methods: Mapping[str, settings_lib.Method], tune: bool) -> None:
  """Trains with every method, on the text, into the report."""
  task = tasks.load(text)
  plan = make_plan(task, target)
  report.describe(task, tune)
  train_all(task, plan, methods, report, tune)
  report.finish()


def train_all(
    task: tasks.Task, plan: tfdp.PrivacyPlan, methods: Mapping[str, settings_lib.Method],
    report: report_lib.Report, tuned: bool) -> None:
  """Trains with every method and reports it."""
  report.add(report_lib.Row('public word frequencies', PART, *task.baseline))
  entries: List[Any] = []  # Runs of all private models.
  for method in methods.values():
    train = functools.partial(_train, task, method, plan, entries)
    settings, _ = settings_lib.settled(
        method, tuned, lambda settings: train(settings, task.validation, points=1)[0].loss)
    measured, private = train(settings, task.test)
    guarantee = {}
    if private:
      guarantee = dict(epsilon=private.plan.epsilon(rule=private.rule), delta=plan.target_delta,
                       unit='sentence')
      report.state(f'== {method.label} ({PART}) ==', private.statement())
    report.add_run(method, PART, measured, settings, **guarantee)
  report.state_together(PART, entries)


def _train(
    task: tasks.Task, method: settings_lib.Method, plan: tfdp.PrivacyPlan, entries: List[Any],
    settings: Dict[str, Any], held_out: tasks.Examples,
    points: int = training.POINTS) -> Tuple[report_lib.Run, Any]:
  """`(Run, private optimizer or None)`; adds the run of a private model to `entries`."""
  model, batches, private = prepare(task, method, settings, plan)
  run = training.fit(model, batches, training.Recorder(
      plan.steps, language_model.Evaluator(model, held_out), method.label, points))
  entries += private.ledger.entries if private else ()
  return run, private


def make_plan(task: tasks.Task, target: tasks.Target, **fields: Any) -> tfdp.PrivacyPlan:
  """The plan of all private methods, see `Target.plan`."""
  return target.plan(
      len(task.train[0]), '--batch-size must be at most the number of training sentences', **fields)


def prepare(
    task: tasks.Task, method: settings_lib.Method, settings: Dict[str, Any],
    plan: tfdp.PrivacyPlan) -> Tuple[Any, Any, Any]:
  """(compiled model, its batches, its optimizer if that is private)."""
  model = language_model.build(task.num_ids, log_frequencies=task.log_frequencies)
  settings = dict(settings)
  if method.optimizer is None:
    private, optimizer = None, tf.keras.optimizers.Adam(**settings)
    batches = tf.data.Dataset.from_tensor_slices(task.train).shuffle(len(task.train[0]))
    batches = batches.repeat().batch(int(plan.batch_size)).take(plan.steps)
  else:
    plan = dataclasses.replace(plan, l2_norm_clip=settings.pop('l2_norm_clip'))
    private = optimizer = getattr(tfdp, method.optimizer)(plan=plan, **settings)
    model = tfdp.make_private(model)
    batches = plan.batches(task.train, users=task.users if plan.unit == 'user' else None)
  model.compile(optimizer=optimizer, loss=language_model.sentence_loss)
  return model, batches, private

