# SPDX-License-Identifier: Apache-2.0
"""Attention with a trainable scale of its scores: each example gets a scale of its own."""

from typing import Any, Callable, Dict, Tuple

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import factors
from tfdp_adaptive.clipping.layers import registry

layers = compat.keras.layers


def _tap(
    layer: compat.Layer, function: Callable[..., Any], tape: tf.GradientTape, args: Tuple[Any, ...],
    kwargs: Dict[str, Any]) -> Tuple[Any, Any, Any]:
  """Taps the scale, repeated per example, whose gradients are per-example gradients."""
  if layer.scale is None:
    return registry.at_output(layer, function, tape, args, kwargs)
  query = args[0][0]
  scale = tf.cast(tf.convert_to_tensor(layer.scale), query.dtype)
  one = [1, 1] if scale.shape.rank == 0 else [1, 1, *scale.shape]  # Beside queries and values.
  scales = tf.broadcast_to(tf.reshape(scale, [1, *one]), [tf.shape(query)[0], *one])
  tape.watch(scales)
  with registry.swapped(layer, scale=scales):
    outputs = function(*args, **kwargs)
  return outputs, scales, ()


@registry.register(
    layers.Attention, layers.AdditiveAttention, tap=_tap,
    why=lambda layer: 'concat' if getattr(layer, 'score_mode', 'dot') == 'concat' else '')
def attention(layer: compat.Layer, call: registry.Call, cotangents: tf.Tensor) -> registry.Factors:
  if layer.scale is not None:
    cotangents = tf.cast(cotangents, trees.wide(cotangents.dtype))
    yield layer.scale, factors.explicit(tf.reshape(cotangents, [-1, *layer.scale.shape]))
