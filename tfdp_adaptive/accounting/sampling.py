# SPDX-License-Identifier: Apache-2.0
"""Sampling schemes: how the records of each step are chosen, and the privacy of that choice.

A scheme is a public constant. It states the adjacencies it can be accounted for, whether it
amplifies privacy, and how often and how far apart a record takes part. It also draws the batches,
so the run is the one that is accounted for.

Random numbers come from the operating system whenever `index_batches` is called, so a second call
never repeats the first. Some orders and groups must stay the same over a whole run, even if it is
resumed. These are public. The privacy does not depend on them.
"""

import dataclasses
import math
from typing import Optional

from tfdp_adaptive import checks
from tfdp_adaptive.accounting.patterns import BallsInBins as BallsInBins
from tfdp_adaptive.accounting.patterns import CyclicPoisson as CyclicPoisson
from tfdp_adaptive.accounting.patterns import MinSeparation as MinSeparation
from tfdp_adaptive.accounting.poisson import Poisson as Poisson
from tfdp_adaptive.accounting.poisson import PoissonExamples as PoissonExamples
from tfdp_adaptive.accounting.poisson import TruncatedPoisson as TruncatedPoisson
from tfdp_adaptive.accounting.rounds import FixedOrder as FixedOrder
from tfdp_adaptive.accounting.rounds import RandomAllocation as RandomAllocation
from tfdp_adaptive.accounting.scheme import Sampling as Sampling

_MOST_EPOCHS = 1e9


@dataclasses.dataclass(frozen=True)
class Epochs:
  """A number of steps, given as passes over the data: `PrivacyPlan(steps=Epochs(3), ...)`.

  Attributes:
    epochs: The number of passes. Each pass has the whole number of steps that is nearest to the
      number of records divided by the batch size, as `fit(epochs=..., steps_per_epoch=...)` needs.
  """

  epochs: float

  def __post_init__(self) -> None:
    checks.require(checks.is_number(self.epochs) and 0 < self.epochs <= _MOST_EPOCHS,
                   f'be a positive number, at most {_MOST_EPOCHS:g}', epochs=self.epochs)

  def in_steps(self, batch_size: float, population_size: Optional[int],
               sampling: Sampling = Poisson()) -> int:
    """Returns the number of steps. A fixed order ends its epochs with a smaller batch."""
    q = sampling.sampling_probability
    if population_size is not None:
      one_epoch = population_size / batch_size
    elif q is not None:
      one_epoch = 1 / q
    else:
      raise ValueError('`steps=Epochs(...)` needs `population_size`. '
                       'Received: population_size=None.')
    rounded = math.ceil if isinstance(sampling, FixedOrder) else round
    return math.ceil(self.epochs * max(1, rounded(one_epoch)) - 1e-9)


SCHEMES = {scheme.__name__: scheme for scheme in (
    Poisson, TruncatedPoisson, CyclicPoisson, RandomAllocation, BallsInBins, MinSeparation,
    FixedOrder, PoissonExamples)}
