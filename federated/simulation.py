# SPDX-License-Identifier: Apache-2.0
"""Runs a private process over simulated users, as its plan says."""

import contextlib
import time
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Union
import warnings

import numpy as np
import tensorflow as tf
import tqdm

from tfdp_adaptive import checks
from tfdp_adaptive import errors
from tfdp_adaptive import privacy
from tfdp_adaptive.batches import digests
from tfdp_adaptive.batches import sampling_seed
from tfdp_adaptive.privacy import card as card_lib
from tfdp_adaptive.privacy import statement as privacy_statement
from tfdp_adaptive.privacy import weight_digests

from . import engines
from . import rounds as rounds_lib
from . import run as run_lib
from . import server as server_lib
from . import storage

_PREFIXES = ('private/', 'not_private/')
Evaluate = Callable[[server_lib.ModelWeights], Dict[str, float]]


class Simulation(NamedTuple):
  """The result of a simulation.

  Attributes:
    weights: `engines.TrainedWeights` after the last round.
    rounds: Number of rounds of the plan that were run.
    history: One dict per round. Names that start with private/ are releases of the round, and all
      others come from `evaluate`.
    statement: The privacy statement, for the rounds that were run.
    state: The SECRET server state, which includes noise still to come.
    failed: {client: rounds in which it failed}; not private.
    speed: NOT private: seconds of every round of this call, rounds and clients per second; and
      the bytes of the server's state.
    described: The arguments of `Ledger.card` that describe a federated run.
  """

  weights: engines.TrainedWeights
  rounds: int
  history: List[Dict[str, float]]
  statement: str
  state: server_lib.State
  failed: Dict[engines.Client, int]
  speed: Dict[str, Any]
  described: Dict[str, Any]

  def card(self) -> card_lib.Card:
    """Returns the privacy card of the rounds that were run, with the digest of the weights."""
    arrays = tf.nest.flatten(tuple(self.weights))
    return self.weights.ledger.card(weights=weight_digests.of(arrays), **self.described)


def simulate(
    process: engines.PrivateFedAvg, train_data: engines.ClientData,
    plan: Optional[privacy.PrivacyPlan] = None, rounds: Optional[int] = None, *,
    evaluate: Optional[Evaluate] = None, rounds_per_evaluation: int = 10,
    out: Optional[storage.Path] = None, dropout: float = 0.0, workers: Union[int, str] = 1,
    address: Optional[str] = None, progress: bool = True, facts: Sequence[str] = ()) -> Simulation:
  """Trains on cohorts drawn as `process.plan` says.

  The state of a round is on disk before any result of the round is released. A run that was killed
  at any point therefore resumes if you call `simulate` again with the same `out`. The resumed run
  draws fresh keys, so no noise is used twice. The plan, the rule, the client optimizer and the form
  of the data must be the same. The clients must be the same in the same order, because cohorts are
  drawn by position.

  Args:
    process: A `PrivateFedAvg`.
    train_data: `Users`, a `tff.simulation.datasets.ClientData`, or any object that has
      `client_ids`, each once, and `create_tf_dataset_for_client`.
    plan: The plan, which must be equal to the plan of the process.
    rounds: The total number of the plan's rounds to run; all by default.
    evaluate: `weights -> {metric: value}`, see `evaluator`.
    rounds_per_evaluation: Rounds between evaluations. The last round is always evaluated.
    out: Folder for the state (SECRET), `metrics.csv` and `tensorboard/`; None to
      keep nothing. The files hold no times of rounds, because these are not private. The file
      system's own timestamps still show them.
    dropout: Probability that a client of the cohort does not answer (a straggler), independent of
      its data. Not claimed as amplification.
    workers: How many clients of a Keras model are trained side by side in this process, one by
      default. Or 'ray', for actors on the CPUs of a Ray cluster ('ray:8' for eight actors). Each
      actor reads, trains and clips clients on its own node.
    address: Address of a running Ray cluster; by default Ray looks for one or starts one here.
    progress: Whether to show a progress bar.
    facts: Sentences for the statement, such as where the vocabulary came from.

  Returns:
    A `Simulation`.
  """
  checks.require(isinstance(process, engines.PrivateFedAvg),
                 'be what `build_private_fed_avg` returns', process=process)
  if plan is not None and not (isinstance(plan, type(process.plan)) and plan == process.plan):
    raise ValueError('`plan` must be the plan the process was built with: noise and cohorts must '
                     f'come from one plan. Leave it out. Received: plan={plan!r:.60}.')
  checks.decay(dropout=dropout)
  checks.whole(rounds_per_evaluation=rounds_per_evaluation)
  checks.require(evaluate is None or callable(evaluate), 'be a function of the weights',
                 evaluate=evaluate)
  if not isinstance(facts, (list, tuple)) or not all(isinstance(fact, str) for fact in facts):
    raise ValueError(f'`facts` must be a list of sentences. Received: facts={facts!r}.')
  plan = process.plan
  rounds = plan.steps if rounds is None else rounds
  checks.whole(rounds=rounds)
  checks.require(rounds <= plan.steps, f"be between 1 and the plan's {plan.steps}", rounds=rounds)
  client_ids = _clients(train_data)
  with contextlib.ExitStack() as stack:
    folder = stack.enter_context(storage.RunFolder(out)) if out is not None else None
    engine = stack.enter_context(process.reach(_workers(workers, address), train_data))
    run = run_lib.Run(process, folder, train_data, client_ids)
    writer = None if folder is None else run_lib.Releases(folder.path)
    cohorts = _cohorts(run, plan, client_ids, folder, rounds)
    bar = stack.enter_context(tqdm.tqdm(
        total=rounds, initial=run.done, disable=not progress, unit='round'))
    step = tf.function(process.server.step, autograph=False)

    def report() -> None:
      """Releases what the last round, which is saved, gave."""
      row = dict(run.pending)
      if evaluate is not None and (run.done % rounds_per_evaluation == 0 or run.done == rounds):
        row.update(_evaluated(evaluate(run.weights())))
      run.history.append(row)
      if writer is not None:
        writer.release(run.history)
      shown = {k: v for k, v in row.items() if k != 'round'}
      if shown:
        bar.set_postfix({k: f'{v:.4g}' for k, v in shown.items()})

    if run.pending:
      report()  # Saved, but perhaps not released when the run ended.
    clients, seconds = 0, []
    while run.done < rounds and engine.ready():
      start = time.monotonic()
      cohort = _answering(next(cohorts), dropout, plan.seed, run.done)
      outcome = rounds_lib.run(process, engine, run.state, cohort,
                               check_all_failed=not run.ever_succeeded)
      run.ever_succeeded |= len(cohort) > len(outcome.failed)
      if cohort and len(cohort) == len(outcome.failed):  # An error would disclose it.
        warnings.warn(f'No client of round {run.done + 1} could be trained: it adds noise alone. '
                      'This warning is not private.', errors.Caution, stacklevel=2)
      state, released = step(run.state, outcome.answers)
      run.advance(state, {name: float(value) for name, value in released.items()},
                  outcome.failed)
      clients += len(cohort)
      seconds.append(time.monotonic() - start)
      report()
      bar.update()
  weights = engines.trained(run.weights(), run.ledger())
  described = _described(process.settings, facts)
  card = weights.ledger.card(plots=False, **described)
  return Simulation(weights, run.done, run.history,
                    privacy_statement.of(card), run.state, run.failed,
                    _speed(run, clients, seconds), described)


def _cohorts(
    run: run_lib.Run, plan: privacy.PrivacyPlan, client_ids: Sequence[engines.Client],
    folder: Optional[storage.RunFolder], rounds: int) -> Iterator[List[engines.Client]]:
  """Yields the cohorts of the rounds that are left, whose digests a folder keeps."""
  if run.done >= rounds:
    return
  # Releases of a run are saved first: a run that begins again has released nothing.
  seed = sampling_seed.SamplingSeed(
      plan, None if folder is None else folder.path / 'coins', replace=True)
  drawn = plan.index_batches(len(client_ids), start_step=run.done, coins=seed)
  log = None
  if folder is not None and plan.seed is None:
    run.commit(sampling_seed.COMMITTED.format(sampling_seed.digest(seed.key(run.done))))
    log = digests.Log(folder.path / 'digests', seed, plan, len(client_ids), unit='user')
  for numbers in drawn:
    cohort = [client_ids[i] for i in numbers]
    if log is not None:
      log.write(run.done, np.array([str(client) for client in cohort], object))
    yield cohort


def _described(settings: Dict[str, Any], facts: Sequence[str]) -> Dict[str, Any]:
  """Returns the arguments of `Ledger.card` that describe a federated run.

  Args:
    settings: The settings of the process.
    facts: The caller's own words.
  """
  lines = [
      'Federated: a record above is the update that a user\'s device sends in a round; its clip '
      'norm holds whatever number of examples it was trained on.',
      'What the server sees: all updates of the users, as they are. The guarantee is for whoever '
      'sees what the server releases: the weights of every round'
      + (', and the noised numbers beside them' if settings['private_metrics'] is not None
         or settings['quantile_clip'] is not None else '')
      + '. Secure aggregation is not simulated; the state of the server and the workers\' memory '
      'are not released and must stay secret.']
  if settings['private_metrics'] is not None:
    lines.append(f'Private metrics: {settings["private_metrics"]}, inside the same budget.')
  return dict(trust='federated', facts=lines,
              words=[card_lib.Words('the data', fact) for fact in facts])


def _workers(workers: Union[int, str], address: Optional[str]) -> engines.Workers:
  """Returns `workers` as `PrivateFedAvg.reach` takes them."""
  name, _, count = workers.partition(':') if isinstance(workers, str) else ('', '', '')
  if name == 'ray' and (not count or count.isdecimal() and int(count)):
    return engines.Remote(int(count) if count else None, address)
  if address is not None:
    raise ValueError("`address` is for workers='ray'. Received: "
                     f'address={address!r}, workers={workers!r}.')
  return workers


def _clients(train_data: engines.ClientData) -> List[engines.Client]:
  """Returns all client ids. Each must occur once, because a user is one client."""
  try:
    client_ids = list(train_data.client_ids)
    different = len(set(client_ids))
  except (AttributeError, TypeError) as error:
    raise ValueError('`train_data` must have `client_ids`, texts or whole numbers, and a data set '
                     f'for each. Received: {type(train_data).__name__}.') from error
  if different < len(client_ids):
    raise ValueError(
        '`train_data.client_ids` must name every client once: one that is there twice moves the '
        'sum of a round twice as far as the noise is for. Received: some more often.')
  return client_ids


def _evaluated(metrics: Dict[str, Any]) -> Dict[str, Any]:
  """Returns `metrics`, unless a name is one that a round's own numbers may have."""
  wrong = [name for name in metrics if name == 'round' or name.startswith(_PREFIXES)]
  if wrong:
    raise ValueError(f'`evaluate` must return names other than "round" and without {_PREFIXES} in '
                     f'front, which say what is private. Received: {wrong}.')
  return metrics


def _speed(run: run_lib.Run, clients: int, seconds: List[float]) -> Dict[str, Any]:
  state_bytes = sum(np.asarray(x).nbytes for x in tf.nest.flatten(run.state))
  per_second = lambda count: count / sum(seconds) if seconds else 0.0
  return {'seconds': seconds, 'rounds_per_second': per_second(len(seconds)),
          'clients_per_second': per_second(clients), 'state_bytes': state_bytes}


def _answering(
    cohort: Sequence[engines.Client], dropout: float, seed: Optional[int], done: int
) -> Sequence[engines.Client]:
  """Returns the clients of a cohort that answer, whatever their data."""
  if not dropout:
    return cohort
  rng = np.random.default_rng(None if seed is None else [seed, done, 1])
  return [client for client, coin in zip(cohort, rng.random(len(cohort))) if coin >= dropout]
