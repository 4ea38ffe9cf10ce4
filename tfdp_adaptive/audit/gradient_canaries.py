# SPDX-License-Identifier: Apache-2.0
"""Canaries whose gradients are chosen, guessed from every release of one run.

Canary i is a record with a gradient of its own, huge and along coordinate i, which is
clipped to the full clip norm in every geometry. A fair coin includes it or leaves it
out (under replace: turns it around). The attacker sees all releases and undoes the
correlation of the noise first; then every canary that was in adds mu to a score of
unit noise, and mu = ||C x|| / sigma is the plan's own where nothing is amplified: no
attack on one record does better.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Dict, List, Optional, Tuple, TYPE_CHECKING

import numpy as np

from tfdp_adaptive.audit import bounds

if TYPE_CHECKING:
  from tfdp_adaptive.audit import subjects
  from tfdp_adaptive.privacy import plan as plan_lib

_HUGE = 1e12


@dataclasses.dataclass(frozen=True)
class Guessed:
  """What the canaries of one run prove.

  Attributes:
    epsilon_lower: Lower bound on epsilon (Steinke et al. 2023); it holds whatever runs.
    gaussian_lower: The same for claims of Gaussian shape (Mahloujifar et al. 2024).
    estimate: `bounds.Estimate`, which assumes normal scores.
    confidence: Of each bound.
    canaries: Number of coins.
    guesses: Of the attempt behind `epsilon_lower`.
    correct: Right ones among them.
    provable: The bound if all guesses had been right.
  """

  epsilon_lower: float
  gaussian_lower: float
  estimate: bounds.Estimate
  confidence: float
  canaries: int
  guesses: int
  correct: int
  provable: float


def run(
    subject: subjects.Subject, plan: plan_lib.PrivacyPlan, count: int, seed: Optional[int] = None,
    batches: Any = None) -> Tuple[np.ndarray, np.ndarray]:
  """Trains with canaries; returns their scores, [count], and coins, [count] bool.

  Args:
    subject: A `Subject`.
    plan: The plan by which records are drawn; every record is a canary, up to `count`,
      and those that are none have no gradient.
    count: Of canaries, at most the subject's size.
    seed: For tests.
    batches: Record indices of every step, if they do not come from the plan.
  """
  rng = np.random.default_rng(seed)
  population = plan.population_size or count
  count = min(count, population, subject.size)
  of_record = np.full(population, -1)
  of_record[rng.permutation(population)[:count]] = np.arange(count)
  included = rng.random(count) < 0.5
  flipped = subject.claims.adjacency == 'replace'
  state = subject.fresh(seed)
  drawn: List[np.ndarray] = []
  observed: Dict[str, Any] = {}
  for step, indices in enumerate(plan.index_batches(population) if batches is None else batches):
    canaries = of_record[np.asarray(indices, np.int64)]
    canaries = canaries[canaries >= 0]
    drawn.append(np.isin(np.arange(count), canaries))
    if not flipped:
      canaries = canaries[included[canaries]]
    records = np.zeros([max(1, len(canaries)), subject.size])
    records[np.arange(len(canaries)), canaries] = np.where(included[canaries], _HUGE, -_HUGE)
    weights = np.zeros(len(records))
    weights[:len(canaries)] = 1
    parts, state = subject.step(state, records, weights)
    for part in parts:
      if part.clip and part.unit:
        signal = part.clip / subject.claims.batch_size / part.unit
        steps, values, signals = observed.setdefault(part.name, ([], [], []))
        steps.append(step)
        values.append(part.value[:count] / part.unit)
        signals.append(signal)
  probability = None
  if plan.amplified:
    probability = plan.batch_size / population
  return _scores(subject, observed, np.array(drawn), probability), included


def _scores(
    subject: subjects.Subject, observed: Any, drawn: np.ndarray,
    probability: Optional[float]) -> np.ndarray:
  """[count] scores, high where a canary seems to be in.

  With steps that are known, the matched filter <C x, C y> / ||C x||; with coins of
  `probability`, the likelihood ratio, exact for independent noise. Of several releases
  of a step, each has noise of its own.
  """
  steps, count = drawn.shape
  products, energies, gains = np.zeros([steps, count]), np.zeros(count), np.zeros(steps)
  for when, values, signals in observed.values():
    # What steps contribute to the released rows, whitened: K^-1/2 restricted to them.
    root = np.linalg.cholesky(subject.covariance(steps)[np.ix_(when, when)])
    solve = lambda rows, root=root: np.linalg.solve(root, rows)
    filters = solve(np.diag(signals))
    whitened = solve(np.array(values))
    products[when] += filters.T @ whitened
    gains[when] += np.sum(filters**2, axis=0)
    energies += np.sum((filters @ drawn[when])**2, axis=0)
  if probability is None:
    return np.sum(products * drawn, axis=0) / np.sqrt(np.where(energies > 0, energies, 1))
  ratio = products - gains[:, np.newaxis] / 2
  if subject.claims.adjacency == 'replace':
    opposite = -products - gains[:, np.newaxis] / 2
    return np.sum(_mixed(ratio, probability) - _mixed(opposite, probability), axis=0)
  return np.sum(_mixed(ratio, probability), axis=0)


def _mixed(log_ratio: np.ndarray, probability: float) -> np.ndarray:
  """log(1 - q + q e^x) without overflow."""
  return np.logaddexp(math.log1p(-probability) if probability < 1 else -math.inf,
                      math.log(probability) + log_ratio)


def guess(scores: np.ndarray, included: np.ndarray, delta: float, confidence: float) -> Guessed:
  """Guesses "in" for the highest scores and "out" for the lowest, a few numbers of each.

  Args:
    scores: [count].
    included: [count] bool.
    delta: Where epsilon is wanted.
    confidence: Of each bound; the attempts share it.
  """
  count = len(scores)
  order = np.argsort(scores, kind='stable')
  sides = bounds.sides(count)
  level = 1 - (1 - confidence) / len(sides)
  best, gaussian = (-1.0, 0, 0), 0.0
  for side in sides:
    correct = int(np.sum(included[order[-side:]]) + np.sum(~included[order[:side]]))
    bound = bounds.one_run_epsilon(correct, 2 * side, count, delta, level)
    best = max(best, (bound, 2 * side, correct))
    gaussian = max(gaussian, bounds.one_run_gaussian_epsilon(
        correct, 2 * side, count, delta, level))
  provable = max(bounds.one_run_epsilon(2 * side, 2 * side, count, delta, level) for side in sides)
  return Guessed(best[0], gaussian,
                 bounds.gaussian_estimate(scores[included], scores[~included], delta, confidence),
                 confidence, count, best[1], best[2], provable)
