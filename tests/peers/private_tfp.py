# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest that puts this library's classes in the place of tensorflow_privacy's.

Microbatches of several examples are records here: `RuleQuery` clips their mean gradients.
"""

import os
import types

import tensorflow as tf
from tensorflow_privacy.privacy.dp_query import dp_query
from tensorflow_privacy.privacy.dp_query import gaussian_query
from tensorflow_privacy.privacy.dp_query import tree_aggregation_query as trees
from tensorflow_privacy.privacy.keras_models import dp_keras_model
from tensorflow_privacy.privacy.optimizers import dp_optimizer_keras
from tensorflow_privacy.privacy.optimizers import dp_optimizer_keras_vectorized as vectorized

import tfdp_adaptive as tfdp
from tfdp_adaptive import queries
from tfdp_adaptive.keras import private


def _specs(record):
  return tf.nest.map_structure(
      lambda t: tf.TensorSpec(tf.convert_to_tensor(t).shape, tf.convert_to_tensor(t).dtype), record)


class GaussianSumQuery(dp_query.SumAggregationDPQuery):
  """A `MechanismSumQuery`, made when the first record tells the specs."""

  def __init__(self, l2_norm_clip, stddev):
    self._given, self._query = (l2_norm_clip, stddev), None

  def initial_global_state(self):
    return tf.constant(float(tf.convert_to_tensor(self._given[0])))

  def derive_sample_params(self, global_state):
    return global_state

  def initial_sample_state(self, template=None):
    clip, stddev = (float(tf.convert_to_tensor(one)) for one in self._given)
    self._query = queries.MechanismSumQuery(
        _specs(template), tfdp.mechanisms.IndependentGaussian(), clip, stddev / clip if clip else 0)
    return self._query.initial_sample_state()

  def preprocess_record(self, params, record):
    return self._query.preprocess_record(params, record)

  def get_noised_result(self, sample_state, global_state):
    result, _, event = self._query.get_noised_result(
        sample_state, self._query.initial_global_state())
    return result, global_state, event


class UnitTree(tfdp.mechanisms.Tree):
  """Noise multipliers are of a node, as theirs are, and not of the sensitivity of the tree."""

  def design(self):
    return dict(super().design(), node_scale=1.0)


def _tree(cumulative):
  def build(clip_norm, noise_multiplier, record_specs, noise_seed=None, use_efficient=True):
    del use_efficient
    return queries.MechanismSumQuery.build_l2_gaussian_query(
        clip_norm, noise_multiplier, record_specs, noise_seed, cumulative=cumulative,
        mechanism=UnitTree(64))
  return build


def _model(kind):
  class Private(kind):
    """A private model; the first batch of `fit` tells the batch size of its optimizer."""

    def __init__(self, l2_norm_clip, noise_multiplier, num_microbatches=None, layer_registry=None,
                 **kwargs):
      del layer_registry
      super().__init__(**kwargs)
      # Keras 2 cannot add losses to a model that has a dict among its attributes.
      self._given = types.SimpleNamespace(
          l2_norm_clip=l2_norm_clip, noise_multiplier=noise_multiplier)
      self._num_microbatches = num_microbatches

    def compile(self, optimizer, loss, **kwargs):
      self._more = float(optimizer.learning_rate), loss, kwargs

    def fit(self, x, y=None, **kwargs):
      size = len(next(iter(x))[0]) if y is None else len(x)
      rate, loss, more = self._more
      if self._num_microbatches not in (None, size):
        self._given.num_microbatches = self._num_microbatches
      super().compile(tfdp.DPSGD(rate, batch_size=size, **vars(self._given)), loss, **more)
      return super().fit(x, y, **(kwargs if y is None else {'batch_size': size, **kwargs}))

  return Private


class Optimizer(tfdp.DPSGD):
  """Gradients of microbatches, clipped and noised by a `RuleQuery`."""

  def __init__(self, l2_norm_clip, noise_multiplier, num_microbatches=None, learning_rate=0.1):
    self._of_query = dict(l2_norm_clip=l2_norm_clip, noise_multiplier=noise_multiplier)
    self._microbatches = num_microbatches
    super().__init__(learning_rate, batch_size=8, **self._of_query)

  def _compute_gradients(self, loss, var_list, grad_loss=None, tape=None):
    del grad_loss
    with tape or tf.GradientTape() as tape:
      values = loss() if callable(loss) else loss
      count = self._microbatches or values.shape[0]
      values = tf.reduce_mean(tf.reshape(values, [count, -1]), 1)
    records = tape.jacobian(values, var_list)
    query = queries.RuleQuery(
        tfdp.rules.dp_sgd(), _specs([one[0] for one in records]), batch_size=count,
        **self._of_query)
    state = query.initial_global_state()
    params, sums = query.derive_sample_params(state), query.initial_sample_state()
    for i in range(count):
      sums = query.accumulate_record(params, sums, [one[i] for one in records])
    return list(zip(query.get_noised_result(sums, state)[0], var_list))


def pytest_configure(config):
  del config
  if os.environ.get('TFDP_PEERS') != 'private':
    return
  gaussian_query.GaussianSumQuery = GaussianSumQuery
  trees.TreeResidualSumQuery.build_l2_gaussian_query = _tree(False)
  trees.TreeCumulativeSumQuery.build_l2_gaussian_query = _tree(True)
  dp_keras_model.DPSequential = _model(private.DPSequential)
  dp_keras_model.DPModel = _model(private.DPFunctional)
  for name in ('SGD', 'Adam', 'Adagrad'):
    setattr(dp_optimizer_keras, f'DPKeras{name}Optimizer', Optimizer)
    setattr(vectorized, f'VectorizedDPKeras{name}Optimizer', Optimizer)
