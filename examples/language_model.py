# SPDX-License-Identifier: Apache-2.0
"""A small next-word model in Keras, its loss and its evaluation."""

from __future__ import annotations

from typing import Optional, Tuple, TYPE_CHECKING

import numpy as np
import tensorflow as tf

from . import next_word

if TYPE_CHECKING:
  from tfdp_adaptive import compat

WIDTH = 16  # Width of the word embedding and of the hidden layer.
_BATCH = 512


def build(
    num_ids: int, length: int = next_word.LENGTH, context: int = next_word.CONTEXT,
    log_frequencies: Optional[np.ndarray] = None) -> compat.Model:
  """Embeds the context words, one hidden layer, logits; equal weights at every call.

  Args:
    num_ids: Vocabulary, unknown word and padding.
    length: Words of a sentence.
    context: Words that the next one is predicted from.
    log_frequencies: [num_ids] PUBLIC log frequencies, the fixed bias of the logits: how
      often words come need then not be learned, and no noise goes into it. None: a
      bias that is learned.
  """
  layers, initializers = tf.keras.layers, tf.keras.initializers
  model = tf.keras.Sequential([
      layers.Input([length, context], dtype='int32'),
      layers.Embedding(
          num_ids, WIDTH, embeddings_initializer=initializers.RandomUniform(-.05, .05, seed=1)),
      layers.Reshape([length, context * WIDTH]),
      layers.Dense(
          WIDTH, activation='tanh', kernel_initializer=initializers.GlorotUniform(seed=2)),
      layers.Dense(num_ids, use_bias=log_frequencies is None,
                   kernel_initializer=initializers.GlorotUniform(seed=3)),
  ])
  if log_frequencies is not None:
    model.add(layers.Rescaling(1.0, offset=[float(value) for value in log_frequencies]))
  return model


def sentence_loss(targets: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
  """[n]: mean cross-entropy over the words of each sentence; zero for no words."""
  losses, words = _word_losses(targets, logits)
  return tf.math.divide_no_nan(tf.reduce_sum(losses, -1), tf.reduce_sum(words, -1))


def _word_losses(targets: tf.Tensor, logits: tf.Tensor) -> Tuple[tf.Tensor, tf.Tensor]:
  """Cross-entropies and which of them count, both [n, length]."""
  targets = tf.cast(targets, tf.int32)
  words = tf.cast(tf.not_equal(targets, next_word.PADDING), logits.dtype)
  losses = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits)
  return losses * words, words


class Evaluator:
  """`(loss, accuracy)` of a model per held-out word. Exact: NOT a private number."""

  def __init__(self, model: compat.Model, examples: Tuple[np.ndarray, np.ndarray]) -> None:
    self._model = model
    self._examples = tf.data.Dataset.from_tensor_slices(examples).batch(_BATCH)
    self._totals = tf.function(self._batch_totals)

  def __call__(self) -> Tuple[float, float]:
    loss, right, words = np.sum([self._totals(x, y) for x, y in self._examples], axis=0)
    return float(loss / words), float(right / words)

  def _batch_totals(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    logits = self._model(x, training=False)
    losses, words = _word_losses(y, logits)
    right = words * tf.cast(tf.equal(tf.argmax(logits, -1, y.dtype), y), words.dtype)
    return tf.stack([tf.reduce_sum(losses), tf.reduce_sum(right), tf.reduce_sum(words)])
