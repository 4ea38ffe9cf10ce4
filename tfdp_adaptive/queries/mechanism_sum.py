# SPDX-License-Identifier: Apache-2.0
"""Clipped sums with the noise of any mechanism, as a DPQuery."""

import collections
from typing import Any, NamedTuple, Optional, Tuple

import dp_accounting
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import contract
from tfdp_adaptive import mechanisms
from tfdp_adaptive import noise as noise_lib
from tfdp_adaptive import privatizer
from tfdp_adaptive import trees
from tfdp_adaptive import weights
from tfdp_adaptive.clipping import choices
from tfdp_adaptive.clipping import projection

_dp_query = compat.privacy_module('dp_query')
if _dp_query is None:
  raise ModuleNotFoundError(
      '`tfdp_adaptive.queries` needs tensorflow_privacy. Install it with '
      '`pip install --no-deps --ignore-requires-python tensorflow-privacy==0.9.0`.')

SumAggregationDPQuery: Any = _dp_query.SumAggregationDPQuery


class MechanismSumQuery(SumAggregationDPQuery):
  """Releases `sum_t + stddev * (C^-1 Z)_t`, or the running sum of that.

  For a clip norm that adapts to a quantile of the records' norms, use `RuleQuery` with
  `clipping=tfdp.clipping.Quantile()`.

  It replaces tensorflow_privacy's `TreeResidualSumQuery` and, with `cumulative`, its
  `TreeCumulativeSumQuery`, for any `tfdp.mechanisms.Mechanism`. It composes with `NormalizedQuery`,
  `RestartQuery` and `NestedSumQuery`, and runs in TFF's `DifferentiallyPrivateFactory`. One
  convention differs: `noise_multiplier` is the standard deviation of Z, and every mechanism has
  sensitivity one for a single participation. Tree nodes of tensorflow_privacy with multiplier nm
  are `Tree(...)` with `noise_multiplier = nm / sqrt(levels)`.

  Records have L2 sensitivity `l2_norm_clip` (twice that under replace, which
  doubles the noise). It raises an error after `mechanism.steps` results, unless it was restarted. A
  restart is another run of the mechanism, composed with the first.

  Args:
    record_specs: Tree of `tf.TensorSpec` like a record.
    mechanism: A `tfdp.mechanisms.Mechanism`.
    l2_norm_clip: Clip norm of a record, > 0.
    noise_multiplier: Standard deviation of Z in clip norms; 0 means no privacy.
    adjacency: 'zero_out', 'add_remove' or 'replace'.
    clipping: The clipping method: `tfdp.clipping.Hard()` (the default), `AutoS()` and the
      like.
    cumulative: Whether to release sums over all steps so far. Only released numbers are summed, so
      the state never holds clean sums.
    seed: For tests only: fixed noise protects nobody.
  """

  class GlobalState(NamedTuple):
    """Global state. It is SECRET, except for `clip_value`, `stddev` and `released`."""

    noise: noise_lib.State
    clip_value: tf.Tensor  # [] float32.
    stddev: tf.Tensor  # [] float32, of Z in the units of the sum.
    released: Any  # The last cumulative sum, or ().

  def __init__(
      self, record_specs: trees.Tree, mechanism: mechanisms.Mechanism, l2_norm_clip: float,
      noise_multiplier: float, *, adjacency: str = 'zero_out',
      clipping: Optional[choices.Choice] = None, cumulative: bool = False,
      seed: Optional[int] = None) -> None:
    trees.check_specs(record_specs=record_specs)
    privatizer.check_mechanism(mechanism)
    self._record_specs = record_specs
    self._mechanism = mechanism
    self._cumulative = cumulative
    self._weight: Any = choices.for_query(clipping, weights.Weight)
    self._privatizer = privatizer.Privatizer(  # A sum is a mean with the divisor one.
        (contract.Ask(),), record_specs, l2_norm_clip=l2_norm_clip,
        noise_multiplier=noise_multiplier, batch_size=1.0, adjacency=adjacency,
        mechanism=mechanism, seed=seed)
    self._specs = self._privatizer.specs
    self._l2_norm_clip = l2_norm_clip
    self._stddev = noise_multiplier * contract.mean_sensitivity(l2_norm_clip, 1.0, adjacency)

  @classmethod
  def build_l2_gaussian_query(
      cls, clip_norm: float, noise_multiplier: float, record_specs: trees.Tree,
      noise_seed: Optional[int] = None, *, mechanism: mechanisms.Mechanism,
      **kwargs: Any) -> 'MechanismSumQuery':
    """Makes a query; the arguments are in the order of tensorflow_privacy."""
    return cls(record_specs, mechanism, clip_norm, noise_multiplier, seed=noise_seed, **kwargs)

  def initial_global_state(self) -> GlobalState:
    return self.GlobalState(
        self._privatizer.init().noise, tf.constant(self._l2_norm_clip, tf.float32),
        tf.constant(self._stddev, tf.float32),
        trees.zeros(self._specs) if self._cumulative else ())

  def derive_sample_params(self, global_state: GlobalState) -> tf.Tensor:
    return global_state.clip_value

  def initial_sample_state(self, template: trees.Tree = None) -> trees.Tree:
    del template  # Sums are wider than records of half precision.
    return trees.zeros(self._specs)

  def preprocess_record(self, params: tf.Tensor, record: trees.Tree) -> trees.Tree:
    """Returns the clipped record; a record that is not finite counts as zero."""
    record = trees.like(record, self._record_specs, 'record')
    dtypes = {spec.dtype for spec in tf.nest.flatten(self._specs)}
    widest = tf.float64 if tf.float64 in dtypes else tf.float32
    record = trees.map(lambda r: tf.cast(r, widest), record)
    clipped = projection.clip(record, params, self._weight)
    return trees.map(lambda r, s: tf.cast(r, s.dtype), clipped, self._specs)

  def get_noised_result(
      self, sample_state: trees.Tree,
      global_state: GlobalState) -> Tuple[trees.Tree, GlobalState, dp_accounting.DpEvent]:
    sample_state = trees.like(sample_state, self._specs, 'sample_state')
    ((result, *_),), state = self._privatizer.release(
        privatizer.State(global_state.noise, ((),)), (contract.Query(),),
        (contract.Sums(sample_state),))
    if self._cumulative:
      result = trees.map(tf.add, global_state.released, result)
    state = global_state._replace(noise=state.noise, released=result if self._cumulative else ())
    result = trees.map(lambda r, spec: tf.cast(r, spec.dtype), result, self._record_specs)
    return result, state, self._event()

  def reset_state(self, noised_results: trees.Tree, global_state: GlobalState) -> GlobalState:
    """Starts another run of the mechanism; the chain of keys continues."""
    del noised_results  # The state has the results, in full precision.
    return global_state._replace(noise=self._privatizer.init(global_state.noise.key).noise)

  def derive_metrics(self, global_state: GlobalState) -> collections.OrderedDict:
    return collections.OrderedDict(l2_norm_clip=global_state.clip_value)

  def _event(self) -> dp_accounting.DpEvent:
    """Returns the event of one step. Correlated noise has none: all steps are one event."""
    if not self._privatizer.noise_multiplier:
      return dp_accounting.NonPrivateDpEvent()
    if not isinstance(self._mechanism, mechanisms.IndependentGaussian):
      return dp_accounting.UnsupportedDpEvent()
    return dp_accounting.GaussianDpEvent(self._privatizer.noise_multiplier)
