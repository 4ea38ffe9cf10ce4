"""Standard normal rows from a key: one flat vector per dtype, split into the tree's leaves.

Own Box-Muller on full-range integers, because TensorFlow's `stateless_normal`
gives other numbers under XLA than outside it, clamps its uniforms at 1e-7 (no
noise beyond 5.68 standard deviations, float64 included) and is slower on CPU.
Here the integers are the same everywhere, the numbers agree to rounding, and
the tails end where the integers do: at 6.76 (float32) and 9.49 (float64).
"""

import math

import tensorflow as tf

from tfdp_adaptive.noise import keys

_BITS = {tf.float32: (tf.uint32, 32, 24), tf.float64: (tf.uint64, 64, 53)}


def wide(spec):
  """The spec of the noise for a tensor like `spec`: float32 at least, whatever it is stored in."""
  return tf.TensorSpec(spec.shape, tf.float64 if spec.dtype == tf.float64 else tf.float32)


def flat_specs(specs):
  """One [n] spec per dtype in `specs`; n counts the elements, rounded up to even."""
  sizes = {}
  for spec in tf.nest.flatten(specs):
    if spec.dtype not in _BITS:
      raise ValueError('`specs` must be float32 or float64: noise is made in nothing coarser. '
                       f'Received: {spec}.')
    if not spec.shape.is_fully_defined():
      raise ValueError(f'`specs` must have fully defined shapes. Received: {spec}.')
    sizes[spec.dtype] = sizes.get(spec.dtype, 0) + spec.shape.num_elements()
  return tuple(tf.TensorSpec([n + n % 2], dtype) for dtype, n in sizes.items())


def unflatten(vectors, specs):
  """The tree like `specs` that holds the elements of vectors like `flat_specs(specs)`."""
  leaves = tf.nest.flatten(specs)
  parts = {}
  for vector in vectors:
    sizes = [spec.shape.num_elements() for spec in leaves if spec.dtype == vector.dtype]
    rest = vector.shape.num_elements() - sum(sizes)
    parts[vector.dtype] = iter(tf.split(vector, sizes + [rest] * (rest > 0)))
  return tf.nest.pack_sequence_as(
      specs, [tf.reshape(next(parts[spec.dtype]), spec.shape) for spec in leaves])


def vectors(key, flat):
  """Standard normal vectors like `flat`; uses up the key."""
  if len(flat) == 1:
    return (_normal(key, flat[0]),)
  each = keys.children(key, len(flat))
  return tuple(_normal(each[i], spec) for i, spec in enumerate(flat))


def _normal(key, spec):
  bits = tf.random.stateless_uniform(
      [2, spec.shape.num_elements() // 2], key, minval=None, maxval=None,
      dtype=_BITS[spec.dtype][0], alg='philox')
  return tf.reshape(box_muller(bits, spec.dtype), [-1])


def box_muller(bits, dtype):
  """[2, n] standard normals from [2, n] uniform unsigned integers (one row: radius, one: angle).

  `u = (bits + 1/2) 2^-width` keeps full relative precision towards zero, where
  the tail is, and its factor is rounded down so that it stays below one.
  """
  _, width, digits = _BITS[dtype]
  u = (tf.cast(bits[0], dtype) + 0.5) * (2.0**-width * (1 - 2.0**-digits))
  angle = tf.cast(bits[1], dtype) * (2 * math.pi * 2.0**-width)
  quarter = tf.constant([[0.0], [math.pi / 2]], dtype)
  return tf.sqrt(-2 * tf.math.log(u)) * tf.sin(angle + quarter)
