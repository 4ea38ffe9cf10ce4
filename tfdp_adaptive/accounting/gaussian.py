# SPDX-License-Identifier: Apache-2.0
"""Epsilon and delta of one Gaussian mechanism: exact, and never below the truth.

Also what epsilon and delta mean: how well the best attacker can detect a record.
"""

import math
from typing import Iterable, Tuple

import numpy as np
from scipy import optimize
from scipy import special

from tfdp_adaptive import checks

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


def detection_bound(profile: Iterable[Tuple[float, float]], false_positive_rate: float) -> float:
  """Returns the largest fraction of participants that any test detects at a false-positive rate.

  (epsilon, delta) bounds it by `e^epsilon a + delta` and by `1 - e^-epsilon (1 - a - delta)`
  (Kairouz et al., arXiv 1311.0776, Theorem 2.1), at every point of the privacy curve.

  Args:
    profile: Points (epsilon, delta) of the curve. Any of them give a bound.
    false_positive_rate: a, the fraction of others that the test reports as participants.
  """
  checks.probability(false_positive_rate=false_positive_rate)
  least = 1.0
  for epsilon, delta in profile:
    least = min(least, math.exp(min(epsilon, 700.0)) * false_positive_rate + delta,
                1 - math.exp(-epsilon) * (1 - false_positive_rate - delta))
  return least


def mu_of(target_epsilon: float, target_delta: float) -> float:
  """Returns mu of the single Gaussian mechanism that has this epsilon at this delta.

  Its true-positive rate is `Phi(mu + Phi^-1(false_positive_rate))`.
  """
  checks.probability(target_delta=target_delta)
  checks.not_negative(target_epsilon=target_epsilon)
  gap = lambda log_mu: delta(math.exp(-log_mu), target_epsilon) - target_delta
  return math.exp(optimize.brentq(gap, math.log(1e-9 * target_delta), math.log(1e6), xtol=1e-12))


def true_positive_rate(mu: float, false_positive_rate: float = 0.01) -> float:
  """Returns the exact rate of the best test against one Gaussian mechanism."""
  return float(special.ndtr(mu + special.ndtri(false_positive_rate)))
