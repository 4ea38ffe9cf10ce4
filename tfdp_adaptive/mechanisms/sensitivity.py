# SPDX-License-Identifier: Apache-2.0
"""Computes how far one record moves C G, for every participation pattern.

A record takes part in at most k steps, any two of them at least b apart
(j - i >= b). With contributions of norm one, `||C G||^2` changes by at most the
maximum over such sets pi of `sum_{i,j in pi} |(C^T C)_ij|`, which is attained
where C^T C >= 0 or k = 2. Each function returns that maximum's root, or an upper
bound of it, and says which; none of them guesses.
"""

from typing import Optional, Tuple

import numpy as np

from tfdp_adaptive import checks
from tfdp_adaptive.mechanisms import matrices

GRAM_LIMIT = 1024  # Largest matrix that is written out where there is another bound.
FIXED_ORDER_LIMIT = 4096  # Largest matrix that is written out for the sake of a fixed order.
PATTERN_LIMIT = 1 << 20  # Partial patterns that are looked at one by one.


def participation(min_sep: Optional[int], max_participations: int) -> Tuple[Optional[int], int]:
  """Returns (min_sep, max_participations) as integers. Raises unless they are a pattern."""
  checks.whole(max_participations=max_participations)
  if max_participations > 1 and min_sep is None:
    raise ValueError(
        '`min_sep` must be given when a record may take part more than once '
        f'(1 for reshuffled epochs). Received: max_participations={max_participations}, '
        'min_sep=None.')
  if min_sep is not None:
    checks.whole(min_sep=min_sep)
  return min_sep and int(min_sep), int(max_participations)


def most_participations(steps: int, min_sep: int, max_participations: int) -> int:
  """Returns `max_participations`, or as many as fit into the run if that is less."""
  return min(max_participations, -(-steps // min_sep))


def best_pattern(values: np.ndarray, min_sep: int, k: int) -> np.ndarray:
  """Returns the largest sum along the last axis of at most k values >= 0, min_sep apart."""
  n = values.shape[-1]
  best = np.zeros(values.shape[:-1] + (n + 1,))  # best[j]: positions < j only.
  for _ in range(min(k, -(-n // min_sep))):
    earlier = best[..., np.maximum(np.arange(n) + 1 - min_sep, 0)]
    best[..., 1:] = np.maximum.accumulate(values + earlier, axis=-1)
  return best[..., n]


def equal_spacing_column(c: np.ndarray, steps: int, min_sep: int, k: int) -> np.ndarray:
  """Returns the sum of the columns 0, b, ..., (k-1) b of a Toeplitz C, `v_j = sum_{m<k} c_{j-mb}`.

  Its norm is the sensitivity if c_0 >= c_1 >= ... >= 0 (Theorem 2, arXiv:2405.13763). If
  coefficients increase or are negative, the worst pattern need not be the equally spaced one.
  """
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
  """Returns the least non-increasing m >= |c|; it never lowers a sensitivity."""
  return np.maximum.accumulate(np.abs(c)[::-1])[::-1]


def toeplitz(c: np.ndarray, steps: int, min_sep: int, k: int) -> float:
  """Returns the sensitivity of a Toeplitz C with these coefficients and `steps` columns.

  It is exact for one participation, for at most min_sep bands, for non-negative non-increasing
  coefficients, and wherever `overlapping` is exact. Otherwise it is an upper bound.
  """
  c = np.asarray(c, np.float64)[:steps]
  k = most_participations(steps, min_sep, k)
  if k == 1:
    return float(np.linalg.norm(c))
  if len(c) <= min_sep:  # Column norms do not increase: as early as possible.
    tails = np.cumsum(c**2)
    lengths = np.minimum(steps - min_sep * np.arange(k), len(c))
    return float(np.sqrt(tails[lengths - 1].sum()))
  bound = float(np.linalg.norm(equal_spacing_column(majorant(c), steps, min_sep, k)))
  if steps <= GRAM_LIMIT and not np.array_equal(c, majorant(c)):
    bound = min(bound, overlapping(matrices.toeplitz_matrix(c, steps), min_sep, k))
  return bound


def overlapping(strategy: np.ndarray, min_sep: int, k: int) -> float:
  """Bounds the sensitivity of any C [m, n].

  It is exact for one participation, disjoint columns, few patterns or little overlap. Otherwise it
  is the upper bound of Algorithm 4 of arXiv:2306.08153.
  """
  if k == 1:
    return float(np.linalg.norm(strategy, axis=0).max())
  square = largest_sum(np.abs(strategy.T @ strategy), min_sep, k)
  if square is None:
    square = best_pattern(through_each(strategy, min_sep, k), min_sep, k)
  return float(np.sqrt(square))


def largest_sum(gram: np.ndarray, min_sep: int, k: int) -> Optional[float]:
  """Returns the largest `sum_{i,j in pi} gram_ij`, gram >= 0; None if there are too many patterns.

  Dynamic programming from left to right, over what the rest of a pattern still
  depends on: the last participation, and those before it that are in reach of
  the next one, as far as gram has non-zero diagonals.
  """
  n = len(gram)
  if min_sep == 1 and k >= n:
    return float(gram.sum())
  reach = np.subtract(*np.nonzero(gram)).max(initial=0)
  if reach < min_sep:  # Columns of one pattern are disjoint.
    return float(best_pattern(np.diagonal(gram), min_sep, k))
  width = max(1, min(k - 1, reach // min_sep))
  padded = np.pad(gram, (0, 1))  # Place n stands for none.
  last, value = np.full((n, width), n), np.diagonal(gram)
  last[:, -1] = np.arange(n)
  best = value.max()
  for _ in range(k - 1):
    first = last[:, -1] + min_sep
    counts = np.maximum(n - first, 0)
    ends = np.cumsum(counts)
    if ends[-1] > PATTERN_LIMIT:
      return None
    if not ends[-1]:
      break
    before = np.repeat(np.arange(len(last)), counts)
    j = first[before] + np.arange(ends[-1]) - (ends - counts)[before]
    overlaps = padded[last[before], j[:, None]].sum(axis=1)
    value = value[before] + gram[j, j] + 2 * overlaps
    best = max(best, value.max())
    last = np.column_stack([last[before, 1:], j])
    last[:, :-1] = np.where(j[:, None] + min_sep - last[:, :-1] > reach, n, last[:, :-1])
    order = np.lexsort(last.T)
    last, value = last[order], value[order]
    starts = np.flatnonzero(np.append(True, np.any(np.diff(last, axis=0), axis=1)))
    last, value = last[starts], np.maximum.reduceat(value, starts)
  return float(best)


def through_each(strategy: np.ndarray, min_sep: int, k: int) -> np.ndarray:
  """Returns [n], the largest `sum_{j in pi} |(C^T C)_ij|` over patterns through column i."""
  gram = np.abs(strategy.T @ strategy)
  n = len(gram)
  distance = np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
  others = best_pattern(np.where(distance >= min_sep, gram, 0.0), min_sep, k - 1)
  return np.diagonal(gram) + others


def fixed_order(strategy: np.ndarray, epoch: int, k: int) -> float:
  """Returns the sensitivity of any C [m, n] if participations are multiples of `epoch` apart.

  Then a record has one place in every epoch: exact for C^T C >= 0 if it takes
  part in all of them (arXiv:2211.06530), otherwise as `overlapping`.
  """
  return max(overlapping(strategy[:, place::epoch], 1, k)
             for place in range(min(epoch, strategy.shape[1])))
