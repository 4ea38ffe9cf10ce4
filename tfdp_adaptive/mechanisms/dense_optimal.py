"""The best lower-triangular strategy of all, for small T, with a certificate.

`min ||B||_F` over `A = B C` with unit columns of C (Denisov et al. 2022,
arXiv:2202.08312; Choquette-Choo et al. 2023, arXiv:2211.06530).
"""

import math

import numpy as np
from scipy import linalg

from tfdp_adaptive.mechanisms import base
from tfdp_adaptive.mechanisms import progress

_ITERATIONS = 2000


class Dense(base.MatrixMechanism):
  """C with the least mean (or maximal) error; any workload, O(T^3) per iteration.

  A stream draws t + 1 rows at step t.

  Args:
    steps: T.
    strategy: Fixes C (up to its scale) instead of designing it; [T, T] lower
      triangular with positive diagonal.
    tolerance: Relative gap to the lower bound at which the design stops.
    workload: A `Workload` or its config; None for prefix sums.
    objective: 'mean' or 'max'. There is no least error of the last iterate
      alone: C tends to a singular matrix.
  """

  cached = True

  def __init__(self, steps, *, strategy=None, tolerance=1e-8, workload=None, objective='mean'):
    super().__init__(steps, workload=workload, objective=objective)
    base.check_dense(steps)
    if objective == 'last':
      raise ValueError("`objective` must be 'mean' or 'max' for Dense: for the last iterate alone "
                       "the optimum is singular. Received: objective='last'.")
    if not 0 < tolerance < 1:
      raise ValueError(f'`tolerance` must be in (0, 1). Received: tolerance={tolerance}.')
    self.tolerance = float(tolerance)
    self._given = _check(strategy, self.steps)

  def design(self):
    c = self._given
    if c is None:
      c, _ = optimal(self.workload, self.steps, self.objective, self.tolerance)
    c = np.asarray(c)
    inverse = base.invert_lower(c / np.linalg.norm(c, axis=0).max())
    return {'inverse_rows': np.tril(inverse)}

  def passes(self):
    return self.steps

  def get_config(self):
    given = self._given and [list(row) for row in self._given]
    return {'strategy': given, 'tolerance': self.tolerance, **super().get_config()}


def optimal(workload, n, objective, tolerance):
  """Fixed point of the two-sided scaling `P^1/2 A Q^1/2 = U S V^T`.

  P and Q are weights of rows and columns that sum to one (P is uniform for the
  mean error). At the optimum q = diag(V S V^T) / tr S and X = C^T C =
  Q^-1/2 V S V^T Q^-1/2 up to scale; whatever the weights, tr S is a lower bound
  of the error.

  Returns:
    `(C, bound)`: [n, n] lower triangular with unit columns, and the largest
    lower bound of its error that was met.
  """
  a = workload.materialize(n)
  p, q = np.full(n, 1 / n), np.full(n, 1 / n)
  bound, best, chosen = 0.0, math.inf, None
  with progress.bar(f'Dense(steps={n})') as bar:
    for _ in range(_ITERATIONS):
      scaled = np.sqrt(p)[:, None] * a * np.sqrt(q)
      squares, v = linalg.eigh(scaled.T @ scaled, overwrite_a=True, check_finite=False,
                               driver='evd')
      s = np.sqrt(np.maximum(squares, 1e-30))
      bound = max(bound, s.sum())
      norms = (v**2) @ s  # diag(V S V^T)
      root = np.sqrt(norms)[:, None] * v / np.sqrt(s)
      errors = np.sum((a @ root)**2, axis=1)  # Of X with unit diagonal.
      value = math.sqrt(errors.max() if objective == 'max' else errors.mean())
      if value < best:
        best = value
        x = (np.sqrt(s) * v) / np.sqrt(norms)[:, None]
        chosen = x @ x.T
      bar.set_postfix(gap=f'{best / bound - 1:.1e}', refresh=False)
      bar.update()
      if best < bound * (1 + tolerance):
        break
      q = _relaxed(q, norms / s.sum())
      if objective == 'max':
        u = scaled @ v
        p = _relaxed(p, (u**2) @ (1 / s) / s.sum())
    else:
      raise ValueError(f'`tolerance` must be larger: the design of Dense(steps={n}) has a gap of '
                       f'{best / bound - 1:.1e} after {_ITERATIONS} iterations. '
                       f'Received: tolerance={tolerance}.')
  return base.factor_gram(chosen), bound


def _relaxed(old, new, factor=1.5):
  """A step of 1.5 in the logarithm: the plain map contracts by about 0.7, all one-sided."""
  result = old * (new / old)**factor
  return result / result.sum()


def _check(strategy, n):
  if strategy is None:
    return None
  c = np.asarray(strategy, np.float64)
  if (c.shape != (n, n) or not np.all(np.isfinite(c)) or np.any(np.triu(c, 1))
      or np.any(np.diagonal(c) <= 0)):
    raise ValueError(f'`strategy` must be a finite lower-triangular [{n}, {n}] matrix with positive '
                     f'diagonal. Received: shape {c.shape}.')
  return tuple(map(tuple, c.tolist()))
