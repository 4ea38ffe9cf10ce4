# SPDX-License-Identifier: Apache-2.0
"""Top subspaces of public gradients. Nothing here is private."""

from typing import Callable, Optional

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import contract
from tfdp_adaptive import trees

Finder = Callable[[trees.Tree, tf.DType], tf.Tensor]  # (public, dtype) -> [m, k]


def finder(dimension: Optional[int], basis: Optional[npt.ArrayLike], name: str) -> Finder:
  """Returns `(public, dtype) -> [m, k]` from a factory's arguments, which it checks."""
  if basis is not None and dimension is None:
    fixed = check_basis(basis)
    return lambda public, dtype: tf.constant(fixed, dtype)
  if basis is not None or dimension is None:
    raise ValueError('Exactly one of `dimension` and `basis` must be given. '
                     f'Received: dimension={dimension}, basis={basis!r}.')
  checks.whole(dimension=dimension)

  def of_records(public: trees.Tree, dtype: tf.DType) -> tf.Tensor:
    contract.check_public(public, name)
    return tf.cast(top(records_matrix(public), dimension), dtype)

  return of_records


def check_basis(basis: npt.ArrayLike) -> np.ndarray:
  """Returns the basis as [m, k] float64, with orthonormal columns, or raises."""
  basis = np.asarray(basis, np.float64)
  if basis.ndim != 2 or basis.shape[1] > basis.shape[0]:
    raise ValueError('`basis` must be an [m, k] matrix with k <= m. '
                     f'Received: shape {basis.shape}.')
  deviation = np.abs(basis.T @ basis - np.eye(basis.shape[1])).max()
  if not deviation < 1e-4:
    raise ValueError('`basis` must have orthonormal columns. '
                     f'Received: |V^T V - I| up to {deviation:.2g}. Use numpy.linalg.qr.')
  return basis


def records_matrix(public: trees.Tree) -> tf.Tensor:
  """Returns [n, m], one row per public record, from a tree of [n, ...] gradients."""
  leaves = tf.nest.flatten(public)
  return tf.concat([tf.reshape(leaf, [leaf.shape[0], -1]) for leaf in leaves], 1)


def top(matrix: tf.Tensor, dimension: int) -> tf.Tensor:
  """Returns [m, k] leading right singular vectors of an [n, m] matrix, largest first.

  It solves the n x n side in float64, never the m x m one. Directions of vanishing singular values
  are zero.
  """
  n, m = matrix.shape
  if dimension > min(n, m):
    raise ValueError('`dimension` must be at most the number of public records and of '
                     f'parameters. Received: dimension={dimension}, {n} records, {m} parameters.')
  matrix = tf.cast(matrix, tf.float64)
  squares, u = tf.linalg.eigh(tf.matmul(matrix, matrix, transpose_b=True))
  squares, u = squares[::-1][:dimension], u[:, ::-1][:, :dimension]  # eigh is ascending.
  inverse = tf.where(squares > 1e-13 * squares[0], tf.math.rsqrt(squares), 0)
  return tf.matmul(matrix, u, transpose_a=True) * inverse
