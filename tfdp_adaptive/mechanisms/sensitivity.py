"""How far one record moves C G, for every way in which it may take part.

A record takes part in at most k steps, any two of them at least b apart
(j - i >= b). With contributions of norm one, `||C G||^2` changes by at most the
maximum over such sets pi of `sum_{i,j in pi} |(C^T C)_ij|` (attained where
C^T C >= 0). Each function returns that maximum's root, or an upper bound of it,
and says which; none of them guesses.
"""

import numpy as np

GRAM_LIMIT = 1024  # Largest matrix for which the O(k n^2) bound is also tried.


def most_participations(steps: int, min_sep: int, max_participations: int) -> int:
  """k is never more than fit into the run."""
  return min(max_participations, -(-steps // min_sep))


def best_pattern(values: np.ndarray, min_sep: int, k: int) -> np.ndarray:
  """Largest sum of at most k values >= 0 at positions min_sep apart, along the last axis."""
  n = values.shape[-1]
  best = np.zeros(values.shape[:-1] + (n + 1,))  # best[j]: positions < j only.
  for _ in range(min(k, -(-n // min_sep))):
    earlier = best[..., np.maximum(np.arange(n) + 1 - min_sep, 0)]
    best[..., 1:] = np.maximum.accumulate(values + earlier, axis=-1)
  return best[..., n]


def disjoint(squared_norms: np.ndarray, min_sep: int, k: int) -> float:
  """Exact if C has at most min_sep bands: columns of one pattern do not overlap."""
  return float(np.sqrt(best_pattern(np.asarray(squared_norms), min_sep, k)))


def equal_spacing(c: np.ndarray, steps: int, min_sep: int, k: int) -> float:
  """Exact for a Toeplitz C with coefficients c_0 >= c_1 >= ... >= 0 (Theorem 2, arXiv:2405.13763).

  Raises:
    ValueError: The coefficients increase or are negative somewhere: then the
      worst pattern need not be the equally spaced one, and the value too small.
  """
  if np.any(c < 0) or np.any(np.diff(c) > 0):
    raise ValueError('`c` must be non-negative and non-increasing for the equal-spacing formula. '
                     f'Received: c with minimum {np.min(c)} and largest increase '
                     f'{np.max(np.diff(c))}. Use `toeplitz`, which takes a monotone majorant.')
  return float(np.linalg.norm(equal_spacing_column(c, steps, min_sep, k)))


def equal_spacing_column(c: np.ndarray, steps: int, min_sep: int, k: int) -> np.ndarray:
  """Sum of the columns 0, b, ..., (k-1) b of the Toeplitz C: `v_j = sum_{m<k} c_{j-mb}`."""
  k = most_participations(steps, min_sep, k)
  length = min(steps, (k - 1) * min_sep + len(c))
  blocks = -(-length // min_sep)
  padded = np.zeros(blocks * min_sep)
  padded[:min(len(c), length)] = c[:length]
  sums = np.cumsum(padded.reshape(blocks, min_sep), axis=0)
  if k < blocks:
    sums[k:] -= sums[:-k].copy()
  return sums.ravel()[:length]


def majorant(c: np.ndarray) -> np.ndarray:
  """Smallest non-increasing sequence with `m_j >= |c_j|`; it never lowers a sensitivity."""
  return np.maximum.accumulate(np.abs(c)[::-1])[::-1]


def toeplitz(c: np.ndarray, steps: int, min_sep: int, k: int) -> float:
  """Of the Toeplitz C with these coefficients (zero beyond) and `steps` columns.

  Exact for one participation, for at most min_sep bands and for non-negative
  non-increasing coefficients, else an upper bound.
  """
  c = np.asarray(c, np.float64)[:steps]
  k = most_participations(steps, min_sep, k)
  if k == 1:
    return float(np.linalg.norm(c))
  if len(c) <= min_sep:  # Column norms do not increase: as early as possible.
    tails = np.cumsum(c**2)
    lengths = np.minimum(steps - min_sep * np.arange(k), len(c))
    return float(np.sqrt(tails[lengths - 1].sum()))
  bound = equal_spacing(majorant(c), steps, min_sep, k)
  if steps <= GRAM_LIMIT and not np.array_equal(c, majorant(c)):
    lag = np.subtract.outer(np.arange(steps), np.arange(steps))
    padded = np.concatenate([c, np.zeros(steps - len(c))])
    bound = min(bound, gram_bound(np.where(lag >= 0, padded[np.abs(lag)], 0.0), min_sep, k))
  return bound


def gram_bound(strategy: np.ndarray, min_sep: int, k: int) -> float:
  """Upper bound for any C [m, n] (Algorithm 4 of arXiv:2306.08153)."""
  return float(np.sqrt(best_pattern(through_each(strategy, min_sep, k), min_sep, k)))


def through_each(strategy: np.ndarray, min_sep: int, k: int) -> np.ndarray:
  """[n] of each column i, the largest `sum_{j in pi} |(C^T C)_ij|` over patterns through i."""
  gram = np.abs(strategy.T @ strategy)
  n = len(gram)
  distance = np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
  others = best_pattern(np.where(distance >= min_sep, gram, 0.0), min_sep, k - 1)
  return np.diagonal(gram) + others


def general(strategy: np.ndarray, min_sep: int, k: int) -> float:
  """Of any C [m, n]: exact for one participation or disjoint columns, else an upper bound."""
  strategy = np.asarray(strategy, np.float64)
  n = strategy.shape[1]
  k = most_participations(n, min_sep, k)
  squared_norms = np.sum(strategy**2, axis=0)
  if k == 1:
    return float(np.sqrt(squared_norms.max()))
  gram = strategy.T @ strategy
  if not np.any(np.tril(gram, -min_sep)):
    return disjoint(squared_norms, min_sep, k)
  return gram_bound(strategy, min_sep, k)
