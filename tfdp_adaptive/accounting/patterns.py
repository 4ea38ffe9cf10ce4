# SPDX-License-Identifier: Apache-2.0
"""Schemes in which a record's steps depend on each other: groups, bins, gaps."""

import collections
import dataclasses
import math
from typing import ClassVar, Dict, Iterator, List, Optional, Tuple

import dp_accounting
import numpy as np

from tfdp_adaptive import checks
from tfdp_adaptive import terms as terms_lib
from tfdp_adaptive.accounting import allocation
from tfdp_adaptive.accounting import cost
from tfdp_adaptive.accounting import monte_carlo
from tfdp_adaptive.accounting import scheme


class _Groups(scheme.Sampling):
  """Records split once into `cycle` groups that take their turns."""

  cycle: int

  def _secret(self, plan: terms_lib.Terms) -> bool:
    """Whether groups are secret; they must not move when a record comes or goes."""
    return bool(plan.adjacency == 'add_remove')

  def __post_init__(self) -> None:
    checks.whole(cycle=self.cycle)

  def check(self, plan: terms_lib.Terms) -> None:
    super().check(plan)
    checks.require(self.cycle <= scheme.population(plan), 'be at most the population size',
                   cycle=self.cycle, population_size=plan.population_size)

  def participation(self, plan: terms_lib.Terms, steps: int) -> Tuple[int, int]:
    return self.cycle, -(-steps // self.cycle)

  def _groups(self, plan: terms_lib.Terms, size: int, start_step: int,
              seed: scheme.Seed) -> List[np.ndarray]:
    if self._secret(plan):  # Each record has its own die.
      key = seed.key(start_step)
      of_record = np.random.default_rng([key, 1]).integers(self.cycle, size=size)
    else:
      of_record = scheme.public_order(0, size) % self.cycle
    return [np.flatnonzero(of_record == group) for group in range(self.cycle)]


class _Drawn(scheme.Sampling):
  """Secret patterns that amplify noise which is not independent where `draws` bound the loss."""

  renyi: ClassVar = False
  draws: Optional[int]

  @property
  def adjacencies(self) -> Tuple[str, ...]:  # type: ignore[override]
    return ('zero_out',) if self.draws else terms_lib.ADJACENCIES

  @property
  def amplified(self) -> bool:  # type: ignore[override]
    return bool(self.draws)


@dataclasses.dataclass(frozen=True)
class CyclicPoisson(_Groups):
  """Step t draws by Poisson sampling from group t mod `cycle` (arXiv 2306.08153, Thm. 4).

  It amplifies the privacy of strategies with at most `cycle` bands. Under zero_out the groups
  are a fixed, equal, public split; under add_remove each record draws its own.
  """

  adjacencies: ClassVar = ('add_remove', 'zero_out')
  amplified: ClassVar = True
  amplifies: ClassVar = (
      'banded mechanisms with at most `cycle` bands; use FixedOrder for any other.')
  cycle: int = 1

  @property
  def most_bands(self) -> int:
    return self.cycle

  def check(self, plan: terms_lib.Terms) -> None:
    super().check(plan)
    checks.require(self.probability(plan) <= 1,
                   'be at most population_size / batch_size: a group must hold the expected batch',
                   cycle=self.cycle, batch_size=plan.batch_size,
                   population_size=plan.population_size)

  def probability(self, plan: terms_lib.Terms) -> float:
    return plan.batch_size * self.cycle / scheme.population(plan)

  def index_batches(self, plan: terms_lib.Terms, size: int, start_step: int,
                    seed: scheme.Seed) -> Iterator[np.ndarray]:
    groups = self._groups(plan, size, start_step, seed)
    rngs = scheme.step_generators(seed, start_step, plan.steps)
    for step, rng in enumerate(rngs, start_step):
      group = groups[step % self.cycle]
      yield group[scheme.bernoulli(rng, len(group), self.probability(plan))]

  def describe(self, plan: terms_lib.Terms) -> str:
    return (f'Cyclic Poisson sampling: {self.cycle} groups, chosen without looking at the data, '
            'take turns; in its turn each record of a group takes part independently with '
            f'probability {self.probability(plan):.6g}.')


@dataclasses.dataclass(frozen=True)
class BallsInBins(_Groups, _Drawn):
  """Each record falls into one of `cycle` bins. Step t uses all records of bin t mod cycle.

  Attributes:
    cycle: Number of bins.
    draws: None: with independent noise, under zero_out and add_remove, each record's bin is secret,
      and its amplification is bounded exactly (`allocation`). There is also a looser bound for
      Toeplitz strategies without negative entries under zero_out. With any other noise, no
      amplification is claimed. 0: no amplification is claimed, and every pass over the bins counts
      as one full participation. A number: for such correlated noise, delta is also bounded from
      this number of draws of the privacy loss (`monte_carlo`; arXiv 2410.06266), and the smaller
      bound counts. A million draws resolve a delta of about 1e-4, a hundred million one of 1e-6.
  """

  fixed_order: ClassVar = True
  pattern: ClassVar = 'gaps'
  amplifies: ClassVar = ('noise of a Toeplitz strategy without negative entries; leave out `draws` '
                         'for any other.')
  cycle: int = 1
  draws: Optional[int] = None

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.draws is not None:
      checks.whole(0, draws=self.draws)

  @property
  def most_bands(self) -> int:
    return self.cycle

  def _secret(self, plan: terms_lib.Terms) -> bool:
    return super()._secret(plan) or self.claims(plan)

  def claims(self, plan: terms_lib.Terms) -> bool:
    proven = ('zero_out', 'add_remove')[:1 + scheme.independent(plan.mechanism)]
    exact = plan.adjacency in proven and not plan.extra_releases and plan.search is None
    return (exact if self.draws is None else self.draws > 0) and (
        monte_carlo.coefficients(plan.mechanism) is not None)

  def probability(self, plan: terms_lib.Terms) -> float:
    del plan
    return 1 / self.cycle

  def free_probability(self, plan: terms_lib.Terms) -> float:
    del plan
    return 1.0

  def largest_batch(self, plan: terms_lib.Terms) -> Optional[int]:
    return None if self._secret(plan) else -(-scheme.population(plan) // self.cycle)

  def event(self, plan: terms_lib.Terms, steps: int,
            noise_multiplier: float) -> dp_accounting.DpEvent:
    if scheme.independent(plan.mechanism):
      passes, more = divmod(steps, self.cycle)  # Bins that are used once more than the others.
      return allocation.AllocationDpEvent(noise_multiplier, (
          (more, math.sqrt(passes + 1)), (self.cycle - more, math.sqrt(passes))))
    coefficients = monte_carlo.coefficients(plan.mechanism, steps)
    assert coefficients is not None
    bound = min(
        allocation.correlated(coefficients, steps, self.cycle, noise_multiplier),
        key=lambda event: cost.rough_epsilon(event, plan.target_delta))
    if not self.draws:
      return bound
    return monte_carlo.BallsInBinsDpEvent(
        coefficients, steps, noise_multiplier, self.draws, bound, self.cycle)

  def check(self, plan: terms_lib.Terms) -> None:
    super().check(plan)
    scheme.whole_bins(plan, self.cycle)

  def index_batches(self, plan: terms_lib.Terms, size: int, start_step: int,
                    seed: scheme.Seed) -> Iterator[np.ndarray]:
    groups = self._groups(plan, size, start_step, seed)
    for step in range(start_step, plan.steps):
      yield groups[step % self.cycle]

  def describe(self, plan: terms_lib.Terms) -> str:
    return (f'Balls in bins: each record belongs to one of {self.cycle} bins, which take turns '
            'in an unchanging order. '
            + ('The bin of each record is drawn independently and secret.' if self.claims(plan) else
               'No amplification by sampling is claimed.'))


@dataclasses.dataclass(frozen=True)
class MinSeparation(_Drawn):
  """Poisson sampling among the records that were in none of the last `min_sep - 1` steps.

  Each record is drawn independently, from the stationary distribution: every step expects
  `batch_size` records (b-min-separation, arXiv 2602.09338). With `min_sep=1` it is
  Poisson sampling, with `min_sep = population_size / batch_size` balls in bins.

  Attributes:
    min_sep: The least distance b between two steps of a record.
    draws: As for `BallsInBins`. It amplifies Toeplitz strategies without negative entries and with
      at most `min_sep` bands. 0: no amplification is claimed. Computing an epsilon takes about 100
      ns per draw and step, so a million draws of a thousand steps take minutes.
  """

  pattern: ClassVar = 'gaps'
  amplifies: ClassVar = ('noise of a Toeplitz strategy without negative entries and with at most '
                         '`min_sep` bands; use draws=0 for any other.')
  min_sep: int = 1
  draws: int = 1_000_000

  def __post_init__(self) -> None:
    checks.whole(min_sep=self.min_sep)
    checks.whole(0, draws=self.draws)

  @property
  def most_bands(self) -> int:
    return self.min_sep

  def claims(self, plan: terms_lib.Terms) -> bool:
    return super().claims(plan) and monte_carlo.coefficients(plan.mechanism) is not None

  def check(self, plan: terms_lib.Terms) -> None:
    super().check(plan)
    if self.min_sep * plan.batch_size > scheme.population(plan) * (1 + 1e-12):
      raise ValueError(
          '`min_sep` must be at most population_size / batch_size: else too few records are free '
          f'to take part. Received: min_sep={self.min_sep}, batch_size={plan.batch_size}, '
          f'population_size={plan.population_size}.')

  def free_probability(self, plan: terms_lib.Terms) -> float:
    """Returns the probability that an eligible record takes part."""
    rate = plan.batch_size / scheme.population(plan)
    return min(1.0, rate / (1 - (self.min_sep - 1) * rate))

  def event(self, plan: terms_lib.Terms, steps: int,
            noise_multiplier: float) -> monte_carlo.MonteCarloDpEvent:
    # All is one Gaussian if nothing is secret.
    known = dp_accounting.GaussianDpEvent(noise_multiplier / cost.total_sensitivity(plan, steps))
    coefficients = monte_carlo.coefficients(plan.mechanism, steps)
    assert coefficients is not None
    return monte_carlo.MinSeparationDpEvent(
        coefficients[:self.min_sep], steps, noise_multiplier, self.draws, known, self.min_sep,
        self.free_probability(plan))

  def participation(self, plan: terms_lib.Terms, steps: int) -> Tuple[int, int]:
    return self.min_sep, -(-steps // self.min_sep)

  def index_batches(self, plan: terms_lib.Terms, size: int, start_step: int,
                    seed: scheme.Seed) -> Iterator[np.ndarray]:
    key = seed.key(start_step)
    probability = self.free_probability(plan)
    due: Dict[int, List[np.ndarray]] = collections.defaultdict(list)
    rng = np.random.default_rng([key, 1])
    # Stationary: how many of the first steps a record still waits.
    blocked = 1 + (self.min_sep - 1) * probability
    waits = np.ceil((rng.random(size) * blocked - 1) / probability).clip(0, self.min_sep - 1)
    first = waits.astype(np.int64) + rng.geometric(probability, size) - 1
    order = np.argsort(first, kind='stable')
    for records in np.split(order, 1 + np.flatnonzero(np.diff(first[order]))):
      if len(records):
        due[int(first[records[0]])].append(records)
    for step in range(plan.steps):
      batch = np.sort(np.concatenate(due.pop(step, []) or [np.zeros([0], np.int64)]))
      if step >= start_step:
        yield batch
      rng = np.random.default_rng([key, 2, step])
      gaps = self.min_sep - 1 + rng.geometric(probability, len(batch))
      for gap in np.unique(gaps[step + gaps < plan.steps]):
        due[step + int(gap)].append(batch[gaps == gap])

  def describe(self, plan: terms_lib.Terms) -> str:
    return (f'Min-separation sampling: at every step each record that took no part in the last '
            f'{self.min_sep - 1} takes part with probability {self.free_probability(plan):.6g}, '
            'independently of all others; '
            + ('when it does is secret.' if self.draws else
               'no amplification by sampling is claimed.'))
