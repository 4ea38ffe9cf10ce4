# SPDX-License-Identifier: Apache-2.0
"""The book-keeping engine against the gradients of single examples."""

import bookkeeping_oracle as oracle
import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat

keras = compat.keras
layers = keras.layers


def floats(*shape, seed=0):
  return tf.constant(np.random.default_rng(seed).normal(size=shape), tf.float32)


def ids(*shape, high=7, seed=0):
  return tf.constant(np.random.default_rng(seed).integers(0, high, size=shape), tf.int32)


randomized = oracle.randomized


def mlp():
  return keras.Sequential([
      layers.Dense(5, activation='tanh'), layers.Dense(4, activation='relu'), layers.Dense(3)])


def test_dense():
  model = mlp()
  x = floats(6, 4)
  model(x)
  oracle.check(randomized(model), x)


@pytest.mark.thorough
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


def small(x, *some):
  """The layers, then something that makes their errors differ."""
  model = keras.Sequential(list(some) + [layers.Flatten(), layers.Dense(2)])
  model(x)
  return randomized(model)


CONVOLUTIONS = {
    'plain': dict(filters=3, kernel_size=2),
    'strided': dict(filters=9, kernel_size=3, padding='same', strides=2, activation='tanh'),
    'strided evenly': dict(filters=2, kernel_size=4, strides=2, padding='same'),
    'strided evenly by unequal': dict(filters=2, kernel_size=(6, 2), strides=(3, 2)),
    'points': dict(filters=4, kernel_size=1, strides=2),
    'unequal': dict(filters=2, kernel_size=(4, 3), strides=(2, 1), padding='same'),
    'dilated': dict(filters=4, kernel_size=(2, 3), dilation_rate=2, padding='same', use_bias=False),
    'grouped': dict(filters=6, kernel_size=2, groups=3, activation='relu'),
    'many filters': dict(filters=40, kernel_size=5, strides=2),
}


@pytest.mark.parametrize('name', CONVOLUTIONS)
def test_convolution_2d(name):
  x = floats(4, 7, 6, 3)
  oracle.check(small(x, layers.Conv2D(**CONVOLUTIONS[name])), x)


@pytest.mark.parametrize('layer', [
    lambda: layers.Conv1D(3, 3, strides=2, padding='same'),
    lambda: layers.Conv1D(3, 2, dilation_rate=2, padding='causal', activation='tanh'),
    lambda: layers.Conv1D(3, 2, strides=4, padding='causal'),  # Leaves the last inputs out.
    lambda: layers.DepthwiseConv1D(3, depth_multiplier=2, padding='same'),
    lambda: layers.SeparableConv1D(4, 3, depth_multiplier=2),
])
def test_convolution_1d(layer):
  x = floats(4, 7, 3)
  oracle.check(small(x, layer()), x)


@pytest.mark.parametrize('layer', [
    lambda: layers.DepthwiseConv2D(3, strides=2, padding='same', activation='tanh'),
    lambda: layers.DepthwiseConv2D((2, 3), depth_multiplier=2, use_bias=False),
    lambda: layers.SeparableConv2D(4, 3, padding='same', activation='tanh'),
    lambda: layers.SeparableConv2D(4, 3, strides=2, depth_multiplier=2),
])
def test_separable_convolution(layer):
  x = floats(4, 7, 6, 3)
  oracle.check(small(x, layer()), x)


@pytest.mark.parametrize('layer', [
    lambda: layers.Conv2DTranspose(4, 3), lambda: layers.Conv2DTranspose(4, 2, strides=2),
    lambda: layers.Conv2DTranspose(2, (3, 2), strides=(2, 1), padding='same', activation='tanh'),
    lambda: layers.Conv2DTranspose(2, 3, strides=3, padding='same', use_bias=False),
    lambda: layers.Conv2DTranspose(2, 2, strides=3),  # Outputs that no input reaches.
    lambda: layers.Conv2DTranspose(2, 3, strides=2, padding='same', output_padding=1),
    lambda: layers.Conv2DTranspose(3, 2, dilation_rate=2)])
def test_transposed_convolution(layer):
  x = floats(4, 5, 4, 3)
  try:
    layer()(x)
  except tf.errors.InvalidArgumentError as error:  # Dilated ones work on some processors only.
    pytest.skip(str(error))
  model = small(x, layer())
  oracle.check(model, x)
  assert 'one example at a time' not in str(tfdp.explain_clipping(model, batch_size=4))


@pytest.mark.parametrize('layer, shape', [
    (lambda: layers.Conv1DTranspose(3, 3, strides=2, padding='same'), (5, 2)),
    (lambda: layers.Conv1DTranspose(3, 2, activation='tanh'), (5, 2)),
    (lambda: layers.Conv3DTranspose(2, (2, 3, 2), strides=(2, 1, 1)), (3, 2, 3, 2))])
def test_transposed_convolution_on_lines_and_volumes(layer, shape):
  x = floats(3, *shape)
  oracle.check(small(x, layer()), x)


@pytest.mark.parametrize('layer', [
    lambda: layers.Attention(use_scale=True), lambda: layers.AdditiveAttention(),
    lambda: layers.Attention(use_scale=True, score_mode='concat'),
    lambda: layers.AdditiveAttention(use_scale=False)])
@pytest.mark.parametrize('masked', [False, True])
def test_attention_with_a_scale(layer, masked):
  words, more = keras.Input((4,), dtype='int32'), keras.Input((3,), dtype='int32')
  table, attend = layers.Embedding(7, 3, mask_zero=masked), layer()
  query, value = table(words), table(more)
  first = attend([query, value])
  second = attend([first, value, layers.Dense(3)(value)])  # Shared, and with keys of its own.
  model = keras.Model([words, more], layers.Dense(2)(layers.Flatten()(second)))
  rng = np.random.default_rng(0)
  x = [tf.constant(rng.integers(1 - masked, 7, (4, n)), tf.int32) for n in (4, 3)]
  oracle.check(oracle.randomized(model), x)


def test_convolution_3d():
  x = floats(3, 5, 4, 4, 2)
  oracle.check(small(x, layers.Conv3D(3, (3, 2, 2), strides=(2, 1, 1), padding='same')), x)


@pytest.mark.parametrize('equation, output, bias', [
    ('abc,cd->abd', (3, 5), 'd'), ('abc,cde->abde', (3, 2, 5), 'de'),
    ('abc,cde->abde', (3, 2, 5), 'e'),
    ('abc,bcd->abd', (3, 5), 'bd'), ('...c,dc->...d', 5, None), ('abc,cd->ad', (5,), 'd'),
    ('abc,dbce->aed', (5, 2), 'ed')])
def test_einsum_dense(equation, output, bias):
  model = keras.Sequential([
      layers.EinsumDense(equation, output, bias_axes=bias, activation='tanh')])
  x = floats(5, 3, 4)
  model(x)
  oracle.check(randomized(model), x)


def transformer():
  x = inputs = keras.Input((3,), dtype='int32')
  x = layers.Embedding(7, 8)(x)
  y = layers.LayerNormalization()(x)
  y = layers.MultiHeadAttention(2, 4)(y, y, use_causal_mask=True)
  x = layers.Add()([x, y])
  y = layers.Dense(12, activation='gelu')(layers.LayerNormalization()(x))
  x = layers.Add()([x, layers.Dense(8)(y)])
  return keras.Model(inputs, layers.Dense(7)(x))


def test_attention():
  oracle.check(randomized(transformer()), ids(5, 3))


RECURRENT = {
    'lstm': lambda: layers.LSTM(4),
    'lstm sequences': lambda: layers.LSTM(4, return_sequences=True),
    'lstm backwards': lambda: layers.LSTM(4, go_backwards=True, return_sequences=True),
    'lstm unlike': lambda: layers.LSTM(4, activation='relu', use_bias=False, implementation=1),
    'lstm unrolled': lambda: layers.LSTM(3, unroll=True, recurrent_activation='tanh'),
    'gru': lambda: layers.GRU(4),
    'gru reset before': lambda: layers.GRU(4, reset_after=False, return_sequences=True),
    'gru without bias': lambda: layers.GRU(3, use_bias=False),
    'simple': lambda: layers.SimpleRNN(4, return_sequences=True),
    'rnn': lambda: layers.RNN(layers.LSTMCell(4)),
    'bidirectional': lambda: layers.Bidirectional(layers.LSTM(3, return_sequences=True)),
    'bidirectional gru': lambda: layers.Bidirectional(layers.GRU(3), merge_mode='sum'),
}


@pytest.mark.thorough(but=['lstm', 'gru', 'gru reset before'])
@pytest.mark.parametrize('name', RECURRENT)
def test_recurrent(name):
  x = floats(5, 6, 3)
  oracle.check(small(x, RECURRENT[name]()), x)


@pytest.mark.thorough(but=['<lambda>0'])
@pytest.mark.parametrize('layer', [
    lambda: layers.LSTM(4, return_sequences=True), lambda: layers.GRU(4, go_backwards=True),
    lambda: layers.Bidirectional(layers.SimpleRNN(3, return_sequences=True))])
def test_recurrent_with_a_mask(layer):
  x = tf.constant([[1, 2, 0, 3], [0, 2, 2, 0], [0, 0, 0, 0], [3, 1, 0, 0]])
  model = keras.Sequential([keras.Input((4,), dtype='int32'),
                            layers.Embedding(5, 3, mask_zero=True), layer(), layers.Dense(2)])
  oracle.check(randomized(model), x)


@pytest.mark.thorough
def test_encoder_and_decoder():
  sentence, start = keras.Input((5, 3)), keras.Input((2, 3))
  _, *state = layers.LSTM(4, return_state=True)(sentence)
  decoded = layers.LSTM(4, return_sequences=True)(start, initial_state=state)
  model = keras.Model([sentence, start], [layers.Dense(2)(decoded), state[1]])
  oracle.check(randomized(model), [floats(4, 5, 3), floats(4, 2, 3, seed=1)])


@pytest.mark.parametrize('layer', [
    lambda: layers.LayerNormalization(axis=[1, 2]), lambda: layers.LayerNormalization(center=False),
    lambda: layers.GroupNormalization(2), lambda: layers.GroupNormalization(3, axis=1),
    lambda: layers.PReLU(), lambda: layers.PReLU(shared_axes=[1]),
    lambda: layers.TimeDistributed(layers.Dense(2, activation='tanh')),
    lambda: layers.TimeDistributed(layers.LayerNormalization())])
def test_vectors(layer):
  x = floats(4, 3, 6)
  oracle.check(small(x, layers.Dense(6), layer()), x)


def test_time_distributed_images():
  x = floats(3, 2, 5, 4, 2)
  oracle.check(small(x, layers.TimeDistributed(layers.Conv2D(3, 2, activation='relu'))), x)


@pytest.mark.skipif(not compat.KERAS_3, reason='Keras 3 has these layers')
class TestKeras3:

  def test_rms_normalization(self):
    x = floats(4, 3, 6)
    oracle.check(small(x, layers.Dense(6), layers.RMSNormalization()), x)

  @pytest.mark.parametrize('tied', [True, False])
  def test_reversible_embedding(self, tied):
    table = layers.ReversibleEmbedding(7, 4, tie_weights=tied, logit_soft_cap=2.0)
    inputs = keras.Input((3,), dtype='int32')
    hidden = layers.Dense(4, activation='tanh')(table(inputs))
    model = keras.Model(inputs, table(hidden, reverse=True))
    oracle.check(randomized(model), ids(5, 3, high=3))

  def test_lora(self):
    model = transformer()
    for layer in model._flatten_layers():
      if isinstance(layer, (layers.Dense, layers.EinsumDense, layers.Embedding)):
        layer.enable_lora(2)
    assert 'lora' in ''.join(v.path for v in model.trainable_variables)
    oracle.check(randomized(model), ids(5, 3))

  @pytest.mark.parametrize('equation', ['abc,dc->abd', 'abc,cde->abde', 'abcd,dec->abe'])
  def test_lora_einsum(self, equation):
    x = floats(4, 3, 5) if equation.startswith('abc,') else floats(4, 3, 2, 5)
    output = {'abd': (3, 6), 'abde': (3, 2, 6), 'abe': (3, 6)}[equation.split('>')[1]]
    layer = layers.EinsumDense(equation, output, bias_axes=output and equation[-1])
    model = small(x, layer)
    layer.enable_lora(2, lora_alpha=3)
    oracle.check(randomized(model), x)
