"""Dense: a matrix, a bias, and an activation after the tap."""

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive.clipping import factors
from tfdp_adaptive.clipping.layers import registry


def sequence(x):
  """[n, ..., d] as [n, T, d], float32 at least."""
  x = tf.cast(x, wide(x.dtype))
  if x.shape.rank == 2:
    return x[:, tf.newaxis]
  lengths = x.shape[1:-1].as_list()
  if None in lengths:
    length = tf.reduce_prod(tf.shape(x)[1:-1])
    return tf.reshape(x, tf.stack([-1, length, x.shape[-1]]))
  length = 1
  for axis in lengths:
    length *= axis
  return tf.reshape(x, [-1, length, x.shape[-1]])


def wide(dtype):
  return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype


def summed_to(errors, shape):
  """The factor of a variable of `shape` that is broadcast and added."""
  offset = errors.shape.rank - len(shape)
  axes = [i for i in range(1, errors.shape.rank) if i < offset or shape[i - offset] == 1]
  total = tf.reduce_sum(errors, axes) if axes else errors
  return factors.explicit(tf.reshape(total, (-1,) + shape))


@registry.register(compat.keras.layers.Dense, tap=registry.at_activation)
def dense(layer, call, errors):
  inputs, errors = sequence(call.inputs), sequence(errors)
  yield layer.kernel, factors.Outer(inputs, errors, tuple(layer.kernel.shape))
  if layer.bias is not None:
    yield layer.bias, summed_to(errors, tuple(layer.bias.shape))
