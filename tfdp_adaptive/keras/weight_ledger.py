# SPDX-License-Identifier: Apache-2.0
"""The ledger of weights, attached to the variables themselves.

Another optimizer, another model that shares a layer, and checkpoints find it there.
"""

import logging
from typing import Any, Dict, List, Sequence

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive.independence import validation
from tfdp_adaptive.privacy import ledger as ledger_lib

# A SavedModel would log, for every variable, that it does not read its ledger back.
logging.getLogger('tensorflow').addFilter(
    lambda record: f'{__name__}._Tracked object' not in record.getMessage())
State: Any = tf.train.experimental.PythonState
NAME = '_tfdp_ledger'  # In files and checkpoints.
_LINES = '_tfdp_runs'  # On variables and layers.


class Ledger:
  """The lines attached to variables and layers.

  A line is a `Run`, whose optimizer may still take steps, or an `Entry` that was read from a file.

  Args:
    places: Variables and layers.

  Examples:
    >>> place = tf.Variable(0.0)
    >>> Ledger([place]).attach([ledger_lib.Entry(None, 3, run='a')])
    >>> [entry.steps for entry in Ledger([place]).ledger().entries]
    [3]
  """

  def __init__(self, places: Sequence[Any]) -> None:
    self._places = list(places)

  @classmethod
  def of(cls, model: Any) -> 'Ledger':
    """Returns the ledger of a model's layers and variables, and of variables that layers read."""
    if not compat.is_model(model):
      return cls(model.variables)
    track(model)
    return cls(places(model))

  def attach(self, lines: Sequence[Any], replace: bool = False) -> None:
    """Attaches lines to all places.

    Args:
      lines: `Run`s and `Entry`s.
      replace: Whether other values took the place of the old: entries of files go, runs stay.
    """
    for place in self._places:
      raw = compat.raw_variable(place)
      known = [one for one in getattr(raw, _LINES, [])
               if not replace or not isinstance(one, ledger_lib.Entry)]
      new = [one for one in lines if not any(one is old for old in known)]
      object.__setattr__(raw, _LINES, new + known if replace else known + new)

  def lines(self) -> List[Any]:
    """Returns all lines of the places and of variables that their runs read, each once."""
    found: Dict[int, Any] = {}
    waiting = list(self._places)
    for place in waiting:
      new = [line for line in getattr(compat.raw_variable(place), _LINES, [])
             if id(line) not in found]
      found.update((id(line), line) for line in new)
      waiting += [read for line in new if not isinstance(line, ledger_lib.Entry)
                  for read in line.variables]
    return list(found.values())

  def entries(self) -> List[ledger_lib.Entry]:
    """Returns the current entries of all lines."""
    return entries(self.lines())

  def ledger(self) -> ledger_lib.Ledger:
    """Returns everything that the places have cost so far."""
    return spent(self.entries())


def places(model: Any) -> List[Any]:
  """Returns everything that can have lines: layers, variables, and variables that layers read."""
  return [*compat.built_variables(model), *validation.seen(model).variables,
          *compat.all_layers(model)]


def entries(lines: Sequence[Any]) -> List[ledger_lib.Entry]:
  """Returns the current entries of lines."""
  return [entry for line in lines
          for entry in ([line] if isinstance(line, ledger_lib.Entry) else line.entries())]


def spent(some: Sequence[ledger_lib.Entry]) -> ledger_lib.Ledger:
  """Returns the ledger that counts each run once, and only runs that took steps."""
  counted = ledger_lib.distinct(some).entries
  return ledger_lib.Ledger(tuple(entry for entry in counted if entry.steps))


def parsed(content: Any) -> ledger_lib.Ledger:
  """Returns the ledger in the bytes of a file."""
  try:
    text = bytes(np.asarray(bytearray(content) if isinstance(content, bytes) else content,
                            np.uint8)).decode()
  except (TypeError, ValueError, OverflowError) as error:
    raise ValueError('The ledger in the file must be what was saved. Received: '
                     f'{str(content)[:60]} ({error}).') from error
  return ledger_lib.Ledger.from_json(text)


def track(model: Any) -> None:
  """Has checkpoints of a model, its layers or variables, wherever they are, keep their ledger."""
  for one in (*compat.all_layers(model), *compat.built_variables(model)):
    one._maybe_initialize_trackable()
    if one._lookup_dependency(NAME) is None:
      one._track_trackable(_Tracked(one), NAME)  # Restores what was waiting for it, too.


class _Tracked(State):
  """The ledger of a variable or layer, in checkpoints of TensorFlow."""

  def __init__(self, place: Any) -> None:
    super().__init__()
    self._attached = Ledger([place])

  def serialize(self) -> bytes:
    if not tf.executing_eagerly():
      return b''  # A SavedModel.
    return self._attached.ledger().to_json().encode()

  def deserialize(self, string_value: bytes) -> None:
    self._attached.attach(parsed(string_value).entries if string_value else (), replace=True)
