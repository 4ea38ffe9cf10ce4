# SPDX-License-Identifier: Apache-2.0
"""What weights have cost, carried by whatever file holds them.

Keras and TensorFlow save what hangs on a model, each in its own way. One object that hangs
there writes the ledger beside the weights: into `.keras` and `.weights.h5` files, which a
plain model reads as its own, and into TensorFlow's checkpoints.
"""

import types
from typing import Any, Optional

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive.keras import history

keras: Any = compat.keras
State: Any = tf.train.experimental.PythonState

_NAME = '_tfdp_ledger'  # Of the attribute, and in files.


class Carried(keras.losses.Loss, State):
  """The ledger of a model's weights.

  A loss only in that Keras saves it, and counts it among neither layers nor metrics.
  """

  def __init__(self, model: compat.Model) -> None:
    super().__init__(name='tfdp_ledger')
    self._of = types.SimpleNamespace(model=model)  # Nothing that is saved with it.
    self._unread: Optional[np.ndarray] = None

  def call(self, y_true: Any, y_pred: Any) -> Any:
    raise NotImplementedError('It keeps the ledger of a model, and computes nothing.')

  # For Keras.

  def save_own_variables(self, store: Any) -> None:
    store['0'] = np.frombuffer(self.serialize(), np.uint8)

  def load_own_variables(self, store: Any) -> None:
    if '0' in store:
      self._unread = np.asarray(store['0'])
      self.hang()

  # For TensorFlow.

  def serialize(self) -> bytes:
    if not tf.executing_eagerly():
      return b''  # A SavedModel, which has weights for serving alone.
    model = self._of.model
    run = getattr(getattr(model, 'optimizer', None), 'run', None)
    return history.ledger(model.variables, run).to_json().encode()

  def deserialize(self, string_value: bytes) -> None:
    if string_value:
      self._unread = np.frombuffer(string_value, np.uint8)
      self.hang()

  def hang(self) -> None:
    """Leaves what was read on the weights, as soon as there are some."""
    model, values = self._of.model, self._unread
    if values is not None and model.built:
      self._unread = None
      history.load(model.variables, values)


class Resumed(State):
  """Tells a run that its state came from a checkpoint, whose ledger has told of it already."""

  def __init__(self, run: history.Run) -> None:
    super().__init__()
    self._run = run

  def serialize(self) -> bytes:
    return b'run'

  def deserialize(self, string_value: bytes) -> None:
    del string_value
    self._run.restored = True


def of(model: compat.Model) -> Carried:
  """The ledger that hangs on `model`, from now on where it did not."""
  attributes = model.__dict__  # Keras would look into what is assigned in its usual way.
  if _NAME not in attributes:
    attributes[_NAME] = Carried(model)
    model._track_trackable(attributes[_NAME], _NAME)  # Also restores what was waiting for it.
  attributes[_NAME].hang()
  return attributes[_NAME]
