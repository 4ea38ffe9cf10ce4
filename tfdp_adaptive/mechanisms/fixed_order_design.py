# SPDX-License-Identifier: Apache-2.0
"""The C of least mean error for records with one place in every epoch, by its dual.

Columns of C at one place are orthogonal, and their squared norms sum to at most one:
X = C^T C minimizes `tr(A^T A X^-1)` under conditions that are linear in X. Let V hold their
multipliers: zero between different places, and one price p for every place on its diagonal.
For any such V >= 0

    error >= tr((V^1/2 A^T A V^1/2)^1/2) / sqrt(T sum(p)),

with equality where `X(V) = V^-1/2 (V^1/2 A^T A V^1/2)^1/2 V^-1/2`, the gradient, keeps the
conditions. There are about T k / 2 multipliers, while X has T^2 / 2 entries. Any V gives a
lower bound, which says how close an X is to the best (Choquette-Choo et al. 2023,
arXiv:2211.06530, pose the problem).
"""

import math
from typing import Any, NamedTuple, Tuple

import numpy as np
from scipy import interpolate
from scipy import linalg

from tfdp_adaptive.mechanisms import coarse
from tfdp_adaptive.mechanisms import matrices
from tfdp_adaptive.mechanisms import toeplitz
from tfdp_adaptive.mechanisms import workload as workload_lib

_COARSEST = 64  # Steps from which on a design begins with one of half as many.
_ROUGH = 1e-4  # Relative gap to the bound at which that one is good enough.
_STALLED = 1e-4  # Gap above which multipliers crawl, and the entries of X are searched:
_SMALL, _WORK = 256, 5e9  # up to so many steps, for so many cubed steps in all; or
_PATIENT = 5000  # for so many looks, where seconds do not matter.
_LEAST = 1e-9  # Singular value, relative to the largest, of steps that change nothing.


class Found(NamedTuple):
  """The best X and its error, the largest lower bound, and the multipliers.

  Attributes:
    gram: [n, n] X.
    error: The error of X.
    bound: The bound of any error.
    prices: [epoch] p.
    shares: [k, k, epoch] V of two epochs at a place, in units of its price.
  """

  gram: np.ndarray
  error: float
  bound: float
  prices: np.ndarray
  shares: np.ndarray


class _Enough(Exception):
  """The error is close enough to its bound, or enough was looked at."""


def optimal(
    workload: workload_lib.Workload, n: int, epoch: int, tolerance: float, looks: int,
    bar: Any, patient: bool = False, polish: bool = True) -> Found:
  """An X whose error is at most `1 + tolerance` times the least one, or the best of some looks.

  `patient` searches for minutes where that is what it takes.
  """
  if epoch == 1:
    return _orthogonal(workload, n)
  start = None
  if n > _COARSEST and epoch >= 8:
    few = epoch // 2
    m = few * (n // epoch) - (-(n % epoch) * few // epoch)
    start = optimal(
        coarse.workload(workload, n, m), m, few, max(tolerance, _ROUGH), 100, bar, polish=False)
  problem = _Dual(workload, n, epoch)
  p = problem.start(start)

  def loss(p: np.ndarray) -> Tuple[float, np.ndarray]:
    result = problem(p)
    bar.update()
    if problem.looks >= looks or problem.best_error <= problem.bound * (1 + tolerance):
      raise _Enough
    return result

  try:
    toeplitz.minimize(loss, p, ftol=1e-15)
  except _Enough:
    pass
  found = problem.found()
  most = _PATIENT if patient else min(1000, int(_WORK / n**3)) if n <= _SMALL else 0
  if polish and most and found.error > found.bound * (1 + max(tolerance, _STALLED)):
    return _by_matrix(found, workload, epoch, most, bar)
  return found


def _by_matrix(
    found: Found, workload: workload_lib.Workload, epoch: int, most: int, bar: Any) -> Found:
  """Continues the search in the entries of X, O(n^3) per evaluation."""
  n, place = len(found.gram), np.arange(len(found.gram)) % epoch
  i, j = np.nonzero(np.tril(place[:, None] != place, -1))
  a = workload.materialize(n)
  gram = a.T @ a

  def matrix(p: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    """X from the logarithms of its diagonal (up to a factor per place) and its correlations."""
    diagonal = np.exp(p[:n])
    diagonal /= np.bincount(place, diagonal)[place]
    root = np.sqrt(diagonal)
    x = np.diag(diagonal)
    x[i, j] = x[j, i] = p[n:] * root[i] * root[j]
    return x, root

  def loss(p: np.ndarray) -> Tuple[float, np.ndarray]:
    x, root = matrix(p)
    try:
      factor = linalg.cho_factor(x, lower=True)
    except linalg.LinAlgError:
      return math.inf, p
    product = linalg.cho_solve(factor, gram)
    value = np.trace(product)
    pulled = -linalg.cho_solve(factor, product.T)
    scaling = np.sum(pulled * x, axis=1)  # A logarithm scales a row and a column.
    scaling -= np.bincount(place, scaling)[place] * root**2
    gradient = np.concatenate([scaling, 2 * pulled[i, j] * root[i] * root[j]])
    return math.log(value), gradient / value

  root = np.sqrt(np.diagonal(found.gram))
  start = np.concatenate([2 * np.log(root), found.gram[i, j] / (root[i] * root[j])])
  x = matrix(toeplitz.minimize(
      loss, start, ftol=1e-12, maxcor=10, starts=1,
      maxiter=most, callback=lambda _: bar.update()))[0]
  solved = linalg.solve(x, a.T, assume_a='pos')
  error = math.sqrt(float(np.sum(a.T * solved)) / n)
  # The multipliers that X tells of, and the bound that they give.
  v = np.where(place[:, None] == place, solved @ solved.T, 0.0)
  prices = np.zeros(epoch)
  np.maximum.at(prices, place, np.abs(v).max(axis=1))
  squares, vectors = linalg.eigh(v)
  nuclear = linalg.svdvals(a @ (vectors * np.sqrt(np.maximum(squares, 0.0)))).sum()
  bound = max(found.bound, float(nuclear / math.sqrt(n * prices.sum())))
  return found._replace(gram=x, error=error, bound=bound)


def _orthogonal(workload: workload_lib.Workload, n: int) -> Found:
  """Returns the closed form for one place per epoch, where C has orthogonal columns."""
  a = workload.materialize(n)
  lengths = np.linalg.norm(a, axis=0)
  sizes = np.maximum(lengths, _LEAST * lengths.max())
  diagonal = sizes / sizes.sum()
  error, bound = math.sqrt(np.sum(lengths**2 / diagonal) / n), lengths.sum() / math.sqrt(n)
  alike = np.tril((a / sizes).T @ (a / sizes), -1)
  return Found(np.diag(diagonal), error, bound, np.ones(1), alike[..., None])


class _Dual:
  """The function to minimize, minus the log of the squared bound, and X of its multipliers."""

  def __init__(self, workload: workload_lib.Workload, n: int, epoch: int) -> None:
    self._workload, self._n, self._epoch = workload, n, min(epoch, n)
    self._k = -(-n // epoch)
    self._place = np.arange(n) % epoch
    steps = np.arange(n)
    # Pairs of steps of one place, the later one first.
    pairs = [(steps[lag * epoch:], steps[:n - lag * epoch]) for lag in range(1, self._k)]
    self._i, self._j = (np.concatenate([np.zeros(0, int)] + [pair[side] for pair in pairs])
                        for side in (0, 1))
    self._a = workload.materialize(n)
    self._point: np.ndarray = self.start(None)
    self.looks, self.best_error, self.bound = 0, math.inf, 0.0
    # As many bands as places: columns of one place do not overlap.
    root = toeplitz.square_root(workload_lib.Workload(workload.momentum), self._epoch)
    c = matrices.toeplitz_matrix(root, n)
    c /= np.linalg.norm(c, axis=0)
    self._gram: np.ndarray = c.T @ c
    self._safe: np.ndarray = self._gram.copy()
    self._measure(self._safe)

  def start(self, coarser: Any) -> np.ndarray:
    """Logarithms of the prices, then shares of the pairs."""
    if coarser is None:
      return np.zeros(self._epoch + len(self._i))
    prices = np.log(coarse.refined(coarser.prices, self._epoch))
    m = len(coarser.prices)
    shares = interpolate.interp1d(
        coarse.places(m), coarser.shares, bounds_error=False, assume_sorted=True,
        fill_value=(coarser.shares[..., 0], coarser.shares[..., -1]))(coarse.places(self._epoch))
    of_pairs = shares[self._i // self._epoch, self._j // self._epoch, self._place[self._i]]
    return np.concatenate([prices, of_pairs])

  def found(self) -> Found:
    prices, shares = np.exp(self._point[:self._epoch]), np.zeros([self._k, self._k, self._epoch])
    shares[self._i // self._epoch, self._j // self._epoch, self._place[self._i]] = (
        self._point[self._epoch:])
    return Found(self._gram, self.best_error, self.bound, prices, shares)

  def __call__(self, p: np.ndarray) -> Tuple[float, np.ndarray]:
    i, j, place, n = self._i, self._j, self._place, self._n
    self.looks += 1
    prices, shares = np.exp(p[:self._epoch]), p[self._epoch:]
    v = np.diag(prices[place])
    v[i, j] = shares * prices[place[i]]
    try:
      root = linalg.cholesky(v, lower=True, check_finite=False)
    except linalg.LinAlgError:
      return math.inf, p
    product = self._workload.apply(root)
    squares, vectors = linalg.eigh(product.T @ product, check_finite=False, driver='evd')
    size = np.sqrt(np.maximum(squares, 0.0))
    nuclear = float(size.sum())
    half = linalg.solve_triangular(
        root, vectors * np.sqrt(np.maximum(size, _LEAST * size[-1] / n)), lower=True, trans='T',
        check_finite=False)
    x = half @ half.T
    if nuclear / math.sqrt(n * prices.sum()) > self.bound:
      self.bound, self._point = nuclear / math.sqrt(n * prices.sum()), p.copy()
    by_price = prices * (np.bincount(place, np.diagonal(x)) / nuclear - 1 / prices.sum())
    by_share = 2 * x[i, j] * prices[place[i]] / nuclear
    by_price += np.bincount(place[i], by_share * shares, len(prices))
    self._measure(x)
    return (math.log(prices.sum()) - 2 * math.log(nuclear),
            -np.concatenate([by_price, by_share]))

  def _measure(self, x: np.ndarray) -> None:
    """Keeps X, once it has the conditions, if its error is the least so far."""
    x[self._i, self._j] = x[self._j, self._i] = 0
    unit = np.bincount(self._place, np.diagonal(x))[self._place]**-0.5
    x *= unit[:, None] * unit
    for share in (0.0, 0.03, 0.3):  # Far from the optimum, X may not be positive.
      if share:
        x = x + share * (self._safe - x)
      try:
        factor = linalg.cholesky(x, lower=True, check_finite=False)
        break
      except linalg.LinAlgError:
        continue
    else:
      return
    solved = linalg.solve_triangular(factor, self._a.T, lower=True, check_finite=False)
    error = math.sqrt(float(np.sum(solved**2)) / self._n)
    if error < self.best_error:
      self.best_error, self._gram = error, x
