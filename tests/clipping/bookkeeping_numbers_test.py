# SPDX-License-Identifier: Apache-2.0
"""The book-keeping engine at the limits of arithmetic, and every route of its algebra."""

import bookkeeping_oracle as oracle
import numpy as np
import pytest
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import contract
from tfdp_adaptive.clipping import bookkeeping
from tfdp_adaptive.clipping import factors
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.clipping import protocol
from tfdp_adaptive.clipping import rows
from tfdp_adaptive.rules import statistics

keras = compat.keras
layers = keras.layers


def floats(*shape, seed=0):
  return tf.constant(np.random.default_rng(seed).normal(size=shape), tf.float32)


def ids(*shape, high=7, seed=0):
  return tf.constant(np.random.default_rng(seed).integers(0, high, size=shape), tf.int32)


def built(model, x):
  model(x)
  return oracle.randomized(model)


def sums(model, x, y, mask=None, clip=0.5, scale=()):
  mask = [True] * x.shape[0] if mask is None else mask
  batch = interface.Batch(x, y, (), tf.constant(mask))
  clipped = bookkeeping.engine(model, oracle.squared_error, batch, oracle.request(clip, scale))
  return clipped.sums[0].total


def flat(tree):
  return np.concatenate([np.ravel(t) for t in tree])


def mlp():
  return keras.Sequential([layers.Dense(5, activation='tanh'), layers.Dense(3)])


def text():
  return keras.Sequential([
      layers.Embedding(7, 6), layers.Dense(5, activation='tanh'), layers.LayerNormalization(),
      layers.Dense(4)])


@pytest.mark.thorough(but=['gram', 'ragged blocks'])
@pytest.mark.parametrize('route', ['gram', 'blocks', 'ragged blocks', 'explicit'])
def test_every_route(route, monkeypatch):
  """Static shapes choose the route; here each is forced, on layers of every kind."""
  monkeypatch.setattr(factors, 'KEEP', 1e9 if route == 'explicit' else 0.0)
  monkeypatch.setattr(factors, 'STEPS', 1e-9)
  most = {'blocks': 1, 'ragged blocks': 400}.get(route, 2**22)
  monkeypatch.setattr(protocol, 'BLOCK_BYTES', most)
  if route.endswith('blocks'):
    monkeypatch.setattr(factors.Outer, 'route', lambda self, scaled: 'blocks')
  x = ids(5, 3)
  oracle.check(built(text(), x), x)
  images = floats(5, 6, 5, 2)
  model = keras.Sequential([layers.Conv2D(9, (3, 2), strides=(2, 1), activation='tanh'),
                            layers.Conv2D(3, 2, padding='same'), layers.Flatten(),
                            layers.Dense(2)])
  oracle.check(built(model, images), images)


def test_gram_matrices_of_convolutions(monkeypatch):
  monkeypatch.setattr(factors, 'KEEP', 0.0)
  images = floats(4, 4, 4, 6)
  model = keras.Sequential([layers.Conv2D(40, 3), layers.Flatten(), layers.Dense(2)])
  oracle.check(built(model, images), images)


@pytest.mark.thorough
@pytest.mark.parametrize('keep', [0.0, 2.0])
@pytest.mark.parametrize('jit_compile', [False, True])
def test_sizes_known_only_at_run_time(keep, jit_compile, monkeypatch):
  monkeypatch.setattr(factors, 'KEEP', keep)
  monkeypatch.setattr(protocol, 'BLOCK_BYTES', 300)
  model = keras.Sequential([keras.Input((None,), dtype='int32')] + text().layers)
  x = ids(5, 3)
  oracle.randomized(model)
  batch = oracle.batch_of(x, model(x))
  scale = oracle.geometry(model)
  asks, queries = (contract.Ask(), contract.Ask()), (contract.Query(), contract.Query(scale=scale))
  loss = lambda y, outputs, _: tf.reduce_sum(tf.square(outputs - y) / 2, [1, 2])
  records = oracle.gradients(model, loss, batch)
  request = interface.Request(
      asks, queries, (oracle.median_norm(records), oracle.median_norm(records, scale)))

  @tf.function(autograph=False, jit_compile=jit_compile, input_signature=[
      tf.TensorSpec([None, None], tf.int32), tf.TensorSpec([None, None, 4], tf.float32),
      tf.TensorSpec([None], tf.bool)])
  def step(x, y, mask):
    return bookkeeping.engine(
        model, loss, interface.Batch(x, y, (), mask), request).sums

  expected = oracle.by_definition(model, records, batch.mask, request)
  oracle.assert_close(step(batch.x, batch.y, batch.mask), expected, 1e-5)


@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('where', ['x', 'y'])
def test_a_record_that_is_not_finite_counts_as_none(bad, where):
  model = built(mlp(), floats(4, 3))
  x, y = floats(4, 3).numpy(), floats(4, 3, seed=1).numpy()
  (x if where == 'x' else y)[1, 0] = bad
  keep = [0, 2, 3]
  without = sums(model, tf.constant(x[keep]), tf.constant(y[keep]))
  result = sums(model, tf.constant(x), tf.constant(y))
  np.testing.assert_allclose(flat(result), flat(without), rtol=1e-5, atol=1e-7)
  assert np.all(np.isfinite(flat(result))) and np.any(flat(result))
  masked = sums(model, tf.constant(x), tf.constant(y), mask=[True, False, True, True])
  np.testing.assert_allclose(flat(masked), flat(without), rtol=1e-5, atol=1e-7)


def test_one_layer_that_is_not_finite_takes_the_whole_record():
  """A record whose gradient is inf in one layer adds nothing to the others either."""
  x = ids(3, 2)
  model = built(keras.Sequential([layers.Embedding(7, 2), layers.Dense(2)]), x)
  table = model.trainable_variables[0]
  value = table.numpy()
  value[int(x[0, 0])] = 3e38
  x = tf.constant([[int(x[0, 0]), 5], [5, 6], [6, 6]])
  table.assign(value)
  y = tf.zeros([3, 2, 2])
  np.testing.assert_allclose(flat(sums(model, x, y)), flat(sums(model, x[1:], y[1:])), atol=1e-7)


def test_padding_is_no_record():
  model = built(mlp(), floats(4, 3))
  x, y = floats(4, 3), floats(4, 3, seed=1)
  np.testing.assert_array_equal(flat(sums(model, x, y, mask=[False] * 4)), 0)
  np.testing.assert_allclose(flat(sums(model, x, y, mask=[True, False, True, False])),
                             flat(sums(model, x[::2], y[::2])), rtol=1e-5, atol=1e-7)


@pytest.mark.thorough(but=[
    '*-1e-20-*', '*-1.0-1e-30', 'True-1.0-*', 'False-1.0-1e+18', 'False-1.0-1e-30'])
@pytest.mark.parametrize('size', [1e-30, 1e-15, 1.0, 1e10, 1e15, 1e18, 1e25])
@pytest.mark.parametrize('clip', [1e-20, 1.0])
@pytest.mark.parametrize('scaled', [False, True])
def test_no_record_exceeds_the_clip_norm(size, clip, scaled):
  """Whatever underflows or overflows on the way; a record may only shrink."""
  for make, x in ((mlp, floats(1, 3)), (text, ids(1, 4, high=3))):
    model = built(make(), x)
    y = size * tf.ones_like(model(x))
    scale = oracle.geometry(model) if scaled else ()
    norm = np.linalg.norm(flat(sums(model, x, y, clip=clip, scale=scale)).astype(np.float64))
    assert norm <= clip * (1 + 1e-5)
    if size <= 1e15 and clip == 1.0:
      record, = oracle.gradients(model, oracle.squared_error, interface.Batch(
          x, y, (), tf.constant([True])))
      full = np.linalg.norm(flat(record if not scaled else [
          g * s for g, s in zip(record, scale)]).astype(np.float64))
      assert norm >= 0.999 * min(full, clip)


def images():
  shared = layers.Conv2D(2, 2, padding='same')
  inputs = keras.Input((4, 4, 2))
  x = layers.PReLU()(shared(shared(inputs)))
  return keras.Model(inputs, layers.Dense(2)(layers.Flatten()(x)))


def recurrent():
  return keras.Sequential([layers.LSTM(3, return_sequences=True), layers.Dense(4)])


HUGE = {
    'mlp': (mlp, lambda: floats(5, 3)), 'text': (text, lambda: ids(5, 4, high=3)),
    'long text': (text, lambda: ids(5, 80, high=3)), 'images': (images, lambda: floats(5, 4, 4, 2)),
    'recurrent': (recurrent, lambda: floats(5, 4, 3))}


@pytest.mark.thorough(but=['False-mlp'])
@pytest.mark.parametrize('name', HUGE)
@pytest.mark.parametrize('jit_compile', [False, True])
def test_squares_that_overflow(name, jit_compile):
  """Finite records are clipped like any other, beside those that are not finite."""
  if jit_compile and name not in ('mlp', 'text'):
    pytest.skip('compiling takes long')
  make, inputs = HUGE[name]
  x = inputs()
  model = built(make(), x)
  scale = oracle.geometry(model)
  batch = oracle.batch_of(x, model(x))
  size = tf.reshape([1.0, 1e20, 1e33, 1e-3, np.inf], [5] + [1] * (batch.y.shape.rank - 1))
  batch = batch._replace(y=batch.y * size)
  squares = contract.Ask(second=statistics.mean_of_squares())
  asks, clips = (contract.Ask(), squares, contract.Ask()), (0.5, 0.3, 0.7)
  queries = (contract.Query(), contract.Query(scale=scale),
             contract.Query(scale=[1e-3 * s for s in scale]))
  request = interface.Request(asks, queries, clips)
  records = oracle.gradients(model, oracle.squared_error, batch)
  expected = oracle.by_definition(model, records, batch.mask, request)
  clipped = tf.function(lambda: bookkeeping.engine(
      model, oracle.squared_error, batch, request), jit_compile=jit_compile,
                        autograph=False)()
  oracle.assert_close(clipped.sums, expected, 1e-5)
  for norm in clipped.norms:
    assert np.all(np.isfinite(norm[:4])) and not np.isfinite(norm[4]) and norm[2] > 1e25


def test_tied_tables_whose_squares_overflow():
  """Rows and products of one variable, of sizes far apart."""
  rng = np.random.default_rng(0)
  floats32 = lambda *shape: tf.constant(rng.normal(size=shape), tf.float32)
  for sizes in ((1e25, 1e3), (1e3, 1e25), (1e25, 1e25)):
    table = rows.Rows(ids(4, 3), sizes[0] * floats32(4, 3, 5), (7, 5))
    product = factors.Outer(floats32(4, 2, 7), sizes[1] * floats32(4, 2, 5), (7, 5))
    factor = rows.add([table, product])
    assert isinstance(factor, rows.Mixed)
    scale = tf.constant(10.0 ** rng.uniform(-1, 1, (7, 5)), tf.float32)
    gradient = np.asarray(factor.explicit().gradient(), np.float64)
    for given, s in (((), 1.0), (scale, np.asarray(scale, np.float64))):
      (norm,), (unit,), (size,) = bookkeeping.norms_of(
          [factor], [given], tf.zeros([4], tf.float64))
      np.testing.assert_allclose(norm, np.sqrt(np.sum(np.square(s * gradient), (1, 2))), rtol=1e-5)
      np.testing.assert_allclose(
          unit.weighted_sum(tf.constant([1.0, 0, 2, 0], tf.float64) * size),
          gradient[0] + 2 * gradient[2], rtol=1e-4, atol=1e-5 * np.abs(gradient).max())


def test_a_geometry_whose_squares_underflow():
  """Gradients in the coordinates of a scale that has no square must still be counted."""
  for scale, size in ((1e-25, 1e15), (1e-22, 1e18), (1e-25, 1e30)):
    for factor in (
        factors.explicit(tf.constant(size, shape=[2, 6])),
        factors.Outer(tf.constant(size**.5, shape=[2, 1, 2]),
                      tf.constant(size**.5, shape=[2, 1, 3]), (2, 3)),
        rows.Rows(tf.constant([[0], [1]]), tf.constant(size, shape=[2, 1, 3]), (2, 3))):
      s = tf.constant(scale, shape=factor.shape)
      (norm,), _, _ = bookkeeping.norms_of([factor], [s], tf.zeros([2], tf.float64))
      count = 6 if not isinstance(factor, rows.Rows) else 3
      assert np.all(norm >= 0.999 * size * scale * np.sqrt(count))


@pytest.mark.parametrize('length', [1, 2, 70])
def test_squares_that_underflow_are_charged(length):
  """1e-23 has no square in float32; a norm of zero would never be clipped."""
  small = lambda *shape: tf.constant(1e-23, shape=shape)
  everywhere = lambda high: tf.constant(np.arange(2 * length).reshape(2, length) % high)
  for factor in (
      rows.Rows(everywhere(3), small(2, length, 2), (3, 2)),
      factors.Outer(small(2, length, 3), tf.ones([2, length, 2]), (3, 2)),
      factors.Outer(tf.ones([2, length, 3]), small(2, length, 2), (3, 2)),
      factors.explicit(small(2, 3, 2))):
    gradient = np.asarray(factor.explicit().gradient(), np.float64)
    for norm in map(factor.squared_norm, ((), tf.ones([3, 2]))):
      assert np.all(norm >= np.sum(np.square(gradient), (1, 2)))


def test_weights_are_never_rounded_up():
  """Numbers below the smallest normal one have few digits, and could be rounded up by half."""
  weights = 10.0**np.arange(-50, 1, 0.125)
  narrowed = protocol.narrow(tf.constant(weights), tf.float32).numpy().astype(np.float64)
  assert np.all(narrowed <= weights * (1 + 1e-7))
  normal = weights > 1.2e-38
  np.testing.assert_allclose(narrowed[normal], weights[normal], rtol=1e-7)


def test_steps_that_overflow_and_cancel_are_no_record():
  """The sum of +1e50 and -1e50 is zero, but not in float32: what rounding leaves is no gradient."""
  inputs = tf.constant([[[1e25], [1e25]], [[1.0], [2.0]]])
  cotangents = tf.constant([[[1e25], [-1e25]], [[1.0], [1.0]]])
  factor, one = factors.Outer(inputs, cotangents, (1, 1)), tf.ones([1, 1])
  (norm,), (unit,), (size,) = bookkeeping.norms_of(
      [factor], [one], tf.zeros([2], tf.float64))
  assert np.isinf(norm[0])
  np.testing.assert_allclose(norm[1], 3.0, rtol=1e-6)
  total = unit.weighted_sum(size * tf.cast(tf.math.is_finite(norm), tf.float64))
  np.testing.assert_allclose(total, [[3.0]], rtol=1e-6)


def test_a_table_tied_to_a_product_the_other_way_round():
  """The layer sees the transposed table: [5, 7] where the embedding has [7, 5]."""
  table = rows.Rows(ids(4, 3), floats(4, 3, 5), (7, 5))
  product = factors.Outer(floats(4, 2, 5), floats(4, 2, 7, seed=1), (7, 5), axes=(1, 0))
  factor, scale = rows.add([table, product]), 1 + tf.abs(floats(7, 5))
  parts = [np.asarray(part.explicit().gradient(), np.float64) for part in (table, product)]
  np.testing.assert_allclose(
      parts[1], np.einsum('ntp,ntd->ndp', product.inputs, product.cotangents), rtol=1e-5)
  for norm, s in zip(map(factor.squared_norm, ((), scale)), (1.0, np.asarray(scale))):
    np.testing.assert_allclose(norm, np.sum(np.square(s * sum(parts)), (1, 2)), rtol=1e-5)


def test_cancelling_steps_are_not_underestimated(monkeypatch):
  """A Gram norm of contributions that cancel: its rounding is charged to the record."""
  monkeypatch.setattr(factors, 'KEEP', 0.0)
  rng = np.random.default_rng(0)
  a = rng.normal(size=(8, 1, 30)).astype(np.float32)
  e = rng.normal(size=(8, 1, 40)).astype(np.float32)
  small = (1e-4 * rng.normal(size=(8, 1, 40))).astype(np.float32)
  inputs = tf.constant(np.concatenate([a, a], 1))
  cotangents = tf.constant(np.concatenate([e, small - e], 1))
  factor = factors.Outer(inputs, cotangents, (30, 40))
  assert factor.route(False) == 'gram'
  wide = [np.asarray(t, np.float64) for t in (inputs, cotangents)]
  true = np.sum(np.square(np.einsum('ntd,ntp->ndp', *wide)), (1, 2))
  norm = factor.squared_norm()
  assert np.all(norm >= true * (1 - 1e-6))
  assert np.all(norm <= true + 1e-5 * np.sum(np.square(wide[0]), (1, 2)) * np.sum(
      np.square(wide[1]), (1, 2)))


def test_float64():
  x = tf.cast(floats(4, 5, 3), tf.float64)
  kwargs = dict(dtype='float64')
  model = keras.Sequential([
      layers.Conv1D(4, 2, activation='tanh', **kwargs), layers.LayerNormalization(**kwargs),
      layers.GRU(3, **kwargs), layers.Dense(2, **kwargs)])
  oracle.check(built(model, x), x, rtol=1e-11)


@pytest.mark.thorough
@pytest.mark.parametrize('policy', ['mixed_bfloat16', 'mixed_float16'])
def test_mixed_precision(policy):
  """Sums in float32, close to what the same half precision layers give one by one."""
  make = lambda: keras.Sequential([
      layers.Embedding(7, 6), layers.Dense(5, activation='tanh'), layers.LayerNormalization(),
      layers.LSTM(4, return_sequences=True), Scale(), layers.Dense(4, dtype='float32')])
  before = keras.mixed_precision.global_policy() if not compat.KERAS_3 else (
      keras.config.dtype_policy())
  keras.mixed_precision.set_global_policy(policy)
  try:
    x = ids(4, 3)
    model = built(make(), x)
    clipped = oracle.check(model, x, rtol=2e-2)
    assert all(t.dtype == tf.float32 for t in clipped.sums[0].total)
  finally:
    keras.mixed_precision.set_global_policy(before)


class Scale(layers.Layer):

  def build(self, shape):
    self.gain = self.add_weight(name='gain', shape=(shape[-1],), initializer='ones')

  def call(self, x):
    return tf.tanh(x) * tf.cast(self.gain, x.dtype)


def test_scales_are_squared_one_after_the_other():
  """Else the squares of all scales are held at once, as large as all variables."""
  sizes = [3, 5, 7]

  def norms(inputs, scales):
    given = [factors.Outer(x[:, tf.newaxis], x[:, tf.newaxis], (size, size))
             for x, size in zip(inputs, sizes)]
    return bookkeeping.norms_of(given, scales, tf.zeros([4], tf.float64))[0]

  specs = [[tf.TensorSpec([count(size), size]) for size in sizes]
           for count in (lambda size: 4, lambda size: size)]
  graph = tf.function(norms, autograph=False).get_concrete_function(*specs).graph
  squares = [[op for op in graph.get_operations()
              if op.type == 'Square' and op.outputs[0].shape == [size, size]] for size in sizes]
  assert all(len(of_one) == 1 for of_one in squares)
  for (earlier,), (later,) in zip(squares, squares[1:]):
    before, left = set(), [later]
    while left:
      one = left.pop()
      before.add(one.name)
      left += [i for i in (*(t.op for t in one.inputs), *one.control_inputs)
               if i.name not in before]
    assert earlier.name in before
