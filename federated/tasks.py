# SPDX-License-Identifier: Apache-2.0
"""Users, a model and held-out users of known data sets.

The only fact about privacy in a task is whether its vocabulary was given, or chosen privately from
the users' own words.
"""

import collections
import functools
import itertools
from typing import Any, Callable, Dict, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np
import tensorflow as tf

from tfdp_adaptive.estimates import vocabulary as vocabulary_lib

from . import sources
from . import users as users_lib

_PADDING = 0  # The id after the end of a sentence, which no loss or metric counts.
_TOKENS = {'tokens': tf.io.FixedLenFeature([], tf.string)}
Words = Union[Sequence[str], vocabulary_lib.PrivateVocabulary]


class Task(NamedTuple):
  """Attributes:

    users: The training data, in a form that `simulate` takes.
    held_out: `tf.data.Dataset` of batches of other users.
    model_fn: Makes the model; `build_private_fed_avg` takes `model_fn`, `loss` and `metrics`.
    items: The number of word ids, or the numbers of words and of tags.
    loss: The loss of a Keras model; None where `model_fn` makes a TFF model, which has its own.
    metrics: The metrics of a Keras model.
  """

  users: Any
  held_out: tf.data.Dataset
  model_fn: Callable
  items: Tuple[int, ...]
  loss: Any = None
  metrics: Tuple[Any, ...] = ()


def stackoverflow(
    path: sources.Path, vocabulary: Words, build_model: Optional[Callable[[int], Any]] = None, *,
    batch_size: int = 16, max_examples: int = 128, epochs: int = 1, length: int = 20,
    held_out: str = 'heldout', held_out_users: int = 100) -> Task:
  """Returns next words of StackOverflow, from TFF's SQLite file, read user by user without TFF.

  Word ids are those of `tff.simulation.baselines.stackoverflow`: 0 is padding. The vocabulary
  follows, and then an unknown word, the beginning and the end of a sentence.

  Args:
    path: `stackoverflow.sqlite`, decompressed.
    vocabulary: Words; PUBLIC, or a `PrivateVocabulary` of `stackoverflow_words(path)`.
    build_model: A function from the number of ids to a Keras model, which maps [n, length] ids to
      [n, length, number of ids] logits. By default it is the usual LSTM, with 4,050,748 parameters
      for 10,000 words.
    batch_size: Sentences per local step.
    max_examples: The largest number of sentences of one user in a round.
    epochs: Local epochs.
    length: The number of ids of a sentence that are used.
    held_out: Split to evaluate on. Users of 'heldout' are in no other split. Most users of 'test'
      are also trained on, so measurements on 'test' are exact numbers about them.
    held_out_users: The number of users to evaluate on; the first ones are taken.
  """
  words = listed(vocabulary)
  ids = {word.encode(): number for number, word in enumerate(words, 1)}

  def encode(columns: Any) -> Any:
    return sequences([text.split(b' ') for text in columns['tokens']], ids, length)

  num_ids = len(words) + 4
  return Task(
      *of_file(path, _TOKENS, encode, held_out, held_out_users, batch_size=batch_size,
               max_examples=max_examples, epochs=epochs),
      lambda: (build_model or usual_lstm)(num_ids), (num_ids,), WordLoss(),
      (functools.partial(WordAccuracy, known=len(words)), WordCrossEntropy))


def of_file(
    path: sources.Path, features: Mapping[str, Any], preprocess: sources.Preprocess, held_out: str,
    held_out_users: int, **sizes: Any) -> Tuple[users_lib.Users, tf.data.Dataset]:
  """Returns the users of TFF's SQLite file, and test batches with other users or other examples.

  Args:
    path: The file.
    features: As for `Users.from_sqlite`. `preprocess` has the same meaning there.
    preprocess: `{feature: [n, ...] array} -> nest of [n, ...] arrays`.
    held_out: Split to evaluate on.
    held_out_users: The number of users to evaluate on; the first ones are taken.
    **sizes: `batch_size`, `epochs`, `max_examples`, as for `Users`.
  """
  train, other = (sources.Database(path, split, sources.Protos(features), preprocess)
                  for split in ('train', held_out))
  first = {user: other[user] for user in itertools.islice(other, held_out_users)}
  return (users_lib.Users(train, **sizes),
          users_lib.Users(first, batch_size=sizes['batch_size']).all_examples())


def stackoverflow_words(path: sources.Path, split: str = 'train') -> sources.Source:
  """Returns `{user: all words}` of TFF's file, for `vocabulary.private_vocabulary`."""
  return sources.Database(
      path, split, sources.Protos(_TOKENS),
      lambda columns: np.array([word.decode() for text in columns['tokens']
                                for word in text.split()]))


def sequences(
    sentences: Sequence[Sequence[Any]], ids: Mapping[Any, int], length: int) -> Dict[str, Any]:
  """Returns x, the inputs, and y, the ids that follow them, both [n, length] int32.

  Args:
    sentences: The words of every sentence.
    ids: {word: 1, 2, ...}. The three ids after the vocabulary stand for an unknown word, the
      beginning and the end of a sentence.
    length: The number of ids of a sentence that are used.
  """
  unknown, begin, end = len(ids) + 1, len(ids) + 2, len(ids) + 3
  tokens = np.zeros([len(sentences), length + 1], np.int32)
  for row, words in zip(tokens, sentences):
    sentence = [begin, *(ids.get(word, unknown) for word in words[:length]), end][:length + 1]
    row[:len(sentence)] = sentence
  return collections.OrderedDict(x=tokens[:, :-1].copy(), y=tokens[:, 1:].copy())


def usual_lstm(num_ids: int) -> Any:
  """Returns the usual model for StackOverflow: one LSTM of 670 units between two of 96."""
  layers = tf.keras.layers
  return tf.keras.Sequential([
      layers.Input([None], dtype=tf.int32), layers.Embedding(num_ids, 96),
      layers.LSTM(670, return_sequences=True), layers.Dense(96), layers.Dense(num_ids)])


def listed(vocabulary: Words) -> Sequence[str]:
  """Returns the words of a vocabulary, public or private."""
  if isinstance(vocabulary, vocabulary_lib.PrivateVocabulary):
    return vocabulary.words
  return vocabulary


class WordLoss(tf.keras.losses.Loss):
  """Mean cross-entropy over the words of a sentence, then over sentences."""

  def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    losses, words = _word_losses(y_true, y_pred)
    return tf.math.divide_no_nan(tf.reduce_sum(losses, -1), tf.reduce_sum(words, -1))


class WordAccuracy(tf.keras.metrics.Mean):
  """Fraction of the words that are predicted; words with an id above `known` do not count."""

  def __init__(
      self, name: str = 'accuracy', known: Optional[int] = None, **kwargs: Any) -> None:
    super().__init__(name=name, **kwargs)
    self._known = known

  def get_config(self) -> Dict[str, Any]:
    return {**super().get_config(), 'known': self._known}

  def update_state(self, y_true: tf.Tensor, y_pred: tf.Tensor, sample_weight: Any = None) -> Any:
    del sample_weight
    right = tf.equal(tf.argmax(y_pred, -1, y_true.dtype), y_true)
    words = _word_losses(y_true, y_pred)[1]
    if self._known is not None:
      words *= tf.cast(y_true <= self._known, words.dtype)
    return super().update_state(tf.cast(right, y_pred.dtype), words)


class WordCrossEntropy(tf.keras.metrics.Mean):
  """Mean cross-entropy per word."""

  def __init__(self, name: str = 'word_loss', **kwargs: Any) -> None:
    super().__init__(name=name, **kwargs)

  def update_state(self, y_true: tf.Tensor, y_pred: tf.Tensor, sample_weight: Any = None) -> Any:
    del sample_weight
    return super().update_state(*_word_losses(y_true, y_pred))


def _word_losses(y_true: tf.Tensor, y_pred: tf.Tensor) -> Tuple[tf.Tensor, tf.Tensor]:
  """Cross-entropies and which of them count, both [n, length]; padding does not."""
  words = tf.cast(tf.not_equal(y_true, _PADDING), y_pred.dtype)
  losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
      labels=tf.cast(y_true, tf.int32), logits=y_pred)
  return losses * words, words
