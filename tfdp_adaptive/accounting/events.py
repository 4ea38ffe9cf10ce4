# SPDX-License-Identifier: Apache-2.0
"""Takes compositions of dp_accounting's events apart."""

from typing import Iterator, Tuple

import dp_accounting


def composed(
    event: dp_accounting.DpEvent, count: int = 1) -> Iterator[Tuple[dp_accounting.DpEvent, int]]:
  """Yields the events that a composition consists of, and how often each takes place."""
  if isinstance(event, dp_accounting.SelfComposedDpEvent):
    yield from composed(event.event, count * event.count)
  elif isinstance(event, dp_accounting.ComposedDpEvent):
    for part in event.events:
      yield from composed(part, count)
  elif not isinstance(event, dp_accounting.NoOpDpEvent) and count:
    yield event, count
