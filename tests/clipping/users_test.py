# SPDX-License-Identifier: Apache-2.0
"""Records of several examples: clipped as one, by every engine, as one by one."""

import bookkeeping_oracle as oracle
import numpy as np
import pytest
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive.clipping import chunks
from tfdp_adaptive.clipping import engines
from tfdp_adaptive.clipping import interface

keras = compat.keras
layers = keras.layers
USERS, MOST = 4, 3
COUNTS = (3, 1, 2, 0)
THERE = np.arange(MOST) < np.array(COUNTS)[:, np.newaxis]


def weighted(y, outputs, sample_weight):
  return oracle.squared_error(y, outputs) * sample_weight


def mixed():
  """All kinds of factors: rows, explicit, outer with and without steps, kernels, generic."""
  image, words = keras.Input([5, 5, 2]), keras.Input([4], dtype='int32')
  left = layers.Conv2D(3, 2, strides=2, padding='same', activation='tanh')(image)
  left = layers.Dense(2)(layers.Flatten()(left))
  right = layers.Embedding(7, 3)(words)
  right = layers.LayerNormalization()(layers.Dense(4, activation='tanh')(right))
  right = layers.PReLU()(layers.GlobalAveragePooling1D()(right))
  model = keras.Model([image, words], layers.Dense(2)(layers.Concatenate()([left, right])))
  rng = np.random.default_rng(0)
  x = [tf.constant(rng.normal(size=(USERS, MOST, 5, 5, 2)), tf.float32),
       tf.constant(rng.integers(0, 7, (USERS, MOST, 4)), tf.int32)]
  return oracle.randomized(model), x


def sequence():
  """A matrix whose gradient is larger than its factors: Gram matrices over all examples."""
  model = keras.Sequential([keras.Input([2, 40]), layers.Dense(30), layers.Flatten()])
  x = np.random.default_rng(0).normal(size=(USERS, MOST, 2, 40))
  return oracle.randomized(model), tf.constant(x, tf.float32)


def batch_of(model, x, record):
  rng = np.random.default_rng(1)
  weights = THERE.astype(np.float32)
  if record == 'mean':
    weights /= np.maximum(1, THERE.sum(1, keepdims=True))
  shape = model.compute_output_shape(tf.nest.map_structure(lambda t: t.shape[1:], x))[1:]
  y = tf.constant(rng.normal(size=(USERS, MOST) + tuple(shape)), tf.float32)
  return interface.Batch(
      x, y, tf.constant(weights), tf.constant(THERE.any(1)), tf.constant(THERE))


def by_user(model, batch):
  """Each user's gradient: those of the examples, one at a time, weighted and added up."""
  examples, _ = interface.joined(batch)
  single = oracle.gradients(model, oracle.squared_error, interface.Batch(
      examples.x, examples.y, (), tf.ones([USERS * MOST], tf.bool)))
  weights = batch.sample_weight.numpy()
  return [[tf.add_n([weights[u, i] * single[u * MOST + i][v] for i in range(MOST)])
           for v in range(len(single[0]))] for u in range(USERS)]


@pytest.mark.thorough
@pytest.mark.parametrize('engine, make, record', [
    ('bookkeeping', mixed, 'mean'), ('bookkeeping', sequence, 'sum'),
    ('layered', sequence, 'sum'),
    pytest.param('loop', sequence, 'mean', marks=pytest.mark.slow)])
def test_sums_are_those_of_users_one_by_one(engine, make, record):
  keras.utils.set_random_seed(0)
  model, x = make()
  batch = batch_of(model, x, record)
  records = by_user(model, batch)
  scale = oracle.geometry(model)
  plain, scaled = (oracle.request(oracle.median_norm(records[:3], s), s) for s in ((), scale))
  request = interface.Request(*[a + b for a, b in zip(plain, scaled)])
  run = engines.ENGINE[engine]
  runs = [run] if make is mixed else [run, chunks.chunked(run, rows=3)]
  expected = oracle.by_definition(model, records, batch.mask, request)
  for run in runs:
    clipped = tf.function(lambda: run(model, weighted, batch, request), autograph=False)()
    oracle.assert_close(clipped.sums, expected, 1e-5)
    assert clipped.losses.shape == (USERS,)
    assert clipped.outputs.shape[:2] == (USERS, MOST)
    examples = interface.joined(batch)[0]
    losses = weighted(examples.y, model(examples.x), examples.sample_weight)
    np.testing.assert_allclose(
        clipped.losses, tf.reduce_sum(tf.reshape(losses, [USERS, MOST]), 1), rtol=1e-4, atol=1e-6)
    norms = [float(tf.linalg.global_norm(g)) for g in records]
    np.testing.assert_allclose(clipped.norms[0], norms, rtol=1e-4, atol=1e-12)
