# SPDX-License-Identifier: Apache-2.0
"""Shared by the book-keeping tests: the definition, one example at a time."""

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import contract
from tfdp_adaptive.clipping import bookkeeping
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.clipping import projection
from tfdp_adaptive.rules import statistics

keras = compat.keras


def squared_error(y, outputs, sample_weight=()):
  """[n] loss of examples with any outputs; weighs coordinates unequally."""
  del sample_weight
  total = 0.0
  for target, output in zip(tf.nest.flatten(y), tf.nest.flatten(outputs)):
    output = tf.cast(output, target.dtype)
    ramp = tf.reshape(tf.linspace(
        tf.ones([], output.dtype), 2 * tf.ones([], output.dtype),
        int(np.prod(output.shape[1:]))), output.shape[1:])
    total += tf.reduce_sum(
        ramp * tf.square(output - target), list(range(1, output.shape.rank))) / 2
  return total


def randomized(model):
  """Biases and gains that are not zeros and ones."""
  rng = np.random.default_rng(3)
  for v in model.trainable_variables:
    v.assign(v + 0.3 * tf.constant(rng.normal(size=v.shape), v.dtype))
  return model


def built(model, x):
  model(x)
  return randomized(model)


def run(model, x, **kwargs):
  """The engine's result, isotropic, whatever it is."""
  batch = batch_of(x, model(x), **kwargs)
  return bookkeeping.engine(model, squared_error, batch, request(0.5))


def batch_of(x, outputs, mask=None, seed=0):
  """A `Batch` with random targets in the shape of `outputs`."""
  rng = np.random.default_rng(seed)
  wide = lambda t: tf.float32 if t.dtype in (tf.float16, tf.bfloat16) else t.dtype
  y = tf.nest.map_structure(lambda t: tf.constant(rng.normal(size=t.shape), wide(t)), outputs)
  n = tf.nest.flatten(x)[0].shape[0]
  return interface.Batch(x, y, (), tf.constant([True] * n if mask is None else mask))


def request(clip=0.5, scale=(), ask=contract.Ask()):
  """Returns a request of one sum."""
  return interface.Request((ask,), (contract.Query(scale=scale),), (clip,))


def gradients(model, loss, batch):
  """Each example's gradient, from a batch of it alone."""
  variables = [compat.raw_variable(v) for v in model.trainable_variables]

  def gradient(x, y):
    with tf.GradientTape() as tape:
      value = loss(y, model(x, training=True), ())
    derivatives = tape.gradient(value, variables, unconnected_gradients='zero')
    return [tf.convert_to_tensor(g) for g in derivatives]

  gradient = tf.function(gradient, autograph=False)
  one = lambda tree, i: tf.nest.map_structure(lambda t: t[i:i + 1], tree)
  return [gradient(one(batch.x, i), one(batch.y, i)) for i in range(batch.mask.shape[0])]


def by_definition(model, records, mask, request):
  """`Sums` per ask: `project_record` of every record kept, added up."""
  specs = [tf.TensorSpec(v.shape, v.dtype) for v in model.trainable_variables]
  sums = [interface.zero_sums(ask, specs) for ask in request.asks]
  for gradient, keep in zip(records, mask.numpy()):
    if keep:
      sums = [interface.add_sums(total, projection.project_record(ask, query, clip, gradient))
              for total, ask, query, clip in zip(sums, *request)]
  return sums


def geometry(model, seed=1):
  """A scale per coordinate over two orders of magnitude."""
  rng = np.random.default_rng(seed)
  return [tf.constant(10.0 ** rng.uniform(-1, 1, size=v.shape), v.dtype)
          for v in model.trainable_variables]


def median_norm(records, scale=()):
  """A clip norm that some records exceed and some do not."""
  scaled = lambda g: g if isinstance(scale, tuple) else [a * s for a, s in zip(g, scale)]
  norms = [float(tf.linalg.global_norm(scaled(g))) for g in records]
  return tf.constant(float(np.median(norms)), records[0][0].dtype)


def assert_close(actual, expected, rtol):
  """Relative to the whole of each ask's sum, as a norm."""
  for a, e in zip(actual, expected):
    tf.nest.assert_same_structure(a, e)
    for left, right in ((a.total, e.total), (a.square, e.square)):
      left, right = tf.nest.flatten(left), tf.nest.flatten(right)
      if right:
        size = np.sqrt(sum(np.sum(np.square(r, dtype=np.float64)) for r in right))
        assert size > 0, 'A comparison with zero shows nothing.'
        for got, want in zip(left, right):
          np.testing.assert_allclose(got, want, rtol=0, atol=rtol * size)


def check(model, x, loss=squared_error, mask=None, rtol=1e-5, seed=0, jit_compile=None):
  """The engine against the definition, isotropic, scaled and with squares, at once.

  The second of three examples or more is padding, unless a mask is given.
  """
  return check_against(defined(model, x, loss, mask, seed), model, x, loss, rtol, jit_compile)


def defined(model, x, loss=squared_error, mask=None, seed=0):
  """A batch, a request of it, and what the definition answers."""
  n = tf.nest.flatten(x)[0].shape[0]
  mask = [i != 1 or n < 3 for i in range(n)] if mask is None else mask
  batch = batch_of(x, model(x), mask, seed)
  scale = geometry(model)
  squares = contract.Ask(second=statistics.mean_of_squares())
  asks = (contract.Ask(), squares, contract.Ask())
  queries = (contract.Query(), contract.Query(scale=scale), contract.Query(scale=scale))
  records = gradients(model, loss, batch)
  clips = (median_norm(records), median_norm(records, scale), 1e30)
  request = interface.Request(asks, queries, clips)
  return batch, request, by_definition(model, records, batch.mask, request)


def check_against(definition, model, x, loss=squared_error, rtol=1e-5, jit_compile=None):
  """The engine against what was `defined`; in functions, unless `jit_compile` is None."""
  batch, request, expected = definition
  run = lambda: bookkeeping.engine(model, loss, batch, request)
  if jit_compile is not None:
    run = tf.function(run, jit_compile=jit_compile, autograph=False)
  clipped = run()
  assert_close(clipped.sums, expected, rtol)
  forward = lambda x: model(x, training=True)
  if jit_compile is not None:
    forward = tf.function(forward, jit_compile=jit_compile, autograph=False)
  for got, want in zip(tf.nest.flatten(clipped.outputs), tf.nest.flatten(forward(x))):
    if jit_compile is not None:  # Graphs may be fused in other ways.
      np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    else:
      np.testing.assert_array_equal(got, want)
  assert clipped.losses.shape == batch.mask.shape
  return clipped


def kronecker(model, seed=1, split=None, diagonal=False):
  """A matrix on either side of every variable of two axes or more; vectors are scaled.

  Args:
    model: A built model.
    seed: Of the numbers.
    split: Which axis of a shape is the first of the right side; a random one by default.
    diagonal: Whether left sides are.
  """
  rng = np.random.default_rng(seed)

  def side(size, dtype, flat=False):
    if flat:
      return tf.constant(rng.uniform(0.5, 2, size), dtype)
    matrix = rng.normal(size=(size, size)) / np.sqrt(size) + 2 * np.diag(rng.choice([-1, 1], size))
    return tf.constant(matrix, dtype)

  scales = []
  for v in model.trainable_variables:
    shape = tuple(v.shape)
    if len(shape) < 2:
      scales.append(tf.constant(rng.uniform(0.5, 2, shape), v.dtype))
      continue
    k = int(rng.integers(1, len(shape))) if split is None else split(shape)
    first = rng.integers(0, k) if split is None else 0
    scales.append(contract.Kronecker(
        side(int(np.prod(shape[first:k])), v.dtype, diagonal),
        side(int(np.prod(shape[k:])), v.dtype)))
  return scales


def check_kronecker(model, x, rtol=2e-5, splits=(None, None)):
  """The engine against the definition: one ask, then two of different geometries at once."""
  n = tf.nest.flatten(x)[0].shape[0]
  batch = batch_of(x, model(x), [i != 1 or n < 3 for i in range(n)])
  records = gradients(model, squared_error, batch)
  full = kronecker(model, 1, splits[0])
  half = kronecker(model, 2, splits[1], diagonal=True)
  ask, squares = contract.Ask(), contract.Ask(second=statistics.mean_of_squares())
  clips = []
  for scale in (full, half):
    norms = [projection.scaled_norm(ask, contract.Query(scale), g) for g in records]
    clips.append(tf.constant(float(np.median(norms)), records[0][0].dtype))
  for asks, scales, of_asks in (((ask,), (full,), clips[:1]),
                                ((squares, ask), (half, full), clips[::-1])):
    request = interface.Request(
        asks, tuple(contract.Query(scale) for scale in scales), tuple(of_asks))
    expected = by_definition(model, records, batch.mask, request)
    assert_close(bookkeeping.engine(model, squared_error, batch, request).sums, expected, rtol)
