# SPDX-License-Identifier: Apache-2.0
"""Every kind of layer at once, in every precision, compiled or not, masked and unmasked."""

import contextlib
import functools

import bookkeeping_oracle as oracle
import numpy as np
import pytest
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import layers as own_layers
from tfdp_adaptive.clipping import bookkeeping
from tfdp_adaptive.clipping.layers import registry

keras = compat.keras
layers = keras.layers

IMAGES = [
    lambda: layers.Conv2D(3, 3, strides=2, padding='same'),
    lambda: layers.Conv2D(4, 2, groups=2, activation='tanh'),
    lambda: layers.DepthwiseConv2D(2, depth_multiplier=2),
    lambda: layers.SeparableConv2D(3, 2, activation='tanh'),
    lambda: layers.Conv2DTranspose(2, 2),
    lambda: layers.GroupNormalization(2),
    lambda: layers.PReLU(),
    lambda: own_layers.WSConv2D(3, 2, activation='tanh'),
]
SEQUENCES = [
    lambda: layers.Dense(3, activation='tanh'),
    lambda: layers.EinsumDense('abc,cde->abde', (4, 2, 3), bias_axes='de'),
    lambda: layers.Conv1D(3, 2, padding='causal'),
    lambda: layers.SeparableConv1D(3, 2),
    lambda: layers.LayerNormalization(),
    lambda: layers.TimeDistributed(layers.Dense(2, activation='tanh')),
]
RECURRENT = [
    lambda: layers.LSTM(3, return_sequences=True),
    lambda: layers.GRU(2, go_backwards=True),
    lambda: layers.GRU(2, reset_after=False),
    lambda: layers.Bidirectional(layers.SimpleRNN(2)),
]
if compat.KERAS_3:
  SEQUENCES.append(lambda: layers.RMSNormalization())

RTOL = {'float32': 1e-5, 'float64': 1e-11, 'mixed_float16': 1e-2, 'mixed_bfloat16': 4e-2}


@pytest.fixture(autouse=True)
def seeded():
  keras.utils.set_random_seed(0)


@contextlib.contextmanager
def precision(policy):
  module = keras.config if compat.KERAS_3 else keras.mixed_precision
  before = keras.config.dtype_policy() if compat.KERAS_3 else module.global_policy()
  change = module.set_dtype_policy if compat.KERAS_3 else module.set_global_policy
  change(policy)
  try:
    yield
  finally:
    change(before)


def branches(inputs, x, kinds):
  """All layers side by side, joined by two known ones."""
  flat = [layers.Flatten()(kind()(x)) for kind in kinds]
  joined = layers.Concatenate()(flat)
  return oracle.randomized(keras.Model(inputs, layers.Dense(2, dtype=_last())(joined)))


def _last():
  return 'float64' if keras.backend.floatx() == 'float64' or _policy() == 'float64' else 'float32'


def _policy():
  return (keras.config.dtype_policy() if compat.KERAS_3
          else keras.mixed_precision.global_policy()).name


def images():
  # Keras 3's GroupNormalization computes as finely as its inputs are, whatever the policy.
  inputs = keras.Input((5, 4, 4), dtype=_last())
  return branches(inputs, inputs, IMAGES), np.random.default_rng(0).normal(size=(4, 5, 4, 4))


def sequences():
  """With attention, and a mask that the embedding makes."""
  inputs = keras.Input((4,), dtype='int32')
  x = layers.Embedding(7, 4)(inputs)
  kinds = SEQUENCES + [lambda: lambda x: layers.MultiHeadAttention(2, 2)(x, x)]
  if compat.KERAS_3:
    kinds = kinds + [lambda: lambda x: layers.GroupQueryAttention(2, 2, 1)(x, x)]
  return branches(inputs, x, kinds), np.random.default_rng(0).integers(0, 7, (4, 4))


def recurrent():
  inputs = keras.Input((4,), dtype='int32')
  x = layers.Embedding(7, 3, mask_zero=True)(inputs)
  return branches(inputs, x, RECURRENT), np.array([[1, 2, 0, 3], [0, 0, 0, 0], [3, 0, 1, 0]])


def scaled():
  """With attention whose scale is trained."""
  inputs = keras.Input((3, 4))
  x = layers.Dense(4)(layers.Attention(use_scale=True)([inputs, inputs]))
  return keras.Model(inputs, layers.Flatten()(x)), np.random.default_rng(0).normal(size=(4, 3, 4))


MODELS = {'images': images, 'scaled': scaled, 'sequences': sequences, 'recurrent': recurrent}


@functools.lru_cache(maxsize=None)
def in_float32(name):
  """A model and its batch, of which the definition is asked once."""
  model, x = MODELS[name]()
  x = tf.constant(x, model.inputs[0].dtype)
  return model, x, oracle.defined(model, x)


@pytest.mark.thorough(but=['float64-images', 'mixed_float16-sequences'])
@pytest.mark.parametrize('name', MODELS)
@pytest.mark.parametrize('policy', ['float64', 'mixed_float16', 'mixed_bfloat16'])
def test_precisions(name, policy):
  with precision(policy):
    model, x = MODELS[name]()
    x = tf.constant(x, model.inputs[0].dtype)
    clipped = oracle.check(model, x, rtol=RTOL[policy])
  wide = tf.float64 if policy == 'float64' else tf.float32
  assert all(t.dtype == wide for t in clipped.sums[0].total + clipped.sums[1].square)


@pytest.mark.thorough
@pytest.mark.parametrize('name', MODELS)
@pytest.mark.parametrize('jit_compile', [False, True])
def test_in_functions(name, jit_compile):
  model, x, definition = in_float32(name)
  oracle.check_against(definition, model, x, jit_compile=jit_compile)


@pytest.mark.thorough
def test_every_registered_kind_is_in_some_table():
  """A kind without a line in these tables is not tested in every precision."""
  tested = set()
  for name in MODELS:
    for layer in MODELS[name]()[0]._flatten_layers():
      kind = registry.find(layer)
      tested.add(kind and kind.gradients)
  elsewhere = {'reversible_embedding', 'time_distributed'}  # See bookkeeping_test.py.
  for kind in registry._KINDS.values():
    assert kind.gradients in tested or kind.gradients.__name__ in elsewhere, kind.gradients


@pytest.mark.parametrize('layer', [layers.LSTM, layers.SimpleRNN])
def test_states_that_outlive_a_batch_are_refused(layer):
  inputs = keras.Input(batch_shape=(3, 4, 2))
  model = keras.Model(inputs, layers.Dense(2)(layer(3, stateful=True)(inputs)))
  x = tf.ones([3, 4, 2])
  batch = oracle.batch_of(x, model(x))
  with pytest.raises(ValueError):
    bookkeeping.engine(model, oracle.squared_error, batch, oracle.request(1.0))


@pytest.mark.skipif(not compat.KERAS_3, reason='Keras 3 has these layers')
@pytest.mark.parametrize('name', ['reversible', 'convolution'])
def test_low_rank_updates_of_layers_without_a_formula_for_them(name):
  rng = np.random.default_rng(0)
  if name == 'reversible':
    table = layers.ReversibleEmbedding(7, 4, tie_weights=False)
    inputs, x = keras.Input((3,), dtype='int32'), tf.constant(rng.integers(0, 7, (4, 3)))
    outputs = table(layers.Dense(4, activation='tanh')(table(inputs)), reverse=True)
  else:
    table = layers.Conv1D(3, 2)
    inputs, x = keras.Input((4, 2)), tf.constant(rng.normal(size=(4, 4, 2)), tf.float32)
    outputs = layers.Dense(2)(table(inputs))
  model = keras.Model(inputs, outputs)
  table.enable_lora(2)
  assert registry.find(table) is None and 'LoRA' in registry.why_unknown(table)
  oracle.check(oracle.randomized(model), x)
