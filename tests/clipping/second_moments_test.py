# SPDX-License-Identifier: Apache-2.0
"""What public gradients are made of: averages of inputs and errors, kind by kind of layer."""

import bookkeeping_oracle as oracle
import numpy as np
import pytest
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive.clipping import engines
from tfdp_adaptive.clipping import factors
from tfdp_adaptive.clipping import rows
from tfdp_adaptive.clipping.layers import convolution
from tfdp_adaptive.clipping.layers import dense
from tfdp_adaptive.rules import kfc

keras = compat.keras
layers = keras.layers
RNG = np.random.default_rng(0)


def normal(*shape):
  return tf.constant(RNG.normal(size=shape))


def moment(vectors):
  vectors = np.reshape(vectors, [-1, np.shape(vectors)[-1]])
  return vectors.T @ vectors / len(vectors)


@pytest.mark.parametrize('most', [9, 2])
def test_of_products(most):
  """Both orders of the axes, and channels of a filter."""
  a, e = normal(4, 3, 6), normal(4, 3, 5)
  side = lambda x: moment(x) if x.shape[-1] <= most else np.diag(moment(x))
  turned = dense._factor(e, 'nte', a, 'nta', 'ae', (6, 5))
  for factor in (factors.Outer(a, e, (6, 5)), turned):
    for got, x in zip(factor.second_moments((1, 6, 5), most), (a, e)):
      np.testing.assert_allclose(got, side(x))
  left, _ = factors.Outer(a, e, (3, 1, 2, 5)).second_moments((3, 2, 5), 9)
  np.testing.assert_allclose(left, moment(np.reshape(a, [4, 3, 3, 2])))


def test_of_rows():
  """Inputs are one-hot."""
  ids, e = tf.constant([[0, 2], [2, 2], [1, 2]]), normal(3, 2, 5)
  left, right = rows.Rows(ids, e, (4, 5)).second_moments((1, 4, 5), 8)
  np.testing.assert_allclose(left, moment(np.eye(4)[ids]))
  np.testing.assert_allclose(right, moment(e))
  long, _ = rows.Rows(ids, e, (4, 5)).second_moments((1, 4, 5), 3)
  np.testing.assert_allclose(long, np.diag(left))
  table, outer = rows.Rows(ids, e, (4, 5)), factors.Outer(normal(3, 1, 4), normal(3, 1, 5), (4, 5))
  for got, *parts in zip(*[one.second_moments((1, 4, 5), 8) for one in (
      rows.Mixed((table, outer)), table, outer)]):
    np.testing.assert_allclose(got, parts[0] + parts[1])


def test_of_patches():
  x, e = normal(2, 4, 5, 3), normal(2, 3, 4, 6)
  factor = convolution.Convolution(x, e, (2, 2, 3, 6), (1, 1), (1, 1))
  patches = np.array([[[x[n, i:i + 2, j:j + 2] for j in range(4)] for i in range(3)]
                      for n in range(2)]).reshape(-1, 12)
  left, right = factor.second_moments((1, 12, 6), 16)
  np.testing.assert_allclose(left, moment(patches))
  np.testing.assert_allclose(right, moment(e))
  channels, _ = factor.second_moments((4, 3, 6), 16)
  np.testing.assert_allclose(channels, moment(patches.reshape(-1, 3)))


def test_of_gradients_of_which_nothing_is_known():
  g = normal(3, 2, 4, 5)
  left, right = factors.explicit(g).second_moments((2, 4, 5), 8)
  np.testing.assert_allclose(left, np.mean(np.einsum('ncij,nckj->ncik', g, g), (0, 1)) / 5)
  np.testing.assert_allclose(right, np.mean(np.einsum('ncij,ncik->ncjk', g, g), (0, 1)) / 4)


def test_of_a_model():
  """Two layers of which the second meets the outputs of the first; biases by their squares."""
  keras.utils.set_random_seed(0)
  model = oracle.randomized(keras.Sequential([
      layers.Input((3,)), layers.Dense(4, activation='tanh'), layers.Dense(2)]))
  x = tf.constant(RNG.normal(size=(6, 3)), tf.float32)
  y = tf.constant(RNG.normal(size=(6, 2)), tf.float32)
  first, bias, second, last = [np.asarray(v) for v in model.get_weights()]
  hidden = np.tanh(x @ first + bias)
  e2 = np.array([1, 2]) * (hidden @ second + last - y)  # As `squared_error` weighs them.
  e1 = (e2 @ second.T) * (1 - hidden**2)
  expected = [(moment(x), moment(e1)), (np.mean(e1**2, 0),), (moment(hidden), moment(e2)),
              (np.mean(e2**2, 0),)]
  got = engines.public_gradients('factors', model, oracle.squared_error, x, y)
  for pair, wanted in zip(got, expected):
    for a, b in zip(pair, wanted):
      np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.thorough
def test_every_other_kind_of_layer_has_sides_of_its_shape():
  """Heads, norms and depthwise layers."""
  inputs = keras.Input((4, 6))
  x = layers.EinsumDense('abc,cde->abde', (4, 2, 3), bias_axes='de')(inputs)
  x = layers.EinsumDense('abde,dec->abc', (4, 6))(x)
  x = layers.LayerNormalization()(layers.Dense(5)(x))
  x = layers.DepthwiseConv1D(2)(x)
  model = keras.Model(inputs, layers.GlobalAveragePooling1D()(x))
  x = tf.constant(RNG.normal(size=(3, 4, 6)), tf.float32)
  y = tf.zeros([3, 5])
  found = tf.function(lambda: engines.public_gradients(
      'factors', model, oracle.squared_error, x, y))()
  for variable, leaf in zip(model.trainable_variables, found):
    assert [one.shape.as_list() for one in leaf] == [list(s) for s in kfc.sides(variable.shape)]
    assert all(np.all(np.isfinite(one)) for one in leaf)
    assert all(np.any(one) for one in leaf)


def test_a_model_that_cannot_be_seen_is_refused():
  class Own(keras.Model):

    def __init__(self):
      super().__init__()
      self.scale = self.add_weight(name='scale', shape=(3,), initializer='ones')

    def call(self, x):
      return x * self.scale

  model = Own()
  model(tf.ones([2, 3]))
  with pytest.raises(ValueError, match='engine can see'):
    engines.public_gradients(
        'factors', model, oracle.squared_error, tf.ones([2, 3]), tf.ones([2, 3]))
