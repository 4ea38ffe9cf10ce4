# SPDX-License-Identifier: Apache-2.0
"""Argument checks of the library. Each error names the received and expected value."""

from __future__ import annotations

import json
import math
import numbers
import sys
from typing import Any, Callable, Collection, Dict, TYPE_CHECKING, Union

if TYPE_CHECKING:
  import numpy as np


def is_number(value: object) -> bool:
  """Returns whether `value` is a real number. Booleans are not."""
  return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _finite(value: float) -> bool:
  try:
    return math.isfinite(value)
  except OverflowError:  # An integer that is too large for a float.
    return False


def _require(kind: str, holds: Callable[[Any], bool], values: Dict[str, object]) -> None:
  for name, value in values.items():
    require(holds(value), f'be {kind}', **{name: value})


def require(holds: object, wanted: str, **received: object) -> None:
  """Raises ValueError unless `holds`.

  Args:
    holds: Whether the argument is right.
    wanted: What it must be or do, the text after "`argument` must".
    **received: The argument, and others that it does not go with.
  """
  if not holds:
    values = ', '.join(f'{name}={value!r}' for name, value in received.items())
    raise ValueError(f'`{next(iter(received))}` must {wanted}. Received: {values}.')


def positive(**values: object) -> None:
  _require('positive and finite', lambda x: is_number(x) and _finite(x) and x > 0, values)


def not_negative(**values: object) -> None:
  _require('finite and >= 0', lambda x: is_number(x) and _finite(x) and x >= 0, values)


def whole(minimum: int = 1, **values: object) -> None:
  """Checks that values are integers of at least `minimum`."""
  _require('a positive integer' if minimum == 1 else f'an integer >= {minimum}',
           lambda x: isinstance(x, numbers.Integral) and not isinstance(x, bool)
           and minimum <= int(x) <= sys.float_info.max, values)


def rectangular(value: Any, wanted: str, dtype: Any = None) -> np.ndarray:
  """Returns an array. NumPy's own errors print how many records there are, and values."""
  import numpy as np  # Not for `tfdp --help`, which it would keep waiting.
  try:
    return np.asarray(value, dtype)
  except (ValueError, TypeError, OverflowError):
    raise ValueError(f'{wanted} Received: what NumPy makes no such array of.') from None


def probability(**values: object) -> None:
  """Checks that values are strictly between zero and one."""
  _require('in (0, 1)', lambda x: is_number(x) and 0 < x < 1, values)


def decay(**values: object) -> None:
  """Checks the decay of a running average, in [0, 1)."""
  _require('in [0, 1)', lambda x: is_number(x) and 0 <= x < 1, values)


def instance(kinds: Any, wanted: str, **values: object) -> None:
  """Checks that values are of some classes, which `wanted` describes."""
  _require(wanted, lambda x: isinstance(x, kinds), values)


def one_of(choices: Collection[Any], **values: object) -> None:
  for name, value in values.items():
    try:
      known = value in tuple(choices)
    except ValueError:  # Comparing an array gives no single bool.
      known = False
    require(known, f'be one of {tuple(choices)}', **{name: value})


def for_json(value: object) -> Any:
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


def read_json(text: Union[str, bytes], what: str, kind: str, version: int) -> Dict[str, Any]:
  """Returns the content of a JSON text whose `format` and `version` must be as expected."""
  try:
    content = json.loads(text)
    header = content['format'], content['version']
  except (ValueError, KeyError, TypeError, RecursionError) as error:
    raise ValueError(
        f'`text` must be the JSON of {what}. Received: {str(text)[:60]!r}.') from error
  if header != (kind, version):
    raise ValueError(f'The text must be {kind} of version {version}. '
                     f'Received: {header[0]} of version {header[1]}.')
  return content
