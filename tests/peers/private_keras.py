# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest under which every Keras model that is compiled becomes a private one.

The class of a model changes to a private class of the same kind, and its optimizer to a `tfdp`
optimizer without noise and clipping, which takes batches of any size.
"""

import os
import warnings

import keras
from keras.src.trainers import trainer

import tfdp_adaptive as tfdp

_OPTIMIZERS = {'Adam': tfdp.DPAdam, 'RMSprop': tfdp.DPRMSprop, 'Adagrad': tfdp.DPAdaGrad}
_CLASSES = {}
_compile = trainer.Trainer.compile


def _optimizer(given):
  given = keras.optimizers.get(given)
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    return _OPTIMIZERS.get(type(given).__name__, tfdp.DPSGD)(
        float(given.learning_rate.numpy()), l2_norm_clip=1e9, noise_multiplier=0.0, batch_size=32,
        adjacency='add_remove')


def compile_privately(self, optimizer='rmsprop', loss=None, *args, **kwargs):
  if loss is None or isinstance(self, tfdp.DPModel) or not isinstance(self, keras.Model):
    return _compile(self, optimizer, loss, *args, **kwargs)
  kind = type(self)
  if kind not in _CLASSES:
    registered = keras.saving.register_keras_serializable('peers', f'Private{len(_CLASSES)}')
    _CLASSES[kind] = registered(type(kind.__name__, (tfdp.DPModel, kind), {}))
  self.__class__ = _CLASSES[kind]
  return self.compile(_optimizer(optimizer), loss, *args, **kwargs)


def pytest_configure(config):
  del config
  if os.environ.get('TFDP_PEERS') == 'private':
    trainer.Trainer.compile = compile_privately
