# SPDX-License-Identifier: Apache-2.0
"""A clip norm that follows a quantile of the records' norms, at no extra cost."""

import collections
from typing import Any, NamedTuple, Optional, Tuple

import dp_accounting
import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import mechanisms
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import choices
from tfdp_adaptive.mechanisms import independent
from tfdp_adaptive.queries import mechanism_sum
from tfdp_adaptive.queries import sums
from tfdp_adaptive.rules import following_clip


class _Pair(NamedTuple):
  """A value for the sum of records, and one for the count of records within the estimate."""

  total: Any
  count: Any


class AdaptiveClipSumQuery(sums.SumAggregationDPQuery):
  """`MechanismSumQuery` with a quantile-adaptive clip norm (Andrew et al., arXiv:1905.03871).

  Each record adds its clipped value to the sum. It adds +1/2 to the count if its norm is within the
  estimate of the quantile, and -1/2 otherwise. The same mechanism adds noise to both, and they are
  one joint release of noise multiplier sigma. If the count has the standard deviation s (in
  records, with sensitivity 1/2), the sum gets `(sigma^-2 - (2 s)^-2)^(-1/2)`. Under replace both
  sensitivities and both noises double. Under zero_out a null record adds nothing to either.

  As in tensorflow_privacy, the estimate moves at every step and becomes the clip norm when the
  query is restarted (`RestartQuery`). With `every_step` it becomes the clip norm at once. Both are
  private, since past results alone determine the clip norm, and every row of noise is in units of
  its own clip norm.

  Args:
    record_specs: Tree of `tf.TensorSpec` like a record.
    mechanism: A `tfdp.mechanisms.Mechanism`, for both releases.
    initial_l2_norm_clip: The first estimate and clip norm.
    noise_multiplier: Of both releases together: what is to be accounted for.
    expected_num_records: Records per step, the divisor of the count; public.
    target_unclipped_quantile: The fraction of records whose norms should be within the estimate.
    learning_rate: Of the estimate; it moves by at most this, or exp(this).
    clipped_count_stddev: s; `expected_num_records / 20` by default.
    geometric_update: Move the logarithm of the estimate.
    every_step: See above.
    adjacency: 'zero_out', 'add_remove' or 'replace'.
    clipping: How records are weighted, see `MechanismSumQuery`.
    seed: For tests only: fixed noise protects nobody.
  """

  class GlobalState(NamedTuple):
    """Global state. It is SECRET, except for `estimate`."""

    sum_state: mechanism_sum.MechanismSumQuery.GlobalState
    count_state: mechanism_sum.MechanismSumQuery.GlobalState
    estimate: tf.Tensor  # [] float32, of the quantile.

  def __init__(
      self, record_specs: trees.Tree, mechanism: mechanisms.Mechanism, initial_l2_norm_clip: float,
      noise_multiplier: float, expected_num_records: float, *,
      target_unclipped_quantile: float = 0.5, learning_rate: float = 0.2,
      clipped_count_stddev: Optional[float] = None, geometric_update: bool = True,
      every_step: bool = False, adjacency: str = 'zero_out', clipping: Any = None,
      seed: Optional[int] = None) -> None:
    clipping = choices.for_query(clipping, 1)
    if seed is not None:
      checks.whole(0, seed=seed)
    checks.positive(expected_num_records=expected_num_records)
    checks.not_negative(noise_multiplier=noise_multiplier, learning_rate=learning_rate)
    if not (checks.is_number(target_unclipped_quantile) and 0 <= target_unclipped_quantile <= 1):
      raise ValueError('`target_unclipped_quantile` must be in [0, 1]. Received: '
                       f'target_unclipped_quantile={target_unclipped_quantile}.')
    if clipped_count_stddev is None:
      clipped_count_stddev = expected_num_records / 20 if noise_multiplier else 0.0
    checks.not_negative(clipped_count_stddev=clipped_count_stddev)
    self._sum_multiplier = noise_multiplier and noise_multiplier * following_clip.beside_count(
        noise_multiplier, clipped_count_stddev=clipped_count_stddev)
    self._noise_multiplier = float(noise_multiplier)
    self._mechanism = mechanism
    self._expected_num_records = float(expected_num_records)
    self._target = float(target_unclipped_quantile)
    self._learning_rate = float(learning_rate)
    self._geometric_update = geometric_update
    self._every_step = every_step
    self._sum = mechanism_sum.MechanismSumQuery(
        record_specs, mechanism, initial_l2_norm_clip, self._sum_multiplier,
        adjacency=adjacency, clipping=clipping, seed=seed)
    self._count = mechanism_sum.MechanismSumQuery(
        tf.TensorSpec([]), mechanism, 0.5, 2 * clipped_count_stddev, adjacency=adjacency,
        seed=None if seed is None else ~seed)

  def initial_global_state(self) -> GlobalState:
    total = self._sum.initial_global_state()
    return self.GlobalState(total, self._count.initial_global_state(), total.clip_value)

  def derive_sample_params(self, global_state: GlobalState) -> _Pair:
    return _Pair(global_state.sum_state.clip_value, global_state.estimate)

  def initial_sample_state(self, template: Any = None) -> _Pair:
    return _Pair(self._sum.initial_sample_state(template), self._count.initial_sample_state())

  def preprocess_record(self, params: Any, record: trees.Tree) -> _Pair:
    clipped, norm = self._sum.preprocess_record_l2_impl(params.total, record)
    within = tf.cast(norm, tf.float32) <= params.count  # Not so if the norm is not finite.
    return _Pair(clipped, tf.where(within, 0.5, -0.5))

  def get_noised_result(
      self, sample_state: trees.Tree,
      global_state: GlobalState) -> Tuple[trees.Tree, GlobalState, dp_accounting.DpEvent]:
    result, sum_state, _ = self._sum.get_noised_result(sample_state.total, global_state.sum_state)
    count, count_state, _ = self._count.get_noised_result(
        sample_state.count, global_state.count_state)
    fraction = tf.clip_by_value(count / self._expected_num_records + 0.5, 0.0, 1.0)
    step = self._learning_rate * (fraction - self._target)
    estimate = (global_state.estimate * tf.exp(-step) if self._geometric_update
                else global_state.estimate - step)
    state = self.GlobalState(sum_state, count_state, estimate)
    if self._every_step:
      state = self._adopt(state)
    return result, state, self._event()

  def reset_state(self, noised_results: Any, global_state: GlobalState) -> GlobalState:
    """Starts another run of the mechanism, with the estimate as the clip norm."""
    state = self._adopt(global_state)
    return state._replace(
        sum_state=self._sum.reset_state(noised_results, state.sum_state),
        count_state=self._count.reset_state(noised_results, state.count_state))

  def derive_metrics(self, global_state: GlobalState) -> collections.OrderedDict:
    return collections.OrderedDict(
        current_clip=global_state.sum_state.clip_value, estimate_clip=global_state.estimate)

  def _adopt(self, state: GlobalState) -> GlobalState:
    clip = tf.maximum(state.estimate, 0.0)  # A clip norm of zero releases zeros.
    return state._replace(sum_state=self._sum.reset_l2_clip_gaussian_noise(
        state.sum_state, clip, clip * self._sum.relative_stddev))

  def _event(self) -> dp_accounting.DpEvent:
    if not self._noise_multiplier:
      return dp_accounting.NonPrivateDpEvent()
    if not isinstance(self._mechanism, independent.IndependentGaussian):
      return dp_accounting.UnsupportedDpEvent()
    return dp_accounting.GaussianDpEvent(self._noise_multiplier)
