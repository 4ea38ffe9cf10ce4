"""Convolutions: a matrix product of patches, or of one shifted input per kernel place."""

import itertools

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive.clipping import factors
from tfdp_adaptive.clipping.layers import dense
from tfdp_adaptive.clipping.layers import registry

keras = compat.keras
layers = keras.layers


def _why(layer):
  if getattr(layer, 'lora_enabled', False):
    return 'LoRA'
  return ''


def channels_last(layer, x):
  """[n, *spatial, channels], float32 at least."""
  x = tf.cast(x, dense.wide(x.dtype))
  if layer.data_format == 'channels_first':
    x = tf.transpose(x, [0] + list(range(2, x.shape.rank)) + [1])
  return x


def shifts(layer, inputs, sizes):
  """Per kernel place, in row-major order: the input it meets, [n, *output, channels].

  Args:
    layer: Has `kernel_size`, `strides`, `dilation_rate` and `padding`.
    inputs: [n, *spatial, channels].
    sizes: Spatial sizes of the output.
  """
  pads, steps = [], list(zip(layer.kernel_size, layer.strides, layer.dilation_rate))
  for axis, (kernel, stride, dilation) in enumerate(steps):
    reach = (kernel - 1) * dilation
    if layer.padding == 'valid':
      before, missing = 0, 0
    elif layer.padding == 'causal':
      before, missing = reach, reach
    else:  # 'same'
      size = inputs.shape[1 + axis]
      missing = max((sizes[axis] - 1) * stride + reach + 1 - size, 0)
      before = missing // 2
    pads.append([before, missing - before])
  if np.any(pads):
    inputs = tf.pad(inputs, [[0, 0]] + pads + [[0, 0]])
  for place in itertools.product(*[range(kernel) for kernel, _, _ in steps]):
    window = [slice(None)]
    for at, size, (_, stride, dilation) in zip(place, sizes, steps):
      start = at * dilation
      window.append(slice(start, start + (size - 1) * stride + 1, stride))
    yield inputs[tuple(window)]


def _bias(layer, errors):
  if layer.bias is not None:
    yield layer.bias, factors.Explicit(tf.reduce_sum(errors, list(range(1, errors.shape.rank - 1))))


@registry.register(
    layers.Conv1D, layers.Conv2D, layers.Conv3D, tap=registry.at_activation, why=_why)
def convolution(layer, call, errors):
  inputs, errors = channels_last(layer, call.inputs), channels_last(layer, errors)
  sizes = errors.shape[1:-1].as_list()
  kernel = tuple(layer.kernel.shape)
  if layer.groups > 1:
    yield layer.kernel, _grouped(layer, inputs, errors, kernel)
  else:
    yield layer.kernel, _product(shifts(layer, inputs, sizes), dense.sequence(errors), kernel)
  yield from _bias(layer, errors)


def _product(windows, errors, kernel):
  """The factor of a kernel [*places, channels, filters]."""
  windows = [dense.sequence(window) for window in windows]
  if kernel[-2] > 8:  # Products wide enough to save the memory of the patches.
    explicit = factors.Outer(
        windows[0], errors, (len(windows) * kernel[-2], kernel[-1])).route(True) == 'explicit'
    if explicit:
      products = [tf.matmul(window, errors, transpose_a=True) for window in windows]
      return factors.Explicit(tf.reshape(tf.stack(products, 1), (-1,) + kernel))
  patches = tf.reshape(tf.stack(windows, 2), [-1, errors.shape[1], len(windows) * kernel[-2]])
  return factors.Outer(patches, errors, kernel)


def _grouped(layer, inputs, errors, kernel):
  groups, places = layer.groups, int(np.prod(kernel[:-2]))
  errors_by = dense.sequence(errors)
  errors_by = tf.reshape(errors_by, [-1, errors_by.shape[1], groups, kernel[-1] // groups])
  windows = tf.stack([dense.sequence(w) for w in shifts(
      layer, inputs, errors.shape[1:-1].as_list())], 2)
  windows = tf.reshape(windows, [-1, errors_by.shape[1], places, groups, kernel[-2]])
  return factors.Explicit(tf.reshape(
      tf.einsum('ntkgc,ntgf->nkcgf', windows, errors_by), (-1,) + kernel))


def _depthwise(layer, inputs, errors, kernel):
  """Kernel [*places, channels, multiplier]: every channel by itself."""
  products = []
  flat = dense.sequence(errors)
  flat = tf.reshape(flat, [-1, flat.shape[1]] + list(kernel[-2:]))
  for window in shifts(layer, inputs, errors.shape[1:-1].as_list()):
    products.append(tf.einsum('ntc,ntcm->ncm', dense.sequence(window), flat))
  return factors.Explicit(tf.reshape(tf.stack(products, 1), (-1,) + kernel))


def _depthwise_kernel(layer):
  return layer.kernel if compat.KERAS_3 else layer.depthwise_kernel


@registry.register(*[getattr(layers, name) for name in ('DepthwiseConv1D', 'DepthwiseConv2D')],
                   tap=registry.at_activation, why=_why)
def depthwise_convolution(layer, call, errors):
  inputs, errors = channels_last(layer, call.inputs), channels_last(layer, errors)
  kernel = _depthwise_kernel(layer)
  yield kernel, _depthwise(layer, inputs, errors, tuple(kernel.shape))
  yield from _bias(layer, errors)


@registry.register(layers.SeparableConv1D, layers.SeparableConv2D,
                   tap=registry.at_activation, why=_why)
def separable_convolution(layer, call, errors):
  """A depthwise convolution, then a matrix at every point."""
  inputs, errors = channels_last(layer, call.inputs), channels_last(layer, errors)
  depthwise, pointwise = (tf.convert_to_tensor(v) for v in (
      layer.depthwise_kernel, layer.pointwise_kernel))
  sizes = errors.shape[1:-1].as_list()
  channels, multiplier = depthwise.shape[-2:]
  matrix = tf.cast(tf.reshape(pointwise, [channels * multiplier, -1]), errors.dtype)
  taps = tf.cast(tf.reshape(depthwise, [-1, channels, multiplier]), errors.dtype)
  middle = tf.add_n([
      window[..., tf.newaxis] * taps[i]
      for i, window in enumerate(shifts(layer, inputs, sizes))])
  middle = tf.reshape(middle, [-1] + sizes + [channels * multiplier])
  back = tf.matmul(errors, matrix, transpose_b=True)
  yield layer.depthwise_kernel, _depthwise(layer, inputs, back, tuple(depthwise.shape))
  yield layer.pointwise_kernel, factors.Outer(
      dense.sequence(middle), dense.sequence(errors), tuple(pointwise.shape))
  yield from _bias(layer, errors)
