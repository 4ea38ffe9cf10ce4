# SPDX-License-Identifier: Apache-2.0
"""Chooses a mechanism for a plan."""

import dataclasses
import functools
import math
from typing import Any, Dict, List, Optional, Set, Tuple

from tfdp_adaptive import checks
from tfdp_adaptive import mechanisms
from tfdp_adaptive import privacy
from tfdp_adaptive.accounting import cost
from tfdp_adaptive.accounting import meaning
from tfdp_adaptive.accounting import sampling as sampling_lib
from tfdp_adaptive.accounting import scheme as scheme_lib
from tfdp_adaptive.mechanisms import workload as workload_lib

_BUFFERS = 5
_WORTH = 0.99  # More memory is worth it only for at most this much of the error.
_FAR = 1.3  # Times epsilon: what a rough bound says of plans that are not worth a look.
_ERRORS = {'mean': 'rmse', 'max': 'max_error', 'last': 'last_error'}


def default_delta(population_size: int) -> float:
  """Returns the largest power of ten below `1 / population_size`."""
  return float(f'1e-{len(str(population_size))}')


def _check(plan: privacy.PrivacyPlan, memory: int, objective: str) -> None:
  if not isinstance(plan, privacy.PrivacyPlan):
    raise ValueError(f'`plan` must be a `tfdp.PrivacyPlan`. Received: plan={plan!r}.')
  checks.whole(0, memory=memory)
  checks.one_of(_ERRORS, objective=objective)


def choose(plan: privacy.PrivacyPlan, *, memory: int = 32, workload: workload_lib.Like = None,
           objective: str = 'mean') -> mechanisms.Mechanism:
  """The mechanism with the least error that the plan's sampling can account for.

  * Poisson sampling amplifies independent noise only.
  * Cyclic Poisson sampling amplifies banded noise with at most `cycle` bands,
    at the same cost for any number of them: as many as memory allows. So do
    `MinSeparation` and `BallsInBins` with `draws`, at a cost that grows with them.
  * Without amplification noise may be correlated over all steps: a BLT with as
    many buffers as gain 1% each, unless a banded mechanism is better for the
    plan's participation by more than that.
  * With no memory, a banded inverse, whose rows are drawn again from their keys.

  Args:
    plan: A `PrivacyPlan` (its own mechanism is not looked at): `steps`,
      `sampling` and `participation()` are read.
    memory: Rows of the model's size that the noise may keep between steps.
    workload: A `Workload`; None for prefix sums (SGD with a constant rate).
    objective: 'mean', 'max' or 'last', the error to minimize.

  Returns:
    A mechanism for `dataclasses.replace(plan, mechanism=...)`; its `reason`
    says why, in a sentence or two.
  """
  _check(plan, memory, objective)
  design: Dict[str, Any] = dict(workload=workload, objective=objective)
  if plan.steps == 1:
    return mechanisms.IndependentGaussian(workload=workload).because(
        'There is one step: nothing to correlate.')
  if plan.sampling.amplified:
    most, scheme = plan.sampling.most_bands, type(plan.sampling).__name__
    bands = min(most, plan.steps, memory + 1)
    if bands == 1:
      return mechanisms.IndependentGaussian(workload=workload).because(
          f'{scheme} sampling amplifies independent noise only'
          + (f' at {most} bands and memory for {memory} rows.' if most > 1 else
             '. CyclicPoisson with banded noise, or FixedOrder with a BLT, may be better for '
             'large epsilon or few epochs.'))
    return mechanisms.BandedToeplitz(bands, plan.steps, **design).because(
        f'{scheme} sampling amplifies banded noise of up to {most} bands; {bands} fit into '
        f'{memory} rows of memory.')
  min_sep, k = plan.participation()
  participation: Dict[str, Any] = dict(min_sep=min_sep, max_participations=k)
  pattern = (f'a record that takes part at most {k} times, at least {min_sep} steps apart'
             if k > 1 else 'a record that takes part once')
  if memory == 0:
    inverse = mechanisms.BandedInverse(min(4, plan.steps), plan.steps, **participation, **design)
    return inverse.because(
        f'Nothing may be kept between steps: rows are drawn again from their keys, for {pattern}.')
  error = lambda mechanism: getattr(mechanism, _ERRORS[objective])(**participation)
  # How many buffers pay is asked at a constant rate: each design for a schedule takes seconds.
  given = workload_lib.get(workload)
  constant = dict(design, workload=workload_lib.Workload(given.momentum))
  streaming = mechanisms.BLT(1, plan.steps, **participation, **constant)
  for buffers in range(2, min(_BUFFERS, memory) + 1):
    more = mechanisms.BLT(buffers, plan.steps, **participation, **constant)
    if error(more) > _WORTH * error(streaming):
      break
    streaming = more
  if not given.is_toeplitz:
    streaming = mechanisms.BLT(streaming.buffers, plan.steps, **participation, **design)
  bands = min(min_sep, plan.steps, memory + 1)
  tight = mechanisms.BandedToeplitz(bands, plan.steps, **design)
  numbers = f'For {pattern}, its {objective} error is {{:.4g}}, against {{:.4g}} of {{}}.'
  if k > 1 and error(tight) < _WORTH * error(streaming):
    return tight.because(
        f'{bands} bands, as many as memory and participation allow, are best. '
        + numbers.format(error(tight), error(streaming), f'{streaming.buffers} BLT buffers'))
  return streaming.because(
      f'A BLT keeps {streaming.buffers} rows, whatever the number of steps. '
      + numbers.format(error(streaming), error(tight), f'{bands} bands'))


def choose_plan(plan: privacy.PrivacyPlan, *, memory: int = 32,
                workload: workload_lib.Like = None, objective: str = 'mean', draws: int = 0
                ) -> privacy.PrivacyPlan:
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
  _check(plan, memory, objective)
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

  def __init__(self, plan: privacy.PrivacyPlan, target: float, choice: Dict[str, Any]) -> None:
    self._plan, self._target, self._choice = plan, target, choice
    self.measured: List[Tuple[float, privacy.PrivacyPlan]] = []
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
    mu = meaning.gaussian_mu(self._target, self._plan.target_delta)
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
    event = functools.partial(cost.event, trial, trial.steps)
    sigma = min(enough, cost.calibrate(event, self._target, trial.target_delta))
    self.measured.append((sigma * error_of_one,
                          dataclasses.replace(trial, noise_multiplier=sigma)))
    return True

  def _trial(self, scheme: Any, like: Any) -> Tuple[privacy.PrivacyPlan, float]:
    """A plan, and its error at a noise multiplier of one."""
    trial = dataclasses.replace(
        self._plan, sampling=scheme, mechanism=mechanisms.IndependentGaussian(), min_sep=None,
        max_participations=None, noise_multiplier=1.0)
    mechanism = choose(dataclasses.replace(trial, sampling=like), **self._choice)
    # Error of the noise alone: the noise multiplier has the cost of sampling C.
    error = getattr(mechanism, _ERRORS[self._choice['objective']])(self._plan.steps)
    return dataclasses.replace(trial, mechanism=mechanism), error
