# SPDX-License-Identifier: Apache-2.0
"""The folder of a run's results: usable before the work begins, and one command's at a time."""

from __future__ import annotations

import os
import pathlib
import tempfile

from tfdp_adaptive import runfolder
from tfdp_adaptive.cli import options


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


def lock(path: pathlib.Path) -> runfolder.Lock:
  """Keeps other commands out of a folder.

  Raises:
    options.UsageError: Another command has the folder, or nothing can be locked there.
  """
  try:
    return runfolder.Lock(path)
  except runfolder.Held as error:
    raise options.UsageError(
        f'Another tfdp is at work in {path}. Wait for it, or give another --out DIR.') from error
  except OSError as error:
    raise options.UsageError(
        f'{path} cannot be locked ({error.strerror}), so two commands could spoil one run '
        'there. Give an --out on another file system.') from error
