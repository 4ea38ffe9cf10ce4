# SPDX-License-Identifier: Apache-2.0
"""EinsumDense, and with it every attention layer that is made of it."""

import string
from typing import List, Tuple

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import factors
from tfdp_adaptive.clipping import protocol
from tfdp_adaptive.clipping.layers import dense
from tfdp_adaptive.clipping.layers import registry


def labels(equation: str, rank: int) -> Tuple[str, str, str]:
  """`(inputs, kernel, outputs)` with the ellipsis spelled out."""
  left, outputs = equation.replace(' ', '').split('->')
  inputs, kernel = left.split(',')
  if '...' in inputs:
    free = [c for c in string.ascii_letters if c not in equation]
    extra = ''.join(free[:rank - len(inputs) + 3])
    inputs, outputs = inputs.replace('...', extra), outputs.replace('...', extra)
  return inputs, kernel, outputs


def _why(layer: compat.Layer) -> str:
  left, outputs = layer.equation.replace(' ', '').split('->')
  inputs, kernel = left.split(',')
  if inputs[0] != outputs[0] or inputs[0] in kernel:
    return 'the first axis is not the batch'
  return dense.quantized(layer)


@registry.register(compat.keras.layers.EinsumDense, tap=registry.at_activation, why=_why)
def einsum_dense(
    layer: compat.Layer, call: registry.Call, cotangents: tf.Tensor) -> registry.Factors:
  inputs, cotangents = (tf.cast(x, trees.wide(x.dtype)) for x in (call.inputs, cotangents))
  left, kernel, right = labels(layer.equation, inputs.shape.rank)
  scale = dense.lora_scale(layer)
  if scale is None:
    yield layer.kernel, _factor(inputs, left, cotangents, right, kernel, layer.kernel.shape)
  else:  # kernel + scale * a b, multiplied along the kernel's last axis
    yield from _lora(layer, scale, inputs, left, cotangents, right, kernel)
  if layer.bias is not None:
    yield layer.bias, dense.summed_to(cotangents, tuple(layer.bias.shape))


def _lora(
    layer: compat.Layer, scale: float, inputs: tf.Tensor, left: str, cotangents: tf.Tensor,
    right: str, kernel: str) -> registry.Factors:
  wide = lambda v: scale * tf.cast(tf.convert_to_tensor(v), cotangents.dtype)
  a, b = wide(layer.lora_kernel_a), wide(layer.lora_kernel_b)
  last, rank = kernel[-1], next(c for c in string.ascii_letters if c not in left + kernel + right)
  short = kernel[:-1] + rank
  steps = ''.join(c for c in left if c in right and c not in kernel)
  others = lambda side: ''.join(c for c in kernel[:-1] if c in side)
  if last in right:
    mapped = right.replace(last, rank)
    yield layer.lora_kernel_a, _factor(
        inputs, left, tf.einsum(f'{right},{rank}{last}->{mapped}', cotangents, b), mapped,
        short, layer.lora_kernel_a.shape)
    mapped = steps + others(right) + rank
    yield layer.lora_kernel_b, _factor(
        tf.einsum(f'{left},{short}->{mapped}', inputs, a), mapped, cotangents, right,
        rank + last, layer.lora_kernel_b.shape)
  else:
    mapped = left.replace(last, rank)
    yield layer.lora_kernel_a, _factor(
        tf.einsum(f'{left},{rank}{last}->{mapped}', inputs, b), mapped, cotangents, right,
        short, layer.lora_kernel_a.shape)
    mapped = steps + others(left) + rank
    yield layer.lora_kernel_b, _factor(
        inputs, left, tf.einsum(f'{right},{short}->{mapped}', cotangents, a), mapped,
        rank + last, layer.lora_kernel_b.shape)


def _factor(
    inputs: tf.Tensor, left: str, cotangents: tf.Tensor, right: str, kernel: str,
    shape: Tuple[int, ...]) -> protocol.Factor:
  """The factor of `kernel` in the product `left,kernel->right`, by its labels."""
  shape = tuple(shape)
  steps = [c for c in left if c in right and c not in kernel]
  rows, columns = ([c for c in kernel if c in side] for side in (left, right))
  if set(rows) & set(columns):  # A matrix of its own for every index they share.
    return factors.explicit(tf.einsum(f'{left},{right}->{left[0]}{kernel}', inputs, cotangents))
  axes = tuple(kernel.index(c) for c in rows + columns)
  return factors.Outer(
      _matrix(inputs, left, steps, rows), _matrix(cotangents, right, steps, columns), shape,
      axes if axes != tuple(range(len(shape))) else ())


def _matrix(x: tf.Tensor, names: str, steps: List[str], features: List[str]) -> tf.Tensor:
  """[n, T, d]: axes `steps` joined, then `features` joined, others summed."""
  wanted = ''.join(steps + features)
  if names != wanted:
    x = tf.einsum(f'{names}->{wanted}', x)
  sizes = [x.shape[i] if x.shape[i] is not None else tf.shape(x)[i] for i in range(x.shape.rank)]
  length, width = 1, 1
  for size in sizes[1:len(steps)]:
    length *= size
  for size in sizes[len(steps):]:
    width *= size
  return tf.reshape(x, [-1, length, width])
