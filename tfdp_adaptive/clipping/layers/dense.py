# SPDX-License-Identifier: Apache-2.0
"""Dense: a matrix, a bias, and an activation after the tap."""

from typing import Optional, Tuple

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import factors
from tfdp_adaptive.clipping.layers import registry


def sequence(x: tf.Tensor) -> tf.Tensor:
  """[n, ..., d] as [n, T, d], floats as float32 at least."""
  x = tf.cast(x, trees.wide(x.dtype)) if x.dtype.is_floating else x
  if x.shape.rank == 2:
    return x[:, tf.newaxis]
  length = 1
  for i in range(1, x.shape.rank - 1):
    length *= x.shape[i] if x.shape[i] is not None else tf.shape(x)[i]
  return tf.reshape(x, [-1, length, x.shape[-1]])


def summed_to(cotangents: tf.Tensor, shape: Tuple[int, ...]) -> factors.Explicit:
  """The factor of a variable of `shape` that is broadcast and added."""
  cotangents = tf.cast(cotangents, trees.wide(cotangents.dtype))
  offset = cotangents.shape.rank - len(shape)
  axes = [i for i in range(1, cotangents.shape.rank) if i < offset or shape[i - offset] == 1]
  total = tf.reduce_sum(cotangents, axes) if axes else cotangents
  return factors.explicit(tf.reshape(total, (-1,) + shape))


def lora_scale(layer: compat.Layer) -> Optional[float]:
  """Returns the factor of the low-rank update, or None without one."""
  return layer.lora_alpha / layer.lora_rank if getattr(layer, 'lora_enabled', False) else None


def quantized(layer: compat.Layer) -> str:
  return 'quantized' if getattr(layer, 'quantization_mode', None) else ''


@registry.register(compat.keras.layers.Dense, tap=registry.at_activation, why=quantized)
def dense(layer: compat.Layer, call: registry.Call, cotangents: tf.Tensor) -> registry.Factors:
  inputs, flat = sequence(call.inputs), sequence(cotangents)
  scale = lora_scale(layer)
  if scale is None:
    yield layer.kernel, factors.Outer(inputs, flat, tuple(layer.kernel.shape))
  else:  # kernel + scale * a b
    a, b = (scale * tf.cast(tf.convert_to_tensor(v), inputs.dtype)
            for v in (layer.lora_kernel_a, layer.lora_kernel_b))
    yield layer.lora_kernel_a, factors.Outer(
        inputs, times(flat, tf.transpose(b)), tuple(layer.lora_kernel_a.shape))
    yield layer.lora_kernel_b, factors.Outer(
        times(inputs, a), flat, tuple(layer.lora_kernel_b.shape))
  if layer.bias is not None:
    yield layer.bias, summed_to(cotangents, tuple(layer.bias.shape))


def times(x: tf.Tensor, matrix: tf.Tensor) -> tf.Tensor:
  """x [..., d] times a matrix [d, p], as a product of two matrices."""
  if x.shape.rank == 2:
    return tf.matmul(x, matrix)
  sizes = tf.concat([tf.shape(x)[:-1], matrix.shape[1:]], 0)
  product = tf.reshape(tf.matmul(tf.reshape(x, [-1, matrix.shape[0]]), matrix), sizes)
  product.set_shape(x.shape[:-1].as_list() + [matrix.shape[1]])
  return product
