# SPDX-License-Identifier: Apache-2.0
"""How far a `fit` walks: the files that it enters, and how often a model is analysed."""

import os
import sys
import threading

import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.independence import independence

keras = compat.keras
ROOT = os.path.dirname(tfdp.__file__) + os.sep
MOST = 50  # Files.
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(64, 4)).astype('float32'), RNG.normal(size=(64, 1)).astype('float32')


def network():
  return keras.Sequential([
      keras.layers.Input([4]), keras.layers.Dense(3, activation='relu'), keras.layers.Dense(1)])


def compiled(model):
  plan = tfdp.PrivacyPlan(
      noise_multiplier=1.0, population_size=64, batch_size=8, steps=6, l2_norm_clip=1.0,
      target_delta=1e-3)
  model.compile(tfdp.DPAdam(0.1, plan=plan), 'mse')
  return plan.batches((X, Y))


def entered(action):
  """Files of the library in which a function is called by `action`, on any thread."""
  files = set()

  def called(frame, event, _):
    if event == 'call':
      files.add(frame.f_code.co_filename)

  threading.setprofile(called)
  sys.setprofile(called)
  try:
    action()
  finally:
    sys.setprofile(None)
    threading.setprofile(None)
  return sorted(name[len(ROOT):] for name in files if name.startswith(ROOT))


@pytest.fixture
def analyses(monkeypatch):
  found, own = [], independence.check
  monkeypatch.setattr(
      independence, 'check', lambda *args: found.append(args[0]) or own(*args))
  return found


def test_a_fit_enters_few_files():
  model = tfdp.make_private(network())
  batches = compiled(model)
  found = entered(lambda: model.fit(batches, epochs=2, steps_per_epoch=3, verbose=0))
  assert 'keras/step.py' in found and len(found) > 20
  assert len(found) <= MOST, '\n'.join([f'{len(found)} files:', *found])


def test_a_model_is_analysed_once(analyses):
  model = tfdp.make_private(network())
  batches = compiled(model)
  model.fit(batches, epochs=2, steps_per_epoch=2, verbose=0)
  model.fit(batches, steps_per_epoch=1, verbose=0)
  assert len(analyses) == 1


def test_batches_of_a_fixed_size_are_analysed_for_it(analyses):
  """Python code may ask for the size."""
  model = tfdp.make_private(network())
  model.compile(tfdp.DPSGD(l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=8), 'mse')
  model.train_on_batch(X[:8], Y[:8])
  model.train_on_batch(X[8:16], Y[8:16])
  assert len(analyses) == 1


_ON: list = []


class Gate(keras.layers.Layer):
  """Mixes the examples of a batch as soon as it is told to, by any of six ways."""

  def __init__(self, **kwargs):
    super().__init__(**kwargs)
    self.own = {'on': [False]}
    self.function = lambda: False
    self.flag = False

  def build(self, shape):
    self.weight = self.add_weight(shape=[1], initializer='zeros', name='weight')
    super().build(shape)

  def call(self, inputs):
    apart = lambda: inputs - tf.reduce_mean(inputs, 0, keepdims=True)
    if _ON or self.flag or self.own['on'][0] or self.function():
      return apart()
    return tf.cond(tf.convert_to_tensor(self.weight)[0] > 0, apart, lambda: inputs)


@pytest.mark.parametrize('change', [
    lambda gate: setattr(gate, 'flag', True),
    lambda gate: gate.own['on'].__setitem__(0, True),
    lambda gate: setattr(gate, 'function', lambda: True),
    lambda gate: setattr(gate, 'call', lambda inputs: inputs[::-1] + 0.0),
    lambda gate: gate.set_weights([np.ones(1)]),
    lambda gate: _ON.append(True)], ids=range(6))
def test_a_model_that_was_changed_is_analysed_again(change, monkeypatch):
  monkeypatch.setitem(globals(), '_ON', [])
  gate = Gate()
  inputs = keras.Input([4])
  model = keras.Model(inputs, keras.layers.Dense(1)(gate(inputs)))
  gate.trainable = False
  # The weight is zero: nothing mixes, and nothing moves a weight that does not train.
  private = tfdp.make_private(model)
  change(gate)
  batches = compiled(private)
  with pytest.raises(tfdp.PrivacyError, match='mixes examples'):
    private.fit(batches, steps_per_epoch=1, verbose=0)
