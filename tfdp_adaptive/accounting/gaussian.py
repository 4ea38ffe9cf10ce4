# SPDX-License-Identifier: Apache-2.0
"""Epsilon and delta of one Gaussian mechanism: exact, and never below the truth."""

import math

import numpy as np
from scipy import optimize
from scipy import special

_LARGEST_MU = 1e150  # Largest mu whose square is finite.


def delta(noise_multiplier: float, target_epsilon: float) -> float:
  """Returns the delta of a Gaussian of sensitivity one (1805.06530, Thm. 8), rounded up."""
  if not noise_multiplier or 1 / float(noise_multiplier) > _LARGEST_MU:
    return 1.0
  mu = 1 / noise_multiplier
  first = special.log_ndtr(mu / 2 - target_epsilon / mu)
  second = target_epsilon + special.log_ndtr(-mu / 2 - target_epsilon / mu)
  if first == -math.inf:
    return 0.0
  fraction = -math.expm1(min(0.0, second - first))
  # The logarithms are exact to a few units, of which `fraction` sees the difference.
  rounding = 8 * np.finfo(np.float64).eps * (1 + abs(first) + mu + abs(target_epsilon))
  return float(min(1.0, math.exp(first) * (fraction * (1 + rounding) + rounding)))


def epsilon(noise_multiplier: float, target_delta: float) -> float:
  """Returns the exact epsilon of a Gaussian of sensitivity one, rounded up by 1e-12."""
  if not noise_multiplier or 1 / float(noise_multiplier) > _LARGEST_MU:
    return math.inf
  gap = lambda e: delta(noise_multiplier, e) - target_delta
  if gap(0.0) <= 0:
    return 0.0
  mu = 1 / noise_multiplier
  upper = mu * (mu / 2 + math.sqrt(-2 * math.log(target_delta)))  # Phi(-x) <= exp(-x^2 / 2)
  if not gap(upper) < 0:  # Delta is all rounding at so large an epsilon.
    return upper * (1 + 1e-12)
  root = optimize.brentq(gap, 0.0, upper, xtol=1e-14 * upper, rtol=1e-14, maxiter=500)
  return float(root * (1 + 1e-12))
