"""From a plan to a dp_accounting event, and from an event to epsilon and delta.

Convention of the whole library: the noise on the clipped sum of step t is
`noise_multiplier * sensitivity of one record * (C^-1 Z)_t`, where one record's
sensitivity is the clip norm, or twice that under replace. The noise already
carries that factor, so events count in units of it and are read under
add-or-remove; the sensitivity of C to a record's participations only ever
divides here.
"""

import functools
import math

import dp_accounting
from dp_accounting import pld
from dp_accounting import rdp
from scipy import optimize
from scipy import special

from tfdp_adaptive import checks
from tfdp_adaptive import contract

ACCOUNTANTS = ('pld', 'rdp')
# Relative change between two grids at which the finer one will do: to search, to settle, to report.
_COARSE, _MEDIUM, _FINE = 5e-2, 5e-3, 2e-4
_FIRST_GRID, _REFINEMENT = 1e-2, 10
_FIRST_SIZE, _LARGEST_GRID = 1e4, 2e5  # Of one step's losses over the grid.
_NO_PRIVACY = 1e6  # A loss of one step from which on no bound is worth its cost.
_RELATION = dp_accounting.NeighboringRelation
_HAS_TRUNCATED = hasattr(dp_accounting, 'TruncatedSubsampledGaussianDpEvent')


def needs_current_library(what):
  """Raises where dp-accounting is too old for `what`."""
  if not _HAS_TRUNCATED:
    raise ValueError(f'{what} needs dp-accounting 0.6.0 or later; earlier versions do not have '
                     'it, or mean something else by it. Install a current dp-accounting.')


def claims_amplification(plan):
  """Whether the plan's mechanism may use its sampling's amplification."""
  bands = plan.mechanism.bands
  if not plan.sampling.amplified or bands is None:
    return False
  return bands <= getattr(plan.sampling, 'cycle', 1)


@functools.lru_cache(maxsize=64)
def sensitivity(mechanism, min_sep, max_participations, fixed_order=False):
  """Of the C that runs, whichever precision it runs in."""
  return max(
      mechanism.rounded(dtype).sensitivity(
          min_sep=min_sep, max_participations=max_participations, fixed_order=fixed_order)
      for dtype in ('float64', 'float32'))


def total_sensitivity(plan, steps):
  """Of all un-amplified releases of the first `steps` steps together, in units of their noise."""
  size = sensitivity(plan.mechanism, *plan.participation(steps), plan.fixed_order)
  # Past clean data of a record is in the extra releases of all steps, whenever it took part.
  return math.sqrt(size**2 + steps * sum(noise**-2 for noise in plan.extra_releases))


def event(plan, steps, noise_multiplier=None, neighbors=None):
  """The DpEvent of the first `steps` steps of a plan, for `relation(plan)` or `neighbors`."""
  sigma = plan.noise_multiplier if noise_multiplier is None else noise_multiplier
  if not steps:
    return dp_accounting.NoOpDpEvent()
  if not sigma:
    return dp_accounting.NonPrivateDpEvent()
  if not claims_amplification(plan):
    doubled = 2 if neighbors is _RELATION.REPLACE_ONE else 1  # See below.
    return dp_accounting.GaussianDpEvent(float(doubled * sigma / total_sensitivity(plan, steps)))
  probability, count = plan.sampling.compositions(plan, steps)
  sigma = float(sigma / sensitivity(plan.mechanism, 1, 1))  # The largest column norm.
  if relation(plan) is _RELATION.REPLACE_ONE:
    # This relation counts noise in clip norms and doubles the sensitivity itself.
    sigma *= contract.record_distance(plan.adjacency)
  max_batch_size = getattr(plan.sampling, 'max_batch_size', None)
  if max_batch_size is None:
    step = dp_accounting.GaussianDpEvent(sigma)
    if probability < 1:
      step = dp_accounting.PoissonSampledDpEvent(float(probability), step)
  else:
    step = dp_accounting.TruncatedSubsampledGaussianDpEvent(
        plan.population_size, float(probability), max_batch_size, sigma)
  return dp_accounting.SelfComposedDpEvent(step, count)


def relation(plan):
  """The dp_accounting relation an event of this plan is read under."""
  if claims_amplification(plan):
    if plan.adjacency == 'replace':
      return _RELATION.REPLACE_ONE
    if plan.adjacency == 'zero_out' and hasattr(plan.sampling, 'max_batch_size'):
      return _RELATION.REPLACE_SPECIAL
  # Zero-out has the values of add-or-remove for (sampled) Gaussians, which is
  # the relation that every dp-accounting version reads alike.
  return _RELATION.ADD_OR_REMOVE_ONE


def epsilon(dp_event, target_delta, accountant='pld', neighbors=_RELATION.ADD_OR_REMOVE_ONE,
            tolerance=_FINE):
  """Smallest epsilon that the accountant proves at `target_delta`, up to the tolerance."""
  checks.probability(target_delta=target_delta)
  sigma = _gaussian(dp_event) if neighbors is not _RELATION.REPLACE_ONE else None
  if sigma is not None and accountant == 'pld':
    return gaussian_epsilon(sigma, target_delta)
  return max(0.0, _bound(dp_event, accountant, neighbors, 'get_epsilon', target_delta,
                         tolerance))


def delta(dp_event, target_epsilon, accountant='pld', neighbors=_RELATION.ADD_OR_REMOVE_ONE):
  """Smallest delta that the accountant proves at `target_epsilon`."""
  checks.not_negative(target_epsilon=target_epsilon)
  sigma = _gaussian(dp_event) if neighbors is not _RELATION.REPLACE_ONE else None
  if sigma is not None and accountant == 'pld':
    return gaussian_delta(sigma, target_epsilon)
  return min(1.0, _bound(dp_event, accountant, neighbors, 'get_delta', target_epsilon, _FINE))


def _gaussian(dp_event):
  """The noise multiplier of an event that is unsampled Gaussians only, else None."""
  if isinstance(dp_event, dp_accounting.GaussianDpEvent):
    return dp_event.noise_multiplier
  if isinstance(dp_event, dp_accounting.SelfComposedDpEvent) and dp_event.count:
    sigma = _gaussian(dp_event.event)
    return None if sigma is None else sigma / math.sqrt(dp_event.count)
  if isinstance(dp_event, dp_accounting.ComposedDpEvent) and dp_event.events:
    sigmas = [_gaussian(part) for part in dp_event.events]
    if None in sigmas:
      return None
    return 0.0 if 0 in sigmas else sum(sigma**-2 for sigma in sigmas)**-0.5
  return None


@functools.lru_cache(maxsize=256)
def _bound(dp_event, accountant, neighbors, answer, argument, tolerance):
  """An upper bound, on a grid of privacy losses just fine enough for `tolerance`.

  Every grid gives a valid bound. Errors fall with the grid's square, so where
  two grids differ by 2e-4 the finer is 2e-6 off. The cost is that of the last
  grid; one grid for all costs minutes where there is little noise, and tells
  multiples of the truth where epsilon is tiny.
  """
  checks.one_of(ACCOUNTANTS, accountant=accountant)
  if accountant == 'rdp':
    made = _composed(rdp.RdpAccountant(neighboring_relation=neighbors), dp_event)
    return float(getattr(made, answer)(argument))
  largest_loss = _largest_loss(dp_event)
  if largest_loss > _NO_PRIVACY:
    return math.inf
  interval, best = max(_FIRST_GRID, largest_loss / _FIRST_SIZE), math.inf
  while True:
    made = _composed(pld.PLDAccountant(neighbors, interval), dp_event)
    last, best = best, min(best, float(getattr(made, answer)(argument)))
    interval /= _REFINEMENT
    if (best == 0 or last - best <= tolerance * best or last == best == math.inf
        or largest_loss / interval > _LARGEST_GRID):
      return best


def _largest_loss(dp_event):
  """The largest privacy loss of one step, up to what noise does not reach."""
  if isinstance(dp_event, dp_accounting.ComposedDpEvent):
    return max(map(_largest_loss, dp_event.events), default=0.0)
  if isinstance(dp_event, dp_accounting.SelfComposedDpEvent):
    return _largest_loss(dp_event.event)
  sigma = getattr(dp_event, 'noise_multiplier', 0.0)
  probability = getattr(dp_event, 'sampling_probability', 1.0)
  if isinstance(dp_event, dp_accounting.PoissonSampledDpEvent):
    sigma = getattr(dp_event.event, 'noise_multiplier', 0.0)
  if not sigma:
    return 0.0
  return max(0.0, 10 / sigma + 0.5 / sigma / sigma + math.log(max(probability, 1e-300)))


def _composed(accountant, dp_event):
  if not accountant.supports(dp_event):
    raise ValueError(f'{type(accountant).__name__} cannot account for {dp_event} under '
                     f'{accountant.neighboring_relation.name}. Use accountant="pld".')
  return accountant.compose(dp_event)


def gaussian_delta(noise_multiplier, target_epsilon):
  """Exact delta of a Gaussian of sensitivity one (arXiv 1805.06530, Theorem 8)."""
  if not noise_multiplier:
    return 1.0
  mu = 1 / noise_multiplier
  first = special.log_ndtr(mu / 2 - target_epsilon / mu)
  second = target_epsilon + special.log_ndtr(-mu / 2 - target_epsilon / mu)
  return float(math.exp(first) * -math.expm1(min(0.0, second - first)))


def gaussian_epsilon(noise_multiplier, target_delta):
  """Exact epsilon of a Gaussian of sensitivity one, rounded up by 1e-12."""
  if not noise_multiplier:
    return math.inf
  gap = lambda e: gaussian_delta(noise_multiplier, e) - target_delta
  if gap(0.0) <= 0:
    return 0.0
  mu = 1 / noise_multiplier
  upper = mu * (mu / 2 + math.sqrt(-2 * math.log(target_delta)))  # Phi(-x) <= exp(-x^2 / 2)
  root = optimize.brentq(gap, 0.0, upper, xtol=1e-14 * upper, rtol=1e-14, maxiter=500)
  return float(root * (1 + 1e-12))


def calibrate(epsilon_of, target_epsilon):
  """Smallest noise multiplier, up to 1e-3 of epsilon, that keeps to a target.

  Args:
    epsilon_of: `(noise_multiplier, tolerance) -> epsilon`, decreasing in the
      noise, and never increasing when the tolerance decreases.
    target_epsilon: Never exceeded by `epsilon_of(result, ...)` at any tolerance
      up to the one that settles the result.
  """
  checks.positive(target_epsilon=target_epsilon)

  def gap(log_sigma, tolerance=_COARSE):
    return math.log(max(epsilon_of(math.exp(log_sigma), tolerance), 1e-300) / target_epsilon)

  high = 0.0
  while gap(high) > 0:
    high += 1
    if high > 30:
      raise ValueError('No noise multiplier below 1e13 reaches the target. '
                       f'Received: target_epsilon={target_epsilon}.')
  low = high - 1
  while gap(low) <= 0:
    low -= 1
    if low < -12:
      raise ValueError('The target is reached with a noise multiplier below 1e-5, which is no '
                       f'privacy. Received: target_epsilon={target_epsilon}.')
  log_sigma = optimize.brentq(gap, low, low + 1, xtol=3e-3)
  slope, before, best = -1.0, None, math.inf  # Secants of log(epsilon) against log(sigma).
  for _ in range(20):
    error = gap(log_sigma, _MEDIUM)
    if error <= 0:
      best = min(best, log_sigma)
      if error >= -1e-3:
        break
    if before is not None and before[0] != log_sigma:
      secant = (error - before[1]) / (log_sigma - before[0])
      slope = secant if secant < -0.1 else slope
    before = log_sigma, error
    log_sigma -= min(0.1, max(-0.1, (error + 3e-4) / slope))
  if best == math.inf:
    raise ValueError('The noise multiplier did not converge. '
                     f'Received: target_epsilon={target_epsilon}.')
  return math.exp(best)
