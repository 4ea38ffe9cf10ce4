# SPDX-License-Identifier: Apache-2.0
"""Tasks of `tfdp.federated`: next words and tags of texts, and images from TFF's files."""

from __future__ import annotations

import collections
import functools
from typing import Any, Callable, Dict, List, Optional, Sequence

import numpy as np
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive.federated import tasks

from . import corpus
from . import tag_prediction as tags_lib


def next_word(
    sentences: Sequence[corpus.Sentence], vocabulary: tasks.Words,
    build_model: Callable[[int], Any], *, batch_size: int = 16, max_examples: int = 64,
    epochs: int = 1, length: int = 20, predict_unknown: bool = True) -> tasks.Task:
  """Next words, with the word ids of `tfdp.federated.tasks.stackoverflow`.

  Args:
    sentences: Iterable of `corpus.Sentence` that know their client.
    vocabulary: Words; PUBLIC, or a `PrivateVocabulary`.
    build_model: `number of ids -> Keras model` from [n, length] ids to [n, length, number of
      ids] logits.
    batch_size: Sentences per local step.
    max_examples: The largest number of sentences of one user in a round.
    epochs: Local epochs.
    length: The number of ids of a sentence that are used.
    predict_unknown: Whether words that are not in the vocabulary are predicted, as one word;
      else they are only read.
  """
  words = tasks.listed(vocabulary)
  ids = {word: number for number, word in enumerate(words, 1)}

  def encode(mine: Sequence[corpus.Sentence]) -> Any:
    made = tasks.sequences([one.words for one in mine], ids, length)
    if not predict_unknown:
      made['y'][made['y'] == len(words) + 1] = 0
    return made

  parts = corpus.split(list(sentences))
  num_ids = len(words) + 4
  users = tfdp.federated.Users(
      {client: encode(mine) for client, mine in corpus.by_client(parts.train).items()},
      batch_size=batch_size, max_examples=max_examples, epochs=epochs)
  return tasks.Task(
      users, tf.data.Dataset.from_tensor_slices(encode(parts.test)).batch(256),
      lambda: build_model(num_ids), (num_ids,), tasks.WordLoss(),
      (functools.partial(tasks.WordAccuracy, known=len(words)), tasks.WordCrossEntropy))


def emnist(
    path: str, build_model: Optional[Callable[[int], Any]] = None, *, batch_size: int = 20,
    max_examples: int = 418, epochs: int = 1, held_out_users: int = 3400) -> tasks.Task:
  """Handwritten characters of 62 classes by their writers, from TFF's SQLite file.

  The file's writers are the users. Its test examples are of the same writers, so metrics on
  them are not private.

  Args:
    path: `emnist_all.sqlite`, decompressed.
    build_model: `number of classes -> Keras model` that returns logits; by default the usual
      convolutions.
    batch_size: Examples per local step.
    max_examples: Examples of one user that a round uses at most.
    epochs: Local epochs.
    held_out_users: Number of users whose test examples are evaluated on.
  """
  features = dict(pixels=tf.io.FixedLenFeature([28, 28, 1], tf.float32),
                  label=tf.io.FixedLenFeature([], tf.int64))
  return _images(
      path, features, lambda columns: columns['pixels'], 62, build_model or _convolutions,
      held_out_users, batch_size=batch_size, max_examples=max_examples, epochs=epochs)


def cifar100(
    path: str, build_model: Optional[Callable[[int], Any]] = None, *, batch_size: int = 20,
    max_examples: int = 100, epochs: int = 1, held_out_users: int = 100) -> tasks.Task:
  """Photographs of 100 classes, of 500 artificial users and 100 others, from TFF's SQLite file.

  Images are standardized one by one. For the arguments see `emnist`; the model is the usual
  residual network of 18 layers, with normalization in groups of channels.
  """
  features = dict(image=tf.io.FixedLenFeature([32, 32, 3], tf.int64),
                  label=tf.io.FixedLenFeature([], tf.int64))
  return _images(
      path, features, lambda columns: tf.image.per_image_standardization(
          tf.cast(columns['image'], tf.float32)).numpy(), 100, build_model or _residual,
      held_out_users, batch_size=batch_size, max_examples=max_examples, epochs=epochs)


def _images(
    path: str, features: Dict[str, Any], images: Callable[[Any], np.ndarray], classes: int,
    build_model: Callable[[int], Any], held_out_users: int, **sizes: Any) -> tasks.Task:
  encode = lambda columns: collections.OrderedDict(
      x=images(columns), y=columns['label'].astype(np.int32))
  return tasks.Task(
      *tasks.of_file(path, features, encode, 'test', held_out_users, **sizes),
      lambda: build_model(classes), (classes,),
      tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
      (functools.partial(tf.keras.metrics.SparseCategoricalAccuracy, name='accuracy'),))


def _convolutions(classes: int) -> Any:
  layers = tf.keras.layers
  return tf.keras.Sequential([
      layers.Input([28, 28, 1]), layers.Conv2D(32, 3, activation='relu'),
      layers.Conv2D(64, 3, activation='relu'), layers.MaxPool2D(), layers.Dropout(.25),
      layers.Flatten(), layers.Dense(128, activation='relu'), layers.Dropout(.5),
      layers.Dense(classes)])


def _residual(classes: int) -> Any:
  layers = tf.keras.layers
  normed = lambda x: layers.GroupNormalization(2, epsilon=1e-5)(x)
  convolved = lambda x, width, size, stride: normed(layers.Conv2D(
      width, size, stride, padding='same', use_bias=False)(x))
  images = layers.Input([32, 32, 3])
  x = layers.ReLU()(convolved(images, 64, 3, 1))
  for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
    for step in (stride, 1):
      inner = convolved(layers.ReLU()(convolved(x, width, 3, step)), width, 3, 1)
      kept = x if inner.shape == x.shape else convolved(x, width, 1, step)
      x = layers.ReLU()(layers.Add()([inner, kept]))
  return tf.keras.Model(
      images, layers.Dense(classes)(layers.GlobalAveragePooling2D()(x)))


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


def _part(client: Optional[str]) -> Optional[str]:
  """The part of a user, by the same fixed hash as of sentences."""
  parts = corpus.split([corpus.Sentence(client, ())])
  return next(name for name, sentences in parts._asdict().items() if sentences)


class TagLoss(tf.keras.losses.Loss):
  """Sum over the tags of the binary cross-entropy."""

  def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(
        tf.nn.sigmoid_cross_entropy_with_logits(labels=y_true, logits=y_pred), -1)
