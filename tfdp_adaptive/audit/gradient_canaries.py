# SPDX-License-Identifier: Apache-2.0
"""Canaries whose gradients are chosen, guessed from every release of one run.

Canary i is a record with a gradient of its own, huge and along coordinate i, which is
clipped to the full clip norm in every geometry. A fair coin includes it or leaves it
out (under replace: turns it around). The attacker sees all releases and undoes the
correlation of the noise first; then every canary that was in adds mu to a score of
unit noise, and mu = ||C x|| / sigma is the plan's own where nothing is amplified: no
attack on one record does better.
"""

from typing import Dict, Iterable, List, Optional, Tuple

import numpy as np
from scipy import special
from scipy import stats

from tfdp_adaptive import privacy
from tfdp_adaptive.audit import interface

_HUGE = 1e12
# The steps of a release, what was released in each, and the size of a canary in it.
_Observed = Tuple[List[int], List[np.ndarray], List[float]]


def run(
    subject: interface.Subject, plan: privacy.PrivacyPlan, count: int, seed: Optional[int] = None,
    batches: Optional[Iterable[np.ndarray]] = None) -> Tuple[np.ndarray, np.ndarray]:
  """Trains with canaries; returns their scores, [count], and coins, [count] bool.

  Args:
    subject: A `Subject`.
    plan: The plan by which records are drawn; every record is a canary, up to `count`,
      and those that are none have no gradient.
    count: The number of canaries, at most the subject's size.
    seed: For tests.
    batches: Record indices of every step, if they do not come from the plan.
  """
  rng = np.random.default_rng(seed)
  most = plan.sampling.examples_per_user  # Examples of a canary, all alike.
  population = plan.population_size or count * most
  users = population // most
  count = min(count, users, subject.size)
  of_record = np.full(population, -1)
  of_user = np.full(users, -1)
  of_user[rng.permutation(users)[:count]] = np.arange(count)
  of_record[:users * most] = np.repeat(of_user, most)
  included = rng.random(count) < 0.5
  flipped = subject.adjacency == 'replace'
  state = subject.fresh(seed)
  drawn: List[np.ndarray] = []
  observed: Dict[str, _Observed] = {}
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
        signal = part.clip / subject.batch_size / part.unit
        steps, values, signals = observed.setdefault(part.name, ([], [], []))
        steps.append(step)
        values.append(part.value[:count] / part.unit)
        signals.append(signal)
  probability = plan.batch_size / population if plan.amplified else None
  return _scores(subject, observed, np.array(drawn), probability, most), included


def _scores(
    subject: interface.Subject, observed: Dict[str, _Observed], drawn: np.ndarray,
    probability: Optional[float], most: int) -> np.ndarray:
  """Returns [count] scores, high where a canary seems to be in.

  With steps that are known, the matched filter <C x, C y> / ||C x||; with coins of
  `probability`, one for each of a canary's `most` examples, the likelihood ratio, exact for
  independent noise. Of several releases of a step, each has noise of its own.
  """
  steps, count = drawn.shape
  products, energies, gains = np.zeros([steps, count]), np.zeros(count), np.zeros(steps)
  for when, values, signals in observed.values():
    filters = subject.whitened(steps, when, np.diag(signals))
    products[when] += filters.T @ subject.whitened(steps, when, np.array(values))
    gains[when] += np.sum(filters**2, axis=0)
    energies += np.sum((filters @ drawn[when])**2, axis=0)
  if probability is None:
    return np.sum(products * drawn, axis=0) / np.sqrt(np.where(energies > 0, energies, 1))
  taken = np.arange(most + 1)[:, np.newaxis, np.newaxis]
  chances = stats.binom.logpmf(taken, most, probability)
  mixed = lambda values: special.logsumexp(
      chances + taken * values - taken**2 * gains[:, np.newaxis] / 2, axis=0)
  if subject.adjacency == 'replace':
    return np.sum(mixed(products) - mixed(-products), axis=0)
  return np.sum(mixed(products), axis=0)
