# SPDX-License-Identifier: Apache-2.0
"""Layers are left as found, wherever a pass breaks off and whoever else calls them."""

import threading

import bookkeeping_oracle as oracle
import numpy as np
import pytest
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive.clipping import bookkeeping
from tfdp_adaptive.clipping import tracing

keras = compat.keras
layers = keras.layers


class Trap:
  """A function that hands its input on, and at one of its calls does something else."""

  def __init__(self):
    self.calls, self.at, self.act = 0, None, None

  def __call__(self, x):
    self.calls += 1
    if self.calls == self.at:
      self.act()
    return tf.identity(x)


class Own(layers.Layer):
  """A weight of its own, with layers and dropout inside: clipped in the generic way."""

  def __init__(self, trap):
    super().__init__()
    self.inner, self.drop = layers.Dense(3, activation=trap), layers.Dropout(0.5)

  def build(self, shape):
    self.inner.build(shape)
    self.gate = self.add_weight(name='gate', shape=(1,), initializer='ones')

  def call(self, x, training=None):
    return self.inner(self.drop(x, training=training)) * self.gate


class Model(keras.Model):
  """Subclassed, a model nested, a layer used twice, a `call` of an instance's own."""

  def __init__(self, trap, between):
    super().__init__()
    self.between = between
    self.table = layers.Embedding(5, 3)
    self.head = keras.Sequential([
        layers.Dense(3, activation=trap),
        keras.Sequential([layers.LayerNormalization(), layers.Lambda(trap), layers.Dense(3)])])
    self.memory = layers.GRU(3, activation=trap, dropout=0.5, recurrent_dropout=0.5,
                             return_sequences=True, unroll=True)
    self.own, self.last = Own(trap), layers.Dense(2)
    inherited = self.last.call
    self.last.call = lambda x, training=None: trap(inherited(x))

  def call(self, inputs, training=None):
    x = self.between(self.head(self.between(self.head(self.table(inputs)))))
    x = self.between(self.memory(x, training=training))
    return self.between(self.last(self.between(self.own(x, training=training))))


def built():
  trap, between = Trap(), Trap()
  model, x = Model(trap, between), tf.constant([[1, 2], [0, 3], [4, 4]])
  batch = oracle.batch_of(x, model(x))
  trap.calls = 0
  return oracle.randomized(model), trap, batch


def run(model, batch):
  return bookkeeping.engine(
      model, oracle.squared_error, batch, oracle.request(0.5))


def attributes(model):
  """What hangs on every layer and cell: names, and which objects."""
  every = list(model._flatten_layers()) + [model.memory.cell]
  # Keras keeps accounts of calls, of what layers lost on the way, and drawn masks.
  ours = lambda name: not name.startswith('_')
  return [{name: id(value) for name, value in vars(one).items() if ours(name)} for one in every]


@pytest.mark.thorough
def test_a_pass_that_breaks_off():
  """At every call of every function of the model, in all passes over it."""
  model, trap, batch = built()
  before = attributes(model)
  assert 'call' in before[[one is model.last for one in model._flatten_layers()].index(True)]
  errors = (RuntimeError, KeyboardInterrupt)

  def interrupt():
    raise errors[trap.at % 2]('in the middle')

  trap.act = interrupt
  for a_pass in (bookkeeping.prove, lambda model, _: run(model, batch)):
    trap.at, done = 0, False
    while not done:
      trap.at, trap.calls = trap.at + 1, 0
      try:
        a_pass(model, batch.x)
        done = True
      except errors:
        pass
      assert attributes(model) == before, trap.at
      assert not tracing._WRAPPED and getattr(tracing._LOCAL, 'recorder', None) is None
    assert trap.at > 10 and trap.calls == trap.at - 1
  trap.at = None
  first, again = model(batch.x), model(batch.x)
  np.testing.assert_array_equal(first, again)


@pytest.mark.thorough
@pytest.mark.parametrize('records', [False, True])
def test_another_thread_takes_turns(records):
  """Between any two layers: both get what they get alone."""
  model, _, batch = built()
  model.own.drop.rate = model.memory.cell.dropout = model.memory.cell.recurrent_dropout = 0.0
  if compat.KERAS_3:
    model.memory.dropout = model.memory.recurrent_dropout = 0.0
  between, results = model.between, []
  total = lambda: run(model, batch).sums[0].total
  other = total if records else lambda: [model(batch.x)]
  expected, before = total(), attributes(model)
  alone = other()

  def turn():
    thread = threading.Thread(target=lambda: results.append(other()))
    thread.start()
    thread.join()

  between.act = turn
  for at in range(1, 6):
    between.at, between.calls = at, 0
    sums = total()
    for got, want in zip(sums + results.pop(), expected + alone):
      np.testing.assert_array_equal(got, want)
    assert attributes(model) == before and not tracing._WRAPPED
