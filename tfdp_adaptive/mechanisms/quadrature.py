# SPDX-License-Identifier: Apache-2.0
"""Sums of smooth functions over very long ranges of integers."""

import functools
from typing import Tuple

import numpy as np
from scipy import linalg

_EXACT = 32  # First terms, summed one by one.
_NODES = 16  # Per panel; panels double in length.


@functools.lru_cache(maxsize=256)
def nodes(start: int, stop: int) -> Tuple[np.ndarray, np.ndarray]:
  """Points and weights with `sum_{start <= j < stop} f(j)` close to `weights @ f(points)`.

  Exact for short ranges, else for polynomials of degree 31 on panels [a, 2a):
  sums of powers theta^j, 0 < theta < 1, have an error of about 1e-14.
  """
  points, weights = [], []
  first = min(stop, start + _EXACT)
  points.append(np.arange(start, first, dtype=np.float64))
  weights.append(np.ones(first - start))
  length = _EXACT
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
  """Gauss rule of the sum over 0, ..., size - 1: zeros of the discrete Chebyshev polynomials."""
  if size <= _NODES:
    return np.arange(size, dtype=np.float64), np.ones(size)
  k = np.arange(1, _NODES, dtype=np.float64)
  off = np.sqrt(k**2 * (float(size)**2 - k**2) / (4 * (4 * k**2 - 1)))
  x, v = linalg.eigh_tridiagonal(np.full(_NODES, (size - 1) / 2), off)
  return x, size * v[0]**2
