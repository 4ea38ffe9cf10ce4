# SPDX-License-Identifier: Apache-2.0
"""How records are chosen for the steps of a run, and what that choice may claim.

A scheme is a public constant. It knows the adjacencies it can be accounted
for, whether privacy may be claimed to be amplified by it, how often and how far
apart a record takes part, and it generates the batches themselves: what is
accounted is what runs.

Coins come from the operating system's entropy whenever `index_batches` is
called, so that a second call never repeats the first. Orders and groups that
must stay the same over a whole run, a resumed one included, are public: no
privacy rests on them.
"""

from __future__ import annotations

import abc
import dataclasses
import math
import secrets
from typing import ClassVar, Iterator, List, Optional, Tuple, TYPE_CHECKING

import numpy as np

from tfdp_adaptive import checks
from tfdp_adaptive import contract

if TYPE_CHECKING:  # It imports this.
  from tfdp_adaptive.privacy import plan as plan_lib


@dataclasses.dataclass(frozen=True)
class Sampling(abc.ABC):
  """A batch selection scheme.

  Attributes:
    adjacencies: What it can be accounted for at all.
    amplified: Whether its coins may be claimed to amplify privacy; if not,
      every participation is counted in full.
    coins: Whether batches are drawn at every step, independently of earlier steps.
    fixed_order: Whether all participations of a record are multiples of the
      least distance apart: it has one place in every epoch.
  """

  adjacencies: ClassVar[Tuple[str, ...]] = contract.ADJACENCIES
  amplified: ClassVar[bool] = False
  coins: ClassVar[bool] = False
  fixed_order: ClassVar[bool] = False

  def check(self, plan: plan_lib.PrivacyPlan) -> None:
    """Raises unless `plan`'s population and batch size fit this scheme."""
    if plan.population_size is None:
      raise ValueError(
          f'`population_size` must be given for {self!r}. Only '
          '`Poisson(sampling_probability=...)`, a constant that does not come from the data, does '
          'without. '
          'Received: population_size=None.')

  @abc.abstractmethod
  def participation(self, plan: plan_lib.PrivacyPlan, steps: int) -> Tuple[int, int]:
    """`(min_sep, max_participations)` of any record within the first `steps` steps."""

  def probability(self, plan: plan_lib.PrivacyPlan) -> float:
    """Where `amplified`: of a record to be in a batch, in its turn."""
    raise NotImplementedError(f'{type(self).__name__} does not amplify privacy.')

  def compositions(self, plan: plan_lib.PrivacyPlan, steps: int) -> Tuple[float, int]:
    """Where `amplified`: `(q, count)` of the Poisson-sampled releases a record can be part of."""
    raise NotImplementedError(f'{type(self).__name__} does not amplify privacy.')

  @abc.abstractmethod
  def index_batches(
      self, plan: plan_lib.PrivacyPlan, size: int, start_step: int = 0) -> Iterator[np.ndarray]:
    """The record indices, in [0, size), of steps `start_step`, ..., `plan.steps - 1`."""

  @abc.abstractmethod
  def describe(self, plan: plan_lib.PrivacyPlan) -> str:
    """One sentence for the privacy statement."""


def _population(plan: plan_lib.PrivacyPlan) -> int:
  if plan.population_size is None:
    raise ValueError('`population_size` must be given: the sampling depends on it. '
                     'Received: population_size=None.')
  return plan.population_size


def _step_generators(
    seed: Optional[int], start_step: int, steps: int) -> Iterator[np.random.Generator]:
  """One NumPy generator per step, from fresh entropy unless a test fixes it."""
  key = secrets.randbits(256) if seed is None else seed
  return (np.random.default_rng([key, step]) for step in range(start_step, steps))


def _bernoulli(rng: np.random.Generator, size: int, probability: float) -> np.ndarray:
  """Indices of `size` independent coins that came up heads."""
  return rng.choice(size, rng.binomial(size, probability), replace=False, shuffle=False)


@dataclasses.dataclass(frozen=True)
class Poisson(Sampling):
  """Every record takes part in every step independently, with probability q.

  Attributes:
    sampling_probability: q. By default `batch_size / population_size`, which
      needs a public population size; give it where that size is private.
  """

  adjacencies: ClassVar[Tuple[str, ...]] = contract.ADJACENCIES
  amplified: ClassVar = True
  coins: ClassVar = True
  sampling_probability: Optional[float] = None

  def __post_init__(self) -> None:
    q = self.sampling_probability
    if q is not None and not (checks.is_number(q) and q == 1):
      checks.probability(sampling_probability=self.sampling_probability)

  def check(self, plan: plan_lib.PrivacyPlan) -> None:
    if self.sampling_probability is None:
      super().check(plan)
    elif plan.population_size is not None:
      expected = self.sampling_probability * plan.population_size
      if not math.isclose(expected, plan.batch_size, rel_tol=1e-9):
        raise ValueError(
            '`batch_size` must be sampling_probability * population_size where all three are '
            f'given; leave one out. Received: batch_size={plan.batch_size}, '
            f'sampling_probability={self.sampling_probability}, '
            f'population_size={plan.population_size}.')

  def probability(self, plan: plan_lib.PrivacyPlan) -> float:
    if self.sampling_probability is not None:
      return self.sampling_probability
    return plan.batch_size / _population(plan)

  def compositions(self, plan: plan_lib.PrivacyPlan, steps: int) -> Tuple[float, int]:
    """`(q, count)` of the Poisson-sampled releases that a record can be part of."""
    return self.probability(plan), steps

  def participation(self, plan: plan_lib.PrivacyPlan, steps: int) -> Tuple[int, int]:
    return 1, steps

  def index_batches(
      self, plan: plan_lib.PrivacyPlan, size: int, start_step: int = 0) -> Iterator[np.ndarray]:
    for rng in _step_generators(plan.seed, start_step, plan.steps):
      yield _bernoulli(rng, size, self.probability(plan))

  def describe(self, plan: plan_lib.PrivacyPlan) -> str:
    return ('Poisson sampling: at every step each record takes part independently with '
            f'probability {self.probability(plan):.6g}.')


@dataclasses.dataclass(frozen=True)
class TruncatedPoisson(Poisson):
  """Poisson sampling, then a uniformly random subset of at most `max_batch_size`.

  The truncation is part of the accounting (arXiv 2508.15089); needs
  dp-accounting 0.6.0 or later.
  """

  adjacencies: ClassVar = ('add_remove', 'zero_out')
  sampling_probability: Optional[float] = dataclasses.field(default=None, init=False)
  max_batch_size: int = 0

  def __post_init__(self) -> None:
    checks.whole(max_batch_size=self.max_batch_size)

  def check(self, plan: plan_lib.PrivacyPlan) -> None:
    super().check(plan)
    if self.max_batch_size < plan.batch_size:
      raise ValueError(
          '`max_batch_size` must be at least the expected batch size. Received: '
          f'max_batch_size={self.max_batch_size}, batch_size={plan.batch_size}.')

  def index_batches(
      self, plan: plan_lib.PrivacyPlan, size: int, start_step: int = 0) -> Iterator[np.ndarray]:
    for rng in _step_generators(plan.seed, start_step, plan.steps):
      batch = _bernoulli(rng, size, self.probability(plan))
      yield rng.permutation(batch)[:self.max_batch_size]

  def describe(self, plan: plan_lib.PrivacyPlan) -> str:
    return (super().describe(plan) + f' Batches of more than {self.max_batch_size} records are '
            'cut to a random subset of that size, which is accounted for.')


class _Groups(Sampling):
  """Records split once into `cycle` groups that take their turns."""

  cycle: int

  def __post_init__(self) -> None:
    checks.whole(cycle=self.cycle)

  def check(self, plan: plan_lib.PrivacyPlan) -> None:
    super().check(plan)
    if self.cycle > _population(plan):
      raise ValueError(
          '`cycle` must be at most the population size. Received: '
          f'cycle={self.cycle}, population_size={plan.population_size}.')

  def participation(self, plan: plan_lib.PrivacyPlan, steps: int) -> Tuple[int, int]:
    return self.cycle, -(-steps // self.cycle)

  def _groups(self, plan: plan_lib.PrivacyPlan, size: int, start_step: int) -> List[np.ndarray]:
    if plan.adjacency == 'add_remove':
      # Groups must not move when a record comes or goes, so each record has its own secret die.
      if start_step:
        raise ValueError(
            f'{type(self).__name__} under add_remove draws secret groups at every call and cannot '
            'resume; use adjacency="zero_out", whose groups are public and fixed. '
            f'Received: start_step={start_step}.')
      key = secrets.randbits(256) if plan.seed is None else plan.seed
      of_record = np.random.default_rng([key, 1]).integers(self.cycle, size=size)
    else:
      of_record = _public_order(0, size) % self.cycle
    return [np.flatnonzero(of_record == group) for group in range(self.cycle)]


@dataclasses.dataclass(frozen=True)
class CyclicPoisson(_Groups):
  """Step t draws by Poisson sampling from group t mod `cycle` (arXiv 2306.08153, Thm. 4).

  Amplifies for strategies with at most `cycle` bands. Under zero_out the groups
  are a fixed, equal, public split; under add_remove each record draws its own.
  """

  adjacencies: ClassVar = ('add_remove', 'zero_out')
  amplified: ClassVar = True
  cycle: int = 1

  def check(self, plan: plan_lib.PrivacyPlan) -> None:
    super().check(plan)
    if self.probability(plan) > 1:
      raise ValueError(
          '`cycle` must be at most population_size / batch_size: a group must hold the '
          f'expected batch. Received: cycle={self.cycle}, batch_size={plan.batch_size}, '
          f'population_size={plan.population_size}.')

  def probability(self, plan: plan_lib.PrivacyPlan) -> float:
    return plan.batch_size * self.cycle / _population(plan)

  def compositions(self, plan: plan_lib.PrivacyPlan, steps: int) -> Tuple[float, int]:
    return self.probability(plan), -(-steps // self.cycle)

  def index_batches(
      self, plan: plan_lib.PrivacyPlan, size: int, start_step: int = 0) -> Iterator[np.ndarray]:
    groups = self._groups(plan, size, start_step)
    for step, rng in enumerate(_step_generators(plan.seed, start_step, plan.steps), start_step):
      group = groups[step % self.cycle]
      yield group[_bernoulli(rng, len(group), self.probability(plan))]

  def describe(self, plan: plan_lib.PrivacyPlan) -> str:
    return (f'Cyclic Poisson sampling: {self.cycle} groups, chosen without looking at the data, '
            'take turns; in its turn each record of a group takes part independently with '
            f'probability {self.probability(plan):.6g}.')


@dataclasses.dataclass(frozen=True)
class BallsInBins(_Groups):
  """Each record falls into one of `cycle` bins; step t uses bin t mod `cycle`, whole.

  No amplification is claimed: known bounds are Monte Carlo estimates. Every
  pass over the bins counts as one full participation.
  """

  fixed_order: ClassVar = True
  cycle: int = 1

  def check(self, plan: plan_lib.PrivacyPlan) -> None:
    super().check(plan)
    expected = _population(plan) / self.cycle
    if abs(expected - plan.batch_size) >= 1:
      raise ValueError(
          f'`batch_size` must be population_size / cycle = {expected:.6g}, the expected size of '
          f'a bin. Received: batch_size={plan.batch_size}.')

  def index_batches(
      self, plan: plan_lib.PrivacyPlan, size: int, start_step: int = 0) -> Iterator[np.ndarray]:
    groups = self._groups(plan, size, start_step)
    for step in range(start_step, plan.steps):
      yield groups[step % self.cycle]

  def describe(self, plan: plan_lib.PrivacyPlan) -> str:
    return (f'Balls in bins: each record belongs to one of {self.cycle} bins, which take turns '
            'in an unchanging order. No amplification by sampling is claimed.')


@dataclasses.dataclass(frozen=True)
class FixedOrder(Sampling):
  """The same batches in the same order in every epoch; the last one may be smaller.

  Two participations of a record are exactly an epoch apart. No amplification.
  Adding a record would move all later ones, so add_remove is refused.

  Attributes:
    shuffle_seed: The public seed of the one permutation used; None keeps the
      order of the data.
  """

  adjacencies: ClassVar = ('zero_out', 'replace')
  fixed_order: ClassVar = True
  shuffle_seed: Optional[int] = 0

  def check(self, plan: plan_lib.PrivacyPlan) -> None:
    super().check(plan)
    checks.whole(batch_size=plan.batch_size)

  def batches_per_epoch(self, plan: plan_lib.PrivacyPlan) -> int:
    return -(-_population(plan) // int(plan.batch_size))

  def participation(self, plan: plan_lib.PrivacyPlan, steps: int) -> Tuple[int, int]:
    epoch = self.batches_per_epoch(plan)
    return epoch, -(-steps // epoch)

  def index_batches(
      self, plan: plan_lib.PrivacyPlan, size: int, start_step: int = 0) -> Iterator[np.ndarray]:
    order = np.arange(size) if self.shuffle_seed is None else _public_order(
        self.shuffle_seed, size)
    epoch = self.batches_per_epoch(plan)
    for step in range(start_step, plan.steps):
      first = step % epoch * plan.batch_size
      yield order[first:first + plan.batch_size]

  def describe(self, plan: plan_lib.PrivacyPlan) -> str:
    return ('Fixed order: the same batches in the same order in every epoch of '
            f'{self.batches_per_epoch(plan)} steps. No amplification by sampling is claimed.')


def _public_order(seed: Optional[int], size: int) -> np.ndarray:
  """A permutation that every NumPy gives alike: a resumed run must meet the same one."""
  return np.random.RandomState(seed).permutation(size)


SCHEMES = {scheme.__name__: scheme for scheme in (
    Poisson, TruncatedPoisson, CyclicPoisson, BallsInBins, FixedOrder)}
