# SPDX-License-Identifier: Apache-2.0
"""Single weights that are frozen, on every engine; and weights that no gradient reaches."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.clipping import engines

keras, layers = compat.keras, compat.keras.layers
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=[4, 5]).astype(np.float32), RNG.normal(size=[4, 2]).astype(np.float32)


def mlp():
  keras.utils.set_random_seed(1)
  return tfdp.make_private(keras.Sequential([
      layers.Input([5]), layers.Dense(4, 'tanh', name='first'), layers.LayerNormalization(),
      layers.Dense(2, name='last')]))


def compiled(model, engine='auto', noise=0.0, optimizer=tfdp.DPAdam, **more):
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    model.compile(optimizer(
        .5, l2_norm_clip=1e-3, noise_multiplier=noise, batch_size=4, adjacency='zero_out',
        performance=tfdp.Performance(engine), **more), 'mse')
  return model


def values(model):
  return [np.array(compat.read(v)) for v in model.weights]


def names(variables):
  return [compat.leaf_name(v) for v in variables]


@pytest.mark.thorough(but=['materialized', 'bookkeeping'])
@pytest.mark.parametrize('engine', [e for e in engines.ENGINES if e != 'auto'])
def test_frozen_weights_do_not_move_and_have_no_part_in_the_norm(engine):
  """Oracle: a model whose other weights are constants of its code."""
  model = mlp()
  chosen = tfdp.train_only(model, 'bias')
  assert names(chosen) == names(model.trainable_variables) == ['bias', 'gamma', 'beta', 'bias']
  first, last = model.layers[0], model.layers[-1]
  before = values(model)
  compiled(model, engine, optimizer=tfdp.DPSGD)
  kernels = [tf.constant(compat.read(layer.kernel)) for layer in (first, last)]

  def gradient(x, y):
    with tf.GradientTape() as tape:
      trained = [tf.Variable(compat.read(v)) for v in chosen]
      hidden = tf.tanh(x @ kernels[0] + trained[0])
      mean, var = tf.nn.moments(hidden, 1, keepdims=True)
      normal = (hidden - mean) / tf.sqrt(var + model.layers[1].epsilon)
      outputs = (normal * trained[1] + trained[2]) @ kernels[1] + trained[3]
      loss = tf.reduce_mean(tf.square(outputs - y))
    return np.concatenate([np.ravel(g) for g in tape.gradient(loss, trained)])

  clipped = [g * min(1, 1e-3 / np.linalg.norm(g)) for g in (
      gradient(X[i:i + 1], Y[i:i + 1]) for i in range(4))]
  start = np.concatenate([np.ravel(compat.read(v)) for v in chosen])
  model.train_on_batch(X, Y)
  moved = np.concatenate([np.ravel(compat.read(v)) for v in chosen]) - start
  np.testing.assert_allclose(moved, -.5 * np.sum(clipped, 0) / 4, rtol=2e-3, atol=1e-8)
  trained = {compat.variable_key(v) for v in chosen}
  for v, old in zip(model.weights, before):
    assert (compat.variable_key(v) in trained) != np.array_equal(compat.read(v), old)


def test_noise_and_slots_are_for_trained_weights_alone():
  model = mlp()
  chosen = tfdp.train_only(model, 'head')
  assert names(chosen) == ['kernel', 'bias']
  before = values(model)
  compiled(model, noise=5.0)
  model.train_on_batch(X, Y)
  same = [np.array_equal(old, new) for old, new in zip(before, values(model))]
  assert same == [True] * 4 + [False] * 2
  shapes = [tuple(v.shape) for v in model.optimizer.variables if tuple(v.shape) in ((5, 4), (4,))]
  assert not shapes


def test_a_function_chooses_and_a_second_choice_is_of_all_weights():
  model = mlp()
  assert names(tfdp.train_only(model, 'bias')) == ['bias', 'gamma', 'beta', 'bias']
  assert len(tfdp.train_only(model, lambda v: tuple(v.shape) == (5, 4))) == 1
  assert len(model.trainable_variables) == 1
  assert len(tfdp.train_only(model, lambda v: True)) == len(model.trainable_variables) == 6
  model.layers[0].trainable = False
  assert len(tfdp.train_only(model, 'bias')) == 3  # Frozen variables stay frozen.


def test_plain_models_may_be_given_before_they_are_private():
  keras.utils.set_random_seed(0)
  plain = keras.Sequential([layers.Input([5]), layers.Dense(4), layers.Dense(2)])
  tfdp.train_only(plain, 'bias')
  private = compiled(tfdp.make_private(plain), noise=1.0)
  assert names(private.trainable_variables) == ['bias', 'bias']
  before = values(private)
  private.train_on_batch(X, Y)
  assert [np.array_equal(a, b) for a, b in zip(before, values(private))] == [
      True, False, True, False]


def test_the_choice_is_saved_and_training_goes_on(tmp_path):
  model = mlp()
  tfdp.train_only(model, 'bias')
  compiled(model, noise=1.0)
  model.train_on_batch(X, Y)
  model.save(str(tmp_path / 'm.keras'))
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    again = keras.models.load_model(str(tmp_path / 'm.keras'))
  assert names(again.trainable_variables) == ['bias', 'gamma', 'beta', 'bias']
  for old, new in zip(values(model), values(again)):
    np.testing.assert_array_equal(old, new)
  before = values(again)
  again.train_on_batch(X, Y)
  assert [np.array_equal(a, b) for a, b in zip(before, values(again))] == [
      True, False, False, False, True, False]
  assert again.optimizer.steps_done == 2


@pytest.mark.skipif(not compat.KERAS_3, reason='Keras 3 has LoRA')
def test_one_side_of_lora():
  model = mlp()
  for layer in (model.layers[0], model.layers[-1]):
    layer.enable_lora(2)
  assert names(tfdp.train_only(model, 'lora_b')) == ['lora_kernel_b'] * 2
  compiled(model, noise=1.0)
  before = {v.path: np.array(v) for v in model.weights}
  model.train_on_batch(X, Y)
  for v in model.weights:
    assert v.path.endswith('lora_kernel_b') != np.array_equal(before[v.path], v)


@pytest.mark.parametrize('what, message', [
    ('biases', '`what` must be'), (lambda v: False, 'No weight would train'),
    ('lora_b', 'No weight would train')])
def test_refusals(what, message):
  with pytest.raises(ValueError, match=message):
    tfdp.train_only(mlp(), what)


def test_a_model_must_be_built():
  with pytest.raises(ValueError, match='must be built'):
    tfdp.train_only(keras.Sequential([layers.Dense(2)]), 'bias')


class Unused(layers.Layer):
  """A layer that the engine does not know, with a weight that it does not use."""

  def build(self, shape):
    self.used = self.add_weight(name='used', shape=(shape[-1],), initializer='ones')
    self.idle = self.add_weight(name='idle', shape=(3,), initializer='ones')

  def call(self, inputs):
    return inputs * self.used + 0 * tf.stop_gradient(tf.reduce_sum(self.idle))


def silent(kind):
  inputs = layers.Input([5])
  if kind == 'stopped':
    hidden = layers.Dense(3, name='stopped')(inputs)
    hidden = layers.Lambda(lambda t: tf.stop_gradient(t), output_shape=(3,))(hidden)
  else:
    hidden = Unused()(inputs)
  return tfdp.make_private(keras.Model(inputs, layers.Dense(2)(hidden)))


@pytest.mark.thorough(but=['unused-1-bookkeeping', 'stopped-2-loop'])
@pytest.mark.pitfall(
    'A trainable weight gets noise but no gradient, for example behind `stop_gradient`.',
    severity='medium', stops='a warning at the first step')
@pytest.mark.parametrize('engine', [e for e in engines.ENGINES if e != 'auto'])
@pytest.mark.parametrize('kind, count', [('stopped', 2), ('unused', 1)])
def test_weights_that_get_no_signal_are_named_once(engine, kind, count):
  model = compiled(silent(kind), engine)
  with pytest.warns(tfdp.Caution, match=f'reaches {count} of the weights') as seen:
    model.train_on_batch(X, Y)
  assert len([one for one in seen if 'No gradient' in str(one.message)]) == 1
  model.train_on_batch(X, Y)  # A second warning would be an error.


def test_a_fixed_copy_keeps_the_choice():
  model = keras.Sequential([layers.Input([5]), layers.Dense(4), layers.BatchNormalization(),
                            layers.Dense(2)])
  tfdp.train_only(model, lambda v: compat.leaf_name(v) in ('beta', 'bias'))
  copy = tfdp.make_private(tfdp.fix_model(model, verbose=False))
  assert names(copy.trainable_variables) == ['bias', 'beta', 'bias']
