# SPDX-License-Identifier: Apache-2.0
"""Computes dp_accounting events from plans, and epsilon and delta from events.

Convention of the whole library: the noise on the clipped sum of step t is
`noise_multiplier * sensitivity of one record * (C^-1 Z)_t`, where one record's
sensitivity is the clip norm, or twice that under replace. The noise already
carries that factor, so events count in units of it and are read under
add-or-remove; the sensitivity of C to a record's participations only ever
divides here.
"""

import functools
import logging
import math
from typing import Any, Callable, Optional, Sequence, Tuple

import dp_accounting
from dp_accounting import rdp
from scipy import optimize

from tfdp_adaptive import checks
from tfdp_adaptive import mechanisms
from tfdp_adaptive import terms as terms_lib
from tfdp_adaptive.accounting import composition
from tfdp_adaptive.accounting import events
from tfdp_adaptive.accounting import gaussian
from tfdp_adaptive.accounting import losses
from tfdp_adaptive.accounting import monte_carlo
from tfdp_adaptive.accounting import private_search

ACCOUNTANTS = ('pld', 'rdp')
SMALLEST_DELTA = 1e-100
LARGEST_EPSILON = 1e4  # Largest epsilon that noise is calibrated to.
# Largest error of the grids of losses, relative to epsilon or to delta.
_EPSILON_TOLERANCE, _DELTA_TOLERANCE, _CALIBRATION_TOLERANCE = 5e-6, 1e-4, 1e-3
_SETTLED = 1e-4  # Tolerance of the logarithm of a calibrated noise multiplier.
_STEEP = 50.0
_RELATION = dp_accounting.NeighboringRelation
_HAS_TRUNCATED = hasattr(dp_accounting, 'TruncatedSubsampledGaussianDpEvent')


def needs_current_library(what: str) -> None:
  """Raises where dp-accounting is too old for `what`."""
  if not _HAS_TRUNCATED:
    raise ValueError(f'{what} needs dp-accounting 0.6.0 or later; earlier versions do not have '
                     'it, or mean something else by it. Install a current dp-accounting.')


@functools.lru_cache(maxsize=64)
def sensitivity(
    mechanism: mechanisms.Mechanism, min_sep: int, max_participations: int,
    fixed_order: bool = False) -> float:
  """Returns the larger sensitivity of C, rounded to float64 or to float32 as it runs."""
  return max(
      mechanism.rounded(dtype).sensitivity(
          min_sep=min_sep, max_participations=max_participations, fixed_order=fixed_order)
      for dtype in ('float64', 'float32'))


def total_sensitivity(plan: terms_lib.Terms, steps: int) -> float:
  """Returns the joint sensitivity of all un-amplified releases of `steps` steps, in noise units."""
  size = sensitivity(plan.mechanism, *plan.participation(steps), plan.fixed_order)
  # Past clean data of a record is in the extra releases of all steps, whenever it took part.
  return math.sqrt(size**2 + steps * sum(noise**-2 for noise in plan.extra_releases))


def event(
    plan: terms_lib.Terms, steps: int,
    neighbors: Optional[dp_accounting.NeighboringRelation] = None, composed: bool = False,
    shared: bool = False, same_batches: bool = False) -> dp_accounting.DpEvent:
  """Returns the DpEvent of the first `steps` steps of a plan, for `relation(plan)` or `neighbors`.

  Args:
    plan: A `PrivacyPlan`.
    steps: The number of steps.
    neighbors: The adjacency of the ledger, if it differs from the plan's.
    composed: Whether the event is composed with others. Bounds from draws do not compose, so a
      bound without draws replaces them.
    shared: Whether another run may have had the same bins or gaps, by two fits of one data set or
      by undone steps. Draws that are made once per run then amplify nothing.
    same_batches: Whether another run of the ledger took steps on the same batches. One sample
      cannot hide a record from both, so no amplification is claimed.

  For a plan of a search, returns the event of the whole search, from its first step on.
  """
  search = plan.search
  if search is None:
    return _event_of_run(plan, steps, neighbors, composed, shared, same_batches)
  return search.event(_event_of_run(
      plan, plan.steps if steps else 0, neighbors, composed,
      shared or search.runs > 1 or search.shape == math.inf, same_batches))


def _event_of_run(
    plan: terms_lib.Terms, steps: int, neighbors: Optional[dp_accounting.NeighboringRelation],
    composed: bool, shared: bool, same_batches: bool) -> dp_accounting.DpEvent:
  sigma = plan.noise_multiplier
  if not steps:
    return dp_accounting.NoOpDpEvent()
  if not sigma:
    return dp_accounting.NonPrivateDpEvent()
  amplified = plan.amplified and not same_batches
  if same_batches and plan.sampling.by_example:  # Many examples of a user may be in one batch.
    return dp_accounting.NonPrivateDpEvent()
  if amplified:
    own = plan.sampling.event(plan, steps, float(sigma))
    if composed and isinstance(own, monte_carlo.MonteCarloDpEvent):
      own = own.bound
    if own is not None and (plan.sampling.drawn_each_step or not shared):
      return own
    amplified = own is None
  if not amplified:
    doubled = 2 if neighbors is _RELATION.REPLACE_ONE else 1  # See below.
    return dp_accounting.GaussianDpEvent(float(doubled * sigma / total_sensitivity(plan, steps)))
  probability = plan.sampling.probability(plan)
  _, count = plan.sampling.participation(plan, steps)  # Most releases of a record.
  sigma = float(sigma / sensitivity(plan.mechanism, 1, 1))  # The largest column norm.
  if relation(plan) is _RELATION.REPLACE_ONE:
    # This relation counts noise in clip norms and doubles the sensitivity itself.
    sigma *= terms_lib.record_distance(plan.adjacency)
  max_batch_size = plan.sampling.max_batch_size
  if max_batch_size is None:
    step: dp_accounting.DpEvent = dp_accounting.GaussianDpEvent(sigma)
    if probability < 1:
      step = dp_accounting.PoissonSampledDpEvent(float(probability), step)
  else:
    step = dp_accounting.TruncatedSubsampledGaussianDpEvent(
        plan.population_size, float(probability), max_batch_size, sigma)
  return dp_accounting.SelfComposedDpEvent(step, count)


def relation(plan: terms_lib.Terms) -> dp_accounting.NeighboringRelation:
  """Returns the dp_accounting relation an event of this plan is read under."""
  if plan.amplified:
    if plan.adjacency == 'replace':
      return _RELATION.REPLACE_ONE
    if plan.adjacency == 'zero_out' and plan.sampling.max_batch_size is not None:
      return _RELATION.REPLACE_SPECIAL
  # Zero-out has the values of add-or-remove for (sampled) Gaussians, which is
  # the relation that every dp-accounting version reads alike.
  return _RELATION.ADD_OR_REMOVE_ONE


def epsilon(
    dp_event: dp_accounting.DpEvent, target_delta: float, accountant: str = 'pld',
    neighbors: dp_accounting.NeighboringRelation = _RELATION.ADD_OR_REMOVE_ONE) -> float:
  """Returns an epsilon that the accountant proves at `target_delta`, as small as it can."""
  checks.probability(target_delta=target_delta)
  checks.one_of(ACCOUNTANTS, accountant=accountant)
  if _drawn(dp_event, accountant):
    return monte_carlo.epsilon(dp_event, target_delta, epsilon(dp_event.bound, target_delta))
  if accountant == 'rdp' or private_search.selects(dp_event):
    return max(0.0, float(_renyi(dp_event, neighbors).get_epsilon(target_delta)))
  checks.require(target_delta >= SMALLEST_DELTA, f'be at least {SMALLEST_DELTA:g}',
                 target_delta=target_delta)
  sigma = _gaussian(dp_event, neighbors)
  if sigma is not None:
    return gaussian.epsilon(sigma, target_delta)
  directions = losses.directions(dp_event, neighbors)
  return math.inf if directions is None else _epsilon(tuple(directions), target_delta)


def rough_epsilon(dp_event: dp_accounting.DpEvent, target_delta: float) -> float:
  """Returns an upper bound of epsilon from moments alone, mostly within a tenth of `epsilon`."""
  directions = losses.directions(dp_event, _RELATION.ADD_OR_REMOVE_ONE)
  return math.inf if directions is None else max(
      composition.Composition(steps).chernoff_epsilon(target_delta)[1] for steps in directions)


@functools.lru_cache(maxsize=256)
def _epsilon(directions: Sequence[losses.Steps], target_delta: float) -> float:
  return _largest(
      directions, lambda one: one.chernoff_epsilon(target_delta)[1],
      lambda one: one.epsilon(target_delta, _EPSILON_TOLERANCE), 0.0)


def delta(
    dp_event: dp_accounting.DpEvent, target_epsilon: float, accountant: str = 'pld',
    neighbors: dp_accounting.NeighboringRelation = _RELATION.ADD_OR_REMOVE_ONE) -> float:
  """Returns a delta that the accountant proves at `target_epsilon`, as small as it can."""
  checks.not_negative(target_epsilon=target_epsilon)
  checks.one_of(ACCOUNTANTS, accountant=accountant)
  if _drawn(dp_event, accountant):
    return min(monte_carlo.delta(dp_event, target_epsilon), delta(dp_event.bound, target_epsilon))
  if accountant == 'rdp' or private_search.selects(dp_event):
    return min(1.0, float(_renyi(dp_event, neighbors).get_delta(target_epsilon)))
  sigma = _gaussian(dp_event, neighbors)
  if sigma is not None:
    return gaussian.delta(sigma, target_epsilon)
  directions = losses.directions(dp_event, neighbors)
  if directions is None:
    return 1.0
  return math.exp(_log_delta(tuple(directions), target_epsilon, _DELTA_TOLERANCE))


@functools.lru_cache(maxsize=256)
def _log_delta(
    directions: Sequence[losses.Steps], target_epsilon: float, tolerance: float) -> float:
  return _largest(
      directions, lambda one: one.chernoff_log_delta(target_epsilon)[1],
      lambda one: one.log_delta(target_epsilon, tolerance), -math.inf)


def _largest(
    directions: Sequence[losses.Steps], bound: Callable[[composition.Composition], float],
    value: Callable[[composition.Composition], float], least: float) -> float:
  """Returns the maximum over directions. Skips those whose cheap bound is below another's value."""
  compositions = [composition.Composition(steps) for steps in directions if steps]
  for one in sorted(compositions, key=bound, reverse=True):
    if bound(one) > least:
      least = max(least, value(one))
  return least


def _drawn(dp_event: dp_accounting.DpEvent, accountant: str) -> bool:
  """Returns whether draws of the privacy loss account for an event; raises if they may not."""
  drawn = isinstance(dp_event, monte_carlo.MonteCarloDpEvent)
  if drawn and accountant == 'rdp':
    raise ValueError('Patterns of participation that are secret are accounted for by draws of the '
                     'privacy loss, not by Renyi differential privacy. Received: '
                     'accountant="rdp". Leave it out.')
  return drawn


def _renyi(dp_event: dp_accounting.DpEvent, neighbors: dp_accounting.NeighboringRelation) -> Any:
  parts = list(events.composed(dp_event))
  if private_search.selects(dp_event):  # All other events are then composed in Renyi terms too.
    parts = [(getattr(part, 'unamplified', part), count) for part, count in parts]
  accountant = rdp.RdpAccountant(neighboring_relation=neighbors)
  if not all(accountant.supports(part) for part, _ in parts):
    raise ValueError(f'Renyi differential privacy cannot account for {dp_event} under '
                     f'{neighbors.name}. Use accountant="pld".')
  log = logging.getLogger('absl')
  log.addFilter(_counts)
  try:
    for part, count in parts:
      accountant.compose(part, count)
  finally:
    log.removeFilter(_counts)
  return accountant


def _counts(record: logging.LogRecord) -> bool:
  """Hides dp_accounting's notes on skipped orders. The other orders still bound epsilon."""
  return 'Excluding this order' not in str(record.msg)


def _gaussian(
    dp_event: dp_accounting.DpEvent,
    neighbors: dp_accounting.NeighboringRelation) -> Optional[float]:
  """Returns the noise multiplier of an event that is unsampled Gaussians only, else None."""
  parts = list(events.composed(dp_event))
  if neighbors is _RELATION.REPLACE_ONE or not parts or not all(
      isinstance(part, dp_accounting.GaussianDpEvent) for part, _ in parts):
    return None
  if any(not part.noise_multiplier for part, _ in parts):
    return 0.0
  return 1 / math.hypot(*(math.sqrt(count) / part.noise_multiplier for part, count in parts))


def calibrate(
    event_of: Callable[[float], dp_accounting.DpEvent], target_epsilon: float, target_delta: float,
    accountant: str = 'pld',
    neighbors: dp_accounting.NeighboringRelation = _RELATION.ADD_OR_REMOVE_ONE) -> float:
  """Returns the least noise multiplier, up to 2e-4 of it, that keeps to a target.

  Args:
    event_of: `noise_multiplier -> DpEvent`, more private with more noise.
    target_epsilon: Never exceeded by `epsilon(event_of(result), ...)`.
    target_delta: See above.
    accountant: 'pld' or 'rdp'.
    neighbors: The adjacency under which the events are read.
  """
  checks.positive(target_epsilon=target_epsilon)
  checks.probability(target_delta=target_delta)
  if target_epsilon > LARGEST_EPSILON:
    raise ValueError(f'`target_epsilon` must be at most {LARGEST_EPSILON:g}; more than about 10 '
                     f'is no privacy. Received: target_epsilon={target_epsilon}.')
  if _drawn(event_of(1.0), accountant):
    bound_of: Any = lambda sigma: event_of(sigma).bound  # type: ignore[attr-defined]
    return monte_carlo.calibrate(
        event_of, lambda event_: epsilon(event_, target_delta), target_epsilon, target_delta,
        calibrate(bound_of, target_epsilon, target_delta))
  log_delta = math.log(target_delta)
  if private_search.selects(event_of(1.0)):
    accountant = 'rdp'

  def epsilon_of(log_sigma: float) -> float:
    return epsilon(event_of(math.exp(log_sigma)), target_delta, accountant, neighbors)

  # Delta at the target, and not epsilon: where delta allows much, epsilon falls off a cliff.
  @functools.lru_cache(None)  # The root search asks again at both ends.
  def gap(log_sigma: float, cheaply: bool = False) -> float:
    event_ = event_of(math.exp(log_sigma))
    if accountant == 'rdp':
      value = math.log(max(epsilon_of(log_sigma), 1e-300) / target_epsilon)
    elif _gaussian(event_, neighbors) is not None:
      value = math.log(max(delta(event_, target_epsilon), 1e-300)) - log_delta
    else:
      directions = losses.directions(event_, neighbors)
      if directions is None:
        return _STEEP
      value = (max(composition.Composition(steps).chernoff_log_delta(target_epsilon)[1]
                   for steps in directions) if cheaply else
               _log_delta(tuple(directions), target_epsilon, _CALIBRATION_TOLERANCE)) - log_delta
    return min(_STEEP, max(-_STEEP, value))

  cheap = lambda log_sigma: gap(log_sigma, True)
  # The cheap bound needs more noise than the truth, by a few percent.
  start = optimize.brentq(cheap, *_bracket(cheap, target_epsilon), xtol=1e-3)
  best = _SETTLED / 2 + optimize.brentq(
      gap, *_bracket(gap, target_epsilon, start, 0.1), xtol=_SETTLED / 2)
  for _ in range(100):
    if epsilon_of(best) <= target_epsilon:
      return math.exp(best)
    best += _SETTLED / 2
  raise ValueError('The noise multiplier did not converge. '
                   f'Received: target_epsilon={target_epsilon}, target_delta={target_delta}.')


def _bracket(gap: Callable[[float], float], target_epsilon: float, start: float = 0.0,
             step: float = 1.0) -> Tuple[float, float]:
  high = start
  while gap(high) > 0:
    high += step
    if high > 30:
      raise ValueError('No noise multiplier below 1e13 reaches the target. '
                       f'Received: target_epsilon={target_epsilon}.')
  low = high - step
  while gap(low) <= 0:
    low, high = low - step, low
    if low < -12:
      raise ValueError('The target is reached with a noise multiplier below 1e-5, which is no '
                       f'privacy. Received: target_epsilon={target_epsilon}.')
  return low, high
