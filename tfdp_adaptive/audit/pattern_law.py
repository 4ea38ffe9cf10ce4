# SPDX-License-Identifier: Apache-2.0
"""Do records keep to a law of waiting: free, and then at least so many steps apart?

Step by step, given all steps before it, how many records take part is a sum of two
binomials: of those that never did, and of those that are free again. Each test combines
the steps' p-values by Fisher's method, which is exact or errs towards no alarm.
"""

from typing import Any, Iterator, List, Sequence, Tuple

import numpy as np
from scipy import stats


def tests(plan: Any, batches: Sequence[np.ndarray], population: int
          ) -> Iterator[Tuple[str, float]]:
  """(what, p-value) of batches against the waiting law of `plan.sampling`."""
  bins = hasattr(plan.sampling, 'cycle')
  least = plan.sampling.cycle if bins else plan.sampling.min_sep
  free = 1.0 if bins else plan.sampling.free_probability(plan)
  first = _first_step(least, free, len(batches))
  left = 1 - np.concatenate([[0.0], np.cumsum(first)])
  last = np.full(population, -1)
  sizes, spreads, soonest = [], [], []
  for step, batch in enumerate(batches):
    never = int(np.sum(last < 0))
    again = int(np.sum((last >= 0) & (step - last >= least)))
    hazard = min(1.0, first[step] / left[step]) if left[step] > 1e-12 else 1.0
    law = np.convolve(_binomial(never, hazard), _binomial(again, free))
    sizes.append(two_sided(law, len(batch)))
    mean = law @ np.arange(len(law))
    far = np.abs(np.arange(len(law)) - mean) <= abs(len(batch) - mean) + 1e-9
    spreads.append(float(min(1.0, law[far].sum())))
    due = (last >= 0) & (step - last == least)
    soonest.append(two_sided(_binomial(int(due.sum()), free), int(due[batch].sum())))
    last[batch] = step
  yield 'how many take part', _fisher(sizes)
  yield 'sizes that vary too little', _fisher(spreads)
  yield 'how many come again at once', _fisher(soonest)


def rounds(plan: Any, batches: Sequence[np.ndarray], population: int
           ) -> Iterator[Tuple[str, float]]:
  """(what, p-value) of batches against one place for each record in every round of steps."""
  cycle, groups = plan.sampling.cycle, plan.sampling.groups
  group_of = plan.sampling.group_of(population)
  place, before = np.full(population, -1), np.full(population, -1)
  sizes, moves, again = [], [], 1.0
  for step, batch in enumerate(batches):
    turn = step % cycle
    if not turn:
      place, before = np.full(population, -1), place
    of_turn = group_of == turn % groups
    again = 0.0 if np.any(place[batch] >= 0) or not np.all(of_turn[batch]) else again
    left = -(-(cycle - turn) // groups)  # Steps of this round that the group still has.
    sizes.append(two_sided(
        _binomial(int(np.sum((place < 0) & of_turn)), 1 / left), len(batch)))
    place[batch] = turn
    if turn == cycle - 1 and step >= cycle:
      moves.append(two_sided(_binomial(population, groups / cycle), int(np.sum(place == before))))
  yield 'a record twice in a round, or out of its turn', again
  yield 'how many take part', _fisher(sizes)
  yield 'how many keep their place in the next round', _fisher(moves)


def _first_step(least: int, free: float, steps: int) -> np.ndarray:
  """[steps] probabilities of a record's first step, in the stationary law."""
  waiting = np.full(least, free)
  waiting[0] = 1.0
  waiting /= waiting.sum()
  gaps = free * (1 - free)**np.arange(steps)
  return np.convolve(waiting, gaps)[:steps]


def _binomial(trials: int, chance: float) -> np.ndarray:
  """[trials + 1] probabilities."""
  return stats.binom.pmf(np.arange(trials + 1), trials, chance)


def two_sided(law: np.ndarray, value: int) -> float:
  """P-value of a value, of a law on 0, 1, ..."""
  return float(min(1.0, 2 * min(law[:value + 1].sum(), law[value:].sum())))


def _fisher(p_values: List[float]) -> float:
  """Combines p-values by Fisher's method, leaving out those that equal one."""
  with np.errstate(divide='ignore'):
    return float(stats.combine_pvalues([p for p in p_values if p < 1] or [1.0])[1])
