# SPDX-License-Identifier: Apache-2.0
"""Refuses models that keep data of a training step for later steps."""

import numpy as np
import pytest
import small_models as small
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat

keras = compat.keras
layers = keras.layers


class Keeps(layers.Layer):
  """Keeps something of the data in what Keras may not know of."""

  def __init__(self, how):
    super().__init__()
    self.how = how
    self.mean = tf.Variable(tf.zeros([6]), trainable=False)
    self.count = tf.Variable(0, trainable=False)
    self.table = tf.lookup.experimental.MutableHashTable(tf.int32, tf.float32, 0.0)
    self.metric = keras.metrics.Mean()

  def call(self, x, training=None):
    if training:
      x = self.how(self, x)
    return x


def _assigned(self, x):
  self.mean.assign(tf.reduce_mean(x, 0))
  return x


def _moving(self, x):
  self.mean.assign_add(0.1 * (tf.reduce_max(x, 0) - self.mean))
  return x


def _in_a_condition(self, x):
  tf.cond(tf.reduce_mean(x) > 0, lambda: self.count.assign_add(1), lambda: self.count)
  return x


def _in_a_loop(self, x):
  def body(x):
    self.count.assign_add(1)
    return [0.5 * x]
  tf.while_loop(lambda x: tf.reduce_max(x) > 1, body, [x])
  return x


def _in_a_function(self, x):
  tf.function(lambda x: self.mean.assign(x[0]))(x)
  return x


def _backwards(self, x):
  @tf.custom_gradient
  def identity(x):
    def gradient(dy):
      with tf.control_dependencies([self.mean.assign(tf.reduce_mean(dy, 0))]):
        return tf.identity(dy)
    return tf.identity(x), gradient
  return identity(x)


def _tabulated(self, x):
  self.table.insert(1, tf.reduce_sum(x))
  return x


def _counted(self, x):
  self.count.assign_add(tf.shape(x)[0])
  return x


def _measured(self, x):
  self.metric.update_state(x)
  return x


def _on_disk(self, x):
  tf.io.write_file('unused', tf.strings.as_string(tf.reduce_sum(x)))
  return x


@pytest.mark.pitfall(
    'A layer writes data into its own variable, table or file, which outlives the step.',
    severity='critical',
    stops='PrivacyError before the first step: writes are followed through the graph')
@pytest.mark.parametrize('how', [
    _assigned, _moving, _in_a_condition, _in_a_loop, _in_a_function, _backwards, _tabulated,
    _counted, _measured, _on_disk])
@pytest.mark.parametrize('sees_all', [True, False])
def test_data_that_a_step_would_keep(how, sees_all):
  """Also where a step takes one example at a time, as an own weight in a loop makes it."""
  hidden = [layers.Dense(6, 'tanh')] if sees_all else [Recurring()]
  model = keras.Sequential([layers.Input((6,)), *hidden, Keeps(how), layers.Dense(2)])
  with pytest.raises(tfdp.PrivacyError, match='write statistics of the data'):
    tfdp.validate_model(model)


class Recurring(layers.Layer):
  """Calls a layer in a loop, where the engine does not see it."""

  def __init__(self):
    super().__init__()
    self.dense = layers.Dense(6, 'tanh')

  def build(self, shape):
    self.dense.build(shape)

  def call(self, x):
    return tf.while_loop(lambda i, x: i < 2, lambda i, x: [i + 1, self.dense(x)],
                         [0, x])[1]


def test_layers_called_in_a_loop_take_one_example_at_a_time():
  """Mixing is then impossible: the batch of an example is that example."""
  model = keras.Sequential([layers.Input((6,)), Recurring(), layers.Dense(2)])
  assert not tfdp.clipping.bookkeeping.supports(model, tf.zeros([2, 6]))[0]
  tfdp.validate_model(model)


@pytest.mark.pitfall(
    'Python code inside the graph keeps data of earlier batches.',
    severity='critical',
    stops='PrivacyError before the first step; the check runs the same batch twice')
def test_what_python_keeps_between_steps():
  """Where the graph calls Python no operation tells, but the same batch gives something else."""
  seen = []

  def centred(x):
    seen.append(x.mean(0, keepdims=True))
    return (x - np.mean(seen, 0)).astype(np.float32)

  for shape in ([None, 6], [7, 6]):
    model = small.sequential(lambda x: tf.ensure_shape(
        tf.numpy_function(centred, [x], tf.float32), shape))
    with pytest.raises(tfdp.PrivacyError, match='gives something else for the same batch'):
      tfdp.validate_model(model, tf.random.stateless_normal([7, 4], [0, 1]))


@pytest.mark.pitfall(
    'A layer is changed after the model was validated.',
    severity='critical', stops='the model is validated again after `compile`')
def test_a_model_compiled_anew_is_validated_anew():
  """A layer may have been told to do something else."""
  inputs = keras.Input((4,))
  apply = small.Apply(lambda x: x)
  model = tfdp.DPFunctional(inputs, layers.Dense(1)(apply(layers.Dense(4)(inputs))))

  def fit():
    model.compile(tfdp.DPSGD(l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=8), loss='mse')
    model.fit(tf.ones([8, 4]), tf.ones([8, 1]), batch_size=8, verbose=0)

  fit()
  apply.function = lambda x: x - small.mean(x)
  with pytest.raises(tfdp.PrivacyError, match='mixes examples'):
    fit()
