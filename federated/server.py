# SPDX-License-Identifier: Apache-2.0
"""The private server of a round, as pure TensorFlow functions.

    broadcast(state) -> what a client needs to clip its answer; public
    record(broadcast, update, metrics) -> the answer of one client, bounded
    step(state, sum of the answers) -> next state, released numbers

Besides the update, an answer may hold some metrics, and whether it was clipped, which moves the
clip norm. Everything that a round releases is ONE Gaussian mechanism of the plan's noise multiplier
sigma. A part with share s of the budget gets noise of `sigma / sqrt(s)` times its own sensitivity.
The shares add up to one. The joint vector, with each part in units of its own noise, therefore
changes by at most 1 / sigma.
"""

from __future__ import annotations

import collections
import math
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple

import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import contract
from tfdp_adaptive import privacy
from tfdp_adaptive import private_rule
from tfdp_adaptive import privatizer
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.clipping import projection

RELEASED_NAMES = ('clients', 'l2_norm_clip', 'fraction_within_clip')
# Nothing here branches on tensors, and converting it costs seconds per process.
_plain = tf.autograph.experimental.do_not_convert


class QuantileClip(NamedTuple):
  """A clip norm that follows a quantile of the updates' norms (arXiv:1905.03871).

  After every round `clip *= exp(-learning_rate * (fraction - quantile))`, with the noisy fraction
  of clients whose update was within the clip norm. The clip norm starts at the plan's
  `l2_norm_clip`, and the noise stays proportional to it. With correlated noise the privacy is
  exact, and the cancellation of the noise is approximate.

  Attributes:
    quantile: Fraction of the updates that should not be clipped, in (0, 1).
    learning_rate: Largest move of the logarithm of the clip norm per round.
    share: Its share of each round's privacy budget, in (0, 1). The noise of the fraction has the
      standard deviation `noise_multiplier / (2 clients sqrt(share))`.
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
    share: Their share of each round's privacy budget, in (0, 1).
  """

  ranges: Mapping[str, Tuple[float, float]]
  share: float = 0.01


class ModelWeights(NamedTuple):
  """Weights of a model in its order; TFF's own class of this name works as well."""

  trainable: Any
  non_trainable: Any

  def assign_weights_to(self, model: Any) -> None:
    """Assigns the weights to a Keras model."""
    for variables, values in ((model.trainable_weights, self.trainable),
                              (model.non_trainable_weights, self.non_trainable)):
      for variable, value in zip(variables, values):
        variable.assign(value)


class ClipState(NamedTuple):
  """State of a clip norm that moves. It is SECRET."""

  privatizer: privatizer.State  # Of the fraction within the clip norm.
  factor: tf.Tensor  # [], of the plan's clip norm.


class State(NamedTuple):
  """State of the server. It is SECRET, except for the weights."""

  global_model_weights: Any  # `ModelWeights`.
  round: tf.Tensor  # [] int64, rounds done.
  query: private_rule.State
  clip: Any = ()  # `ClipState`, or ().
  metrics: Any = ()  # `privatizer.State` of the metrics.


class Answer(NamedTuple):
  """The SECRET answer of a client, or a sum of answers."""

  sums: Any  # One `contract.Sums` per ask.
  within: Any = ()  # [1] float32: 1 if the update was within the clip norm, or -1.
  metrics: Any = ()  # [1 + metrics] float32 in the unit ball.


class Sums(NamedTuple):
  """SECRET sums over clients of a round; `not_private` is SECRET, too."""

  answers: Answer
  not_private: Any


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
      self, rule: contract.Rule, specs: trees.Tree, plan: privacy.PrivacyPlan, learning_rate: float,
      quantile_clip: Optional[QuantileClip] = None,
      private_metrics: Optional[PrivateMetrics] = None, seed: Optional[int] = None) -> None:
    self.plan, self.rule, self.seed = plan, rule, seed
    self.settings = dict(server_rule=rule, server_learning_rate=learning_rate,
                         quantile_clip=quantile_clip, private_metrics=private_metrics)
    _check(rule, plan, learning_rate)
    numbers = privatizer.settings(rule, plan)
    sides = _check_sides(rule, plan, quantile_clip, private_metrics)
    self._learning_rate = learning_rate
    self.specs = specs
    self._quantile_clip: Any = quantile_clip  # Read where there is one.
    self.private_metrics: Any = private_metrics

    def noise(share: float, l2_norm_clip: float, offset: int) -> Dict[str, Any]:
      return dict(numbers, l2_norm_clip=l2_norm_clip,
                  noise_multiplier=plan.noise_multiplier / math.sqrt(share),
                  seed=None if seed is None else seed + offset)

    self._private = private_rule.PrivateRule(
        rule, specs,
        **noise(1 - sum(side.share for side in sides), plan.l2_norm_clip, 0))
    self._within, self._metrics = (
        side and privatizer.Privatizer(
            (contract.Ask(),), tf.TensorSpec([size]), **noise(side.share, 1.0, offset))
        for side, size, offset in (
            (quantile_clip, 1, 10**9), (private_metrics, _size(private_metrics), 2 * 10**9)))

  @_plain
  def init(self, weights: Any) -> State:
    return State(weights, tf.zeros([], tf.int64), self._private.init(),
                 ClipState(self._within.init(), tf.ones([])) if self._within else (),
                 self._metrics.init() if self._metrics else ())

  def _request(self, state: State) -> interface.Request:
    request = self._private.ask(state.query)
    if not self._within:
      return request
    return self._private.request(tuple(
        query._replace(relative_clip=query.relative_clip * state.clip.factor)
        for query in request.queries))

  @_plain
  def broadcast(self, state: State) -> private_rule.Broadcast:
    return self._private.broadcast(self._request(state))

  @_plain
  def record(self, broadcast: Any, update: Any, metrics: Any = ()) -> Answer:
    """Returns a client's `Answer`; `metrics` come from `bounded_metrics`, or are ().

    An update with other shapes than the weights is refused. An update that is not finite counts as
    zero.
    """
    tf.nest.assert_same_structure(update, self.specs)
    update = trees.map(lambda u, s: trees.shaped(tf.cast(u, s.dtype), s.shape), update,
                       self._private.specs)
    within = ()
    if self._within:
      (ask,), (query,) = self._private.rule.asks, self._private.queries(broadcast, update)
      norm = projection.scaled_norm(ask, query, update)
      # A norm that is not finite is not within the clip norm.
      within = tf.where(norm <= broadcast.clips[0], [1.0], [-1.0])
    return Answer(self._private.record(broadcast, update), within, metrics)

  @_plain
  def bounded_metrics(self, values: Any) -> tf.Tensor:
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
    return Answer(self._private.zero_sums(), tf.zeros([1]) if self._within else (),
                  tf.zeros([_size(self.private_metrics)]) if self._metrics else ())

  @_plain
  def step(self, state: State, total: Answer) -> Tuple[State, Any]:
    """Adds noise to the sums of a round and updates the weights.

    Returns:
      The next state, and {name: [] float32} of the other released numbers.
    """
    request = self._request(state)
    direction, query = self._private.answer(state.query, request, total.sums)
    released, clip, metrics = collections.OrderedDict(), (), ()
    if self._within:
      mean, noise = _release(self._within, state.clip.privatizer, total.within)
      fraction = tf.clip_by_value((mean[0] + 1) / 2, 0.0, 1.0)
      released['l2_norm_clip'] = request.clips[0]
      released['fraction_within_clip'] = fraction
      clip = ClipState(noise, state.clip.factor * tf.exp(
          -self._quantile_clip.learning_rate * (fraction - self._quantile_clip.quantile)))
    if self._metrics:
      mean, metrics = _release(self._metrics, state.metrics, total.metrics)
      released.update(self._metric_means(mean))
    weights = state.global_model_weights
    rate = self._learning_rate(state.round) if callable(
        self._learning_rate) else self._learning_rate
    trainable = trees.map(
        lambda w, d: w - tf.cast(rate, w.dtype) * tf.cast(d, w.dtype), weights.trainable, direction)
    if self.rule.project is not None:
      trainable = self.rule.project(query.rule, trainable)
    return State(weights._replace(trainable=trainable), state.round + 1,
                 query, clip, metrics), released

  def _metric_means(self, mean: tf.Tensor) -> Iterator[Tuple[str, tf.Tensor]]:
    clients = mean[0] * math.sqrt(len(self.private_metrics.ranges) + 1) * self.plan.batch_size
    yield 'clients', clients
    # The noised number of clients may be anything; means stay in their range.
    for i, (name, (low, high)) in enumerate(self.private_metrics.ranges.items(), 1):
      ratio = mean[i] / tf.maximum(mean[0], 1.0 / self.plan.batch_size)
      yield name, low + (high - low) * tf.clip_by_value(ratio, 0.0, 1.0)


def _check(rule: contract.Rule, plan: privacy.PrivacyPlan, learning_rate: Any) -> None:
  if not isinstance(plan, privacy.PrivacyPlan) or not plan.whole_users:
    raise ValueError("`plan` must be a `tfdp.PrivacyPlan` with unit='user' that samples users: "
                     'what is clipped and noised here is the update of a whole user. '
                     f'Received: plan={plan!r}.')
  if not isinstance(rule, contract.Rule):
    raise ValueError('`server_rule` must be a rule of `tfdp.rules`, such as `dp_adam()`. '
                     f'Received: server_rule={rule!r}.')
  if rule.public is not None:
    raise ValueError(
        f'`server_rule` must not need public gradients, and {rule.name} does: they would have to '
        'be taken at the server, in the units of the clients\' updates. Use its Keras optimizer. '
        f'Received: server_rule={rule.name!r}.')
  if not callable(learning_rate):
    checks.positive(server_learning_rate=learning_rate)


def _check_sides(
    rule: contract.Rule, plan: privacy.PrivacyPlan, quantile_clip: Optional[QuantileClip],
    private_metrics: Optional[PrivateMetrics]) -> List[Any]:
  """Returns those of the two that are given."""
  sides: List[Any] = []
  for side, kind in ((quantile_clip, QuantileClip), (private_metrics, PrivateMetrics)):
    if side is not None:
      if not isinstance(side, kind):
        raise ValueError('`quantile_clip` must be a `QuantileClip`, and `private_metrics` '
                         f'`PrivateMetrics`, or None. Received: {side!r}.')
      checks.probability(share=side.share)
      sides.append(side)
  if sum(side.share for side in sides) >= 1:
    raise ValueError('`share`s must be below one together. '
                     f'Received: {[side.share for side in sides]}.')
  if sides and plan.amplified and plan.adjacency == 'replace':
    raise ValueError(
        'Poisson sampling under replace adjacency is accounted for one clipped sum per round '
        'only: leave `quantile_clip` and `private_metrics` out, or use adjacency="zero_out".')
  if quantile_clip is not None:
    if len(rule.asks) != 1:
      raise ValueError(f'`quantile_clip` needs a rule with one query per round, and {rule.name} '
                       f'has {len(rule.asks)}.')
    checks.probability(quantile=quantile_clip.quantile)
    checks.not_negative(learning_rate=quantile_clip.learning_rate)
  if private_metrics is not None:
    _check_ranges(private_metrics.ranges)
  return sides


def _check_ranges(ranges: Any) -> None:
  try:
    good = bool(ranges) and all(
        isinstance(name, str) and checks.is_number(low) and checks.is_number(high)
        and -math.inf < low < high < math.inf for name, (low, high) in ranges.items())
  except (AttributeError, TypeError, ValueError):
    good = False
  if not good:
    raise ValueError('`ranges` must be {metric: (lowest, highest)}, finite and in this order. '
                     f'Received: ranges={ranges!r}.')
  taken = sorted(set(ranges) & set(RELEASED_NAMES))
  if taken:
    raise ValueError('`private_metrics` must leave the names of what else is released, '
                     f'{list(RELEASED_NAMES)}. Received: {taken}; rename the metrics.')


def _release(noiser: privatizer.Privatizer, state: Any, total: tf.Tensor) -> Tuple[tf.Tensor, Any]:
  (release,), state = noiser.release(state, (contract.Query(),), (contract.Sums(total),))
  return release.mean, state


def _size(private_metrics: Optional[PrivateMetrics]) -> int:
  return 1 + len(private_metrics.ranges) if private_metrics else 0
