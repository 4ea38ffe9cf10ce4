# SPDX-License-Identifier: Apache-2.0
"""Clip norms that follow the norms of the records, which a side query estimates."""

import math
from typing import Any, Callable, NamedTuple, Optional, Tuple

import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import contract
from tfdp_adaptive import trees
from tfdp_adaptive.rules import moments
from tfdp_adaptive.rules import wrapping


class State(NamedTuple):
  step: tf.Tensor  # [] int64, releases consumed.
  rule: trees.Tree  # State of the rule whose clip norm follows.
  log_factor: tf.Tensor  # [] log of the clip norm over `l2_norm_clip`; public.
  estimate: tf.Tensor  # [size] the last estimate of what was measured; public, noised.


def quantile_clip(rule: contract.Rule, quantile: float = 0.5, learning_rate: float = 0.2,
                  stddev: Optional[float] = None,
                  bounds: Tuple[float, float] = (1e-4, 1e4), units: bool = False) -> contract.Rule:
  """A clip norm that follows a quantile of the records' norms.

  Andrew et al., arXiv:1905.03871, with the count released jointly with the sum:

      f = 1/2 where ||s g|| <= zeta, else -1/2;   b = 1/2 + (sum f + stddev z) / B
      zeta <- zeta * exp(-learning_rate * (b - quantile))

  The sum of records then has the noise multiplier (sigma^-2 - (2 stddev)^-2)^(-1/2), which is 0.08%
  more noise at B = 256. Both releases together cost exactly as much as sigma. log zeta is a prefix
  sum of the counts, so with a correlated mechanism its noise cancels as that of the weights does;
  rows are in units of their own clip norm, so zeta may move at every step. Around `grouped`, one
  zeta scales all groups. Inside `grouped`, each group has its own zeta.

  Args:
    rule: Any rule with one query per step and one clip norm.
    quantile: The fraction of records that should be within the clip norm, in (0, 1).
    learning_rate: The learning rate of log zeta, >= 0.
    stddev: The noise on the count, in records; by default B / 20, or twice the noise multiplier
      if that is more, which costs 3.3% more noise. It must be more than half of the noise
      multiplier.
    bounds: Smallest and largest zeta, in units of `l2_norm_clip`, which is its initial value.
    units: Whether the rule gets gradients divided by zeta / l2_norm_clip. A rule that scales before
      clipping never does. A learning rate is then in units of the clip norm.

  Returns:
    A `contract.Rule`.
  """
  if stddev is not None:
    checks.positive(stddev=stddev)

  def of_norm(norm: tf.Tensor, clip_norm: trees.Scalar) -> tf.Tensor:
    half = tf.constant(0.5, norm.dtype)
    return tf.where(norm <= tf.cast(clip_norm, norm.dtype), half, -half)[..., tf.newaxis]

  def noise(noise_multiplier: float, batch_size: float) -> Tuple[float, float]:
    if not noise_multiplier:
      return 1.0, 0.0
    std = count_stddev(noise_multiplier, batch_size) if stddev is None else stddev
    return beside_count(noise_multiplier, stddev=std), std

  return _following(rule, contract.SideQuery(1, of_norm, noise, even=True), lambda mean: mean + 0.5,
                    quantile, learning_rate, bounds, 'quantile_clip', units)


def count_stddev(noise_multiplier: float, batch_size: float) -> float:
  """Returns the noise on a count that is small beside the batch and costs little."""
  return max(batch_size / 20, 2 * noise_multiplier)


def beside_count(noise_multiplier: float, **stddev: float) -> float:
  """Returns the factor on the noise of a sum if a count of +-1/2 is released with it.

  The squares of sensitivity over standard deviation add up: `sigma^-2 = sum^-2 + (2 s)^-2`
  (Andrew et al., arXiv:1905.03871, Theorem 1).

  Args:
    noise_multiplier: sigma, of both together, > 0.
    **stddev: s, of the noise on the count, by the name that a user knows.
  """
  (name, std), = stddev.items()
  if 2 * std <= noise_multiplier:
    raise ValueError(
        f'`{name}` must be more than half of the noise multiplier: the count alone would cost '
        f'more. Received: {name}={std:g}, noise_multiplier={noise_multiplier:g}. Use larger '
        'batches, or more noise on the count.')
  return (1 - (noise_multiplier / (2 * std))**2)**-0.5


def slack_clip(rule: contract.Rule, buckets: int, quantile: float = 0.5,
               learning_rate: float = 0.5,
               bounds: Tuple[float, float] = (1e-4, 1e4)) -> contract.Rule:
  """Adapts the clip norm to the slack of clipped records, at no privacy cost.

  SlaClip (ICML 2026): a record of norm n < zeta could have been longer by zeta - n. This slack
  carries K numbers f_k under the same noise, with lam = zeta / sqrt(K):

      f_k = clip(sqrt(K) (zeta - n)_+ - k lam, 0, lam),  k = 0 .. K - 1;  s_k = sum f_k / (lam B)
      P(n <= zeta (1 - (k + 1) / K)) <= E s_k <= P(n < zeta (1 - k / K))
      zeta <- zeta * exp(learning_rate * (quantile - s_0))

  Noise and cost are those of the sum alone: ||f||^2 <= lam sum f <= zeta (zeta - n), so that
  ||(g, f)||^2 <= (zeta - s)^2 + zeta s <= zeta^2 with s = (zeta - n)_+. `rule_state.estimate` has
  K points of the distribution of norms below zeta. The update of zeta differs from the paper, which
  compares a fraction with zeta.

  Args:
    rule: As for `quantile_clip`. Its records must not be scaled up, so `AutoV`, `AutoS` and `PSAC`
      are refused.
    buckets: K >= 1. s_k has noise `sigma sqrt(K) / B`; see `slack_buckets`.
    quantile: Roughly the fraction of records that should be within (1 - 1/K) zeta, in (0, 1).
    learning_rate: The learning rate of log zeta, >= 0.
    bounds: As for `quantile_clip`.

  Returns:
    A `contract.Rule` whose direction has the same unit as that of `rule`.
  """
  checks.whole(buckets=buckets)
  root = math.sqrt(buckets)

  def of_norm(norm: tf.Tensor, clip_norm: trees.Scalar) -> tf.Tensor:
    """Computes in units of zeta, so that squares and sums stay in range."""
    zeta = tf.cast(clip_norm, norm.dtype)
    # Half a rounding is given away; a clip norm of zero leaves no slack.
    slack = (1 - 1e-6) * tf.where(zeta > norm, 1 - norm / zeta, tf.zeros_like(norm))
    index = tf.range(buckets, dtype=norm.dtype)
    return tf.clip_by_value(root * slack[..., tf.newaxis] - index / root, 0, 1 / root)

  def noise(noise_multiplier: float, batch_size: float) -> Tuple[float, float]:
    del batch_size
    return 1.0, noise_multiplier

  return _following(
      rule, contract.SideQuery(buckets, of_norm, noise, shrinks=True), lambda mean: root * mean,
      quantile, learning_rate, bounds, 'slack_clip')


def slack_buckets(batch_size: float, noise_multiplier: float) -> int:
  """Returns the K that balances the noise of s_k with the width of a bucket."""
  checks.positive(batch_size=batch_size)
  checks.not_negative(noise_multiplier=noise_multiplier)
  if not noise_multiplier:
    return 64
  return min(64, max(1, math.floor((batch_size / (5.152 * noise_multiplier))**(2 / 3))))


def _following(rule: contract.Rule, side: contract.SideQuery, estimate: Callable[..., Any],
               quantile: float, learning_rate: float, bounds: Tuple[float, float],
               name: str, units: bool = False) -> contract.Rule:
  checks.probability(quantile=quantile)
  checks.not_negative(learning_rate=learning_rate)
  low, high = bounds
  checks.positive(bounds=low)
  checks.positive(bounds=high)
  checks.require(low <= 1 <= high, 'hold 1, where the clip norm starts in units of `l2_norm_clip`',
                 bounds=bounds)
  wrapping.require(rule, 'query', 'clip norm', 'fixed', 'step')
  contract.check_side_query(rule.asks[0]._replace(side_query=side))

  def init(specs: trees.Tree) -> State:
    dtype = trees.dtype_of(specs)
    return State(moments.first_step(), rule.init(specs), tf.zeros([], dtype),
                 tf.zeros([side.size], dtype))

  def query(state: State, public: trees.Tree = ()) -> contract.Queries:
    factor = tf.exp(state.log_factor)
    return tuple(one._replace(relative_clip=factor * tf.cast(one.relative_clip, factor.dtype))
                 for one in rule.query(state.rule, public))

  def update(
      state: State, releases: contract.Releases,
      public: trees.Tree = ()) -> Tuple[trees.Tree, State]:
    if units and rule.asks[0].second is None and trees.absent(
        rule.query(state.rule, public)[0].scale):
      releases = (_divided(releases[0], tf.exp(state.log_factor)),)
    direction, inner = rule.update(state.rule, releases, public)
    estimated = estimate(releases[0].side_mean)
    moved = state.log_factor - learning_rate * (estimated[0] - quantile)
    moved = tf.clip_by_value(moved, math.log(bounds[0]), math.log(bounds[1]))
    return direction, State(state.step + 1, inner, moved, estimated)

  return rule._replace(
      init=init, query=query, update=update, project=wrapping.of_inner(rule), public_due=None,
      asks=(rule.asks[0]._replace(side_query=side),), name=f'{name}({rule.name})')


def _divided(release: contract.Release, factor: tf.Tensor) -> contract.Release:
  """Returns a release of gradients that were divided by the factor."""
  over = lambda tree, by: trees.map(lambda t: t / tf.cast(by, t.dtype), tree)
  return release._replace(
      mean=over(release.mean, factor), variance=over(release.variance, tf.square(factor)))
