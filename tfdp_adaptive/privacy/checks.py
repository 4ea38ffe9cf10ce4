"""Argument checks of the privacy layer; each error names what came and what was expected."""

import math
import numbers


def _is_number(value):
  return isinstance(value, numbers.Real) and not isinstance(value, bool)


def positive(**values):
  for name, value in values.items():
    if not (_is_number(value) and math.isfinite(value) and value > 0):
      raise ValueError(f'`{name}` must be a positive finite number. Received: {name}={value!r}.')


def not_negative(**values):
  for name, value in values.items():
    if not (_is_number(value) and math.isfinite(value) and value >= 0):
      raise ValueError(f'`{name}` must be a finite number >= 0. Received: {name}={value!r}.')


def whole(minimum=1, **values):
  for name, value in values.items():
    if not (isinstance(value, numbers.Integral) and not isinstance(value, bool)
            and value >= minimum):
      raise ValueError(
          f'`{name}` must be an integer >= {minimum}. Received: {name}={value!r}.')


def probability(**values):
  """Strictly between zero and one."""
  for name, value in values.items():
    if not (_is_number(value) and 0 < value < 1):
      raise ValueError(f'`{name}` must be in (0, 1). Received: {name}={value!r}.')


def one_of(choices, **values):
  for name, value in values.items():
    if value not in choices:
      raise ValueError(
          f'`{name}` must be one of {tuple(choices)}. Received: {name}={value!r}.')
