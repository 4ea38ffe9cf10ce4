# SPDX-License-Identifier: Apache-2.0
"""Standard normal rows from a key: one flat vector per dtype, split into the tree's leaves.

This is a Box-Muller transform of full-range integers. TensorFlow's `stateless_normal` draws other
numbers under XLA than outside it. It clamps its uniforms at 1e-7, so it has no noise beyond 5.68
standard deviations, also in float64. It is slower on CPU. Here the integers are the same everywhere
and the numbers agree up to rounding. The tails end at 6.76 (float32) and 9.49 (float64) standard
deviations. Sines are computed by a series. The angle is reduced as an integer, because XLA would
round it first.
"""

import math
from typing import Dict, Tuple

import tensorflow as tf

from tfdp_adaptive import trees
from tfdp_adaptive.noise import keys

Specs = Tuple[tf.TensorSpec, ...]  # One [n] per dtype.
Vectors = Tuple[tf.Tensor, ...]  # Like `Specs`.

# Of a dtype: integers, the same with a sign, their bits, its digits, terms of the sine's series.
_BITS = {tf.float32: (tf.uint32, tf.int32, 32, 24, 7),
         tf.float64: (tf.uint64, tf.int64, 64, 53, 11)}
_LONG = trees.WORTH_COMPILING


def flat_specs(specs: trees.Tree) -> Specs:
  """Returns one [n] spec per dtype in `specs`; n is the number of elements, rounded up to even.

  Long vectors are rounded up further. XLA divides a loop among threads, and uses vector
  instructions only if all parts are equal.
  """
  sizes: Dict[tf.DType, int] = {}
  for spec in tf.nest.flatten(specs):
    if spec.dtype not in _BITS:
      raise ValueError('`specs` must be float32 or float64: noise is made in nothing coarser. '
                       f'Received: {spec}.')
    if not spec.shape.is_fully_defined():
      raise ValueError(f'`specs` must have fully defined shapes. Received: {spec}.')
    sizes[spec.dtype] = sizes.get(spec.dtype, 0) + spec.shape.num_elements()
  unit = lambda n: 2 if n < _LONG else 2048
  return tuple(tf.TensorSpec([n + -n % unit(n)], dtype) for dtype, n in sizes.items())


def unflatten(vectors: Vectors, specs: trees.Tree) -> trees.Tree:
  """Returns a tree like `specs` with the elements of vectors like `flat_specs(specs)`."""
  leaves = tf.nest.flatten(specs)
  parts = {}
  for vector in vectors:
    sizes = [spec.shape.num_elements() for spec in leaves if spec.dtype == vector.dtype]
    rest = vector.shape.num_elements() - sum(sizes)
    parts[vector.dtype] = iter(tf.split(vector, sizes + [rest] * (rest > 0)))
  return tf.nest.pack_sequence_as(
      specs, [tf.reshape(next(parts[spec.dtype]), spec.shape) for spec in leaves])


def vectors(key: tf.Tensor, flat: Specs) -> Vectors:
  """Returns standard normal vectors like `flat`; uses up the key."""
  if len(flat) == 1:
    return (_normal(key, flat[0]),)
  vector_keys = keys.children(key, len(flat))
  return tuple(_normal(vector_keys[i], spec) for i, spec in enumerate(flat))


def _normal(key: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
  bits = tf.random.stateless_uniform(
      [2, spec.shape.num_elements() // 2], key, minval=None, maxval=None,
      dtype=_BITS[spec.dtype][0], alg='philox')
  # Not a reshape: XLA then knows which row a leaf comes from, and divides no indices.
  return tf.concat(tf.unstack(_transform(bits)), 0)


def box_muller(bits: tf.Tensor) -> tf.Tensor:
  """Returns [2, n] standard normals of [2, n] uniform unsigned integers (rows: radius, angle).

  `u = (bits + 1/2) 2^-width` has full relative precision near zero, which gives the tail. Its
  factor is rounded down, so `u` stays below one.
  """
  dtype = tf.float32 if bits.dtype == tf.uint32 else tf.float64
  width, digits = _BITS[dtype][2:4]
  u = (tf.cast(bits[0], dtype) + 0.5) * (2.0**-width * (1 - 2.0**-digits))
  quarter = tf.constant([[0], [2**(width - 2)]], bits.dtype)
  return tf.sqrt(-2 * tf.math.log(u)) * sine(bits[1] + quarter, dtype)


def sine(turn: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
  """Returns sin(2 pi turn 2^-width) in `dtype`, for unsigned integers; error below 2 eps."""
  _, signed, width, _, terms = _BITS[dtype]
  half = tf.constant(2**(width - 1), turn.dtype)
  far = tf.bitwise.right_shift(turn + half // 2, width - 1)  # 1: over a quarter turn from zero.
  turn += far * (half - 2 * turn)  # sin(x) = sin(pi - x), exact: integers wrap around.
  x = tf.cast(tf.bitcast(turn, signed), dtype) * (math.pi * 2.0**(1 - width))
  series = [(-1)**k / math.factorial(2 * k + 1) for k in reversed(range(1, terms))] + [0]
  return x + x * tf.math.polyval([tf.constant(c, dtype) for c in series], tf.square(x))


_transform = trees.one_pass(box_muller)
