# SPDX-License-Identifier: Apache-2.0
"""An array that is filled row by row, in memory or in a file, where it goes on after a stop."""

import hashlib
import pathlib
import time
from typing import Any, Tuple

import numpy as np

from tfdp_adaptive import runfolder

_SAVE_EVERY = 1.0  # Seconds between two notes of how many rows of a file are done.


class Memory:
  """Rows in memory."""

  def __init__(self, array: Any, rows: int = 0) -> None:
    self.array, self.rows = array, rows

  def write(self, places: np.ndarray, values: np.ndarray) -> None:
    if values.shape[1:] != self.array.shape[1:] or len(values) != len(places):
      raise ValueError('`base` must give features of one shape for each record. Received: shape '
                       f'{values.shape[1:]} after {self.array.shape[1:]}.')
    self.array[places] = values
    self.rows += len(places)


class File(Memory):
  """Rows in a mapped file, and beside it how many of them are done."""

  def __init__(self, folder: pathlib.Path, key: str, shape: Tuple[int, ...],
               dtype: np.dtype) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    name = hashlib.sha256(key.encode()).hexdigest()[:16]
    self._note, path = folder / f'{name}.rows', folder / f'{name}.npy'
    done = int(self._note.read_text()) if self._note.exists() and path.exists() else 0
    path.touch(0o600)
    super().__init__(np.lib.format.open_memmap(
        path, 'r+' if done else 'w+', None if done else dtype, None if done else shape), done)
    if self.array.shape != shape or self.array.dtype != dtype:
      raise ValueError(f'The cache in {str(folder)!r} must be what was written there. Received: '
                       'features of another shape. Delete it, or name another folder.')
    self._saved = time.monotonic()

  def write(self, places: np.ndarray, values: np.ndarray) -> None:
    super().write(places, values)
    if time.monotonic() - self._saved > _SAVE_EVERY:
      self.save()

  def save(self) -> None:
    """Writes the rows, then their number: a stop in between loses work and nothing else."""
    self.array.flush()
    runfolder.replace(self._note, str(self.rows).encode())
    self._saved = time.monotonic()

  def __enter__(self) -> 'File':
    return self

  def __exit__(self, *_: object) -> None:
    self.save()
