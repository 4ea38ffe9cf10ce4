# SPDX-License-Identifier: Apache-2.0
"""The ledger of weights hangs on the variables themselves, as lines.

A line is a `Run`, whose optimizer may still take steps, or an `Entry` that was read from a file.
Another optimizer, another model that shares a layer, and checkpoints find it there.
"""

from typing import Any, List, Sequence

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive.independence import validation
from tfdp_adaptive.privacy import ledger as ledger_lib

State: Any = tf.train.experimental.PythonState
NAME = '_tfdp_ledger'  # In files and checkpoints.
_LINES = '_tfdp_runs'  # On variables.


def hang(variables: Sequence[Any], more: Sequence[Any], replace: bool = False) -> None:
  """Leaves lines on variables.

  Args:
    variables: Of a model.
    more: `Run`s and `Entry`s.
    replace: Whether other values took the place of the old: entries of files go, runs stay.
  """
  for variable in variables:
    raw = compat.raw_variable(variable)
    known = [one for one in getattr(raw, _LINES, [])
             if not replace or not isinstance(one, ledger_lib.Entry)]
    new = [one for one in more if not any(one is old for old in known)]
    object.__setattr__(raw, _LINES, new + known if replace else known + new)


def lines(variables: Sequence[Any]) -> List[Any]:
  """All lines on any of the variables, in order, each once."""
  found = {id(line): line for v in variables
           for line in getattr(compat.raw_variable(v), _LINES, [])}
  return list(found.values())


def ledger(model: Any) -> ledger_lib.Ledger:
  """Everything that the weights of a model have cost so far."""
  if compat.is_model(model):
    follow(model)
  return spent(entries(lines(variables_of(model))))


def variables_of(model: Any) -> List[Any]:
  """All that can have lines: variables, those that layers only read (as in a `Lambda`), layers."""
  if not compat.is_model(model):
    return list(model.variables)
  return [*model.variables, *validation.seen(model).variables, *compat.all_layers(model)]


def entries(some: Sequence[Any]) -> List[ledger_lib.Entry]:
  """What lines say now."""
  return [entry for line in some
          for entry in ([line] if isinstance(line, ledger_lib.Entry) else line.entries())]


def spent(some: Sequence[ledger_lib.Entry]) -> ledger_lib.Ledger:
  """The ledger that counts each run once, and only runs that took steps."""
  counted = ledger_lib.distinct(some).entries
  return ledger_lib.Ledger(tuple(entry for entry in counted if entry.steps))


def parsed(content: Any) -> ledger_lib.Ledger:
  """The ledger in the bytes of a file."""
  try:
    text = bytes(np.asarray(bytearray(content) if isinstance(content, bytes) else content,
                            np.uint8)).decode()
  except (TypeError, ValueError, OverflowError) as error:
    raise ValueError('The ledger in the file must be what was saved. Received: '
                     f'{str(content)[:60]} ({error}).') from error
  return ledger_lib.Ledger.from_json(text)


# Checkpoints of TensorFlow, in which every layer has a line of its own.


class _Lines(State):
  """The ledger of a layer's weights, in checkpoints."""

  def __init__(self, layer: Any) -> None:
    super().__init__()
    self._layer, self._unread = layer, b''

  def serialize(self) -> bytes:
    return ledger(self._layer).to_json().encode() if tf.executing_eagerly() else b''

  def deserialize(self, string_value: bytes) -> None:
    self._unread = string_value
    self.hang()

  def hang(self) -> None:
    """Leaves what was read on the weights, as soon as there are some."""
    if self._unread and self._layer.built:
      hang(self._layer.variables, parsed(self._unread).entries, replace=True)
      self._unread = b''


def follow(model: Any) -> None:
  """Has checkpoints of a model, and of every model that shares its layers, keep their ledger."""
  for layer in compat.all_layers(model):
    layer._maybe_initialize_trackable()
    known = layer._lookup_dependency(NAME)
    if known is None:
      layer._track_trackable(_Lines(layer), NAME)  # Restores what was waiting for it, too.
    else:
      known.hang()
