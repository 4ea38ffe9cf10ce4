# SPDX-License-Identifier: Apache-2.0
"""Epsilon by a second accountant: dp_accounting's own, from the terms of a run.

The library composes privacy losses in code of its own (`composition`). Here none of it runs:
sampling probabilities, numbers of participations and sensitivities are derived again, the
sensitivity by multiplying out C for the patterns in which a record can take part, and
dp_accounting's PLD accountant (its RDP accountant for a selection) composes the events.
"""

import dataclasses
import math
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import dp_accounting
from dp_accounting import dp_event as dp_event_lib
from dp_accounting import pld
from dp_accounting import rdp
import numpy as np
from scipy import fft
from scipy import signal
from scipy import special
from scipy import stats

from tfdp_adaptive import mechanisms
from tfdp_adaptive import terms as terms_lib

SMALLEST_DELTA = 1e-11  # Convolutions in float64 resolve nothing smaller.
_MOST_ROWS = 1 << 11  # Largest number of rows of a C that is no Toeplitz matrix.
_MOST_POINTS = 1_000_000  # Largest number of points of the grid of one step's losses.
_MOST_OF_MIXTURES = 30_000  # dp_accounting finds the losses of a mixture one by one.
_SETTLED = 5e-4
_COINS = ('Poisson', 'TruncatedPoisson', 'PoissonExamples')  # Drawn at every step.
_RELATION = dp_accounting.NeighboringRelation
# dp-accounting 0.4 has none.
_MIXTURE: Any = getattr(dp_event_lib, 'MixtureOfGaussiansDpEvent', None)


class Look(NamedTuple):
  """The second accountant's result for one run.

  Attributes:
    event: The DpEvent of its steps; None where dp_accounting has none for its sampling.
    sensitivity: The sensitivity of C over the patterns that were tried, a lower bound.
  """

  event: Any
  sensitivity: Optional[float]


class Answer(NamedTuple):
  """The second accountant's findings.

  Attributes:
    epsilon: The epsilon of all runs; None if it cannot account for them.
    method: In words.
    exact: Whether the claim must be at least `epsilon` (1 - `tolerance`); else only that it
      must not be below.
    tolerance: The largest error of the grid.
    deltas: Deltas at the epsilons that were asked for.
  """

  epsilon: Optional[float]
  method: str
  exact: bool = True
  tolerance: float = 0.0
  deltas: Tuple[float, ...] = ()


def answer(
    entries: Sequence[Any], delta: float, epsilons: Sequence[float] = ()) -> Answer:
  """Returns epsilon of all runs at `delta`, and delta at some epsilons."""
  entries = [entry for entry in entries if entry.steps]
  seeds = [note for entry in entries for note in entry.notes if 'The sampling seed was' in note]
  if (any(entry.shared for entry in entries) or sum(entry.has_seed for entry in entries) > 1
      or len(seeds) > len(set(seeds))):
    return Answer(None, 'runs took steps on the same batches')
  delta -= sum(getattr(entry, 'delta', 0.0) for entry in entries)
  kept = [(i, entry) for i, entry in enumerate(entries)
          if type(entry.plan.sampling).__name__ not in _COINS]
  found = [look(entry.plan, entry.steps, len(entries) > 1, any(
      _same_bins(entry, other) for j, other in kept if j != i)) for i, entry in enumerate(entries)]
  events = [one.event for one in found]
  if any(event is None for event in events):
    return Answer(None, 'dp_accounting has none for this sampling')
  relation = _relation(entries)
  if any(entry.plan.search is not None for entry in entries):
    accountant = rdp.RdpAccountant(neighboring_relation=relation)
    for event in events:
      accountant.compose(event)
    return Answer(float(accountant.get_epsilon(delta)), "dp_accounting's Renyi divergences", True,
                  _SETTLED, tuple(float(accountant.get_delta(e)) for e in epsilons))
  try:
    return _by_losses(events, relation, delta, epsilons)
  except (ArithmeticError, MemoryError):  # An epsilon of many thousands.
    return Answer(None, 'the losses are too large for its grids')


def _same_bins(one: Any, two: Any) -> bool:
  """Whether the batches of two runs may be the same, as far as is known."""
  terms = [tuple(repr(getattr(entry.plan, name)) for name in (
      'batch_size', 'steps', 'population_size', 'unit', 'adjacency', 'sampling'))
           for entry in (one, two)]
  return terms[0] == terms[1] or bool(one.own_sampler or two.own_sampler)


def _by_losses(
    events: List[Any], relation: Any, delta: float, epsilons: Sequence[float]) -> Answer:
  """Refines the grid until the upper bounds agree."""
  rough = rdp.RdpAccountant(neighboring_relation=_RELATION.ADD_OR_REMOVE_ONE)
  sigmas = [sigma for event in events for sigma in _multipliers(event)]
  known = all(map(rough.supports, events))  # Not truncated batches.
  for event in events * known:
    rough.compose(event)
  near = max(1e-6, float(rough.get_epsilon(delta))) if known else 1.0
  mixed = any(isinstance(getattr(event, 'event', event), _MIXTURE or ()) for event in events)
  least = max([0.5 / sigma**2 + 10 / sigma for sigma in sigmas] + [1e-9]) / (
      _MOST_OF_MIXTURES if mixed else _MOST_POINTS)
  grid, before, value = max(least, 2e-3 * near), math.inf, math.inf
  while True:
    accountant = pld.PLDAccountant(relation, value_discretization_interval=grid)
    for event in events:
      for part in getattr(event, 'events', [event]):
        inside = getattr(part, 'event', part)
        if isinstance(inside, SecretBins):  # Unknown to this accountant.
          # pylint: disable-next=protected-access
          accountant._pld = accountant._pld.compose(
              inside.losses(grid).self_compose(getattr(part, 'count', 1)))
        else:
          accountant.compose(part)
    before, value = value, float(accountant.get_epsilon(max(delta, SMALLEST_DELTA)))
    change = abs(before - value) / max(value, 1e-12)
    if change <= _SETTLED or grid <= least or value <= 0:
      break
    grid = max(least, grid / 8)
  return Answer(
      value, "dp_accounting's privacy loss distributions", delta >= SMALLEST_DELTA,
      min(1.0, max(_SETTLED, 2 * change)), tuple(float(accountant.get_delta(e)) for e in epsilons))


def look(plan: terms_lib.Terms, steps: int, together: bool = False, shared: bool = False) -> Look:
  """Returns the event of `steps` steps of a plan, and the sensitivity it rests on.

  Args:
    plan: The terms of the run.
    steps: How many; at least one.
    together: Whether it is one of several runs: what only draws account for is then counted
      without amplification.
    shared: Whether another run may have had the same secret bins, which then hide nothing.
  """
  kind, mechanism = type(plan.sampling).__name__, plan.mechanism
  sigma = float(plan.noise_multiplier)
  sampled = _sampled(plan, steps)
  draws = plan.sampling.draws
  bins = kind == 'BallsInBins' and draws is None and plan.adjacency != 'replace' and (
      not plan.extra_releases and plan.search is None)
  if kind == 'PoissonExamples' and _MIXTURE is None:
    return Look(None, None)
  if kind == 'PoissonExamples':
    taken = np.arange(plan.sampling.examples_per_user + 1)
    size: Any = plan.population_size
    q = plan.sampling.sampling_probability or plan.batch_size / size
    event, norm_found = dp_accounting.SelfComposedDpEvent(_MIXTURE(
        sigma, taken.tolist(), stats.binom.pmf(taken, len(taken) - 1, q).tolist()), steps), 1.0
  elif (kind == 'RandomAllocation' or bins and mechanism.bands == 1) and not shared:
    return _secret(plan, steps)
  elif sampled is not None:
    norm = float(np.linalg.norm(_column(mechanism, steps)))
    noise = sigma / norm * (2 if plan.adjacency == 'replace' else 1)
    q, count = sampled
    step = dp_accounting.GaussianDpEvent(noise)
    if kind == 'TruncatedPoisson':
      step = dp_accounting.TruncatedSubsampledGaussianDpEvent(
          plan.population_size, q, plan.sampling.max_batch_size, noise)
    elif q < 1:
      step = dp_accounting.PoissonSampledDpEvent(q, step)
    event, norm_found = dp_accounting.SelfComposedDpEvent(step, count), norm
  elif draws and not together or bins and not shared:  # Only bounds of this library account for it.
    return Look(None, None)
  elif kind in _APART:
    size = pattern_sensitivity(mechanism, steps, _APART[kind](plan))
    if size is None:
      return Look(None, None)
    norm_found = math.sqrt(size**2 + steps * sum(r**-2 for r in plan.extra_releases))
    doubled = 2 if _relation_of(plan) is _RELATION.REPLACE_ONE else 1
    event = dp_accounting.GaussianDpEvent(doubled * sigma / norm_found)
  else:
    return Look(None, None)
  if plan.search is not None:
    if plan.search.score_noise is not None:
      event = dp_accounting.ComposedDpEvent(
          (event, dp_accounting.GaussianDpEvent(plan.search.score_noise)))
    if plan.search.runs > 1 or plan.search.shape == math.inf:
      event = dp_event_lib.RepeatAndSelectDpEvent(
          event, float(plan.search.runs), float(plan.search.shape))
  return Look(event, norm_found)


def _secret(plan: terms_lib.Terms, steps: int) -> Look:
  """Computes epsilon of a run with secret bins, drawn once or in every round."""
  cycle, groups = plan.sampling.cycle, getattr(plan.sampling, 'groups', 0)
  if not groups:
    passes, more = divmod(steps, cycle)
    return Look(SecretBins(tuple(
        (count, math.sqrt(size) / plan.noise_multiplier)
        for count, size in ((more, passes + 1), (cycle - more, passes)))), math.sqrt(passes + 1))
  norm = float(np.linalg.norm(_column(plan.mechanism, steps)))
  used = [len(range(begin, min(steps, begin + cycle), groups))
          for begin in range(0, steps, cycle)]
  return Look(dp_accounting.ComposedDpEvent([
      dp_accounting.SelfComposedDpEvent(SecretBins((
          (one, norm / plan.noise_multiplier), (cycle // groups - one, 0.0))), used.count(one))
      for one in set(used)]), norm)


# Sampling -> the least distance of two participations of a record.
_APART = {
    'Poisson': lambda plan: 1,
    'TruncatedPoisson': lambda plan: 1,
    'CyclicPoisson': lambda plan: plan.sampling.cycle,
    'BallsInBins': lambda plan: plan.sampling.cycle,
    'RandomAllocation': lambda plan: plan.sampling.cycle,
    'MinSeparation': lambda plan: plan.sampling.min_sep,
    'FixedOrder': lambda plan: -(-plan.population_size // int(plan.batch_size)),
}


def _sampled(plan: terms_lib.Terms, steps: int) -> Optional[Tuple[float, int]]:
  """Returns (q, count) of the Poisson-sampled Gaussians; None where nothing is amplified."""
  kind, bands = type(plan.sampling).__name__, plan.mechanism.bands
  size: Any = plan.population_size
  if kind in ('Poisson', 'TruncatedPoisson') and bands == 1:
    q = plan.sampling.sampling_probability
    q = plan.batch_size / size if q is None else q
    return (q, steps) if q < 1 or kind == 'TruncatedPoisson' else None
  if kind == 'CyclicPoisson' and bands is not None and bands <= plan.sampling.cycle and (
      plan.adjacency != 'replace'):
    cycle = plan.sampling.cycle
    q = plan.batch_size * cycle / size
    return (q, -(-steps // cycle)) if q < 1 else None
  return None


def pattern_sensitivity(mechanism: mechanisms.Mechanism, steps: int, apart: int) -> Optional[float]:
  """Returns the largest ||C x|| of participations `apart` steps apart, of both signs.

  Returns:
    A number that is never above the sensitivity; None if C has too many rows.
  """
  if mechanism.bands == 1:
    return math.sqrt(-(-steps // apart))
  most = _MOST_ROWS if type(mechanism).__name__ in ('Dense', 'Banded', 'Tree') else _MOST_ROWS << 6
  if steps > min(most, mechanism.steps or steps):
    return None
  strategy, largest = np.asarray(mechanism.strategy(steps)), 0.0
  for sign in (1.0, -1.0):
    if strategy.ndim == 1:
      x = np.zeros(steps)
      x[::apart] = sign**np.arange(len(x[::apart]))
      largest = max(largest, float(np.linalg.norm(signal.fftconvolve(x, strategy)[:steps])))
    else:
      for start in range(min(apart, steps)):
        columns = strategy[:, start::apart]
        largest = max(largest, float(np.linalg.norm(
            columns @ sign**np.arange(columns.shape[1]))))
  return largest


def _column(mechanism: mechanisms.Mechanism, steps: int) -> np.ndarray:
  """Returns the column of C with the largest norm. C is banded here."""
  if mechanism.bands == 1:
    return np.ones(1)
  strategy = np.asarray(mechanism.strategy(min(steps, mechanism.steps or steps)))
  if strategy.ndim == 1:
    return strategy
  return strategy[:, int(np.argmax(np.linalg.norm(strategy, axis=0)))]


def _relation(entries: Sequence[Any]) -> Any:
  relations = {_relation_of(entry.plan) for entry in entries} - {_RELATION.ADD_OR_REMOVE_ONE}
  return relations.pop() if relations else _RELATION.ADD_OR_REMOVE_ONE


def _relation_of(plan: terms_lib.Terms) -> Any:
  """Returns the relation: zero-out is add-or-remove unless batches are truncated."""
  if plan.adjacency == 'replace' and _sampled(plan, 1) is not None:
    return _RELATION.REPLACE_ONE
  if plan.adjacency == 'zero_out' and type(plan.sampling).__name__ == 'TruncatedPoisson' and (
      plan.mechanism.bands == 1):
    return _RELATION.REPLACE_SPECIAL
  return _RELATION.ADD_OR_REMOVE_ONE


def _multipliers(event: dp_accounting.DpEvent) -> List[float]:
  inside = getattr(event, 'events', None) or [getattr(event, 'event', None)]
  own = [event.noise_multiplier] if hasattr(event, 'noise_multiplier') else []
  return own + [sigma for part in inside if part is not None for sigma in _multipliers(part)]


# Privacy losses of secret bins, by a Fourier transform over the sum of lognormals. No code of
# `allocation` runs.

_NORMAL_REACH = 7.0  # Standard deviations of a normal that are looked at.
_MOST_CELLS = 1 << 23


@dataclasses.dataclass(frozen=True)
class SecretBins(dp_accounting.DpEvent):
  """One of some bins, each as likely, is moved by a shift of its own, in standard deviations."""

  shifts: Tuple[Tuple[int, float], ...]  # (count, shift)

  @property
  def noise_multiplier(self) -> float:
    """The noise multiplier of the largest shift."""
    return 1 / max(shift for count, shift in self.shifts if count)

  def ratios(self) -> Tuple[np.ndarray, np.ndarray]:
    """Returns the mean R of lognormals and its masses, by a Fourier transform on a linear grid.

    Masses as small as errors of the transform are left out, which only takes from divergences.
    """
    total = sum(count for count, _ in self.shifts)
    moved = [(count, shift) for count, shift in self.shifts if count and shift]
    still = total - sum(count for count, _ in moved)  # Each is 1, which the grid need not have.
    step = min(0.01 * shift * math.exp(-shift**2 / 2) for _, shift in moved)
    largest = max(math.exp(shift * _NORMAL_REACH + shift**2 / 2) for _, shift in moved)
    spread = math.sqrt(sum(count * math.expm1(shift**2) for count, shift in moved))
    cells = (largest + total + 12 * spread) / step
    if cells > _MOST_CELLS:
      raise ArithmeticError('The grid is too long.')
    size = fft.next_fast_len(int(cells) + 1)
    values = np.arange(int(largest / step) + 2) * step
    spectrum = 1.0
    for count, shift in moved:
      below = np.log(values + step / 2) / shift + shift / 2
      spectrum *= fft.rfft(np.diff(special.ndtr(below), prepend=0.0), size)**count
    mass = fft.irfft(spectrum, size)
    mass = np.maximum(mass + 2 * min(0.0, float(mass.min())), 0.0)
    ratio = (np.arange(size) * step + still) / total
    kept = (mass > 0) & (ratio > 0)
    return ratio[kept], mass[kept]

  def losses(self, grid: float) -> Any:
    """Returns the losses: cells of R differ by their rounded logarithm, which only lowers it."""
    ratio, mass = self.ratios()
    cell = np.round(np.log(ratio) / grid).astype(int)
    first = cell.min()
    absent, present = (np.bincount(cell - first, one) for one in (mass, mass * ratio))
    lower, upper = ({int(i): math.log(of[i]) for i in np.flatnonzero(absent)}
                    for of in (absent, present))
    make = pld.privacy_loss_distribution.from_two_probability_mass_functions
    # dp-accounting 0.4 fails with `symmetric=False`.
    return pld.privacy_loss_distribution.PrivacyLossDistribution(*(
        make(*pair, value_discretization_interval=grid)._pmf_remove  # pylint: disable=protected-access
        for pair in ((lower, upper), (upper, lower))))
