# SPDX-License-Identifier: Apache-2.0
"""Convolutions: per-example gradients of small kernels, patches for Gram matrices."""

import dataclasses
import itertools
from typing import Any, Dict, Iterator, Optional, Sequence, Tuple

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

# With fewer channels, windows of up to this many places in a row of the output are
# cut out one by one.
CHANNELS, WINDOWS = 16, 32
# With this many channels or more, up to so many places of a kernel have a product each:
# windows of single places are copied once, those of rows of places three times.
WIDE, PLACES = 32, 16


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
    """'explicit', 'gram' or 'blocks', from static shapes."""
    kernel = int(np.prod(self.shape))
    points = int(np.prod(self.cotangents.shape[1:-1]))
    stored = int(np.prod(self.inputs.shape[1:])) + int(np.prod(self.cotangents.shape[1:]))
    if kernel <= 2 * factors.KEEP * stored:  # Multiplying again costs what the patches do.
      return 'explicit'
    patch = kernel // self.shape[-1]
    return 'gram' if not scaled and 2 * points * (patch + self.shape[-1]) < kernel else 'blocks'

  def squared_norms(self, scales: protocol.Scales) -> protocol.Tensors:
    norms: Dict[int, tf.Tensor] = {}
    for scaled in (False, True):
      chosen = [i for i, s in enumerate(scales) if trees.absent(s) != scaled]
      picked = [scales[i] for i in chosen]
      if chosen and self.route(scaled) == 'gram':
        points = int(np.prod(self.cotangents.shape[1:-1]))
        several = protocol.in_blocks(lambda one: one.patches().squared_norms(picked), self,
                                  len(picked), points * int(np.prod(self.shape[:-1])))
      elif chosen:
        several = protocol.charged(protocol.in_blocks(
            lambda one: one.explicit().squared_norms(picked), self, len(picked)), self, picked)
      norms.update(zip(chosen, several if chosen else []))
    return [norms[i] for i in range(len(scales))]

  def products(self) -> protocol.Products:
    left, right = (tf.reduce_sum(tf.square(dense.sequence(t)), 1)
                   for t in (self.inputs, self.cotangents))
    size, places = [int(n) for n in self.shape[-2:]], int(np.prod(self.shape[:-2]))

    def squares(scale: trees.Tree) -> tf.Tensor:
      if trees.absent(scale):
        return places * protocol.product_squares(left, right, ())
      places_of = tf.reshape(tf.square(scale), [-1] + size)
      return protocol.product_squares(left, right, tf.reduce_sum(places_of, 0))

    return tf.reduce_prod(tf.shape(self.cotangents)[1:-1]), squares

  def weighted_sums(self, weights: protocol.Tensors) -> protocol.Tensors:
    return [self._product(w) for w in weights]

  def squared_sums(self, weights: protocol.Tensors, scales: protocol.Scales) -> protocol.Tensors:
    return protocol.sum_blocks(
        lambda one, w: one.explicit().squared_sums(w, scales), self, weights)

  def folded(self, times: int) -> factors.Explicit:
    return self.explicit(times)

  def transformed(self, scale: contract.Kronecker) -> protocol.Factor:
    _, d, p = geometry.matrices_of(scale, self.shape)
    *places, channels, filters = self.shape
    if p == filters and d == channels:
      return dataclasses.replace(
          self, inputs=geometry.on_last(self.inputs, scale.left),
          cotangents=geometry.on_last(self.cotangents, scale.right))
    points = int(np.prod(self.cotangents.shape[1:-1]))
    patch = channels * int(np.prod(places))
    if p == filters and points * (patch + filters) < patch * filters:
      return self._in_order().transformed(scale)
    return self.explicit().transformed(scale)

  def second_moments(self, view: Tuple[int, int, int], most: int) -> Tuple[tf.Tensor, tf.Tensor]:
    return self._in_order().second_moments(view, most)

  def _in_order(self) -> factors.Outer:
    """The factor as a matrix product, patches in the order of the kernel's axes."""
    windows = tf.stack(list(self.windows()), -2)
    patches = tf.reshape(dense.sequence(windows), [
        -1, int(np.prod(self.cotangents.shape[1:-1])), int(np.prod(self.shape[:-1]))])
    return factors.Outer(patches, dense.sequence(self.cotangents), self.shape)

  def simplified(self) -> protocol.Factor:
    return self.explicit() if self.route(True) == 'explicit' else self

  def explicit(self, times: int = 1) -> factors.Explicit:
    fold = (lambda t: t) if isinstance(times, int) and times == 1 else (
        lambda t: factors.fold(t, times))
    cotangents, rank = fold(dense.sequence(self.cotangents)), len(self.strides)
    parts = tuple(tf.matmul(cotangents, fold(cut), transpose_a=True) for cut in self._cuts())
    tiles, within = tuple(range(0, 2 * rank, 2)), tuple(range(1, 2 * rank, 2))
    first = rank if self._by_place() else 1
    axes = tiles[:first] + (2 * rank + 1,) + tiles[first:] + within + (2 * rank,)
    return factors.Explicit(parts, self.shape, axes, self._view())

  def patches(self) -> factors.Outer:
    """The factor of the kernel, in another order of its axes, as a matrix product."""
    patches = tf.concat(list(self._cuts()), -1)
    return factors.Outer(patches, dense.sequence(self.cotangents), self.shape)

  def windows(self) -> Iterator[tf.Tensor]:
    """Per place of the kernel, in order: what it multiplies, [n, *output, channels]."""
    phases = self._phases()
    for place in itertools.product(*[range(size) for size in self.shape[:-2]]):
      yield self._window(phases, place, self.strides, self.cotangents.shape[1:-1])

  def _tile(self) -> Tuple[int, ...]:
    """Places per axis whose inputs are channels of one: the stride, if it divides the kernel."""
    if all(k % stride == 0 for k, stride in zip(self.shape, self.strides)):
      return self.strides
    return (1,) * len(self.strides)

  def _view(self) -> Tuple[int, ...]:
    """The kernel's shape with its places as tiles: [k / tile, tile, ..., channels, filters]."""
    pairs = [(k // tile, tile) for k, tile in zip(self.shape, self._tile())]
    return tuple(size for pair in pairs for size in pair) + self.shape[-2:]

  def _by_place(self) -> bool:
    """Whether every tile of the kernel has a product of its own, not every row of tiles."""
    tile = int(np.prod(self._tile()))
    return (tile * self.shape[-2] >= WIDE
            and int(np.prod(self.shape[:-2])) <= PLACES * tile)

  def _cuts(self) -> Iterator[tf.Tensor]:
    """Per tile or row of tiles of the kernel: what it meets, [n, T, tiles * places * channels]."""
    sizes, tile = self.cotangents.shape[1:-1].as_list(), self._tile()
    strides = [s // t for s, t in zip(self.strides, tile)]
    tiles = [k // t for k, t in zip(self.shape, tile)]
    phases = self._phases(tile)
    if self._by_place():
      for place in itertools.product(*map(range, tiles)):
        yield dense.sequence(self._window(phases, place, strides, sizes))
      return
    inner, bands = int(np.prod(sizes[1:])), []
    for phase in phases:  # Of rows; each with all other places side by side.
      band = self._band(phase, tiles, strides, sizes)
      bands.append((tf.reshape(band, [-1, int(np.prod(band.shape[1:]))]), band.shape[-1]))
    for i in range(tiles[0]):
      band, width = bands[i % len(bands)]
      start = self._start(i, strides[0], 0) * inner * width
      rows = band[:, start:start + sizes[0] * inner * width]
      yield tf.reshape(rows, [-1, sizes[0] * inner, width])

  def _band(
      self, phase: Any, places: Sequence[int], strides: Sequence[int], sizes: Any) -> tf.Tensor:
    """[n, rows, *sizes[1:], width]: what all places of a row but its own axis multiply."""
    others = itertools.product(*[range(size) for size in places[1:]])
    if len(sizes) == 2 and strides[1] == self.dilations[1] == 1 and sizes[1] <= WINDOWS:
      x, = phase
      channels = x.shape[-1]
      if channels < CHANNELS:  # Windows are copied in longer pieces than places.
        x = tf.reshape(x, [-1, x.shape[1], x.shape[2] * channels])
        return tf.stack([x[:, :, start * channels:(start + places[1]) * channels]
                         for start in range(sizes[1])], 2)
    return tf.concat([self._window(phase, place, strides[1:], sizes[1:], skip=1)
                      for place in others], -1)

  def _window(
      self, phases: Any, place: Sequence[int], strides: Sequence[int], sizes: Any,
      skip: int = 0) -> tf.Tensor:
    """Returns the inputs that kernel position `place` multiplies, after the first `skip` axes."""
    cut = [slice(None)] * (1 + skip)
    for axis, (k, stride, size) in enumerate(zip(place, strides, sizes)):
      phases = phases[k % stride]
      start = self._start(k, stride, axis + skip)
      cut.append(slice(start, start + size))
    return phases[tuple(cut)]

  def _start(self, k: int, stride: int, axis: int) -> int:
    return k // stride if stride > 1 else k * self.dilations[axis]

  def _reach(self, axis: int) -> int:
    """Returns how far the kernel reaches along a spatial axis of the inputs."""
    steps = self.cotangents.shape[1 + axis] - 1
    return steps * self.strides[axis] + (self.shape[axis] - 1) * self.dilations[axis] + 1

  def _phases(self, tile: Optional[Tuple[int, ...]] = None) -> Any:
    """Nested lists, an axis a level: inputs at each offset modulo the strides.

    With the strides for `tile` there is one phase, of blocks that are channels.
    """
    x, rank = self.inputs, len(self.strides)
    tile = tile or (1,) * rank
    if max(self.strides) > 1:
      sizes = [-(-self._reach(axis) // stride) for axis, stride in enumerate(self.strides)]
      x = _fitted(x, [[0, size * stride - had] for size, stride, had in zip(
          sizes, self.strides, x.shape[1:-1])])
      split = [size for pair in zip(sizes, self.strides) for size in pair]
      x = tf.reshape(x, [-1] + split + [x.shape[-1]])
      outer, phase = [1 + 2 * i for i in range(rank)], [2 + 2 * i for i in range(rank)]
      if tile == self.strides:
        x = tf.transpose(x, [0] + outer + phase + [1 + 2 * rank])
        x = tf.reshape(x, [-1] + sizes + [int(np.prod(self.strides)) * self.inputs.shape[-1]])
      else:
        x = tf.transpose(x, phase + [0] + outer + [1 + 2 * rank])

    def nested(tensor: tf.Tensor, level: int) -> Any:
      if tile == self.strides:
        return tensor if level == rank else [nested(tensor, level + 1)]
      return tensor if level == rank else [nested(one, level + 1) for one in tf.unstack(tensor)]

    return nested(x, 0)

  def _product(self, weights: tf.Tensor) -> tf.Tensor:
    """The plain gradient of the kernel for weighted cotangents."""
    weights = protocol.along(weights, self.cotangents)
    kernel = tf.zeros(self.shape, self.inputs.dtype)
    with tf.GradientTape() as tape:
      tape.watch(kernel)
      outputs = tf.nn.convolution(self.inputs, kernel, self.strides, 'VALID',
                                  dilations=self.dilations)
    return tape.gradient(outputs, kernel, output_gradients=self.cotangents * weights)


def factor(
    layer: compat.Layer, inputs: tf.Tensor, cotangents: tf.Tensor,
    shape: Tuple[int, ...]) -> Convolution:
  """The `Convolution` of a layer's inputs and cotangents, channels last."""
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


def _fitted(x: tf.Tensor, more: Any) -> tf.Tensor:
  """[n, *spatial, channels] with `more` = [before, after] zeros, or fewer, along each axis."""
  if np.min(more) < 0:
    x = x[(slice(None),) + tuple(slice(0, size + min(after, 0))
                                 for size, (_, after) in zip(x.shape[1:-1], more))]
  more = np.maximum(more, 0)
  if not np.any(more):
    return x
  # Channels join the last axis: padding few of them by themselves is slow.
  *others, last = x.shape[1:-1]
  channels = x.shape[-1]
  pads = np.concatenate([[[0, 0]], more[:-1], channels * more[-1:]])
  x = tf.pad(tf.reshape(x, [-1, *others, last * channels]), pads)
  return tf.reshape(x, [-1, *x.shape[1:-1], last + int(np.sum(more[-1])), channels])


def channels_last(layer: compat.Layer, x: tf.Tensor) -> tf.Tensor:
  """[n, *spatial, channels], float32 at least."""
  x = tf.cast(x, trees.wide(x.dtype))
  if layer.data_format == 'channels_first':
    x = tf.transpose(x, [0] + list(range(2, x.shape.rank)) + [1])
  return x


def _why(layer: compat.Layer) -> str:
  return 'LoRA' if getattr(layer, 'lora_enabled', False) else ''


def _bias(layer: compat.Layer, cotangents: tf.Tensor) -> registry.Factors:
  if layer.bias is not None:
    yield layer.bias, dense.summed_to(cotangents, tuple(layer.bias.shape))


@registry.register(
    layers.Conv1D, layers.Conv2D, layers.Conv3D, tap=registry.at_activation, why=_why)
def convolution(
    layer: compat.Layer, call: registry.Call, cotangents: tf.Tensor) -> registry.Factors:
  inputs, cotangents = channels_last(layer, call.inputs), channels_last(layer, cotangents)
  shape = tuple(layer.kernel.shape)
  if layer.groups == 1:
    yield layer.kernel, factor(layer, inputs, cotangents, shape)
  else:
    part = shape[:-1] + (shape[-1] // layer.groups,)
    yield layer.kernel, factors.explicit(tf.concat([
        factor(layer, x, e, part).explicit().gradient()
        for x, e in zip(tf.split(inputs, layer.groups, -1), tf.split(cotangents, layer.groups, -1))
    ], -1))
  yield from _bias(layer, cotangents)


@registry.register(
    layers.Conv1DTranspose, layers.Conv2DTranspose, layers.Conv3DTranspose,
    tap=registry.at_activation, why=_why)
def transposed_convolution(
    layer: compat.Layer, call: registry.Call, cotangents: tf.Tensor) -> registry.Factors:
  """A convolution's gradient, in which inputs and cotangents have changed places."""
  inputs, cotangents = channels_last(layer, call.inputs), channels_last(layer, cotangents)
  yield layer.kernel, factor(layer, cotangents, inputs, tuple(layer.kernel.shape))
  yield from _bias(layer, cotangents)


def _depthwise(convolved: Convolution, cotangents: tf.Tensor) -> factors.Explicit:
  """A depthwise kernel [*places, channels, multiplier]."""
  shape = convolved.shape
  cotangents = tf.reshape(cotangents, [-1, int(np.prod(cotangents.shape[1:-1]))] + list(shape[-2:]))
  products = [tf.einsum('ntc,ntcm->ncm', dense.sequence(window), cotangents)
              for window in convolved.windows()]
  return factors.explicit(tf.reshape(tf.stack(products, 1), (-1,) + shape))


@registry.register(
    layers.DepthwiseConv1D, layers.DepthwiseConv2D, tap=registry.at_activation, why=_why)
def depthwise_convolution(
    layer: compat.Layer, call: registry.Call, cotangents: tf.Tensor) -> registry.Factors:
  inputs, cotangents = channels_last(layer, call.inputs), channels_last(layer, cotangents)
  kernel = compat.depthwise_kernel(layer)
  yield kernel, _depthwise(factor(layer, inputs, cotangents, tuple(kernel.shape)), cotangents)
  yield from _bias(layer, cotangents)


@registry.register(
    layers.SeparableConv1D, layers.SeparableConv2D, tap=registry.at_activation, why=_why)
def separable_convolution(
    layer: compat.Layer, call: registry.Call, cotangents: tf.Tensor) -> registry.Factors:
  """A depthwise convolution, then a matrix at every point."""
  inputs, cotangents = channels_last(layer, call.inputs), channels_last(layer, cotangents)
  depthwise, pointwise = layer.depthwise_kernel, layer.pointwise_kernel
  shape = tuple(depthwise.shape)
  wide = lambda v: tf.cast(tf.convert_to_tensor(v), cotangents.dtype)
  matrix = tf.reshape(wide(pointwise), [shape[-2] * shape[-1], -1])
  back = dense.times(cotangents, tf.transpose(matrix))
  convolved = factor(layer, inputs, back, shape)
  taps = tf.unstack(tf.reshape(wide(depthwise), (-1,) + shape[-2:]))
  middle = tf.add_n([window[..., tf.newaxis] * tap
                     for window, tap in zip(convolved.windows(), taps)])
  middle = tf.reshape(middle, [-1, int(np.prod(cotangents.shape[1:-1])), shape[-2] * shape[-1]])
  yield depthwise, _depthwise(convolved, back)
  yield pointwise, factors.Outer(middle, dense.sequence(cotangents), tuple(pointwise.shape))
  yield from _bias(layer, cotangents)
