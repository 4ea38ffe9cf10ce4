# SPDX-License-Identifier: Apache-2.0
"""Argument checks of the library. Each error names the received and expected value."""

import math
import numbers
import sys
from typing import Any, Collection


def is_number(value: Any) -> bool:
  """Returns whether `value` is a real number. Booleans are not."""
  return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _finite(value: Any) -> bool:
  try:
    return math.isfinite(value)
  except OverflowError:  # An integer that is too large for a float.
    return False


def positive(**values: Any) -> None:
  for name, value in values.items():
    if not (is_number(value) and _finite(value) and value > 0):
      raise ValueError(f'`{name}` must be positive and finite. Received: {name}={value!r}.')


def not_negative(**values: Any) -> None:
  for name, value in values.items():
    if not (is_number(value) and _finite(value) and value >= 0):
      raise ValueError(f'`{name}` must be finite and >= 0. Received: {name}={value!r}.')


def whole(minimum: int = 1, **values: Any) -> None:
  """Integers of at least `minimum`."""
  for name, value in values.items():
    if not (isinstance(value, numbers.Integral) and not isinstance(value, bool)
            and minimum <= int(value) <= sys.float_info.max):
      kind = 'a positive integer' if minimum == 1 else f'an integer >= {minimum}'
      raise ValueError(f'`{name}` must be {kind}. Received: {name}={value!r}.')


def probability(**values: Any) -> None:
  """Strictly between zero and one."""
  for name, value in values.items():
    if not (is_number(value) and 0 < value < 1):
      raise ValueError(f'`{name}` must be in (0, 1). Received: {name}={value!r}.')


def decay(**values: Any) -> None:
  """Checks the decay of a running average, in [0, 1)."""
  for name, value in values.items():
    if not (is_number(value) and 0 <= value < 1):
      raise ValueError(f'`{name}` must be in [0, 1). Received: {name}={value!r}.')


def one_of(choices: Collection[Any], **values: Any) -> None:
  for name, value in values.items():
    try:
      known = value in tuple(choices)
    except ValueError:  # An array, which is equal to nothing.
      known = False
    if not known:
      raise ValueError(
          f'`{name}` must be one of {tuple(choices)}. Received: {name}={value!r}.')


def for_json(value: Any) -> Any:
  """Returns the value with None for numbers that are not finite, which JSON cannot hold.

  Named tuples become dictionaries.
  """
  if hasattr(value, '_asdict'):
    return for_json(value._asdict())
  if isinstance(value, dict):
    return {key: for_json(item) for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    return [for_json(item) for item in value]
  return None if isinstance(value, float) and not math.isfinite(value) else value
