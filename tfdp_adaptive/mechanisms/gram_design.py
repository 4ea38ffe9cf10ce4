# SPDX-License-Identifier: Apache-2.0
"""Strategies of least mean error that are not Toeplitz: convex problems in X = C^T C.

For a banded C, X is banded. The error is `tr(A X^-1 A^T)`, and its gradient is the band of
`-X^-1 A^T A X^-1` (the problem: Choquette-Choo et al. 2023, arXiv:2306.08153). An evaluation is a
banded solve, O(T^2 b).

For records with one place in every epoch (`optimal_in_order`), columns of C at one place are
orthogonal, and their squared norms sum to one: X minimizes the same error under conditions that are
linear in X (Choquette-Choo et al. 2023, arXiv:2211.06530). The variables are the logarithms of the
diagonal of X and its correlations between different places. Let V hold the multipliers of the
conditions: zero between different places, and at most one price p for every place. For any such V

    error >= tr((V^1/2 A^T A V^1/2)^1/2) / sqrt(T sum(p)).

An X implies multipliers, and so a lower bound that says how close it is to the best.
"""

import math
from typing import Callable, Optional, Tuple

import numpy as np
import scipy

from tfdp_adaptive.mechanisms import matrices
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


def optimal_in_order(
    workload: workload_lib.Workload, n: int, epoch: int, tolerance: float, most: int,
    callback: Callable[..., object]) -> Tuple[np.ndarray, float, float]:
  """Searches for the best X, O(n^3) per evaluation.

  Args:
    workload: A `Workload`.
    n: The number of steps.
    epoch: The number of places.
    tolerance: About how far from the least error, relative to it, the search may stop.
    most: The largest number of iterations.
    callback: Is called after every iteration.

  Returns:
    `(X, error, bound)`: [n, n], its error, and the lower bound of any error.
  """
  place = np.arange(n) % epoch
  i, j = np.nonzero(np.tril(place[:, None] != place, -1))
  a = workload.materialize(n)
  gram = a.T @ a

  def matrix(p: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    """Returns X of log-diagonals (up to a factor per place) and correlations, and roots."""
    diagonal = np.exp(p[:n])
    diagonal /= np.bincount(place, diagonal)[place]
    root = np.sqrt(diagonal)
    x = np.diag(diagonal)
    x[i, j] = x[j, i] = p[n:] * root[i] * root[j]
    return x, root

  def loss(p: np.ndarray) -> Tuple[float, np.ndarray]:
    x, root = matrix(p)
    try:
      factor = scipy.linalg.cho_factor(x, lower=True)
    except scipy.linalg.LinAlgError:
      return math.inf, p
    product = scipy.linalg.cho_solve(factor, gram)
    value = np.trace(product)
    pulled = -scipy.linalg.cho_solve(factor, product.T)
    scaling = np.sum(pulled * x, axis=1)  # A logarithm scales a row and a column.
    scaling -= np.bincount(place, scaling)[place] * root**2
    gradient = np.concatenate([scaling, 2 * pulled[i, j] * root[i] * root[j]])
    return math.log(value), gradient / value

  # C has as many bands as places: columns of one place do not overlap.
  start = matrices.toeplitz_matrix(
      toeplitz.square_root(workload_lib.Workload(workload.momentum), min(epoch, n)), n)
  start /= np.linalg.norm(start, axis=0)
  x = matrix(toeplitz.minimize(
      loss, np.concatenate([np.zeros(n), (start.T @ start)[i, j]]), ftol=1e-8 * tolerance,
      maxcor=10, maxiter=most, callback=callback))[0]
  solved = scipy.linalg.solve(x, a.T, assume_a='pos')
  error = math.sqrt(float(np.sum(a.T * solved)) / n)
  v = np.where(place[:, None] == place, solved @ solved.T, 0.0)
  prices = np.zeros(place.max() + 1)
  np.maximum.at(prices, place, np.abs(v).max(axis=1))
  squares, vectors = scipy.linalg.eigh(v)
  nuclear = scipy.linalg.svdvals(a @ (vectors * np.sqrt(np.maximum(squares, 0.0)))).sum()
  return x, error, float(nuclear / math.sqrt(n * prices.sum()))
