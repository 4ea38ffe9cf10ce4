# SPDX-License-Identifier: Apache-2.0
"""Poisson sampling: a coin for every record and step, all independent; of users' examples, too.

With examples that are sampled and clipped one by one, k ~ Binomial(m, q) of a user's at most m
examples are in a batch and move the sum by at most k clip norms. With independent noise sigma, the
pair P = sum_k P(k) N(k, sigma^2), Q = N(0, sigma^2) dominates a step, whatever directions the
examples have (Charles et al., arXiv 2407.07737).
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Iterator, Optional, Tuple

import dp_accounting
import numpy as np
import numpy.typing as npt
from scipy import stats

from tfdp_adaptive import checks
from tfdp_adaptive import gate
from tfdp_adaptive import terms as terms_lib
from tfdp_adaptive.accounting import scheme


@dataclasses.dataclass(frozen=True)
class Poisson(scheme.Sampling):
  """Every record takes part in every step independently, with probability q.

  Attributes:
    sampling_probability: q. By default `batch_size / population_size`, which needs a public
      population size. Give the probability if that size is private.
  """

  adjacencies: ClassVar[Tuple[str, ...]] = terms_lib.ADJACENCIES
  amplified: ClassVar = True
  drawn_each_step: ClassVar = True
  amplifies: ClassVar = (
      'independent noise; use CyclicPoisson with a banded mechanism, or FixedOrder.')
  sampling_probability: Optional[float] = None

  def __post_init__(self) -> None:
    q = self.sampling_probability
    if q is not None and not (checks.is_number(q) and q == 1):
      checks.probability(sampling_probability=self.sampling_probability)

  def check(self, plan: terms_lib.Terms) -> None:
    if self.sampling_probability is None:
      super().check(plan)
    elif plan.population_size is not None:
      expected = self.sampling_probability * plan.population_size
      checks.require(math.isclose(expected, plan.batch_size, rel_tol=1e-9),
                     'be sampling_probability * population_size where all are given; leave one out',
                     batch_size=plan.batch_size, sampling_probability=self.sampling_probability,
                     population_size=plan.population_size)

  def probability(self, plan: terms_lib.Terms) -> float:
    if self.sampling_probability is not None:
      return self.sampling_probability
    return plan.batch_size / scheme.population(plan)

  def participation(self, plan: terms_lib.Terms, steps: int) -> Tuple[int, int]:
    return 1, steps

  def index_batches(self, plan: terms_lib.Terms, size: int, start_step: int,
                    seed: scheme.Seed) -> Iterator[np.ndarray]:
    for rng in scheme.step_generators(seed, start_step, plan.steps):
      yield scheme.bernoulli(rng, size, self.probability(plan))

  def describe(self, plan: terms_lib.Terms) -> str:
    return ('Poisson sampling: at every step each record takes part independently with '
            f'probability {self.probability(plan):.6g}.')


@dataclasses.dataclass(frozen=True)
class TruncatedPoisson(Poisson):
  """Poisson sampling, then a uniformly random subset of at most `max_batch_size`.

  The truncation is part of the accounting (arXiv 2508.15089); needs
  dp-accounting 0.6.0 or later.
  """

  adjacencies: ClassVar = ('add_remove', 'zero_out')
  renyi: ClassVar = False
  sampling_probability: Optional[float] = dataclasses.field(default=None, init=False)
  max_batch_size: int = 0

  def __post_init__(self) -> None:
    checks.whole(max_batch_size=self.max_batch_size)

  def check(self, plan: terms_lib.Terms) -> None:
    super().check(plan)
    checks.require(self.max_batch_size >= plan.batch_size, 'be at least the expected batch size',
                   max_batch_size=self.max_batch_size, batch_size=plan.batch_size)

  def index_batches(self, plan: terms_lib.Terms, size: int, start_step: int,
                    seed: scheme.Seed) -> Iterator[np.ndarray]:
    for rng in scheme.step_generators(seed, start_step, plan.steps):
      batch = scheme.bernoulli(rng, size, self.probability(plan))
      yield rng.permutation(batch)[:self.max_batch_size]

  def describe(self, plan: terms_lib.Terms) -> str:
    return (super().describe(plan) + f' Batches of more than {self.max_batch_size} records are '
            'cut to a random subset of that size, which is accounted for.')


@dataclasses.dataclass(frozen=True)
class UserExamplesDpEvent(dp_accounting.DpEvent):
  """A step that samples each example of a user independently.

  Attributes:
    noise_multiplier: Noise on the sum, in clip norms of one example.
    sampling_probability: q of an example.
    examples_per_user: m, the most that a user has.
  """

  noise_multiplier: float
  sampling_probability: float
  examples_per_user: int

  most_shift: ClassVar[float] = 20.0  # An epsilon far beyond 100.

  @property
  def largest_shift(self) -> float:
    """The shift by the most examples of a user in one step (mass above it: 1e-30)."""
    return float(stats.binom.isf(
        1e-30, self.examples_per_user, self.sampling_probability)) / self.noise_multiplier

  @property
  def unamplified(self) -> dp_accounting.DpEvent:
    """The Gaussian of a user all of whose examples are taken."""
    return dp_accounting.GaussianDpEvent(self.noise_multiplier / self.examples_per_user)


@dataclasses.dataclass(frozen=True)
class PoissonExamples(Poisson):
  """Samples and clips single examples, with a guarantee for their users.

  Use it in a plan with `unit='user'`. `batch_size` and `population_size` count examples. The
  guarantee holds for all data of one user, of which at most `examples_per_user` examples are ever
  used. It needs less noise than sampling whole users if the examples of a user are alike. If they
  point in different directions, sample whole users (`Poisson`).

  Attributes:
    examples_per_user: m, the largest number of examples of a user in one step. If a user has
      more, m of them are drawn when batches are made, and drawn again when a run is resumed. If
      examples have several owners (`plan.batches(data, users=ids)` with [n, owners] ids), examples
      are left out until no user owns more than m. Who owns which example is then taken as public.
  """

  adjacencies: ClassVar[Tuple[str, ...]] = ('add_remove', 'zero_out')
  renyi: ClassVar = False
  by_example: ClassVar = True
  amplifies: ClassVar = 'independent noise; use FixedOrder for any other.'
  examples_per_user: int = 1

  def __post_init__(self) -> None:
    gate.check('PoissonExamples')
    super().__post_init__()
    checks.whole(examples_per_user=self.examples_per_user)

  def check(self, plan: terms_lib.Terms) -> None:
    super().check(plan)
    if plan.unit != 'user':
      raise ValueError('`PoissonExamples` protects users: give the plan unit="user", and the '
                       'number of examples as population_size. '
                       f'Received: unit={plan.unit!r}.')

  def claims(self, plan: terms_lib.Terms) -> bool:
    return scheme.independent(plan.mechanism)

  def event(self, plan: terms_lib.Terms, steps: int,
            noise_multiplier: float) -> dp_accounting.DpEvent:
    return dp_accounting.SelfComposedDpEvent(UserExamplesDpEvent(
        noise_multiplier, float(self.probability(plan)), self.examples_per_user), steps)

  def describe(self, plan: terms_lib.Terms) -> str:
    return ('Poisson sampling of examples: at every step each example takes part independently '
            f'with probability {self.probability(plan):.6g} and is clipped by itself. At most '
            f'{self.examples_per_user} examples of a user can take part in a step. The guarantee '
            'covers all examples of a user together. Where examples have several owners, who owns '
            'which example is taken as public.')


def kept(ids: npt.ArrayLike, most: int, rng: np.random.Generator) -> np.ndarray:
  """Selects examples so that no user owns more than `most` of them.

  Args:
    ids: [n] ids of users, integers or strings; or [n, owners] integers, -1 for none.
    most: Examples of a user.
    rng: Draws which of a user's examples are used, where each has one owner.

  Returns:
    [n] booleans.
  """
  ids = np.asarray(ids)
  if ids.ndim == 2:
    return _of_several_owners(ids, most)
  _, user_of = np.unique(ids, return_inverse=True)
  # An example's number is its own, so that which are kept depends on their user alone.
  order = np.lexsort([rng.random(len(ids)), user_of])
  first = np.searchsorted(user_of[order], user_of[order])
  result = np.zeros(len(ids), bool)
  result[order] = np.arange(len(ids)) - first < most
  return result


def _of_several_owners(ids: np.ndarray, most: int) -> np.ndarray:
  """Selects examples with few owners first, up to the limit of each owner (2503.03622)."""
  if ids.dtype.kind not in 'iu' or np.any(np.all(ids < 0, axis=1)):
    raise ValueError('`users` of shape [n, owners] must be integers, -1 for none, and every '
                     'example must have an owner. Received: '
                     f'{ids.dtype}, {int(np.sum(np.all(ids < 0, axis=1)))} examples without one.')
  owners, numbers = np.unique(ids, return_inverse=True)
  numbers = numbers.reshape(ids.shape)
  left = np.full(len(owners), most)
  left[owners < 0] = len(ids) * ids.shape[1] + 1
  result = np.zeros(len(ids), bool)
  for example in np.argsort(np.sum(ids >= 0, axis=1), kind='stable'):
    mine = np.unique(numbers[example])
    if np.all(left[mine] > 0):
      left[mine] -= 1
      result[example] = True
  return result
