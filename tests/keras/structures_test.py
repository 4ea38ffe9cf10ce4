# SPDX-License-Identifier: Apache-2.0
"""Structures of losses and optional inputs train as in plain Keras, where there is no noise."""

import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat

keras = compat.keras
KERAS_3_ONLY = pytest.mark.skipif(not compat.KERAS_3, reason='Keras 2 has none.')
ROWS = 8


def _numbers(*shape):
  return np.random.default_rng(len(shape)).normal(size=(ROWS, *shape)).astype('float32')


def _equal_to_keras(make, x, y, loss, loss_weights=None, sample_weight=None):
  """Compares histories and weights after three steps of both."""
  results = []
  for private in (False, True):
    keras.utils.set_random_seed(1)
    model = make()
    optimizer = keras.optimizers.SGD(0.1)
    if private:
      model = tfdp.make_private(model)
      optimizer = tfdp.DPSGD(0.1, l2_norm_clip=1e6, noise_multiplier=0.0, batch_size=ROWS)
    model.compile(optimizer, loss, loss_weights=loss_weights)
    history = model.fit(x, y, sample_weight=sample_weight, batch_size=ROWS, epochs=3, shuffle=False,
                        verbose=0)
    results.append((history.history, [np.array(w) for w in model.get_weights()]))
  (plain, expected), (ours, weights) = results
  assert sorted(plain) == sorted(ours)
  for name, values in plain.items():
    np.testing.assert_allclose(ours[name], values, rtol=1e-4, err_msg=name)
  for one, two in zip(weights, expected):
    np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6)


def _outputs_within_outputs():
  inputs = keras.Input([3])
  dense = lambda name: keras.layers.Dense(1, name=name)(inputs)
  return keras.Model(inputs, {'a': (dense('one'), dense('two')), 'b': dense('three')})


@pytest.mark.thorough(but=['False'])
@pytest.mark.parametrize('weighted', [False, True])
def test_losses_in_the_structure_of_the_outputs(weighted):
  y = {'a': (_numbers(1), 2 * _numbers(1)), 'b': 3 * _numbers(1)}
  weights = {'a': (0.5, 2.0), 'b': 1.5} if weighted else None
  _equal_to_keras(_outputs_within_outputs, _numbers(3), y,
                  {'a': ('mse', 'mae'), 'b': 'mse'}, weights)


@pytest.mark.thorough
@KERAS_3_ONLY
@pytest.mark.parametrize('sample_weight', [None, np.linspace(0.5, 2.0, ROWS)])
def test_a_loss_of_several_outputs_beside_losses_of_each(sample_weight):
  def together(y, outputs):
    return tf.reduce_mean((y[0] * outputs[1] - y[1] * outputs[0])**2, -1)

  y = {'a': (_numbers(1), 2 * _numbers(1)), 'b': 3 * _numbers(1)}
  _equal_to_keras(_outputs_within_outputs, _numbers(3), y,
                  {'a': [together, (None, 'mae')], 'b': 'mse'}, None, sample_weight)


@KERAS_3_ONLY
def test_a_loss_of_several_outputs_is_clipped_example_by_example():
  def together(y, outputs):  # On a batch it would mix examples.
    return (outputs[0] - tf.reduce_mean(outputs[1], 0) - y[0])**2

  model = tfdp.make_private(_outputs_within_outputs())
  model.compile(tfdp.DPSGD(1.0, l2_norm_clip=0.1, noise_multiplier=0.0, batch_size=1,
                           adjacency='add_remove'),
                {'a': [together, ('mse', 'mae')], 'b': 'mse'})
  y = {'a': (_numbers(1), _numbers(1)), 'b': _numbers(1)}
  before, moves = model.get_weights(), []
  for some in [slice(0, 1), slice(1, 2), slice(0, 2)]:
    model.set_weights(before)
    part = tf.nest.map_structure(lambda t, some=some: t[some], (_numbers(3), y))
    model.train_on_batch(*part)
    moves.append(np.concatenate([np.ravel(a - b) for a, b in zip(model.get_weights(), before)]))
  np.testing.assert_allclose(np.linalg.norm(moves[0]), 0.1, rtol=1e-5)
  np.testing.assert_allclose(moves[2], moves[0] + moves[1], atol=1e-6)


@KERAS_3_ONLY
def test_an_optional_input_may_be_none():
  class Sum(keras.layers.Layer):
    def __init__(self):
      super().__init__()
      self.dense = keras.layers.Dense(2)

    def call(self, x, more=None):
      return self.dense(x if more is None else x + more)

  def make():
    x = keras.Input([2], name='x')
    more = keras.Input([2], name='more', optional=True)
    return keras.Model({'x': x, 'more': more}, Sum()(x, more))

  x, y = _numbers(2), _numbers(2) + 1
  _equal_to_keras(make, {'x': x, 'more': None}, y, 'mse')
  _equal_to_keras(make, {'x': x, 'more': x}, y, 'mse')
  plan = tfdp.PrivacyPlan(population_size=ROWS, batch_size=4, steps=2, l2_norm_clip=1.0,
                          noise_multiplier=1.0, target_delta=1e-2)
  model = tfdp.make_private(make())
  model.compile(tfdp.DPSGD(0.1, plan=plan), 'mse')
  model.fit(plan.batches(({'x': x, 'more': None}, y)), verbose=0)
  assert model.optimizer.steps_done == 2
  assert model.predict({'x': x, 'more': None}, verbose=0).shape == (ROWS, 2)
