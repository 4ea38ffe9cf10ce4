# SPDX-License-Identifier: Apache-2.0
"""Schemes in which each record is in one batch of every round: drawn anew, or in a fixed order."""

import dataclasses
from typing import ClassVar, Iterator, Optional, Tuple

import dp_accounting
import numpy as np

from tfdp_adaptive import checks
from tfdp_adaptive import terms as terms_lib
from tfdp_adaptive.accounting import allocation
from tfdp_adaptive.accounting import cost
from tfdp_adaptive.accounting import scheme


@dataclasses.dataclass(frozen=True)
class RandomAllocation(scheme.Sampling):
  """Each record is in one batch of every `cycle`, drawn anew in each round (arXiv 2502.08202).

  A round of `cycle` steps is one pass over the data: every record is used exactly once. Each
  record's batch is a secret, drawn independently of all other records. Batch sizes therefore vary
  as much as with Poisson sampling. It costs less privacy than Poisson sampling at the same rate.

  With p `groups`, records are split once into p groups whose members are public. A group can take
  part in every p-th step of a round only. Two participations are then at least p steps apart. With
  banded noise of at most p bands, the cost equals that of independent noise in rounds of b / p
  steps (as for `CyclicPoisson`, arXiv 2306.08153, Theorem 4).

  Attributes:
    cycle: Number b of steps in a round.
    groups: Number p of groups, a divisor of b.
  """

  amplified: ClassVar = True
  renyi: ClassVar = False
  pattern: ClassVar = 'rounds'
  amplifies: ClassVar = 'noise of at most `groups` bands; use BallsInBins for any other.'
  cycle: int = 1
  groups: int = 1

  def __post_init__(self) -> None:
    checks.whole(cycle=self.cycle, groups=self.groups)
    if self.cycle % self.groups:
      raise ValueError('`groups` must divide `cycle`: each group has as many steps of a round. '
                       f'Received: groups={self.groups}, cycle={self.cycle}.')

  @property
  def adjacencies(self) -> Tuple[str, ...]:  # type: ignore[override]
    # Public groups must not move when a record comes or goes.
    return ('zero_out',) if self.groups > 1 else ('add_remove', 'zero_out')

  @property
  def most_bands(self) -> int:
    return self.groups

  def check(self, plan: terms_lib.Terms) -> None:
    super().check(plan)
    scheme.whole_bins(plan, self.cycle)

  def probability(self, plan: terms_lib.Terms) -> float:
    """Returns the probability that a record is in a batch of its group."""
    del plan
    return self.groups / self.cycle

  def participation(self, plan: terms_lib.Terms, steps: int) -> Tuple[int, int]:
    return self.groups, -(-steps // self.cycle)

  def event(self, plan: terms_lib.Terms, steps: int,
            noise_multiplier: float) -> dp_accounting.DpEvent:
    rounds, rest = divmod(steps, self.cycle)
    places, used = self.cycle // self.groups, -(-rest // self.groups)
    sigma = noise_multiplier / cost.sensitivity(plan.mechanism, 1, 1)  # The largest column norm.
    events = []
    if rounds:
      events.append(dp_accounting.SelfComposedDpEvent(
          allocation.AllocationDpEvent(sigma, ((places, 1.0),)), rounds))
    if rest:  # Bins of a round that had no turn yet tell nothing.
      events.append(allocation.AllocationDpEvent(sigma, ((used, 1.0), (places - used, 0.0))))
    return events[0] if len(events) == 1 else dp_accounting.ComposedDpEvent(events)

  def index_batches(self, plan: terms_lib.Terms, size: int, start_step: int,
                    seed: scheme.Seed) -> Iterator[np.ndarray]:
    # A round that goes on needs the key that it began with; another has its own.
    begins = start_step % self.cycle == 0 and not seed.in_file
    key = seed.key(0 if begins else start_step)
    places, group = self.cycle // self.groups, self.group_of(size)
    for step in range(start_step, plan.steps):
      place = step % self.cycle
      if step == start_step or not place:
        of_record = group + self.groups * np.random.default_rng(
            [key, 3, step // self.cycle]).integers(places, size=size)
        by_place = np.argsort(of_record, kind='stable')
        ends = np.cumsum(np.bincount(of_record, minlength=self.cycle))
      yield by_place[ends[place - 1] if place else 0:ends[place]]

  def group_of(self, size: int) -> np.ndarray:
    """Returns [size] group numbers, one for each record."""
    return scheme.public_order(0, size) % self.groups

  def describe(self, plan: terms_lib.Terms) -> str:
    whose = '' if self.groups == 1 else (
        f' of those that are open to its group (every {self.groups}th; who is in which of the '
        f'{self.groups} groups is public)')
    return (f'Random allocation: in every round of {self.cycle} steps each record takes part in '
            f'exactly one{whose}, drawn uniformly, independently of other records and rounds, and '
            'secret.')


@dataclasses.dataclass(frozen=True)
class FixedOrder(scheme.Sampling):
  """Every epoch has the same batches in the same order. The last batch may be smaller.

  Two participations of a record are exactly an epoch apart. No amplification.
  Adding a record would shift all later records, so add_remove is refused.

  Attributes:
    shuffle_seed: The public seed of the single permutation; None keeps the order of the data.
  """

  adjacencies: ClassVar = ('zero_out', 'replace')
  fixed_order: ClassVar = True
  shuffle_seed: Optional[int] = 0

  def check(self, plan: terms_lib.Terms) -> None:
    super().check(plan)
    checks.whole(batch_size=plan.batch_size)

  def largest_batch(self, plan: terms_lib.Terms) -> int:
    return int(plan.batch_size)

  def batches_per_epoch(self, plan: terms_lib.Terms) -> int:
    return -(-scheme.population(plan) // int(plan.batch_size))

  def participation(self, plan: terms_lib.Terms, steps: int) -> Tuple[int, int]:
    epoch = self.batches_per_epoch(plan)
    return epoch, -(-steps // epoch)

  def index_batches(self, plan: terms_lib.Terms, size: int, start_step: int,
                    seed: scheme.Seed) -> Iterator[np.ndarray]:
    del seed
    order = np.arange(size) if self.shuffle_seed is None else scheme.public_order(
        self.shuffle_seed, size)
    epoch = self.batches_per_epoch(plan)
    for step in range(start_step, plan.steps):
      first = step % epoch * plan.batch_size
      yield order[first:first + plan.batch_size]

  def describe(self, plan: terms_lib.Terms) -> str:
    return ('Fixed order: the same batches in the same order in every epoch of '
            f'{self.batches_per_epoch(plan)} steps. No amplification by sampling is claimed.')
