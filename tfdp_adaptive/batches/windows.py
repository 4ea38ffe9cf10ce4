# SPDX-License-Identifier: Apache-2.0
"""Recognizes overlapping windows of a series, whose values are in many records."""

from typing import Sequence

import numpy as np

WARNING = (
    'Most records repeat values of their predecessor, as overlapping windows of a series do. '
    'The guarantee for one record does not cover a value that is in many of them.')
FIX = ('Cut the series into windows that do not overlap; or protect whole series, by a plan with '
       "`unit='user'` and `plan.batches(data, users=ids_of_series, examples_per_user=m)`.")
_LONGEST = 16  # Steps by which neighboring windows are moved.


def overlapping(arrays: Sequence[np.ndarray]) -> bool:
  """Whether most records [n, length, ...] are their predecessor, moved by some steps.

  Examples:
    >>> series = np.sin(np.arange(20.0))
    >>> overlapping([np.stack([series[i:i + 6] for i in range(10)])])
    True
    >>> overlapping([series.reshape(5, 4)])
    False
  """
  return any(_moved(array) for array in arrays if array.ndim > 1 and array.dtype.kind in 'fiu')


def _moved(array: np.ndarray) -> bool:
  rows = array.reshape(*array.shape[:2], -1)
  length = rows.shape[1]
  least = 2 if array.dtype.kind == 'f' else 4  # Few integers are alike by chance.
  for steps in range(1, min(_LONGEST, length - least) + 1):
    before, after = rows[:-1, steps:], rows[1:, :-steps]
    varied = (before != before[:, :1]).any((1, 2))
    same = (before == after).all((1, 2)) & varied
    if len(same) > 1 and 2 * same.sum() > len(same):
      return True
  return False
