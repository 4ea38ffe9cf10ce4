# SPDX-License-Identifier: Apache-2.0
"""Which models the book-keeping engine takes, and how it looks at them."""

import bookkeeping_oracle as oracle
import numpy as np
import pytest
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import contract
from tfdp_adaptive.clipping import bookkeeping
from tfdp_adaptive.clipping import factors
from tfdp_adaptive.clipping.layers import registry

keras = compat.keras
layers = keras.layers


def floats(*shape, seed=0):
  return tf.constant(np.random.default_rng(seed).normal(size=shape), tf.float32)


def ids(*shape, high=7, seed=0):
  return tf.constant(np.random.default_rng(seed).integers(0, high, size=shape), tf.int32)


built, run = oracle.built, oracle.run


class Scale(layers.Layer):
  """A layer the engine does not know."""

  def build(self, shape):
    self.gain = self.add_weight(name='gain', shape=(shape[-1],), initializer='ones')

  def call(self, x, offset=None):
    y = tf.tanh(x) * self.gain
    return y if offset is None else y + offset


class Block(layers.Layer):
  """A weight of its own, layers and dropout inside."""

  def __init__(self, units, **kwargs):
    super().__init__(**kwargs)
    self.inner = layers.Dense(units, activation='tanh')
    self.drop = layers.Dropout(0.5)

  def build(self, shape):
    self.inner.build(shape)
    self.gate = self.add_weight(name='gate', shape=(1,), initializer='ones')

  def call(self, x, training=None):
    return self.drop(self.inner(x), training=training) * self.gate


class TwoTowers(keras.Model):
  """Subclassed: nested inputs and outputs, a layer used twice, a nested model."""

  def __init__(self):
    super().__init__()
    self.shared = layers.Dense(3, activation='tanh')
    self.table = layers.Embedding(5, 3)
    self.head = keras.Sequential([layers.Dense(4, activation='relu'), layers.Dense(2)])
    self.scale = Scale()

  def call(self, inputs, training=None):
    left = self.shared(self.scale(inputs['x']))
    right = self.shared(tf.reduce_mean(self.table(inputs['ids']), 1))
    return {'sum': self.head(left + right), 'left': left}


def test_subclassed():
  x = {'x': floats(4, 3), 'ids': ids(4, 3, high=5)}
  oracle.check(built(TwoTowers(), x), x)


def test_a_variable_shared_by_different_calls_is_one():
  """Tied weights sum before the norm; two layers of equal shape do not."""
  inputs = keras.Input((3,))
  shared = layers.Dense(3, use_bias=False)
  model = keras.Model(inputs, shared(tf.keras.layers.Activation('tanh')(shared(inputs))))
  oracle.check(oracle.randomized(model), floats(5, 3))


def test_embeddings_of_several_inputs():
  first, second = keras.Input((2,), dtype='int32'), keras.Input((3,), dtype='int32')
  table = layers.Embedding(4, 3)
  x = layers.Concatenate(1)([table(first), table(second)])
  model = keras.Model([first, second], layers.Dense(2)(layers.Flatten()(x)))
  oracle.check(oracle.randomized(model), [ids(5, 2, high=4), ids(5, 3, high=4)])


def test_frozen_layers():
  model = keras.Sequential([layers.Dense(3, activation='tanh'), layers.BatchNormalization(),
                            layers.Dense(4, activation='tanh'), layers.Dense(2)])
  x = floats(5, 3)
  model(x)
  model.layers[1].trainable = model.layers[2].trainable = False
  oracle.check(oracle.randomized(model), x)
  assert len(model.trainable_variables) == 4


def test_a_model_that_goes_deeper_for_longer_inputs():
  """What was proven for one kind of input is not taken for another."""
  class Deeper(keras.Model):

    def __init__(self):
      super().__init__()
      self.first, self.more = layers.Dense(3, activation='tanh'), layers.Dense(3)

    def call(self, x, training=None):
      y = self.first(x)
      return self.more(y) if x.shape[1] > 2 else y

  long, short = floats(4, 3, 3), floats(4, 2, 3)
  model = built(Deeper(), long)
  for x in (short, long, short):
    oracle.check(model, x)


def test_layers_frozen_later():
  """What was proven for other layers is not taken for these."""
  class Product(Scale):

    def call(self, x, other=None):
      return super().call(x * other)

  first = layers.Dense(4, activation='tanh')
  inputs, other = keras.Input((3,)), keras.Input((4,))
  model = oracle.randomized(keras.Model(
      [inputs, other], layers.Dense(2)(Product()(first(inputs), other=other))))
  x = [floats(5, 3), floats(5, 4)]
  oracle.check(model, x)
  for frozen in (True, False):
    first.trainable = not frozen
    assert len(model.trainable_variables) == (3 if frozen else 5)
    oracle.check(model, x)


def test_unknown_layers():
  x = floats(5, 3, 4)
  model = keras.Sequential([layers.Dense(4), Scale(), layers.Dense(2)])
  oracle.check(built(model, x), x)


def test_an_unknown_layer_with_several_arguments():
  x, offset = keras.Input((2, 3)), keras.Input((3,))
  y = Scale()(layers.Dense(3)(x), offset=layers.Reshape((1, 3))(layers.Dense(3)(offset)))
  model = keras.Model([x, offset], y)
  oracle.check(oracle.randomized(model), [floats(4, 2, 3), floats(4, 3)])


@pytest.mark.thorough
def test_a_recurrent_layer_of_unknown_cells():
  x = floats(3, 4, 2)
  cells = layers.StackedRNNCells([layers.SimpleRNNCell(3), layers.GRUCell(2)])
  oracle.check(built(keras.Sequential([layers.RNN(cells), layers.Dense(2)]), x), x)


def test_a_registered_layer_is_used():
  seen = []

  class Gain(Scale):
    pass

  @bookkeeping.register(Gain)
  def gain(layer, call, cotangents):
    seen.append(layer)
    yield layer.gain, factors.explicit(tf.reduce_sum(cotangents * tf.tanh(call.inputs), 1))

  x = floats(5, 3, 4)
  model = built(keras.Sequential([layers.Dense(4), Gain()]), x)
  oracle.check(model, x)
  assert seen
  del registry._KINDS[Gain]


@pytest.mark.parametrize('known', [True, False])
def test_dropout_is_fresh_each_step_and_the_same_in_both_passes(known):
  """The sums must be those of the mask that made the outputs."""
  inside = [layers.Dense(50), layers.Dropout(0.5)] if known else [Block(50)]
  x = floats(6, 4)
  model = built(keras.Sequential([layers.Dense(3)] + inside), x)
  batch = oracle.batch_of(x, model(x))
  step = tf.function(lambda: bookkeeping.engine(
      model, oracle.squared_error, batch, oracle.request(1e9)), autograph=False)
  first, second = step(), step()
  assert np.any((first.outputs == 0) != (second.outputs == 0))
  # The kernel before the dropout, from the outputs alone: error 0 where dropped.
  ramp = np.linspace(1, 2, 50)
  kernel, bias = model.layers[1].trainable_variables[:2] if known else (
      model.layers[1].inner.trainable_variables)
  hidden = model.layers[0](x)
  gate = 1.0 if known else float(model.layers[1].gate[0])
  z = hidden @ tf.convert_to_tensor(kernel) + bias
  value = z if known else tf.tanh(z)
  slope = 1.0 if known else 1 - np.square(value)
  for clipped in (first, second):
    keep = np.where(clipped.outputs == 0, 0.0, 2.0)
    np.testing.assert_allclose(clipped.outputs, value * keep * gate, rtol=1e-4, atol=1e-6)
    error = ramp * (clipped.outputs.numpy() - batch.y.numpy()) * keep * slope * gate
    index = next(i for i, v in enumerate(model.trainable_variables) if v is kernel)
    np.testing.assert_allclose(
        clipped.sums[0].total[index], hidden.numpy().T @ error, rtol=1e-3, atol=1e-3)


@pytest.mark.thorough(but=['layer0', 'layer3'])
@pytest.mark.parametrize('layer', [
    (layers.LSTM, dict(dropout=0.5)), (layers.LSTM, dict(recurrent_dropout=0.5)),
    (layers.GRU, dict(dropout=0.3, recurrent_dropout=0.5, reset_after=False)),
    (layers.SimpleRNN, dict(dropout=0.5, recurrent_dropout=0.5))])
def test_recurrent_dropout(layer, monkeypatch):
  """With the draws held, losses must move with the weights as the sums say."""
  x = tf.cast(floats(6, 5, 3), tf.float64)
  kind, arguments = layer
  model = built(keras.Sequential([
      kind(4, dtype='float64', **arguments), layers.Dense(2, dtype='float64')]), x)
  batch = oracle.batch_of(x, model(x))

  def step():
    return bookkeeping.engine(
        model, oracle.squared_error, batch, oracle.request(1e9))

  assert np.abs(step().losses - step().losses).max() > 1e-3, 'Masks must be fresh.'
  held = np.random.default_rng(5)
  drawn = []

  def draw(cell, like, rate):
    del cell
    if len(drawn) <= draw.count:
      drawn.append(tf.constant((held.random(like.shape) > rate) / (1 - rate), like.dtype))
    draw.count += 1
    return drawn[draw.count - 1]

  def held_step():
    draw.count = 0
    return step()

  monkeypatch.setattr(compat, 'recurrent_dropout_mask', draw)
  sums = held_step().sums[0].total
  assert drawn
  rng = np.random.default_rng(6)
  direction = [tf.constant(rng.normal(size=v.shape), v.dtype) for v in model.trainable_variables]
  expected = sum(np.sum(s * d) for s, d in zip(sums, direction))
  losses = []
  for h in (1e-5, -2e-5):
    for v, d in zip(model.trainable_variables, direction):
      v.assign_add(h * d)
    losses.append(np.sum(held_step().losses, dtype=np.float64))
  np.testing.assert_allclose((losses[0] - losses[1]) / 2e-5, expected, rtol=1e-5)


def test_supported():
  x = ids(4, 3)
  model = built(keras.Sequential([layers.Embedding(7, 3), layers.Dense(2)]), x)
  assert bookkeeping.supports(model) == bookkeeping.supports(model, x) == (True, '')
  supported, reason = bookkeeping.supports(model, asks=[contract.Ask(projection='euclidean')])
  assert not supported and "'layered'" in reason


def test_layers_are_left_as_found():
  x = floats(4, 3)
  dense = layers.Dense(3, activation='tanh')
  model = built(keras.Sequential([dense, layers.Dropout(0.5), Block(3), layers.Dense(2)]), x)
  everything = [one for one in model._flatten_layers()]
  before = [dict(vars(one)) for one in everything]

  def same():
    return all(vars(one).get('call') is old.get('call')
               and vars(one).get('activation') is old.get('activation')
               for one, old in zip(everything, before))

  run(model, x)
  assert same()

  def broken(y, outputs, sample_weight):
    raise RuntimeError('loss')

  batch = oracle.batch_of(x, model(x))
  with pytest.raises(RuntimeError, match='loss'):
    bookkeeping.engine(model, broken, batch, oracle.request(1.0))
  model.layers[-1].activation = lambda z: 1 // 0
  before[-1]['activation'] = model.layers[-1].activation
  with pytest.raises(Exception, match='division'):
    run(model, x)
  assert vars(model.layers[-1]).get('call') is None and same()
