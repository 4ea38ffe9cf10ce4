# SPDX-License-Identifier: Apache-2.0
"""Strategies with a banded inverse: noise from the last few rows of Z, kept nowhere.

Since C^-1 is banded, step t needs z_t, ..., z_{t-p+1} only, which can be drawn
again from their keys (Kalinin, McKenna, Upadhyay, Lampert 2025,
arXiv:2505.12128; powers of 1 - x: arXiv:2605.18379).
"""

import functools
import math
from typing import Dict, Mapping, Optional, Sequence, Tuple

import numpy as np
import numpy.typing as npt
import scipy

from tfdp_adaptive import checks
from tfdp_adaptive.mechanisms import matrices
from tfdp_adaptive.mechanisms import registry
from tfdp_adaptive.mechanisms import sensitivity as sensitivity_lib
from tfdp_adaptive.mechanisms import toeplitz
from tfdp_adaptive.mechanisms import workload as workload_lib

_LARGEST = 1e100  # Coefficient of C; if larger, C^-1 is useless and squares overflow.
_LONG = 1 << 14  # Steps from which on a design has fewer iterations.
_WORK = 20_000  # Coefficients of C^-1 times iterations of a design of many steps.
_SETTLED = 1e-20  # Momentum below this fraction of its start counts as zero.


@registry.register(registry.Design('banded-inverse', 'inverse_bands'))
class BandedInverse(toeplitz.ToeplitzMechanism):
  """C^-1 with coefficients `inverse_coefficients`, zero from index `inverse_bands` on.

  Args:
    inverse_bands: Number of non-zero diagonals p of C^-1.
    steps: T.
    method: 'optimal', or 'power': the best first p coefficients of (1 - x)^gamma.
    coefficients: [inverse_bands] coefficients of C^-1, up to scale, instead of a design.
    min_sep: Least distance between two steps of a record. The design minimizes the error for
      `min_sep` and `max_participations`.
    max_participations: As in `sensitivity`.
    workload: A `Workload` or its config; None for prefix sums.
    objective: 'mean', 'max' or 'last', the error to minimize.
  """

  steps: int
  inverse_bands: int
  cached = True

  def __init__(
      self, inverse_bands: int, steps: int, *, method: str = 'optimal',
      coefficients: Optional[Sequence[float]] = None, min_sep: Optional[int] = None,
      max_participations: int = 1, workload: workload_lib.Like = None,
      objective: str = 'mean') -> None:
    super().__init__(
        steps=steps, inverse_bands=inverse_bands, workload=workload, objective=objective,
        min_sep=min_sep, max_participations=max_participations)
    checks.one_of(('optimal', 'power'), method=method)
    self.method = method
    self._given = toeplitz.check_coefficients(coefficients, inverse_bands)

  @property
  def inverse_coefficients(self) -> np.ndarray:
    """[inverse_bands] d: `x_t = sum_{k<p} d_k z_{t-k}`."""
    return self.arrays['inverse_coefficients']

  def shapes(self) -> Dict[str, Tuple[int, ...]]:
    return {'inverse_coefficients': (self.inverse_bands,)}

  def strategy(self, n: Optional[int] = None) -> np.ndarray:
    return toeplitz.reciprocal(self.inverse_coefficients, self._rows(n))

  def noising(self, n: Optional[int] = None) -> np.ndarray:
    return matrices.resized(self.inverse_coefficients, None if n is None else self._rows(n))

  def design(self) -> Mapping[str, npt.ArrayLike]:
    d = self._given
    if d is None:
      d = self._power()
      if self.method == 'optimal':
        # Majorants make kinks, along which it crawls: thousands of iterations would gain 0.3%.
        most = min(1000, _WORK // self.inverse_bands) if self.steps > _LONG else 1000
        d = _differences(toeplitz.minimize(self._loss, np.cumsum(d)[1:], maxiter=most))
    norm = np.linalg.norm(toeplitz.reciprocal(np.asarray(d), self.steps))
    return {'inverse_coefficients': np.asarray(d) * norm}

  def passes(self) -> int:
    return self.inverse_bands

  def _power(self) -> np.ndarray:
    """Returns the first p coefficients of (1-x)^gamma (1-beta x)^gamma for the best gamma."""
    def coefficients(gamma: float) -> np.ndarray:
      k = np.arange(1, self.inverse_bands)
      root = np.cumprod(np.concatenate([[1.0], (k - 1 - gamma) / k]))
      decayed = root * self.workload.momentum ** np.arange(len(root))
      return np.convolve(root, decayed)[:self.inverse_bands]
    value = lambda gamma: self._loss(np.cumsum(coefficients(gamma))[1:])[0]
    optimum = scipy.optimize.minimize_scalar(value, bounds=(0.01, 0.999), method='bounded')
    return coefficients(optimum.x)

  def _loss(self, sums: np.ndarray) -> Tuple[float, np.ndarray]:
    """Returns the log of squared error times squared sensitivity (or its bound), and its gradient.

    The variables are the partial sums d_0 + ... + d_k, k > 0, with d_0 = 1:
    errors are close to a sphere in them, and line searches rarely fail.
    """
    d = _differences(sums)
    size, size_gradient = self._size(d)
    if not size < math.inf:
      return math.inf, sums
    error, error_gradient = self._squared_error_of(d)
    gradient = error_gradient / error + size_gradient / size
    return math.log(error) + math.log(size), gradient[1:] - np.append(gradient[2:], 0.0)

  @functools.cached_property
  def _squared_error_of(self) -> toeplitz.Loss:
    if self.workload.is_toeplitz:
      return lambda d: _squared_error(d, self.steps, self.workload, self.objective)
    return workload_lib.Form(self.workload, self.steps, self.inverse_bands, self.objective)

  def _size(self, d: np.ndarray) -> Tuple[float, np.ndarray]:
    """Returns the squared sensitivity (or a bound) and its gradient; inf if C grows too large."""
    pattern = self.min_sep or 1, self.max_participations
    c = toeplitz.decaying_reciprocal(d, self.steps)
    if not np.abs(c).max() < _LARGEST:
      return math.inf, d
    size, pulled = _squared_sensitivity(c, self.steps, *pattern)
    return size, toeplitz.pull(d, pulled, c, c)


@registry.register(registry.Design('square-root'))
class SquareRoot(BandedInverse):
  """B = C = A^(1/2), up to a factor: least maximal error of all Toeplitz strategies.

  Fichtenberger, Henzinger, Upadhyay 2022 (arXiv:2202.11205).

  A stream draws t + 1 rows at step t, so this mechanism is a reference for small T, and too slow
  for training. Truncated, it is `BandedToeplitz(method='square_root')`.

  Args:
    steps: T.
    workload: A `Workload` with a constant learning rate, or its config.
  """

  cached = False

  def __init__(self, steps: int, *, workload: workload_lib.Like = None) -> None:
    super().__init__(steps, steps, workload=workload, objective='max')
    if not self.workload.is_toeplitz:
      raise ValueError('`workload` must have a constant learning rate for SquareRoot; use Dense, '
                       'BandedToeplitz, BandedInverse or BLT for a schedule. '
                       f'Received: {len(self.workload.learning_rates)} learning rates.')

  def design(self) -> Mapping[str, npt.ArrayLike]:
    c = toeplitz.square_root(self.workload, self.steps)
    # A^-1 = (1 - x)(1 - beta x), times A^(1/2), is A^(-1/2).
    inverse = np.convolve(c, [1.0, -1.0])[:self.steps]
    inverse = np.convolve(inverse, [1.0, -self.workload.momentum])[:self.steps]
    return {'inverse_coefficients': np.linalg.norm(c) * inverse}


def _differences(sums: np.ndarray) -> np.ndarray:
  return np.diff(np.concatenate([[0.0, 1.0], sums]))


def _squared_error(
    d: np.ndarray, steps: int, workload: workload_lib.Workload,
    objective: str) -> Tuple[float, np.ndarray]:
  """Returns the squared error at a constant rate and its gradient in d."""
  settles = math.log(_SETTLED) / math.log(workload.momentum) if workload.momentum else 0
  length = min(steps, len(d) + math.ceil(settles))
  b = workload.apply(matrices.resized(d, length))
  weights, tail = toeplitz.error_weights(steps, length, objective)
  limit = workload.limit * np.sum(d)
  gradient = workload.apply((2 * weights * b)[::-1])[::-1][:len(d)]
  return weights @ b**2 + tail * limit**2, gradient + 2 * tail * limit * workload.limit


def _squared_sensitivity(
    c: np.ndarray, steps: int, min_sep: int, k: int) -> Tuple[float, np.ndarray]:
  """Returns the squared sensitivity (if k > 1, of the monotone majorant) and its gradient in c."""
  if k == 1:
    return c @ c, 2 * c
  k = sensitivity_lib.most_participations(steps, min_sep, k)
  size = np.abs(c[::-1])
  largest = np.maximum.accumulate(size)
  source = np.maximum.accumulate(np.where(size >= largest, np.arange(len(c)), 0))[::-1]
  source = len(c) - 1 - source
  column = sensitivity_lib.equal_spacing_column(largest[::-1], steps, min_sep, k)
  pulled = sensitivity_lib.equal_spacing_column(2 * column[::-1], len(column), min_sep, k)[::-1]
  return column @ column, np.bincount(source, pulled[:len(c)], len(c)) * np.sign(c)
