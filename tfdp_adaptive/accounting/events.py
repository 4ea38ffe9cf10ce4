# SPDX-License-Identifier: Apache-2.0
"""Walks through events of dp_accounting, which are trees of compositions and samplings."""

import copy
from typing import Callable, Iterator, List, Tuple

import dp_accounting


def walk(event: dp_accounting.DpEvent) -> Iterator[dp_accounting.DpEvent]:
  """Yields an event and all events inside it."""
  yield event
  for part in _inside(event):
    yield from walk(part)


def composed(
    event: dp_accounting.DpEvent, count: int = 1) -> Iterator[Tuple[dp_accounting.DpEvent, int]]:
  """Yields the events that a composition consists of, and how often each takes place."""
  if isinstance(event, (dp_accounting.SelfComposedDpEvent, dp_accounting.ComposedDpEvent)):
    for part in _inside(event):
      yield from composed(part, count * getattr(event, 'count', 1))
  elif not isinstance(event, dp_accounting.NoOpDpEvent) and count:
    yield event, count


def replaced(
    event: dp_accounting.DpEvent,
    change: Callable[[dp_accounting.DpEvent], dp_accounting.DpEvent]) -> dp_accounting.DpEvent:
  """Returns an event with every event in it changed, the innermost first."""
  parts = [replaced(part, change) for part in _inside(event)]
  if parts:
    event = copy.copy(event)
    name = 'events' if hasattr(event, 'events') else 'event'
    object.__setattr__(event, name, parts if name == 'events' else parts[0])  # It is frozen.
  return change(event)


def _inside(event: dp_accounting.DpEvent) -> List[dp_accounting.DpEvent]:
  if hasattr(event, 'events'):
    return list(event.events)
  return [event.event] if hasattr(event, 'event') else []
