# SPDX-License-Identifier: Apache-2.0
"""Random allocation: in every round of b steps, each record is in one batch, drawn anew."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Iterator, Tuple

import dp_accounting
import numpy as np

from tfdp_adaptive import checks
from tfdp_adaptive import mechanisms
from tfdp_adaptive import terms as terms_lib
from tfdp_adaptive.accounting import allocation
from tfdp_adaptive.accounting import scheme


def independent(mechanism: mechanisms.Mechanism) -> bool:
  """Whether noise is Gaussian and of its own at every step, all of one size."""
  return isinstance(mechanism, mechanisms.IndependentGaussian) and mechanism.rounding is None


@dataclasses.dataclass(frozen=True)
class RandomAllocation(scheme.Sampling):
  """Each record is in one batch of every `cycle`, drawn anew in each round (arXiv 2502.08202).

  A round of `cycle` steps is one pass over the data: no record is left out, and none comes
  twice. Which of the batches a record is in is a secret of its own, drawn independently of all
  other records, so batch sizes vary as much as with Poisson sampling. It costs less than
  Poisson sampling of the same rate.

  Attributes:
    cycle: Number b of steps in a round.
  """

  adjacencies: ClassVar[Tuple[str, ...]] = ('add_remove', 'zero_out')
  amplified: ClassVar = True
  renyi: ClassVar = False
  amplifies: ClassVar = (
      'independent noise that is not rounded; use BallsInBins(draws=...) for correlated noise.')
  cycle: int = 1

  def __post_init__(self) -> None:
    checks.whole(cycle=self.cycle)

  def check(self, plan: terms_lib.Terms) -> None:
    super().check(plan)
    scheme.whole_bins(plan, self.cycle)

  def amplified_noise(self, mechanism: mechanisms.Mechanism) -> bool:
    return independent(mechanism)

  def probability(self, plan: terms_lib.Terms) -> float:
    del plan
    return 1 / self.cycle

  def participation(self, plan: terms_lib.Terms, steps: int) -> Tuple[int, int]:
    return 1, -(-steps // self.cycle)

  def event(self, plan: terms_lib.Terms, steps: int, noise_multiplier: float,
            sensitivity: float) -> dp_accounting.DpEvent:
    rounds, rest = divmod(steps, self.cycle)
    events = []
    if rounds:
      events.append(dp_accounting.SelfComposedDpEvent(allocation.AllocationDpEvent(
          noise_multiplier, ((self.cycle, 1.0),)), rounds))
    if rest:  # Of the bins of a round, those that had no turn yet tell nothing.
      events.append(allocation.AllocationDpEvent(
          noise_multiplier, ((rest, 1.0), (self.cycle - rest, 0.0))))
    return events[0] if len(events) == 1 else dp_accounting.ComposedDpEvent(events)

  def index_batches(
      self, plan: terms_lib.Terms, size: int, start_step: int = 0,
      coins: Any = None) -> Iterator[np.ndarray]:
    # A round that goes on needs the coins that it began with; another has its own.
    begins = start_step % self.cycle == 0 and not coins.in_file
    key = coins.key(0 if begins else start_step)
    for step in range(start_step, plan.steps):
      place = step % self.cycle
      if step == start_step or not place:
        of_record = np.random.default_rng([key, 3, step // self.cycle]).integers(
            self.cycle, size=size)
        by_place = np.argsort(of_record, kind='stable')
        ends = np.cumsum(np.bincount(of_record, minlength=self.cycle))
      yield by_place[ends[place - 1] if place else 0:ends[place]]

  def describe(self, plan: terms_lib.Terms) -> str:
    return (f'Random allocation: in every round of {self.cycle} steps each record takes part in '
            'exactly one, drawn uniformly, independently of other records and rounds, and secret.')
