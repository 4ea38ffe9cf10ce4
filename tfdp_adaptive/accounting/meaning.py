# SPDX-License-Identifier: Apache-2.0
"""Computes how well the best attacker can detect a record, given epsilon and delta."""

import math
from typing import Iterable, Tuple

from scipy import optimize
from scipy import special

from tfdp_adaptive import checks
from tfdp_adaptive.accounting import cost

FRACTIONS = (1.0, 0.6, 0.35)  # Fractions of epsilon at which the privacy curve is evaluated.


def bound(profile: Iterable[Tuple[float, float]], false_positive_rate: float) -> float:
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


def gaussian_mu(epsilon: float, delta: float) -> float:
  """Returns mu of the single Gaussian mechanism that has this epsilon at this delta.

  Its true-positive rate is `Phi(mu + Phi^-1(false_positive_rate))`.
  """
  checks.probability(delta=delta)
  checks.not_negative(epsilon=epsilon)
  gap = lambda log_mu: cost.gaussian_delta(math.exp(-log_mu), epsilon) - delta
  return math.exp(optimize.brentq(gap, math.log(1e-9 * delta), math.log(1e6), xtol=1e-12))


def gaussian_true_positive_rate(mu: float, false_positive_rate: float = 0.01) -> float:
  """Returns the exact rate of the best test against one Gaussian mechanism."""
  return float(special.ndtr(mu + special.ndtri(false_positive_rate)))
