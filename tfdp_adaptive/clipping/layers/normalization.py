# SPDX-License-Identifier: Apache-2.0
"""Layers that scale and shift what they computed: a vector per example."""

from typing import Any, Tuple

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import factors
from tfdp_adaptive.clipping.layers import dense
from tfdp_adaptive.clipping.layers import registry

layers = compat.keras.layers


def _axes(layer: compat.Layer, rank: int) -> Tuple[int, ...]:
  axes = layer.axis if isinstance(layer.axis, (list, tuple)) else [layer.axis]
  axes = sorted(axis % rank for axis in axes)
  if 0 in axes:
    raise registry.Unsupported(f'Layer {layer.name!r} must not normalise over the batch. '
                               f'Received: axis={layer.axis}.')
  return tuple(axes)


def _vectors(x: tf.Tensor, axes: Tuple[int, ...]) -> factors.Explicit:
  """[n, ...] summed over everything but the first axis and `axes`."""
  others = [i for i in range(1, x.shape.rank) if i not in axes]
  total = tf.reduce_sum(x, others) if others else x
  return factors.explicit(total)


def normalized(layer: compat.Layer, call: registry.Call, **without: Any) -> tf.Tensor:
  """Returns the scale and shift of a layer, from its own code with attributes replaced.

  This repeats the operations of the layer's call. TensorFlow computes them only once.
  """
  with registry.swapped(layer, **without):
    outputs = type(layer).call(layer, *call.args, **call.kwargs)
  return tf.cast(outputs, trees.wide(outputs.dtype))


@registry.register(
    layers.LayerNormalization,
    why=lambda layer: 'rms_scaling' if getattr(layer, 'rms_scaling', False) else '')
def layer_normalization(
    layer: compat.Layer, call: registry.Call, cotangents: tf.Tensor) -> registry.Factors:
  cotangents = tf.cast(cotangents, trees.wide(cotangents.dtype))
  axes = _axes(layer, cotangents.shape.rank)
  if layer.gamma is not None:
    yield layer.gamma, _vectors(cotangents * normalized(layer, call, gamma=None, beta=None), axes)
  if layer.beta is not None:
    yield layer.beta, _vectors(cotangents, axes)


@registry.register(layers.GroupNormalization)
def group_normalization(
    layer: compat.Layer, call: registry.Call, cotangents: tf.Tensor) -> registry.Factors:
  cotangents = tf.cast(cotangents, trees.wide(cotangents.dtype))
  axes = _axes(layer, cotangents.shape.rank)
  if layer.gamma is not None:
    without = normalized(layer, call, scale=False, center=False)
    yield layer.gamma, _vectors(cotangents * without, axes)
  if layer.beta is not None:
    yield layer.beta, _vectors(cotangents, axes)


if hasattr(layers, 'RMSNormalization'):  # Keras 3.

  @registry.register(layers.RMSNormalization)
  def rms_normalization(
      layer: compat.Layer, call: registry.Call, cotangents: tf.Tensor) -> registry.Factors:
    cotangents = tf.cast(cotangents, trees.wide(cotangents.dtype))
    yield layer.scale, _vectors(
        cotangents * normalized(layer, call, scale=None), _axes(layer, cotangents.shape.rank))


@registry.register(layers.PReLU)
def prelu(layer: compat.Layer, call: registry.Call, cotangents: tf.Tensor) -> registry.Factors:
  inputs = tf.cast(call.inputs, cotangents.dtype)
  yield layer.alpha, dense.summed_to(tf.minimum(inputs, 0) * cotangents, tuple(layer.alpha.shape))
