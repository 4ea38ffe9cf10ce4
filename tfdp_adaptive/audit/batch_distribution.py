# SPDX-License-Identifier: Apache-2.0
"""Tests whether batches follow the distribution that is accounted for, with exact tails.

The claims about fixed schemes (which record takes part when, how far apart) hold always or are
refuted by one batch. The claims about random sampling are tested: sizes, how often each record
takes part, and how many records two steps share. These tests are two-sided: any other
distribution is not the one that was accounted for.
"""

import functools
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from scipy import stats

from tfdp_adaptive import privacy


class BatchTest(NamedTuple):
  """Tests whether batches follow the claimed sampling.

  Attributes:
    p_value: Probability of batches this unusual under the claim; 0 where they break it.
    what: The most unusual point, in words.
    steps: The number of batches.
  """

  p_value: float
  what: str
  steps: int


def check(
    plan: privacy.PrivacyPlan, batches: Optional[Sequence[np.ndarray]] = None,
    population: Optional[int] = None) -> BatchTest:
  """Tests the batches of a plan.

  Args:
    plan: A `PrivacyPlan`.
    batches: Iterable of arrays of record indices, one per step; the plan's own by
      default, as `plan.batches` feeds them to a model.
    population: Number of records, for a plan that does not say.
  """
  population = plan.population_size or population
  if population is None:
    raise ValueError('`population` must be given for a plan without a population size. '
                     'Received: population=None.')
  batches = _fed(plan, population) if batches is None else [np.asarray(b) for b in batches]
  broken = _structure(plan, batches, population)
  if broken is not None or not plan.amplified:
    return BatchTest(
        1.0 if broken is None else 0.0, broken or 'every record in its place', len(batches))
  test = {'steps': _coins, 'gaps': _waiting, 'rounds': _rounds}[plan.sampling.pattern]
  tests = list(test(plan, batches, population))
  p_value, what = min((min(1.0, len(tests) * p), what) for what, p in tests)
  return BatchTest(p_value, what, len(batches))


def _fed(plan: privacy.PrivacyPlan, population: int) -> List[np.ndarray]:
  """Returns the record indices that a model is fed, without padding."""
  users: Dict[str, Any] = {} if plan.unit == 'example' else dict(users=np.arange(population))
  if plan.whole_users:
    users['examples_per_user'] = 1
  batches = plan.batches((np.arange(population), np.zeros(population)), **users)
  return [x[weight != 0] for x, _, weight in batches.as_numpy_iterator()]


def _structure(
    plan: privacy.PrivacyPlan, batches: Sequence[np.ndarray], population: int) -> Optional[str]:
  """Returns a sentence about the refuted claim, or None."""
  least, most = plan.participation(min(plan.steps, len(batches)))
  last, times = np.full(population, -plan.steps - 1), np.zeros(population, int)
  largest = plan.sampling.max_batch_size or population
  for step, batch in enumerate(batches):
    if len(batch) and not 0 <= batch.min() <= batch.max() < population:
      return f'step {step} has records that are not in the population'
    if len(set(batch.tolist())) < len(batch):
      return f'step {step} has a record twice'
    if len(batch) > largest:
      return f'step {step} has {len(batch)} records, more than {largest}'
    gaps = step - last[batch]
    if len(batch) and gaps.min() < least:
      return f'a record takes part {gaps.min()} steps apart, not at least {least}'
    if len(batch) and plan.fixed_order and any(
        g % least for g in gaps[times[batch] > 0].tolist()):
      return 'a record changes its place in the order'
    last[batch] = step
    times[batch] += 1
  if times.max() > most:
    return f'a record takes part {times.max()} times, not at most {most}'
  if len(batches) > plan.steps:
    return f'there are {len(batches)} batches, not at most {plan.steps}'
  return None


def _coins(
    plan: privacy.PrivacyPlan, batches: Sequence[np.ndarray],
    population: int) -> Iterator[Tuple[str, float]]:
  """Yields (what, p-value) of tests of independent sampling at each step."""
  cycle = plan.sampling.cycle
  probability = plan.sampling.probability(plan)  # Probability of a record in its turn.
  cut = plan.sampling.max_batch_size
  sizes = [len(batch) for batch in batches]
  if _group_size(plan, 0, population) is None:
    trials = population * len(batches)
    yield 'records in all', _two_sided(trials, probability / cycle, sum(sizes))
    return
  groups = [_group_size(plan, step, population) or 0 for step in range(len(batches))]
  if cut is None:
    yield 'records in all', _two_sided(sum(groups), probability, sum(sizes))
  # Steps of equal groups have equally many records as often as two draws agree.
  first = [t for t in range(len(batches) - cycle) if t // cycle % 2 == 0]
  agree = [sizes[t] == sizes[t + cycle] for t in first if groups[t] == groups[0]]
  if agree:
    chance = float(np.sum(_size_pmf(groups[0], probability, cut)**2))
    yield 'steps with equally many records', _two_sided(len(agree), chance, sum(agree))
  if cycle == 1 and cut is None:
    times = np.bincount(np.concatenate(batches), minlength=population)
    pmf = _binomial(len(batches), probability)
    pairs = population // 2
    equal = int(np.sum(times[:2 * pairs:2] == times[1:2 * pairs:2]))
    yield 'records that take part equally often', _two_sided(pairs, float(np.sum(pmf**2)), equal)
  for lag in range(cycle, len(batches), cycle):
    yield f'records shared by steps {lag} apart', _overlap(plan, batches, lag, population)


def _group_size(plan: privacy.PrivacyPlan, step: int, population: int) -> Optional[int]:
  """Returns the number of records of step `step`, or None if it is random."""
  cycle = plan.sampling.cycle
  if cycle > 1 and plan.adjacency == 'add_remove':
    return None
  return (population - step % cycle + cycle - 1) // cycle


def _size_pmf(size: int, probability: float, cut: Optional[int]) -> np.ndarray:
  """Returns [n + 1] probabilities of a batch's size."""
  pmf = _binomial(size, probability)
  if cut is not None and cut < size:
    pmf = np.append(pmf[:cut], pmf[cut:].sum())
  return pmf


def _overlap(
    plan: privacy.PrivacyPlan, batches: Sequence[np.ndarray], lag: int, population: int) -> float:
  """Tests the overlap of two steps, which is hypergeometric given their sizes.

  Steps are paired so that none is in two pairs; the sum over pairs is compared with
  the exact distribution, its convolution.
  """
  pmf, shared = np.ones(1), 0
  firsts = [t for t in range(len(batches) - lag) if t // lag % 2 == 0]
  for first in firsts[:100]:
    left, right = batches[first], batches[first + lag]
    shared += len(np.intersect1d(left, right))
    pmf = np.convolve(pmf, _shared(
        _group_size(plan, first, population), *sorted((len(left), len(right)))))
  return _tails(pmf, shared)


@functools.lru_cache(maxsize=4096)
def _shared(size: int, fewer: int, more: int) -> np.ndarray:
  """Returns [fewer + 1] probabilities of the number of records that two batches share."""
  return stats.hypergeom(size, fewer, more).pmf(np.arange(fewer + 1))


def _two_sided(trials: int, chance: float, value: int) -> float:
  """Returns the two-sided p-value of a binomial."""
  binomial = stats.binom(trials, chance)
  return float(min(1.0, 2 * min(binomial.cdf(value), binomial.sf(value - 1))))


def _waiting(plan: privacy.PrivacyPlan, batches: Sequence[np.ndarray], population: int
          ) -> Iterator[Tuple[str, float]]:
  """Yields (what, p-value) of tests of waiting times between participations.

  Given all earlier steps, the number of records in a step is a sum of two binomials: records that
  never took part, and records that are free to take part again. Each test combines the steps'
  p-values by Fisher's method, which is exact or errs towards no alarm.
  """
  sampling: Any = plan.sampling  # A scheme with this pattern.
  least, _ = plan.sampling.participation(plan, plan.steps)
  free = sampling.free_probability(plan)
  first = _first_step(least, free, len(batches))
  left = 1 - np.concatenate([[0.0], np.cumsum(first)])
  last = np.full(population, -1)
  sizes, spreads, soonest = [], [], []
  for step, batch in enumerate(batches):
    never = int(np.sum(last < 0))
    again = int(np.sum((last >= 0) & (step - last >= least)))
    hazard = min(1.0, first[step] / left[step]) if left[step] > 1e-12 else 1.0
    pmf = np.convolve(_binomial(never, hazard), _binomial(again, free))
    sizes.append(_tails(pmf, len(batch)))
    mean = pmf @ np.arange(len(pmf))
    far = np.abs(np.arange(len(pmf)) - mean) <= abs(len(batch) - mean) + 1e-9
    spreads.append(float(min(1.0, pmf[far].sum())))
    due = (last >= 0) & (step - last == least)
    soonest.append(_two_sided(int(due.sum()), free, int(due[batch].sum())))
    last[batch] = step
  yield 'how many take part', _fisher(sizes)
  yield 'sizes that vary too little', _fisher(spreads)
  yield 'how many come again at once', _fisher(soonest)


def _rounds(plan: privacy.PrivacyPlan, batches: Sequence[np.ndarray], population: int
           ) -> Iterator[Tuple[str, float]]:
  """Yields (what, p-value) of tests of one place for each record in every round of steps."""
  sampling: Any = plan.sampling  # A scheme with this pattern.
  cycle, groups = sampling.cycle, sampling.groups
  group_of = sampling.group_of(population)
  place, before = np.full(population, -1), np.full(population, -1)
  sizes, moves, again = [], [], 1.0
  for step, batch in enumerate(batches):
    turn = step % cycle
    if not turn:
      place, before = np.full(population, -1), place
    of_turn = group_of == turn % groups
    again = 0.0 if np.any(place[batch] >= 0) or not np.all(of_turn[batch]) else again
    left = -(-(cycle - turn) // groups)  # Steps of this round that the group still has.
    sizes.append(_two_sided(int(np.sum((place < 0) & of_turn)), 1 / left, len(batch)))
    place[batch] = turn
    if turn == cycle - 1 and step >= cycle:
      moves.append(_two_sided(population, groups / cycle, int(np.sum(place == before))))
  yield 'a record twice in a round, or out of its turn', again
  yield 'how many take part', _fisher(sizes)
  yield 'how many keep their place in the next round', _fisher(moves)


def _first_step(least: int, free: float, steps: int) -> np.ndarray:
  """Returns [steps] probabilities of a record's first step, in the stationary distribution."""
  waiting = np.full(least, free)
  waiting[0] = 1.0
  waiting /= waiting.sum()
  gaps = free * (1 - free)**np.arange(steps)
  return np.convolve(waiting, gaps)[:steps]


def _binomial(trials: int, chance: float) -> np.ndarray:
  """[trials + 1] probabilities."""
  return stats.binom.pmf(np.arange(trials + 1), trials, chance)


def _tails(pmf: np.ndarray, value: int) -> float:
  """Returns the p-value of a value under a distribution on 0, 1, ..."""
  return float(min(1.0, 2 * min(pmf[:value + 1].sum(), pmf[value:].sum())))


def _fisher(p_values: List[float]) -> float:
  """Combines p-values by Fisher's method, leaving out those that equal one."""
  with np.errstate(divide='ignore'):
    return float(stats.combine_pvalues([p for p in p_values if p < 1] or [1.0])[1])
