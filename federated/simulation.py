"""Runs a private process over simulated users, as its plan says."""

import time
from typing import Any, Dict, List, NamedTuple

import tqdm

from tfdp_adaptive.federated import workers as workers_lib


class Simulation(NamedTuple):
  """What came out.

  Attributes:
    weights: `tff.learning.models.ModelWeights` after the last round.
    rounds: Number of rounds of the plan that are used up.
    history: One dict per round.
    statement: The privacy statement, for the rounds that were run.
    state: SECRET server state, noise still to come included.
  """

  weights: Any
  rounds: int
  history: List[Dict[str, float]]
  statement: str
  state: Any


def simulate(process, train_data, plan=None, rounds=None, *, evaluate=None,
             rounds_per_evaluation=10, workers=(), progress=True):
  """Trains on cohorts drawn as `process.plan` says.

  Args:
    process: A `PrivateFedAvg`.
    train_data: `tff.simulation.datasets.ClientData` or `Users`: whatever has
      `client_ids` and `create_tf_dataset_for_client`.
    plan: The process's plan, if it is to be said again.
    rounds: How many of the plan's rounds to run; all by default.
    evaluate: `weights -> {metric: value}`, see `evaluator`.
    rounds_per_evaluation: Rounds between evaluations; the last round is one.
    workers: Addresses of TFF workers, or nothing to start one here.
    progress: Whether to show a progress bar.

  Returns:
    A `Simulation`.
  """
  if plan is not None and plan != process.plan:
    raise ValueError('`plan` must be the plan the process was built with: noise and cohorts must '
                     'come from one plan. Leave it out.')
  plan = process.plan
  rounds = plan.steps if rounds is None else rounds
  if not 0 < rounds <= plan.steps:
    raise ValueError(f"`rounds` must be between 1 and the plan's {plan.steps}. "
                     f'Received: rounds={rounds}.')
  client_ids = list(train_data.client_ids)
  cohorts = plan.index_batches(len(client_ids))
  history = []
  with workers_lib.Workers(workers), tqdm.tqdm(
      total=rounds, disable=not progress, unit='round') as bar:
    state = process.initialize()
    for number in range(1, rounds + 1):
      start = time.monotonic()
      cohort = [train_data.create_tf_dataset_for_client(client_ids[i]) for i in next(cohorts)]
      state, _ = process.next(state, cohort)
      # The size of the cohort is left out: under add_remove it is private.
      row = {'round': number, 'seconds': time.monotonic() - start}
      if evaluate is not None and (number % rounds_per_evaluation == 0 or number == rounds):
        row.update(evaluate(process.get_model_weights(state)))
        bar.set_postfix({k: f'{v:.4g}' for k, v in row.items() if k not in ('round', 'seconds')})
      history.append(row)
      bar.update()
    weights = process.get_model_weights(state)
  return Simulation(weights, rounds, history, plan.statement(steps=rounds, rule=process.rule),
                    state)
