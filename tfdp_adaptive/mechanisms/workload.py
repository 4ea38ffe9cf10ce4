# SPDX-License-Identifier: Apache-2.0
"""Workloads A: the linear functions of noisy gradients that must be accurate, and their errors.

Errors of a Toeplitz C under a learning-rate schedule are linear in the number of steps. Iterates
are `theta_t = theta_{t-1} + r_t m_t`, `m_t = beta m_{t-1} + y_t` of the noise `y = C^-1 z`: their
variances follow from what the next y_t has in common with theta_{t-1}. That is little where C^-1
has p coefficients d, or geometric ones.

For a design, errors are quadratic forms in d. With `a_tu = sum_{u<=s<=t} r_s beta^(s-u)`, the
weight of y_u in theta_t, that of theta_t is `sum_jk d_j d_k sum_i a_t,i+j a_t,i+k`: these
p x p numbers are formed once.
"""

import dataclasses
from typing import Tuple, Union
import warnings

import numpy as np
import scipy

from tfdp_adaptive import checks
from tfdp_adaptive import errors
from tfdp_adaptive.mechanisms import matrices

OBJECTIVES = ('mean', 'max', 'last')


@dataclasses.dataclass(frozen=True)
class Workload:
  """Iterates of SGD as a function of the gradients: `A = prefix sums * diag(rates) * momentum`.

  Attributes:
    momentum: Heavy-ball factor beta in [0, 1): `m_t = beta m_{t-1} + g_t`.
    learning_rates: [T] rate of each step; () for the constant one, in which
      case A is a Toeplitz matrix. In a long run with a schedule, the designs of `BLT` and
      `BandedToeplitz` start from the design for the constant rate. If a search would take
      minutes, they use this design, with a warning. `BandedInverse` is designed for the
      schedule at any T. Errors are in units of the learning rate.
  """

  momentum: float = 0.0
  learning_rates: Tuple[float, ...] = ()

  def __post_init__(self) -> None:
    checks.decay(momentum=self.momentum)
    checks.require(
        isinstance(self.learning_rates, (tuple, list, np.ndarray))
        and all(map(checks.is_number, self.learning_rates)),
        'be a sequence of numbers', learning_rates=self.learning_rates)
    rates = tuple(float(r) for r in self.learning_rates)
    if not np.all(np.isfinite(rates)) or any(r < 0 for r in rates) or (rates and not any(rates)):
      raise ValueError('`learning_rates` must be finite and >= 0, and not all zero. '
                       f'Received: learning_rates={rates[:5]}.')
    object.__setattr__(self, 'momentum', float(self.momentum))
    object.__setattr__(self, 'learning_rates', rates)

  @property
  def is_toeplitz(self) -> bool:
    return not self.learning_rates

  @property
  def limit(self) -> float:
    """Returns the limit of the coefficients of a Toeplitz A."""
    return 1 / (1 - self.momentum)

  def coefficients(self, n: int) -> np.ndarray:
    """Returns [n] first column of a Toeplitz A."""
    powers = self.momentum ** np.arange(1, n + 1)
    return (1 - powers) / (1 - self.momentum)

  def check(self, steps: int) -> None:
    """Raises unless there is a learning rate for every step."""
    if not self.is_toeplitz and len(self.learning_rates) < steps:
      raise ValueError(f'`learning_rates` must have a value for each of {steps} steps. '
                       f'Received: {len(self.learning_rates)} values.')

  def rates(self, n: int) -> np.ndarray:
    """Returns [n] learning rates."""
    self.check(n)
    return np.ones(n) if self.is_toeplitz else np.asarray(self.learning_rates[:n])

  def apply(self, x: np.ndarray) -> np.ndarray:
    """Returns `A @ x` for x of shape [n, ...]."""
    m = scipy.signal.lfilter([1.0], [1.0, -self.momentum], x, axis=0) if self.momentum else x
    rates = self.rates(len(x)).reshape((-1,) + (1,) * (np.ndim(x) - 1))
    return np.cumsum(rates * m, axis=0)

  def materialize(self, n: int) -> np.ndarray:
    """Returns [n, n] A."""
    return self.apply(np.eye(n))

  def get_config(self) -> dict:
    return {'momentum': self.momentum, 'learning_rates': list(self.learning_rates)}


Like = Union[None, dict, Workload]


def get(value: Like) -> Workload:
  """Returns a Workload from itself, its config, or None (prefix sums)."""
  if value is None:
    return Workload()
  if isinstance(value, Workload):
    return value
  if isinstance(value, dict):
    return Workload(value.get('momentum', 0.0), tuple(value.get('learning_rates', ())))
  raise ValueError(f'`workload` must be a Workload or its config. Received: workload={value!r}.')


def reduce(squares: np.ndarray, objective: str, exponent: int = 16) -> Tuple[float, np.ndarray]:
  """Returns a design's objective and gradient; the maximum is smoothed by a power mean."""
  n = len(squares)
  if objective == 'last':
    weights = np.zeros(n)
    weights[-1] = 1
    return squares[-1], weights
  if objective == 'mean':
    return squares.mean(), np.full(n, 1 / n)
  top = squares.max()
  powers = (squares / top)**exponent
  value = top * powers.mean()**(1 / exponent)
  return value, value / powers.sum() * powers / np.maximum(squares, 1e-300)


_NEGLIGIBLE = 1e-18
_NODES = 32  # Steps whose largest error is minimized; it is a smooth function of the step.


def warn(name: str) -> None:
  """Warns of a design that ignores the requested schedule."""
  warnings.warn(
      f'{name} has the best numbers for a constant learning rate: to look for those of the '
      'schedule would take minutes at so many steps. Its errors are those under the schedule. '
      'BandedInverse is designed for a schedule of any length; compare their errors.',
      errors.Caution, stacklevel=2)


class Form:
  """Squared error to minimize, as a function of the p coefficients of C^-1."""

  def __init__(
      self, workload: Workload, steps: int, bands: int, objective: str) -> None:
    self._objective = objective
    last = steps - 1
    weights = [np.full(steps, 1 / steps)]
    if objective != 'mean':
      nodes = [last] if objective == 'last' else sorted(
          {round(t) for t in np.linspace(0, last, min(steps, _NODES))})
      weights = [np.arange(t + 1) == t for t in nodes]
    self._forms = np.stack([_form(workload, bands, one) for one in weights])

  def __call__(self, d: np.ndarray) -> Tuple[float, np.ndarray]:
    """Returns `(value, gradient)`, [p]."""
    rows = self._forms @ d
    value, weights = reduce(rows @ d, self._objective)
    return value, 2 * weights @ rows


def _form(workload: Workload, bands: int, weights: np.ndarray) -> np.ndarray:
  """Returns the form [p, p] of the mean over steps with these weights.

  `g_m[u] = sum_t w_t a_tu a_t,u+m` follows from `a_tu = r_u + beta a_t,u+1` diagonal by diagonal.
  """
  steps = len(weights)
  rates, beta = workload.rates(steps), workload.momentum
  left = np.cumsum(weights[::-1])[::-1]  # Weight of the steps from u on.
  h = _backwards(rates * left, beta)  # sum_t w_t a_tu
  later = np.append(h[1:], 0.0)
  g = _backwards(rates**2 * left + 2 * beta * rates * later, beta**2)
  form = np.zeros([bands, bands])
  for m in range(min(bands, steps)):
    if m:
      g = rates[:steps - m] * h[m:] + beta * g[1:]
    places = np.arange(bands - m)
    sums = matrices.resized(np.cumsum(g[::-1])[::-1], bands - m)  # sum_{u>=j} g_m[u]
    form[places, places + m] = form[places + m, places] = sums
  return form


def _backwards(x: np.ndarray, decay: float) -> np.ndarray:
  """Returns `sum_{s>=u} decay^(s-u) x_s`."""
  return scipy.signal.lfilter([1.0], [1.0, -decay], x[::-1])[::-1] if decay else x


def squared_errors(workload: Workload, inverse: np.ndarray) -> np.ndarray:
  """Returns [n] squared row norms of `A C^-1` for a Toeplitz C^-1 with these n coefficients.

  O(n p) for p that are not negligible: as long as t < p, row by row.
  """
  n, rates, size = len(inverse), workload.rates(len(inverse)), np.abs(inverse)
  p = 1 + np.flatnonzero(size > _NEGLIGIBLE * size.max())[-1]
  d = inverse[:p]
  filtered = _filtered(workload, inverse)
  shared = np.zeros(n)  # Covariance of theta_{t-1} and y_t.
  row = np.zeros(p)
  for t in range(min(p, n - 1)):
    row[:t + 1] += rates[t] * filtered[:t + 1][::-1]
    reach = d[1:t + 2][::-1]
    shared[t + 1] = row[t + 1 - len(reach):t + 1] @ reach
  if n > p:
    lags = np.array([0.0] + [d[a:] @ filtered[:p - a] for a in range(1, p)])
    shared[p:] = scipy.signal.oaconvolve(rates, lags)[p:n]
  return _variances(workload, rates, filtered, shared)


def squared_errors_of_decays(
    workload: Workload, steps: int, weights: np.ndarray,
    decays: np.ndarray) -> np.ndarray:
  """Returns [..., steps], the same for `C^-1_j = sum_i weights_i decays_i^(j-1)`, in O(T d).

  Args:
    workload: Has a schedule.
    steps: T.
    weights: [..., d], real or with complex steps.
    decays: The same; real ones of either sign.
  """
  rates = workload.rates(steps)
  places = np.arange(steps)
  if np.iscomplexobj(decays):  # Exact steps, of decays above zero.
    powers = np.exp(places * np.log(decays)[..., None])  # [..., d, T]
  else:
    powers = decays[..., None] ** places
  tail = np.sum(weights[..., None] * powers[..., :-1], axis=-2)
  inverse = np.concatenate([np.ones_like(tail, shape=tail.shape[:-1] + (1,)), tail], axis=-1)
  filtered = _filtered(workload, inverse)
  # y_t contains s_t = phi s_{t-1} + z_{t-1}. `common` is the covariance of s_t and theta_{t-1}.
  drive = rates * np.cumsum(filtered[..., None, :] * powers, axis=-1)
  common = np.zeros_like(drive)
  for index in np.ndindex(drive.shape[:-1]):
    common[index][1:] = scipy.signal.lfilter([1.0], [1.0, -decays[index]], drive[index][:-1])
  return _variances(workload, rates, filtered, np.sum(weights[..., None] * common, axis=-2))


def _filtered(workload: Workload, inverse: np.ndarray) -> np.ndarray:
  """Returns coefficients by which m_t depends on z."""
  if not workload.momentum:
    return inverse
  return scipy.signal.lfilter([1.0], [1.0, -workload.momentum], inverse)


def _variances(
    workload: Workload, rates: np.ndarray, filtered: np.ndarray,
    shared: np.ndarray) -> np.ndarray:
  """Returns the variances of theta_t, from the covariances of theta_{t-1} and y_t."""
  variance = np.cumsum(filtered**2, axis=-1)  # Variance of m_t.
  drive = shared.copy()
  drive[..., 1:] += workload.momentum * (rates * variance)[..., :-1]
  return np.cumsum(2 * rates * _filtered(workload, drive) + rates**2 * variance, axis=-1)
