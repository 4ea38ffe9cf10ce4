# SPDX-License-Identifier: Apache-2.0
"""Clients of a simulation trained by actors of Ray, on this machine or in a cluster.

An actor reads, trains and clips clients where it is, and sends one sum per call. Noise, state and
everything that is released stay with the process that simulates. An actor that is lost is started
again by Ray, and its call is run again: nothing of the round has been noised or released by then.
"""

from __future__ import annotations

import contextlib
import functools
import time
from typing import Any, Dict, Iterator, List, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import private_rule

from . import engines
from . import groups
from . import identity
from . import rounds
from . import server as server_lib

try:
  import ray
  from ray.util import scheduling_strategies
except ImportError as error:
  raise ModuleNotFoundError(
      "`workers='ray'` needs Ray, on Python 3.10 to 3.13. Install it with "
      "`pip install '.[ray]'` in the checkout of this library.") from error

Handle = Any  # Ray's handle of an actor.
Data = Dict[str, Any]  # Values that JSON can hold.
_CLIENTS = 64  # Clients of a call: the most that are trained again if an actor is lost.
_PATIENCE = 300  # Seconds for Ray to start a lost actor again.


class CallLostError(RuntimeError):
  """The actor of a call ended, also when the call was run again."""


class _Actor:
  """Trains clients in a process of its own.

  Args:
    content: A list with the reference of the pickled `(recipe of the process, users)`.
  """

  def __init__(self, content: List[ray.ObjectRef]) -> None:
    self._content = content

  @functools.cached_property
  def _opened(self) -> Tuple[engines.PrivateFedAvg, engines.ClientData]:
    # Read here, so that an error is one of a call and not of the actor.
    recipe, users = ray.cloudpickle.loads(ray.get(self._content[0]))
    return recipe(), users

  def data(self) -> Data:
    """Returns what identifies the clients and their data here."""
    return _data(self._opened[1])

  def train(
      self, weights: server_lib.ModelWeights, broadcast: private_rule.Broadcast,
      clients: List[engines.Client]
  ) -> Tuple[List[np.ndarray], Dict[engines.Client, str]]:
    """Returns the answers of clients as arrays, and {client: error}."""
    process, users = self._opened
    with process.reach(1, users) as engine:
      outcome = rounds.train(process, engine, weights, broadcast, clients)
    answers = [np.asarray(part) for part in tf.nest.flatten(outcome.answers)]
    return answers, {
        client: f'{type(error).__name__}: {error}' for client, error in outcome.failed.items()}


@contextlib.contextmanager
def reach(process: engines.PrivateFedAvg, remote: engines.Remote, users: engines.ClientData
          ) -> Iterator[engines.Engine]:
  """Starts actors, which end with the context, and yields their engine.

  Args:
    process: A `PrivateFedAvg` with a recipe.
    remote: The number of actors, and where they are.
    users: Users that can be pickled. Each actor opens the files of users on its own machine.
  """
  begun = not ray.is_initialized()
  if begun:
    ray.init(address=remote.address, log_to_driver=False)
  elif remote.address not in (None, 'auto', ray.get_runtime_context().gcs_address):
    raise ValueError('`address` must be the cluster that this process is connected to, '
                     f'{ray.get_runtime_context().gcs_address}. Received: '
                     f'address={remote.address!r}. Call `ray.shutdown()` first, or leave it out.')
  actors: List[Handle] = []
  try:
    content = [ray.put(ray.cloudpickle.dumps((process.recipe, users)))]
    # No CPUs: an actor of a machine that is lost finds a place on another. One byte of memory: Ray
    # puts an actor that asks for nothing on any machine, also against its strategy.
    make = ray.remote(num_cpus=0, memory=1, max_restarts=-1, max_task_retries=1)(_Actor)
    nodes = _nodes()
    actors = [make.options(scheduling_strategy=scheduling_strategies.NodeAffinitySchedulingStrategy(
        nodes[number % len(nodes)], soft=True)).remote(content)
              for number in range(remote.actors or len(nodes))]
    _check_data(actors, users)
    yield engines.Engine([functools.partial(_train, process, actor) for actor in actors],
                         lambda client: client, functools.partial(groups.calls, most=_CLIENTS),
                         (CallLostError,))
  finally:
    for actor in actors:
      ray.kill(actor)
    if begun:
      ray.shutdown()


def _nodes() -> List[str]:
  """Returns the ids of the machines, once for each CPU, in turns."""
  cpus = {node['NodeID']: max(1, int(node['Resources'].get('CPU', 0)))
          for node in ray.nodes() if node['Alive']}
  return [node for turn in range(max(cpus.values())) for node in cpus if turn < cpus[node]]


def _train(
    process: engines.PrivateFedAvg, actor: Handle, weights: server_lib.ModelWeights,
    broadcast: private_rule.Broadcast, clients: List[engines.Client],
    again: bool = True) -> server_lib.Sums:
  train = actor.train.options(max_task_retries=0)
  try:
    answers, failed = ray.get(train.remote(weights, broadcast, clients))
  except ray.exceptions.RayActorError as error:
    _wait(actor)  # Otherwise the next call is lost too, and a client would be blamed for it.
    # `rounds.train` runs the halves of a lost call again; only a single client is tried twice here.
    if again and len(clients) == 1:
      return _train(process, actor, weights, broadcast, clients, again=False)
    raise CallLostError(f'An actor was lost: {error}') from error
  except ray.exceptions.RayTaskError:
    raise  # An error of the model, as in process.
  except ray.exceptions.RayError as error:
    raise _lost(error) from error
  total = tf.nest.pack_sequence_as(process.server.zero(), [*map(tf.constant, answers)])
  return server_lib.Sums(total, {
      client: rounds.ClientsFailedError(text) for client, text in failed.items()})


def _wait(actor: Handle) -> None:
  """Returns when Ray has started an actor again. Raises `WorkerLostError` if it does not."""
  end = time.monotonic() + _PATIENCE
  while True:
    try:
      ray.get(actor.__ray_ready__.remote(), timeout=_PATIENCE)
      return
    except ray.exceptions.RayError as error:  # A machine is known to be lost after some seconds.
      if time.monotonic() > end:
        raise _lost(error) from error
      time.sleep(1)


def _check_data(actors: List[Handle], users: engines.ClientData) -> None:
  """Raises unless every actor has the clients and data that this process has."""
  expected = _data(users)
  try:
    found = ray.get([actor.data.remote() for actor in actors])
  except ray.exceptions.RayTaskError as error:
    raise ValueError(
        'Every actor of Ray must be able to make the model and to read the clients: this library, '
        f'the code of the model and the files must be on its machine. Received: {error.cause!r}.'
    ) from error
  except ray.exceptions.RayError as error:
    raise _lost(error) from error
  for one in found:
    if one != expected:
      wrong = sorted(name for name in expected if one[name] != expected[name])
      raise ValueError(
          'Every actor of Ray must have the same clients and data, in the same order. Received: '
          f'other {wrong} on one of {len(actors)} actors. Copy the files again.')


def _data(users: engines.ClientData) -> Data:
  return {'clients': identity.of_clients(users.client_ids), **identity.of_data(users)}


def _lost(error: Exception) -> rounds.WorkerLostError:
  return rounds.WorkerLostError(
      'The Ray cluster was lost. The round was not released; start the cluster again and resume '
      f'from the last saved state. Cause: {error}')
