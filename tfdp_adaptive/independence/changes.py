# SPDX-License-Identifier: Apache-2.0
"""Changes some examples of a batch, and compares what the other examples give."""

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


def difference(run: Any, before: Any, after: Any, rows: Any, places: Any, tolerance: float) -> str:
  """Returns in words how the examples `rows` differ from before; '' if they do not."""
  for old, new in zip(before.outputs, after.outputs):
    if old.shape[1:] != new.shape[1:]:
      return f'outputs have shape {new.shape[1:]} in place of {old.shape[1:]}'
    if not near(old[rows], new[places], tolerance):
      change = np.max(np.abs(old[rows].astype(np.float64) - new[places].astype(np.float64)))
      return f"an example's output in training changes by {change:.3g}"
  if all(old.shape[1:] == new.shape[1:] and near(old[rows], new[places], tolerance)
         for old, new in zip(before.factors, after.factors)):
    return ''
  for row, place in zip(rows, places):  # Factors may differ and say the same, as longer padding.
    old, new = run.gradient(before, row), run.gradient(after, place)
    size = np.linalg.norm(old - new) / max(np.linalg.norm(old), np.finfo(np.float32).tiny)
    if not size <= tolerance:
      return f"an example's gradient changes by {size:.3g} times its norm"
  return ''


def near(old: np.ndarray, new: np.ndarray, tolerance: float) -> bool:
  """Returns whether arrays of examples are equal up to rounding."""
  if np.array_equal(old, new):
    return True
  if old.dtype.kind not in 'fV':
    return False
  old, new = old.astype(np.float64), new.astype(np.float64)
  peak = np.max(np.abs(old), tuple(range(1, old.ndim)), keepdims=True, initial=0)
  return np.allclose(old, new, rtol=tolerance, atol=0, equal_nan=True) or bool(
      np.all(np.abs(old - new) <= tolerance * (np.abs(old) + 0.01 * peak)))


def moved(run: Any, before: Any, after: Any, rows: Any, places: Any) -> float:
  """Returns the change of the clipped sum, in clip norms, for a clip norm below all norms."""
  return float(np.linalg.norm(sum(
      _unit(run.gradient(before, row)) - _unit(run.gradient(after, place))
      for row, place in zip(rows, places))))


def _unit(gradient: np.ndarray) -> np.ndarray:
  norm = np.linalg.norm(gradient)
  return gradient / norm if 0 < norm < np.inf else np.zeros_like(gradient)
