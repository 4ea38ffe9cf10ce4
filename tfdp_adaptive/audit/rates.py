# SPDX-License-Identifier: Apache-2.0
"""Lower bounds on epsilon and mu from the rates of an attack in many independent runs.

Each run has one canary, or leaves it out.
"""

from __future__ import annotations

import math
from typing import Tuple

from scipy import stats

from tfdp_adaptive import checks
from tfdp_adaptive.audit import bounds


def epsilon_from_rates(
    true_positives: int, included: int, false_positives: int, excluded: int, delta: float = 0.0,
    confidence: float = 0.95) -> float:
  """Returns a lower bound on epsilon from independent runs, by Clopper-Pearson intervals.

  Args:
    true_positives: Runs with the canary in which the attack said "in".
    included: Runs with it.
    false_positives: Runs without it in which the attack said "in".
    excluded: Runs without it.
    delta: In [0, 1).
    confidence: In (0, `LARGEST_CONFIDENCE`], of both intervals together.
  """
  (tpr_low, tpr_high), (fpr_low, fpr_high) = _intervals(
      true_positives, included, false_positives, excluded, confidence)

  def bound(hits: float, misses: float) -> float:  # hits <= e^epsilon misses + delta.
    return math.log((hits - delta) / misses) if hits > delta and misses > 0 else 0.0

  return max(0.0, bound(tpr_low, fpr_high), bound(1 - fpr_high, 1 - tpr_low),
             bound(fpr_low, tpr_high), bound(1 - tpr_high, 1 - fpr_low))


def mu_from_rates(
    true_positives: int, included: int, false_positives: int, excluded: int,
    confidence: float = 0.95) -> float:
  """Returns a lower bound on mu of Gaussian differential privacy; see `epsilon_from_rates`.

  A Gaussian mechanism of noise multiplier s has mu = 1/s: no test of it has
  `Phi^-1(TPR) - Phi^-1(FPR) > mu`.
  """
  (tpr_low, tpr_high), (fpr_low, fpr_high) = _intervals(
      true_positives, included, false_positives, excluded, confidence)
  gaps = (stats.norm.ppf(tpr_low) - stats.norm.ppf(fpr_high),
          stats.norm.ppf(fpr_low) - stats.norm.ppf(tpr_high))
  return float(max(0.0, *(gap for gap in gaps if not math.isnan(gap))))


def clopper_pearson(successes: int, trials: int, confidence: float = 0.95) -> Tuple[float, float]:
  """Returns the two-sided interval `(low, high)` of a success probability."""
  checks.whole(0, successes=successes)
  checks.whole(trials=trials)
  checks.probability(confidence=confidence)
  if successes > trials:
    raise ValueError('There must be at least as many trials as successes. Received: '
                     f'successes={successes}, trials={trials}.')
  tail = (1 - confidence) / 2
  low = stats.beta.ppf(tail, successes, trials - successes + 1) if successes else 0.0
  high = stats.beta.isf(tail, successes + 1, trials - successes) if successes < trials else 1.0
  return float(low), float(high)


def _intervals(
    true_positives: int, included: int, false_positives: int, excluded: int,
    confidence: float) -> Tuple[Tuple[float, float], Tuple[float, float]]:
  bounds.check_confidence(confidence)
  level = 1 - (1 - confidence) / 2
  return (clopper_pearson(true_positives, included, level),
          clopper_pearson(false_positives, excluded, level))
