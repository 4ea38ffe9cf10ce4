# SPDX-License-Identifier: Apache-2.0
"""tensorflow_privacy's own tests of its queries, run on ours.

The test modules come with its wheel. Their queries are replaced while a test
runs; left out is what asks for another clip than L2, for the type of a private
attribute, or for a clip norm or learning rate held in a variable.
"""

import functools
import itertools
import types
from unittest import mock

import pytest
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import mechanisms
from tfdp_adaptive import queries
from tfdp_adaptive.noise import keys
from tfdp_adaptive.noise import streams
from tfdp_adaptive.queries import mechanism_sum

tree_aggregation = compat.privacy_module('tree_aggregation')
NODE_STD = 5.0  # NOISE_STD of the tests whose noise is a function without a known spread.


class UnitTree(mechanisms.Tree):
  """Nodes of standard deviation one, as in tensorflow_privacy."""

  def design(self):
    return dict(super().design(), node_scale=1.0)


class ConstantNodes(queries.MechanismSumQuery):
  """Standard deviation one, and every node of the tree has the same value."""

  def __init__(self, *args, value=0.0, **kwargs):
    super().__init__(*args, **kwargs)
    self._value = value

  def get_noised_result(self, sample_state, global_state):
    constant = lambda key, flat: tuple(tf.fill(s.shape, tf.cast(self._value, s.dtype))
                                       for s in flat)
    with mock.patch.object(streams, 'vectors', constant):
      return super().get_noised_result(sample_state, global_state)


def tree_query(cumulative):
  """A constructor with the arguments of tensorflow_privacy's tree queries."""

  def build(record_specs, noise_generator, clip_fn, clip_value, use_efficient=True):
    del clip_fn  # L2.
    mechanism = UnitTree(64, 'online' if use_efficient else 'naive')
    arguments = (record_specs, mechanism, clip_value)
    if isinstance(noise_generator, tree_aggregation.GaussianNoiseGenerator):
      return queries.MechanismSumQuery(
          *arguments, noise_generator._noise_std / clip_value, cumulative=cumulative,
          seed=noise_generator._seed)
    values = tf.nest.flatten(noise_generator())
    if any(tf.size(value) > 1 and tf.math.reduce_std(value) > 0 for value in values):
      return queries.MechanismSumQuery(*arguments, NODE_STD / clip_value, cumulative=cumulative)
    return ConstantNodes(
        *arguments, 1.0 / clip_value, cumulative=cumulative, value=tf.reshape(values[0], [-1])[0])

  def build_l2_gaussian_query(clip_norm, noise_multiplier, record_specs, noise_seed=None,
                              use_efficient=True):
    return queries.MechanismSumQuery.build_l2_gaussian_query(
        clip_norm, noise_multiplier, record_specs, noise_seed, cumulative=cumulative,
        mechanism=UnitTree(64, 'online' if use_efficient else 'naive'))

  build.build_l2_gaussian_query = build_l2_gaussian_query
  return build


class FromTemplate(mechanism_sum.SumAggregationDPQuery):
  """`make(specs)`, with the specs of the template; states do not depend on them."""

  def __init__(self, make):
    self._make, self._specs, self._query = make, tf.TensorSpec([]), make(tf.TensorSpec([]))

  def initial_global_state(self):
    return self._query.initial_global_state()

  def initial_sample_state(self, template=None):
    specs = tf.nest.map_structure(
        lambda value: tf.TensorSpec(tf.convert_to_tensor(value).shape), template)
    if specs != self._specs:
      self._specs, self._query = specs, self._make(specs)
      self.preprocess_record = tf.function(self._query.preprocess_record)
      self.get_noised_result = tf.function(self._query.get_noised_result)
    return self._query.initial_sample_state(template)

  def derive_sample_params(self, global_state):
    return self._query.derive_sample_params(global_state)

  def preprocess_record(self, params, record):
    return self._query.preprocess_record(params, record)

  def get_noised_result(self, sample_state, global_state):
    return self._query.get_noised_result(sample_state, global_state)


def gaussian_sum(l2_norm_clip, stddev):
  """With the arguments of `GaussianSumQuery`."""
  return FromTemplate(lambda specs: queries.MechanismSumQuery(
      specs, mechanisms.IndependentGaussian(), l2_norm_clip, stddev / l2_norm_clip))


class SumState(queries.MechanismSumQuery.GlobalState):

  @property
  def tree_state(self):
    return types.SimpleNamespace(
        value_generator_state=types.SimpleNamespace(stddev=self.stddev))

  @property
  def l2_norm_clip(self):
    return self.clip_value


class SumQuery(queries.MechanismSumQuery):
  GlobalState = SumState


TREES = {'tree_aggregation_query.TreeCumulativeSumQuery': tree_query(cumulative=True),
         'tree_aggregation_query.TreeResidualSumQuery': tree_query(cumulative=False)}
GAUSSIAN = {'gaussian_query.GaussianSumQuery': gaussian_sum}


def _dear(test):

  @pytest.mark.thorough
  @functools.wraps(test)
  def run(self):
    test(self)

  return run


def conformance(module_name, class_name, replacements, without=(), thorough=()):
  """The test case of tensorflow_privacy with our queries in place of its own."""
  module = compat.privacy_module(module_name)
  parent = getattr(module, class_name)

  class Conformance(parent):

    def setUp(self):
      super().setUp()
      seeds = itertools.count()  # Statistical tests with tight limits: the same every time.
      patches = [mock.patch.object(keys, 'from_system', lambda: keys.from_seed(next(seeds)))]
      for path, ours in replacements.items():
        owner, name = path.split('.')
        patches.append(mock.patch.object(getattr(module, owner), name, ours))
      for patch in patches:
        patch.start()
        self.addCleanup(patch.stop)

  inherited = [name for name in dir(parent) if name.startswith('test')]
  for start in without:
    dropped = [name for name in inherited if name.startswith(start)]
    assert dropped, start
    for name in dropped:
      setattr(Conformance, name, None)
  for name in thorough:
    setattr(Conformance, name, _dear(getattr(parent, name)))
  assert any(getattr(Conformance, name) for name in inherited)
  return Conformance


CumulativeSumTest = conformance(
    'tree_aggregation_query_test', 'TreeCumulativeSumQueryTest', TREES,
    without=('test_correct_initial_global_state', 'test_l_infty', 'test_linfty',
             'test_sum_tree_aggregator_instance', 'test_session'))
ResidualSumTest = conformance(
    'tree_aggregation_query_test', 'TreeResidualQueryTest', TREES,
    without=('test_sum_tree_aggregator_instance', 'test_derive_metrics', 'test_session'))
RestartTest = conformance(
    'restart_query_test', 'RestartQueryTest', TREES, without=('test_session',))
GaussianTest = conformance(
    'gaussian_query_test', 'GaussianQueryTest', GAUSSIAN,
    without=('test_gaussian_sum_with_changing_clip_no_noise', 'test_session'),
    thorough=('test_gaussian_sum_with_noise',))
NormalizedTest = conformance(
    'normalized_query_test', 'NormalizedQueryTest', GAUSSIAN, without=('test_session',))
NestedTest = conformance(
    'nested_query_test', 'NestedQueryTest', GAUSSIAN, without=('test_session',),
    thorough=('test_nested_query_with_noise',))
