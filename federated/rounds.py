# SPDX-License-Identifier: Apache-2.0
"""The clients of one round: spread over workers, failing one by one and not together."""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import threading
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Sequence

import grpc
import tensorflow as tf

from . import groups
from . import tff
from . import workers as workers_lib

CLIENTS_PER_CALL = 64  # One at a time; bounds a worker's memory, which holds all answers.
CLIENTS_STEP = 8
GROUPS = 8  # Of a call, trained side by side; each needs a model of its own.
CLIENTS_IN_GROUPS, BYTES_IN_GROUPS = 2048, 64 * 2**20  # Of a call.


class ClientsFailedError(RuntimeError):
  """No client could be trained at all: the model or all data are at fault."""


class Outcome(NamedTuple):
  """What a cohort's clients sent.

  Attributes:
    answers: The sum of the clients' `Answer`s, tensors; SECRET.
    not_private: One dict of exact metrics per call, and the clients it is of.
    failed: Ids of the clients that failed and count as if they had not taken part.
  """

  answers: object
  not_private: List
  failed: List[str]


def run(
    process: Any, workers: workers_lib.Workers, state: Any, cohort: Sequence[str], users: Any,
    check_all_failed: bool = True) -> Outcome:
  """Trains a cohort from the weights of `state`.

  A client that fails contributes nothing and leaves the others untouched, which
  is what user-level privacy needs: were the clients around it dropped with it,
  one user's data would move more than one clip norm. So a call with a failing
  client is repeated in halves until it stands alone.

  Args:
    process: A `PrivateFedAvg`.
    workers: `Workers`.
    state: The server's state.
    cohort: Ids of the clients.
    users: What has `create_tf_dataset_for_client`.
    check_all_failed: Raise `ClientsFailedError` if every client failed.

  Raises:
    WorkerLostError: A worker is gone. Nothing was released.
  """
  if len(set(cohort)) != len(cohort):
    raise ValueError('`cohort` must have every client once at most: the noise is for one update '
                     f'of a user in a round. Received: {len(cohort) - len(set(cohort))} repeated.')
  broadcast = tf.nest.map_structure(_numpy, process.server.broadcast(state))
  weights = tf.nest.map_structure(_numpy, state.global_model_weights)
  failed: Dict[Any, Exception] = {}
  in_groups = process.in_groups()
  if in_groups is None:
    compute: Callable[..., Any] = process.client_sums
    calls: Callable[..., Iterable[Any]] = _split
    read = users.create_tf_dataset_for_client
  else:
    compute, calls = functools.partial(_compute_in_groups, in_groups), _split_groups
    read = lambda client: groups.batches_of(users, client, *in_groups[1:])
  reading = threading.Lock()  # Whoever's `users` these are need not know of threads.

  def available(clients: Sequence[Any]) -> Iterator[Any]:
    for client in clients:
      try:
        with reading:
          data = read(client)
      except Exception as error:  # pylint: disable=broad-except
        failed[client] = error
      else:
        yield client, data

  def work(context: Any, mine: Any) -> List[Any]:
    with tff.get_context_stack().install(context):
      return [result for call in calls(available(mine))
              for result in _call(functools.partial(compute, weights, broadcast), call, failed)]

  count = len(workers.contexts)
  with concurrent.futures.ThreadPoolExecutor(count) as pool:
    results = [result for part in pool.map(
        work, workers.contexts, [cohort[i::count] for i in range(count)]) for result in part]
  if check_all_failed and cohort and len(failed) == len(cohort):
    raise ClientsFailedError(
        f'All {len(cohort)} clients of the round failed, so the model or the form of the data is '
        f'at fault. The first error: {next(iter(failed.values()))}'
    ) from next(iter(failed.values()))
  zero = process.server.zero()
  answers = [tf.nest.flatten(sums.answers) for _, sums in results] or [tf.nest.flatten(zero)]
  total = tf.nest.pack_sequence_as(
      zero, [functools.reduce(tf.add, parts) for parts in zip(*answers)])
  return Outcome(total, [(count, sums.not_private) for count, sums in results], list(failed))


def _compute_in_groups(in_groups: Any, weights: Any, broadcast: Any, clients: Sequence[Any]) -> Any:
  """The `Sums` of the clients of one call, by their batches."""
  specs = groups.specs(in_groups.input_spec)
  parts = [collections.OrderedDict(groups.pack(part, specs)._asdict())
           for part in groups.divide(clients, GROUPS)]
  return in_groups.sums(weights, broadcast, parts)


def _call(compute: Callable[..., Any], clients: Sequence[Any], failed: Any) -> List[Any]:
  """[(clients, Sums)] of one call, or of its parts if it failed."""
  if not clients:
    return []
  try:
    return [(len(clients), compute([data for _, data in clients]))]
  except workers_lib.WorkerLostError:
    raise
  except (grpc.RpcError, tf.errors.OpError, TypeError, ValueError) as error:
    if len(clients) == 1:
      failed[clients[0][0]] = error
      return []
    half = len(clients) // 2
    return _call(compute, clients[:half], failed) + _call(compute, clients[half:], failed)


def _split(clients: Sequence[Any]) -> List[Any]:
  """Calls of few different sizes, since a new size compiles everything again in the worker.

  As many as fit into calls of multiples of `CLIENTS_STEP`, `CLIENTS_PER_CALL` at
  most; the rest, if any, in one more.
  """
  clients = list(clients)
  calls, start = [], 0
  while start < len(clients):
    left = min(len(clients) - start, CLIENTS_PER_CALL)
    size = left - left % CLIENTS_STEP or left
    calls.append(clients[start:start + size])
    start += size
  return calls


def _split_groups(clients: Sequence[Any]) -> Iterator[Any]:
  """Calls of a bounded number of clients and bytes; a size of their own compiles nothing again."""
  call, size = [], 0
  for client, batches in clients:
    call.append((client, batches))
    size += sum(array.nbytes for batch in batches for array in batch)
    if len(call) >= CLIENTS_IN_GROUPS or size >= BYTES_IN_GROUPS:
      yield call
      call, size = [], 0
  if call:
    yield call


def _numpy(value: Any) -> Any:
  return value.numpy() if tf.is_tensor(value) else value
