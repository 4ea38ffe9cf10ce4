# SPDX-License-Identifier: Apache-2.0
"""Poisson sampling: a coin for every record and step, all independent."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Iterator, Optional, Tuple

import numpy as np

from tfdp_adaptive import checks
from tfdp_adaptive import terms as terms_lib
from tfdp_adaptive.accounting import scheme


@dataclasses.dataclass(frozen=True)
class Poisson(scheme.Sampling):
  """Every record takes part in every step independently, with probability q.

  Attributes:
    sampling_probability: q. By default `batch_size / population_size`, which
      needs a public population size; give it where that size is private.
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
      if not math.isclose(expected, plan.batch_size, rel_tol=1e-9):
        raise ValueError(
            '`batch_size` must be sampling_probability * population_size where all three are '
            f'given; leave one out. Received: batch_size={plan.batch_size}, '
            f'sampling_probability={self.sampling_probability}, '
            f'population_size={plan.population_size}.')

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
    if self.max_batch_size < plan.batch_size:
      raise ValueError(
          '`max_batch_size` must be at least the expected batch size. Received: '
          f'max_batch_size={self.max_batch_size}, batch_size={plan.batch_size}.')

  def index_batches(self, plan: terms_lib.Terms, size: int, start_step: int,
                    seed: scheme.Seed) -> Iterator[np.ndarray]:
    for rng in scheme.step_generators(seed, start_step, plan.steps):
      batch = scheme.bernoulli(rng, size, self.probability(plan))
      yield rng.permutation(batch)[:self.max_batch_size]

  def describe(self, plan: terms_lib.Terms) -> str:
    return (super().describe(plan) + f' Batches of more than {self.max_batch_size} records are '
            'cut to a random subset of that size, which is accounted for.')
