# SPDX-License-Identifier: Apache-2.0
"""The folder of a run's results: usable before the work begins, and one command's at a time."""

from __future__ import annotations

import fcntl
import os
import pathlib
import tempfile

from tfdp_adaptive.cli import options

_LOCK = '.lock'


def check(path: pathlib.Path) -> None:
  """Sees that files can be written in a folder, and leaves everything as it was.

  Raises:
    options.UsageError: `path` is no folder, cannot be one, or has no room for anything.
  """
  missing = [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]
  make(path)
  try:
    with tempfile.TemporaryFile(dir=path) as file:
      file.write(bytes(4096))
      file.flush()
      os.fsync(file.fileno())
  except OSError as error:
    raise options.UsageError(
        f'--out must be a folder that files can be written to. Received: {path} '
        f'({error.strerror})') from error
  finally:
    for folder in missing:  # The deepest first.
      try:
        folder.rmdir()
      except OSError:  # Another command has begun to use it.
        break


def make(path: pathlib.Path) -> None:
  """Makes the folder, unless it is there."""
  try:
    path.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise options.UsageError(
        f'--out must be a folder, or where one can be made. Received: {path} ({error.strerror})'
    ) from error


def replace(path: pathlib.Path, content: bytes, mode: int = 0o666) -> None:
  """Replaces a file at once; when this returns it is on disk, and on failure the old one is."""
  new = path.with_name(path.name + '.new')
  try:
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), 'wb') as file:
      file.write(content)
      file.flush()
      os.fsync(file.fileno())
    new.replace(path)
  except BaseException:
    new.unlink(missing_ok=True)
    raise


class Lock:
  """Keeps other commands out of a folder until it is closed or the process ends.

  Raises:
    options.UsageError: Another command has the folder, or nothing can be locked there.
  """

  def __init__(self, folder: pathlib.Path):
    self._path = folder / _LOCK
    self._file = open(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600), 'rb')
    try:
      fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      mine = os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._path))
    except (BlockingIOError, FileNotFoundError):
      mine = False
    except OSError as error:
      self._file.close()
      raise options.UsageError(
          f'{folder} cannot be locked ({error.strerror}), so two commands could spoil one run '
          'there. Give an --out on another file system.') from error
    if not mine:  # Held, or removed by the one who held it a moment ago.
      self._file.close()
      raise options.UsageError(
          f'Another tfdp is at work in {folder}. Wait for it, or give another --out DIR.')

  def close(self) -> None:
    """Removes the lock; only then another command may have it."""
    if not self._file.closed:
      self._path.unlink(missing_ok=True)
      self._file.close()
