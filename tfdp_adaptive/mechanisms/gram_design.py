# SPDX-License-Identifier: Apache-2.0
"""The banded C of least mean error, not a Toeplitz one: convex in X = C^T C, which is banded.

The error is `tr(A X^-1 A^T)`, and its gradient is the band of `-X^-1 A^T A X^-1` (the problem:
Choquette-Choo et al. 2023, arXiv:2306.08153). An evaluation is a banded solve, O(T^2 b).
"""

import math
from typing import Optional, Tuple

import numpy as np
import scipy

from tfdp_adaptive.mechanisms import progress
from tfdp_adaptive.mechanisms import toeplitz
from tfdp_adaptive.mechanisms import workload as workload_lib

_WORK = 12.0  # Seconds.
_MOST = 1000  # Largest number of evaluations, used if a `tolerance` is given.


def evaluations(bands: int, n: int) -> int:
  """Returns how many evaluations fit into seconds; 0 if too few to come within 1e-4."""
  seconds = n**2 * (5.5e-8 + 3.5e-10 * bands)
  count = min(_MOST, int(_WORK / seconds))
  return count if count >= 4 * math.sqrt(n) else 0


def optimal(
    start: np.ndarray, workload: workload_lib.Workload, tolerance: Optional[float],
    name: str) -> np.ndarray:
  """Returns [n, bands] rows of C, `C[t, t-j]` at [t, j], with unit columns and the least error.

  Args:
    start: [n, bands] rows of a C with unit columns to begin with.
    workload: A `Workload`.
    tolerance: Distance to the least error at which to stop; None to stop after `evaluations`.
    name: Shown in the progress bar.
  """
  n, bands = start.shape
  a = workload.materialize(n)
  fits = np.add.outer(np.arange(1, bands), np.arange(n)) < n

  def gram(p: np.ndarray) -> np.ndarray:
    x = np.zeros([bands, n])
    x[0] = 1
    x[1:][fits] = p
    return x

  def loss(p: np.ndarray) -> Tuple[float, np.ndarray]:
    found = error_of(gram(p), a)
    if found is None:
      return math.inf, p
    value, gradient = found
    return math.log(value), 2 * gradient[1:][fits] / value

  # The remaining gain is some hundred times the gain of one iteration.
  ftol = 1e-11 if tolerance is None else 1e-3 * tolerance
  with progress.bar(name) as bar:
    # A longer memory of so many variables would cost more than it saves.
    x = gram(toeplitz.minimize(
        loss, of_rows(start)[1:][fits], ftol=ftol, maxcor=10,
        maxiter=evaluations(bands, n) if tolerance is None else _MOST,
        callback=lambda _: bar.update()))
  return factor(x)


def error_of(x: np.ndarray, a: np.ndarray) -> Optional[Tuple[float, np.ndarray]]:
  """Returns `tr(A X^-1 A^T)` and its gradient in the diagonals of X; None unless X > 0."""
  n = x.shape[1]
  try:
    lower = scipy.linalg.cholesky_banded(x, lower=True, check_finite=False)
  except scipy.linalg.LinAlgError:
    return None
  solved = scipy.linalg.cho_solve_banded((lower, True), a.T, check_finite=False)
  gradient = np.zeros_like(x)
  for j in range(len(x)):
    gradient[j, :n - j] = -np.einsum('ij,ij->i', solved[j:], solved[:n - j])
  return float(np.sum(a.T * solved)), gradient


def of_rows(rows: np.ndarray) -> np.ndarray:
  """Returns [bands, n] of C^T C the entry [t+j, t] at [j, t]."""
  n, bands = rows.shape
  result = np.zeros([bands, n])
  for j in range(bands):
    for lag in range(j, bands):  # Row t + lag holds columns t and t + j.
      result[j, :n - lag] += rows[lag:, lag] * rows[lag:, lag - j]
  return result


def factor(x: np.ndarray) -> np.ndarray:
  """Returns [n, bands] rows of the lower triangular C with a Gram matrix from `of_rows`."""
  backwards = np.zeros_like(x)
  for j in range(len(x)):
    backwards[j, :x.shape[1] - j] = x[j, :x.shape[1] - j][::-1]
  return scipy.linalg.cholesky_banded(backwards, lower=True)[:, ::-1].T.copy()
