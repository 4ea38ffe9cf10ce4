# SPDX-License-Identifier: Apache-2.0
"""The numbers of a BLT: error and sensitivity in O(d^2 log T), and their minimum.

Decays theta of C and phi of C^-1 interlace, 1 > theta_1 > phi_1 > theta_2 > ...
> phi_d > 0: then all weights of C are positive, C decreases and C^-1 is stable,
so that nothing needs a penalty. The variables are the first logit and the
logarithms of the gaps to the next ones. With

    C(x) = prod_i (1 - phi_i x) / (1 - theta_i x)

all coefficients follow from differences of decays, which logits give without
cancellation; gradients are complex steps, exact to rounding.
"""

import functools
import math
from typing import List, Sequence, Tuple

import numpy as np
import scipy
import tqdm

from tfdp_adaptive.mechanisms import progress
from tfdp_adaptive.mechanisms import sensitivity as sensitivity_lib
from tfdp_adaptive.mechanisms import toeplitz
from tfdp_adaptive.mechanisms import workload as workload_lib

_STEP = 1e-100  # Step of the complex derivative.
_WORK = 12 * 10**6  # Steps times squared buffers times evaluations under a schedule.
_FEWEST, _MOST = 10, 300  # Iterations that are worth it, and that gain anything.
_GAPS = (-10.0, 3.3)  # Bounds of the log gaps: merging decays are 0/0.
_EXACT = 32  # First terms of a long sum, summed one by one.
_NODES = 16  # Quadrature nodes per panel; panels double in length.


def optimal(
    buffers: int, steps: int, workload: workload_lib.Workload, objective: str, min_sep: int, k: int,
    name: str) -> Tuple[np.ndarray, np.ndarray]:
  """Returns `(weights, decays)` of least error times sensitivity; both [buffers].

  For a schedule, whose errors take O(T), the search starts from the best numbers of a constant
  rate. It has as many evaluations as take seconds, or none if these are too few to gain anything.
  """
  if not buffers:
    return np.zeros(0), np.zeros(0)
  k = sensitivity_lib.most_participations(steps, min_sep, k)
  problem = steps, objective, min_sep, k
  with progress.bar(name) as bar:
    starts = _starts(buffers, steps, min_sep if k > 1 else steps)
    p = _minimum(starts, workload_lib.Workload(workload.momentum), problem, bar)
    if not workload.is_toeplitz and evaluations(buffers, steps):
      p = _minimum([p], workload, problem, bar, evaluations(buffers, steps))
  pair = _Pair(p)
  return pair.weights, pair.decays


def evaluations(buffers: int, steps: int) -> int:
  """Returns how many evaluations under a schedule fit into seconds; 0 if too few."""
  count = _WORK // (steps * max(buffers, 1)**2)
  return count if count >= _FEWEST else 0


def _minimum(
    starts: Sequence[np.ndarray], workload: workload_lib.Workload,
    problem: Tuple[int, str, int, int], bar: tqdm.tqdm, most: int = _MOST) -> np.ndarray:
  """Returns the best variables that are found from some, in at most so many iterations each."""
  steps, objective, min_sep, k = problem

  def loss(p: np.ndarray) -> Tuple[float, np.ndarray]:
    points = p + 1j * _STEP * np.eye(len(p))
    value = _log_loss(_Pair(points), steps, workload, objective, min_sep, k)
    return value[0].real, value.imag / _STEP

  bounds = [(-3.0, math.log(1e4 * steps))] + [_GAPS] * (len(starts[0]) - 1)
  # Valleys are flat where a buffer more than needed hardly counts.
  found = [toeplitz.minimize(
      loss, start, bounds=bounds, maxiter=min(most, _MOST), ftol=1e-13,
      callback=lambda _: bar.update()) for start in starts]
  return min(found, key=lambda p: loss(p)[0])


def _starts(buffers: int, steps: int, period: int) -> List[np.ndarray]:
  """Returns logits evenly from the slowest decay worth having to the fastest."""
  starts = []
  for first, last in ((steps / 3, -0.5), (steps, 0.7), (period / 2, -1.5)):
    first = max(math.log(first), last + 1)
    gap = (first - last) / (2 * buffers - 1)
    starts.append(np.array([first] + [math.log(gap)] * (2 * buffers - 1)))
  return starts if period < steps else starts[:2]


class _Pair:
  """C and C^-1 from variables of shape [..., 2 d], real or with complex steps."""

  def __init__(self, p: np.ndarray) -> None:
    gaps = np.cumsum(np.exp(p[..., 1:]), axis=-1)
    logits = np.concatenate([p[..., :1], p[..., :1] - gaps], axis=-1)
    theta, phi = logits[..., 0::2], logits[..., 1::2]
    self.decays, self.log_decays = _sigmoid(theta), -_log1p(np.exp(-theta))
    self.inverse_decays, self.log_inverse_decays = _sigmoid(phi), -_log1p(np.exp(-phi))
    self.weights = _residues(theta, phi)
    self.inverse_weights = _residues(phi, theta)
    # Coefficients of A C^-1 for prefix sums: limit + sum_i excess_i phi_i^j, all positive.
    self.limit = np.prod(_sigmoid(-theta) / _sigmoid(-phi), axis=-1)
    self.excess = -self.inverse_weights / _sigmoid(-phi)


def _residues(poles: np.ndarray, zeros: np.ndarray) -> np.ndarray:
  """Returns `prod_k (p_i - z_k) / prod_{k != i} (p_i - p_k)` of decays given by their logits."""
  to_zeros = _difference(poles[..., :, None], zeros[..., None, :])
  to_poles = _difference(poles[..., :, None], poles[..., None, :])
  same = np.eye(poles.shape[-1], dtype=bool)
  return np.prod(to_zeros, axis=-1) / np.prod(np.where(same, 1.0, to_poles), axis=-1)


def _difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  """Returns `sigmoid(a) - sigmoid(b)` to full relative precision."""
  return -_expm1(b - a) * _sigmoid(a) * _sigmoid(-b)


def _log_loss(
    pair: _Pair, steps: int, workload: workload_lib.Workload, objective: str, min_sep: int,
    k: int) -> np.ndarray:
  size = _squared_sensitivity(pair.weights, pair.log_decays, steps, min_sep, k)
  if workload.is_toeplitz:
    error = _squared_error(pair.limit, pair.excess, pair.log_inverse_decays, steps, workload,
                           objective)
  else:
    error = _scheduled_error(pair, steps, workload, objective)
  return np.log(error) + np.log(size)


def _squared_error(
    limit: np.ndarray, excess: np.ndarray, logs: np.ndarray, steps: int,
    workload: workload_lib.Workload, objective: str) -> np.ndarray:
  """Returns the squared error at a constant learning rate; excess and logs of phi are [..., d]."""
  j, quadrature_weights = nodes(0, steps)
  powers = np.exp(j * logs[..., None])
  if workload.momentum:
    beta = workload.momentum
    powers = _convolved_powers(logs[..., None], math.log(beta), j)
    limit = limit[..., None] * -np.expm1((j + 1) * math.log(beta)) / (1 - beta)
  else:
    limit = limit[..., None]
  b = limit + np.sum(excess[..., None] * powers, axis=-2)
  decreasing = (steps - j) / steps if objective == 'mean' else 1.0
  return np.sum(quadrature_weights * decreasing * b**2, axis=-1)


def _convolved_powers(a: np.ndarray, b: float, j: np.ndarray) -> np.ndarray:
  """Returns `sum_{r<=j} e^(a r) e^(b (j-r))`, written so that a near b is no 0/0."""
  larger, smaller = np.where(a.real > b, a, b), np.where(a.real > b, b, a)
  gap = smaller - larger
  ratio = _expm1((j + 1) * gap) / np.where(gap == 0, 1.0, _expm1(gap))
  return np.exp(larger * j) * np.where(gap == 0, j + 1, ratio)


def _scheduled_error(
    pair: _Pair, steps: int, workload: workload_lib.Workload, objective: str) -> np.ndarray:
  squares = workload_lib.squared_errors_of_decays(
      workload, steps, pair.inverse_weights, pair.inverse_decays)
  value, gradient = workload_lib.reduce(squares[0].real, objective)
  return value + 1j * (squares.imag @ gradient)


def _squared_sensitivity(
    weights: np.ndarray, logs: np.ndarray, steps: int, min_sep: int, k: int) -> np.ndarray:
  """Returns the squared norm of the sum of the columns 0, b, ..., (k-1) b, for c_0 = 1.

  Between two participations the sum is `sum_i omega_i g_i(m) theta_i^(r-1)`
  after r steps, g_i(m) = 1 + theta_i^b + ... + theta_i^(m b); sums over r are
  geometric, sums over m are smooth.
  """
  pairs = logs[..., :, None] + logs[..., None, :]

  def geometric(n: int) -> np.ndarray:  # sum_{r=1}^{n-1} (theta_i theta_l)^(r-1)
    return _expm1((n - 1) * pairs) / _expm1(pairs)

  def carried(m: np.ndarray) -> np.ndarray:  # [..., d, len(m)] g_i(m)
    return _expm1((m + 1) * min_sep * logs[..., None]) / _expm1(min_sep * logs[..., None])

  def between(m: np.ndarray, n: int, m_weights: np.ndarray) -> np.ndarray:
    g = weights[..., None] * carried(m)
    return np.sum(np.einsum('...im,...lm,m->...il', g, g, m_weights) * geometric(n),
                  axis=(-2, -1))

  def at(m: np.ndarray, m_weights: np.ndarray) -> np.ndarray:
    # Squares on the steps of participation themselves.
    before = weights * np.exp((min_sep - 1) * logs)
    value = 1 + np.sum(before[..., None] * carried(m - 1), axis=-2)
    return np.sum(m_weights * value**2, axis=-1)

  m, m_weights = nodes(0, k - 1)
  last, one = np.array([k - 1.0]), np.ones(1)
  result = at(last, one) + between(last, steps - (k - 1) * min_sep, one)
  if k > 1:
    result = result + at(m, m_weights) + between(m, min_sep, m_weights)
  return result


def sensitivity(
    scale: float, weights: np.ndarray, decays: np.ndarray, steps: int, min_sep: int,
    k: int) -> float:
  """Returns the exact sensitivity for positive decreasing coefficients, in O(d^2 log k)."""
  return float(scale * np.sqrt(_squared_sensitivity(weights, np.log(decays), steps, min_sep, k)))


def coefficients(scale: float, weights: np.ndarray, decays: np.ndarray, n: int) -> np.ndarray:
  """Returns [n] first column: scale, then `scale * sum_i weights_i decays_i^(j-1)`."""
  result = np.zeros(n)
  result[0] = 1
  j = np.arange(n - 1, dtype=np.float64)
  for w, theta in zip(weights, decays):
    result[1:] += w * theta**j
  return scale * result


def invert(weights: np.ndarray, decays: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
  """Returns `(weights, decays)` of C^-1 (c_0 = 1): eigenvalues of `diag(theta) - sqrt(w w^T)`."""
  root = np.sqrt(weights)
  phi = np.linalg.eigvalsh(np.diag(decays) - np.outer(root, root))[::-1]
  to_zeros = phi[:, None] - decays
  to_poles = phi[:, None] - phi + np.eye(len(phi))
  return np.prod(to_zeros, axis=1) / np.prod(to_poles, axis=1), phi


def _sigmoid(x: np.ndarray) -> np.ndarray:
  return 1 / (1 + np.exp(-x))


def _expm1(x: np.ndarray) -> np.ndarray:
  """Returns expm1, also for complex steps, where NumPy's version loses digits near zero."""
  if not np.iscomplexobj(x):
    return np.expm1(x)
  return np.expm1(x.real) + 1j * x.imag * np.exp(x.real)


def _log1p(x: np.ndarray) -> np.ndarray:
  if not np.iscomplexobj(x):
    return np.log1p(x)
  return np.log1p(x.real) + 1j * x.imag / (1 + x.real)


@functools.lru_cache(maxsize=256)
def nodes(start: int, stop: int) -> Tuple[np.ndarray, np.ndarray]:
  """Returns points and weights with `sum_{start <= j < stop} f(j)` close to `weights @ f(points)`.

  Exact for short ranges, else for polynomials of degree 31 on panels [a, 2a):
  sums of powers theta^j, 0 < theta < 1, have an error of about 1e-14.
  """
  first, length = min(stop, start + _EXACT), _EXACT
  points, weights = [np.arange(start, first, dtype=np.float64)], [np.ones(first - start)]
  while first < stop:
    size = min(length, stop - first)
    x, w = _gauss(size)
    points.append(first + x)
    weights.append(w)
    first, length = first + size, 2 * length
  points, weights = np.concatenate(points), np.concatenate(weights)
  points.setflags(write=False)
  weights.setflags(write=False)
  return points, weights


def _gauss(size: int) -> Tuple[np.ndarray, np.ndarray]:
  """Returns the Gauss rule of a sum over `size`: zeros of discrete Chebyshev polynomials."""
  if size <= _NODES:
    return np.arange(size, dtype=np.float64), np.ones(size)
  k = np.arange(1, _NODES, dtype=np.float64)
  off = np.sqrt(k**2 * (float(size)**2 - k**2) / (4 * (4 * k**2 - 1)))
  x, v = scipy.linalg.eigh_tridiagonal(np.full(_NODES, (size - 1) / 2), off)
  return x, size * v[0]**2
