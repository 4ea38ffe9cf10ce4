# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest under which every Keras model that is compiled becomes a private one.

The class of a model changes to a private class of the same kind, and its optimizer to a `tfdp`
optimizer without noise and clipping, which takes batches of any size.
"""

import json
import os
import pathlib
import warnings

import keras
from keras.src.trainers import trainer

import tfdp_adaptive as tfdp

_OURS = str(pathlib.Path(tfdp.__file__).parent)
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
    _CLASSES[kind] = type(kind.__name__, (tfdp.DPModel, kind), {})
  self.__class__ = _CLASSES[kind]
  return self.compile(_optimizer(optimizer), loss, *args, **kwargs)


def pytest_configure(config):
  del config
  if os.environ.get('TFDP_PEERS') == 'private':
    trainer.Trainer.compile = compile_privately


def _refused(excinfo):
  """Whether the library raised an error in words of its own."""
  text = str(excinfo.value)
  return excinfo.errisinstance(tfdp.PrivacyError) or 'PrivacyError' in text or (
      excinfo.errisinstance((ValueError, TypeError)) and 'Received' in text
      and any(_OURS in str(entry.path) for entry in excinfo.traceback))


def pytest_runtest_makereport(item, call):
  """Writes the outcome of a test, at once: another may end the process."""
  if call.when != 'call' and call.excinfo is None:
    return
  outcome = 'passed'
  if call.excinfo is not None:
    outcome = 'skipped' if call.excinfo.typename == 'Skipped' else (
        'refused' if _refused(call.excinfo) else 'failed')
  text = '' if call.excinfo is None else str(call.excinfo.value).strip().split('\n')[0][:200]
  line = json.dumps([item.nodeid, outcome, f'{call.excinfo.typename}: {text}' if text else ''])
  with open(os.environ['TFDP_PEERS_RESULTS'], 'a', encoding='utf-8') as file:
    file.write(line + '\n')
