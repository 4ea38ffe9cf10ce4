# SPDX-License-Identifier: Apache-2.0
"""The models of the clipping benchmark, for whichever Keras they are given."""

from typing import Callable, NamedTuple

import numpy as np


class Task(NamedTuple):
  """A model and a batch of made-up data."""

  build: Callable  # keras module -> model
  x: np.ndarray
  y: np.ndarray  # Classes: [n] or [n, T].


def mlp():
  """784-512-512-10, batch 256."""
  def build(keras):
    layers = keras.layers
    return keras.Sequential([
        keras.Input((784,)), layers.Dense(512, activation='relu'),
        layers.Dense(512, activation='relu'), layers.Dense(10)])
  return Task(build, _floats(256, 784), _ids(10, 256))


def cnn():
  """The MNIST network of tensorflow_privacy's tutorials, batch 256."""
  def build(keras):
    layers = keras.layers
    return keras.Sequential([
        keras.Input((28, 28, 1)),
        layers.Conv2D(16, 8, strides=2, padding='same', activation='relu'),
        layers.MaxPooling2D(2, 1),
        layers.Conv2D(32, 4, strides=2, padding='valid', activation='relu'),
        layers.MaxPooling2D(2, 1), layers.Flatten(), layers.Dense(32, activation='relu'),
        layers.Dense(10)])
  return Task(build, _floats(256, 28, 28, 1), _ids(10, 256))


def lstm(batch=32, length=35, vocabulary=8000, width=120):
  """PAGAN's next-word model of WikiText-2 (Asi et al. 2021, section 6.2), 2.16 M parameters."""
  def build(keras):
    layers = keras.layers
    return keras.Sequential([
        keras.Input((length,), dtype='int32'), layers.Embedding(vocabulary, width),
        layers.LSTM(width, return_sequences=True), layers.LSTM(width, return_sequences=True),
        layers.Dense(vocabulary)])
  return Task(build, _ids(vocabulary, batch, length), _ids(vocabulary, batch, length))


def transformer(batch=32, blocks=2, length=64, vocabulary=2000, width=128, heads=4):
  """A causal language model of two pre-normalised blocks, 0.9 M parameters."""
  def build(keras):
    layers = keras.layers
    x = inputs = keras.Input((length,), dtype='int32')
    x = layers.Embedding(vocabulary, width)(x)
    for _ in range(blocks):
      y = layers.LayerNormalization()(x)
      x = layers.Add()([x, layers.MultiHeadAttention(heads, width // heads)(
          y, y, use_causal_mask=True)])
      y = layers.LayerNormalization()(x)
      y = layers.Dense(4 * width, activation='gelu')(y)
      x = layers.Add()([x, layers.Dense(width)(y)])
    outputs = layers.Dense(vocabulary)(layers.LayerNormalization()(x))
    return keras.Model(inputs, outputs)
  return Task(build, _ids(vocabulary, batch, length), _ids(vocabulary, batch, length))


def transformer6():
  """The same with six blocks, 1.7 M parameters, batch 16."""
  return transformer(batch=16, blocks=6)


def embedding(batch=256, length=20, vocabulary=50000, width=64):
  """A bag of words over a table of 50,000, 3.2 M parameters."""
  def build(keras):
    layers = keras.layers
    return keras.Sequential([
        keras.Input((length,), dtype='int32'), layers.Embedding(vocabulary, width),
        layers.GlobalAveragePooling1D(), layers.Dense(64, activation='relu'), layers.Dense(10)])
  return Task(build, _ids(vocabulary, batch, length), _ids(10, batch))


MODELS = {f.__name__: f for f in (mlp, cnn, lstm, transformer, transformer6, embedding)}


def _floats(*shape):
  return np.random.default_rng(0).normal(size=shape).astype('float32')


def _ids(high, *shape):
  return np.random.default_rng(1).integers(0, high, size=shape).astype('int32')
