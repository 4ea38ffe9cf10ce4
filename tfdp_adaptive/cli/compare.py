# SPDX-License-Identifier: Apache-2.0
"""`tfdp compare`: the same model with each private optimizer, sentence by sentence."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Mapping, Tuple, TYPE_CHECKING

import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive.cli import language_model
from tfdp_adaptive.cli import options
from tfdp_adaptive.cli import report as report_lib
from tfdp_adaptive.cli import settings as settings_lib
from tfdp_adaptive.cli import tasks
from tfdp_adaptive.cli import training

if TYPE_CHECKING:
  import argparse

PART = 'centralized'
STEPS = 150
EPSILON = 4.0


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
  parser = subparsers.add_parser('compare', description=__doc__)
  add_arguments(parser)
  options.add_data_arguments(parser)
  options.add_privacy_arguments(parser, f'{EPSILON:g}')
  options.add_method_arguments(parser, settings_lib.CENTRALIZED)
  return parser


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """What only this part has."""
  group = parser.add_argument_group('centralized training')
  group.add_argument('--steps', type=options.positive_int, default=STEPS, metavar='N',
                     help='training steps of every method (default: %(default)s)')
  group.add_argument('--batch-size', type=options.positive_int, default=256, metavar='N',
                     help='expected number of sentences per step (default: %(default)s)')


def run(arguments: argparse.Namespace) -> None:
  methods = options.chosen(arguments.methods, settings_lib.CENTRALIZED, '--methods')
  with report_lib.Report(arguments.out) as report:
    task = tasks.load(arguments)
    plan = make_plan(arguments, task)
    report.describe(task, arguments)
    report.state(*report_lib.preamble(task, arguments))
    train_all(arguments, task, plan, methods, report)
    report.finish(arguments.json)


def train_all(
    arguments: argparse.Namespace, task: tasks.Task, plan: tfdp.PrivacyPlan,
    methods: Mapping[str, settings_lib.Method], report: report_lib.Report) -> None:
  """Trains with every method and reports it."""
  report.add(report_lib.Row('public word frequencies', PART, *task.baseline))
  private_runs = 0
  for method in methods.values():
    settings = method.settings
    if arguments.tune:
      settings, tried = tune(task, method, plan)
      private_runs += tried if method.optimizer else 0
    model, batches, private = prepare(task, method, settings, plan)
    measured = training.fit(model, batches, training.Recorder(
        plan.steps, language_model.Evaluator(model, task.test), method.label))
    guarantee = {}
    if private:
      guarantee = dict(epsilon=private.plan.epsilon(rule=private.rule), delta=plan.target_delta,
                       unit='sentence')
      report.state(f'== {method.label} ({PART}) ==', private.plan.statement(rule=private.rule))
      private_runs += 1
    report.add(report_lib.Row(
        method.label, PART, measured.loss, measured.accuracy, steps=plan.steps,
        seconds_per_step=measured.seconds_per_step, settings=settings, curve=measured.curve,
        **guarantee))
  report.state_together(PART, plan, private_runs)


def make_plan(
    arguments: argparse.Namespace, task: tasks.Task, **fields: Any) -> tfdp.PrivacyPlan:
  """The plan of all private methods; each puts its own clip norm in.

  Args:
    arguments: Of the command line.
    task: Whose training sentences are the population.
    **fields: More of the plan.

  Raises:
    options.UsageError: The command line asks for a plan that cannot be.
  """
  population_size = len(task.train[0])
  if arguments.batch_size > population_size:
    raise options.UsageError(
        f'--batch-size must be at most the number of training sentences, {population_size}. '
        f'Received: {arguments.batch_size}')
  return options.calibrate(
      target_epsilon=arguments.epsilon or EPSILON,
      target_delta=arguments.delta or options.default_delta(population_size),
      population_size=population_size, batch_size=arguments.batch_size, steps=arguments.steps,
      l2_norm_clip=1.0, **fields)


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
    batches = plan.batches(task.train)
  model.compile(optimizer=optimizer, loss=language_model.sentence_loss)
  return model, batches, private


def tune(
    task: tasks.Task, method: settings_lib.Method,
    plan: tfdp.PrivacyPlan) -> Tuple[Dict[str, Any], int]:
  """(settings of least validation loss, number of runs) over the method's grid."""

  def validation_loss(settings: Dict[str, Any]) -> float:
    model, batches, _ = prepare(task, method, settings, plan)
    evaluate = language_model.Evaluator(model, task.validation)
    return training.fit(model, batches, training.Recorder(
        plan.steps, evaluate, method.label, points=1)).loss

  return settings_lib.search(method, validation_loss)
