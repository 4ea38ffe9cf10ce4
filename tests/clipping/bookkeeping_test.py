"""The book-keeping engine against the gradients of single examples."""

import numpy as np
import pytest
import tensorflow as tf

import bookkeeping_oracle as oracle
from tfdp_adaptive import compat

keras = compat.keras
layers = keras.layers


def floats(*shape, seed=0):
  return tf.constant(np.random.default_rng(seed).normal(size=shape), tf.float32)


def ids(*shape, high=7, seed=0):
  return tf.constant(np.random.default_rng(seed).integers(0, high, size=shape), tf.int32)


def randomized(model):
  """Biases and gains that are not zeros and ones."""
  rng = np.random.default_rng(3)
  for v in model.trainable_variables:
    v.assign(v + 0.3 * tf.constant(rng.normal(size=v.shape), v.dtype))
  return model


def mlp():
  return keras.Sequential([
      layers.Dense(5, activation='tanh'), layers.Dense(4, activation='relu'), layers.Dense(3)])


def test_dense():
  model = mlp()
  x = floats(6, 4)
  model(x)
  oracle.check(randomized(model), x)


@pytest.mark.parametrize('jit_compile', [False, True])
def test_dense_in_a_function(jit_compile):
  model = mlp()
  x = floats(6, 4)
  model(x)
  oracle.check(randomized(model), x, jit_compile=jit_compile)


def test_mask():
  model = mlp()
  x = floats(6, 4)
  model(x)
  oracle.check(model, x, mask=[True, False, True, True, False, True])


def test_sequence_embedding_normalization():
  model = keras.Sequential([
      layers.Embedding(7, 6), layers.Dense(5, activation='tanh'), layers.LayerNormalization(),
      layers.Dense(40), layers.Dense(30)])
  x = ids(6, 3)
  model(x)
  oracle.check(randomized(model), x)
