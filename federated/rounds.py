# SPDX-License-Identifier: Apache-2.0
"""Trains the clients of one round by several workers; a client that fails affects no other."""

import concurrent.futures
import functools
import threading
from typing import Any, Dict, Iterator, List, Sequence, Tuple

import tensorflow as tf

from tfdp_adaptive import private_rule
from tfdp_adaptive import trees

from . import engines
from . import server as server_lib

Pair = Tuple[engines.Client, Any]  # A client's id and data, in the form that the engine reads.


class ClientsFailedError(RuntimeError):
  """Raised if no client could be trained, so the model or the form of the data is wrong."""


class WorkerLostError(ConnectionError):
  """A worker did not answer. Nothing of the round was released."""


def run(
    process: engines.PrivateFedAvg, engine: engines.Engine, state: server_lib.State,
    cohort: Sequence[engines.Client], check_all_failed: bool = True) -> server_lib.Sums:
  """Trains a cohort from the weights of `state`.

  Args:
    process: A `PrivateFedAvg`.
    engine: The engine of the process.
    state: The server's state.
    cohort: Ids of the clients.
    check_all_failed: Whether to raise `ClientsFailedError` if every client failed.

  Raises:
    WorkerLostError: If a worker is lost. Nothing was released.
  """
  if len(set(cohort)) != len(cohort):
    raise ValueError('`cohort` must have every client once at most: the noise is for one update '
                     'of a user in a round. Received: a client twice or more often.')
  broadcast = tf.nest.map_structure(_numpy, process.broadcast(state))
  weights = tf.nest.map_structure(_numpy, state.global_model_weights)
  outcome = train(process, engine, weights, broadcast, cohort)
  if check_all_failed and cohort and len(outcome.failed) == len(cohort):
    first = next(iter(outcome.failed.values()))
    raise ClientsFailedError(
        'All clients of the round failed, so the model or the form of the data is at fault. '
        f'The first error: {first}') from first
  return outcome


def train(
    process: engines.PrivateFedAvg, engine: engines.Engine, weights: server_lib.ModelWeights,
    broadcast: private_rule.Broadcast, cohort: Sequence[engines.Client]) -> server_lib.Sums:
  """Trains clients and adds up their clipped answers.

  A client that fails contributes nothing and does not affect the others. User-level privacy needs
  this: if other clients were dropped with it, one user's data would change the sum by more than one
  clip norm. A call with a failing client is therefore repeated in halves until that client is
  alone.
  """
  failed: Dict[engines.Client, Exception] = {}
  reading = threading.Lock()  # `users` of a caller need not know of threads.

  def available(clients: Sequence[engines.Client]) -> Iterator[Pair]:
    for client in clients:
      try:
        with reading:
          data = engine.read(client)
      except Exception as error:  # pylint: disable=broad-except
        failed[client] = error
      else:
        yield client, data

  def call(worker: engines.Worker, clients: List[Pair]) -> List[server_lib.Answer]:
    """Returns the sums of one call, or of its parts if it failed."""
    try:
      sums = worker(weights, broadcast, [data for _, data in clients])
      failed.update(sums.failed)
      return [sums.answers]
    except engine.failures as error:
      if len(clients) == 1:
        failed[clients[0][0]] = error
        return []
      half = len(clients) // 2
      return call(worker, clients[:half]) + call(worker, clients[half:])

  def work(worker: engines.Worker, mine: Sequence[engines.Client]) -> List[server_lib.Answer]:
    return [result for clients in engine.calls(available(mine))
            for result in call(worker, clients)]

  count = len(engine.workers)
  with concurrent.futures.ThreadPoolExecutor(count) as pool:
    results = [result for part in pool.map(
        work, engine.workers, [cohort[i::count] for i in range(count)]) for result in part]
  zero = process.server.zero()
  answers = [*map(tf.nest.flatten, results)] or [tf.nest.flatten(zero)]
  total = tf.nest.pack_sequence_as(
      zero, [functools.reduce(tf.add, parts) for parts in zip(*answers)])
  return server_lib.Sums(total, failed)


def _numpy(value: trees.Tree) -> trees.Tree:
  return value.numpy() if tf.is_tensor(value) else value
