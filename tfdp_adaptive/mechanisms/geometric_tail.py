# SPDX-License-Identifier: Apache-2.0
"""Computes the sensitivity of a banded inverse of many steps from its first coefficients.

C = 1 / d(x) for a polynomial d with one root close to one: after some thousand coefficients
C is geometric to the last bit, `c_j = c_{n-1} rho^(j-n+1)`, whatever the number of steps. Sums
over later steps have closed forms, so the cost does not depend on the number of steps.
"""

from typing import NamedTuple, Optional, Tuple

import numpy as np
from scipy import signal

from tfdp_adaptive.mechanisms import sensitivity as sensitivity_lib
from tfdp_adaptive.mechanisms import toeplitz

_EXACT = 1e-12  # Relative; how geometric the tail must be.
_NEGLIGIBLE = 1e-17
_LONGEST = 4096  # Times the bands: coefficients looked at for a tail.


class Tail(NamedTuple):
  """Coefficients `head`, then `head[-1] * rho ** (1, 2, ...)`."""

  head: np.ndarray
  rho: float


def of(d: np.ndarray, steps: int) -> Optional[Tail]:
  """The coefficients of `1 / d(x)`; None if they end, or are not geometric, before `steps`."""
  length, done = min(steps, 8 * max(len(d), 64)), 0
  c, state, impulse = np.zeros(0), np.zeros(len(d) - 1), 1.0
  while length < steps:
    piece, state = signal.lfilter(
        [1.0], d, np.append(impulse, np.zeros(length - done - 1)), zi=state)
    c, done, impulse = np.append(c, piece), length, 0.0
    last = c[-len(d) - 1:]
    with np.errstate(all='ignore'):
      rho = _root(d, last[-1] / last[-2])
      if 0 < rho < 1 and last[-1] > 0 and np.all(
          np.abs(last[1:] - rho * last[:-1]) <= _EXACT * last[:-1]):
        return Tail(c, rho)
    gone = np.abs(state).max(initial=0) <= _NEGLIGIBLE  # It decides all later values.
    if gone or length >= _LONGEST * len(d) or not np.isfinite(last).all():
      return None
    length = min(steps, length + max(length // 2, 8 * len(d)))
  return None


def squared_sensitivity(
    tail: Tail, d: np.ndarray, steps: int, min_sep: int, k: int) -> Tuple[float, np.ndarray]:
  """Returns the squared sensitivity (if k > 1, of the monotone majorant) and its gradient in d."""
  k = sensitivity_lib.most_participations(steps, min_sep, k)
  value, pulled, by_rho = _once(tail, steps) if k == 1 else _often(tail, steps, min_sep, k)
  powers = tail.rho ** -np.arange(len(d), dtype=float)
  by_rho /= np.arange(len(d)) @ (d * powers) / tail.rho
  return value, toeplitz.pull(d, pulled, tail.head, tail.head) + by_rho * powers


def _root(d: np.ndarray, rho: float) -> float:
  """The root of `sum_j d_j rho^-j` near a first guess."""
  lags = np.arange(len(d))
  for _ in range(4):
    terms = d * rho ** -lags.astype(float)
    rho += rho * terms.sum() / (lags @ terms)
  return float(rho)


def _once(tail: Tail, steps: int) -> Tuple[float, np.ndarray, float]:
  """`(||c||^2, its gradient in the head, in rho)`."""
  head, rho = tail
  n, last = steps - len(head), head[-1]
  rest, by_rho = _geometric(rho, n)
  pulled = 2 * head
  pulled[-1] += 2 * last * rest
  return head @ head + last**2 * rest, pulled, last**2 * by_rho


def _geometric(rho: float, n: int) -> Tuple[float, float]:
  """`sum_{i=1}^n rho^(2i)` and its derivative in rho."""
  y, log = rho**2, 2 * np.log(rho)
  gone = -np.expm1(n * log)  # 1 - y^n
  left = -np.expm1(log)
  value = y * gone / left
  return value, 2 * rho * (gone / left**2 - n * (1 - gone) / left)


def _often(tail: Tail, steps: int, b: int, k: int) -> Tuple[float, np.ndarray, float]:
  """Returns what `_once` does, for the sum of columns 0, b, ..., (k-1) b of the majorant.

  Block m of b rows is `sum_l c_{i+lb}` over the l of [m-k+1, m]: of the first q blocks of C,
  which are written out, and of later ones, which are `g_m w_i` with `w_i = rho^(i+1)`.
  """
  head, rho = tail
  q, n = -(-len(head) // b), len(head)
  # Once all of C is in the sum, it repeats with every participation: one block stands for all.
  settled = q + int(np.log(_NEGLIGIBLE) / (b * np.log(rho))) + 1
  repeated = max(0, k - settled - 2)
  k, steps = k - repeated, steps - repeated * b
  blocks = -(-steps // b)
  times = np.ones(blocks)
  if repeated:
    times[settled] += repeated
  width = min(b, n)  # Columns of a block that are written out: all, unless one block holds all.
  more = np.arange(1, q * width - n + 1)
  c = np.concatenate([head, head[-1] * rho**more])
  largest = sensitivity_lib.majorant(c)
  found = np.where(np.abs(c) >= largest, np.arange(len(c)), len(c))
  source = np.minimum.accumulate(found[::-1])[::-1]  # Index of the coefficient behind each entry.
  sums = np.concatenate([np.zeros([1, width]), np.cumsum(largest.reshape(q, width), axis=0)])
  m = np.arange(blocks)
  low = np.maximum(0, m - k + 1)
  pairs = np.stack([np.minimum(m + 1, q), np.minimum(low, q)])  # Neither decreases with m.
  new = np.append(True, np.any(np.diff(pairs), axis=0))
  pairs, row_of = pairs[:, new], np.cumsum(new) - 1
  rows = sums[pairs[0]] - sums[pairs[1]]
  w = rho ** np.arange(1.0, width + 1)
  # Later blocks are `g_m w_i`, g_m the sum of `c[-1] rho^e` over their e = gap, gap + b, ...
  gap, last = b - width, c[-1]
  lags = gap + b * np.arange(blocks, dtype=float)
  begin, end = np.maximum(low - q, 0), np.maximum(m - q + 1, 0)
  between = lambda x: (lambda total: total[end] - total[begin])(np.append(0.0, np.cumsum(x)))
  size, slope = between(rho**lags), between(lags * rho**lags) / rho
  g = last * size
  counts = np.bincount(row_of, times, len(rows))
  g_sums, g_square = np.bincount(row_of, times * g, len(rows)), times * g @ g
  inner, square = rows @ w, w @ w
  value = counts @ np.sum(rows**2, axis=1) + 2 * g_sums @ inner + square * g_square
  by_row = 2 * (counts[:, None] * rows + g_sums[:, None] * w)
  by_w = 2 * (g_sums @ rows + g_square * w)
  by_g = 2 * times * (inner[row_of] + square * g)
  cut = steps - (blocks - 1) * b  # The last block has no more rows than these.
  beyond = rows[row_of[-1], cut:] + g[-1] * w[cut:]
  value -= beyond @ beyond
  by_row[row_of[-1], cut:] -= 2 * beyond
  by_w[cut:] -= 2 * g[-1] * beyond
  by_g[-1] -= 2 * beyond @ w[cut:]
  # Columns that are not written out: `(own + g_m rho^width) rho^r` for r = 1, ..., gap.
  first = low == 0
  height = first * last + g * rho**width
  (whole, whole_slope), (part, part_slope) = (
      _geometric(rho, count) for count in (gap, max(0, cut - width)))
  counted = times * np.append(np.full(blocks - 1, whole), part)
  value += counted @ height**2
  by_height = 2 * counted * height
  by_g += by_height * rho**width
  by_rho = by_height @ g * width * rho ** (width - 1) + times * height**2 @ np.append(
      np.full(blocks - 1, whole_slope), part_slope)
  by_sums = np.zeros_like(sums)
  np.add.at(by_sums, pairs[0], by_row)
  np.subtract.at(by_sums, pairs[1], by_row)
  by_largest = np.cumsum(by_sums[:0:-1], axis=0)[::-1].ravel()
  by_c = np.bincount(source, by_largest, len(c)) * np.sign(c)
  by_c[-1] += by_g @ size + by_height @ first
  by_rho += by_w @ (np.arange(1, width + 1) * w) / rho + last * (by_g @ slope)
  later, pulled = by_c[n:], by_c[:n]
  pulled[-1] += later @ rho**more
  by_rho += head[-1] * (later @ (more * rho ** (more - 1.0)))
  return value, pulled, by_rho
