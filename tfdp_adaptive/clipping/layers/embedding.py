# SPDX-License-Identifier: Apache-2.0
"""Embeddings, whose table a softmax may share."""

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive.clipping import factors
from tfdp_adaptive.clipping import rows
from tfdp_adaptive.clipping.layers import dense
from tfdp_adaptive.clipping.layers import registry

layers = compat.keras.layers


def _why(layer: compat.Layer) -> str:
  if getattr(layer, 'sparse', False) or getattr(layer, '_use_one_hot_matmul', False):
    return 'sparse'
  return dense.quantized(layer)


@registry.register(layers.Embedding, why=_why)
def embedding(layer: compat.Layer, call: registry.Call, cotangents: tf.Tensor) -> registry.Factors:
  ids = tf.cast(call.inputs, tf.int32)
  ids = dense.sequence(tf.cast(ids, tf.int32)[..., tf.newaxis])[..., 0]
  cotangents = dense.sequence(cotangents)
  scale = dense.lora_scale(layer)
  if scale is None:
    yield layer.embeddings, rows.Rows(ids, cotangents, tuple(layer.embeddings.shape))
  else:  # embeddings + scale * a b
    a, b = (scale * tf.cast(tf.convert_to_tensor(v), cotangents.dtype)
            for v in (layer.lora_embeddings_a, layer.lora_embeddings_b))
    yield layer.lora_embeddings_a, rows.Rows(
        ids, tf.einsum('ntd,rd->ntr', cotangents, b), tuple(layer.lora_embeddings_a.shape))
    yield layer.lora_embeddings_b, factors.Outer(
        tf.gather(a, ids), cotangents, tuple(layer.lora_embeddings_b.shape))


if hasattr(layers, 'ReversibleEmbedding'):  # Keras 3.

  @registry.register(
      layers.ReversibleEmbedding,
      why=lambda layer: 'LoRA' if dense.lora_scale(layer) is not None else _why(layer))
  def reversible_embedding(
      layer: compat.Layer, call: registry.Call, cotangents: tf.Tensor) -> registry.Factors:
    reverse = call.args[1] if len(call.args) > 1 else call.kwargs.get('reverse', False)
    if not reverse:
      yield from embedding(layer, call, cotangents)
      return
    inputs, flat = dense.sequence(call.inputs), dense.sequence(cotangents)
    if layer.logit_soft_cap is not None:
      outputs = dense.sequence(call.outputs) / layer.logit_soft_cap
      flat *= 1 - tf.square(outputs)
    if getattr(layer, 'quantization_mode', None):
      return
    if layer.tie_weights:
      yield layer.embeddings, factors.Outer(flat, inputs, tuple(layer.embeddings.shape))
    else:
      yield layer.reverse_embeddings, factors.Outer(
          inputs, flat, tuple(layer.reverse_embeddings.shape))
