"""Embedding: rows of a table."""

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive.clipping import factors
from tfdp_adaptive.clipping.layers import dense
from tfdp_adaptive.clipping.layers import registry


def rows(inputs, errors, variable):
  """The factor of a look-up of `inputs` [n, ...] in a [rows, d] table."""
  ids = tf.cast(inputs, tf.int32)
  if ids.shape.rank == 1:
    ids = ids[:, tf.newaxis]
  ids = dense.sequence(ids[..., tf.newaxis])[..., 0]
  errors = dense.sequence(errors)
  return factors.Rows(ids, errors, tuple(variable.shape))


@registry.register(compat.keras.layers.Embedding)
def embedding(layer, call, errors):
  yield layer.embeddings, rows(call.inputs, errors, layer.embeddings)
