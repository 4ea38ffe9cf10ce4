# SPDX-License-Identifier: Apache-2.0
"""Progress of designs that take more than a moment."""

from typing import Any, Optional

import tqdm


def bar(description: str, total: Optional[int] = None) -> Any:
  """A bar on a terminal, after a second; nothing in a log file."""
  return tqdm.tqdm(desc=description, total=total, unit='iteration', delay=1.0, leave=False,
                   disable=None)
