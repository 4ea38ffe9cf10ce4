# SPDX-License-Identifier: Apache-2.0
"""Small models around a function, for tests of what an example may see of the others."""

import tensorflow as tf

from tfdp_adaptive import compat

keras = compat.keras
layers = keras.layers


class Apply(layers.Layer):
  """A function of the data, in training only."""

  def __init__(self, function):
    super().__init__()
    self.function = function

  def call(self, x, training=None):
    return self.function(x) if training else x


class Average(layers.Layer):
  """The mean of a sequence's vectors, up to the length of the longest of the batch."""

  def __init__(self, masked=False):
    super().__init__()
    self.masked = masked

  def call(self, ids_and_vectors, training=None):
    ids, vectors = ids_and_vectors
    used = tf.cast(ids != 0, tf.float32)
    if training:
      longest = tf.reduce_max(tf.cast(ids != 0, tf.int32) * tf.range(1, 1 + tf.shape(ids)[1]))
      vectors, used = vectors[:, :longest], used[:, :longest]
    if not self.masked:
      return tf.reduce_mean(vectors, 1)
    total = tf.reduce_sum(vectors * used[..., tf.newaxis], 1)
    return total / (tf.reduce_sum(used, 1, keepdims=True) + 1)


def sequential(*functions, dropout=False):
  """Functions between layers; they are all there is to training but, perhaps, dropout."""
  return keras.Sequential(
      [layers.Input((4,)), layers.Dense(6, 'tanh')] + [layers.Dropout(0.3)] * dropout
      + [Apply(function) for function in functions] + [layers.Dense(2)])


def first(function, dtype='float32'):
  """A function of the inputs themselves."""
  inputs = keras.Input((4,), dtype=dtype)
  return keras.Model(inputs, layers.Dense(2)(Apply(function)(inputs)))


def around(layer):
  """A layer between others."""
  return keras.Sequential([layers.Input((4,)), layers.Dense(6), layer, layers.Dense(2)])


def words(function, masked=None, vocabulary=9):
  ids = keras.Input((6,), dtype='int32')
  vectors = layers.Embedding(vocabulary, 4)(Apply(function)(ids))
  pooled = (layers.GlobalAveragePooling1D()(vectors) if masked is None
            else Average(masked)([ids, vectors]))
  return keras.Model(ids, layers.Dense(2)(pooled))


def across(function):
  return lambda: sequential(function)


def mean(x):
  return tf.reduce_mean(x, 0, keepdims=True)


def size(x):
  return tf.cast(tf.shape(x)[0], x.dtype)
