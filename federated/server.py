# SPDX-License-Identifier: Apache-2.0
"""The private server of a round, as pure TensorFlow functions.

    broadcast(state) -> what a client needs to clip its answer; public
    record(broadcast, update, metrics) -> the answer of one client, bounded
    step(state, sum of the answers) -> next state, released numbers

Besides the update, an answer may hold some metrics, and whether it was clipped, if the clip norm
follows a quantile. Everything that a round releases is ONE Gaussian mechanism of the plan's noise
multiplier sigma. A part with share s of the budget gets noise of `sigma / sqrt(s)` times its own
sensitivity. The shares add up to one. The joint vector, with each part in units of its own noise,
therefore changes by at most 1 / sigma.
"""

import collections
import math
from typing import Any, Callable, Dict, Iterator, Mapping, NamedTuple, Optional, Tuple, Union

import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import contract
from tfdp_adaptive import privacy
from tfdp_adaptive import private_rule
from tfdp_adaptive import privatizer
from tfdp_adaptive import rules
from tfdp_adaptive import trees

Rate = Union[float, Callable[[tf.Tensor], tf.Tensor]]  # May depend on the rounds done.
RELEASED_NAMES = ('clients', 'l2_norm_clip', 'fraction_within_clip')
# Nothing here branches on tensors, and converting it costs seconds per process.
_plain = tf.autograph.experimental.do_not_convert


class QuantileClip(NamedTuple):
  """Settings of a clip norm that follows a quantile of the updates' norms (arXiv:1905.03871).

  It wraps the server's rule in `tfdp.rules.quantile_clip`, whose noise is given as a share of the
  budget. After every round `clip *= exp(-learning_rate * (fraction - quantile))`, with the noisy
  fraction of clients whose update was within the clip norm. The clip norm starts at the plan's
  `l2_norm_clip`, and the noise stays proportional to it.

  Attributes:
    quantile: Fraction of the updates that should not be clipped, in (0, 1).
    learning_rate: Largest move of the logarithm of the clip norm per round.
    share: The share of each round's privacy budget that the count of unclipped updates gets, in (0,
      1). The noise of the fraction has the standard deviation `noise_multiplier / (2 clients
      sqrt(share))`.
  """

  quantile: float = 0.5
  learning_rate: float = 0.2
  share: float = 0.01


class PrivateMetrics(NamedTuple):
  """Noisy means of the clients' training metrics in a round.

  Each client contributes its own value of a metric, clipped to the range of the metric. The noisy
  number of clients is released as well.

  Attributes:
    ranges: {metric of the model: (lowest, highest)}, chosen without the data.
    share: The share of each round's privacy budget that the metrics get, in (0, 1).
  """

  ranges: Mapping[str, Tuple[float, float]]
  share: float = 0.01


class ModelWeights(NamedTuple):
  """Weights of a model in its order; TFF's own class of this name works as well."""

  trainable: trees.Tree
  non_trainable: trees.Tree

  def assign_weights_to(self, model: tf.keras.Model) -> None:
    """Assigns the weights to a Keras model."""
    for variables, values in ((model.trainable_weights, self.trainable),
                              (model.non_trainable_weights, self.non_trainable)):
      trees.assign(zip(variables, values))


class State(NamedTuple):
  """State of the server. It is SECRET, except for the weights."""

  global_model_weights: ModelWeights
  round: tf.Tensor  # [] int64, rounds done.
  query: private_rule.State
  metrics: Any = ()  # `privatizer.State` of the metrics.


class Answer(NamedTuple):
  """The SECRET answer of a client, or a sum of answers."""

  sums: Tuple[contract.Sums, ...]  # One per ask.
  metrics: trees.Tree = ()  # [1 + metrics] float32 in the unit ball.


class Sums(NamedTuple):
  """The SECRET sum of clients' answers, and who is not in it."""

  answers: Answer
  failed: Mapping[Any, Exception] = {}  # {client that is not in the sums: error}


class Server:
  """See the module's docstring.

  Args:
    rule: A `tfdp.rules` rule that needs no public gradients.
    specs: Nest of `tf.TensorSpec` like the trainable weights.
    plan: The `tfdp.PrivacyPlan`.
    learning_rate: Positive, or a function of the number of rounds done.
    quantile_clip: `QuantileClip`, or None for a fixed clip norm.
    private_metrics: `PrivateMetrics`, or None.
    seed: For tests only.

  Attributes:
    specs: As given, and so are `plan`, `rule`, `seed` and `private_metrics`.
    settings: {argument: value}, for the statement and to recognize a saved run.
  """

  def __init__(
      self, rule: contract.Rule, specs: trees.Tree, plan: privacy.PrivacyPlan, learning_rate: Rate,
      quantile_clip: Optional[QuantileClip] = None,
      private_metrics: Optional[PrivateMetrics] = None, seed: Optional[int] = None) -> None:
    self.plan, self.rule, self.seed = plan, rule, seed
    self.settings = dict(server_rule=rule, server_learning_rate=learning_rate,
                         quantile_clip=quantile_clip, private_metrics=private_metrics)
    _check(rule, plan, learning_rate)
    numbers = privatizer.settings(rule, plan)
    share = 1 - _check_shares(plan, quantile_clip, private_metrics)
    self._learning_rate = learning_rate
    self.specs = specs
    self._quantile_clip = quantile_clip
    self.private_metrics: Any = private_metrics

    def noise(share: float, l2_norm_clip: float, offset: int) -> Dict[str, Any]:
      return dict(numbers, l2_norm_clip=l2_norm_clip,
                  noise_multiplier=plan.noise_multiplier / math.sqrt(share),
                  seed=None if seed is None else seed + offset)

    self._private = private_rule.PrivateRule(
        _adaptive(rule, quantile_clip, plan), specs, **noise(share, numbers['l2_norm_clip'], 0))
    self._metrics = private_metrics and privatizer.Privatizer(
        (contract.Ask(),), tf.TensorSpec([_size(private_metrics)]),
        **noise(private_metrics.share, 1.0, 2 * 10**9))

  @_plain
  def init(self, weights: ModelWeights) -> State:
    return State(weights, tf.zeros([], tf.int64), self._private.init(),
                 self._metrics.init() if self._metrics else ())

  @_plain
  def broadcast(self, state: State) -> private_rule.Broadcast:
    return self._private.broadcast(self._private.query(state.query))

  @_plain
  def record(self, broadcast: private_rule.Broadcast, update: trees.Tree, metrics: trees.Tree = ()
             ) -> Answer:
    """Returns a client's `Answer`; `metrics` come from `bounded_metrics`, or are ().

    An update with other shapes than the weights is refused. An update that is not finite counts as
    zero.
    """
    tf.nest.assert_same_structure(update, self.specs)
    update = trees.map(lambda u, s: trees.shaped(tf.cast(u, s.dtype), s.shape), update,
                       self._private.specs)
    return Answer(self._private.record(broadcast, update), metrics)

  @_plain
  def bounded_metrics(self, values: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Returns [1 + metrics] float32 of norm at most one, from a client's own metrics."""
    parts = [tf.ones([])]
    for name, (low, high) in self.private_metrics.ranges.items():
      if name not in values:
        raise ValueError(f'`private_metrics` must name metrics of the model, {list(values)}. '
                         f'Received: {name!r}.')
      value = (tf.cast(values[name], tf.float32) - low) / (high - low)
      parts.append(tf.where(tf.math.is_finite(value), tf.clip_by_value(value, 0.0, 1.0), 0.0))
    return tf.stack(parts) / math.sqrt(len(parts))

  def zero(self) -> Answer:
    """Returns the sum over no clients."""
    return Answer(self._private.zero_sums(),
                  tf.zeros([_size(self.private_metrics)]) if self._metrics else ())

  @_plain
  def step(self, state: State, total: Answer) -> Tuple[State, Dict[str, tf.Tensor]]:
    """Adds noise to the sums of a round and updates the weights.

    Returns:
      The next state, and {name: [] float32} of the other released numbers.
    """
    request = self._private.query(state.query)
    direction, query = self._private.answer(state.query, request, total.sums)
    released, metrics = collections.OrderedDict(), ()
    if self._quantile_clip is not None:
      released['l2_norm_clip'] = request.clips[0]
      released['fraction_within_clip'] = tf.clip_by_value(query.rule.estimate[0], 0.0, 1.0)
    if self._metrics:
      (release,), metrics = self._metrics.release(
          state.metrics, (contract.Query(),), (contract.Sums(total.metrics),))
      released.update(self._metric_means(release.mean))
    weights = state.global_model_weights
    rate = self._learning_rate(state.round) if callable(
        self._learning_rate) else self._learning_rate
    trainable = trees.map(
        lambda w, d: w - tf.cast(rate, w.dtype) * tf.cast(d, w.dtype), weights.trainable, direction)
    if self._private.rule.project is not None:
      trainable = self._private.rule.project(query.rule, trainable)
    return State(weights._replace(trainable=trainable), state.round + 1, query, metrics), released

  def _metric_means(self, mean: tf.Tensor) -> Iterator[Tuple[str, tf.Tensor]]:
    clients = mean[0] * math.sqrt(len(self.private_metrics.ranges) + 1) * self.plan.batch_size
    yield 'clients', clients
    # The noised number of clients may be anything; means stay in their range.
    for i, (name, (low, high)) in enumerate(self.private_metrics.ranges.items(), 1):
      ratio = mean[i] / tf.maximum(mean[0], 1.0 / self.plan.batch_size)
      yield name, low + (high - low) * tf.clip_by_value(ratio, 0.0, 1.0)


def _check(rule: contract.Rule, plan: privacy.PrivacyPlan, learning_rate: Rate) -> None:
  checks.require(isinstance(plan, privacy.PrivacyPlan) and plan.whole_users,
                 "be a `tfdp.PrivacyPlan` with unit='user' that samples users: what is clipped "
                 'and noised here is the update of a whole user', plan=plan)
  contract.check_rule(rule)
  checks.require(rule.public is None,
                 f'not need public gradients, and {rule.name} does: they would have to be taken '
                 "at the server, in the units of the clients' updates. Use its Keras optimizer",
                 server_rule=rule.name)
  if not callable(learning_rate):
    checks.positive(server_learning_rate=learning_rate)


def _adaptive(rule: contract.Rule, quantile_clip: Optional[QuantileClip],
              plan: privacy.PrivacyPlan) -> contract.Rule:
  """Returns the rule with a clip norm that follows a quantile, if that is asked for."""
  if quantile_clip is None:
    return rule
  stddev = plan.noise_multiplier / (2 * math.sqrt(quantile_clip.share))
  return rules.quantile_clip(
      rule, quantile_clip.quantile, quantile_clip.learning_rate, stddev or None)


def _check_shares(
    plan: privacy.PrivacyPlan, quantile_clip: Optional[QuantileClip],
    private_metrics: Optional[PrivateMetrics]) -> float:
  """Returns the share of the budget that the metrics take."""
  shares = []
  for part, kind in ((quantile_clip, QuantileClip), (private_metrics, PrivateMetrics)):
    if part is not None:
      if not isinstance(part, kind):
        raise ValueError('`quantile_clip` must be a `QuantileClip`, and `private_metrics` '
                         f'`PrivateMetrics`, or None. Received: {part!r}.')
      checks.probability(share=part.share)
      shares.append(part.share)
  if sum(shares) >= 1:
    raise ValueError(f'`share`s must be below one together. Received: {shares}.')
  if shares and plan.amplified and plan.adjacency == 'replace':
    raise ValueError(
        'Poisson sampling under replace adjacency is accounted for one clipped sum per round '
        'only: leave `quantile_clip` and `private_metrics` out, or use adjacency="zero_out".')
  if private_metrics is None:
    return 0.0
  _check_ranges(private_metrics.ranges)
  return private_metrics.share


def _check_ranges(ranges: Mapping[str, Tuple[float, float]]) -> None:
  try:
    good = bool(ranges) and all(
        isinstance(name, str) and checks.is_number(low) and checks.is_number(high)
        and -math.inf < low < high < math.inf for name, (low, high) in ranges.items())
  except (AttributeError, TypeError, ValueError):
    good = False
  checks.require(good, 'be {metric: (lowest, highest)}, finite and in this order', ranges=ranges)
  taken = sorted(set(ranges) & set(RELEASED_NAMES))
  if taken:
    raise ValueError('`private_metrics` must leave the names of what else is released, '
                     f'{list(RELEASED_NAMES)}. Received: {taken}; rename the metrics.')


def _size(private_metrics: Optional[PrivateMetrics]) -> int:
  return 1 + len(private_metrics.ranges) if private_metrics else 0
