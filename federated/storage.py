# SPDX-License-Identifier: Apache-2.0
"""Keeps the state of a run on disk, replaced atomically and readable by its owner only.

Only the LAST state is kept. It is written before anything of its round is released. A run that
resumed from an older state would release a round twice, with the same noise around different
clients' data.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import numpy as np
import tensorflow as tf

from tfdp_adaptive import errors
from tfdp_adaptive import noise
from tfdp_adaptive import runfolder
from tfdp_adaptive import trees
from tfdp_adaptive.noise import keys

Path = Union[str, 'os.PathLike[str]']
Array = Union[np.ndarray, tf.Tensor]
Record = Dict[str, Any]  # Values that JSON can hold.


class SavedRunError(errors.PrivacyError, ValueError):
  """The run in a folder cannot be resumed."""


class InUseError(errors.PrivacyError, BlockingIOError):
  """Another process has the folder of a run."""


class RunFolder:
  """The folder of one run; a context manager that no second process can enter.

  Args:
    path: The path of the folder.
    state: The name of the file with the SECRET state.

  Attributes:
    path: `pathlib.Path`.
    state: The path of the file with the SECRET state.
  """

  def __init__(self, path: Path, state: str = 'state.npz') -> None:
    if not isinstance(path, (str, os.PathLike)) or not str(path):
      raise ValueError(f'The path of a folder must be a text or a `Path`. Received: {path!r}.')
    self.path = pathlib.Path(path)
    self.state = self.path / state

  def __enter__(self) -> RunFolder:
    self.path.parent.mkdir(parents=True, exist_ok=True)
    self.path.mkdir(mode=0o700, exist_ok=True)
    try:
      self._lock = runfolder.Lock(self.path)
    except runfolder.Held as error:
      raise InUseError(*error.args) from None
    return self

  def __exit__(self, *error: object) -> None:
    self._lock.close()

  def save(self, arrays: Sequence[Array], record: Record) -> None:
    """Replaces the saved state; when this returns it is on disk.

    Args:
      arrays: SECRET arrays or tensors.
      record: Further values to save, JSON-serializable.
    """
    runfolder.save(self.state, arrays, record)

  def load(self) -> Optional[Tuple[List[np.ndarray], Record]]:
    """Returns `(arrays, record)` as saved, or None if there is nothing.

    Raises:
      SavedRunError: If the file is not as it was saved.
    """
    try:
      return runfolder.load(self.state)
    except FileNotFoundError:
      return None
    except runfolder.Damaged as error:
      raise SavedRunError(
          f'{self.state} must be what a run saved, and cannot be read: {error}. Put another copy '
          'of the last state back. A new folder begins at zero; what was spent in this one then '
          'counts as well if any of it was published.') from error


def with_fresh_keys(tree: trees.Tree) -> trees.Tree:
  """Returns the state with new keys for all noise to come; what past noise it needs stays.

  Noise that was used for rounds after this state is not used again.
  """
  if isinstance(tree, noise.State):
    return tree._replace(key=keys.from_system())
  if isinstance(tree, tuple):
    children = [with_fresh_keys(child) for child in tree]
    return type(tree)(*children) if hasattr(tree, '_fields') else tuple(children)
  return tree
