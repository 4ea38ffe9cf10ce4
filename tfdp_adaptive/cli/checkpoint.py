# SPDX-License-Identifier: Apache-2.0
"""What an unfinished run goes on from: one file, replaced at once, believed only if whole.

SECRET: the optimizer's state holds what the noise to come depends on. The key of the
noise is not in it, so a run that goes on draws noise that was never drawn before.
"""

from __future__ import annotations

import pathlib
from typing import Tuple, TYPE_CHECKING

import tensorflow as tf

from tfdp_adaptive import runfolder
from tfdp_adaptive.cli import options

if TYPE_CHECKING:
  from tfdp_adaptive.cli import training

_NAME, _FORMAT = 'state', 'tfdp_adaptive.train 1'


class Checkpoint:
  """Weights, optimizer and learning curve of a run.

  Args:
    path: The folder of the unfinished run.
    model: Compiled and private.
  """

  def __init__(self, path: pathlib.Path, model: 'tf.keras.Model') -> None:
    self._file = path / _NAME
    self._optimizer = model.optimizer
    self._optimizer.build(model.trainable_variables)
    variables = self._optimizer.variables
    self._variables = [*model.weights, *(variables() if callable(variables) else variables)]

  def save(self, curve: training.Curve) -> None:
    """Replaces what was saved; when this returns it is on disk."""
    runfolder.save(self._file, self._variables, {
        'format': _FORMAT, 'steps': self._optimizer.steps_done, 'curve': curve})

  def restore(self) -> Tuple[int, training.Curve]:
    """`(steps done, learning curve)`; `(0, ())` where nothing is saved.

    Raises:
      options.UsageError: What is saved is not what was saved, byte for byte, or of
        another model.
    """
    try:
      values, record = runfolder.load(self._file)
    except FileNotFoundError:
      return 0, ()
    except runfolder.Damaged as error:
      raise options.unreadable(self._file, error) from error
    shapes = [(tuple(v.shape), tf.as_dtype(v.dtype).name) for v in self._variables]
    if (record.get('format') != _FORMAT
        or [(value.shape, value.dtype.name) for value in values] != shapes):
      raise options.unreadable(self._file, 'it is of another version or model')
    for variable, value in zip(self._variables, values):
      variable.assign(value)
    if self._optimizer.steps_done != record['steps']:
      raise options.unreadable(self._file, 'its number of steps is not the optimizer\'s')
    return record['steps'], tuple(map(tuple, record['curve']))
