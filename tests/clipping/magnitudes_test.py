# SPDX-License-Identifier: Apache-2.0
"""A finite record of any magnitude, beside any other: sums are finite, and those of float64."""

import bookkeeping_oracle as oracle
import numpy as np
import pytest
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import contract
from tfdp_adaptive.clipping import bookkeeping
from tfdp_adaptive.clipping import engines
from tfdp_adaptive.clipping import factors
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.clipping import rows
from tfdp_adaptive.rules import statistics

keras = compat.keras
layers = keras.layers
SIZES = (0.0, 1e-45, 1e-38, 1e-30, 1e-19, 1e-9, 1.0, 1e9, 1e17, 1e20, 1e30, 3e38)
CLIPS = (0.5, 0.3, 0.7)
SQUARES = contract.Ask(second=statistics.mean_of_squares())


@keras.utils.register_keras_serializable('magnitudes')
class Gain(layers.Layer):
  """Goes one example at a time."""

  def build(self, shape):
    self.gain = self.add_weight(name='gain', shape=[shape[-1]], initializer='ones')
    super().build(shape)

  def call(self, inputs):
    return inputs * self.gain


def linear(y, outputs, sample_weight=()):
  """The cotangents of the outputs are y."""
  del sample_weight
  return tf.reduce_sum(tf.math.multiply_no_nan(outputs, y), list(range(1, outputs.shape.rank)))


# LayerNormalization divides by the cube of its inputs' spread: above this float32 ends in its
# own gradient, and what comes out depends on the processor and on the place in the batch.
NORMALISED = 1e12

MODELS = {
    'rank one': (lambda: [layers.Dense(3)], (4,)),
    'normalised': (
        lambda: [layers.Dense(3, 'relu'), layers.LayerNormalization(), layers.Dense(2)], (4,)),
    'explicit': (lambda: [layers.Dense(2)], (70, 2)),
    'blocks': (lambda: [layers.Dense(12)], (3, 10)),
    'convolution': (lambda: [layers.Conv1D(2, 2)], (4, 2)),
    'wide convolution': (lambda: [layers.Conv1D(30, 2)], (4, 20)),
    'generic': (lambda: [Gain()], (3,)),
    'recurrent': (lambda: [layers.SimpleRNN(2)], (3, 2)),
    'embedding': (lambda: [layers.Embedding(5, 3)], (4,)),
    'long embedding': (lambda: [layers.Embedding(5, 2)], (70,)),
    'tied': (lambda: [layers.ReversibleEmbedding(5, 3)], (4,)),
}


def problem(name):
  """A model and a batch with every size of inputs beside every size of cotangents."""
  make, shape = MODELS[name]
  rng = np.random.default_rng(0)
  n = len(SIZES)**2
  of_x, of_y = (np.float32(np.ravel(s)) for s in np.meshgrid(SIZES, SIZES))
  uniform = lambda *size: rng.uniform(0.3, 1, size=size).astype(np.float32) * np.sign(
      rng.normal(size=size)).astype(np.float32)
  by = lambda sizes, x: tf.constant(np.reshape(sizes, (-1,) + (1,) * (x.ndim - 1)) * x)
  tokens = 'embedding' in name or name == 'tied'
  x = tf.constant(rng.integers(0, 5, (n,) + shape)) if tokens else by(of_x, uniform(n, *shape))
  if name == 'tied':
    inputs = keras.Input(shape, dtype='int64')
    layer, = make()
    model = keras.Model(inputs, layer(layer(inputs), reverse=True))
  else:
    model = keras.Sequential([keras.Input(shape, dtype='int64' if tokens else None), *make()])
  oracle.randomized(model)
  y = by(of_y, uniform(n, *model.output_shape[1:]))
  return model, interface.Batch(x, y, (), tf.ones([n], tf.bool))


def request(model):
  scale = oracle.geometry(model)
  return interface.Request(
      (SQUARES, SQUARES, SQUARES),
      (contract.Query(), contract.Query(scale=scale),
       contract.Query(scale=[1e25 * s for s in scale])), CLIPS)


def ends(name, batch):
  """Of each record, whether float32 ends in the layers' own gradients."""
  return (np.max(np.abs(batch.x), axis=tuple(range(1, batch.x.shape.rank))) > NORMALISED
          if name == 'normalised' else np.zeros(len(batch.x), bool))


def expected(gradient, query, clip):
  """`(total, known)` in float64; where numbers end is left open."""
  gradient = [np.asarray(g, np.float64) for g in gradient]
  scaled = gradient if not query.scale else [
      g * np.asarray(s, np.float64) for g, s in zip(gradient, query.scale)]
  norm = np.sqrt(sum(np.sum(np.square(g)) for g in scaled))
  if not norm < 3e37:
    return [np.zeros_like(g) for g in scaled], not norm < 1e42
  return [g * min(1, clip / norm) if norm else g for g in scaled], True


def assert_sums(sums, totals, clip, count):
  for part, power in ((sums.total, 1), (sums.square, 2)):
    for got, want in zip(part, totals):
      assert np.all(np.isfinite(got))
      np.testing.assert_allclose(got, want**power, rtol=0, atol=1e-4 * count * clip**power)


@pytest.mark.thorough(but=['embedding', 'blocks'])
@pytest.mark.pitfall(
    'One finite record of enormous size turns the release into NaN, or overflows its own norm.',
    severity='high',
    stops='norms are computed without overflow, and the example is clipped like any other')
@pytest.mark.parametrize('name', MODELS)
def test_book_keeping(name):
  if name == 'tied' and not compat.KERAS_3:
    pytest.skip('ReversibleEmbedding is of Keras 3.')
  model, batch = problem(name)
  wanted = request(model)
  step = tf.function(lambda mask: bookkeeping.engine(
      model, linear, batch._replace(mask=mask), wanted).sums, autograph=False)
  records = oracle.gradients(model, linear, batch)
  undefined = ends(name, batch)
  n, open_ended = len(records), 0
  for i, record in enumerate(records):
    sums = step(tf.range(n) == i)
    for j, (query, clip) in enumerate(zip(wanted.queries, CLIPS)):
      totals, known = expected(record, query, clip)
      exact = known and not undefined[i]
      assert_sums(sums[j], totals if exact else sums[j].total, clip, 1)
      open_ended += not known
  assert open_ended < n  # Fewer than a third of the 3 n cases.
  for sums, clip in zip(step(tf.ones([n], tf.bool)), CLIPS):
    for leaf in tf.nest.flatten(sums):
      assert np.all(np.isfinite(leaf)) and np.any(leaf)
      assert np.linalg.norm(leaf) <= n * max(clip, clip**2) * (1 + 1e-4)


@pytest.mark.thorough(but=['rank one-layered', 'rank one-loop'])
@pytest.mark.parametrize('engine', ['layered', 'materialized', 'loop'])
@pytest.mark.parametrize('name', ['rank one', 'normalised'])
def test_other_engines(engine, name):
  model, batch = problem(name)
  wanted = request(model)
  run = engines.choose(engine, model, wanted.asks, batch.x)
  step = tf.function(lambda mask: run(model, linear, batch._replace(mask=mask), wanted).sums,
                     autograph=False)
  for leaf in tf.nest.flatten(step(batch.mask)):
    assert np.all(np.isfinite(leaf))
  mask = ~ends(name, batch)
  records = [r for r, kept in zip(oracle.gradients(model, linear, batch), mask) if kept]
  for one, query, clip in zip(step(tf.constant(mask)), wanted.queries, CLIPS):
    of_records = [expected(record, query, clip) for record in records]
    unknown = sum(not known for _, known in of_records)
    totals = [np.sum(parts, 0) for parts in zip(*[totals for totals, _ in of_records])]
    squares = [np.sum(np.square(parts), 0) for parts in zip(*[totals for totals, _ in of_records])]
    for part, want, size in ((one.total, totals, clip), (one.square, squares, clip**2)):
      for got, target in zip(part, want):
        np.testing.assert_allclose(got, target, rtol=1e-4, atol=(1e-3 + unknown) * size)


@pytest.mark.parametrize('size', [1e-30, 1e-19, 1.0, 1e15, 1e18])
def test_squares_of_sums_that_cancel(size):
  """Steps that add up to zero leave no square behind, whatever their size."""
  inputs = tf.constant(size, shape=[2, 2, 3])
  cotangents = size * tf.constant([[[1.0], [-1.0]], [[1.0], [0.5]]])
  table = rows.Rows(tf.constant([[1, 1], [1, 0]]), cotangents, (3, 1))
  product = factors.Outer(inputs, cotangents, (3, 1))
  weights, scale = tf.constant([1.0, 0.5], tf.float64), tf.constant(1 / size, shape=[3, 1])
  for factor in (table, product, product.simplified(), rows.add([table, product])):
    gradient = np.asarray(factor.explicit().gradient(), np.float64)
    square = factor.squared_sum(weights, scale)
    want = np.square(0.5 * gradient[1] / size)
    np.testing.assert_allclose(square, want, rtol=1e-5, atol=1e-6 * want.max())
