# SPDX-License-Identifier: Apache-2.0
"""Keeps the state of a run on disk, replaced atomically and readable by its owner only.

Only the LAST state is kept. It is written before anything of its round is released. A run that
resumed from an older state would release a round twice, with the same noise around different
clients' data.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any, Callable, Dict, Optional, Tuple, Union

import numpy as np
import tensorflow as tf

from tfdp_adaptive import noise
from tfdp_adaptive import runfolder
from tfdp_adaptive.noise import keys

_STATE = 'state.npz'


class SavedRunError(ValueError):
  """The run in a folder cannot be resumed."""


class RunFolder:
  """The folder of one run; a context manager that no second process can enter.

  Attributes:
    path: `pathlib.Path`.
  """

  def __init__(self, path: Union[str, os.PathLike]) -> None:
    if not isinstance(path, (str, os.PathLike)) or not str(path):
      raise ValueError(f'`out` must be the path of a folder, or None. Received: out={path!r}.')
    self.path = pathlib.Path(path)
    self._lock: Any = None

  def __enter__(self) -> 'RunFolder':
    self.path.parent.mkdir(parents=True, exist_ok=True)
    self.path.mkdir(mode=0o700, exist_ok=True)
    try:
      self._lock = runfolder.Lock(self.path)
    except OSError:
      raise BlockingIOError(
          f'Another process trains in {self.path}. Two of them would use the same noise twice; '
          'wait for it, or give another folder.') from None
    return self

  def __exit__(self, *error: Any) -> None:
    self._lock.close()

  def save(self, tree: Any, record: Dict[str, Any]) -> None:
    """Replaces the saved state; when this returns it is on disk.

    Args:
      tree: SECRET nest of tensors.
      record: Further values to save, JSON-serializable.
    """
    runfolder.save(self.path / _STATE, tf.nest.flatten(tree), record)

  def load(
      self, template: Any, check: Callable[[Any], None] = lambda record: None
  ) -> Optional[Tuple[Any, Dict[str, Any]]]:
    """`(tree, record)` as saved, or None if there is nothing.

    Args:
      template: A tree like the one that was saved.
      check: Raises unless a record is one to go on with; asked before the template.

    Raises:
      SavedRunError: The file is not as it was saved, or of another model.
    """
    try:
      leaves, record = runfolder.load(self.path / _STATE)
    except FileNotFoundError:
      return None
    except runfolder.Damaged as error:
      raise SavedRunError(
          f'{self.path / _STATE} must be what a run saved, and cannot be read: {error}. Start '
          'again in another folder; what was spent in this one then counts as well if any of it '
          'was published.') from error
    check(record)
    wanted = [np.asarray(x) for x in tf.nest.flatten(template)]
    if [(x.shape, x.dtype) for x in leaves] != [(x.shape, x.dtype) for x in wanted]:
      raise SavedRunError(f'The run saved in {self.path} has another model, rule or mechanism. '
                          'Give the process it was started with, or another folder.')
    return tf.nest.pack_sequence_as(template, [tf.constant(x) for x in leaves]), record


def with_fresh_keys(tree: Any) -> Any:
  """The state with new keys for all noise to come; what past noise it needs stays.

  Whatever became of the rounds after this state, noise used for them is not used
  again.
  """
  if isinstance(tree, noise.State):
    return tree._replace(key=keys.from_system())
  if isinstance(tree, tuple):
    children = [with_fresh_keys(child) for child in tree]
    return type(tree)(*children) if hasattr(tree, '_fields') else tuple(children)
  return tree
