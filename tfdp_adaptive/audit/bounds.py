# SPDX-License-Identifier: Apache-2.0
"""Lower bounds on epsilon from the right guesses of an attack, with a confidence.

`one_run_epsilon` and `one_run_gaussian_epsilon` are for one run with many canaries, each with a
fair coin. `gaussian_estimate` is no bound: it assumes what it says.
"""

import dataclasses
import functools
import math
from typing import Callable, List, NamedTuple, Optional, Tuple

import numpy as np
from scipy import optimize
from scipy import special
from scipy import stats

from tfdp_adaptive import checks
from tfdp_adaptive.accounting import gaussian

LARGEST_EPSILON = 50.0
LARGEST_MU = 50.0
LARGEST_CONFIDENCE = 1 - 1e-9  # Closer to one, rounding is not small beside what is left.


def one_run_epsilon(
    correct: int, guesses: int, canaries: int, delta: float = 0.0,
    confidence: float = 0.95) -> float:
  """Returns the largest epsilon that right guesses refute (arXiv:2305.08846, Theorem 5.2).

  Args:
    correct: Right guesses.
    guesses: The number of guesses, chosen without looking at the truth.
    canaries: The number of all canaries, with those that no guess was made for.
    delta: In [0, 1).
    confidence: In (0, 1).
  """
  _check_guesses(correct, guesses, canaries, confidence)
  checks.decay(delta=delta)

  def surprise(epsilon: float) -> float:
    """Returns a bound of the probability of such a success, minus the allowed one."""
    q = 1 / (1 + math.exp(-epsilon))
    chance = stats.binom.sf(correct - 1, guesses, q)
    fewer = np.cumsum(stats.binom.pmf(np.arange(correct - 1, -1, -1), guesses, q))
    slope = np.max(fewer / np.arange(1, correct + 1), initial=0.0)
    return min(1.0, chance + 2 * canaries * delta * slope) - (1 - confidence)

  return _largest_refuted(surprise, LARGEST_EPSILON)


def one_run_gaussian_epsilon(
    correct: int, guesses: int, canaries: int, delta: float, confidence: float = 0.95) -> float:
  """Returns the largest epsilon that right guesses refute for a Gaussian mechanism.

  Mahloujifar, Melis, Chaudhuri (2024), arXiv:2410.22235: The bound is much tighter than that of
  `one_run_epsilon`, because the claim says more. The result refutes Gaussian differential privacy,
  which is the whole trade-off curve of a Gaussian mechanism with this epsilon. It does not refute a
  claim with another trade-off curve, such as one amplified by sampling.

  Args:
    correct: Right guesses.
    guesses: The number of guesses, chosen without looking at the truth.
    canaries: The number of all canaries, with those that no guess was made for.
    delta: In (0, 1). The result is the curve's epsilon at this delta.
    confidence: In (0, 1).
  """
  _check_guesses(correct, guesses, canaries, confidence)
  checks.probability(delta=delta)
  allowed = 1 - confidence
  budget = guesses / canaries

  def surprise(mu: float) -> float:
    """Is positive if a Gaussian mechanism with this mu explains so many right guesses."""
    right, wrong = allowed * correct / canaries, allowed * (guesses - correct) / canaries
    for i in range(correct - 1, -1, -1):
      least = max(wrong, float(special.ndtr(special.ndtri(right) - mu)))
      if least == wrong:
        break
      right = min(1.0, right + i / (guesses - i) * (least - wrong))
      wrong = least
    return budget - (right + wrong)

  mu = _largest_refuted(surprise, LARGEST_MU)
  return gaussian.epsilon(1 / mu, delta) if mu else 0.0


# Fractions of the false alarms: guesses on all canaries find gross errors; others use half.
_ALL, _HALF = 0.05, 0.3
_MANY, _LEAST = 768, 48  # Least canaries for which fewer attempts are better; least of a side.


def _levels(canaries: int, confidence: float) -> List[Tuple[int, float]]:
  """Returns [(side, confidence of the attempt)] of the numbers of guesses to try.

  All of them, which is best for gross errors, a quarter, and so on: with many canaries, or a small
  mu, the surest few prove more. The attempts share the confidence.
  """
  attempts, ratio = [max(1, canaries // 2), max(1, canaries // 4)], 4 if canaries >= _MANY else 2
  while attempts[-1] // ratio >= _LEAST:
    attempts.append(attempts[-1] // ratio)
  surest, wrong = attempts[2:], 1 - confidence
  shares = [_ALL, _HALF if surest else 1 - _ALL,
            *((1 - _ALL - _HALF) / len(surest) for _ in surest)]
  return [(side, 1 - share * wrong) for side, share in zip(attempts, shares)]


@functools.lru_cache(maxsize=1024)  # Many audits have the same few numbers.
def provable_epsilon(canaries: int, delta: float = 0.0, confidence: float = 0.95) -> float:
  """Returns the result of `guess` if all guesses are right.

  Args:
    canaries: Coins.
    delta: In [0, 1).
    confidence: In (0, 1).
  """
  proven = [one_run_epsilon(2 * side, 2 * side, canaries, delta, level)
            for side, level in _levels(canaries, confidence) if 2 * side <= canaries]
  return max(proven, default=0.0)


def canaries_to_refute(
    epsilon: float, delta: float = 0.0, confidence: float = 0.95) -> Optional[int]:
  """Returns how many canaries, a power of two, refute `epsilon` if all guesses are right; or None.

  It tries up to 2^16. With more canaries, `delta` also allows more lucky guesses.
  """
  for power in range(1, 17):
    if provable_epsilon(2**power, delta, confidence) > epsilon:
      return 2**power
  return None


def demand(canaries: int, epsilon: float, delta: float, confidence: float) -> str:
  """Returns what it would take to refute `epsilon`, which so many canaries cannot, in words."""
  needed = canaries_to_refute(epsilon, delta, confidence)
  if needed is None:
    return 'another attack: up to 65536 canaries do not do it'
  return f'{max(needed, 2 * canaries)} canaries or more'


class Estimate(NamedTuple):
  """An estimate from normally distributed scores. It is NOT a bound.

  Attributes:
    mu: Difference of the means of scores of unit noise.
    standard_error: The standard error of `mu`, from the scores themselves.
    epsilon: The epsilon of a Gaussian mechanism with `mu - z * standard_error`.
  """

  mu: float
  standard_error: float
  epsilon: float


def gaussian_estimate(
    included: np.ndarray, excluded: np.ndarray, delta: float, confidence: float = 0.95) -> Estimate:
  """Estimates epsilon of the Gaussian mechanism that explains the scores.

  Assumes that scores are independent and normal with unit variance, and that included canaries
  score higher by mu on average. The influence of other records may widen the scores, so the
  standard error is computed from the scores themselves.

  Args:
    included: Scores of the canaries that were in.
    excluded: The scores of canaries that were left out.
    delta: In (0, 1).
    confidence: The confidence of the lower end of mu, if the assumptions hold.
  """
  checks.probability(delta=delta, confidence=confidence)
  groups = [np.asarray(scores, np.float64) for scores in (included, excluded)]
  if min(len(scores) for scores in groups) < 2:
    return Estimate(0.0, math.inf, 0.0)
  mu = float(groups[0].mean() - groups[1].mean())
  error = math.sqrt(sum(scores.var(ddof=1) / len(scores) for scores in groups))
  low = mu - float(stats.norm.isf(1 - confidence)) * error
  return Estimate(mu, error, gaussian.epsilon(1 / low, delta) if low > 0 else 0.0)


@dataclasses.dataclass(frozen=True)
class Guesses:
  """The best bound that the scores prove.

  Attributes:
    epsilon_lower: Lower bound on epsilon (Steinke et al. 2023); it holds whatever runs.
    gaussian_lower: The same for claims of Gaussian shape (Mahloujifar et al. 2024), at delta > 0.
    estimate: `Estimate`, which assumes normal scores; at delta > 0.
    confidence: The confidence of each bound.
    canaries: Number of coins.
    guesses: The number of guesses behind `epsilon_lower`.
    correct: Right ones among them.
    provable: The bound if all guesses had been right.
  """

  epsilon_lower: float
  gaussian_lower: float
  estimate: Optional[Estimate]
  confidence: float
  canaries: int
  guesses: int
  correct: int
  provable: float


def guess(
    scores: np.ndarray, included: np.ndarray, delta: float, confidence: float) -> Guesses:
  """Guesses "in" for the highest scores and "out" for the lowest, a few numbers of each.

  Args:
    scores: [canaries].
    included: [canaries] bool.
    delta: The delta at which epsilon is computed.
    confidence: The confidence of each bound; the attempts share it.
  """
  count, order = len(scores), np.argsort(scores, kind='stable')
  found, lower = [], [0.0]
  for side, level in _levels(count, confidence):
    correct = int(np.sum(included[order[-side:]]) + np.sum(~included[order[:side]]))
    found.append((one_run_epsilon(correct, 2 * side, count, delta, level), 2 * side, correct))
    if delta:
      lower.append(one_run_gaussian_epsilon(correct, 2 * side, count, delta, level))
  bound, guesses, correct = max(found)
  estimate = gaussian_estimate(
      scores[included], scores[~included], delta, confidence) if delta else None
  return Guesses(bound, max(lower), estimate, confidence, count, guesses,
                 correct, provable_epsilon(count, delta, confidence))


def auc(scores: np.ndarray, included: np.ndarray) -> float:
  """Returns the probability that one that is included scores above one left out."""
  if included.all() or not included.any():
    return 0.5
  better = stats.mannwhitneyu(scores[included], scores[~included]).statistic
  return float(better / (np.sum(included) * np.sum(~included)))


def check_confidence(confidence: float) -> None:
  checks.probability(confidence=confidence)
  if confidence > LARGEST_CONFIDENCE:
    raise ValueError('`confidence` must be at most 1 - 1e-9: several bounds share what is left '
                     f'of 1. Received: confidence={confidence!r}.')


def _check_guesses(correct: int, guesses: int, canaries: int, confidence: float) -> None:
  checks.whole(0, correct=correct)
  checks.whole(guesses=guesses, canaries=canaries)
  checks.probability(confidence=confidence)
  if not correct <= guesses <= canaries:
    raise ValueError('`correct` must be at most `guesses`, and those at most `canaries`. Received: '
                     f'correct={correct}, guesses={guesses}, canaries={canaries}.')


def _largest_refuted(surprise: Callable[[float], float], largest: float) -> float:
  """Returns the root of an increasing function, from below, or 0."""
  if surprise(0.0) >= 0:
    return 0.0
  if surprise(largest) < 0:
    return largest
  return max(0.0, optimize.brentq(surprise, 0.0, largest, xtol=1e-9) - 1e-9)
