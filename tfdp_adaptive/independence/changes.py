# SPDX-License-Identifier: Apache-2.0
"""What becomes of examples of a batch while others are kept."""

from typing import Any, List

import numpy as np


def ragged(leaves: List[np.ndarray], order: Any) -> List[np.ndarray]:
  """Examples of several lengths: zeros after what is kept of the first axis, or before."""
  leaves = [np.copy(t) for t in leaves]
  n = len(leaves[0])
  for t in leaves:
    for row, parts in ((0, 2), (n // 2, 2), (n - 1, 3)):
      if t.ndim > 1:
        t[row][order][max(1, t.shape[1] // parts):] = np.zeros((), t.dtype)
  return leaves


def _real(array: np.ndarray) -> bool:
  return array.dtype.kind in 'fV'  # V: bfloat16.


def _shortened(rows: Any, order: Any = slice(None)) -> Any:
  rows = np.copy(rows)
  if rows.ndim > 1:
    rows[:, order][:, 1:] = np.zeros((), rows.dtype)
  return rows


# What becomes of the other rows of an array: `(rows, all rows, kept ones) -> rows`.
CHANGES = {
    'permuted': lambda rows, _, __: np.roll(rows, 1, 0),
    'zeroed': lambda rows, _, __: np.zeros_like(rows),
    'scaled': lambda rows, all_rows, _: (
        30 * rows if _real(rows) else np.repeat(np.sort(all_rows, 0)[-1:], len(rows), 0)),
    'negated': lambda rows, _, __: -1000 * rows if _real(rows) else np.flip(rows, -1),
    'not finite': lambda rows, _, __: np.full_like(rows, np.nan) if _real(rows) else rows,
    'copies': lambda rows, all_rows, kept: np.repeat(all_rows[kept[:1]], len(rows), 0),
    'shortened': lambda rows, _, __: _shortened(rows),
    'shortened from the start': lambda rows, _, __: _shortened(rows, slice(None, None, -1)),
}
