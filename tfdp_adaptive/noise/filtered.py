# SPDX-License-Identifier: Apache-2.0
"""The exact variance of a mechanism's noise after a linear filter of the releases.

A low pass, momentum or any other recursion over releases

    m_t = -sum_{i>=1} a_i m_{t-i} + sum_{i>=0} b_i g_{t-i},        m_t = g_t = 0 before the first

turns the noise tau_t (C^-1 Z)_t of release t into `u_t Z` with a row of scalars

    u_t = -sum_{i>=1} a_i u_{t-i} + sum_{i>=0} b_i tau_{t-i} C^-1[t-i, :]

so its variance is ||u_t||^2 for any C^-1 and any tau. If you filter the variances instead,
correlated noise is treated as independent. For the square root mechanism the result is more than
three times too large.

The state holds what the recursion still needs: the last rows u and tau C^-1. A mechanism costs
O(steps) scalars per step. Independent noise needs no rows. Its new rows are orthogonal to all
earlier ones, so the Gram matrix of the state is enough.
"""

from typing import Any, Callable, NamedTuple, Sequence, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import mechanisms
from tfdp_adaptive.noise import streams


class State(NamedTuple):
  """State of the filter. It is public: it depends on the mechanism and on variances only."""

  row: tf.Tensor  # [] int64, releases so far.
  past: tf.Tensor  # [taps, steps] rows, newest first: of u, then of tau C^-1; or [taps, taps] Gram.


class FilteredVariance(NamedTuple):
  """A pair of pure functions.

  Attributes:
    init: `dtype -> State` before the first release; it is kept in that dtype (float32 by default).
    next: `(state, variance) -> (filtered, state)`. `variance` is the variance of
      an element of release t, as in `Release.variance`: tau_t^2 times the row's r_t.
      `filtered` is the variance of an element of m_t, computed in float32. Both are [], of one
      dtype.
  """

  init: Callable[..., State]
  next: Callable[[State, Any], Any]


# `(row, past, variance) -> (filtered, past)`, all in float32.
_Advance = Callable[[tf.Tensor, tf.Tensor, tf.Tensor], Tuple[tf.Tensor, tf.Tensor]]


def filtered_variance(mechanism: mechanisms.Mechanism, b: Sequence[float],
                      a: Sequence[float] = ()) -> FilteredVariance:
  """Returns functions that compute the variance of `m_t` step by step.

  Use it in a rule that passes the filtered release to another rule. If the release is divided by
  the gain c_t (the same recursion driven by ones), the variance is `filtered / c_t**2`. The filter
  acts on one scalar tau per release. If every coordinate has its own scale, filter in the scaled
  space, where all noise has one variance.

  Call `next` once per release, in order, starting with the mechanism's first row. After
  `mechanism.steps` rows the last row is used again, as in the stream.

  Args:
    mechanism: The mechanism of the releases' noise.
    b: b_0, b_1, ...; at least one.
    a: a_1, a_2, ... (a_0 is one): `a=(-.8,)` adds .8 m_{t-1}.
  """
  b, a = np.asarray(b, np.float64), np.asarray(a, np.float64)
  if b.ndim != 1 or not b.size or a.ndim != 1 or not (
      np.all(np.isfinite(b)) and np.all(np.isfinite(a))):
    raise ValueError('`b` must be one or more finite numbers, and `a` any number of them. '
                     f'Received: b={b}, a={a}.')
  shape, advance = (_independent(b, a) if isinstance(mechanism, mechanisms.IndependentGaussian)
                    else _correlated(streams.as_run(mechanism), b, a))

  def init(dtype: tf.DType = tf.float32) -> State:
    return State(tf.zeros([], tf.int64), tf.zeros(shape, dtype))

  def next_variance(state: State, variance: Any) -> Tuple[tf.Tensor, State]:
    variance = tf.convert_to_tensor(variance)
    filtered, past = advance(
        state.row, tf.cast(state.past, tf.float32), tf.cast(variance, tf.float32))
    return (tf.cast(filtered, variance.dtype),
            State(state.row + 1, tf.cast(past, state.past.dtype)))

  return FilteredVariance(init, next_variance)


def _correlated(
    run: mechanisms.Mechanism, b: np.ndarray, a: np.ndarray) -> Tuple[Tuple[int, int], _Advance]:
  outputs, inputs = len(a), len(b) - 1
  variances = np.square(run.row_norms(run.steps))
  row_of = _rows(run)

  def advance(
      row: tf.Tensor, past: tf.Tensor, variance: tf.Tensor) -> Tuple[tf.Tensor, tf.Tensor]:
    t = tf.minimum(row, len(variances) - 1)
    tau = tf.sqrt(variance / tf.gather(tf.constant(variances, tf.float32), t))
    new = tau * row_of(t)
    before, given = past[:outputs], tf.concat([new[None], past[outputs:]], 0)
    u = tf.linalg.matvec(tf.concat([before, given], 0),
                         tf.constant(np.concatenate([-a, b]), tf.float32), transpose_a=True)
    past = tf.concat([tf.concat([u[None], before], 0)[:outputs], given[:inputs]], 0)
    return tf.reduce_sum(u**2), past

  return (outputs + inputs, row_of(tf.constant(0, tf.int64)).shape[0]), advance


def _rows(run: mechanisms.Mechanism) -> Callable[[tf.Tensor], tf.Tensor]:
  """Returns `t -> [width]`, row t of C^-1 in float32."""
  noising = run.noising(run.steps)
  if noising.ndim == 2:
    matrix = tf.constant(noising, tf.float32)
    return lambda t: tf.gather(matrix, t)
  # Row t is d_t, ..., d_0, 0, ..., 0.
  mirrored = tf.constant(np.concatenate([noising[::-1], np.zeros(len(noising) - 1)]), tf.float32)
  return lambda t: tf.slice(mirrored, [len(noising) - 1 - t], [len(noising)])


def _independent(b: np.ndarray, a: np.ndarray) -> Tuple[Tuple[int, int], _Advance]:
  """Updates the Gram matrix of the state F state + G z: P <- F P F' + tau^2 G G'."""
  outputs, inputs = len(a), len(b) - 1
  size = outputs + inputs
  kept = np.concatenate([-a, b[1:]])  # Weights of the past; b[0] is that of the new input.
  step, entry = np.zeros((size, size)), np.zeros(size)
  if outputs:
    step[0], entry[0] = kept, b[0]
    step[np.arange(1, outputs), np.arange(outputs - 1)] = 1
  if inputs:
    entry[outputs] = 1
    step[np.arange(outputs + 1, size), np.arange(outputs, size - 1)] = 1

  def advance(
      row: tf.Tensor, past: tf.Tensor, variance: tf.Tensor) -> Tuple[tf.Tensor, tf.Tensor]:
    del row
    f, g, w = (tf.constant(x, tf.float32) for x in (step, entry, kept))
    filtered = tf.tensordot(w, tf.linalg.matvec(past, w), 1) + b[0]**2 * variance
    return filtered, f @ past @ tf.transpose(f) + variance * g[:, None] * g

  return (size, size), advance
