# SPDX-License-Identifier: Apache-2.0
"""Tasks of `tfdp.federated` on one's own text: next words, and tags of questions."""

from __future__ import annotations

import collections
from typing import Any, Callable, Dict, List, Optional, Sequence

import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive.federated import tasks

from . import corpus
from . import next_word as next_word_lib
from . import tag_prediction as tags_lib


def next_word(
    sentences: Sequence[corpus.Sentence], vocabulary: tasks.Words,
    build_model: Callable[[int], Any], *, batch_size: int = 16, max_examples: int = 64,
    epochs: int = 1) -> tasks.Task:
  """Next-word prediction.

  Args:
    sentences: Iterable of `corpus.Sentence` that know their client.
    vocabulary: Words; PUBLIC, or a `PrivateVocabulary`.
    build_model: `number of word ids -> Keras model` from [n, length, context]
      word ids to [n, length, number of ids] logits.
    batch_size: Sentences per local step.
    max_examples: Sentences of one user that a round uses at most.
    epochs: Local epochs.
  """
  vocabulary = tasks.listed(vocabulary)
  parts = corpus.split(list(sentences))
  num_ids = next_word_lib.FIRST_WORD + len(vocabulary)
  users = tfdp.federated.Users(
      {client: _sentence_examples(mine, vocabulary)
       for client, mine in corpus.by_client(parts.train).items()},
      batch_size=batch_size, max_examples=max_examples, epochs=epochs)

  return tasks.Task(
      users, held_out_sentences(parts.test, vocabulary), lambda: build_model(num_ids), (num_ids,),
      tasks.WordLoss(), (tasks.WordAccuracy, tasks.WordCrossEntropy))


def held_out_sentences(
    sentences: Sequence[corpus.Sentence], vocabulary: Sequence[str]) -> tf.data.Dataset:
  """`tf.data.Dataset` of batches for `evaluator`."""
  return tf.data.Dataset.from_tensor_slices(_sentence_examples(sentences, vocabulary)).batch(256)


def tag_prediction(
    questions: Sequence[tags_lib.Question], words: Sequence[str], tags: Sequence[str], *,
    batch_size: int = 16, max_examples: int = 64, epochs: int = 1) -> tasks.Task:
  """Tags of questions by logistic regression on bags of words (Li et al., ICLR 2023).

  Args:
    questions: `tag_prediction.Question`s.
    words: Vocabulary; PUBLIC, or from `private_vocabulary`.
    tags: The tags to predict; PUBLIC.
    batch_size: Questions per local step.
    max_examples: Questions of one user that a round uses at most.
    epochs: Local epochs.
  """
  by_user: Dict[Any, List[Any]] = {}
  for question in questions:
    by_user.setdefault(question.client, []).append(question)
  parts = {client: _part(client) for client in by_user}
  shape = lambda mine: collections.OrderedDict(zip('xy', tags_lib.examples(mine, words, tags)))
  users = tfdp.federated.Users(
      {client: shape(mine) for client, mine in by_user.items() if parts[client] == 'train'},
      batch_size=batch_size, max_examples=max_examples, epochs=epochs)
  held_out = [q for client, mine in by_user.items() if parts[client] == 'test' for q in mine]

  def model_fn() -> Any:
    return tf.keras.Sequential([
        tf.keras.layers.Input((len(words),)),
        tf.keras.layers.Dense(len(tags), kernel_initializer='zeros')])

  return tasks.Task(
      users, tf.data.Dataset.from_tensor_slices(shape(held_out)).batch(256), model_fn,
      (len(words), len(tags)), TagLoss(),
      (tf.keras.metrics.Recall(top_k=5, name='recall_at_5'),
       tf.keras.metrics.Precision(top_k=1, name='precision_at_1')))


def _sentence_examples(sentences: Sequence[corpus.Sentence], vocabulary: Sequence[str]) -> Any:
  return collections.OrderedDict(zip('xy', next_word_lib.examples(sentences, vocabulary)))


def _part(client: Optional[str]) -> Optional[str]:
  """The part of a user, by the same fixed hash as of sentences."""
  parts = corpus.split([corpus.Sentence(client, ())])
  return next(name for name, sentences in parts._asdict().items() if sentences)


class TagLoss(tf.keras.losses.Loss):
  """Sum over the tags of the binary cross-entropy."""

  def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(
        tf.nn.sigmoid_cross_entropy_with_logits(labels=y_true, logits=y_pred), -1)
