"""Runs a private process over simulated users, as its plan says."""

import contextlib
import json
import time
from typing import Any, Dict, List, NamedTuple
import warnings

import numpy as np
import tensorflow as tf
import tqdm

from tfdp_adaptive.federated import releases
from tfdp_adaptive.federated import rounds as rounds_lib
from tfdp_adaptive.federated import statement as statement_lib
from tfdp_adaptive.federated import storage
from tfdp_adaptive.federated import workers as workers_lib


class Simulation(NamedTuple):
  """What came out.

  Attributes:
    weights: `tff.learning.models.ModelWeights` after the last round.
    rounds: Number of rounds of the plan that are used up.
    history: One dict per round. What starts with `not_private/` is exact.
    statement: The privacy statement, for the rounds that were run.
    state: SECRET server state, noise still to come included.
    failed: {client: rounds in which it failed}; not private.
    speed: Rounds and clients per second of this call (the latter is exact: not
      private), and the bytes of the server's state.
  """

  weights: Any
  rounds: int
  history: List[Dict[str, float]]
  statement: str
  state: Any
  failed: Dict[str, int]
  speed: Dict[str, float]


def simulate(process, train_data, plan=None, rounds=None, *, evaluate=None,
             rounds_per_evaluation=10, max_epsilon=None, out=None, resume=True,
             release_managers=(), dropout=0.0, workers=(), progress=True, facts=()):
  """Trains on cohorts drawn as `process.plan` says.

  The state of a round is on disk before anything of it is released, so a run
  that was killed, at whatever point, goes on where it was when it is called
  again with the same `out`. It goes on with fresh keys: no noise is used twice.

  Args:
    process: A `PrivateFedAvg`.
    train_data: `tff.simulation.datasets.ClientData` or `Users`: whatever has
      `client_ids` and `create_tf_dataset_for_client`.
    plan: The process's plan, if it is to be said again.
    rounds: How many of the plan's rounds to run in all; all by default.
    evaluate: `weights -> {metric: value}`, see `evaluator`.
    rounds_per_evaluation: Rounds between evaluations; the last round is one.
    max_epsilon: Stop before epsilon at the plan's delta would exceed this.
    out: Folder for the state (SECRET), `metrics.csv` and `tensorboard/`; None to
      keep nothing.
    resume: Whether to go on with a run that is found in `out`; else it must be empty.
    release_managers: More `tff.program.ReleaseManager`s, keyed by the round.
    dropout: Probability that a client of the cohort does not answer (a straggler),
      whatever its data. Not claimed as amplification.
    workers: Addresses of TFF workers, or `Workers`; nothing to start one here.
    progress: Whether to show a progress bar.
    facts: Sentences for the statement, such as where the vocabulary came from.

  Returns:
    A `Simulation`.
  """
  if plan is not None and plan != process.plan:
    raise ValueError('`plan` must be the plan the process was built with: noise and cohorts must '
                     'come from one plan. Leave it out.')
  if not 0 <= dropout < 1:
    raise ValueError(f'`dropout` must be in [0, 1). Received: dropout={dropout}.')
  plan = process.plan
  rounds = _number_of_rounds(plan, process.rule, rounds, max_epsilon)
  client_ids = list(train_data.client_ids)
  with contextlib.ExitStack() as stack:
    folder = stack.enter_context(storage.RunFolder(out)) if out is not None else None
    release_managers = list(release_managers) + (releases.managers(folder.path) if folder else [])
    if not isinstance(workers, workers_lib.Workers):  # Else they are the caller's to close.
      workers = stack.enter_context(contextlib.closing(workers_lib.Workers(workers)))
    stack.enter_context(workers.installed())
    run = _Run(process, folder, resume)
    bar = stack.enter_context(tqdm.tqdm(
        total=rounds, initial=run.done, disable=not progress, unit='round'))
    step = tf.function(process.server.step)

    def report():
      """Releases what the last round, which is saved, gave."""
      row = dict(run.pending)
      if evaluate is not None and (run.done % rounds_per_evaluation == 0 or run.done == rounds):
        row.update(evaluate(run.weights()))
      releases.release(release_managers, row)
      run.history.append(row)
      shown = {k: v for k, v in row.items() if k not in ('round', 'seconds')}
      if shown:
        bar.set_postfix({k: f'{v:.4g}' for k, v in shown.items()})

    if run.pending:
      report()  # Saved, but perhaps not released when the run ended.
    clients, total_seconds, first = 0, 0.0, run.done
    cohorts = (plan.index_batches(len(client_ids), start_step=run.done)
               if run.done < rounds else ())
    while run.done < rounds:
      start = time.monotonic()
      cohort = _answering([client_ids[i] for i in next(cohorts)], dropout, plan.seed, run.done)
      outcome = rounds_lib.run(process, workers, run.state, cohort, train_data,
                               check_all_failed=not run.ever_succeeded)
      run.ever_succeeded |= len(cohort) > len(outcome.failed)
      if cohort and len(cohort) == len(outcome.failed):  # No error: ending would tell of them.
        warnings.warn(f'No client of round {run.done + 1} could be trained: it adds noise alone. '
                      'This warning is not private.')
      state, released = step(run.state, outcome.answers)
      run.advance(state, {**_floats(released), **_not_private(outcome.not_private)},
                  outcome.failed, time.monotonic() - start)
      clients += len(cohort)
      total_seconds += time.monotonic() - start
      report()
      bar.update()
  return Simulation(run.weights(), run.done, run.history,
                    statement_lib.statement(process, run.done, facts), run.state, run.failed,
                    _speed(run, run.done - first, clients, total_seconds))


class _Run:
  """State and history of a run, in memory and, where it has a folder, on disk."""

  def __init__(self, process, folder, resume):
    self._folder = folder
    self._settings = json.loads(json.dumps(
        {'plan': process.plan.to_json(), **process.settings}))
    self.history, self.failed, self.pending = [], {}, {}
    self.ever_succeeded = False
    self.state = tf.nest.map_structure(tf.constant, process.initialize())
    saved = folder.load(self.state) if folder is not None else None
    if saved is None:
      return
    if not resume:
      raise FileExistsError(f'There is a run in {folder.path}. Go on with it (resume=True), or '
                            'give another folder; its privacy loss would add to that of a new run.')
    state, record = saved
    if record['settings'] != self._settings:
      received, expected = _differences(*(
          {**settings, 'plan': json.loads(settings['plan'])}
          for settings in (self._settings, record['settings'])))
      raise storage.SavedRunError(
          f'The run in {folder.path} has another plan or other settings. Received: {received}. '
          f'Expected: {expected}. Give those to go on, or give another folder.')
    self.state = state if process.seed is not None else storage.with_fresh_keys(state)
    self.history, self.failed, self.pending = (
        record['history'], record['failed'], record['pending'])
    self.ever_succeeded = True

  @property
  def done(self):
    """Rounds of the plan that are used up."""
    return int(self.state.round)

  def weights(self):
    weights = self.state.global_model_weights
    return type(weights)(*tf.nest.map_structure(np.asarray, tuple(weights)))

  def advance(self, state, numbers, failed, seconds):
    """Takes over the next state and saves it, before anything of it is released."""
    self.state = state
    # The size of the cohort is left out: under add_remove it is private.
    self.pending = {'round': self.done, 'seconds': seconds, **numbers}
    for client in failed:
      self.failed[client] = self.failed.get(client, 0) + 1
    if self._folder is not None:
      self._folder.save(state, {
          'settings': self._settings, 'history': self.history, 'failed': self.failed,
          'pending': self.pending})


def _differences(left, right):
  """The two trees of settings without what they agree on."""
  if not (isinstance(left, dict) and isinstance(right, dict)):
    return left, right
  pairs = {key: _differences(left.get(key), right.get(key)) for key in {**left, **right}
           if left.get(key) != right.get(key)}
  return ({key: pair[0] for key, pair in pairs.items()},
          {key: pair[1] for key, pair in pairs.items()})


def _speed(run, rounds, clients, seconds):
  state_bytes = sum(np.asarray(x).nbytes for x in tf.nest.flatten(run.state))
  per_second = (lambda count: count / seconds) if seconds else (lambda count: 0.0)
  return {'rounds_per_second': per_second(rounds), 'clients_per_second': per_second(clients),
          'state_bytes': state_bytes}


def _number_of_rounds(plan, rule, rounds, max_epsilon):
  """All, or as many as asked for, or as many as the budget allows."""
  rounds = plan.steps if rounds is None else rounds
  if not 0 < rounds <= plan.steps:
    raise ValueError(f"`rounds` must be between 1 and the plan's {plan.steps}. "
                     f'Received: rounds={rounds}.')
  if max_epsilon is None or plan.epsilon(rounds, rule=rule) <= max_epsilon:
    return rounds
  low, high = 0, rounds  # Epsilon grows with the rounds: low is within the budget, high is not.
  while high - low > 1:
    middle = (low + high) // 2
    low, high = ((middle, high) if plan.epsilon(middle, rule=rule) <= max_epsilon
                 else (low, middle))
  if not low:
    raise ValueError('`max_epsilon` must allow for one round at least, whose epsilon is '
                     f'{plan.epsilon(1, rule=rule):.4g}. Received: max_epsilon={max_epsilon}.')
  return low


def _answering(cohort, dropout, seed, done):
  """The clients of a cohort that answer, whatever their data."""
  if not dropout:
    return cohort
  rng = np.random.default_rng(None if seed is None else [seed, done, 1])
  return [client for client, coin in zip(cohort, rng.random(len(cohort))) if coin >= dropout]


def _floats(tree):
  return {name: float(value) for name, value in tree.items()}


def _not_private(calls):
  """Exact metrics of a round: integers add up, others are means over the calls' clients."""
  clients = sum(count for count, _ in calls)
  merged = {}
  for count, metrics in calls:
    for name, value in metrics.items():
      weight = 1 if np.issubdtype(np.asarray(value).dtype, np.integer) else count / clients
      merged[name] = merged.get(name, 0.0) + weight * float(value)
  return {f'not_private/{name}': value for name, value in merged.items()}
