# SPDX-License-Identifier: Apache-2.0
"""User-level privacy over Flower: its nodes are the users, everything else is `simulate`'s.

Flower carries messages. Which nodes a round asks, how far an answer may move the model, what noise
is added and what is kept on disk are those of the plan, and the same code as in a simulation.
"""

from __future__ import annotations

import contextlib
import logging
import pathlib
import secrets
import time
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import compat
from tfdp_adaptive import contract
from tfdp_adaptive import privacy
from tfdp_adaptive.keras import weight_ledger
from tfdp_adaptive.privacy import ledger as ledger_lib

from . import engines
from . import nodes as nodes_lib
from . import server as server_lib
from . import simulation

try:
  from flwr import app as flwr_app
  from flwr.serverapp import strategy as flwr_strategy
except ImportError as error:
  raise ModuleNotFoundError(
      '`tfdp_adaptive.federated.flower` needs Flower 1.41 or later, on Python 3.10 to 3.13. '
      "Install it with `pip install 'tfdp-adaptive[flower]'`.") from error

_POLL_SECONDS = 0.2
_AT_ONCE = 16  # Messages and answers that are in memory at a time.
_log = logging.getLogger('flwr')


class AnswerError(ValueError):
  """A node's answer cannot be used: it counts as none at all."""


class PrivateStrategy(flwr_strategy.Strategy):
  """A strategy of Flower with user-level differential privacy; a node is a user.

  Nodes are ordinary Flower ClientApps: they train from the arrays they are sent and answer with
  one ArrayRecord like it, in the same order, and with a MetricRecord if `private_metrics` are
  wanted. Cohorts are drawn as the plan says among `plan.population_size` places. A node takes the
  next free place when it is seen first and keeps it; places that are free or whose node is
  offline answer nothing. Every answer is clipped at the server, whatever the node did. One that
  is late, comes twice, is not finite or has other shapes is none. The state is on disk before
  anything that depends on it is sent.

  Args:
    model: A built Keras model, or a list of arrays (all of them trained): the first weights.
    plan: A `tfdp.PrivacyPlan` with unit='user', a population size, and `batch_size` the expected
      number of nodes per round.
    rule: A `tfdp.rules` rule that needs no public gradients.
    server_learning_rate: Step size of the server, or a function of the number of rounds done.
    quantile_clip: A `QuantileClip`, or None for a fixed clip norm.
    private_metrics: `PrivateMetrics` of numbers in the nodes' MetricRecords, or None.
    evaluate: `ModelWeights -> {metric: value}` on the server's own data, or None.
    min_nodes: The number of nodes that must be online, of those with a place, before a round
      begins. A round that nobody could answer would use up budget for nothing.
    wait: Seconds to wait for them. Then `start` ends with the rounds that were run; the budget of
      the others is not used.
    out: Folder for the SECRET state, the nodes' places, `metrics.csv` and `tensorboard/`; a
      ServerApp that was killed goes on from there. None keeps nothing.
    settings: More arguments of `simulate`: `rounds_per_evaluation`, `max_epsilon`, `facts`.
    seed: For tests only: fixed noise protects nobody.

  Attributes:
    result: The `Simulation` of the last `start`: weights, history and statement; its `state` is
      SECRET.
  """

  def __init__(
      self, model: Any, *, plan: privacy.PrivacyPlan, rule: contract.Rule,
      server_learning_rate: Any = 1.0, quantile_clip: Optional[server_lib.QuantileClip] = None,
      private_metrics: Optional[server_lib.PrivateMetrics] = None,
      evaluate: Optional[Callable[[Any], Dict[str, float]]] = None, min_nodes: int = 1,
      wait: float = 3600, out: Any = None, settings: Optional[Mapping[str, Any]] = None,
      seed: Optional[int] = None) -> None:
    size = getattr(plan, 'population_size', None)
    if not size:
      raise ValueError("`plan` must be a `tfdp.PrivacyPlan` with unit='user' and the number of "
                       f'nodes as its population size. Received: plan={plan!r}.')
    checks.whole(min_nodes=min_nodes)
    checks.not_negative(wait=wait)
    if min_nodes > size:
      raise ValueError('`min_nodes` must be at most the population size of the plan, which is '
                       f'{size}. Received: min_nodes={min_nodes}.')
    make_server = lambda specs: server_lib.Server(
        rule, specs, plan, server_learning_rate, quantile_clip, private_metrics, seed)
    self._process = _Process(model, make_server)
    self._process.wait_for = min_nodes, wait
    self._out = None if out is None else pathlib.Path(out)
    self._size, self._evaluate, self._settings = size, evaluate, dict(settings or {})
    self.result: Optional[simulation.Simulation] = None

  def start(
      self, grid: Any, initial_arrays: Any = None, num_rounds: Optional[int] = None,
      timeout: float = 3600, train_config: Any = None, evaluate_config: Any = None,
      evaluate_fn: Any = None) -> Any:
    """Trains until `num_rounds` rounds of the plan are used up, those of earlier calls included.

    Args:
      grid: Flower's grid.
      initial_arrays: ArrayRecord to begin with instead of the model's weights.
      num_rounds: The number of rounds of the plan; all by default.
      timeout: Seconds to wait for the answers of a round. Later ones are none.
      train_config: ConfigRecord for the nodes; 'server-round' is added.
      evaluate_config: Must be None: what nodes measure by themselves is not private.
      evaluate_fn: Must be None; `evaluate` of the strategy takes its place.

    Returns:
      Flower's `Result`: the last arrays, what was released in every round as metrics of the
      ClientApps, and what `evaluate` returned as metrics of the ServerApp.
    """
    if evaluate_config is not None or evaluate_fn is not None:
      raise ValueError('`evaluate_config` and `evaluate_fn` must be None: give `evaluate` to the '
                       'strategy, and `private_metrics` for what nodes measure. '
                       f'Received: {evaluate_config!r:.40}, {evaluate_fn!r:.40}.')
    checks.positive(timeout=timeout)
    process = self._process
    if initial_arrays is not None:
      process.begin_with(initial_arrays.to_numpy_ndarrays())
    nodes: Any = nodes_lib.Nodes(self._size, grid, self._out)
    process.ask = lambda arrays, server_round, asked: _replies(
        grid, arrays, {**(train_config or {}), 'server-round': server_round}, asked, timeout)
    self.result = simulation.simulate(
        process, nodes, rounds=num_rounds, out=self._out,
        evaluate=self._evaluate, progress=False, **self._settings)
    _log.info(self.result.statement)
    result = flwr_strategy.Result(arrays=_array_record(process.in_order(self.result.weights)))
    for row in self.result.history:
      for private, metrics in ((True, result.train_metrics_clientapp),
                               (False, result.evaluate_metrics_serverapp)):
        metrics[row['round']] = flwr_app.MetricRecord({
            name: value for name, value in row.items()
            if name != 'round' and not name.startswith('not_private/')
            and name.startswith('private/') == private})
    return result

  def _only_by_start(self, *unused: Any, **also_unused: Any) -> Any:
    raise NotImplementedError('A round cannot be taken in parts: its cohort, noise and saved state '
                              'belong together. Call `start`.')

  configure_train = aggregate_train = _only_by_start
  configure_evaluate = aggregate_evaluate = _only_by_start

  def summary(self) -> None:
    """Logs what is promised."""
    _log.info(self._process.plan.statement(rule=self._process.rule))


class _Process(engines.PrivateFedAvg):
  """Rounds whose clients are nodes.

  Attributes:
    ask: `(arrays, round, nodes) -> iterable of (node, content or error)`, set before a round.
    wait_for: The number of nodes that must be online, and the seconds to wait for them.
  """

  wait_for: Tuple[int, float] = (1, 0.0)

  def __init__(self, model: Any, make_server: Callable[[Any], server_lib.Server]) -> None:
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

  def next(self, state: Any, client_data: Any) -> Any:
    raise NotImplementedError('Rounds are taken by `PrivateStrategy.start`.')

  def broadcast(self, state: Any) -> Any:
    return int(state.round) + 1, super().broadcast(state)

  @contextlib.contextmanager
  def reach(self, workers: engines.Workers, users: Any) -> Iterator[engines.Engine]:
    del workers
    users.read()
    all_at_once = lambda clients: [list(clients)]
    yield engines.Engine([self._answers], users.at, all_at_once, (), lambda: self._wait(users))

  def _wait(self, users: nodes_lib.Nodes) -> bool:
    """Returns whether enough nodes are online, as soon as they are or when the time is up."""
    least, seconds = self.wait_for
    deadline, told = time.monotonic() + seconds, False
    while (online := users.meet()) < least:
      if time.monotonic() >= deadline:
        _log.warning('Training ends here: %d nodes are online, and a round needs %d. The budget of '
                     'the other rounds is not used; `start` goes on with them.', online, least)
        return False
      if not told:
        _log.info('Waiting for nodes: %d are online, and a round needs %d.', online, least)
        told = True
      time.sleep(_POLL_SECONDS)
    return True

  def _answers(
      self, weights: Any, numbered: Tuple[int, Any], nodes: Sequence[Optional[int]]
  ) -> server_lib.Sums:
    """The sum of the clipped answers of some nodes, each of which counts once at most."""
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
        # Whatever Flower or NumPy find wrong with bytes that anybody may have written.
        _log.warning('No answer of node %s: %s (not private)', node, error)
      else:
        total = tf.nest.map_structure(tf.add, total, answer)
    if waiting:
      _log.warning('No answer of nodes %s in time (not private)', sorted(waiting))
    return server_lib.Sums(total, {})

  def _answer(self, broadcast: Any, weights: Any, content: Any) -> server_lib.Answer:
    """The clipped `Answer` of a node."""
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
    for array, mine, trained in zip(arrays, self._arrays, self._trained):
      if trained or not trained_only:
        if array.shape != mine.shape or array.dtype.kind not in 'fiu':
          raise AnswerError(f'its arrays must be numbers of shape {mine.shape}. '
                            f'Received: {array.dtype} of {array.shape}.')
        with np.errstate(over='ignore'):
          converted = array.astype(mine.dtype)
        yield converted

  def in_order(self, weights: Any) -> List[np.ndarray]:
    """The model's arrays in its own order."""
    parts = {True: iter(weights.trainable), False: iter(weights.non_trainable)}
    return [np.asarray(next(parts[trained])) for trained in self._trained]


def _replies(
    grid: Any, arrays: Sequence[np.ndarray], config: Mapping[str, Any], nodes: Sequence[int],
    timeout: float) -> Iterator[Tuple[int, Any]]:
  """Yields `(node, content or error)` as answers to THESE messages come in, until the timeout."""
  tag = secrets.token_hex(16)
  content = flwr_app.RecordDict({
      'arrays': _array_record(arrays), 'config': flwr_app.ConfigRecord(dict(config))})
  deadline = time.monotonic() + timeout
  waiting: List[str] = []
  for some in _parts(nodes):
    waiting += filter(None, grid.push_messages([flwr_app.Message(
        content, dst_node_id=node, message_type=flwr_app.MessageType.TRAIN, ttl=timeout,
        group_id=tag) for node in some]))
  while waiting and time.monotonic() < deadline:
    for part in _parts(waiting):
      for reply in grid.pull_messages(set(part)):
        if reply.metadata.reply_to_message_id in waiting:
          waiting.remove(reply.metadata.reply_to_message_id)
        if reply.has_error():
          _log.warning('A node failed: %s (not private)', reply.error.reason)
        elif reply.metadata.group_id == tag:
          yield reply.metadata.src_node_id, reply.content
    if waiting:
      time.sleep(_POLL_SECONDS)


def _parts(some: Sequence[Any]) -> List[Sequence[Any]]:
  """Divides a list into parts of `_AT_ONCE`."""
  return [some[start:start + _AT_ONCE] for start in range(0, len(some), _AT_ONCE)]


def _array_record(arrays: Sequence[np.ndarray]) -> Any:
  return flwr_app.ArrayRecord(list(arrays))


def _arrays_of(model: Any) -> Tuple[List[np.ndarray], List[bool]]:
  """The arrays of a model in its order, and which of them are trained."""
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
