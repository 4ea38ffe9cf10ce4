# SPDX-License-Identifier: Apache-2.0
"""The plan of the least error at an epsilon: sampling scheme, cycle and bands.

`samplers.py` compares it with the plans of jax_privacy.
"""

import dataclasses
import math
from typing import Any, Dict, List, Optional, Set, Tuple

from tfdp_adaptive import checks
from tfdp_adaptive import mechanisms
from tfdp_adaptive.accounting import cost
from tfdp_adaptive.accounting import gaussian
from tfdp_adaptive.accounting import sampling as sampling_lib
from tfdp_adaptive.accounting import scheme as scheme_lib
from tfdp_adaptive.advice import choice
from tfdp_adaptive.mechanisms import workload as workload_lib
from tfdp_adaptive.privacy import plan as plan_lib

_FAR = 1.3  # Times epsilon: what a rough bound says of plans that are not worth a look.


def choose_plan(plan: plan_lib.PrivacyPlan, *, memory: int = 32,
                workload: workload_lib.Like = None, objective: str = 'mean', draws: int = 0
                ) -> plan_lib.PrivacyPlan:
  """The plan of the same epsilon whose releases have the least error: its cycle and bands.

  It tries a fixed order and secret bins, with the noise that `choose` selects. It also tries
  random allocation and cyclic Poisson sampling, with as many bands as groups and memory allow.
  The numbers of groups are 1 (Poisson sampling), 2, 4, ..., numbers ever closer to the best of
  these, and all factors of the population, as in jax_privacy. With `draws`, it also tries
  b-min-separation, and accounts for bins by upper bounds from random draws of the privacy loss.
  It reads only public constants of the plan, so the choice costs no privacy.

  Args:
    plan: Gives epsilon, population, batch size and steps; its sampling and mechanism are
      not kept. Its adjacency must be 'zero_out'.
    memory: Rows of the model's size that the noise may keep between steps.
    workload: A `Workload`; None for prefix sums (SGD with a constant rate).
    objective: 'mean', 'max' or 'last', the error to minimize.
    draws: 0, or how many bound delta for `BallsInBins` and `MinSeparation`. Fewer than some
      60 / delta can tell nothing; ten million take minutes.

  Returns:
    A plan whose epsilon is at most that of `plan`; its mechanism's `reason` has the errors.
  """
  choice.check(plan, memory, objective)
  checks.whole(0, draws=draws)
  target = plan.epsilon()
  if plan.adjacency != 'zero_out' or plan.population_size is None or not 0 < target < math.inf:
    raise ValueError(
        'A plan can be chosen for zero_out adjacency, a public population and a finite epsilon. '
        f'Received: adjacency={plan.adjacency!r}, population_size={plan.population_size}, '
        f'epsilon={target}.')
  most = min(int(plan.population_size // plan.batch_size), plan.steps)
  search = _Search(plan, target, dict(memory=memory, workload=workload, objective=objective))
  factors = {groups for groups in range(1, most + 1) if plan.population_size % groups == 0}
  numbers = {2**i for i in range(most.bit_length())} | factors
  for groups in sorted(numbers, key=search.guess):  # So that few are better than all before.
    search.try_groups(groups)
  ratio = 1.5
  while ratio * search.groups >= search.groups + 0.5:
    near = {round(search.groups * ratio), round(search.groups / ratio)}
    if not any([search.try_groups(groups) for groups in near if 1 <= groups <= most]):
      ratio = (1 + ratio) / 2
  if float(plan.batch_size).is_integer():
    search.try_scheme(sampling_lib.FixedOrder())
  search.try_bins(None)
  if draws:
    search.try_draws(draws, most)
  errors = '; '.join(f'{one.sampling!r} with {type(one.mechanism).__name__}: {error:.4g}'
                     for error, one in search.measured)
  least, best = min(search.measured, key=lambda pair: pair[0])
  return dataclasses.replace(best, mechanism=best.mechanism.because(
      f'At epsilon {target:.4g} it has the least {objective} error, {least:.4g} clip norms. '
      f'Tried: {errors}; and {len(search.seen) - len(search.measured)} others, which '
      'have more.'))


class _Search:
  """Plans of one epsilon, and their errors."""

  def __init__(self, plan: plan_lib.PrivacyPlan, target: float, wanted: Dict[str, Any]) -> None:
    self._plan, self._target, self._wanted = plan, target, wanted
    self.measured: List[Tuple[float, plan_lib.PrivacyPlan]] = []
    self.seen: Set[Any] = set()

  @property
  def groups(self) -> int:
    """Returns the number of bands of the best amplified plan so far."""
    return min((error, one.sampling.most_bands) for error, one in self.measured
               if one.sampling.amplified)[1]

  @property
  def _bins(self) -> Optional[int]:
    """Batches of an epoch, if these are equal parts of the population."""
    population, batch = scheme_lib.population(self._plan), self._plan.batch_size
    bins = round(population / batch)
    return bins if abs(population / bins - batch) < 1 else None

  def guess(self, groups: int) -> float:
    """The error by the central limit theorem, which is near the truth for many small losses."""
    q = self._plan.batch_size * groups / scheme_lib.population(self._plan)
    mu = gaussian.mu_of(self._target, self._plan.target_delta)
    count = -(-self._plan.steps // groups)
    coins = sampling_lib.CyclicPoisson(groups)
    return self._trial(coins, coins)[1] / math.sqrt(math.log1p(mu**2 / (q**2 * count)))

  def try_groups(self, groups: int) -> bool:
    """Whether a number of groups is better than all before."""
    bins: Any = self._bins
    schemes: List[Any] = []
    if bins is not None and bins % groups == 0:
      schemes.append(sampling_lib.RandomAllocation(bins, groups=groups))
    if not schemes or self._plan.steps % bins:  # Random allocation is better.
      schemes.append(sampling_lib.CyclicPoisson(groups))
    return any([self.try_scheme(scheme) for scheme in schemes])

  def try_bins(self, draws: Optional[int]) -> None:
    """Tries one bin per batch of an epoch, with banded and fixed-order noise."""
    if self._bins is not None:
      banded = sampling_lib.CyclicPoisson(self._bins)
      for like in (banded, None) if draws is None else (banded,):
        self.try_scheme(sampling_lib.BallsInBins(self._bins, draws=draws), like)

  def try_draws(self, draws: int, most: int) -> None:
    """Bins by draws, and gaps like the groups that are tried."""
    self.try_bins(draws)
    for gap in sorted({self.groups, *(2**i for i in range(1, most.bit_length()))}, reverse=True):
      self.try_scheme(sampling_lib.MinSeparation(gap, draws=draws))

  def try_scheme(self, scheme: Any, like: Any = None) -> bool:
    """Whether it is better than all before, by one look at epsilon unless it is.

    Args:
      scheme: The sampling scheme to try.
      like: A scheme whose mechanism is taken; its own by default.
    """
    if (scheme, like) in self.seen:
      return False
    self.seen.add((scheme, like))
    trial, error_of_one = self._trial(scheme, like or scheme)
    enough = min((error for error, _ in self.measured), default=math.inf) / error_of_one
    if enough < math.inf:
      tried = dataclasses.replace(trial, noise_multiplier=enough)
      far = isinstance(scheme, (sampling_lib.CyclicPoisson, sampling_lib.RandomAllocation)) and (
          cost.rough_epsilon(tried.event(), tried.target_delta) > _FAR * self._target)
      if far or tried.epsilon() > self._target:
        return False
    sigma = min(enough, cost.calibrate(
        lambda sigma: dataclasses.replace(trial, noise_multiplier=sigma).event(), self._target,
        trial.target_delta))
    self.measured.append((sigma * error_of_one,
                          dataclasses.replace(trial, noise_multiplier=sigma)))
    return True

  def _trial(self, scheme: Any, like: Any) -> Tuple[plan_lib.PrivacyPlan, float]:
    """A plan, and its error at a noise multiplier of one."""
    trial = dataclasses.replace(
        self._plan, sampling=scheme, mechanism=mechanisms.IndependentGaussian(), min_sep=None,
        max_participations=None, noise_multiplier=1.0)
    mechanism = choice.choose(dataclasses.replace(trial, sampling=like), **self._wanted)
    # Error of the noise alone: the noise multiplier has the cost of sampling C.
    error = getattr(mechanism, choice.ERRORS[self._wanted['objective']])(self._plan.steps)
    return dataclasses.replace(trial, mechanism=mechanism), error
