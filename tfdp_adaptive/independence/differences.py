# SPDX-License-Identifier: Apache-2.0
"""How far what examples give in one batch is from what they give in another."""

from typing import Any

import numpy as np


def difference(run: Any, before: Any, after: Any, rows: Any, places: Any, tolerance: float) -> str:
  """What of the examples `rows` differs where they are now, in words; '' if nothing does."""
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
  """Whether arrays of examples are equal but for rounding."""
  if np.array_equal(old, new):
    return True
  if old.dtype.kind not in 'fV':
    return False
  old, new = old.astype(np.float64), new.astype(np.float64)
  peak = np.max(np.abs(old), tuple(range(1, old.ndim)), keepdims=True, initial=0)
  return np.allclose(old, new, rtol=tolerance, atol=0, equal_nan=True) or bool(
      np.all(np.abs(old - new) <= tolerance * (np.abs(old) + 0.01 * peak)))


def moved(run: Any, before: Any, after: Any, rows: Any, places: Any) -> float:
  """How far the clipped sum of examples moves, in clip norms that are below all norms."""
  return float(np.linalg.norm(sum(
      _unit(run.gradient(before, row)) - _unit(run.gradient(after, place))
      for row, place in zip(rows, places))))


def _unit(gradient: np.ndarray) -> np.ndarray:
  norm = np.linalg.norm(gradient)
  return gradient / norm if 0 < norm < np.inf else np.zeros_like(gradient)
