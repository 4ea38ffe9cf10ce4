# SPDX-License-Identifier: Apache-2.0
"""Layers without a formula of their own: one example at a time, exactly, or refused."""

import bookkeeping_oracle as oracle
import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.clipping import bookkeeping
from tfdp_adaptive.clipping import interface

keras = compat.keras
layers = keras.layers
RNG = np.random.default_rng(0)


class Bilinear(layers.Layer):
  """`a' W b` of two inputs."""

  def build(self, shapes):
    (*_, left), (*_, right) = shapes
    self.form = self.add_weight(name='form', shape=(left, 3, right), initializer='ones')

  def call(self, inputs):
    return tf.einsum('nti,iaj,ntj->nta', inputs[0], tf.convert_to_tensor(self.form), inputs[1])


class Leaky(layers.Layer):
  """A cell that forgets at a rate it learns."""

  units = state_size = output_size = 3

  def build(self, shape):
    self.kernel = self.add_weight(name='kernel', shape=(shape[-1], 3), initializer='ones')
    self.rate = self.add_weight(name='rate', shape=(3,), initializer='zeros')

  def call(self, x, states, training=None):
    rate = tf.sigmoid(tf.convert_to_tensor(self.rate))
    state = rate * states[0] + tf.tanh(tf.matmul(x, tf.convert_to_tensor(self.kernel)))
    return state, [state]


class Halves(layers.Layer):
  """Two results, of which a model may use one."""

  def build(self, shape):
    self.gains = self.add_weight(name='gains', shape=(2, shape[-1]), initializer='ones')

  def call(self, x):
    gains = tf.convert_to_tensor(self.gains)
    return tf.tanh(x * gains[0]), tf.sin(x * gains[1])


# A layer, and shapes of its inputs.
WEIGHTED = {
    'ConvLSTM1D': (lambda: layers.ConvLSTM1D(2, 2), (2, 4, 2)),
    'ConvLSTM2D': (lambda: layers.ConvLSTM2D(2, 2, padding='same', return_sequences=True),
                   (2, 3, 3, 2)),
    'Attention by concatenation': (
        lambda: layers.Attention(use_scale=True, score_mode='concat'), (3, 4), (2, 4)),
    'Bilinear': (Bilinear, (3, 4), (3, 2)),
    'RNN': (lambda: layers.RNN(Leaky(), return_sequences=True), (3, 2)),
}


def made(name):
  make, *shapes = WEIGHTED[name]
  inputs = [keras.Input(shape) for shape in shapes]
  x = [tf.constant(RNG.normal(size=(3,) + shape), tf.float32) for shape in shapes]
  inner = make()(inputs if len(inputs) > 1 else inputs[0])
  model = keras.Model(inputs, layers.Dense(2)(layers.Flatten()(inner)))
  return oracle.randomized(model), x


@pytest.mark.thorough(rows=['RNN', 'ConvLSTM*'])
@pytest.mark.parametrize('name', WEIGHTED)
def test_layers_with_weights(name):
  model, x = made(name)
  routes = {layer.kind: layer.route for layer in tfdp.explain_clipping(model).layers}
  assert set(routes.values()) == {'one example at a time', routes['Dense']}
  oracle.check(model, x)


def test_weighted_attention_over_masked_words():
  """Masks come to it as arguments, with the batch as first axis."""
  words, asked = keras.Input((3,), dtype='int32'), keras.Input((2, 4))
  table = layers.Embedding(7, 4, mask_zero=True)(words)
  outputs = layers.AdditiveAttention()([asked, table])
  model = keras.Model([words, asked], layers.Dense(2)(outputs))
  x = [tf.constant([[1, 2, 0], [0, 3, 4], [5, 0, 0]]),
       tf.constant(RNG.normal(size=(3, 2, 4)), tf.float32)]
  oracle.check(oracle.randomized(model), x)


@pytest.mark.parametrize('used', [0, 1])
def test_a_result_that_nobody_uses(used):
  inputs = keras.Input((3,))
  model = keras.Model(inputs, layers.Dense(2)(Halves()(inputs)[used]))
  oracle.check(oracle.randomized(model), tf.constant(RNG.normal(size=(4, 3)), tf.float32))


NUMBERS, WORDS = [[0.5, 1.5], [2.5, -1.0], [1.0, 0.1]], [['a', 'b'], ['c', 'a'], ['d', 'd']]
WITHOUT = {
    'Dot': (lambda x: layers.Dot((2, 2))([x, layers.Dense(4)(x)]), RNG.normal(size=(3, 2, 4))),
    'Attention': (lambda x: layers.Attention()([x, layers.Dense(4)(x)]),
                  RNG.normal(size=(3, 2, 4))),
    'UnitNormalization': (lambda x: layers.UnitNormalization()(layers.Dense(4)(x)), NUMBERS),
    'CategoryEncoding': (
        lambda x: layers.CategoryEncoding(4, output_mode='count')(x), [[0, 1], [3, 3], [2, 0]]),
    'Discretization': (
        lambda x: layers.Embedding(3, 2)(layers.Discretization([0.0, 1.0])(x)), NUMBERS),
    'Hashing': (lambda x: layers.Embedding(5, 2)(layers.Hashing(5)(x)), WORDS),
}


@pytest.mark.parametrize('name', WITHOUT)
def test_layers_without_weights(name):
  """They are no units: nothing of theirs is clipped, and all that is around them is."""
  make, x = WITHOUT[name]
  x = np.asarray(x)
  dtype = {'f': 'float32', 'i': 'int32', 'U': 'string'}[x.dtype.kind]
  inputs = keras.Input(x.shape[1:], dtype=dtype)
  inner = make(inputs)
  inner = layers.Flatten()(inner) if len(inner.shape) > 2 else inner
  model = oracle.randomized(keras.Model(inputs, layers.Dense(2)(inner)))
  kinds = {layer.kind for layer in tfdp.explain_clipping(model).layers}
  assert kinds <= {'Dense', 'Embedding'}
  oracle.check(model, tf.constant(x, dtype))


REFUSED = {
    'ConvLSTM2D that drops': (lambda: layers.ConvLSTM2D(2, 2, dropout=0.5), (2, 3, 3, 2),
                              'deterministic'),
    'SpectralNormalization': (lambda: layers.SpectralNormalization(layers.Dense(3)), (4,),
                              'calling the layer that owns it' if compat.KERAS_3 else
                              'conditions and loops on tensors'),
}


@pytest.mark.parametrize('name', REFUSED)
def test_refused(name):
  """Random draws inside; a kernel divided by a norm that its wrapper makes from it."""
  make, shape, message = REFUSED[name]
  inputs = keras.Input(shape)
  model = keras.Model(inputs, layers.Dense(2)(layers.Flatten()(make()(inputs))))
  x = tf.constant(RNG.normal(size=(3,) + shape), tf.float32)
  supported, reason = bookkeeping.supports(model, x)
  assert not supported and message in reason and "tfdp.Performance('materialized')" in reason
  batch = interface.Batch(x, tf.zeros([3, 2]), (), tf.ones([3], tf.bool))
  with pytest.raises(bookkeeping.Unsupported, match=message):
    bookkeeping.engine(model, oracle.squared_error, batch, oracle.request(1.0))
