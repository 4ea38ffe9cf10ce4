# SPDX-License-Identifier: Apache-2.0
"""AutoGraph rewrites code of users, as Keras has it do, and none of this library's."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.autograph.impl import api

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.clipping import protocol

keras = compat.keras
layers = keras.layers
X, Y = np.ones((4, 3), np.float32), np.ones((4, 1), np.float32)


class Dropping(layers.Layer):
  """No layer that the library knows."""

  def __init__(self):
    super().__init__()
    self.gate = self.add_weight(shape=(3,), initializer='ones', name='gate')
    self.dropout = layers.Dropout(0.5)

  def call(self, x, training=None):
    return self.dropout(x * self.gate, training=training)


class Subclassed(keras.Model):

  def __init__(self):
    super().__init__()
    self.dense = layers.Dense(1)

  def call(self, x):
    return self.dense(x)


@pytest.fixture
def rewritten(monkeypatch):
  """The modules of what AutoGraph rewrites from now on."""
  modules = []
  original = api._convert_actual
  monkeypatch.setattr(api, '_convert_actual', lambda entity, context: (
      modules.append(entity.__module__), original(entity, context))[1])
  return modules


def _compiled(model):
  model.compile(tfdp.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=4),
                loss=lambda y, p: tf.square(y - p))
  return model


def _ours(rewritten):
  return [name for name in rewritten if name.startswith('tfdp_adaptive')]


def _by_keras(rewritten):
  assert not _ours(rewritten)
  assert (__name__ in rewritten) != compat.KERAS_3  # Keras 3 has AutoGraph off.


@pytest.mark.thorough
def test_layers_of_users_alone_are_rewritten(rewritten, monkeypatch):
  monkeypatch.setattr(protocol, 'BLOCK_BYTES', 32)
  model = _compiled(tfdp.DPSequential(
      [layers.Input((3,)), Dropping(), layers.LayerNormalization(), layers.Dense(1)]))
  model.fit(X, Y, batch_size=4, verbose=0)
  _by_keras(rewritten)
  tf.function(lambda: model.train_step((X, Y)))()  # Whoever has AutoGraph on, on either stack.
  assert __name__ in rewritten and not _ours(rewritten)


def test_subclassed_models_alone_are_rewritten(rewritten):
  plain = Subclassed()
  plain(X)
  _compiled(tfdp.make_private(plain)).fit(X, Y, batch_size=4, verbose=0)
  _by_keras(rewritten)
