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
  total = tf.reduce_sum(x, others) if others else x
  return factors.explicit(total, dense.numbers(x) // dense.numbers(total))


def _normalized(layer, call, **without):
  """What the layer's own code gives without its scale and shift.

  These are the operations of the layer's call once more, which TensorFlow shares.
  """
  attributes = vars(layer)
  before = {name: attributes[name] for name in without}
  attributes.update(without)
  try:
    normalized = type(layer).call(layer, *call.args, **call.kwargs)
  finally:
    attributes.update(before)
  return tf.cast(normalized, dense.wide(normalized.dtype))


@registry.register(
    layers.LayerNormalization,
    why=lambda layer: 'rms_scaling' if getattr(layer, 'rms_scaling', False) else '')
def layer_normalization(layer, call, errors):
  errors = tf.cast(errors, dense.wide(errors.dtype))
  axes = _axes(layer, errors.shape.rank)
  if layer.gamma is not None:
    yield layer.gamma, _vectors(errors * _normalized(layer, call, gamma=None, beta=None), axes)
  if layer.beta is not None:
    yield layer.beta, _vectors(errors, axes)


@registry.register(layers.GroupNormalization)
def group_normalization(layer, call, errors):
  errors = tf.cast(errors, dense.wide(errors.dtype))
  axes = _axes(layer, errors.shape.rank)
  if layer.gamma is not None:
    yield layer.gamma, _vectors(errors * _normalized(layer, call, scale=False, center=False), axes)
  if layer.beta is not None:
    yield layer.beta, _vectors(errors, axes)


if hasattr(layers, 'RMSNormalization'):  # Keras 3.

  @registry.register(layers.RMSNormalization)
  def rms_normalization(layer, call, errors):
    errors = tf.cast(errors, dense.wide(errors.dtype))
    yield layer.scale, _vectors(
        errors * _normalized(layer, call, scale=None), _axes(layer, errors.shape.rank))


@registry.register(layers.PReLU)
def prelu(layer, call, errors):
  inputs = tf.cast(call.inputs, errors.dtype)
  yield layer.alpha, dense.summed_to(tf.minimum(inputs, 0) * errors, tuple(layer.alpha.shape))
