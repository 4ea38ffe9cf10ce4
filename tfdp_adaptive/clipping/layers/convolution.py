"""Convolutions: per-example gradients of small kernels, patches for Gram matrices."""

import dataclasses
import itertools
from typing import Any, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive.clipping import blocks
from tfdp_adaptive.clipping import factors
from tfdp_adaptive.clipping.layers import dense
from tfdp_adaptive.clipping.layers import registry

layers = compat.keras.layers


@dataclasses.dataclass(frozen=True)
class Convolution:
  """The gradient of a kernel [*places, channels, filters], padding done.

  Attributes:
    inputs: [n, *spatial, channels].
    errors: [n, *output, filters], gradients of the loss by the convolution.
    shape: The kernel's shape.
    strides: Per spatial axis.
    dilations: Per spatial axis.
  """

  inputs: Any
  errors: Any
  shape: Tuple[int, ...]
  strides: Tuple[int, ...]
  dilations: Tuple[int, ...]

  def route(self, scaled):
    """'explicit', 'gram' or 'blocks', from static shapes."""
    kernel = int(np.prod(self.shape))
    points = int(np.prod(self.errors.shape[1:-1]))
    stored = int(np.prod(self.inputs.shape[1:])) + int(np.prod(self.errors.shape[1:]))
    if kernel <= factors.KEEP * stored:
      return 'explicit'
    patch = kernel // self.shape[-1]
    return 'gram' if not scaled and 2 * points * (patch + self.shape[-1]) < kernel else 'blocks'

  def squared_norms(self, scales):
    norms = {}
    for scaled in (False, True):
      chosen = [i for i, s in enumerate(scales) if factors.absent(s) != scaled]
      picked = [scales[i] for i in chosen]
      if chosen and self.route(scaled) == 'gram':
        points = int(np.prod(self.errors.shape[1:-1]))
        found = blocks.in_blocks(lambda one: one.patches().squared_norms(picked), self,
                                  len(picked), points * int(np.prod(self.shape[:-1])))
      elif chosen:
        found = blocks.in_blocks(
            lambda one: one.explicit().squared_norms(picked), self, len(picked))
      norms.update(zip(chosen, found if chosen else []))
    return [norms[i] for i in range(len(scales))]

  def weighted_sums(self, weights):
    return [self._product(w) for w in weights]

  def weighted_squares(self, weights):
    return blocks.sum_blocks(lambda one, w: one.explicit().weighted_squares(w), self, weights)

  def folded(self, times):
    return self.explicit().folded(times)

  def simplified(self):
    return self.explicit() if self.route(True) == 'explicit' else self

  def explicit(self):
    errors = dense.sequence(self.errors)
    axis = len(self.shape) - 1
    # As [rows, phases, *other places, channels, filters], for `_rows`.
    step = self._rows_at_once()
    view = (self.shape[0] // step, step) + self.shape[1:]
    parts = tuple(tf.matmul(errors, rows, transpose_a=True) for rows in self._rows())
    return factors.Explicit(parts, self.shape, (0, axis + 1) + tuple(range(1, axis + 1)), view)

  def patches(self):
    rows = list(self._rows())
    return factors.Outer(tf.concat(rows, -1), dense.sequence(self.errors), self.shape)

  def windows(self):
    """Per place of the kernel, in order: what it multiplies, [n, *output, channels]."""
    phases, sizes = self._phases(), self.errors.shape[1:-1]
    for place in itertools.product(*[range(size) for size in self.shape[:-2]]):
      window = phases
      for k, stride in zip(place, self.strides):
        window = window[k % stride]
      cut = [slice(start, start + size) for start, size in zip(self._starts(place), sizes)]
      yield window[tuple([slice(None)] + cut)]

  def _rows_at_once(self):
    return self.strides[0] if self.shape[0] % self.strides[0] == 0 else 1

  def _rows(self):
    """[n, T, width] inputs of the kernel's rows, or of `_rows_at_once` of them."""
    phases, sizes = self._phases(), self.errors.shape[1:-1].as_list()
    step, inner = self._rows_at_once(), int(np.prod(sizes[1:]))

    def bands(phase):
      """[n, spatial rows, *other output sizes, width]: places of a row side by side."""
      for place in itertools.product(*[range(size) for size in self.shape[1:-2]]):
        window = phase
        for k, stride in zip(place, self.strides[1:]):
          window = window[k % stride]
        cut = [slice(start, start + size)
               for start, size in zip(self._starts((0,) + place)[1:], sizes[1:])]
        yield window[tuple([slice(None)] * 2 + cut)]

    def joined(pieces):
      band = tf.concat(pieces, -1) if len(pieces) > 1 else pieces[0]
      width = band.shape[-1]
      return tf.reshape(band, [-1, band.shape[1] * inner * width]), inner * width, width

    if step > 1 or self.strides[0] == 1:
      flat = [joined([band for phase in phases for band in bands(phase)])]
    else:
      flat = [joined(list(bands(phase))) for phase in phases]
    for i in range(self.shape[0] // step):
      band, length, width = flat[0 if len(flat) == 1 else i % self.strides[0]]
      start = self._starts((i * step,))[0] * length
      rows = band[:, start:start + sizes[0] * length]
      yield tf.reshape(rows, [-1, sizes[0] * inner, width])

  def _starts(self, place):
    return [k // stride if stride > 1 else k * dilation
            for k, stride, dilation in zip(place, self.strides, self.dilations)]

  def _phases(self):
    """Nested lists, an axis a level: the inputs at each offset modulo the strides."""
    x, rank = self.inputs, len(self.strides)
    if max(self.strides) == 1:
      nested = x
      for _ in range(rank):
        nested = [nested]
      return nested
    spare = [-size % stride for size, stride in zip(x.shape[1:-1], self.strides)]
    x = tf.pad(x, [[0, 0]] + [[0, more] for more in spare] + [[0, 0]])
    shape = [-1]
    for size, stride in zip(x.shape[1:-1], self.strides):
      shape += [size // stride, stride]
    order = [2 + 2 * i for i in range(rank)] + [0] + [1 + 2 * i for i in range(rank)]
    x = tf.transpose(tf.reshape(x, shape + [x.shape[-1]]), order + [1 + 2 * rank])

    def split(tensor, level):
      return tensor if level == rank else [split(one, level + 1) for one in tf.unstack(tensor)]

    return split(x, 0)

  def _product(self, weights):
    """The plain gradient of the kernel for weighted errors."""
    weights = tf.reshape(tf.cast(weights, self.errors.dtype), [-1] + [1] * (len(self.shape) - 1))
    kernel = tf.zeros(self.shape, self.inputs.dtype)
    with tf.GradientTape() as tape:
      tape.watch(kernel)
      outputs = tf.nn.convolution(self.inputs, kernel, self.strides, 'VALID',
                                  dilations=self.dilations)
    return tape.gradient(outputs, kernel, output_gradients=self.errors * weights)


def factor(layer, inputs, errors, shape):
  """The `Convolution` of a layer's inputs and errors, channels last."""
  if None in inputs.shape[1:].as_list():
    raise registry.Unsupported(
        f'Layer {layer.name!r} must get inputs of a fixed size. Received: {inputs.shape}. '
        "Fix the size, or use engine='materialized'.")
  pads = []
  for size, output, kernel, stride, dilation in zip(
      inputs.shape[1:-1], errors.shape[1:-1], shape, layer.strides, layer.dilation_rate):
    reach = (kernel - 1) * dilation
    missing = max((output - 1) * stride + reach + 1 - size, 0)
    before = {'valid': 0, 'causal': reach, 'same': missing // 2}[layer.padding]
    pads.append([before, missing - before])
  if np.any(pads):
    inputs = tf.pad(inputs, [[0, 0]] + pads + [[0, 0]])
  return Convolution(inputs, errors, shape, tuple(layer.strides), tuple(layer.dilation_rate))


def channels_last(layer, x):
  """[n, *spatial, channels], float32 at least."""
  x = tf.cast(x, dense.wide(x.dtype))
  if layer.data_format == 'channels_first':
    x = tf.transpose(x, [0] + list(range(2, x.shape.rank)) + [1])
  return x


def _why(layer):
  return 'LoRA' if getattr(layer, 'lora_enabled', False) else ''


def _bias(layer, errors):
  if layer.bias is not None:
    yield layer.bias, dense.summed_to(errors, tuple(layer.bias.shape))


@registry.register(
    layers.Conv1D, layers.Conv2D, layers.Conv3D, tap=registry.at_activation, why=_why)
def convolution(layer, call, errors):
  inputs, errors = channels_last(layer, call.inputs), channels_last(layer, errors)
  shape = tuple(layer.kernel.shape)
  if layer.groups == 1:
    yield layer.kernel, factor(layer, inputs, errors, shape)
  else:
    part = shape[:-1] + (shape[-1] // layer.groups,)
    yield layer.kernel, factors.explicit(tf.concat([
        factor(layer, x, e, part).explicit().gradient()
        for x, e in zip(tf.split(inputs, layer.groups, -1), tf.split(errors, layer.groups, -1))
    ], -1))
  yield from _bias(layer, errors)


def _depthwise(convolved, errors):
  """A kernel [*places, channels, multiplier]: every channel by itself."""
  shape = convolved.shape
  errors = tf.reshape(errors, [-1, int(np.prod(errors.shape[1:-1]))] + list(shape[-2:]))
  products = [tf.einsum('ntc,ntcm->ncm', dense.sequence(window), errors)
              for window in convolved.windows()]
  return factors.explicit(tf.reshape(tf.stack(products, 1), (-1,) + shape))


@registry.register(
    layers.DepthwiseConv1D, layers.DepthwiseConv2D, tap=registry.at_activation, why=_why)
def depthwise_convolution(layer, call, errors):
  inputs, errors = channels_last(layer, call.inputs), channels_last(layer, errors)
  kernel = layer.kernel if compat.KERAS_3 else layer.depthwise_kernel
  yield kernel, _depthwise(factor(layer, inputs, errors, tuple(kernel.shape)), errors)
  yield from _bias(layer, errors)


@registry.register(
    layers.SeparableConv1D, layers.SeparableConv2D, tap=registry.at_activation, why=_why)
def separable_convolution(layer, call, errors):
  """A depthwise convolution, then a matrix at every point."""
  inputs, errors = channels_last(layer, call.inputs), channels_last(layer, errors)
  depthwise, pointwise = layer.depthwise_kernel, layer.pointwise_kernel
  shape = tuple(depthwise.shape)
  wide = lambda v: tf.cast(tf.convert_to_tensor(v), errors.dtype)
  matrix = tf.reshape(wide(pointwise), [shape[-2] * shape[-1], -1])
  back = tf.matmul(errors, matrix, transpose_b=True)
  convolved = factor(layer, inputs, back, shape)
  taps = tf.unstack(tf.reshape(wide(depthwise), (-1,) + shape[-2:]))
  middle = tf.add_n([window[..., tf.newaxis] * tap
                     for window, tap in zip(convolved.windows(), taps)])
  middle = tf.reshape(middle, [-1, int(np.prod(errors.shape[1:-1])), shape[-2] * shape[-1]])
  yield depthwise, _depthwise(convolved, back)
  yield pointwise, factors.Outer(middle, dense.sequence(errors), tuple(pointwise.shape))
  yield from _bias(layer, errors)
