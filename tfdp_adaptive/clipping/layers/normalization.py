"""Layers that scale and shift normalised inputs: a vector per example."""

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive.clipping import factors
from tfdp_adaptive.clipping.layers import dense
from tfdp_adaptive.clipping.layers import registry

keras = compat.keras


def _axes(layer, rank):
  axes = layer.axis if isinstance(layer.axis, (list, tuple)) else [layer.axis]
  return sorted(axis % rank for axis in axes)


def _vectors(x, axes):
  """[n, ...] summed over everything but the first axis and `axes`."""
  return factors.explicit(tf.reduce_sum(
      x, [i for i in range(1, x.shape.rank) if i not in axes]))


@registry.register(
    keras.layers.LayerNormalization,
    why=lambda layer: 'rms_scaling' if getattr(layer, 'rms_scaling', False) else '')
def layer_normalization(layer, call, errors):
  inputs, errors = (tf.cast(x, dense.wide(x.dtype)) for x in (call.inputs, errors))
  axes = _axes(layer, inputs.shape.rank)
  if layer.gamma is not None:
    mean, variance = tf.nn.moments(inputs, axes, keepdims=True)
    normalized = (inputs - mean) * tf.math.rsqrt(variance + layer.epsilon)
    yield layer.gamma, _vectors(errors * normalized, axes)
  if layer.beta is not None:
    yield layer.beta, _vectors(errors, axes)
