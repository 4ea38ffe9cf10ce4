# SPDX-License-Identifier: Apache-2.0
"""Progress of work that takes more than a moment."""

from typing import Any, Optional

import tqdm


def bar(description: str, total: Optional[int] = None) -> Any:
  """Returns a bar on a terminal, after a second; nothing in a log file."""
  return tqdm.tqdm(desc=description, total=total, unit='iteration', delay=1.0, leave=False,
                   disable=None)


def fraction(description: str, total: int) -> Any:
  """Returns a bar that shows the fraction that is done, and not `total`, which may be private."""
  return tqdm.tqdm(desc=description, total=total, delay=1.0, leave=False, disable=None,
                   bar_format='{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}')
