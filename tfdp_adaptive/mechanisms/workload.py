# SPDX-License-Identifier: Apache-2.0
"""Workloads A: the linear functions of noisy gradients that must be accurate."""

import dataclasses
from typing import Tuple, Union

import numpy as np
import scipy

from tfdp_adaptive import checks

OBJECTIVES = ('mean', 'max', 'last')


@dataclasses.dataclass(frozen=True)
class Workload:
  """Iterates of SGD as a function of the gradients: `A = prefix sums * diag(rates) * momentum`.

  Attributes:
    momentum: Heavy-ball factor beta in [0, 1): `m_t = beta m_{t-1} + g_t`.
    learning_rates: [T] rate of each step; () for the constant one, in which
      case A is a Toeplitz matrix. For a schedule of a long run the designs of BLT and
      BandedToeplitz begin, and may end, with that of the constant rate, of which they
      warn; BandedInverse is designed for it at any T. Errors are in units of the learning rate.
  """

  momentum: float = 0.0
  learning_rates: Tuple[float, ...] = ()

  def __post_init__(self) -> None:
    checks.decay(momentum=self.momentum)
    if (not isinstance(self.learning_rates, (tuple, list, np.ndarray))
        or not all(map(checks.is_number, self.learning_rates))):
      raise ValueError('`learning_rates` must be a sequence of numbers. '
                       f'Received: learning_rates={self.learning_rates!r}.')
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


def reduce_errors(squares: np.ndarray, objective: str) -> float:
  """Returns the mean, maximum or last of squared errors; `objective` as named."""
  reduced = {'mean': squares.mean(), 'max': squares.max(), 'last': squares[-1]}
  return float(reduced[objective])
