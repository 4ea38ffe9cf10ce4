# SPDX-License-Identifier: Apache-2.0
"""Attributes of a layer that are others for a while."""

import contextlib
from typing import Any, Iterator


@contextlib.contextmanager
def swapped(owner: Any, **attributes: Any) -> Iterator[None]:
  """Replaces attributes of an object in a `with` block, and restores them afterwards."""
  own = vars(owner)
  before = {name: own[name] for name in attributes if name in own}
  own.update(attributes)
  try:
    yield
  finally:
    for name in attributes:
      del own[name]
    own.update(before)
