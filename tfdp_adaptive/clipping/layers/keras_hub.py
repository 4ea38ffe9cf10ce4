# SPDX-License-Identifier: Apache-2.0
"""Handles KerasHub's own layers. Imported on demand, so KerasHub is not required.

All other layers of its models are Keras layers.
"""

import sys
from typing import Any, Callable

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import factors
from tfdp_adaptive.clipping import rows
from tfdp_adaptive.clipping.layers import convolution
from tfdp_adaptive.clipping.layers import dense
from tfdp_adaptive.clipping.layers import normalization
from tfdp_adaptive.clipping.layers import registry

# Module of a model -> (class, name of its scale, scale without effect).
_NORMALIZATIONS = {
    'gemma.rms_normalization': ('RMSNormalization', 'scale', 0.0),
    'llama.llama_layernorm': ('LlamaLayerNorm', 'scale', 1.0),
    'mistral.mistral_layer_norm': ('MistralLayerNormalization', 'scale', 1.0),
    'mixtral.mixtral_layer_norm': ('MixtralLayerNormalization', 'scale', 1.0),
    'phi3.phi3_layernorm': ('Phi3LayerNorm', 'scale', 1.0),
    'qwen.qwen_layernorm': ('QwenLayerNorm', 'scale', 1.0),
    't5.t5_layer_norm': ('T5LayerNorm', 'weight', 1.0),
}


def _register(
    module: str, name: str, **kwargs: Any) -> Callable[[registry.Gradients], registry.Gradients]:
  """Calls `registry.register` for a class that this version may not have."""
  layer_class = getattr(sys.modules.get(f'keras_hub.src.{module}'), name, None)
  return (lambda gradients: gradients) if layer_class is None else registry.register(
      layer_class, **kwargs)


for _module, (_name, _scale, _neutral) in _NORMALIZATIONS.items():
  _register(f'models.{_module}', _name)(normalization.scaled(_scale, **{_scale: _neutral}))


@_register('layers.modeling.position_embedding', 'PositionEmbedding')
def position_embedding(
    layer: compat.Layer, call: registry.Call, cotangents: tf.Tensor) -> registry.Factors:
  """Yields the rows of a table from `start_index` on, or at given `positions`."""
  table, cotangents = layer.position_embeddings, dense.sequence(cotangents)
  positions = call.argument(2, 'positions')
  if positions is None:
    start, length = call.argument(1, 'start_index', 0), tf.shape(cotangents)[1]
    rest = table.shape[0] - start - length
    whole = tf.pad(cotangents, [[0, 0], [start, rest], [0, 0]])
    yield table, factors.explicit(tf.ensure_shape(whole, [None, *table.shape]))
  else:
    positions = tf.cast(positions, tf.int32) + tf.zeros(tf.shape(cotangents)[:2], tf.int32)
    yield table, rows.Rows(positions, cotangents, tuple(table.shape))


@_register('layers.modeling.masked_lm_head', 'MaskedLMHead', tap=registry.at_activation)
def masked_lm_head(
    layer: compat.Layer, call: registry.Call, cotangents: tf.Tensor) -> registry.Factors:
  """Yields nothing for the layers inside, such as the table: they have entries of their own."""
  flat = dense.sequence(cotangents)
  if layer.token_embedding is None:
    places = call.argument(1, 'mask_positions')
    inputs = tf.gather(call.inputs, tf.cast(places, tf.int32), batch_dims=1)
    inputs = layer._intermediate_layer_norm(layer._intermediate_dense(inputs))
    yield layer._kernel, factors.Outer(
        dense.sequence(inputs), flat, tuple(layer._kernel.shape))
  yield layer._bias, dense.summed_to(flat, tuple(layer._bias.shape))


def _at_bias(
    layer: compat.Layer, function: Callable[..., trees.Tree], call: registry.Call,
    tape: tf.GradientTape) -> registry.Call:
  """Taps the bias by relative position, a copy for each example."""
  taps, compute = [], layer.compute_bias

  def tapped(*positions: trees.Tree, **more: trees.Tree) -> tf.Tensor:
    bias = compute(*positions, **more)
    bias = tf.tile(bias, [tf.shape(call.inputs)[0]] + [1] * (bias.shape.rank - 1))
    bias.set_shape([call.inputs.shape[0]] + bias.shape[1:].as_list())
    tape.watch(bias)
    taps.append((bias, positions, more))
    return bias

  with compat.swapped(layer, compute_bias=tapped):
    outputs = function(*call.args, **call.kwargs)
  if len(taps) != 1:
    raise registry.Unsupported(
        f'Layer {layer.name!r} must compute its bias by relative position when it is called. '
        f'Received: a call that did so {len(taps)} times. Use {registry.WHOLE}.')
  (bias, *where), = taps
  return call._replace(outputs=outputs, taps=bias, saved=where)


@_register('models.t5.t5_multi_head_attention', 'T5MultiHeadAttention', tap=_at_bias,
           why=lambda layer: '' if layer.use_relative_attention_bias else 'no bias of its own')
def t5_attention(
    layer: compat.Layer, call: registry.Call, cotangents: tf.Tensor) -> registry.Factors:
  """Yields a number per bucket of relative positions and head; the projections are `Dense`."""
  positions, more = call.saved
  cotangents = tf.cast(cotangents, trees.wide(cotangents.dtype))
  table = layer.relative_attention_bias
  identity = tf.eye(table.shape[0], dtype=cotangents.dtype)
  with compat.swapped(layer, relative_attention_bias=identity):
    buckets = layer.compute_bias(*positions, **more)[0]  # [buckets, queries, keys], of 0 and 1.
  yield table, factors.explicit(tf.einsum('nhqk,bqk->nbh', cotangents, buckets))


@_register('models.vit.vit_layers', 'ViTPatchingAndEmbedding', whole=True)
def vit_embedding(
    layer: compat.Layer, call: registry.Call, cotangents: tf.Tensor) -> registry.Factors:
  """Yields the class token, the patches, and the table of positions that all examples share."""
  cotangents = dense.sequence(cotangents)
  positions = layer.position_embedding.embeddings
  yield positions, factors.explicit(cotangents)
  if layer.use_class_token:
    yield layer.class_token, dense.summed_to(cotangents[:, :1], tuple(layer.class_token.shape))
    cotangents = cotangents[:, 1:]
  patches = layer.patch_embedding
  grid = [size // patch for size, patch in zip(layer.image_size, layer.patch_size)]
  cotangents = tf.reshape(cotangents, [-1, *grid, patches.filters])
  if layer.data_format == 'channels_first':
    cotangents = tf.transpose(cotangents, [0, 3, 1, 2])
  yield from convolution.convolution(patches, registry.Call(call.args, {}, None), cotangents)
