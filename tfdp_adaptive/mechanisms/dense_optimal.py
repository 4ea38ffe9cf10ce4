# SPDX-License-Identifier: Apache-2.0
"""The best lower-triangular strategy of all, for small T, with a certificate.

`min ||B||_F` over `A = B C` of sensitivity one, for one participation (Denisov
et al. 2022, arXiv:2202.08312) or many in a fixed order (Choquette-Choo et al.
2023, arXiv:2211.06530).
"""

import functools
import math
from typing import Any, Dict, List, Mapping, Optional, Tuple
import warnings

import numpy as np
import numpy.typing as npt
import scipy
import tqdm

from tfdp_adaptive import checks
from tfdp_adaptive import errors
from tfdp_adaptive.mechanisms import gram_design
from tfdp_adaptive.mechanisms import interface
from tfdp_adaptive.mechanisms import matrices
from tfdp_adaptive.mechanisms import progress
from tfdp_adaptive.mechanisms import registry
from tfdp_adaptive.mechanisms import sensitivity as sensitivity_lib
from tfdp_adaptive.mechanisms import workload as workload_lib

_ITERATIONS = 2000  # Largest number of iterations, for those who wait.
_MOST, _MOST_EPOCHS = 1024, 512  # Steps of a design in seconds: for one epoch, for many.
_WORK = 4e10  # Cubed steps times iterations of a design that takes seconds.
_MIXED = 6  # Steps that are mixed.
_LEAST_WEIGHT = 1e-9  # Weight of a row whose error is below the maximum.


@registry.register(registry.Design('dense'))
class Dense(interface.Mechanism):
  """C with the least mean (or maximal) error; any workload, O(T^3) per iteration.

  A stream draws t + 1 rows at step t.

  Args:
    steps: T.
    strategy: [T, T] lower triangular C with positive diagonal, up to scale, instead of a design.
    tolerance: Relative gap to the lower bound at which the design stops. A warning says if it stops
      earlier. By default 1e-8 of the mean error up to 256 steps and 1e-5 above, 1e-4 for many
      participations, and 1e-3 of the maximal error. It must be given for more than 1,024 steps, and
      for more than 512 with many participations: these designs take minutes to hours.
    min_sep: Least distance between two steps of a record. The design minimizes the mean error for
      `min_sep` and `max_participations`. More than one participation needs `fixed_order`, with one
      in every epoch of `min_sep` steps. The best C for any other pattern is not known.
    max_participations: As in `sensitivity`.
    fixed_order: As in `sensitivity`.
    workload: A `Workload` or its config; None for prefix sums.
    objective: 'mean' or 'max'. There is no least error of the last iterate
      alone: C tends to a singular matrix.
  """

  steps: int
  cached = True

  def __init__(
      self, steps: int, *, strategy: Optional[npt.ArrayLike] = None,
      tolerance: Optional[float] = None, min_sep: Optional[int] = None, max_participations: int = 1,
      fixed_order: bool = False, workload: workload_lib.Like = None,
      objective: str = 'mean') -> None:
    super().__init__(steps=steps, workload=workload, objective=objective, min_sep=min_sep,
                     max_participations=max_participations)
    matrices.check_dense(steps)
    if objective == 'last':
      raise ValueError("`objective` must be 'mean' or 'max' for Dense: for the last iterate alone "
                       "the optimum is singular. Received: objective='last'.")
    self.fixed_order = bool(fixed_order)
    many = self.max_participations > 1
    if many and (not fixed_order or (self.min_sep or 1) * self.max_participations < self.steps
                 or objective != 'mean'):
      raise ValueError(
          '`max_participations` must be one for Dense, or count the epochs of a fixed order '
          '(fixed_order=True, and min_sep * max_participations >= steps), for the mean error: the '
          'best C is known for these. BandedToeplitz, BLT and BandedInverse can be designed for '
          f'others. Received: min_sep={min_sep}, max_participations={max_participations}, '
          f'fixed_order={fixed_order}, steps={steps}, objective={objective!r}.')
    most = _MOST_EPOCHS if many else _MOST
    if tolerance is None and strategy is None and self.steps > most:
      raise ValueError(
          f'`steps` must be at most {most} for the best of all matrices in seconds: it takes '
          'O(steps^3) per iteration. Give `tolerance` (1e-4, say, to be within that of the least '
          'error) to wait for minutes; BLT, BandedToeplitz and BandedInverse, whose errors are '
          'some percent larger, take seconds. '
          f'Received: steps={steps}, min_sep={min_sep}, tolerance=None.')
    tolerance = tolerance or self._usual_tolerance
    checks.probability(tolerance=tolerance)
    self.tolerance = float(tolerance)
    self._given = _check(strategy, self.steps)

  @classmethod
  def for_run(cls, **options: Any) -> 'Dense':
    """Designs for all epochs of a fixed order (mean error), or else for one participation."""
    epochs = options.get('max_participations', 1) * (options.get('min_sep') or 1)
    if (not options.get('fixed_order') or epochs < options['steps']
        or options.get('objective', 'mean') != 'mean'):
      for name in ('min_sep', 'max_participations', 'fixed_order'):
        options.pop(name, None)
    return super().for_run(**options)

  @property
  def inverse_rows(self) -> np.ndarray:
    """[steps, steps] C^-1: `x_t = sum_{i<=t} inverse_rows[t, i] z_i`."""
    return self.arrays['inverse_rows']

  def shapes(self) -> Dict[str, Tuple[int, ...]]:
    return {'inverse_rows': (self.steps, self.steps)}

  def check_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
    super().check_arrays(arrays)
    matrices.check_lower(arrays['inverse_rows'])

  @functools.cached_property
  def _matrix(self) -> np.ndarray:
    return matrices.invert_lower(self.inverse_rows)

  def strategy(self, n: Optional[int] = None) -> np.ndarray:
    n = self._rows(n)
    return self._matrix[:n, :n]

  def noising(self, n: Optional[int] = None) -> np.ndarray:
    n = self._rows(n)
    return self.inverse_rows[:n, :n]

  def _sensitivity(self, min_sep: int, k: int) -> float:
    return sensitivity_lib.overlapping(self._matrix, min_sep, k)

  @property
  def _usual_tolerance(self) -> float:
    if self.objective == 'max':
      return 1e-3
    if self.max_participations > 1:
      return 1e-4
    return 1e-8 if self.steps <= 256 else 1e-5

  def design(self) -> Mapping[str, npt.ArrayLike]:
    c = self._given
    if c is None:
      most = _ITERATIONS
      if self.tolerance == self._usual_tolerance:
        most = min(most, int(_WORK / self.steps**3))
      epoch = self.min_sep if self.max_participations > 1 else None
      c, _ = optimal(self.workload, self.steps, self.objective, self.tolerance, most, epoch)
    inverse = matrices.invert_lower(c / np.linalg.norm(c, axis=0).max())
    return {'inverse_rows': np.tril(inverse)}

  def passes(self) -> int:
    return self.steps


def optimal(
    workload: workload_lib.Workload, n: int, objective: str, tolerance: float,
    most: int = _ITERATIONS, epoch: Optional[int] = None) -> Tuple[np.ndarray, float]:
  """Returns `(C, bound)`: the best C found, [n, n] lower triangular, and a bound of any error.

  `epoch` is the number of places of a fixed order, None for one participation. The design warns
  if it ends further from the bound than `tolerance`.
  """
  name = f'Dense(steps={n})' if epoch is None else f'Dense(steps={n}, min_sep={epoch})'
  with matrices.one_thread(), progress.bar(name) as bar:
    if epoch is None:
      gram, error, bound = _balanced(workload, n, objective, tolerance, most, bar)
    else:
      gram, error, bound = gram_design.optimal_in_order(
          workload, n, epoch, tolerance, most, lambda _: bar.update())
  gap = error / bound - 1
  if gap > tolerance:
    warnings.warn(f'The error of {name} may be {gap:.1e} above the least one; the tolerance is '
                  f'{tolerance}. Another `tolerance` than the usual one lets it search for longer '
                  'than seconds.', errors.Caution, stacklevel=2)
  return matrices.factor_gram(gram), bound


def _balanced(
    workload: workload_lib.Workload, n: int, objective: str, tolerance: float, most: int,
    bar: tqdm.tqdm) -> Tuple[np.ndarray, float, float]:
  """Iterates the two-sided scaling `P^1/2 A Q^1/2 = U S V^T` to its fixed point.

  P and Q are weights of rows and columns that sum to one (P is uniform for the mean error). At the
  optimum q = diag(V S V^T) / tr S and X = C^T C = Q^-1/2 V S V^T Q^-1/2 up to scale. Whatever the
  weights, tr S is a lower bound of the error.
  """
  p, q, mixed = np.full(n, 1 / n), np.full(n, 1 / n), _Mixed()
  a = workload.materialize(n)
  bound, best, chosen = 0.0, math.inf, np.eye(n)
  for _ in range(most):
    u, s, v = _decompose(np.sqrt(p)[:, None] * a * np.sqrt(q), objective)
    bound = max(bound, s.sum())
    norms = (v**2) @ s  # diag(V S V^T)
    root = np.sqrt(norms)[:, None] * v / np.sqrt(s)
    errors_of_rows = np.sum(workload.apply(root)**2, axis=1)  # Errors of X with unit diagonal.
    value = math.sqrt(
        errors_of_rows.max() if objective == 'max' else errors_of_rows.mean())
    if value < best:
      best, chosen = value, (np.sqrt(s) * v) / np.sqrt(norms)[:, None]
    bar.set_postfix(gap=f'{best / bound - 1:.1e}', refresh=False)
    bar.update()
    if best < bound * (1 + tolerance):
      break
    if objective == 'mean':
      q = mixed.next(q, norms / s.sum())
    else:
      q = _relaxed(q, norms / s.sum())
      p = np.maximum(_relaxed(p, (u**2) @ s / s.sum()), _LEAST_WEIGHT)
      p /= p.sum()
  return chosen @ chosen.T, best, bound


def _decompose(matrix: np.ndarray, objective: str) -> Tuple[Any, np.ndarray, np.ndarray]:
  """Returns `(U, s, V)`; U, and small s to full precision, for the maximal error only."""
  if objective == 'max':
    u, s, v = scipy.linalg.svd(matrix, check_finite=False)
    return u, np.maximum(s, 1e-300), v.T
  squares, v = scipy.linalg.eigh(matrix.T @ matrix, check_finite=False, driver='evd')
  return None, np.sqrt(np.maximum(squares, 1e-30)), v


def _relaxed(old: np.ndarray, new: np.ndarray, factor: float = 1.5) -> np.ndarray:
  """Takes a step of 1.5 in the logarithm: the plain map contracts by about 0.7, one-sided."""
  result = old * (new / old)**factor
  return result / result.sum()


class _Mixed:
  """Anderson's mixing, in the logarithm: of the last steps, what leaves the least residual.

  Half the iterations of `_relaxed`, and a sixth where momentum makes these crawl.
  """

  def __init__(self) -> None:
    self._points: List[np.ndarray] = []
    self._residuals: List[np.ndarray] = []

  def next(self, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    point, residual = np.log(new), np.log(new / old)
    self._points = self._points[1 - _MIXED:] + [point]
    self._residuals = self._residuals[1 - _MIXED:] + [residual]
    if len(self._points) == 1:
      point = point + residual / 2
    else:
      root = np.sqrt(old)  # Columns of next to no weight decide nothing.
      weights = np.linalg.lstsq(
          (root * np.diff(self._residuals, axis=0)).T, root * residual, rcond=None)[0]
      point = point - weights @ np.diff(self._points, axis=0)
    result = np.exp(point - point.max())
    return result / result.sum()


def _check(strategy: Optional[npt.ArrayLike], n: int) -> Optional[np.ndarray]:
  """Returns a copy of a strategy, or None."""
  if strategy is None:
    return None
  c = np.array(strategy, np.float64)
  if (c.shape != (n, n) or not np.all(np.isfinite(c)) or np.any(np.triu(c, 1))
      or np.any(np.diagonal(c) <= 0)):
    raise ValueError(f'`strategy` must be a finite lower-triangular [{n}, {n}] matrix with '
                     f'positive diagonal. Received: shape {c.shape}.')
  return c
