# SPDX-License-Identifier: Apache-2.0
"""Chunks give the sums of the whole batch, and are as large as a budget of memory allows."""

import numpy as np
import pytest
import tensorflow as tf

from tfdp_adaptive import contract
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import chunks
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.clipping import materialized
from tfdp_adaptive.rules import statistics

WIDTH = 1000


class _Linear:
  """`w x`, for losses `(w x - y)^2 / 2` with gradient `(w x - y) x`."""

  def __init__(self):
    self.trainable_variables = [tf.Variable([[0.5], [-1.0], [2.0]])]

  def __call__(self, x, training):
    del training
    return tf.matmul(x, self.trainable_variables[0])


def _loss(y, outputs, sample_weight):
  del sample_weight
  return tf.reduce_sum(tf.square(outputs - y), 1) / 2


def _batch(n):
  rng = np.random.default_rng(0)
  mask = rng.random(n) < 0.8
  return interface.Batch(tf.constant(rng.normal(size=(n, 3)), tf.float32),
                        tf.constant(rng.normal(size=(n, 1)), tf.float32), (), tf.constant(mask))


def _run(engine, batch, dynamic):
  ask, query = contract.Ask(second=statistics.mean_of_squares()), contract.Query()
  model = _Linear()
  function = lambda batch: engine(model, _loss, batch, interface.Request([ask], [query], [0.7]))
  if dynamic:
    specs = trees.map(lambda t: tf.TensorSpec([None] + t.shape[1:].as_list(), t.dtype), batch)
    return tf.function(function, [specs], autograph=False)(batch)
  return tf.function(function, autograph=False)(batch)


@pytest.mark.thorough(but=['13-5-True', '12-4-False', '3-5-False'])
@pytest.mark.parametrize('dynamic', [False, True])
@pytest.mark.parametrize('size,rows', [(12, 4), (13, 5), (3, 5), (1, 1)])
def test_chunks_of_rows_equal_the_whole_batch(size, rows, dynamic):
  batch = _batch(size)
  whole = _run(materialized.vectorized, batch, False)
  chunked = _run(chunks.chunked(materialized.vectorized, rows=rows), batch, dynamic)
  trees.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
                whole, chunked)


def test_an_empty_batch_has_no_sums():
  batch = trees.map(lambda t: t[:0], _batch(4))
  clipped = _run(chunks.chunked(materialized.looped, rows=2), batch, True)
  assert not np.any(clipped.sums[0].total[0]) and clipped.losses.shape == (0,)


def test_outputs_can_be_left_out():
  engine = chunks.chunked(materialized.vectorized, rows=4, keep_outputs=False)
  clipped = _run(engine, _batch(12), False)
  assert clipped.outputs.shape == (0, 1) and clipped.losses.shape == (12,)


def test_footprint_counts_what_lives_at_the_same_time():
  weights = tf.ones([100, 50])

  def function(x):
    a = tf.matmul(x, weights)  # [n, 50]
    b = tf.nn.relu(tf.reshape(a, [-1]))  # As much again, while `a` is there.
    c = tf.exp(b)  # `a` is gone.
    return tf.reduce_sum(c)

  # Two of [n, 50], and what comes to a few numbers for shapes and the result.
  assert chunks.peak(function, tf.TensorSpec([8, 100])) == pytest.approx(2 * 8 * 50 * 4, abs=64)
  both = chunks.peak(lambda x: (function(x), tf.matmul(x, weights)), tf.TensorSpec([8, 100]))
  assert both == pytest.approx(2 * 8 * 50 * 4, abs=64)
  kept = chunks.peak(lambda x: tf.exp(tf.matmul(x, weights)) + tf.matmul(x, weights),
                        tf.TensorSpec([8, 100]))
  assert kept == pytest.approx(3 * 8 * 50 * 4, abs=64)


def test_footprint_counts_what_loops_collect():
  def function(x):
    return tf.map_fn(lambda row: tf.exp(row) + 1, x)

  # Two rows inside of the loop, 16 collected, and 16 stacked.
  peak = chunks.peak(function, tf.TensorSpec([16, WIDTH]))
  assert 2 * 16 * WIDTH * 4 <= peak <= 2.2 * 16 * WIDTH * 4


def _engine(model, loss, batch, request):
  """Forms `WIDTH` numbers for every example."""
  del model, loss, request
  wide = tf.tile(batch.x, [1, WIDTH // 3]) + 1
  return interface.Clipped(tf.reduce_sum(wide), (), tf.zeros([1]))


@pytest.mark.parametrize('size,fits,expected', [
    (96, 96, 96), (96, 1000, 96),  # All at once.
    (96, 50, 48), (96, 40, 32), (96, 1, 1),  # Divisors.
    (97, 50, 49), (97, 96, 49)])  # Equal chunks, the last one padded.
def test_the_largest_chunks_within_the_budget(size, fits, expected):
  one = chunks.peak(lambda b: _engine(0, 0, b, 0), trees.map(
      lambda t: tf.TensorSpec([1] + t.shape[1:].as_list(), t.dtype), _batch(1)))
  rows = chunks.rows_within((fits + 0.5) * one, _engine, 0, 0, _batch(1), 0, size)
  assert rows == expected


def test_a_budget_too_small_for_one_example_is_refused():
  with pytest.raises(ValueError, match='enough for one example.*Received: memory_budget=100 bytes'):
    chunks.rows_within(100, _engine, 0, 0, _batch(1), 0, 96)
