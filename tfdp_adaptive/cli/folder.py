# SPDX-License-Identifier: Apache-2.0
"""The folder of a run's results: usable before the work begins."""

from __future__ import annotations

import os
import pathlib

from tfdp_adaptive import errors
from tfdp_adaptive import runfolder


def check(path: pathlib.Path) -> None:
  """Sees that files can be written in a folder, and leaves everything as it was.

  Raises:
    errors.UsageError: `path` is no folder, cannot be one, or has no room for anything.
  """
  missing = [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]
  try:
    path.mkdir(parents=True, exist_ok=True)
    runfolder.require_room(path, 4096)
  except OSError as error:
    raise errors.UsageError(
        f'--out must be a folder that files can be written to. Received: {path} '
        f'({error.strerror})') from error
  finally:
    for folder in missing:  # The deepest first.
      try:
        folder.rmdir()
      except OSError:  # Another command has begun to use it.
        break
