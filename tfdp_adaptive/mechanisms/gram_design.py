# SPDX-License-Identifier: Apache-2.0
"""The banded C of least mean error, not a Toeplitz one: convex in X = C^T C, which is banded.

The error is `tr(A X^-1 A^T) = tr(Y^-1)` for `Y = L^T X L`, and the inverse L of the workload has
two or three diagonals: Y is banded as well, so block tridiagonal. The trace of its inverse and the
band of Y^-2, which is the gradient, follow from recursions over the blocks, in O(T b^2) instead of
O(T^3) (the problem: Choquette-Choo et al. 2023, arXiv:2306.08153).
"""

import math
from typing import List, Optional, Tuple

import numpy as np
from scipy import linalg

from tfdp_adaptive.mechanisms import progress
from tfdp_adaptive.mechanisms import toeplitz
from tfdp_adaptive.mechanisms import workload as workload_lib

_SMALLEST = 32  # Blocks; smaller ones save nothing.
_LEAST_RATE = 1e-3  # Least rate relative to the largest; zero has no inverse.
_WORK = 4.0  # Seconds.
_MANY = 1000  # Looks of who waits.


def _seconds(bands: int, n: int) -> float:
  """About what a look at an error and its gradient takes."""
  size = max(bands + 1, _SMALLEST)
  return n / size * (1.2e-4 + 3.4e-9 * size**3) + 1.2e-7 * n * bands


def looks(bands: int, n: int) -> int:
  """Returns how many evaluations fit into seconds; 0 if too few to come within 1e-4."""
  count = min(_MANY, int(_WORK / _seconds(bands, n)))
  return count if count >= 4 * math.sqrt(n) else 0


def optimal(
    start: np.ndarray, workload: workload_lib.Workload, tolerance: Optional[float],
    name: str) -> np.ndarray:
  """[n, bands] rows of C, `C[t, t-j]` at [t, j], with unit columns and the least error.

  Args:
    start: [n, bands] rows of a C with unit columns to begin with.
    workload: A `Workload`.
    tolerance: Distance to the least error at which to stop; None to stop after `looks`.
    name: Shown in the progress bar.
  """
  n, bands = start.shape
  inverse = _inverse(workload, n)
  transposed = _backwards(inverse)
  blocks = _Blocks(n, bands + len(inverse) - 2)
  fits = np.add.outer(np.arange(1, bands), np.arange(n)) < n

  def gram(p: np.ndarray) -> np.ndarray:
    x = np.zeros([bands, n])
    x[0] = 1
    x[1:][fits] = p
    return x

  def loss(p: np.ndarray) -> Tuple[float, np.ndarray]:
    found = blocks.trace_of_inverse(_congruent(inverse, gram(p)))
    if found is None:
      return math.inf, p
    value, squared = found
    # The gradient is `L P L^T`, which is of the form `L^T X L` backwards.
    pulled = _backwards(_congruent(transposed, _backwards(squared))[:bands])
    return math.log(value), -2 * pulled[1:][fits] / value

  x = _gram(start)
  # The remaining gain is some hundred times the gain of one iteration.
  ftol = 1e-11 if tolerance is None else 1e-3 * tolerance
  with progress.bar(name) as bar:
    # So many variables that a longer memory would cost more than it saves.
    x = gram(toeplitz.minimize(loss, x[1:][fits], ftol=ftol, maxcor=10, starts=1,
                               maxiter=looks(bands, n) if tolerance is None else _MANY,
                               callback=lambda _: bar.update()))
  return _factor(x)


def _inverse(workload: workload_lib.Workload, n: int) -> np.ndarray:
  """[2 or 3, n] diagonals of A^-1: `A^-1[t+j, t]` at [j, t]."""
  rates = workload.rates(n)
  rates = np.maximum(rates, _LEAST_RATE * rates.max())
  # y_t = m_t - beta m_{t-1}, m_t = (theta_t - theta_{t-1}) / r_t.
  beta, result = workload.momentum, np.zeros([3 if workload.momentum else 2, n])
  result[0] = 1 / rates
  result[1, :-1] = -1 / rates[1:] - beta / rates[:-1]
  if beta:
    result[2, :-2] = beta / rates[1:-1]
  return result


def _gram(rows: np.ndarray) -> np.ndarray:
  """[bands, n] of C^T C the entry [t+j, t] at [j, t]."""
  n, bands = rows.shape
  result = np.zeros([bands, n])
  for j in range(bands):
    for lag in range(j, bands):  # Row t + lag holds columns t and t + j.
      result[j, :n - lag] += rows[lag:, lag] * rows[lag:, lag - j]
  return result


def _factor(x: np.ndarray) -> np.ndarray:
  """[n, bands] rows of the lower triangular C with this Gram matrix: `_gram` backwards."""
  return linalg.cholesky_banded(_backwards(x), lower=True)[:, ::-1].T.copy()


def _backwards(x: np.ndarray) -> np.ndarray:
  """Diagonals of the matrix with the order of rows and columns reversed, transposed."""
  result = np.zeros_like(x)
  for j in range(min(x.shape)):
    result[j, :x.shape[1] - j] = x[j, :x.shape[1] - j][::-1]
  return result


def _shifted(x: np.ndarray, by: int) -> np.ndarray:
  """`x[t + by]` at t, zeros beyond the ends."""
  result = np.zeros_like(x)
  if 0 <= by < len(x):
    result[:len(x) - by] = x[by:]
  elif -len(x) < by < 0:
    result[-by:] = x[:by]
  return result


def _congruent(inverse: np.ndarray, x: np.ndarray) -> np.ndarray:
  """Diagonals of `L^T X L`."""
  bands, taps = len(x), len(inverse)
  result = np.zeros([bands + taps - 1, x.shape[1]])
  for m, row in enumerate(result):
    for u in range(taps):
      left = _shifted(inverse[u], m)  # L[t+m+u, t+m]
      for v in range(taps):  # X[t+m+u, t+v]
        lag = m + u - v
        if abs(lag) < bands:
          row += left * inverse[v] * _shifted(x[abs(lag)], min(v, m + u))
  return result


class _Blocks:
  """Matrices of n rows whose entries more than `reach` off the diagonal are zero."""

  def __init__(self, n: int, reach: int) -> None:
    self._n, self._size = n, max(reach, _SMALLEST)
    self._count = -(-n // self._size)
    self._rest = self._count * self._size - n
    i, j = np.indices((self._size, self._size))
    self._lower = i >= j
    self._reach = reach
    starts = self._size * np.arange(self._count)[:, None, None]
    total = self._count * self._size
    lag = np.abs(i - j)
    self._diagonal = np.where(lag <= reach, lag * total + starts + np.minimum(i, j), 0)
    self._near = lag <= reach
    lag = self._size + i - j
    self._below, self._off = lag <= reach, np.where(lag <= reach, lag * total + starts[:-1] + j, 0)

  def trace_of_inverse(self, y: np.ndarray) -> Optional[Tuple[float, np.ndarray]]:
    """`(tr(Y^-1), diagonals of Y^-2)` from diagonals; None if Y is not positive definite."""
    padded = np.pad(y, ((0, 0), (0, self._rest)))
    padded[0, self._n:] = 1
    flat = padded.ravel()
    diagonal = np.where(self._near, flat[self._diagonal], 0.0)
    off = np.where(self._below, flat[self._off], 0.0)
    # Last block of the inverse of each leading block, and of the square of that inverse.
    inverses: List[np.ndarray] = []
    squares: List[np.ndarray] = []
    carried: List[np.ndarray] = []
    for k in range(self._count):
      pivot, inner = diagonal[k], np.eye(self._size)
      if k:
        pivot = pivot - off[k - 1] @ carried[-1]
        inner = inner + off[k - 1] @ squares[-1] @ off[k - 1].T
      factor, info = linalg.lapack.dpotrf(pivot, lower=1)
      if info:
        return None
      half, _ = linalg.lapack.dpotri(factor, lower=1)
      inverse = np.where(self._lower, half, half.T)
      inverses.append(inverse)
      squares.append(inverse @ inner @ inverse)
      if k < self._count - 1:
        carried.append(inverse @ off[k].T)
    result = np.zeros_like(padded).ravel()
    whole = inverses[-1]
    right = whole @ whole  # Weight of the columns from this block on.
    trace = 0.0
    for k in range(self._count - 1, -1, -1):
      if k < self._count - 1:
        up, below = carried[k], off[k].T @ whole
        ahead = up @ right
        corner = -ahead - (squares[k] + up @ below.T @ squares[k]) @ below
        result[self._off[k][self._below]] = corner.T[self._below]
        whole = inverses[k] + up @ whole @ up.T
        right = whole @ whole + ahead @ up.T
      trace += np.trace(whole)
      square = right
      if k:
        before = whole @ off[k - 1]
        square = right + before @ squares[k - 1] @ before.T
      kept = self._near & self._lower
      result[self._diagonal[k][kept]] = square[kept]
    return trace - self._rest, result.reshape(padded.shape)[:, :self._n]
