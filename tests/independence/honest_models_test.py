# SPDX-License-Identifier: Apache-2.0
"""Accepts models whose examples do not depend on others, and trains them without a difference."""

import numpy as np
import pytest
import small_models as small
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.independence import independence
from tfdp_adaptive.independence import validation

keras = compat.keras
layers = keras.layers


class Sampling(layers.Layer):
  """A latent variable, drawn."""

  def call(self, x, training=None):
    return x[:, :3] + tf.exp(x[:, 3:]) * tf.random.normal(tf.shape(x[:, 3:]))


class Loop(layers.Layer):
  """As many steps as the worst of the batch needs; who is done stays as they are."""

  def call(self, x):
    return tf.while_loop(
        lambda x: tf.reduce_any(tf.abs(x) > 0.5),
        lambda x: [tf.where(tf.abs(x) > 0.5, 0.7 * x, x)], [x])[0]


class Steps(layers.Layer):
  """Counts steps in a variable of its own."""

  def __init__(self):
    super().__init__()
    self.steps = tf.Variable(0, trainable=False)

  def call(self, x, training=None):
    if training:
      self.steps.assign_add(1)
    return x


class OwnGenerator(layers.Layer):
  """Draws from a generator of TensorFlow's."""

  def __init__(self):
    super().__init__()
    self.generator = tf.random.Generator.from_seed(1)

  def call(self, x, training=None):
    return x * self.generator.uniform(tf.shape(x)) + self.generator.normal(tf.shape(x))


def _images(*middle):
  return keras.Sequential(
      [layers.Input((8, 8, 3)), *middle, layers.Conv2D(4, 3, activation='relu'),
       layers.GlobalAveragePooling2D(), layers.Dense(2)])


def _sequences(*middle):
  return keras.Sequential(
      [layers.Input((6,), dtype='int32'), layers.Embedding(9, 4, mask_zero=True), *middle,
       layers.Dense(2)])


def _attention():
  ids = keras.Input((6,), dtype='int32')
  x = layers.Embedding(9, 4, mask_zero=True)(ids)
  x = layers.LayerNormalization()(
      x + layers.MultiHeadAttention(2, 2, dropout=0.2)(x, x, use_causal_mask=True))
  return keras.Model(ids, layers.Dense(9)(layers.Dropout(0.1)(x)))


def _lookup():
  words = keras.Input((3,), dtype='string')
  return keras.Model(words, layers.Dense(2)(layers.Flatten()(layers.Embedding(4, 3)(
      layers.StringLookup(vocabulary=['0', '1', 'b'])(words)))))


def _frozen():
  normalization = layers.BatchNormalization()
  normalization.trainable = False
  return keras.Sequential([layers.Input((4,)), layers.Dense(4), normalization, layers.Dense(2)])


HONEST = {
    'dropout': lambda: small.sequential(dropout=True),
    'noise': lambda: keras.Sequential(
        [layers.Input((4,)), layers.GaussianNoise(0.3), layers.Dense(4, 'relu'),
         layers.GaussianDropout(0.2), layers.Dense(2)]),
    'an LSTM that drops': lambda: _sequences(layers.LSTM(3, dropout=0.3, recurrent_dropout=0.2)),
    'a GRU both ways': lambda: _sequences(layers.Bidirectional(layers.GRU(2))),
    'attention': _attention,
    'augmentation': lambda: _images(
        layers.RandomFlip(), layers.RandomRotation(0.1), layers.RandomTranslation(0.1, 0.1)),
    'contrast and cropping': lambda: _images(
        layers.RandomContrast(0.2), layers.RandomCrop(6, 6), layers.SpatialDropout2D(0.2)),
    'groups of channels': lambda: _images(layers.GroupNormalization(3)),
    'a latent variable': lambda: keras.Sequential(
        [layers.Input((4,)), layers.Dense(6), Sampling(), layers.Dense(2)]),
    'a loop with brakes': lambda: keras.Sequential(
        [layers.Input((4,)), layers.Dense(6), Loop(), layers.Dense(2)]),
    'depth drawn for each': small.across(
        lambda x: x * tf.floor(0.5 + tf.random.uniform([tf.shape(x)[0], 1]))),
    'depth drawn for all': small.across(lambda x: x * tf.floor(0.5 + tf.random.uniform([]))),
    'masked words': lambda: small.words(lambda ids: tf.where(
        tf.random.uniform(tf.shape(ids)) < 0.2, tf.ones_like(ids), ids)),
    'words drawn': lambda: small.words(lambda ids: tf.where(
        tf.random.uniform(tf.shape(ids)) < 0.2,
        tf.random.uniform(tf.shape(ids), maxval=9, dtype=tf.int32), ids)),
    'categories drawn': small.across(
        lambda x: x + tf.cast(tf.random.categorical(x, 1), tf.float32)),
    'NumPy, example by example': small.across(lambda x: x + tf.ensure_shape(
        tf.numpy_function(lambda a: a.mean(1, keepdims=True), [x], tf.float32), [None, 1])),
    'examples one by one': small.across(
        lambda x: tf.map_fn(lambda row: row - tf.reduce_mean(row), x)),
    'ranks within': small.across(
        lambda x: x + tf.cast(tf.argsort(tf.argsort(x, -1), -1), tf.float32)),
    'words that are looked up': _lookup,
    'frozen statistics': _frozen,
    'steps counted': lambda: keras.Sequential([layers.Input((4,)), Steps(), layers.Dense(2)]),
    'a generator of its own': lambda: keras.Sequential(
        [layers.Input((4,)), layers.Dense(4), OwnGenerator(), layers.Dense(2)]),
    'a word of its own meaning': lambda: small.words(
        lambda ids: tf.where(tf.equal(ids, 5), 3, tf.where(ids > 7, 2, ids))),
    'capped, and set where missing': lambda: small.first(lambda x: tf.minimum(
        tf.where(tf.equal(x, -999) | tf.math.is_nan(x), tf.random.normal(tf.shape(x)), x), 1e6)),
    'large batches otherwise computed': small.across(lambda x: tf.cond(
        tf.shape(x)[0] > 64, lambda: tf.map_fn(tf.tanh, x), lambda: tf.tanh(x))),
    'floats for words': lambda: keras.Sequential(
        [layers.Input((6,)), layers.Embedding(9, 4), layers.Flatten(), layers.Dense(2)]),
}


@pytest.mark.thorough(rows=['an LSTM that drops', 'a GRU both ways'])
@pytest.mark.parametrize('name', HONEST)
def test_honest_models_pass_without_any_difference(name, monkeypatch):
  model = HONEST[name]()
  weights = [v for v in model.variables if tf.as_dtype(v.dtype).is_floating]
  before = [np.array(v) for v in weights]
  monkeypatch.setattr(independence, '_ROUNDING', 0.0)
  tfdp.validate_model(model)
  for old, variable in zip(before, weights):
    np.testing.assert_array_equal(old, variable)


@pytest.mark.parametrize('seed', range(6))
def test_integers_that_saturate_outputs(seed):
  """Gradients of saturated outputs are rounding, which changes with the size of the batch."""
  keras.utils.set_random_seed(seed)
  inputs = [keras.Input([n], dtype='int64') for n in (100, 100, 10)]
  x = layers.Dense(64, 'relu')(layers.Concatenate()([
      layers.Lambda(lambda t: tf.cast(t, tf.float32))(t) for t in inputs]))
  tfdp.validate_model(keras.Model(
      inputs, [layers.Dense(1, 'sigmoid')(x), layers.Dense(3, 'softmax')(x)]))


def test_longer_padding_that_changes_nothing_but_shapes():
  tfdp.validate_model(small.words(lambda ids: ids, True))


class Positions(layers.Layer):
  """A table of positions, no longer than the sequences it was made for."""

  def __init__(self, most):
    super().__init__()
    self.most = most

  def build(self, shape):
    self.table = self.add_weight(name='table', shape=(self.most, shape[-1]))

  def call(self, x):
    return x + self.table[:tf.shape(x)[1]]


@pytest.mark.parametrize('most, kernel, length', [
    (100, 1, 8), (100, 20, 64), (32, 12, 32), (20, 12, 16), (5, 2, 4), (2, 1, 2)])
def test_open_axes_are_as_long_as_the_model_takes(most, kernel, length):
  inputs = keras.Input([None, 3])
  model = keras.Model(inputs, layers.Conv1D(2, kernel)(Positions(most)(inputs)))
  assert validation.accepted(model, compat.input_specs(model)).shape[1:] == (length, 3)
