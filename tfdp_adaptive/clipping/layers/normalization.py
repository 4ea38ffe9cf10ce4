# SPDX-License-Identifier: Apache-2.0
"""Layers that scale and shift their results or scores by a vector."""

from typing import Callable

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import factors
from tfdp_adaptive.clipping.layers import dense
from tfdp_adaptive.clipping.layers import registry

layers = compat.keras.layers


def _normalized(layer: compat.Layer, call: registry.Call, **without: object) -> tf.Tensor:
  """Returns the scale and shift of a layer, from its own code with attributes replaced.

  This repeats the operations of the layer's call, which TensorFlow computes only once.
  """
  with compat.swapped(layer, **without):
    outputs = type(layer).call(layer, *call.args, **call.kwargs)
  return tf.cast(outputs, trees.wide(outputs.dtype))


def scaled(scale: str, shift: str = '', /, **without: object) -> registry.Gradients:
  """Returns the `gradients` of layers that scale, and may shift, their result.

  Args:
    scale: Name of the layer's scale, which may be None.
    shift: Name of its shift.
    **without: Attributes with which the layer does neither.
  """
  def gradients(
      layer: compat.Layer, call: registry.Call, cotangents: tf.Tensor) -> registry.Factors:
    cotangents = tf.cast(cotangents, trees.wide(cotangents.dtype))
    rank, axes = cotangents.shape.rank, getattr(layer, 'axis', -1)
    kept = [axis % rank for axis in (axes if isinstance(axes, (list, tuple)) else [axes])]
    if 0 in kept:
      raise registry.Unsupported(f'Layer {layer.name!r} must not normalise over the batch. '
                                 f'Received: axis={axes}.')
    summed = [i for i in range(1, rank) if i not in kept]
    if getattr(layer, scale) is not None:
      products = cotangents * _normalized(layer, call, **without)
      yield getattr(layer, scale), factors.explicit(tf.reduce_sum(products, summed))
    if shift and getattr(layer, shift) is not None:
      yield getattr(layer, shift), factors.explicit(tf.reduce_sum(cotangents, summed))
  return gradients


registry.register(
    layers.LayerNormalization,
    why=lambda layer: 'rms_scaling' if getattr(layer, 'rms_scaling', False) else '')(
        scaled('gamma', 'beta', gamma=None, beta=None))
registry.register(layers.GroupNormalization)(scaled('gamma', 'beta', scale=False, center=False))
if hasattr(layers, 'RMSNormalization'):  # Keras 3.
  registry.register(layers.RMSNormalization)(scaled('scale', scale=None))


@registry.register(layers.PReLU)
def prelu(layer: compat.Layer, call: registry.Call, cotangents: tf.Tensor) -> registry.Factors:
  inputs = tf.cast(call.inputs, cotangents.dtype)
  yield layer.alpha, dense.summed_to(tf.minimum(inputs, 0) * cotangents, tuple(layer.alpha.shape))


def _at_scale(
    layer: compat.Layer, function: Callable[..., trees.Tree], call: registry.Call,
    tape: tf.GradientTape) -> registry.Call:
  """Taps the scale, repeated per example, whose gradients are per-example gradients."""
  if layer.scale is None:
    return registry.at_output(layer, function, call, tape)
  query = call.inputs[0]
  scale = tf.cast(tf.convert_to_tensor(layer.scale), query.dtype)
  one = [1, 1] if scale.shape.rank == 0 else [1, 1, *scale.shape]  # Axes of queries and values.
  scales = tf.broadcast_to(tf.reshape(scale, [1, *one]), [tf.shape(query)[0], *one])
  tape.watch(scales)
  with compat.swapped(layer, scale=scales):
    outputs = function(*call.args, **call.kwargs)
  return call._replace(outputs=outputs, taps=scales)


@registry.register(
    layers.Attention, layers.AdditiveAttention, tap=_at_scale,
    why=lambda layer: 'concat' if getattr(layer, 'score_mode', 'dot') == 'concat' else '')
def attention(layer: compat.Layer, call: registry.Call, cotangents: tf.Tensor) -> registry.Factors:
  if layer.scale is not None:
    cotangents = tf.cast(cotangents, trees.wide(cotangents.dtype))
    yield layer.scale, factors.explicit(tf.reshape(cotangents, [-1, *layer.scale.shape]))
