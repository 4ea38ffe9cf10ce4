# SPDX-License-Identifier: Apache-2.0
"""Convolutions: per-example gradients of small kernels, patches for Gram matrices."""

import dataclasses
import itertools
import math
from typing import Any, Iterator, Sequence, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import contract
from tfdp_adaptive import geometry
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import factors
from tfdp_adaptive.clipping import protocol
from tfdp_adaptive.clipping.layers import dense
from tfdp_adaptive.clipping.layers import registry

layers = compat.keras.layers

# Each of up to `PLACES` places of a kernel has its own product if there are `WIDE` channels.
# Windows of single places are copied once, those of rows of places twice.
WIDE, PLACES = 32, 64


@dataclasses.dataclass(frozen=True)
class Convolution(protocol.Factor):
  """The gradient of a kernel [*places, channels, filters], padding done.

  Attributes:
    inputs: [n, *spatial, channels].
    cotangents: [n, *output, filters], gradients of the loss by the convolution.
    shape: The kernel's shape.
    strides: Per spatial axis.
    dilations: Per spatial axis.
  """

  inputs: Any
  cotangents: Any
  shape: Tuple[int, ...]
  strides: Tuple[int, ...]
  dilations: Tuple[int, ...]

  def route(self, scaled: bool) -> str:
    """Returns 'explicit', 'gram' or 'blocks', from static shapes."""
    kernel, points = math.prod(self.shape), math.prod(self.cotangents.shape[1:-1])
    stored = math.prod(self.inputs.shape[1:]) + math.prod(self.cotangents.shape[1:])
    if kernel <= 2 * factors.KEEP * stored:  # Multiplying again costs as much as the patches.
      return 'explicit'
    patch = kernel // self.shape[-1]
    return 'gram' if not scaled and 2 * points * (patch + self.shape[-1]) < kernel else 'blocks'

  def squared_norm(self, scale: trees.Tree = ()) -> tf.Tensor:
    if self.route(not trees.absent(scale)) != 'gram':
      return super().squared_norm(scale)
    numbers = math.prod(self.cotangents.shape[1:-1]) * math.prod(self.shape[:-1])
    return protocol.in_blocks(lambda one: one.patches().squared_norm(scale), self, numbers)

  def products(self) -> protocol.Products:
    left, right = (tf.reduce_sum(tf.square(dense.sequence(t)), 1)
                   for t in (self.inputs, self.cotangents))
    size, places = list(self.shape[-2:]), math.prod(self.shape[:-2])

    def squares(scale: trees.Tree) -> tf.Tensor:
      if trees.absent(scale):
        return places * protocol.product_squares(left, right, ())
      places_of = tf.reshape(tf.square(scale), [-1] + size)
      return protocol.product_squares(left, right, tf.reduce_sum(places_of, 0))

    return tf.reduce_prod(tf.shape(self.cotangents)[1:-1]), squares

  def weighted_sum(self, weights: tf.Tensor) -> tf.Tensor:
    """Returns the plain gradient of the kernel for weighted cotangents."""
    weights = protocol.along(weights, self.cotangents)
    kernel = tf.zeros(self.shape, self.inputs.dtype)
    with tf.GradientTape() as tape:
      tape.watch(kernel)
      outputs = tf.nn.convolution(self.inputs, kernel, self.strides, 'VALID',
                                  dilations=self.dilations)
    return tape.gradient(outputs, kernel, output_gradients=self.cotangents * weights)

  def folded(self, times: int) -> factors.Explicit:
    return self.explicit(times)

  def transformed(self, scale: contract.Kronecker) -> protocol.Factor:
    _, d, p = geometry.matrices_of(scale, self.shape)
    *places, channels, filters = self.shape
    if p == filters and d == channels:
      return dataclasses.replace(
          self, inputs=geometry.on_last(self.inputs, scale.left),
          cotangents=geometry.on_last(self.cotangents, scale.right))
    points, patch = math.prod(self.cotangents.shape[1:-1]), channels * math.prod(places)
    if p == filters and points * (patch + filters) < patch * filters:
      return self.patches().transformed(scale)
    return self.explicit().transformed(scale)

  def second_moments(self, view: Tuple[int, int, int], most: int) -> Tuple[tf.Tensor, tf.Tensor]:
    return self.patches().second_moments(view, most)

  def explicit(self, times: int = 1) -> factors.Explicit:
    cotangents = protocol.fold(dense.sequence(self.cotangents), times)
    parts = tuple(tf.matmul(cotangents, protocol.fold(cut, times), transpose_a=True)
                  for cut in self._cuts())
    rank = len(self.strides)
    first = rank if self._by_place() else rank - 1  # Axes of the kernel along which it is cut.
    axes = (*range(first), rank + 1, *range(first, rank + 1))
    return factors.Explicit(parts, self.shape, axes)

  def patches(self) -> factors.Outer:
    """Returns the factor of the kernel as a matrix product."""
    patches = tf.concat(list(self._cuts()), -1)
    return factors.Outer(patches, dense.sequence(self.cotangents), self.shape)

  def windows(self) -> Iterator[tf.Tensor]:
    """Yields the inputs [n, *output, channels] that each place of the kernel multiplies."""
    return _windows(self.inputs, self.shape[:-2], self.strides, self.dilations,
                    self.cotangents.shape[1:-1])

  def _by_place(self) -> bool:
    """Returns whether each place of the kernel has its own product, instead of each row."""
    return self.shape[-2] >= WIDE and math.prod(self.shape[:-2]) <= PLACES

  def _cuts(self) -> Iterator[tf.Tensor]:
    """Yields the inputs [n, T, places * channels] of each place, or row of places."""
    windows = self.windows()
    if not self._by_place():  # Places along the last axis become channels first.
      *places, last, _, _ = self.shape
      output = self.cotangents.shape[1:-1].as_list()
      x = _joined(self.inputs, last, self.strides[-1], self.dilations[-1], output[-1])
      windows = _windows(
          x, [*places, 1], [*self.strides[:-1], 1], [*self.dilations[:-1], 1], output)
    return map(dense.sequence, windows)


def _windows(
    x: tf.Tensor, places: Sequence[int], strides: Sequence[int], dilations: Sequence[int],
    sizes: Sequence[int]) -> Iterator[tf.Tensor]:
  """Yields the parts [n, *sizes, channels] of x that each place of a kernel multiplies."""
  rank, axes = len(places), list(zip(places, strides, dilations, sizes))
  reach = [(size - 1) * stride + (k - 1) * dilation + 1 for k, stride, dilation, size in axes]
  blocks = [-(-size // stride) for size, stride in zip(reach, strides)]
  x = _fitted(x, [[0, block * stride - had] for block, stride, had in zip(
      blocks, strides, x.shape[1:-1])])
  # Inputs at each offset modulo the strides are adjacent.
  split = [size for pair in zip(blocks, strides) for size in pair]
  phases = tf.transpose(tf.reshape(x, [-1, *split, x.shape[-1]]), [
      *range(2, 2 * rank + 1, 2), 0, *range(1, 2 * rank, 2), 2 * rank + 1])
  phases = tf.unstack(tf.reshape(phases, [int(np.prod(strides)), -1, *blocks, x.shape[-1]]))
  extent = tf.constant([-1, *sizes, -1])
  for place in itertools.product(*map(range, places)):
    starts = [k // stride if stride > 1 else k * dilation
              for k, (_, stride, dilation, _) in zip(place, axes)]
    phase = phases[np.ravel_multi_index([k % s for k, s in zip(place, strides)], strides)]
    yield tf.slice(phase, [0, *starts, 0], extent)


def _joined(x: tf.Tensor, places: int, stride: int, dilation: int, size: int) -> tf.Tensor:
  """Turns windows along the last spatial axis into channels: [n, *, size, places * channels].

  `x` must be padded (see `factor`): XLA would clamp positions beyond it without an error.
  """
  at = (stride * np.arange(size)[:, np.newaxis] + dilation * np.arange(places)).ravel()
  axis = x.shape.rank - 2
  if x.shape[-1] > 1:
    cut = tf.gather(x, at, axis=axis)
  else:  # TensorFlow copies rows at once, but single numbers one at a time.
    rows = tf.gather(tf.transpose(x, [axis, *range(axis), axis + 1]), at)
    cut = tf.transpose(rows, [*range(1, axis + 1), 0, axis + 1])
  return tf.reshape(cut, [-1, *x.shape[1:axis], size, places * x.shape[-1]])


def factor(
    layer: compat.Layer, inputs: tf.Tensor, cotangents: tf.Tensor,
    shape: Tuple[int, ...]) -> Convolution:
  """Returns the `Convolution` of a layer's inputs and cotangents, channels last."""
  if None in inputs.shape[1:].as_list():
    raise registry.Unsupported(
        f'Layer {layer.name!r} must get inputs of a fixed size. Received: '
        f'examples of shape {inputs.shape[1:]}. '
        f'Fix the size, or use {registry.WHOLE}.')
  pads = []
  for size, output, kernel, stride, dilation in zip(
      inputs.shape[1:-1], cotangents.shape[1:-1], shape, layer.strides, layer.dilation_rate):
    reach = (kernel - 1) * dilation
    missing = max((output - 1) * stride + reach + 1 - size, 0)
    before = {'valid': 0, 'causal': reach, 'same': missing // 2}[layer.padding]
    pads.append([before, max(missing - before, 0)])  # Strides may leave the last inputs out.
  return Convolution(
      _fitted(inputs, pads), cotangents, shape, tuple(layer.strides), tuple(layer.dilation_rate))


def _fitted(x: tf.Tensor, more: Sequence[Sequence[int]]) -> tf.Tensor:
  """Adds `more` = [before, after] zeros along each spatial axis of x, or cuts where negative."""
  if np.min(more) < 0:
    x = x[(slice(None),) + tuple(slice(0, size + min(after, 0))
                                 for size, (_, after) in zip(x.shape[1:-1], more))]
  more = np.maximum(more, 0)
  if not np.any(more):
    return x
  # Channels join the last axis, because padding beside a short axis is slow.
  *others, last = x.shape[1:-1]
  channels = x.shape[-1]
  pads = np.concatenate([[[0, 0]], more[:-1], channels * more[-1:]])
  x = tf.pad(tf.reshape(x, [-1, *others, last * channels]), pads)
  return tf.reshape(x, [-1, *x.shape[1:-1], last + int(np.sum(more[-1])), channels])


def channels_last(layer: compat.Layer, x: tf.Tensor) -> tf.Tensor:
  """Returns x as [n, *spatial, channels], float32 at least."""
  x = tf.cast(x, trees.wide(x.dtype))
  if layer.data_format == 'channels_first':
    x = tf.transpose(x, [0] + list(range(2, x.shape.rank)) + [1])
  return x


def why(layer: compat.Layer) -> str:
  return 'LoRA' if getattr(layer, 'lora_enabled', False) else ''


def _bias(layer: compat.Layer, cotangents: tf.Tensor) -> registry.Factors:
  if layer.bias is not None:
    yield layer.bias, dense.summed_to(cotangents, tuple(layer.bias.shape))


@registry.register(
    layers.Conv1D, layers.Conv2D, layers.Conv3D, tap=registry.at_activation, why=why)
def convolution(
    layer: compat.Layer, call: registry.Call, cotangents: tf.Tensor) -> registry.Factors:
  inputs, cotangents = channels_last(layer, call.inputs), channels_last(layer, cotangents)
  shape = tuple(layer.kernel.shape)
  if layer.groups == 1:
    yield layer.kernel, factor(layer, inputs, cotangents, shape)
  else:
    part = shape[:-1] + (shape[-1] // layer.groups,)
    yield layer.kernel, factors.explicit(tf.concat([
        factor(layer, x, e, part).gradient()
        for x, e in zip(tf.split(inputs, layer.groups, -1), tf.split(cotangents, layer.groups, -1))
    ], -1))
  yield from _bias(layer, cotangents)


@registry.register(
    layers.Conv1DTranspose, layers.Conv2DTranspose, layers.Conv3DTranspose,
    tap=registry.at_activation, why=why)
def transposed_convolution(
    layer: compat.Layer, call: registry.Call, cotangents: tf.Tensor) -> registry.Factors:
  """Yields a convolution's factor, with inputs and cotangents exchanged."""
  inputs, cotangents = channels_last(layer, call.inputs), channels_last(layer, cotangents)
  yield layer.kernel, factor(layer, cotangents, inputs, tuple(layer.kernel.shape))
  yield from _bias(layer, cotangents)


def _depthwise(convolved: Convolution, cotangents: tf.Tensor) -> factors.Explicit:
  """Returns the factor of a depthwise kernel [*places, channels, multiplier]."""
  shape = convolved.shape
  cotangents = tf.reshape(cotangents, [-1, int(np.prod(cotangents.shape[1:-1]))] + list(shape[-2:]))
  products = [tf.einsum('ntc,ntcm->ncm', dense.sequence(window), cotangents)
              for window in convolved.windows()]
  return factors.explicit(tf.reshape(tf.stack(products, 1), (-1,) + shape))


@registry.register(
    layers.DepthwiseConv1D, layers.DepthwiseConv2D, tap=registry.at_activation, why=why)
def depthwise_convolution(
    layer: compat.Layer, call: registry.Call, cotangents: tf.Tensor) -> registry.Factors:
  inputs, cotangents = channels_last(layer, call.inputs), channels_last(layer, cotangents)
  kernel = compat.depthwise_kernel(layer)
  yield kernel, _depthwise(factor(layer, inputs, cotangents, tuple(kernel.shape)), cotangents)
  yield from _bias(layer, cotangents)


@registry.register(
    layers.SeparableConv1D, layers.SeparableConv2D, tap=registry.at_activation, why=why)
def separable_convolution(
    layer: compat.Layer, call: registry.Call, cotangents: tf.Tensor) -> registry.Factors:
  """Yields the factors of a depthwise convolution and of a matrix at every point."""
  inputs, cotangents = channels_last(layer, call.inputs), channels_last(layer, cotangents)
  depthwise, pointwise = layer.depthwise_kernel, layer.pointwise_kernel
  shape = tuple(depthwise.shape)
  wide = lambda v: tf.cast(tf.convert_to_tensor(v), cotangents.dtype)
  matrix = tf.reshape(wide(pointwise), [shape[-2] * shape[-1], -1])
  back = dense.times(cotangents, tf.transpose(matrix))
  convolved = factor(layer, inputs, back, shape)
  taps = tf.unstack(tf.reshape(wide(depthwise), (-1,) + shape[-2:]))
  middle = tf.add_n([tf.expand_dims(window, -1) * tap
                     for window, tap in zip(convolved.windows(), taps)])
  middle = tf.reshape(middle, [-1, int(np.prod(cotangents.shape[1:-1])), shape[-2] * shape[-1]])
  yield depthwise, _depthwise(convolved, back)
  yield pointwise, factors.Outer(middle, dense.sequence(cotangents), tuple(pointwise.shape))
  yield from _bias(layer, cotangents)
