# SPDX-License-Identifier: Apache-2.0
"""Noise of an explicit C^-1: past z are drawn again from their keys, none is stored.

    x_t = sum_k C^-1[t, t-k] z_{t-k}

Memory is 16 bytes per row that may be needed again. A step costs one pass per non-zero of its row.
A banded inverse has p of them. The square root and dense mechanisms have t+1, so use them for short
runs.
"""

from typing import Callable, Tuple, Union

import tensorflow as tf

from tfdp_adaptive.mechanisms import banded_inverse
from tfdp_adaptive.mechanisms import dense_optimal
from tfdp_adaptive.mechanisms import tree
from tfdp_adaptive.noise import streams


@streams.recursion.register(banded_inverse.BandedInverse)
@streams.recursion.register(banded_inverse.SquareRoot)
def toeplitz_inverse(mechanism: banded_inverse.BandedInverse) -> streams.Recursion:
  d = mechanism.inverse_coefficients
  return _regenerated(len(d) - 1, lambda row: tf.minimum(row, len(d) - 1),
                      lambda row, k, dtype: tf.gather(tf.constant(d, dtype), k))


@streams.recursion.register(dense_optimal.Dense)
def dense_inverse(mechanism: Union[dense_optimal.Dense, tree.Tree]) -> streams.Recursion:
  """Returns the noise of a dense C^-1; the mechanism restarts every `len(inverse_rows)` steps."""
  rows = mechanism.inverse_rows
  length = len(rows)

  def coefficient(row: tf.Tensor, k: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    i = row % length
    return tf.gather_nd(tf.constant(rows, dtype), [i, i - k])

  return _regenerated(length - 1, lambda row: row % length, coefficient)


def _regenerated(
    lags: int, past: Callable[[tf.Tensor], tf.Tensor],
    coefficient: Callable[..., tf.Tensor]) -> streams.Recursion:
  """Returns noise that draws past rows again from their keys.

  Args:
    lags: Number of past keys to keep.
    past: `row -> ` number of past rows with a coefficient, at most `lags`.
    coefficient: `(row, k, dtype) -> C^-1[row, row - k]`.
  """

  def advance(
      key: tf.Tensor, row: tf.Tensor, history: streams.History,
      flat: streams.Specs) -> Tuple[streams.Vectors, streams.History]:
    def term(k: tf.Tensor, key: tf.Tensor) -> streams.Vectors:
      return tuple(coefficient(row, k, z.dtype) * z for z in streams.vectors(key, flat))

    x = term(tf.zeros_like(row), key)
    if not lags:
      return x, history
    # A loop has only one past row in memory at a time. XLA would compile a slice again for each
    # position, but not `gather`.
    _, x = tf.while_loop(
        lambda k, x: k <= past(row),
        lambda k, x: (k + 1, tuple(map(tf.add, x, term(k, tf.gather(history, (row - k) % lags))))),
        (tf.ones_like(row), x), parallel_iterations=1)
    return x, tf.tensor_scatter_nd_update(history, [[row % lags]], [key])

  return lambda: tf.zeros([lags, 2], tf.int64) if lags else (), advance
