# SPDX-License-Identifier: Apache-2.0
"""What the engine taps it does not change: the model's results, bit for bit.

The graph of a tapped model computes the same expressions of variables and inputs as
that of the plain one; but recurrent layers run in another loop, of the same steps.
TensorFlow's optimiser then rewrites products and sums whose terms nobody else reads, so
after it results are equal to rounding; without it, exactly.
"""

import contextlib

import bookkeeping_layers_test as tables
import bookkeeping_oracle as oracle
import graph_oracle
import numpy as np
import pytest
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import layers as own_layers
from tfdp_adaptive.clipping import bookkeeping
from tfdp_adaptive.clipping.layers import generic
from tfdp_adaptive.clipping.layers import registry

keras = compat.keras
layers = keras.layers
ROUNDING = {'float32': 1e-6, 'mixed_float16': 1e-2}


def floats(*shape, seed=0):
  return tf.constant(np.random.default_rng(seed).normal(size=shape), tf.float32)


class Gated(layers.Layer):
  """A weight of its own, and what else is around and inside, in the generic way."""

  def __init__(self, inner=(), **kwargs):
    super().__init__(**kwargs)
    self.inner = list(inner)

  def build(self, shape):
    self.gate = self.add_weight(name='gate', shape=(shape[-1],), initializer='ones')
    for one in self.inner:
      one.build(shape)

  def call(self, x, training=None):
    for one in self.inner:
      x = one(x, training=training) if isinstance(one, layers.Dropout) else one(x)
    return tf.tanh(x) * tf.cast(self.gate, x.dtype)


class Towers(keras.Model):
  """Subclassed, with a nested model and a layer used twice."""

  def __init__(self):
    super().__init__()
    self.shared = layers.Dense(3, activation='gelu')
    self.table = layers.Embedding(5, 3)
    self.head = keras.Sequential([layers.Dense(4, activation='relu'), Gated(), layers.Dense(2)])

  def call(self, inputs, training=None):
    left = self.shared(inputs['x'])
    right = self.shared(tf.reduce_mean(self.table(inputs['ids']), 1))
    return {'sum': self.head(left + right), 'left': left}


def transformer(rate=0.0):
  x = inputs = keras.Input((3,), dtype='int32')
  x = layers.Embedding(7, 8, mask_zero=True)(x)
  y = layers.MultiHeadAttention(2, 4, dropout=rate)(
      *[layers.LayerNormalization()(x)] * 2, use_causal_mask=True)
  x = layers.Add()([x, layers.Dropout(rate)(y)])
  y = layers.Dense(8)(layers.Dense(12, activation='swish')(x))
  x = layers.LayerNormalization()(layers.Add()([x, y]))
  return keras.Model(inputs, layers.Dense(7)(x)), tf.constant([[1, 2, 0], [3, 3, 6]])


def towers():
  model = Towers()
  x = {'x': floats(4, 3), 'ids': tf.constant([[1, 2], [0, 0], [4, 4], [3, 1]])}
  model(x)
  return model, x


def encoder_and_decoder():
  sentence, start = keras.Input((5, 3)), keras.Input((2, 3))
  _, *state = layers.LSTM(4, return_state=True)(sentence)
  decoded = layers.GRU(4, return_sequences=True, reset_after=False)(
      start, initial_state=state[0])
  model = keras.Model([sentence, start], [layers.Dense(2)(decoded), state[1]])
  return model, [floats(4, 5, 3), floats(4, 2, 3, seed=1)]


def masked():
  model = keras.Sequential([
      keras.Input((3,), dtype='int32'), layers.Embedding(5, 3, mask_zero=True),
      layers.Bidirectional(layers.SimpleRNN(2, return_sequences=True)), layers.LSTM(2)])
  return model, tf.constant([[1, 0, 2], [0, 0, 0], [3, 1, 0]])


def table(make):
  def made():
    model, x = make()
    return model, tf.constant(x, model.inputs[0].dtype)
  return made


def standardized():
  model = keras.Sequential([
      keras.Input((5, 5, 1)), own_layers.WSConv2D(2, 3, activation='relu'), layers.Flatten(),
      layers.Dense(2)])
  return model, floats(4, 5, 5, 1)


def reversible():
  tied = layers.ReversibleEmbedding(7, 4, logit_soft_cap=2.0)
  inputs = keras.Input((3,), dtype='int32')
  outputs = tied(layers.Dense(4, activation='tanh')(tied(inputs)), reverse=True)
  return keras.Model(inputs, outputs), tf.constant([[1, 2, 0], [3, 3, 6]])


# Models with a recurrent layer, or with a scale of its own for each example.
OTHER_EXPRESSIONS = ('masked', 'encoder_and_decoder', 'scaled')
MODELS = {
    'images': table(tables.images), 'sequences': table(tables.sequences), 'masked': masked,
    'scaled': table(tables.scaled), 'transformer': transformer, 'towers': towers,
    'encoder_and_decoder': encoder_and_decoder, 'standardized': standardized}
if compat.KERAS_3:
  MODELS['reversible'] = reversible


@pytest.fixture(autouse=True)
def seeded():
  keras.utils.set_random_seed(0)


@contextlib.contextmanager
def unoptimised():
  """Graphs run as they were traced."""
  options = tf.config.optimizer
  options.set_experimental_options({'disable_meta_optimizer': True})
  try:
    yield
  finally:
    options.set_experimental_options({'disable_meta_optimizer': False})


def forward(model, x):
  """The model's forward pass, and that inside a step of the engine, as functions."""
  batch = oracle.batch_of(x, model(x))

  def tapped(x):
    clipped = bookkeeping.engine(
        model, oracle.squared_error, batch._replace(x=x), oracle.request(0.5))
    return clipped.outputs, clipped.sums

  return [tf.function(f, autograph=False).get_concrete_function(x)
          for f in (lambda x: model(x, training=True), tapped)]


def assert_same_expressions(plain, tapped):
  numbers = graph_oracle.Expressions()
  wanted = numbers.of(plain, plain.outputs)
  assert numbers.of(tapped, tapped.outputs[:len(wanted)]) == wanted
  assert len(set(wanted)) == len(wanted)


@pytest.mark.thorough(but=['towers-mixed_float16', 'reversible-float32'])
@pytest.mark.parametrize('name, policy', [(name, 'float32') for name in MODELS] + [
    (name, 'mixed_float16') for name in MODELS if name != 'encoder_and_decoder'])
def test_results(name, policy):
  with tables.precision(policy):
    model, x = MODELS[name]()
    plain, tapped = forward(model, x)
  if name not in OTHER_EXPRESSIONS:
    assert_same_expressions(plain, tapped)
  with unoptimised():
    tf.nest.map_structure(np.testing.assert_array_equal, tapped(x)[0], plain(x))
  small = ROUNDING[policy]
  tf.nest.map_structure(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=small, atol=small),
      tapped(x)[0], plain(x))


@pytest.mark.parametrize('masked', [False, True])
@pytest.mark.parametrize('kwargs', [
    dict(return_sequences=True, return_state=True), dict(go_backwards=True, return_state=True),
    dict(use_bias=False), dict(unroll=True, recurrent_initializer='normal'),
    dict(zero_output_for_mask=True, return_sequences=True)], ids=str)
@pytest.mark.parametrize('kind', [layers.LSTM, layers.GRU, layers.SimpleRNN])
def test_the_loop_of_a_recurrent_layer(kind, kwargs, masked):
  """Its results are those of the layer's own loop, in the same structure."""
  layer, x = kind(4, **kwargs), floats(3, 5, 2)
  layer.build(x.shape)
  mask = tf.constant([[1, 1, 0, 1, 0], [0, 0, 1, 1, 1], [0] * 5]) > 0 if masked else None
  layer.set_weights([w + 0.1 for w in layer.get_weights()])  # Biases begin at zero.
  expected = layer(x, mask=mask)
  with tf.GradientTape() as tape:
    call = registry.find(layer).tap(
        layer, layer.call, registry.Call((x,), dict(mask=mask, training=True)), tape)
  assert type(call.outputs) is type(expected) or not kwargs.get('return_state')
  tf.nest.map_structure(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), call.outputs, expected)


@pytest.mark.thorough
@pytest.mark.parametrize('inside', [layers.Dropout, layers.GaussianDropout])
def test_expressions_of_models_that_draw(inside):
  """All but the numbers that are drawn."""
  assert_same_expressions(*forward(*transformer(0.4)))
  model = keras.Sequential([layers.Dense(3), inside(0.5), layers.Dense(4), Gated()])
  x = floats(4, 5, 3)
  model(x)
  assert_same_expressions(*forward(model, x))


def test_every_kind_is_here():
  """With the generic one."""
  kinds = set()
  for make in MODELS.values():
    for layer in make()[0]._flatten_layers():
      kind = registry.find(layer)
      if kind is None and layer.trainable_variables:
        kind = generic.KIND
      kinds.add(kind)
  missing = {kind.gradients.__name__ for kind in registry._KINDS.values()} - {
      kind.gradients.__name__ for kind in kinds if kind}
  assert not missing and generic.KIND in kinds


def test_a_changed_result_would_be_seen(monkeypatch):
  """Adding zeros, as taps elsewhere do, is a change: of the sign of zeros, at least."""
  model, x = MODELS['towers']()
  honest = registry.at_output

  def adding(layer, function, call, tape):
    return honest(layer, lambda *a, **k: function(*a, **k) + 0.0, call, tape)

  kind = registry._KINDS[layers.Embedding]
  monkeypatch.setitem(registry._KINDS, layers.Embedding, kind._replace(tap=adding))
  with pytest.raises(AssertionError):
    assert_same_expressions(*forward(model, x))


@pytest.mark.parametrize('inside', [
    layers.Dropout, layers.SpatialDropout1D, layers.GaussianDropout])
def test_bits_of_dropout_inside_a_layer_of_unknown_kind(inside):
  """It draws once for two passes: zeros without a sign, also for what is not finite."""
  model = keras.Sequential([Gated([inside(0.5)]), layers.Dense(2)])
  x = np.random.default_rng(0).normal(size=(4, 5, 3)).astype('float32')
  model(x)
  gated = model.layers[0]
  if inside is not layers.GaussianDropout:
    x[0] = np.inf  # Tanh is finite there, its gradient too.
  batch = oracle.batch_of(tf.constant(x), model(x))
  bookkeeping.prove(model, batch.x)

  def drawn_alike(function):
    keras.utils.set_random_seed(1)
    if compat.KERAS_3:
      gated.inner[0].seed_generator.state.assign([3, 4])
    return function()

  plain = drawn_alike(lambda: model(x, training=True)).numpy()
  clipped = drawn_alike(lambda: bookkeeping.engine(
      model, oracle.squared_error, batch, oracle.request(0.5)))
  assert np.all(np.isfinite(plain)) and plain.tobytes() == clipped.outputs.numpy().tobytes()
  assert np.all(np.isfinite(clipped.norms[0])) and np.all(clipped.norms[0] > 0)
