# SPDX-License-Identifier: Apache-2.0
"""Dense, EinsumDense and layers made of them, such as attention; and embeddings.

A dense layer is a product with labelled axes. A softmax may share the table of an embedding.
"""

import math
import string
from typing import List, Optional, Tuple

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import factors
from tfdp_adaptive.clipping import protocol
from tfdp_adaptive.clipping import rows
from tfdp_adaptive.clipping.layers import registry


def sequence(x: tf.Tensor) -> tf.Tensor:
  """Reshapes [n, ..., d] to [n, T, d], floats as float32 at least."""
  x = tf.cast(x, trees.wide(x.dtype)) if x.dtype.is_floating else x
  return tf.reshape(x, [-1, math.prod(protocol.sizes(x)[1:-1]), x.shape[-1]])


def summed_to(cotangents: tf.Tensor, shape: Tuple[int, ...]) -> factors.Explicit:
  """Returns the factor of a variable of `shape` that is broadcast and added."""
  cotangents = tf.cast(cotangents, trees.wide(cotangents.dtype))
  offset = cotangents.shape.rank - len(shape)
  axes = [i for i in range(1, cotangents.shape.rank) if i < offset or shape[i - offset] == 1]
  total = tf.reduce_sum(cotangents, axes) if axes else cotangents
  return factors.explicit(tf.reshape(total, (-1,) + shape))


def lora_scale(layer: compat.Layer) -> Optional[float]:
  """Returns the factor of the low-rank update, or None without one."""
  return layer.lora_alpha / layer.lora_rank if getattr(layer, 'lora_enabled', False) else None


def quantized(layer: compat.Layer) -> str:
  """Returns why a quantized layer has no rule. Integer weights do not train and need no factor."""
  mode = getattr(layer, 'quantization_mode', None)
  return 'its scales follow the data' if mode == 'float8' else ''


@registry.register(compat.keras.layers.Dense, tap=registry.at_activation, why=quantized)
def dense(layer: compat.Layer, call: registry.Call, cotangents: tf.Tensor) -> registry.Factors:
  steps = string.ascii_lowercase[2:call.inputs.shape.rank + 1]
  yield from _product(layer, call, cotangents, f'{steps}a', 'ab', f'{steps}b')


def _why_einsum(layer: compat.Layer) -> str:
  left, outputs = layer.equation.replace(' ', '').split('->')
  inputs, kernel = left.split(',')
  if inputs[0] != outputs[0] or inputs[0] in kernel:
    return 'the first axis is not the batch'
  if lora_scale(layer) is not None and kernel[-1] not in outputs:
    return 'LoRA along an axis that is summed'
  return quantized(layer)


@registry.register(compat.keras.layers.EinsumDense, tap=registry.at_activation, why=_why_einsum)
def einsum_dense(
    layer: compat.Layer, call: registry.Call, cotangents: tf.Tensor) -> registry.Factors:
  yield from _product(layer, call, cotangents, *labels(layer.equation, call.inputs.shape.rank))


def labels(equation: str, rank: int) -> Tuple[str, str, str]:
  """Returns the labels `(inputs, kernel, outputs)`, with letters in place of the ellipsis."""
  left, outputs = equation.replace(' ', '').split('->')
  inputs, kernel = left.split(',')
  if '...' in inputs:
    free = [c for c in string.ascii_letters if c not in equation]
    extra = ''.join(free[:rank - len(inputs) + 3])
    inputs, outputs = inputs.replace('...', extra), outputs.replace('...', extra)
  return inputs, kernel, outputs


def _product(
    layer: compat.Layer, call: registry.Call, cotangents: tf.Tensor, left: str, kernel: str,
    right: str) -> registry.Factors:
  """Yields the factors of a layer that multiplies by its kernel, by the labels of all axes."""
  inputs, cotangents = (tf.cast(x, trees.wide(x.dtype)) for x in (call.inputs, cotangents))
  scale = lora_scale(layer)
  if scale is None and not getattr(layer, 'quantization_mode', None):
    yield layer.kernel, _factor(inputs, left, cotangents, right, kernel, layer.kernel.shape)
  elif scale is not None:  # kernel + scale * a b, multiplied along the kernel's last axis
    yield from _lora(layer, scale, inputs, left, cotangents, right, kernel)
  if layer.bias is not None:
    yield layer.bias, summed_to(cotangents, tuple(layer.bias.shape))


def _lora(
    layer: compat.Layer, scale: float, inputs: tf.Tensor, left: str, cotangents: tf.Tensor,
    right: str, kernel: str) -> registry.Factors:
  wide = lambda v: scale * tf.cast(tf.convert_to_tensor(v), cotangents.dtype)
  a, b = wide(layer.lora_kernel_a), wide(layer.lora_kernel_b)
  last, rank = kernel[-1], next(c for c in string.ascii_letters if c not in left + kernel + right)
  short = kernel[:-1] + rank
  mapped = right.replace(last, rank)
  yield layer.lora_kernel_a, _factor(
      inputs, left, tf.einsum(f'{right},{rank}{last}->{mapped}', cotangents, b), mapped,
      short, layer.lora_kernel_a.shape)
  steps = ''.join(c for c in left if c in right and c not in kernel)
  mapped = steps + ''.join(c for c in kernel[:-1] if c in right) + rank
  yield layer.lora_kernel_b, _factor(
      tf.einsum(f'{left},{short}->{mapped}', inputs, a), mapped, cotangents, right,
      rank + last, layer.lora_kernel_b.shape)


def _factor(
    inputs: tf.Tensor, left: str, cotangents: tf.Tensor, right: str, kernel: str,
    shape: Tuple[int, ...]) -> protocol.Factor:
  """Returns the factor of `kernel` in the product `left,kernel->right`, by its labels."""
  shape = tuple(shape)
  steps = [c for c in left if c in right and c not in kernel]
  rows, columns = ([c for c in kernel if c in side] for side in (left, right))
  if set(rows) & set(columns):  # There is a matrix for each index of a shared axis.
    return factors.explicit(tf.einsum(f'{left},{right}->{left[0]}{kernel}', inputs, cotangents))
  sides = _matrix(inputs, left, steps, rows), _matrix(cotangents, right, steps, columns)
  if rows + columns == list(kernel):
    return factors.Outer(*sides, shape)
  if columns + rows == list(kernel):
    return factors.Outer(*sides[::-1], shape)
  return factors.Outer(*sides, shape, tuple(kernel.index(c) for c in rows + columns))


def _matrix(x: tf.Tensor, names: str, steps: List[str], features: List[str]) -> tf.Tensor:
  """Reshapes x to [n, T, d]: axes `steps` joined, then `features` joined, others summed."""
  wanted = ''.join(steps + features)
  if names != wanted:
    x = tf.einsum(f'{names}->{wanted}', x)
  sizes = protocol.sizes(x)
  return tf.reshape(x, [-1, math.prod(sizes[1:len(steps)]), math.prod(sizes[len(steps):])])


def times(x: tf.Tensor, matrix: tf.Tensor) -> tf.Tensor:
  """Multiplies x [..., d] by a matrix [d, p], as a product of two matrices."""
  if x.shape.rank == 2:
    return tf.matmul(x, matrix)
  sizes = tf.concat([tf.shape(x)[:-1], matrix.shape[1:]], 0)
  product = tf.reshape(tf.matmul(tf.reshape(x, [-1, matrix.shape[0]]), matrix), sizes)
  product.set_shape(x.shape[:-1].as_list() + [matrix.shape[1]])
  return product


layers = compat.keras.layers


def _why(layer: compat.Layer) -> str:
  if getattr(layer, 'sparse', False) or getattr(layer, '_use_one_hot_matmul', False):
    return 'sparse'
  return quantized(layer)


@registry.register(layers.Embedding, why=_why)
def embedding(layer: compat.Layer, call: registry.Call, cotangents: tf.Tensor) -> registry.Factors:
  ids = sequence(tf.cast(call.inputs, tf.int32)[..., tf.newaxis])[..., 0]
  cotangents = sequence(cotangents)
  scale = lora_scale(layer)
  if scale is None:
    yield layer.embeddings, rows.Rows(ids, cotangents, tuple(layer.embeddings.shape))
  else:  # embeddings + scale * a b
    a, b = (scale * tf.cast(tf.convert_to_tensor(v), cotangents.dtype)
            for v in (layer.lora_embeddings_a, layer.lora_embeddings_b))
    yield layer.lora_embeddings_a, rows.Rows(
        ids, tf.einsum('ntd,rd->ntr', cotangents, b), tuple(layer.lora_embeddings_a.shape))
    yield layer.lora_embeddings_b, factors.Outer(
        tf.gather(a, ids), cotangents, tuple(layer.lora_embeddings_b.shape))


if hasattr(layers, 'ReversibleEmbedding'):  # Keras 3.

  @registry.register(
      layers.ReversibleEmbedding,
      why=lambda layer: 'LoRA' if lora_scale(layer) is not None else _why(layer))
  def reversible_embedding(
      layer: compat.Layer, call: registry.Call, cotangents: tf.Tensor) -> registry.Factors:
    reverse = call.args[1] if len(call.args) > 1 else call.kwargs.get('reverse', False)
    if not reverse:
      yield from embedding(layer, call, cotangents)
      return
    inputs, flat = sequence(call.inputs), sequence(cotangents)
    if layer.logit_soft_cap is not None:
      outputs = sequence(call.outputs) / layer.logit_soft_cap
      flat *= 1 - tf.square(outputs)
    if getattr(layer, 'quantization_mode', None):
      return
    if layer.tie_weights:
      yield layer.embeddings, factors.Outer(flat, inputs, tuple(layer.embeddings.shape))
    else:
      yield layer.reverse_embeddings, factors.Outer(
          inputs, flat, tuple(layer.reverse_embeddings.shape))
