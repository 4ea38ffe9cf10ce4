# SPDX-License-Identifier: Apache-2.0
"""Lower-triangular matrices, whole or by their Toeplitz coefficients."""

from typing import Any, ContextManager, Optional

import numpy as np
import scipy
import threadpoolctl

DENSE_LIMIT = 8192  # Steps above which [n, n] matrices are refused.


def one_thread() -> ContextManager[Any]:
  """Returns context for linear algebra too small to share between BLAS threads.

  On a busy machine threads spin while they wait for one another: with two,
  `eigh` of n = 256 took 540 ms instead of 9, and the tiny vectors of L-BFGS
  made a design take 18 s instead of 0.8.
  """
  return threadpoolctl.threadpool_limits(1, user_api='blas')


def invert_lower(matrix: np.ndarray) -> np.ndarray:
  """Returns the inverse of a lower-triangular matrix."""
  return scipy.linalg.solve_triangular(matrix, np.eye(len(matrix)), lower=True, check_finite=False)


def check_lower(matrix: np.ndarray) -> None:
  if np.any(np.triu(matrix, 1)) or not np.all(np.diagonal(matrix) > 0):
    raise ValueError('C^-1 must be lower triangular with positive diagonal.')


def factor_gram(gram: np.ndarray) -> np.ndarray:
  """Returns the lower-triangular C with `C^T C = gram` and positive diagonal.

  `cholesky(gram)` returns C with `C C^T = gram` instead. Rows and columns are therefore
  reversed before and after it.
  """
  return np.linalg.cholesky(gram[::-1, ::-1]).T[::-1, ::-1]


def toeplitz_matrix(values: np.ndarray, n: int) -> np.ndarray:
  """Returns [n, n] lower-triangular matrix of Toeplitz coefficients; a matrix stays as it is."""
  check_dense(n)
  c = np.asarray(values, np.float64)
  if c.ndim == 2:
    return c
  return scipy.linalg.toeplitz(resized(c, n), np.zeros(n))


def resized(values: np.ndarray, n: Optional[int]) -> np.ndarray:
  """Returns the first n values, zeros after the last one; all of them for None."""
  if n is None:
    return values
  return np.concatenate([values[:n], np.zeros(max(0, n - len(values)))])


def check_dense(n: int) -> None:
  if n > DENSE_LIMIT:
    raise ValueError(f'`n` must be at most {DENSE_LIMIT} for an [n, n] matrix. Received: n={n}.')
