# SPDX-License-Identifier: Apache-2.0
"""Rules that users register are compared with gradients of single examples before they are used."""

import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.clipping.layers import registry

keras, layers = compat.keras, compat.keras.layers
X = np.random.default_rng(0).normal(size=[32, 3]).astype(np.float32)
PLAN = tfdp.PrivacyPlan(batch_size=8, steps=2, l2_norm_clip=1.0, noise_multiplier=1.0,
                        target_delta=1e-3, population_size=32)


class Matrix(layers.Layer):
  """inputs * gain @ matrix, square; the matrix starts at zero, which hides the gain's rule."""

  def build(self, shape):
    self.gain = self.add_weight(name='gain', shape=(shape[-1],), initializer='ones')
    self.matrix = self.add_weight(name='matrix', shape=(shape[-1],) * 2, initializer='zeros')

  def call(self, inputs):
    return tf.matmul(inputs * self.gain, tf.convert_to_tensor(self.matrix))


class Fixed(Matrix):
  """A layer that cannot be made again of its config."""

  def __init__(self, required, **kwargs):
    super().__init__(**kwargs)
    self.required = required

  def get_config(self):
    raise NotImplementedError

  def build(self, shape):
    super().build(shape)
    self.matrix.assign(np.eye(3) + .1)


def right(layer, call, cotangents):
  x, matrix = call.inputs, tf.convert_to_tensor(layer.matrix)
  back = tf.matmul(cotangents, matrix, transpose_b=True)
  yield layer.gain, tfdp.clipping.explicit(back * x)
  yield layer.matrix, tfdp.clipping.Outer(
      (x * layer.gain)[:, tf.newaxis], cotangents[:, tf.newaxis], tuple(layer.matrix.shape))


def exchanged(layer, call, cotangents):
  (gain, factor), _ = right(layer, call, cotangents)
  yield gain, factor
  yield layer.matrix, tfdp.clipping.Outer(
      cotangents[:, tf.newaxis], (call.inputs * layer.gain)[:, tf.newaxis],
      tuple(layer.matrix.shape))


def scaled_gain(layer, call, cotangents):
  (gain, factor), matrix = right(layer, call, cotangents)
  yield gain, tfdp.clipping.explicit(1.01 * factor.gradient())
  yield matrix


def of_the_mean(layer, call, cotangents):
  gain, _ = right(layer, call, cotangents)
  yield gain
  yield layer.matrix, tfdp.clipping.explicit(tf.repeat(tf.matmul(
      call.inputs * layer.gain, cotangents, transpose_a=True)[tf.newaxis], tf.shape(cotangents)[0],
                                                       axis=0))


def too_few(layer, call, cotangents):
  gain, _ = right(layer, call, cotangents)
  yield gain


def wrong_shape(layer, call, cotangents):
  gain, _ = right(layer, call, cotangents)
  yield gain
  yield layer.matrix, tfdp.clipping.explicit(cotangents)


def failing(layer, call, cotangents):
  yield layer.gain, tfdp.clipping.explicit(tf.matmul(cotangents[:, :2], call.inputs))


WRONG = [exchanged, scaled_gain, of_the_mean, too_few, wrong_shape, failing]
name = lambda rule: rule.__name__


@pytest.fixture(autouse=True)
def forget():
  yield
  for kind in (Matrix, Fixed):
    registry._KINDS.pop(kind, None)


def test_a_right_rule_passes_in_float64():
  tfdp.clipping.register(Matrix)(right)
  assert tfdp.clipping.check(Matrix(), X) < 1e-12
  assert tfdp.clipping.check(layers.Dense(2), X) < 1e-12
  assert tfdp.clipping.check(layers.Conv1D(2, 2), np.ones([3, 5, 2], np.float32)) < 1e-12


@pytest.mark.parametrize('rule', WRONG, ids=name)
def test_wrong_rules_are_refused(rule):
  tfdp.clipping.register(Matrix)(rule)
  with pytest.raises(tfdp.PrivacyError, match='must give the gradients of single examples'):
    tfdp.clipping.check(Matrix(), X)


@pytest.mark.parametrize('rule', WRONG, ids=name)
def test_layers_that_cannot_be_made_again_are_checked_as_they_are(rule):
  layer = Fixed(3)
  tfdp.clipping.register(Fixed)(right)
  assert tfdp.clipping.check(layer, X) < 1e-6
  tfdp.clipping.register(Fixed)(rule)
  with pytest.raises(tfdp.PrivacyError, match='must give the gradients of single examples'):
    tfdp.clipping.check(layer, X)


def model(*more):
  return keras.Sequential([layers.Input([3]), *more, Matrix(), layers.Dense(1)])


@pytest.mark.pitfall(
    'The clipping rule of a layer of your own is wrong, so that examples are clipped by a wrong '
    'norm.', severity='critical', stops='an error before the first step')
@pytest.mark.parametrize('rule', [exchanged, scaled_gain], ids=name)
def test_the_first_step_refuses_wrong_rules(rule):
  tfdp.clipping.register(Matrix)(rule)
  private = tfdp.make_private(model(layers.Dense(3)))
  private.compile(tfdp.DPSGD(.1, plan=PLAN), 'mse')
  with pytest.raises(tfdp.PrivacyError, match='registered for Matrix'):
    private.fit(PLAN.batches((X, X[:, :1])), verbose=0)
  assert private.optimizer.steps_done == 0
  with pytest.raises(tfdp.PrivacyError, match='registered for Matrix'):
    tfdp.validate_model(model())


def test_a_right_rule_trains():
  tfdp.clipping.register(Matrix)(right)
  private = tfdp.make_private(model())
  private.compile(tfdp.DPSGD(.1, plan=PLAN), 'mse')
  private.fit(PLAN.batches((X, X[:, :1])), verbose=0)
  assert private.optimizer.steps_done == 2


@pytest.mark.parametrize('layer, message', [
    (layers.ReLU(), 'must have a clipping rule'),
    (layers.Dense(2, trainable=False), 'must have weights that train')])
def test_layers_without_anything_to_check(layer, message):
  with pytest.raises(ValueError, match=message):
    tfdp.clipping.check(layer, X)


@pytest.mark.parametrize('layer, x, message', [
    (3, X, 'must be a Keras layer'), (layers.Dense(2), X[:1], 'two examples or more'),
    (layers.Dense(2), X[:0], 'two examples or more')])
def test_what_cannot_be_compared_is_refused(layer, x, message):
  with pytest.raises(ValueError, match=message):
    tfdp.clipping.check(layer, x)
