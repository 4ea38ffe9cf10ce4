# SPDX-License-Identifier: Apache-2.0
"""Whatever way a number is brought along in Python, it is found."""

import functools
import math
import types

import numpy as np
import pytest
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive.independence import captured

keras = compat.keras
GLOBAL = np.arange(3.0)
ELSEWHERE = types.ModuleType('elsewhere')
ELSEWHERE.table = np.arange(4.0)


class Loss(keras.losses.Loss):

  def __init__(self, held):
    super().__init__()
    self.held, self.unused = held, np.arange(9.0)

  def call(self, y, output):
    return self.value() * tf.reduce_mean((y - output) ** 2, -1)

  def value(self):
    return self.held


class Holder:
  __slots__ = ('held', 'unused')

  def __init__(self, held):
    self.held, self.unused = held, np.arange(9.0)

  def __call__(self, w):
    return w * self.held

  def method(self, w):
    return w * self.held


def closed(held):
  return lambda w: w * held


def deep(held):
  inner = closed(held)
  return lambda w: (lambda: inner(w))()


def default(w, held=GLOBAL):
  return w * held


def reads_global(w):
  return w * GLOBAL


def reads_module(w):
  return w * ELSEWHERE.table


WAYS = {
    'closure': closed(GLOBAL), 'closure of a closure': deep(GLOBAL), 'default': default,
    'global': reads_global, 'module': reads_module, 'partial': functools.partial(closed, GLOBAL),
    'object': Holder(GLOBAL), 'method': Holder(GLOBAL).method, 'loss': Loss(GLOBAL),
    'attribute of an object': (lambda one: lambda w: one.held * w)(Holder(GLOBAL)),
    'many numbers': closed([i / 7 for i in range(40)]),
    'list': closed([{'a': GLOBAL}]), 'losses': {'out': [closed(GLOBAL)]},
    'tensor': closed(tf.constant([1.0, 2.0])), 'scalar': closed(np.float64(0.1)),
    'scalar tensor': closed(tf.constant(0.1)), 'integers': closed(np.arange(3)),
    "Keras' own around it": (
        keras.losses.MeanSquaredError(), keras.optimizers.schedules.ExponentialDecay(1, 1, 1),
        keras.callbacks.LambdaCallback(on_epoch_end=closed(GLOBAL))),
}


@pytest.mark.parametrize('way', list(WAYS))
def test_arrays(way):
  found = captured.find(WAYS[way])
  assert len(found.arrays) == 1 and np.size(found.arrays[0]) != 9


def test_variables_and_numbers():
  assert captured.find(closed(tf.Variable(1.0))).variables
  assert captured.find(closed(0.25)).numbers == [0.25]
  assert captured.find(Loss(0.25)).numbers == [0.25]
  layer = keras.layers.Dense(1)
  assert captured.find(closed([layer])).layers == [layer]


def test_what_brings_nothing():
  for one in (
      None, 'mse', ['mse', None], keras.losses.Huber(delta=np.float32(2.0)), math.sqrt,
      keras.optimizers.schedules.PiecewiseConstantDecay([1, 2], [0.1, 0.2, 0.3]),
      keras.regularizers.L1L2(0.1, 0.2), keras.constraints.MaxNorm(2.0), tf.reduce_sum,
      lambda w: 0.01 * tf.reduce_sum(w**2), closed(3), closed(keras.layers.Dense(1)),
      (lambda model: lambda y, output: model(y))(keras.Sequential([keras.layers.Dense(1)]))):
    assert captured.find(one)[:3] == ([], [], []), one


def test_what_is_of_ones_own():
  for one in ('accuracy', None, tf.reduce_sum, keras.metrics.AUC(), keras.callbacks.EarlyStopping(),
              keras.callbacks.ReduceLROnPlateau(), keras.callbacks.ModelCheckpoint('x.keras')):
    assert not captured.is_own(one), one
  for one in (closed(1), Holder(1), Loss(1), keras.callbacks.LambdaCallback(
      on_epoch_end=closed(1)), keras.metrics.MeanMetricWrapper(closed(1))):
    assert captured.is_own(one), one
