# SPDX-License-Identifier: Apache-2.0
"""What `recommend` is told of a model is what TensorFlow computes."""

import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat

RNG = np.random.default_rng(0)
X, Y = (RNG.normal(size=[37, width]).astype(np.float32) for width in (3, 1))


def model(loss=None):
  layers = compat.keras.layers
  made = compat.keras.Sequential([layers.Dense(4, 'tanh'), layers.Dense(1)])
  made.compile(loss=loss)
  return made


@pytest.mark.parametrize('loss, squared', [
    ('mse', True), ('mean_squared_error', True), ('mae', False),
    (compat.keras.losses.MeanSquaredError(), True)])
def test_gradients_and_losses_of_every_record(loss, squared):
  made = model(loss)
  known = tfdp.public_gradients(made, X, Y, batch_size=16)
  assert known['parameters'] == 21 and known['squared'] is squared
  for i in (0, 16, 36):
    with tf.GradientTape() as tape:
      value = made.loss(Y[i:i + 1], made(X[i:i + 1])) if callable(loss) else (
          compat.keras.losses.get(loss)(Y[i:i + 1], made(X[i:i + 1]))[0])
    flat = np.concatenate([np.ravel(g) for g in tape.gradient(value, made.trainable_variables)])
    np.testing.assert_allclose(known['gradients'][i], flat, rtol=1e-4, atol=1e-6)
    assert known['losses'][i] == pytest.approx(float(value), rel=1e-5)


def test_a_look_from_elsewhere_is_of_the_moved_model_and_leaves_it_where_it_is():
  made = model('mse')
  known = tfdp.public_gradients(made, X, Y)
  before = made.get_weights()
  distance = RNG.normal(size=21)
  rows = np.array([4, 0, 36])
  gradients, losses = known['look'](distance, rows)
  for old, now in zip(before, made.get_weights()):
    np.testing.assert_array_equal(old, now)
  parts = np.split(distance, np.cumsum([w.size for w in before])[:-1])
  made.set_weights([w + part.reshape(w.shape) for w, part in zip(before, parts)])
  moved = tfdp.public_gradients(made, X, Y)
  np.testing.assert_allclose(gradients, moved['gradients'][rows], rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(losses, moved['losses'][rows], rtol=1e-5)
  again, _ = known['look'](distance, rows)  # From the weights of then, not from those of now.
  np.testing.assert_allclose(again, gradients, rtol=1e-4, atol=1e-5)
  assert tfdp.public_gradients(made, X, Y, columns=20)['look'] is None


def test_columns_of_large_models_are_drawn_once():
  made = model('mse')
  whole, cut = (tfdp.public_gradients(made, X, Y, columns=columns) for columns in (100, 5))
  assert cut['gradients'].shape == (37, 5) and cut['parameters'] == 21
  assert all(any(np.allclose(column, other) for other in whole['gradients'].T)
             for column in cut['gradients'].T)


def test_a_loss_of_ones_own_and_no_loss():
  made = model()
  own = lambda y, z: tf.reduce_sum(tf.square(z - y), -1)
  np.testing.assert_allclose(
      tfdp.public_gradients(made, X, Y, loss=own)['losses'],
      tfdp.public_gradients(made, X, Y, loss='mse')['losses'], rtol=1e-5)
  with pytest.raises(ValueError, match='loss'):
    tfdp.public_gradients(made, X, Y)


def test_a_model_without_trainable_variables_is_refused():
  made = compat.keras.Sequential([compat.keras.layers.Flatten()])
  with pytest.raises(ValueError, match='must have trainable variables'):
    tfdp.public_gradients(made, X, Y, loss='mse')


def test_moving_averages_stay_as_they_are():
  layers = compat.keras.layers
  made = compat.keras.Sequential([layers.BatchNormalization(), layers.Dense(1)])
  made(X[:2])
  before = made.get_weights()
  tfdp.public_gradients(made, X, Y, loss='mse')['look'](np.ones(10))
  for old, now in zip(before, made.get_weights()):
    np.testing.assert_array_equal(old, now)
