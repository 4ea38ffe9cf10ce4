# SPDX-License-Identifier: Apache-2.0
"""Rounds whose clients are nodes of Flower.

Nodes get places in the population, which are saved before use.
"""

import contextlib
import json
import logging
import pathlib
import time
from typing import Any, Callable, Dict, Iterator, List, NoReturn, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import compat
from tfdp_adaptive import private_rule
from tfdp_adaptive import runfolder
from tfdp_adaptive import trees
from tfdp_adaptive.keras import weight_ledger
from tfdp_adaptive.privacy import ledger as ledger_lib

from . import engines
from . import server as server_lib
from . import storage

Grid = Any  # Flower's.
Content = Any  # The answer of a node, or an exception.
Model = Any  # A Keras model, or a list of arrays.
Numbered = Tuple[int, private_rule.Broadcast]  # Number of the round, and its broadcast.
POLL_SECONDS = 0.2
_NODES = 'nodes.json'
_log = logging.getLogger('flwr')


class Nodes:
  """Places of the population and their nodes, assigned permanently in order of appearance.

  Args:
    size: Number of places.
    grid: Flower's grid.
    folder: Folder in which the places are saved, or None.
  """

  def __init__(self, size: int, grid: Grid, folder: Optional[pathlib.Path]) -> None:
    self.client_ids = list(range(size))
    self._grid, self._path = grid, None if folder is None else folder / _NODES
    self._places: List[str] = []
    self._online: Dict[str, int] = {}

  def read(self) -> None:
    """Reads the saved places.

    Raises:
      SavedRunError: If there is a run, but no file of its places.
    """
    if self._path is None:
      return
    if self._path.exists():
      self._places = json.loads(self._path.read_text(encoding='utf-8'))
    elif self._path.with_name('state.npz').exists():
      raise storage.SavedRunError(
          f'{self._path} is gone: nodes would take new places, and take part more often than the '
          'plan allows for. Put it back, or give another folder.')
    self._write()

  def meet(self) -> int:
    """Finds the nodes that are online, and assigns places to new ones; returns their number."""
    # A key outlives its node: registered again, it is the same user.
    self._online = {node.public_key.hex() or str(node.node_id): node.node_id
                    for node in self._grid.get_nodes()}
    new = sorted(set(self._online) - set(self._places))
    free = len(self.client_ids) - len(self._places)
    if len(new) > free:
      _log.warning('%d nodes are too many for the plan and take no part.', len(new) - free)
    if new[:free]:
      self._places.extend(new[:free])
      self._write()
    return len(set(self._places).intersection(self._online))

  def at(self, place: int) -> Optional[int]:
    """Returns the node at a place, or None if it is not online."""
    return self._online.get(self._places[place]) if place < len(self._places) else None

  def _write(self) -> None:
    if self._path is not None:
      runfolder.replace(self._path, json.dumps(self._places).encode())


class AnswerError(ValueError):
  """A node's answer cannot be used: it counts as none at all."""


class Process(engines.PrivateFedAvg):
  """Rounds whose clients are nodes.

  Attributes:
    ask: `(arrays, round, nodes) -> iterable of (node, content or error)`, set before a round.
    wait_for: The number of nodes that must be online, and the seconds to wait for them.
  """

  wait_for: Tuple[int, float] = (1, 0.0)

  def __init__(self, model: Model, make_server: Callable[[trees.Tree], server_lib.Server]) -> None:
    self._arrays, self._trained = _arrays_of(model)
    self._model = model if compat.is_model(model) else None
    super().__init__(server=make_server([
        tf.TensorSpec(array.shape, array.dtype)
        for array, trained in zip(self._arrays, self._trained) if trained]))
    self._record = tf.function(self.server.record, autograph=False)
    self.ask: Any = None

  def history(self) -> Sequence[ledger_lib.Entry]:
    return () if self._model is None else weight_ledger.Ledger.of(self._model).ledger().entries

  def begin_with(self, arrays: Sequence[np.ndarray]) -> None:
    self._arrays = [*self._answered(arrays, trained_only=False)]

  def initialize(self) -> server_lib.State:
    both = [[tf.constant(array) for array, trained in zip(self._arrays, self._trained)
             if trained == wanted] for wanted in (True, False)]
    return self.server.init(server_lib.ModelWeights(*both))

  def next(self, state: server_lib.State, client_data: Sequence[tf.data.Dataset]) -> NoReturn:
    raise NotImplementedError('Rounds are taken by `PrivateStrategy.start`.')

  def broadcast(self, state: server_lib.State) -> Numbered:
    return int(state.round) + 1, super().broadcast(state)

  @contextlib.contextmanager
  def reach(self, workers: engines.Workers, users: Any) -> Iterator[engines.Engine]:
    del workers
    users.read()
    all_at_once = lambda clients: [list(clients)]
    yield engines.Engine([self._answers], users.at, all_at_once, (), lambda: self._wait(users))

  def _wait(self, users: Nodes) -> bool:
    """Returns whether enough nodes are online, as soon as they are or when the time is up."""
    least, seconds = self.wait_for
    deadline, logged = time.monotonic() + seconds, False
    while (online := users.meet()) < least:
      if time.monotonic() >= deadline:
        _log.warning('Training ends here: %d nodes are online, and a round needs %d. The budget of '
                     'the other rounds is not used; `start` goes on with them.', online, least)
        return False
      if not logged:
        _log.info('Waiting for nodes: %d are online, and a round needs %d.', online, least)
        logged = True
      time.sleep(POLL_SECONDS)
    return True

  def _answers(
      self, weights: server_lib.ModelWeights, numbered: Numbered, nodes: Sequence[Optional[int]]
  ) -> server_lib.Sums:
    """Returns the sum of the clipped answers of some nodes, each of which counts once at most."""
    server_round, broadcast = numbered
    online = [node for node in nodes if node is not None]
    total, waiting = self.server.zero(), set(online)
    for node, content in (
        self.ask(self.in_order(weights), server_round, online) if waiting else ()):
      if node not in waiting:
        continue
      waiting.remove(node)
      try:
        answer = self._answer(broadcast, weights, content)
      except Exception as error:  # pylint: disable=broad-except
        # Flower and NumPy raise many errors for bytes that anybody may have written.
        _log.warning('No answer of node %s: %s (not private)', node, error)
      else:
        total = tf.nest.map_structure(tf.add, total, answer)
    if waiting:
      _log.warning('No answer of nodes %s in time (not private)', sorted(waiting))
    return server_lib.Sums(total)

  def _answer(self, broadcast: private_rule.Broadcast, weights: server_lib.ModelWeights,
              content: Content) -> server_lib.Answer:
    """Returns the clipped `Answer` of a node."""
    if isinstance(content, Exception):
      raise content
    record, = content.array_records.values()
    end = self._answered(record.to_numpy_ndarrays(), trained_only=True)
    with np.errstate(over='ignore'):
      update = [start - array for start, array in zip(weights.trainable, end)]
    if not all(np.all(np.isfinite(u)) for u in update):
      raise AnswerError('its arrays must be finite.')
    bounded: Any = ()
    if self.server.private_metrics is not None:
      values = {name: value for one in content.metric_records.values()
                for name, value in one.items() if checks.is_number(value)}
      bounded = self.server.bounded_metrics(
          {name: float(values.get(name, np.nan)) for name in self.server.private_metrics.ranges})
    return self._record(broadcast, [tf.constant(u) for u in update], bounded)

  def _answered(self, arrays: Sequence[np.ndarray], trained_only: bool) -> Iterator[np.ndarray]:
    """Yields arrays like the model's, in its types."""
    if len(arrays) != len(self._arrays):
      raise AnswerError(f'it must have {len(self._arrays)} arrays. Received: {len(arrays)}.')
    for array, wanted, trained in zip(arrays, self._arrays, self._trained):
      if trained or not trained_only:
        if array.shape != wanted.shape or array.dtype.kind not in 'fiu':
          raise AnswerError(f'its arrays must be numbers of shape {wanted.shape}. '
                            f'Received: {array.dtype} of {array.shape}.')
        with np.errstate(over='ignore'):
          converted = array.astype(wanted.dtype)
        yield converted

  def in_order(self, weights: server_lib.ModelWeights) -> List[np.ndarray]:
    """Returns the model's arrays in its own order."""
    parts = {True: iter(weights.trainable), False: iter(weights.non_trainable)}
    return [np.asarray(next(parts[trained])) for trained in self._trained]


def _arrays_of(model: Model) -> Tuple[List[np.ndarray], List[bool]]:
  """Returns the arrays of a model in its order, and which of them are trained."""
  if hasattr(model, 'trainable_weights'):
    trained = {id(weight) for weight in model.trainable_weights}
    arrays, kinds = model.get_weights(), [id(weight) in trained for weight in model.weights]
  else:
    arrays = [np.asarray(array) for array in model]
    kinds = [True] * len(arrays)
  if not any(kinds):
    raise ValueError('`model` must be a Keras model that is built, or a list of arrays. '
                     f'Received: {model!r:.60}, which has nothing to train.')
  return arrays, kinds
