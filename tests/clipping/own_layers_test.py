# SPDX-License-Identifier: Apache-2.0
"""Standardized filters, and quantized bases with LoRA: their values and their clipping rules."""

import bookkeeping_oracle as oracle
import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat

keras, layers = compat.keras, compat.keras.layers
RNG = np.random.default_rng(0)


def test_filters_have_mean_zero_and_norm_gain_whatever_their_scale():
  x = tf.constant(RNG.normal(size=(3, 6, 5, 2)), tf.float32)
  layer = tfdp.layers.WSConv2D(4, (3, 2), use_bias=False)
  layer.build((None, 6, 5, 2))
  kernel = RNG.normal(1.0, 2.0, size=(3, 2, 2, 4))
  gain = np.array([1.0, 2.0, .5, -1.0])
  layer.set_weights([kernel, gain])
  flat = kernel.reshape(-1, 4)
  expected = gain * (flat - flat.mean(0)) / np.sqrt(12 * flat.var(0) + 1e-4)
  np.testing.assert_allclose(
      layer(x), tf.nn.conv2d(x, expected.reshape(kernel.shape), 1, 'VALID'), rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(np.linalg.norm(expected, axis=0), np.abs(gain), rtol=1e-3)
  before = layer(x)
  layer.set_weights([100 * kernel + 3, gain])
  np.testing.assert_allclose(layer(x), before, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize('arguments', [
    dict(strides=2, padding='same', activation='tanh'), dict(groups=2), dict(use_bias=False),
    dict(dilation_rate=2, padding='same')])
def test_standardized_filters_have_a_rule(arguments):
  x = tf.constant(RNG.normal(size=(4, 6, 5, 2)), tf.float32)
  model = keras.Sequential([
      layers.Input((6, 5, 2)), tfdp.layers.WSConv2D(4, 2, **arguments), layers.Flatten(),
      layers.Dense(2)])
  oracle.check(oracle.randomized(model), x)
  row = tfdp.explain_clipping(model).layers[0]
  assert not row.reason and row.route != 'one example at a time'
  assert tfdp.clipping.check(model.layers[0], x) < 1e-9


def test_a_standardized_layer_is_saved(tmp_path):
  model = keras.Sequential([layers.Input((4, 4, 1)), tfdp.layers.WSConv2D(2, 2, epsilon=.1)])
  model.save(str(tmp_path / 'm.keras'))
  again = keras.models.load_model(str(tmp_path / 'm.keras'))
  x = np.ones([2, 4, 4, 1], np.float32)
  np.testing.assert_array_equal(again(x), model(x))
  assert again.layers[-1].epsilon == .1
  with pytest.raises(ValueError, match='epsilon'):
    tfdp.layers.WSConv2D(2, 2, epsilon=0)


@pytest.mark.thorough(but=['int4-True', 'int8-False'])
@pytest.mark.skipif(not compat.KERAS_3, reason='Keras 3 quantizes')
@pytest.mark.parametrize('lora', [True, False])
@pytest.mark.parametrize('mode', ['int8', 'int4'])
def test_quantized_bases_have_the_ordinary_rule(mode, lora):
  inputs = keras.Input((4,), dtype='int32')
  table = layers.Embedding(8, 6)
  hidden = layers.Dense(6, activation='tanh', name='dense')(table(inputs))
  hidden = layers.EinsumDense('abc,cde->abde', (4, 2, 4), bias_axes='e', name='einsum')(hidden)
  model = keras.Model(inputs, layers.Dense(2, name='head')(layers.Flatten()(hidden)))
  for layer in (table, model.get_layer('dense'), model.get_layer('einsum')):
    layer.quantize(mode)
    if lora:
      layer.enable_lora(2)
  trained = [v.path for v in model.trainable_variables]
  assert ('lora' in ' '.join(trained)) == lora and 'dense/kernel' not in trained
  rows = tfdp.explain_clipping(model).layers
  assert len(rows) == (4 if lora else 3)
  assert not [row for row in rows if row.reason or row.route == 'one example at a time'], rows
  oracle.check(oracle.randomized(model), tf.constant(RNG.integers(0, 8, (5, 4))), rtol=2e-5)


@pytest.mark.skipif(not compat.KERAS_3, reason='Keras 3 quantizes')
def test_a_quantized_base_trains_by_lora_alone():
  model = keras.Sequential([layers.Input([6]), layers.Dense(8, 'relu'), layers.Dense(2)])
  model.layers[0].quantize('int8')
  model.layers[0].enable_lora(2)
  private = tfdp.make_private(model)
  plan = tfdp.PrivacyPlan(batch_size=8, steps=2, l2_norm_clip=1.0, noise_multiplier=1.0,
                          target_delta=1e-3, population_size=32)
  private.compile(tfdp.DPAdam(.1, plan=plan), 'mse')
  before = np.array(model.layers[0]._kernel)
  low = [np.array(v) for v in (model.layers[0].lora_kernel_a, model.layers[0].lora_kernel_b)]
  x = RNG.normal(size=[32, 6]).astype(np.float32)
  private.fit(plan.batches((x, x[:, :2])), verbose=0)
  np.testing.assert_array_equal(before, model.layers[0]._kernel)
  for old, new in zip(low, (model.layers[0].lora_kernel_a, model.layers[0].lora_kernel_b)):
    assert not np.any(old == new)
