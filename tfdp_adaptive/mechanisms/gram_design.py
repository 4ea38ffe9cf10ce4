# SPDX-License-Identifier: Apache-2.0
"""The C of least mean error whose Gram matrix has given zeros.

Convex in X = C^T C: `tr(A^T A X^-1)`, gradient `-X^-1 A^T A X^-1`; O(T^3) per
iteration (Choquette-Choo et al. 2023, arXiv:2211.06530 and arXiv:2306.08153).
"""

import math
from typing import Tuple

import numpy as np
from scipy import linalg

from tfdp_adaptive.mechanisms import progress
from tfdp_adaptive.mechanisms import toeplitz
from tfdp_adaptive.mechanisms import workload as workload_lib


def optimal(
    start: np.ndarray, free: np.ndarray, group: np.ndarray, workload: workload_lib.Workload,
    name: str) -> np.ndarray:
  """[n, n] X, positive definite, of least error among those with its zeros and diagonal.

  Args:
    start: [n, n] a C with unit columns to begin with; entries of its C^T C that
      are not free are left out.
    free: [n, n] which entries below the diagonal may differ from zero.
    group: [n] integers; the diagonal sums to one over every group.
    workload: A `Workload`.
    name: Shown in the progress bar.
  """
  n = len(start)
  a = workload.materialize(n)
  gram = a.T @ a
  i, j = np.nonzero(np.tril(free, -1))

  def matrix(p: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    """X from the logarithms of its diagonal (up to a factor per group) and its correlations."""
    diagonal = np.exp(p[:n])
    diagonal /= np.bincount(group, diagonal)[group]
    root = np.sqrt(diagonal)
    x = np.diag(diagonal)
    x[i, j] = x[j, i] = p[n:] * root[i] * root[j]
    return x, root

  def loss(p: np.ndarray) -> Tuple[float, np.ndarray]:
    x, root = matrix(p)
    try:
      factor = linalg.cho_factor(x, lower=True)
    except linalg.LinAlgError:
      return math.inf, p
    product = linalg.cho_solve(factor, gram)
    value = np.trace(product)
    pulled = -linalg.cho_solve(factor, product.T)
    scaling = np.sum(pulled * x, axis=1)  # A logarithm scales a row and a column.
    scaling -= np.bincount(group, scaling)[group] * root**2
    gradient = np.concatenate([scaling, 2 * pulled[i, j] * root[i] * root[j]])
    return math.log(value), gradient / value

  p = np.concatenate([np.zeros(n), (start.T @ start)[i, j]])
  with progress.bar(name) as bar:
    # So many variables that a longer memory would cost more than it saves.
    return matrix(toeplitz.minimize(
        loss, p, ftol=1e-13, maxcor=10, callback=lambda _: bar.update()))[0]


def lower_bound(x: np.ndarray, group: np.ndarray, workload: workload_lib.Workload) -> float:
  """Of the mean error of any C with `sum_{i,j in g} |(C^T C)_ij| <= 1` for every group g.

  Weak duality: for V >= 0 with zeros between groups, `tr(V C^T C)` is at most
  the sum of the largest |V_ij| of each group, and `tr(A^T A X^-1) tr(V X)` at
  least the square of the nuclear norm of `A V^(1/2)`. V is taken from X; the
  bound is tight where X is the optimum.
  """
  n = len(x)
  a = workload.materialize(n)
  half = linalg.solve(x, a.T, assume_a='pos')
  v = np.where(group[:, None] == group, half @ half.T, 0.0)
  prices = np.zeros(group.max() + 1)
  np.maximum.at(prices, group, np.abs(v).max(axis=1))
  squares, vectors = linalg.eigh(v)
  root = vectors * np.sqrt(np.maximum(squares, 0.0))
  nuclear = linalg.svdvals(a @ root).sum()
  return float(nuclear / math.sqrt(n * prices.sum()))
