"""What every noise mechanism answers, offline, in float64 NumPy.

A mechanism is a factorization of a workload A (prefix sums by default) into
`A = B C`: the noise of step t is `noise_multiplier * l2_norm_clip * (C^-1 Z)_t`
with Z standard normal. ONE convention in the whole library: the strategy C is
lower triangular with maximal column norm one, so a record that takes part once
changes `C G` by at most one clip norm. The accountant divides the noise
multiplier by `sensitivity(...)`; it is never also put into the noise.

A mechanism is an immutable, hashable description; its numbers (`arrays`) are
designed when they are first read.
"""

import abc
import copy
import functools
import json
from typing import Dict, Optional

import numpy as np


class Mechanism(abc.ABC):
  """A strategy matrix C, known offline.

  Attributes:
    steps: The number of steps it was designed for; None if any number will do.
      A stream refuses to go on after the last one.
    bands: Number of non-zero diagonals of C (the main one included) if C is
      banded, else None. Decides whether cyclic Poisson amplification applies.
    dtype: What `arrays` were rounded to, 'float64' as designed. The stream
      must use, and the accountant must see, `rounded(run-time dtype)`.
  """

  steps: Optional[int] = None
  bands: Optional[int] = None
  dtype: str = 'float64'

  @abc.abstractmethod
  def design(self) -> Dict[str, np.ndarray]:
    """The numbers that define C, by name, before rounding. May take long."""

  @functools.cached_property
  def arrays(self) -> Dict[str, np.ndarray]:
    """The numbers a stream uses, by attribute name: float64, rounded to `dtype`."""
    return {name: _frozen(value, self.dtype) for name, value in self.design().items()}

  def rounded(self, dtype='float32') -> 'Mechanism':
    """The mechanism a run in `dtype` really has; its sensitivity is that of the rounded C."""
    other = copy.copy(self)
    other.__dict__.pop('arrays', None)
    other.dtype = np.dtype(dtype).name
    if other.dtype not in ('float64', 'float32', 'float16'):
      raise ValueError(f'`dtype` must be a floating-point type of NumPy. Received: dtype={dtype}.')
    return other

  @abc.abstractmethod
  def strategy(self, n: Optional[int] = None) -> np.ndarray:
    """First n coefficients of a Toeplitz C, or its leading n x n block."""

  @abc.abstractmethod
  def noising(self, n: Optional[int] = None) -> np.ndarray:
    """The same for C^-1."""

  @abc.abstractmethod
  def row_norms(self, n: Optional[int] = None) -> np.ndarray:
    """[n] L2 norms of the rows of C^-1: the noise of step t has variance r_t, its square."""

  @abc.abstractmethod
  def sensitivity(self, *, min_sep: Optional[int] = None, max_participations: int = 1) -> float:
    """How far a record moves C G, in clip norms (zero-out or add-remove).

    Args:
      min_sep: Smallest distance b between two steps in which one record takes
        part (j - i >= b); a reshuffled epoch has b = 1. Required when
        `max_participations` > 1.
      max_participations: Largest number k of steps it takes part in.
    """

  @abc.abstractmethod
  def get_config(self) -> dict:
    """JSON-serializable constructor arguments."""

  def materialize(self, n: int) -> np.ndarray:
    """[n, n] C, for tests and small problems."""
    return dense(self.strategy(n), n)

  def __eq__(self, other):
    return type(self) is type(other) and self._identity() == other._identity()

  def __hash__(self):
    return hash((type(self), self._identity()))

  def __repr__(self):
    arguments = ', '.join(f'{k}={v!r}' for k, v in self.get_config().items() if v is not None)
    return f'{type(self).__name__}({arguments})'

  def _identity(self):
    return json.dumps([self.get_config(), self.dtype], sort_keys=True)


def dense(matrix, n: int) -> np.ndarray:
  """[n, n] lower-triangular matrix of Toeplitz coefficients; a matrix stays as it is."""
  c = np.asarray(matrix, np.float64)
  if c.ndim == 2:
    return c
  lag = np.subtract.outer(np.arange(n), np.arange(n))
  padded = np.concatenate([c, np.zeros(max(0, n - len(c)))])
  return np.where(lag >= 0, padded[np.abs(lag)], 0.0)


def check_participation(min_sep, max_participations):
  """Raises unless (min_sep, max_participations) is a participation pattern."""
  if max_participations < 1 or int(max_participations) != max_participations:
    raise ValueError('`max_participations` must be a positive integer. '
                     f'Received: max_participations={max_participations}.')
  if max_participations > 1 and min_sep is None:
    raise ValueError(
        '`min_sep` must be given when a record may take part more than once '
        f'(1 for reshuffled epochs). Received: max_participations={max_participations}, '
        'min_sep=None.')
  if min_sep is not None and (min_sep < 1 or int(min_sep) != min_sep):
    raise ValueError(f'`min_sep` must be a positive integer. Received: min_sep={min_sep}.')


def check_count(**counts):
  for name, value in counts.items():
    if isinstance(value, bool) or int(value) != value or value < 1:
      raise ValueError(f'`{name}` must be a positive integer. Received: {name}={value}.')


def _frozen(value, dtype):
  result = np.asarray(value, np.float64).astype(dtype).astype(np.float64)
  if not np.all(np.isfinite(result)):
    raise ValueError(f'A designed coefficient is not finite in {dtype}.')
  result.setflags(write=False)
  return result
