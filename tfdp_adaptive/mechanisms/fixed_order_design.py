# SPDX-License-Identifier: Apache-2.0
"""The C of least mean error for records with one place in every epoch.

Columns of C at one place are orthogonal, and their squared norms sum to one: X = C^T C minimizes
`tr(A^T A X^-1)` under conditions that are linear in X (Choquette-Choo et al. 2023,
arXiv:2211.06530). The variables are the logarithms of the diagonal of X and its correlations
between different places. Let V hold the multipliers of the conditions: zero between different
places, and at most one price p for every place. For any such V >= 0

    error >= tr((V^1/2 A^T A V^1/2)^1/2) / sqrt(T sum(p)).

An X implies multipliers, and so a lower bound that says how close it is to the best.
"""

import math
from typing import Callable, Tuple

import numpy as np
import scipy

from tfdp_adaptive.mechanisms import matrices
from tfdp_adaptive.mechanisms import toeplitz
from tfdp_adaptive.mechanisms import workload as workload_lib


def optimal(
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
