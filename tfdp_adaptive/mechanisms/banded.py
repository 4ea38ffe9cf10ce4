# SPDX-License-Identifier: Apache-2.0
"""Banded strategies that are not Toeplitz. All columns, up to the last step, have norm one."""

import math
from typing import Dict, Mapping, Optional, Sequence, Tuple

import numpy as np
import numpy.typing as npt

from tfdp_adaptive import checks
from tfdp_adaptive.mechanisms import gram_design
from tfdp_adaptive.mechanisms import interface
from tfdp_adaptive.mechanisms import matrices
from tfdp_adaptive.mechanisms import registry
from tfdp_adaptive.mechanisms import sensitivity as sensitivity_lib
from tfdp_adaptive.mechanisms import toeplitz
from tfdp_adaptive.mechanisms import workload as workload_lib


@registry.register(
    registry.Design('banded', 'bands'),
    registry.Design('banded-optimal', 'bands', (('method', 'optimal'),)))
class Banded(interface.Mechanism):
  """C with `bands` non-zero diagonals and every column of norm one.

      c_0                          Columns that the last row cuts off would be
      c_1 c_0                      shorter than one in a Toeplitz matrix: they
      c_2 c_1 c_0 / d_{T-2}        are divided by their norms d, which only
          c_2 c_1 / d_{T-2}  1     lowers the error.

  Args:
    bands: Number of non-zero diagonals b, the main one included.
    steps: T.
    method: 'normalized', the best Toeplitz C with its columns normalized, or
      'optimal', the best banded C (O(T b^2) per iteration; 1 to 3% less error).
    coefficients: [bands] the Toeplitz C of 'normalized', instead of a design.
    workload: A `Workload` or its config; None for prefix sums.
    objective: 'mean', 'max' or 'last'; 'mean' only for the method 'optimal'.
    tolerance: For the method 'optimal': the relative distance from the least error at which the
      design may stop, roughly. By default the design stops at 1e-4 or less, or after a few
      seconds. Give a tolerance if these are not enough, as for 1,024 steps and over 100 bands.
  """

  steps: int
  bands: int
  cached = True

  def __init__(
      self, bands: int, steps: int, *, method: str = 'normalized',
      coefficients: Optional[Sequence[float]] = None, workload: workload_lib.Like = None,
      objective: str = 'mean', tolerance: Optional[float] = None) -> None:
    super().__init__(steps=steps, bands=bands, workload=workload, objective=objective)
    if tolerance is not None:
      checks.probability(tolerance=tolerance)
    self.tolerance = None if tolerance is None else float(tolerance)
    checks.one_of(('normalized', 'optimal'), method=method)
    if method == 'optimal' and (objective != 'mean' or coefficients is not None):
      raise ValueError("`objective` must be 'mean', and `coefficients` None, for the method "
                       f"'optimal'. Received: objective={objective!r}.")
    if method == 'optimal':
      matrices.check_dense(steps)
    self._toeplitz = toeplitz.BandedToeplitz(
        bands, steps, coefficients=coefficients, workload=workload, objective=objective)
    self.method = method

  @property
  def rows(self) -> np.ndarray:
    """[m, bands] the last m rows of C; earlier ones equal `rows[0]`.

    `C[t, t-j] = rows[max(0, t - (steps - m)), j]`.
    """
    return self.arrays['rows']

  def shapes(self) -> Dict[str, Tuple[int, ...]]:
    return {'rows': (self.steps if self.method == 'optimal' else self.bands, self.bands)}

  def design(self) -> Mapping[str, npt.ArrayLike]:
    if self.method == 'optimal' and self.tolerance is None and not gram_design.evaluations(
        self.bands, self.steps):
      raise ValueError(
          "`bands` and `steps` must be fewer for the method 'optimal' to end in seconds: it takes "
          'O(steps * bands^2) per iteration, and some hundred of them. Give `tolerance` (1e-4, '
          "say, to be about that far from the least error) to wait, or use method='normalized', "
          'whose error is 1 to 3% larger. '
          f'Received: bands={self.bands}, steps={self.steps}, tolerance=None.')
    c = self._toeplitz.coefficients
    norms = np.sqrt(np.cumsum(c**2))  # norms[i] is the norm of the column i before the last one.
    later = np.arange(self.bands)
    rows = c / norms[np.minimum(np.add.outer(later[::-1], later), self.bands - 1)]
    if self.method == 'optimal':
      rows = rows[self._index(np.arange(self.steps), rows)]
      rows[np.subtract.outer(np.arange(self.steps), np.arange(self.bands)) < 0] = 0
      rows = gram_design.optimal(
          rows, self.workload, self.tolerance, f'Banded(bands={self.bands}, steps={self.steps})')
    return {'rows': rows}

  def strategy(self, n: Optional[int] = None) -> np.ndarray:
    n = self._rows(n)
    return self._block(self.rows, self.steps)[:n, :n]

  def noising(self, n: Optional[int] = None) -> np.ndarray:
    return matrices.invert_lower(self.strategy(n))

  def row_norms(self, n: Optional[int] = None) -> np.ndarray:
    n = self._rows(n)
    if self.method == 'optimal':
      return super().row_norms(n)
    squares = np.cumsum(toeplitz.reciprocal(self.rows[0], n)**2)
    return (1 + self._excess()[:n]) * np.sqrt(squares)

  def squared_errors(self, n: Optional[int] = None) -> np.ndarray:
    n = self._rows(n)
    if self.method == 'optimal' or not self.workload.is_toeplitz:
      return super().squared_errors(n)
    # A C^-1 = A D T^-1 with T Toeplitz; D = I but for the last columns.
    inverse = toeplitz.reciprocal(self.rows[0], n)
    b = self.workload.apply(inverse)
    squares = np.cumsum(b**2)
    response = self.workload.coefficients(n)
    excess = self._excess()
    for t in range(max(0, self.steps - self.bands), n):
      row = b[t::-1].copy()
      for s in range(max(0, self.steps - self.bands), t + 1):
        row[:s + 1] += response[t - s] * excess[s] * inverse[s::-1]
      squares[t] = row @ row
    return squares

  def memory(self) -> int:
    return self.bands - 1

  def _sensitivity(self, min_sep: int, k: int) -> float:
    """Returns sqrt(k), exact if bands <= min_sep: columns have norm one, up to rounding."""
    if k == 1 or self.bands <= min_sep:
      return math.sqrt(k * self._squared_norms(self.rows).max())
    if self.method == 'optimal' or self.steps <= sensitivity_lib.GRAM_LIMIT:
      return sensitivity_lib.overlapping(self.strategy(), min_sep, k)
    # All patterns through one column, as if each of the k were the worst one: the
    # last 4 b columns hold every kind of neighbourhood.
    block = self._block(self.rows, min(self.steps, 4 * self.bands))
    return math.sqrt(k * sensitivity_lib.through_each(block, min_sep, k).max())

  def _index(self, t: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return np.maximum(0, t - (self.steps - len(rows)))

  def _block(self, rows: np.ndarray, count: int) -> np.ndarray:
    """Returns [count, count] the last rows and columns of C."""
    matrices.check_dense(count)
    result = np.zeros((count, count))
    for j in range(min(self.bands, count)):
      i = np.arange(j, count)
      result[i, i - j] = rows[self._index(self.steps - count + i, rows), j]
    return result

  def _squared_norms(self, rows: np.ndarray) -> np.ndarray:
    """Returns squared norms of the last columns; the first stands for all columns before it."""
    count = min(self.steps, len(rows) + self.bands - 1)
    result = np.zeros(count)
    for j in range(min(self.bands, count)):
      i = np.arange(j, count)
      result[i - j] += rows[self._index(self.steps - count + i, rows), j]**2
    return result

  def _excess(self) -> np.ndarray:
    """Returns [steps] d - 1, d the norms that the columns of 'normalized' were divided by."""
    result = np.zeros(self.steps)
    count = min(len(self.rows), self.steps)
    result[-count:] = self.rows[0, 0] / self.rows[-count:, 0] - 1
    return result
