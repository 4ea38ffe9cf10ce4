# SPDX-License-Identifier: Apache-2.0
"""A layer of one's own, taught to the engine through public names alone."""

import bookkeeping_oracle as oracle
import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.clipping import bookkeeping
from tfdp_adaptive.clipping import materialized
from tfdp_adaptive.clipping.layers import registry

keras = compat.keras
layers = keras.layers


class Mixture(layers.Layer):
  """A gain, a matrix and a table, by an example's own ids."""

  def build(self, shapes):
    width = shapes[0][-1]
    self.gain = self.add_weight(name='gain', shape=(width,), initializer='ones')
    self.matrix = self.add_weight(name='matrix', shape=(width, 3), initializer='ones')
    self.table = self.add_weight(name='table', shape=(7, 3), initializer='zeros')

  def call(self, inputs):
    x, ids = inputs
    return tf.matmul(x * self.gain, self.matrix) + tf.gather(tf.convert_to_tensor(self.table), ids)


@pytest.fixture(autouse=True)
def forget():
  yield
  registry._KINDS.pop(Mixture, None)


def model():
  rng = np.random.default_rng(0)
  x = [tf.constant(rng.normal(size=(5, 4, 2)), tf.float32),
       tf.constant(rng.integers(0, 7, (5, 4)), tf.int32)]
  inputs = [keras.Input((4, 2)), keras.Input((4,), dtype='int32')]
  made = keras.Model(inputs, layers.Dense(2)(Mixture(name='mine')(inputs)))
  return oracle.randomized(made), x


def register(gain=1.0):
  @tfdp.clipping.register(Mixture)
  def mixture(layer, call, cotangents):
    x, ids = call.inputs
    matrix = tf.convert_to_tensor(layer.matrix)
    back = tf.einsum('ntp,dp->ntd', cotangents, matrix)
    yield layer.gain, tfdp.clipping.explicit(gain * tf.reduce_sum(back * x, 1))
    yield layer.matrix, tfdp.clipping.Outer(
        x * tf.convert_to_tensor(layer.gain), cotangents, tuple(layer.matrix.shape))
    yield layer.table, tfdp.clipping.Rows(ids, cotangents, tuple(layer.table.shape))
  return mixture


def test_a_registered_layer():
  register()
  made, x = model()
  oracle.check(made, x)
  layer = tfdp.explain_clipping(made).layers[0]
  assert layer.kind == 'Mixture' and not layer.reason and 'gram' in layer.route


def test_what_is_registered_is_used():
  """A wrong formula gives wrong sums: nothing else computes them."""
  register(gain=2.0)
  made, x = model()
  with pytest.raises(AssertionError):
    oracle.check(made, x)


def test_without_registration_it_goes_one_by_one():
  made, x = model()
  oracle.check(made, x)
  assert tfdp.explain_clipping(made).layers[0].route == 'one example at a time'


def test_products_of_a_batch_and_a_weight_in_the_materialized_engine():
  """These corrupt memory when vectorized on TF 2.21, see `compat.vectorizes_safely`."""
  made, x = model()
  batch = oracle.batch_of(x, made(x))
  records = oracle.gradients(made, oracle.squared_error, batch)
  request = oracle.request(oracle.median_norm(records))
  clipped = materialized.vectorized(made, oracle.squared_error, batch, request)
  expected = oracle.by_definition(made, records, batch.mask, request)
  oracle.assert_close(clipped.sums, expected, 1e-5)


def test_every_variable_must_be_answered_for():
  @tfdp.clipping.register(Mixture)
  def mixture(layer, call, cotangents):
    yield layer.gain, tfdp.clipping.explicit(tf.reduce_sum(cotangents, 1)[:, :2])

  made, x = model()
  with pytest.raises(tfdp.clipping.Unsupported, match='must yield every trainable variable'):
    oracle.check(made, x)
  assert not bookkeeping.supports(made, x)[0]


def test_a_subclass_that_computes_by_itself_is_not_its_parent():
  """It may compute something else."""
  register(gain=2.0)

  class Other(Mixture):
    def call(self, inputs):
      return super().call(inputs)

  made, x = model()
  inputs = made.inputs
  made = keras.Model(inputs, Other(name='other')(inputs))
  oracle.check(oracle.randomized(made), x)


def test_a_subclass_that_inherits_all_that_computes_is_its_parent():
  register()
  kind = lambda **attributes: registry._kind(type('Alike', (Mixture,), attributes))
  function = lambda self, *args, **kwargs: None
  for attributes in ({}, {'get_config': function}, {'__init__': function}, {'__doc__': 'A name.'}):
    assert kind(**attributes) is registry._KINDS[Mixture]
  for name in ('call', '__call__', 'build', 'add_weight', 'anything', '__getattribute__'):
    assert kind(**{name: function}) is None, name
  assert kind(gain=property(function)) is None


def test_public_names():
  rules = {'check', 'register', 'explicit', 'Outer', 'Rows', 'Unsupported'}
  ways = {'Hard', 'AutoV', 'AutoS', 'PSAC', 'Tanh', 'PNorm', 'Quantile', 'Slack', 'Groups',
          'Automatic', 'PerLayer', 'PerVariable'}
  assert rules | ways == set(tfdp.clipping.__all__)
  assert all(getattr(tfdp.clipping, name).__name__ == name for name in ways)
  with pytest.raises(AttributeError, match='no attribute'):
    tfdp.clipping.nothing
