# SPDX-License-Identifier: Apache-2.0
"""Toeplitz strategies: independent noise, and the banded design with the least error.

The matrices C of the design have coefficients c_0, ..., c_{b-1} (Choquette-Choo et al. 2023,
arXiv:2306.08153; Toeplitz: McKenna 2024, arXiv:2405.15913). Cost per
evaluation is O(L b) with L about b sqrt(T / b): coefficients of A C^-1 tend to
a constant geometrically, so their tail is summed in closed form.
"""

import math
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import numpy.typing as npt
import scipy

from tfdp_adaptive import checks
from tfdp_adaptive.mechanisms import interface
from tfdp_adaptive.mechanisms import matrices
from tfdp_adaptive.mechanisms import registry
from tfdp_adaptive.mechanisms import sensitivity as sensitivity_lib
from tfdp_adaptive.mechanisms import workload as workload_lib

_TAIL = 1e-10  # Relative distance from the limit at which the tail is closed.
Loss = Callable[[np.ndarray], Tuple[float, np.ndarray]]  # x -> (value, gradient)

_NEGLIGIBLE = 1e-16  # Smaller coefficients do not count; the first one is 1.
_GONE = 1e-290  # Smaller ones are zero; arithmetic with numbers near 1e-308 is slow.
_DIRECT = 1 << 12  # Coefficients of a reciprocal that are computed one by one.
_FEW_PRODUCTS = 1 << 24  # Length times taps up to which products are faster than transforms.
_HUGE = 1e100  # C^-1 counts as unstable, before products overflow.
_FEW_LAGS = 64  # Number of products of long vectors that are faster than one transform.
_MOST_FORMED = 1 << 11  # Largest number of coefficients of C^-1 of a design for a schedule.
_LONGEST = 1 << 23  # Coefficients simulated before C^-1 counts as unstable.


class ToeplitzMechanism(interface.Mechanism):
  """C is a lower-triangular Toeplitz matrix: everything follows from its first column."""

  def row_norms(self, n: Optional[int] = None) -> np.ndarray:
    return np.sqrt(np.cumsum(self.noising(self._rows(n))**2))

  def squared_errors(self, n: Optional[int] = None) -> np.ndarray:
    inverse = self.noising(self._rows(n))
    if self.workload.is_toeplitz:
      return np.cumsum(self.workload.apply(inverse)**2)
    return workload_lib.squared_errors(self.workload, inverse)

  def _sensitivity(self, min_sep: int, k: int) -> float:
    coefficients = self.strategy()
    return sensitivity_lib.toeplitz(coefficients, self.steps or len(coefficients), min_sep, k)

  def _fixed_order_sensitivity(self, epoch: int, k: int) -> float:
    """Returns an upper bound, exact for coefficients >= 0; inf unless k is all epochs.

    The first place is the worst one: columns of later places are cut short.
    """
    if self.steps is None or k * epoch < self.steps:
      return math.inf
    return float(np.linalg.norm(sensitivity_lib.equal_spacing_column(
        np.abs(self.strategy()), self.steps, epoch, k)))


@registry.register(registry.Design('independent'))
class IndependentGaussian(ToeplitzMechanism):
  """C = I. No limit on the number of steps; amplification by sampling applies.

  Args:
    workload: For errors.
  """

  bands = 1

  def __init__(self, *, workload: workload_lib.Like = None) -> None:
    super().__init__(workload=workload)

  def design(self) -> Mapping[str, npt.ArrayLike]:
    return {}

  def shapes(self) -> Dict[str, Tuple[int, ...]]:
    return {}

  def strategy(self, n: Optional[int] = None) -> np.ndarray:
    return matrices.resized(np.ones(1), n)

  def noising(self, n: Optional[int] = None) -> np.ndarray:
    return matrices.resized(np.ones(1), n)

  def _sensitivity(self, min_sep: int, k: int) -> float:
    del min_sep  # Columns are disjoint at any distance.
    return math.sqrt(k)


@registry.register(registry.Design('banded-toeplitz', 'bands'))
class BandedToeplitz(ToeplitzMechanism):
  """C with coefficients `coefficients`, zero from index `bands` on.

  If bands <= min_sep, the design for one participation is also the best Toeplitz design for many.
  The streaming state is `bands - 1` rows.

  Args:
    bands: Number of non-zero diagonals b, the main one included.
    steps: T.
    method: 'optimal', or 'square_root': the truncated square root of the
      workload (BSR, arXiv:2405.13763).
    coefficients: [bands] c, up to scale, instead of a design.
    workload: A `Workload` or its config; None for prefix sums.
    objective: 'mean', 'max' or 'last', the error to minimize.
  """

  steps: int
  bands: int

  def __init__(
      self, bands: int, steps: int, *, method: str = 'optimal',
      coefficients: Optional[Sequence[float]] = None, workload: workload_lib.Like = None,
      objective: str = 'mean') -> None:
    super().__init__(steps=steps, bands=bands, workload=workload, objective=objective)
    checks.one_of(('optimal', 'square_root'), method=method)
    self.method = method
    self._given = check_coefficients(coefficients, bands)

  @property
  def coefficients(self) -> np.ndarray:
    """[bands] c: `x_t = (z_t - sum_{j=1}^{b-1} c_j x_{t-j}) / c_0`."""
    return self.arrays['coefficients']

  def shapes(self) -> Dict[str, Tuple[int, ...]]:
    return {'coefficients': (self.bands,)}

  def design(self) -> Mapping[str, npt.ArrayLike]:
    c = self._given
    if c is None:
      c = square_root(self.workload, self.bands)
      if self.method == 'optimal':
        c = optimal(c, self.steps, self.workload, self.objective,
                    f'BandedToeplitz(bands={self.bands}, steps={self.steps})')
    return {'coefficients': np.asarray(c) / np.linalg.norm(c)}

  def strategy(self, n: Optional[int] = None) -> np.ndarray:
    return matrices.resized(self.coefficients, None if n is None else self._rows(n))

  def noising(self, n: Optional[int] = None) -> np.ndarray:
    return reciprocal(self.coefficients, self._rows(n))

  def memory(self) -> int:
    return self.bands - 1

  def _squared_error(self, objective: str, n: int) -> float:
    if not self.workload.is_toeplitz:
      return super()._squared_error(objective, n)
    return squared_error(self.coefficients, n, self.workload, objective)[0]


def reciprocal(c: np.ndarray, n: int) -> np.ndarray:
  """Returns [n] coefficients of `1 / c(x)`: the inverse of a lower-triangular Toeplitz matrix."""
  if min(len(c), n) * n <= _FEW_PRODUCTS:
    return matrices.resized(_until(c[:n], n, _GONE), n)
  return _newton(c, n)


def decaying_reciprocal(d: np.ndarray, n: int) -> np.ndarray:
  """Returns `reciprocal(d, n)` up to where, tending to zero, it is far below rounding of a sum."""
  return _until(d, n, _NEGLIGIBLE)


def _until(d: np.ndarray, n: int, least: float) -> np.ndarray:
  """Returns coefficients of `1 / d(x)`, until the state of the filter is at most `least`."""
  pieces, state, length = [], np.zeros(len(d) - 1), min(n, max(16 * len(d), 1024))
  impulse, done = (1.0,), 0
  while done < length:
    x = np.zeros(length - done)
    x[:len(impulse)] = impulse
    piece, state = scipy.signal.lfilter([1.0], d, x, zi=state)
    pieces.append(piece)
    impulse, done = (), length
    size = np.abs(state).max(initial=0)
    if np.isnan(size):  # All that follows is NaN, too.
      pieces.append(np.full(n - done, np.nan))
      break
    if size > least:
      length = min(n, 2 * length)
  return np.concatenate(pieces)


def _newton(c: np.ndarray, n: int) -> np.ndarray:
  """Returns `reciprocal(c, n)`, up to rounding of the largest coefficient, in O(n log n)."""
  if n <= _DIRECT:
    return _until(c[:n], n, 0.0)
  half = _newton(c, -(-n // 2))  # Newton's step doubles the number of correct coefficients.
  product = scipy.signal.fftconvolve(half, scipy.signal.fftconvolve(half, c[:n])[:n])[:n]
  return 2 * matrices.resized(half, n) - product


def square_root(workload: workload_lib.Workload, n: int) -> np.ndarray:
  """Returns [n] coefficients of the square root of a workload with a constant rate.

  `c_k = c_{k-1} (2k-1) / (2k)` for prefix sums, convolved with the same times
  `beta^k` for momentum beta.
  """
  k = np.arange(1, n)
  root = np.cumprod(np.concatenate([[1.0], (2 * k - 1) / (2 * k)]))
  if not workload.momentum:
    return root
  decayed = root * workload.momentum ** np.arange(n)
  return scipy.signal.fftconvolve(root, decayed)[:n]


def optimal(
    start: np.ndarray, steps: int, workload: workload_lib.Workload, objective: str,
    name: str = 'BandedToeplitz') -> np.ndarray:
  """Returns [b] coefficients of least error times sensitivity, c_0 = 1, from a starting point.

  For a schedule: from the best ones of a constant rate, which they stay where C^-1 does not
  end within the coefficients that can be looked at.
  """
  constant = workload_lib.Workload(workload.momentum)
  c = _minimum(start, lambda c: squared_error(c, steps, constant, objective))
  if workload.is_toeplitz:
    return c
  longest = _MOST_FORMED // (1 if objective != 'max' else 4)
  length = steps
  if steps > longest:
    length = len(decaying_reciprocal(c, longest))
    if length == longest:
      workload_lib.warn(name)
      return c
  form = workload_lib.Form(workload, steps, length, objective)

  def error(c: np.ndarray) -> Tuple[float, np.ndarray]:
    inverse = reciprocal(c, length)
    value, pulled = form(inverse)
    return value, pull(c, pulled, inverse, inverse)

  return _minimum(c, error)


def _minimum(start: np.ndarray, error: Loss) -> np.ndarray:
  start = np.asarray(start) / start[0]

  def loss(tail: np.ndarray) -> Tuple[float, np.ndarray]:
    c = np.concatenate([[1.0], tail])
    value, gradient = error(c)
    if not 0 < value < math.inf:
      return math.inf, tail
    return (math.log(value) + math.log(c @ c), (gradient / value + 2 * c / (c @ c))[1:])

  return np.concatenate([[1.0], minimize(loss, start[1:])])


def minimize(
    loss: Loss, start: np.ndarray, *, bounds: Optional[Sequence[Tuple[float, float]]] = None,
    maxiter: int = 1000, ftol: float = 1e-15, maxcor: int = 30,
    callback: Optional[Callable[[np.ndarray], object]] = None) -> np.ndarray:
  """Minimizes by L-BFGS-B. A `loss` of inf marks points outside the domain.

  The line search may step out of it (an unstable C^-1). It is answered with a finite bowl around
  the best point so far: an infinite value with a zero gradient makes SciPy stop there, or stall.
  """
  best: List[Any] = [math.inf, np.array(start, np.float64)]
  if not best[1].size:
    return best[1]

  def guarded(x: np.ndarray) -> Tuple[float, np.ndarray]:
    with np.errstate(all='ignore'):
      value, gradient = loss(x)
    if not (math.isfinite(value) and np.all(np.isfinite(gradient))):
      step = x - best[1]
      return best[0] + 1 + step @ step, 2 * step
    if value < best[0]:
      best[:] = [value, x.copy()]
    return value, np.ascontiguousarray(gradient)

  if not math.isfinite(guarded(best[1])[0]):
    raise ValueError('The starting point of a design must have a finite error.')
  with matrices.one_thread():
    scipy.optimize.minimize(
        guarded, best[1], jac=True, method='L-BFGS-B', callback=callback, bounds=bounds,
        options={'maxcor': maxcor, 'maxiter': maxiter, 'ftol': ftol, 'gtol': 1e-10})
  return best[1]


def squared_error(
    c: np.ndarray, steps: int, workload: workload_lib.Workload,
    objective: str) -> Tuple[float, np.ndarray]:
  """Returns the mean (or last) squared row norm of `A C^-1` at a constant rate; its gradient.

  Returns:
    `(value, gradient)`, gradient of the shape of c; `(inf, c)` if C^-1 is
    unstable within the simulated length.
  """
  length = min(steps, max(64 * len(c), 1024))
  limit = workload.limit / np.sum(c)
  before = math.inf
  while True:
    inverse = reciprocal(c, length)
    b = workload.apply(inverse)
    distance = abs(b[-1] / limit - 1)
    growing = distance > max(1, before) or length >= _LONGEST
    if not np.isfinite(b[-1]) or (growing and length < steps):
      return math.inf, c
    if length == steps or distance < _TAIL:
      break
    before = distance
    length = min(steps, 2 * length)
  weights, tail = error_weights(steps, length, objective)
  if length == steps:
    limit = 0.0
  value = weights @ b**2 + tail * limit**2
  if not math.isfinite(value):
    return math.inf, c
  gradient = pull(c, 2 * weights * b, b, inverse) - 2 * tail * limit**3 / workload.limit
  return value, gradient


def error_weights(steps: int, length: int, objective: str) -> Tuple[np.ndarray, float]:
  """Returns the weights of squared first coefficients of B, and of all later ones together."""
  if objective != 'mean':
    return np.ones(length), steps - length
  weights = (steps - np.arange(length)) / steps
  return weights, (steps - length) * (steps - length + 1) / (2 * steps)


def pull(c: np.ndarray, pulled: np.ndarray, x: np.ndarray, inverse: np.ndarray) -> np.ndarray:
  """Returns the gradient in c of a function of `x = a / c`, given that in x and `1 / c`."""
  few = len(c) <= _FEW_LAGS
  if few:
    adjoint = scipy.signal.lfilter([1.0], c, pulled[::-1])[::-1]
  else:
    adjoint = scipy.signal.fftconvolve(inverse, pulled[::-1])[:len(x)][::-1]
  if not max(np.abs(adjoint).max(), np.abs(x).max()) < _HUGE:
    return np.full(len(c), np.inf)
  if few:
    return np.array([-(adjoint[k:] @ x[:max(0, len(x) - k)]) for k in range(len(c))])
  lags = scipy.signal.correlate(adjoint, x, mode='full', method='fft')
  return -lags[len(x) - 1:len(x) - 1 + len(c)]


def check_coefficients(
    values: Optional[Sequence[float]], length: int) -> Optional[Tuple[float, ...]]:
  """Returns a tuple of floats with a positive first one, or None."""
  if values is None:
    return None
  wanted = f'be {length} finite numbers, the first one positive'
  result = checks.rectangular(values, f'`coefficients` must {wanted}.', np.float64)
  checks.require(result.shape == (length,) and np.all(np.isfinite(result)) and result[0] > 0,
                 wanted, coefficients=values)
  return tuple(result.tolist())
