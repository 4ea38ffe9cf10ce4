# SPDX-License-Identifier: Apache-2.0
"""The materialized engine against one batch of one after the other, through Keras' own loss."""

import functools

import bookkeeping_oracle as oracle
import numpy as np
import pytest
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import contract
from tfdp_adaptive.clipping import chunks
from tfdp_adaptive.clipping import engines
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.clipping import losses
from tfdp_adaptive.clipping import materialized

keras = compat.keras
layers = keras.layers
N, CLIP = 6, 0.05


def _dense():
  return keras.Sequential([layers.Input((5,)), layers.Dense(4, 'tanh'), layers.Dense(3)])


def _sequence():
  return keras.Sequential([
      layers.Input((4,), dtype='int32'), layers.Embedding(7, 3, mask_zero=True), layers.LSTM(4),
      layers.Dense(3)])


def _per_step():
  """Masked losses per time step: Keras normalises them by the steps that count."""
  return keras.Sequential([
      layers.Input((4,), dtype='int32'), layers.Embedding(7, 3, mask_zero=True),
      layers.Dense(3)])


def _convolution():
  return keras.Sequential([
      layers.Input((6, 6, 1)), layers.Conv2D(2, 3), layers.GroupNormalization(2),
      layers.MaxPooling2D(), layers.Flatten(), layers.LayerNormalization(), layers.Dense(3)])


def _attention():
  tokens = keras.Input((4,), dtype='int32')
  h = layers.Embedding(7, 4)(tokens)
  h = layers.LayerNormalization()(h + layers.MultiHeadAttention(2, 2)(h, h))
  return keras.Model(tokens, layers.Dense(3)(layers.GlobalAveragePooling1D()(h)))


MODELS = {
    'dense': (_dense, (5,), 'float32', ()), 'sequence': (_sequence, (4,), 'int32', ()),
    'per_step': (_per_step, (4,), 'int32', (4,)),
    'convolution': (_convolution, (6, 6, 1), 'float32', ()),
    'attention': (_attention, (4,), 'int32', ()),
}
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _problem(name):
  build, shape, dtype, steps = MODELS[name]
  keras.utils.set_random_seed(5)
  rng = np.random.default_rng(7)
  x = rng.normal(size=(N, *shape)) * 2 if dtype == 'float32' else rng.integers(1, 7, (N, *shape))
  if dtype == 'int32':
    x[1::2, 2:] = 0  # Padding, where masks are used.
  y = rng.integers(0, 3, (N, *steps))
  weight = np.array([1, 1, 0.5, 0, 1, 2], 'float32')
  return (build(), tf.constant(x.astype(dtype)), tf.constant(y, tf.int32), tf.constant(weight))


def _records(model, x, y, weight):
  """[n, d] float64 gradients, of batches of one."""
  rows = []
  for i in range(len(x)):
    with tf.GradientTape() as tape:
      value = LOSS(y[i:i + 1], model(x[i:i + 1], training=True))
    gradients = tape.gradient(value, model.trainable_variables)
    flat = np.concatenate([np.ravel(tf.convert_to_tensor(g)) for g in gradients])
    rows.append(flat.astype(np.float64) * float(weight[i]))
  return np.stack(rows)


def _clipped(records, mask, scale, clip):
  """Scaled and clipped in float64 NumPy."""
  scaled = records[mask] * scale
  norms = np.linalg.norm(scaled, axis=1, keepdims=True)
  return scaled * np.minimum(1, clip / np.where(norms > 0, norms, clip))


def _geometry(model, kind):
  sizes = [int(np.prod(v.shape)) for v in model.trainable_variables]
  if kind == 'isotropic':
    return (), np.ones(sum(sizes))
  flat = np.random.default_rng(1).uniform(0.1, 10, sum(sizes))
  parts = np.split(flat, np.cumsum(sizes)[:-1])
  return [tf.constant(p.reshape(v.shape), tf.float32)
          for p, v in zip(parts, model.trainable_variables)], flat


def _flat(tree):
  return np.concatenate([np.ravel(t) for t in tf.nest.flatten(tree)])


SQUARES = contract.Statistic(True, None, None)


@pytest.mark.thorough(but=['dense-looped-1-scaled', 'per_step-*'])
@pytest.mark.parametrize('name,engine,pieces,geometry', [
    ('dense', 'vectorized', 1, 'isotropic'), ('dense', 'looped', 1, 'scaled'),
    ('dense', 'vectorized', 4, 'scaled'), ('sequence', 'looped', 2, 'isotropic'),
    ('per_step', 'vectorized', 1, 'scaled'), ('convolution', 'vectorized', 2, 'isotropic'),
    ('attention', 'looped', 1, 'scaled')])
def test_sums_are_those_of_batches_of_one(name, engine, pieces, geometry):
  model, x, y, weight = _problem(name)
  scale, flat_scale = _geometry(model, geometry)
  mask = np.array([1, 1, 1, 1, 1, 0], bool)
  clip = CLIP * (1 if geometry == 'isotropic' else 20)
  run = chunks.chunked(getattr(materialized, engine), pieces)
  batch = interface.Batch(x, y, weight, tf.constant(mask))

  @tf.function(autograph=False)
  def step(batch):
    return run(model, losses.ExampleLoss(LOSS), batch,
               oracle.request(tf.constant(clip), scale, contract.Ask(second=SQUARES)))

  clipped = step(batch)
  records = _records(model, x, y, weight)
  kept = _clipped(records, mask, flat_scale, clip)
  expected = kept.sum(0)
  np.testing.assert_allclose(_flat(clipped.sums[0].total), expected, rtol=1e-4, atol=2e-6)
  np.testing.assert_allclose(
      _flat(clipped.sums[0].square), np.square(kept).sum(0), rtol=1e-4, atol=1e-6)
  assert clipped.losses.shape == (N,) and tf.nest.flatten(clipped.outputs)[0].shape[0] == N
  # Clipping was at work, and not on everything.
  unclipped = _clipped(records, mask, flat_scale, 1e9).sum(0)
  assert np.linalg.norm(expected - unclipped) > 1e-3 * np.linalg.norm(unclipped)


@functools.lru_cache(maxsize=None)
def _sums_in(geometry):
  """A problem, and the sums of its records by `vectorized`, traced once."""
  model, x, y, weight = _problem('dense')
  scale, _ = _geometry(model, geometry)

  @tf.function(autograph=False)
  def total(x, mask):
    batch = interface.Batch(x, y, tf.ones_like(weight), mask)
    return materialized.vectorized(
        model, losses.ExampleLoss(LOSS), batch,
        oracle.request(tf.constant(CLIP), scale)).sums[0].total

  return x, lambda x, mask: _flat(total(x, tf.constant(mask))).astype(np.float64)


@pytest.mark.parametrize('geometry', ['isotropic', 'scaled'])
@pytest.mark.parametrize('last', ['normal', 'nan', 'inf', 'huge', 'near_overflow'])
def test_one_example_moves_the_sum_by_at_most_the_clip_norm(last, geometry):
  x, total = _sums_in(geometry)
  value = dict(normal=1.0, nan=np.nan, inf=np.inf, huge=1e12, near_overflow=3e38)[last]
  x = tf.concat([x[:-1], x[-1:] * 0 + value], 0)
  with_it, without = total(x, [True] * N), total(x, [True] * (N - 1) + [False])
  assert np.isfinite(with_it).all()
  moved = np.linalg.norm(with_it - without)
  assert moved <= CLIP * (1 + 1e-5)
  if last in ('nan', 'inf'):
    assert moved == 0
  if last in ('normal', 'huge'):
    assert moved > 0.9 * CLIP  # The bound is attained, so the test has teeth.


def test_every_example_gets_its_own_dropout_mask_and_a_fresh_one_each_step():
  keras.utils.set_random_seed(0)
  model = keras.Sequential([layers.Input((64,)), layers.Dropout(0.5), layers.Dense(1)])
  model.layers[-1].set_weights([np.ones((64, 1)), np.zeros(1)])
  batch = interface.Batch(tf.ones([8, 64]), tf.zeros([8, 1]), (), tf.ones([8], tf.bool))

  @tf.function(autograph=False)
  def outputs():
    engine = engines.choose('materialized', model, (contract.Ask(),), batch.x)
    return engine(model, losses.ExampleLoss('mse'), batch,
                  oracle.request(tf.constant(1.0))).outputs

  first, second = outputs().numpy(), outputs().numpy()
  assert len(np.unique(first)) > 1, 'all examples shared one dropout mask'
  assert not np.array_equal(first, second)
