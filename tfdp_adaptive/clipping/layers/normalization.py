"""Layers that scale and shift what they computed: a vector per example."""

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive.clipping import factors
from tfdp_adaptive.clipping.layers import dense
from tfdp_adaptive.clipping.layers import registry

layers = compat.keras.layers


def _axes(layer, rank):
  axes = layer.axis if isinstance(layer.axis, (list, tuple)) else [layer.axis]
  axes = sorted(axis % rank for axis in axes)
  if 0 in axes:
    raise registry.Unsupported(f'Layer {layer.name!r} must not normalise over the batch. '
                               f'Received: axis={layer.axis}.')
  return axes


def _vectors(x, axes):
  """[n, ...] summed over everything but the first axis and `axes`."""
  others = [i for i in range(1, x.shape.rank) if i not in axes]
  return factors.explicit(tf.reduce_sum(x, others) if others else x)


def _wide(*tensors):
  return [tf.cast(x, dense.wide(x.dtype)) for x in tensors]


@registry.register(
    layers.LayerNormalization,
    why=lambda layer: 'rms_scaling' if getattr(layer, 'rms_scaling', False) else '')
def layer_normalization(layer, call, errors):
  inputs, errors = _wide(call.inputs, errors)
  axes = _axes(layer, inputs.shape.rank)
  if layer.gamma is not None:
    mean, variance = tf.nn.moments(inputs, axes, keepdims=True)
    yield layer.gamma, _vectors(
        errors * (inputs - mean) * tf.math.rsqrt(variance + layer.epsilon), axes)
  if layer.beta is not None:
    yield layer.beta, _vectors(errors, axes)


@registry.register(layers.GroupNormalization)
def group_normalization(layer, call, errors):
  inputs, errors = _wide(call.inputs, errors)
  axis, = _axes(layer, inputs.shape.rank)
  if len(call.args) > 1 or call.kwargs.get('mask') is not None:
    raise registry.Unsupported(f'Layer {layer.name!r} must be called without a mask. Received: one.')
  if layer.gamma is not None:
    sizes = [inputs.shape[i] or tf.shape(inputs)[i] for i in range(1, inputs.shape.rank)]
    sizes[axis - 1:axis] = [layer.groups, inputs.shape[axis] // layer.groups]
    grouped = tf.reshape(inputs, tf.stack([-1] + sizes))
    mean, variance = tf.nn.moments(
        grouped, [i for i in range(1, grouped.shape.rank) if i != axis], keepdims=True)
    normalized = (grouped - mean) * tf.math.rsqrt(variance + layer.epsilon)
    yield layer.gamma, _vectors(errors * tf.reshape(normalized, tf.shape(inputs)), [axis])
  if layer.beta is not None:
    yield layer.beta, _vectors(errors, [axis])


if hasattr(layers, 'RMSNormalization'):  # Keras 3.

  @registry.register(layers.RMSNormalization)
  def rms_normalization(layer, call, errors):
    inputs, errors = _wide(call.inputs, errors)
    axes = _axes(layer, inputs.shape.rank)
    square = tf.reduce_mean(tf.square(inputs), axes, keepdims=True)
    yield layer.scale, _vectors(errors * inputs * tf.math.rsqrt(square + layer.epsilon), axes)


@registry.register(layers.PReLU)
def prelu(layer, call, errors):
  inputs, errors = _wide(call.inputs, errors)
  yield layer.alpha, dense.summed_to(tf.minimum(inputs, 0) * errors, tuple(layer.alpha.shape))
