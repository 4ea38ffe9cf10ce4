# SPDX-License-Identifier: Apache-2.0
"""The interface of sampling schemes. `sampling` lists the schemes."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, Iterator, Optional, Protocol, Tuple

import dp_accounting
import numpy as np

from tfdp_adaptive import mechanisms
from tfdp_adaptive import terms as terms_lib


class Seed(Protocol):
  """The part of `batches.sampling_seed.SamplingSeed` that schemes use."""

  in_file: bool

  def key(self, start_step: int) -> int:
    ...

  def of_pass(self, start_step: int) -> int:
    ...


@dataclasses.dataclass(frozen=True)
class Sampling(abc.ABC):
  """A batch selection scheme.

  Attributes:
    adjacencies: The adjacencies that the scheme can be accounted for.
    amplified: Whether amplification by sampling may be claimed. If not, every participation is
      counted in full.
    drawn_each_step: Whether batches are drawn at every step, independently of earlier steps.
    fixed_order: Whether the distances between the steps of a record are multiples of the least
      distance, because it has one place in every epoch.
    amplifies: The noise whose privacy the scheme amplifies, in words.
    by_example: Whether single examples are drawn and clipped where the unit is a user.
    renyi: Whether the Renyi divergences under this sampling are known.
    pattern: The kind of randomness: 'steps' (every step is drawn independently, within a record's
      turn), 'gaps' (a random first step, then random gaps) or 'rounds' (one step in every round).
    cycle: The number of steps between two turns of a record.
    max_batch_size: The largest size of a batch, if larger batches are cut.
    examples_per_user: The largest number of examples of a user in one step.
    sampling_probability: The probability with which a record is drawn, if it was given.
    draws: The number of random draws that bound the privacy loss; 0 or None without such draws.
  """

  adjacencies: ClassVar[Tuple[str, ...]] = terms_lib.ADJACENCIES
  amplified: ClassVar[bool] = False
  drawn_each_step: ClassVar[bool] = False
  fixed_order: ClassVar[bool] = False
  amplifies: ClassVar[str] = 'none'
  renyi: ClassVar[bool] = True
  by_example: ClassVar[bool] = False
  pattern: ClassVar[str] = 'steps'
  # These are fields of the schemes that have them.
  cycle = examples_per_user = 1
  max_batch_size = draws = None  # type: Optional[int]
  sampling_probability = None  # type: Optional[float]

  def check(self, plan: terms_lib.Terms) -> None:
    """Raises if the plan's population and batch size do not fit this scheme."""
    population(plan)

  @abc.abstractmethod
  def participation(self, plan: terms_lib.Terms, steps: int) -> Tuple[int, int]:
    """Returns `(min_sep, max_participations)` of any record within the first `steps` steps."""

  def probability(self, plan: terms_lib.Terms) -> Any:
    """Returns the probability that a record is in a batch of its turn, if it is always the same."""
    del plan
    return None

  def largest_batch(self, plan: terms_lib.Terms) -> Optional[int]:
    """Returns the most records of a batch, or None if that is random."""
    del plan
    return self.max_batch_size

  @abc.abstractmethod
  def index_batches(self, plan: terms_lib.Terms, size: int, start_step: int,
                    seed: Seed) -> Iterator[np.ndarray]:
    """Returns the record indices, in [0, size), of steps `start_step`, ..., `plan.steps - 1`.

    Random numbers come from `seed`, the secret `SamplingSeed` of the run.
    """

  def event(self, plan: terms_lib.Terms, steps: int,
            noise_multiplier: float) -> Optional[dp_accounting.DpEvent]:
    """Returns the privacy event of `steps` steps, for amplification other than by Poisson sampling.

    Args:
      plan: The plan that uses this sampling.
      steps: The number of steps.
      noise_multiplier: In units of a record's sensitivity.
    """
    del plan, steps, noise_multiplier
    return None

  @property
  def most_bands(self) -> int:
    """The largest number of bands of `BandedToeplitz` noise that this sampling amplifies."""
    return 1

  def claims(self, plan: terms_lib.Terms) -> bool:
    """Whether amplification is claimed for this plan's noise."""
    bands = plan.mechanism.bands
    return self.amplified and bands is not None and bands <= self.most_bands

  @abc.abstractmethod
  def describe(self, plan: terms_lib.Terms) -> str:
    """Returns a sentence for the privacy statement."""


def population(plan: terms_lib.Terms) -> int:
  if plan.population_size is None:
    raise ValueError(
        f'`population_size` must be given for {plan.sampling!r}. Only '
        '`Poisson(sampling_probability=...)`, a constant that does not come from the data, does '
        'without. Received: population_size=None.')
  return plan.population_size


def whole_bins(plan: terms_lib.Terms, cycle: int) -> None:
  """Checks that the expected batch is one of `cycle` equal parts of the population."""
  expected = population(plan) / cycle
  if cycle > population(plan) or abs(expected - plan.batch_size) >= 1:
    raise ValueError(
        f'`batch_size` must be population_size / cycle = {expected:.6g}, the expected size of a '
        f'bin, and `cycle` at most the population size. Received: batch_size={plan.batch_size}, '
        f'cycle={cycle}, population_size={plan.population_size}.')


def independent(mechanism: mechanisms.Mechanism) -> bool:
  """Whether noise is Gaussian and of its own at every step, all of one size."""
  return isinstance(mechanism, mechanisms.IndependentGaussian)


def public_order(seed: Optional[int], size: int) -> np.ndarray:
  """Returns a permutation that every NumPy gives alike: a resumed run must meet the same one."""
  return np.random.RandomState(seed).permutation(size)


def step_generators(seed: Seed, start_step: int, steps: int) -> Iterator[np.random.Generator]:
  """Returns one NumPy generator per step, derived from the seed of this pass."""
  key = seed.of_pass(start_step)
  return (np.random.default_rng([key, step]) for step in range(start_step, steps))


def bernoulli(rng: np.random.Generator, size: int, probability: float) -> np.ndarray:
  """Returns indices of `size` records, each drawn independently."""
  return rng.choice(size, rng.binomial(size, probability), replace=False, shuffle=False)
