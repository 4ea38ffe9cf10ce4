# SPDX-License-Identifier: Apache-2.0
"""User-level privacy over Flower, whose nodes are the users.

Flower carries messages. The plan decides which nodes a round asks, how far an answer may move the
model and what noise is added. It runs the code of a simulation, and writes the same files.
"""

from __future__ import annotations

import logging
import pathlib
import secrets
import time
from typing import Any, Iterator, List, Mapping, NoReturn, Optional, Sequence, Tuple

import numpy as np

from tfdp_adaptive import checks
from tfdp_adaptive import contract
from tfdp_adaptive import privacy

from . import groups
from . import nodes as nodes_lib
from . import server as server_lib
from . import simulation
from . import storage

try:
  from flwr import app as flwr_app
  from flwr.serverapp import strategy as flwr_strategy
except ImportError as error:
  raise ModuleNotFoundError(
      '`tfdp_adaptive.federated.flower` needs Flower 1.41 or later, on Python 3.10 to 3.13. '
      "Install it with `pip install '.[flower]'` in the checkout of this library.") from error

_AT_ONCE = 16  # Messages and answers that are in memory at a time.
_log = logging.getLogger('flwr')


class PrivateStrategy(flwr_strategy.Strategy):
  """A strategy of Flower with user-level differential privacy; a node is a user.

  Nodes are ordinary Flower ClientApps: they train from the ArrayRecord that they receive, and
  answer with an ArrayRecord of the same order and, if `private_metrics` are wanted, a
  MetricRecord. Cohorts are drawn as the plan says among `plan.population_size` places. A node
  takes the next free place when it is first seen, and keeps that place. A free place, or one
  whose node is offline, gives no answer. The server clips every answer, whatever the node did. An
  answer that is late, comes twice, is not finite or has other shapes is ignored. The state is on
  disk before anything that depends on it is sent.

  Args:
    model: The initial weights: a built Keras model, or a list of arrays, which are all trained.
    plan: A `tfdp.PrivacyPlan` with unit='user', a population size, and `batch_size` the expected
      number of nodes per round.
    rule: A `tfdp.rules` rule that needs no public gradients.
    server_learning_rate: Step size of the server, or a function of the number of rounds done.
    quantile_clip: A `QuantileClip`, or None for a fixed clip norm.
    private_metrics: `PrivateMetrics` of numbers in the nodes' MetricRecords, or None.
    evaluate: `ModelWeights -> {metric: value}` on the server's own data, or None.
    min_nodes: The number of nodes with a place that must be online before a round begins. A round
      that no node can answer would waste budget.
    wait: Seconds to wait for them. If they do not come online in time, `start` ends after the
      rounds that were run, and uses no budget for the others.
    out: Folder for the SECRET state, the nodes' places, metrics.csv and tensorboard/. A ServerApp
      that was killed resumes from it. None keeps nothing.
    settings: More arguments of `simulate`: `rounds_per_evaluation`, `facts`.
    seed: For tests only: fixed noise protects nobody.

  Attributes:
    result: The `Simulation` of the last `start`: weights, history and statement; its `state` is
      SECRET.
  """

  def __init__(
      self, model: nodes_lib.Model, *, plan: privacy.PrivacyPlan, rule: contract.Rule,
      server_learning_rate: server_lib.Rate = 1.0,
      quantile_clip: Optional[server_lib.QuantileClip] = None,
      private_metrics: Optional[server_lib.PrivateMetrics] = None,
      evaluate: Optional[simulation.Evaluate] = None, min_nodes: int = 1, wait: float = 3600,
      out: Optional[storage.Path] = None, settings: Optional[Mapping[str, Any]] = None,
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
    self._process = nodes_lib.Process(model, make_server)
    self._process.wait_for = min_nodes, wait
    self._out = None if out is None else pathlib.Path(out)
    self._size, self._evaluate, self._settings = size, evaluate, dict(settings or {})
    self.result: Optional[simulation.Simulation] = None

  def start(
      self, grid: nodes_lib.Grid, initial_arrays: Optional[flwr_app.ArrayRecord] = None,
      num_rounds: Optional[int] = None, timeout: float = 3600,
      train_config: Optional[flwr_app.ConfigRecord] = None, evaluate_config: None = None,
      evaluate_fn: None = None) -> flwr_strategy.Result:
    """Trains until `num_rounds` rounds of the plan were run, including those of earlier calls.

    Args:
      grid: Flower's grid.
      initial_arrays: The initial weights, an `ArrayRecord`, instead of the model's.
      num_rounds: The number of rounds of the plan; all by default.
      timeout: Seconds to wait for the answers of a round. Later ones are none.
      train_config: ConfigRecord for the nodes; 'server-round' is added.
      evaluate_config: Must be None, because measurements of the nodes are not private.
      evaluate_fn: Must be None; `evaluate` of the strategy takes its place.

    Returns:
      Flower's `Result`: the last arrays, the releases of every round as metrics of the ClientApps,
      and what `evaluate` returned as metrics of the ServerApp.
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
    arrays = process.in_order(self.result.weights)
    result = flwr_strategy.Result(arrays=flwr_app.ArrayRecord(arrays))
    for row in self.result.history:
      for private, metrics in ((True, result.train_metrics_clientapp),
                               (False, result.evaluate_metrics_serverapp)):
        metrics[row['round']] = flwr_app.MetricRecord({
            name: value for name, value in row.items()
            if name != 'round' and name.startswith('private/') == private})
    return result

  def _only_by_start(self, *unused: object, **also_unused: object) -> NoReturn:
    raise NotImplementedError('A round cannot be taken in parts: its cohort, noise and saved state '
                              'belong together. Call `start`.')

  configure_train = aggregate_train = _only_by_start
  configure_evaluate = aggregate_evaluate = _only_by_start

  def summary(self) -> None:
    """Logs what is promised."""
    _log.info(self._process.plan.statement(rule=self._process.rule))


def _replies(
    grid: nodes_lib.Grid, arrays: Sequence[np.ndarray], config: Mapping[str, Any],
    nodes: Sequence[int], timeout: float) -> Iterator[Tuple[int, nodes_lib.Content]]:
  """Yields `(node, content or error)` as answers to THESE messages come in, until the timeout."""
  tag = secrets.token_hex(16)
  content = flwr_app.RecordDict({
      'arrays': flwr_app.ArrayRecord(list(arrays)), 'config': flwr_app.ConfigRecord(dict(config))})
  deadline = time.monotonic() + timeout
  waiting: List[str] = []
  for some in groups.calls(nodes, _AT_ONCE):
    waiting += filter(None, grid.push_messages([flwr_app.Message(
        content, dst_node_id=node, message_type=flwr_app.MessageType.TRAIN, ttl=timeout,
        group_id=tag) for node in some]))
  while waiting and time.monotonic() < deadline:
    for part in [*groups.calls(waiting, _AT_ONCE)]:
      for reply in grid.pull_messages(set(part)):
        if reply.metadata.reply_to_message_id in waiting:
          waiting.remove(reply.metadata.reply_to_message_id)
        if reply.has_error():
          _log.warning('A node failed: %s (not private)', reply.error.reason)
        elif reply.metadata.group_id == tag:
          yield reply.metadata.src_node_id, reply.content
    if waiting:
      time.sleep(nodes_lib.POLL_SECONDS)
