# SPDX-License-Identifier: Apache-2.0
"""Epsilon by a second accountant: dp_accounting's own, from the terms of a run.

The library composes privacy losses in code of its own (`composition`). Here none of it runs:
sampling probabilities, numbers of participations and sensitivities are derived again, the
sensitivity by multiplying out C for the patterns in which a record can take part, and
dp_accounting's PLD accountant (its RDP accountant for a selection) composes the events.
"""

from __future__ import annotations

import math
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import dp_accounting
from dp_accounting import dp_event as dp_event_lib
from dp_accounting import pld
from dp_accounting import rdp
import numpy as np
from scipy import signal

from tfdp_adaptive import terms as terms_lib

SMALLEST_DELTA = 1e-11  # That convolutions in float64 resolve.
_MOST_ROWS = 1 << 11  # Of a C that is no Toeplitz matrix.
_MOST_POINTS = 1_000_000  # Of the grid of one step's losses.
_SETTLED = 5e-4
_RELATION = dp_accounting.NeighboringRelation


class Look(NamedTuple):
  """What a second look at a run says.

  Attributes:
    event: The DpEvent of its steps; None where dp_accounting has none for its sampling.
    sensitivity: Of C, for the patterns that were tried: never above the truth.
    exact: Whether the event is the run's, and not only one that costs less.
  """

  event: Any
  sensitivity: Optional[float]
  exact: bool = True


class Answer(NamedTuple):
  """What the second accountant found.

  Attributes:
    epsilon: Of all runs; None if it cannot account for them.
    method: In words.
    exact: Whether the claim must be at least `epsilon` (1 - `tolerance`); else only that it
      must not be below.
    tolerance: By how much the grid may matter.
    deltas: Deltas at the epsilons that were asked for.
  """

  epsilon: Optional[float]
  method: str
  exact: bool = True
  tolerance: float = 0.0
  deltas: Tuple[float, ...] = ()


def answer(
    entries: Sequence[Any], delta: float, epsilons: Sequence[float] = ()) -> Answer:
  """Epsilon of all runs at `delta`, and delta at some epsilons."""
  entries = [entry for entry in entries if entry.steps]
  delta -= sum(getattr(entry, 'delta', 0.0) for entry in entries)
  found = [look(entry.plan, entry.steps, len(entries) > 1) for entry in entries]
  events = [one.event for one in found]
  if any(event is None for event in events):
    return Answer(None, 'dp_accounting has none for this sampling')
  exact = all(one.exact for one in found)
  relation = _relation(entries)
  if any(entry.plan.search is not None for entry in entries):
    accountant = rdp.RdpAccountant(neighboring_relation=relation)
    for event in events:
      accountant.compose(event)
    return Answer(float(accountant.get_epsilon(delta)), "dp_accounting's Renyi accountant", exact,
                  _SETTLED, tuple(float(accountant.get_delta(e)) for e in epsilons))
  try:
    return _by_losses(events, relation, delta, epsilons, exact)
  except (ArithmeticError, MemoryError):  # An epsilon of many thousands.
    return Answer(None, 'the losses are too large for its grids')


def _by_losses(
    events: List[Any], relation: Any, delta: float, epsilons: Sequence[float],
    exact: bool) -> Answer:
  """On finer and finer grids, each of which gives an upper bound, until they agree."""
  rough = rdp.RdpAccountant(neighboring_relation=_RELATION.ADD_OR_REMOVE_ONE)
  sigmas = [sigma for event in events for sigma in _multipliers(event)]
  known = all(map(rough.supports, events))  # Not truncated batches.
  for event in events * known:
    rough.compose(event)
  near = max(1e-6, float(rough.get_epsilon(delta))) if known else 1.0
  least = max([0.5 / sigma**2 + 10 / sigma for sigma in sigmas] + [1e-9]) / _MOST_POINTS
  grid, before, value = max(least, 2e-3 * near), math.inf, math.inf
  while True:
    accountant = pld.PLDAccountant(relation, value_discretization_interval=grid)
    for event in events:
      accountant.compose(event)
    before, value = value, float(accountant.get_epsilon(max(delta, SMALLEST_DELTA)))
    change = abs(before - value) / max(value, 1e-12)
    if change <= _SETTLED or grid <= least or value <= 0:
      break
    grid = max(least, grid / 8)
  return Answer(
      value, "dp_accounting's privacy loss distributions", exact and delta >= SMALLEST_DELTA,
      min(1.0, max(_SETTLED, 2 * change)), tuple(float(accountant.get_delta(e)) for e in epsilons))


def look(plan: terms_lib.Terms, steps: int, together: bool = False) -> Look:
  """The event of `steps` steps of a plan, and the sensitivity it rests on.

  Args:
    plan: The terms of the run.
    steps: How many; at least one.
    together: Whether it is one of several runs: what only draws account for is then counted
      without amplification.
  """
  kind, mechanism = type(plan.sampling).__name__, plan.mechanism
  sigma = float(plan.noise_multiplier)
  rounding = 1 + (mechanism.rounding or 0)
  sampled = _sampled(plan, steps)
  draws = getattr(plan.sampling, 'draws', 0)
  if sampled is not None:
    norm = rounding * float(np.linalg.norm(_column(mechanism, steps)))
    noise = sigma / norm * (2 if plan.adjacency == 'replace' else 1)
    q, count = sampled
    step = dp_accounting.GaussianDpEvent(noise)
    if kind == 'TruncatedPoisson':
      step = dp_accounting.TruncatedSubsampledGaussianDpEvent(
          plan.population_size, q, plan.sampling.max_batch_size, noise)
    elif q < 1:
      step = dp_accounting.PoissonSampledDpEvent(q, step)
    event, norm_found = dp_accounting.SelfComposedDpEvent(step, count), norm
  elif draws and not together or (  # Secret bins, with an exact account of this library.
      kind == 'BallsInBins' and draws != 0 and mechanism.bands == 1
      and plan.adjacency != 'replace'):
    return Look(None, None)
  elif kind in _APART:
    size = pattern_sensitivity(mechanism, steps, _APART[kind](plan))
    if size is None:
      return Look(None, None)
    size *= rounding
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
  return Look(event, norm_found, mechanism.rounding is None)


# Sampling -> the least distance of two participations of a record.
_APART = {
    'Poisson': lambda plan: 1,
    'TruncatedPoisson': lambda plan: 1,
    'CyclicPoisson': lambda plan: plan.sampling.cycle,
    'BallsInBins': lambda plan: plan.sampling.cycle,
    'MinSeparation': lambda plan: plan.sampling.min_sep,
    'FixedOrder': lambda plan: -(-plan.population_size // int(plan.batch_size)),
}


def _sampled(plan: terms_lib.Terms, steps: int) -> Optional[Tuple[float, int]]:
  """(q, count) of the Poisson-sampled Gaussians; None where nothing may be amplified."""
  kind, bands = type(plan.sampling).__name__, plan.mechanism.bands
  size: Any = plan.population_size
  if kind in ('Poisson', 'TruncatedPoisson') and bands == 1:
    q = plan.sampling.sampling_probability
    return (plan.batch_size / size if q is None else q), steps
  if kind == 'CyclicPoisson' and bands is not None and bands <= plan.sampling.cycle and (
      plan.adjacency != 'replace'):
    cycle = plan.sampling.cycle
    return plan.batch_size * cycle / size, -(-steps // cycle)
  return None


def pattern_sensitivity(mechanism: Any, steps: int, apart: int) -> Optional[float]:
  """The largest ||C x|| of participations exactly `apart` steps apart, of equal or changing sign.

  Returns:
    A number that is never above the sensitivity; None if C has too many rows.
  """
  if mechanism.bands == 1:
    return math.sqrt(-(-steps // apart))
  if mechanism.steps is not None and steps > mechanism.steps:
    return None
  if not hasattr(mechanism, 'noising') or steps > _MOST_ROWS << 6:
    return None
  strategy = None if type(mechanism).__name__ in ('Dense', 'Banded', 'Tree') and (
      steps > _MOST_ROWS) else np.asarray(mechanism.strategy(steps))
  if strategy is None:
    return None
  largest = 0.0
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


def _column(mechanism: Any, steps: int) -> np.ndarray:
  """Of C, the one of largest norm; it is banded here."""
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
  """Zero-out has the losses of add-or-remove for (sampled) Gaussians, not for truncated batches."""
  if plan.adjacency == 'replace' and _sampled(plan, 1) is not None:
    return _RELATION.REPLACE_ONE
  if plan.adjacency == 'zero_out' and type(plan.sampling).__name__ == 'TruncatedPoisson' and (
      plan.mechanism.bands == 1):
    return _RELATION.REPLACE_SPECIAL
  return _RELATION.ADD_OR_REMOVE_ONE


def _multipliers(event: Any) -> List[float]:
  inside = getattr(event, 'events', None) or [getattr(event, 'event', None)]
  own = [event.noise_multiplier] if hasattr(event, 'noise_multiplier') else []
  return own + [sigma for part in inside if part is not None for sigma in _multipliers(part)]
