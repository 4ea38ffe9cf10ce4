# SPDX-License-Identifier: Apache-2.0
"""`tfdp federated`: the same model over users, who keep their text, with a private server.

A run that was interrupted, or lost a worker, goes on when the command is given again
with the same --out. What it keeps there for that (`federated.state/`) is secret and is
removed at the end.
"""

from __future__ import annotations

import collections
import dataclasses
import sys
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple, TYPE_CHECKING

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
  import pathlib

PART = 'federated'
ROUNDS = 50
EPSILON = 10.0
_LOCAL_BATCH, _LOCAL_SENTENCES = 16, 64


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
  parser = subparsers.add_parser('federated', description=__doc__)
  add_arguments(parser)
  options.add_data_arguments(parser)
  options.add_privacy_arguments(parser, f'{EPSILON:g}')
  options.add_method_arguments(parser, settings_lib.FEDERATED)
  return parser


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """What only this part has."""
  group = parser.add_argument_group('federated training')
  group.add_argument('--rounds', type=options.positive_int, default=ROUNDS, metavar='N',
                     help='rounds of every method (default: %(default)s)')
  group.add_argument('--clients-per-round', type=options.positive_int, default=200, metavar='N',
                     help='expected number of clients per round (default: %(default)s)')
  group.add_argument('--workers', type=lambda text: text.split(','), default=[],
                     metavar='HOST:PORT,HOST:PORT',
                     help='running TFF workers to train on, through a tunnel, see README '
                          '(default: clients are trained in this process)')


def run(arguments: argparse.Namespace) -> None:
  methods = options.chosen(arguments.methods, settings_lib.FEDERATED, '--methods')
  require(arguments.workers)
  with report_lib.Report(arguments.out, PART) as report:
    task = tasks.load(arguments, need_client=True)
    plan = make_plan(arguments, task)
    report.describe(task, arguments)
    report.state(*report_lib.preamble(task, arguments))
    train_all(arguments, task, plan, methods, report)
    report.finish(arguments.json)


def require(workers: Sequence[str]) -> None:
  """Raises where there can be no workers at these addresses."""
  try:
    for address in workers:
      tfdp.federated.check_address(address)
  except (ImportError, ValueError) as error:
    raise options.UsageError(str(error)) from error


def train_all(
    arguments: argparse.Namespace, task: tasks.Task, plan: tfdp.PrivacyPlan,
    methods: Mapping[str, settings_lib.Method], report: report_lib.Report) -> None:
  """Trains with every method and reports it."""
  report.begin(task.identity())
  report.add(report_lib.Row('public word frequencies', PART, *task.baseline))
  private_runs = 0
  for method in methods.values():
    settings = method.settings
    if arguments.tune:
      def validated(settings: Dict[str, Any], method: settings_lib.Method = method) -> float:
        return train(
            task, method, settings, plan, task.validation, arguments.workers, points=1)[0].loss

      settings, tried = settings_lib.search(method, validated)
      private_runs += tried
    try:
      measured, simulation, process = train(
          task, method, settings, plan, task.test, arguments.workers,
          out=report.unfinished / method.optimizer)
    except tfdp.federated.WorkerLostError as error:
      raise options.UsageError(
          f'{error} Give the same command with --out {report.unfinished.parent} to go on.'
      ) from error
    except tfdp.federated.SavedRunError as error:
      raise options.UsageError(str(error)) from error
    private_runs += 1
    report.state(f'== {method.label} ({PART}) ==', simulation.statement)
    print('{}: {rounds_per_second:.2f} rounds/s, {clients_per_second:.1f} clients/s, '
          '{state_bytes:,} bytes of server state'.format(method.label, **simulation.speed),
          file=sys.stderr)
    report.add(report_lib.Row(
        method.label, PART, measured.loss, measured.accuracy,
        epsilon=process.plan.epsilon(rule=process.rule), delta=plan.target_delta, unit='client',
        seconds_per_step=measured.seconds_per_step, steps=plan.steps, settings=settings,
        curve=measured.curve))
  report.state_together(PART, plan, private_runs)


def make_plan(arguments: argparse.Namespace, task: tasks.Task) -> tfdp.PrivacyPlan:
  """The plan of all methods; each puts its own clip norm in.

  Raises:
    options.UsageError: The command line asks for a plan that cannot be.
  """
  population_size = len(task.clients)
  if arguments.clients_per_round > population_size:
    raise options.UsageError(
        f'--clients-per-round must be at most the number of training clients, {population_size}. '
        f'Received: {arguments.clients_per_round}')
  return options.calibrate(
      target_epsilon=arguments.epsilon or EPSILON,
      target_delta=arguments.delta or options.default_delta(population_size),
      population_size=population_size, batch_size=arguments.clients_per_round,
      steps=arguments.rounds, l2_norm_clip=1.0, unit='user')


def train(
    task: tasks.Task, method: settings_lib.Method, settings: Dict[str, Any], plan: tfdp.PrivacyPlan,
    held_out: Any, workers: Optional[Sequence[str]], points: int = training.POINTS,
    out: Optional[pathlib.Path] = None) -> Tuple[training.Run, Any, Any]:
  """One run; returns its `training.Run`, the simulation and the process."""
  settings = dict(settings)
  plan = dataclasses.replace(plan, l2_norm_clip=settings.pop('l2_norm_clip'))
  rates = settings.pop('server_learning_rate'), settings.pop('client_learning_rate')
  users = tfdp.federated.Users(
      {client: collections.OrderedDict(x=x, y=y) for client, (x, y) in task.clients.items()},
      batch_size=_LOCAL_BATCH, max_examples=_LOCAL_SENTENCES)

  class SentenceLoss(tf.keras.losses.Loss):

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
      return language_model.sentence_loss(y_true, y_pred)

  def make_model() -> Any:
    return language_model.build(task.num_ids, log_frequencies=task.log_frequencies)

  of_engine = dict(model_fn=make_model, loss=SentenceLoss(),
                   client_optimizer_fn=lambda: tf.keras.optimizers.SGD(rates[1]))
  if workers:
    from tfdp_adaptive.federated import tff  # pylint: disable=import-outside-toplevel
    of_engine = dict(client_optimizer_fn=tff.build_sgdm(rates[1]), model_fn=lambda: (
        tff.model_from_keras(make_model(), loss=SentenceLoss(),
                             input_spec=users.element_type_structure)))
  process = tfdp.federated.build_private_fed_avg(
      server_rule=getattr(tfdp.rules, method.optimizer)(**settings), plan=plan,
      server_learning_rate=rates[0], **of_engine)
  model = make_model()
  evaluator = language_model.Evaluator(model, held_out)
  start = evaluator()

  def evaluate(weights: Any) -> Dict[str, float]:
    weights.assign_weights_to(model)
    return dict(zip(('loss', 'accuracy'), evaluator()))

  simulation = tfdp.federated.simulate(
      process, users, evaluate=evaluate, rounds_per_evaluation=-(-plan.steps // points),
      workers=workers or (), out=out)
  return training.from_history(start, simulation), simulation, process
