# SPDX-License-Identifier: Apache-2.0
"""Random small models, layer by layer, against the gradients of single examples."""

import bookkeeping_oracle as oracle
import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest
import tensorflow as tf

from tfdp_adaptive import compat

keras = compat.keras
layers = keras.layers
ACTIVATIONS = st.sampled_from([None, 'tanh', 'sigmoid', 'elu'])
UNITS = st.integers(1, 6)


def dense():
  return st.builds(lambda u, a, b: layers.Dense(u, activation=a, use_bias=b),
                   UNITS, ACTIVATIONS, st.booleans())


def on_sequences():
  return st.one_of(
      dense(),
      st.builds(lambda u, k, s, p: layers.Conv1D(u, k, strides=s, padding=p),
                UNITS, st.integers(1, 3), st.integers(1, 2), st.sampled_from(['valid', 'same'])),
      st.builds(lambda kind, u, b: kind(u, return_sequences=True, go_backwards=b),
                st.sampled_from([layers.LSTM, layers.GRU, layers.SimpleRNN]), UNITS, st.booleans()),
      st.builds(lambda e: layers.LayerNormalization(epsilon=e), st.sampled_from([1e-3, 0.1])),
      st.builds(layers.PReLU))


def on_images():
  return st.one_of(
      dense(),
      st.builds(lambda u, k, s, p: layers.Conv2D(u, k, strides=s, padding=p), UNITS,
                st.tuples(st.integers(1, 3), st.integers(1, 3)),
                st.tuples(st.integers(1, 2), st.integers(1, 3)),
                st.sampled_from(['valid', 'same'])),
      st.builds(lambda k, m: layers.DepthwiseConv2D(k, depth_multiplier=m, padding='same'),
                st.integers(1, 3), st.integers(1, 2)),
      st.builds(layers.LayerNormalization))


@st.composite
def models(draw):
  """A model and its inputs."""
  rng = np.random.default_rng(draw(st.integers(0, 2**16)))
  n = draw(st.integers(1, 5))
  kind = draw(st.sampled_from(['vectors', 'ids', 'sequences', 'images']))
  shape = {'vectors': (4,), 'ids': (5,), 'sequences': (5, 3), 'images': (6, 5, 2)}[kind]
  body = {'vectors': dense, 'ids': on_sequences, 'sequences': on_sequences, 'images': on_images}
  inputs = x = keras.Input(shape, dtype='int32' if kind == 'ids' else None)
  if kind == 'ids':
    x = layers.Embedding(6, draw(UNITS))(x)
  before = x
  for layer in draw(st.lists(body[kind](), min_size=1, max_size=3)):
    x = layer(x)
  if kind == 'vectors' and draw(st.booleans()):
    shared = layers.Dense(4, activation='tanh')
    x = layers.Concatenate()([shared(before), x, shared(layers.Activation('tanh')(before))])
  x = layers.Dense(2)(layers.Flatten()(x))
  values = rng.integers(0, 6, (n,) + shape) if kind == 'ids' else rng.normal(size=(n,) + shape)
  mask = draw(st.lists(st.booleans(), min_size=n, max_size=n).filter(any))
  return keras.Model(inputs, x), tf.constant(values, inputs.dtype), mask


@pytest.mark.thorough
@hypothesis.given(models())
@hypothesis.settings(max_examples=12, suppress_health_check=list(hypothesis.HealthCheck))
def test_random_models(drawn):
  model, x, mask = drawn
  oracle.check(oracle.randomized(model), x, mask=mask)
