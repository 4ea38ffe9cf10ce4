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

import dataclasses
import math
from typing import Optional

from tfdp_adaptive import checks
from tfdp_adaptive.accounting.patterns import BallsInBins as BallsInBins
from tfdp_adaptive.accounting.patterns import CyclicPoisson as CyclicPoisson
from tfdp_adaptive.accounting.patterns import FixedOrder as FixedOrder
from tfdp_adaptive.accounting.patterns import MinSeparation as MinSeparation
from tfdp_adaptive.accounting.poisson import Poisson as Poisson
from tfdp_adaptive.accounting.poisson import TruncatedPoisson as TruncatedPoisson
from tfdp_adaptive.accounting.rounds import RandomAllocation as RandomAllocation
from tfdp_adaptive.accounting.scheme import Sampling as Sampling
from tfdp_adaptive.accounting.user_examples import PoissonExamples as PoissonExamples

_MOST_EPOCHS = 1e9


@dataclasses.dataclass(frozen=True)
class Epochs:
  """A number of steps, said as passes over the data: `PrivacyPlan(steps=Epochs(3), ...)`.

  Attributes:
    epochs: How many times as many records as there are shall be drawn, in expectation.
  """

  epochs: float

  def __post_init__(self) -> None:
    if not (checks.is_number(self.epochs) and 0 < self.epochs <= _MOST_EPOCHS):
      raise ValueError(f'`epochs` must be a positive number, at most {_MOST_EPOCHS:g}. '
                       f'Received: epochs={self.epochs!r}.')

  def in_steps(self, batch_size: float, population_size: Optional[int],
               sampling: Sampling = Poisson()) -> int:
    """Steps of so many epochs, rounded up; a fixed order's epochs are whole."""
    q = getattr(sampling, 'sampling_probability', None)
    if population_size is not None:
      one_epoch = population_size / batch_size
    elif q is not None:
      one_epoch = 1 / q
    else:
      raise ValueError('`steps=Epochs(...)` needs `population_size`. '
                       'Received: population_size=None.')
    whole = isinstance(sampling, FixedOrder)
    return max(1, math.ceil(self.epochs * (math.ceil(one_epoch) if whole else one_epoch) - 1e-9))


SCHEMES = {scheme.__name__: scheme for scheme in (
    Poisson, TruncatedPoisson, CyclicPoisson, RandomAllocation, BallsInBins, MinSeparation,
    FixedOrder, PoissonExamples)}
