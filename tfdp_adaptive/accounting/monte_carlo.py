# SPDX-License-Identifier: Apache-2.0
"""Upper bounds of delta, from draws of the privacy loss, where no exact account is known.

A record takes part in a secret pattern x of steps, so all releases together are a
mixture P of N(C x, sigma^2 I), and Q = N(0, sigma^2 I) without it. For C >= 0 this
dominates vectors and adaptive releases. With L = log P/Q,

    delta(epsilon) = max(E_P(1 - e^(epsilon - L))_+, E_Q(1 - e^(epsilon + L))_+)

is a mean of numbers in [0, 1]. What is reported is never the mean of n draws but the
delta that would give one so small with probability `beta` only (Chernoff, by relative
entropy). Numbers that are asked for are chosen on other draws than those that bound
them. Draws come from a public seed that depends on what is asked.
"""

import dataclasses
import functools
import hashlib
import math
from typing import Callable, Optional, Tuple

import dp_accounting
import numpy as np
from scipy import optimize
from scipy import special

from tfdp_adaptive import mechanisms

BETA = 1e-6  # Probability that a number reported of one event, or of its calibration, is too small.
_NUMBERS, _TRIES = 16, 12  # How many that may be: of one event, and events of one calibration.
_MARGINS = (1.003, 1.01, 1.03, 1.1)  # Over what the search finds, tried in this order.
_SEARCH = 8  # Draws of a search for the noise are this part.
_CHUNK = 1 << 21  # Numbers in memory at once.
_DTYPES = ('float64', 'float32')


@functools.lru_cache(maxsize=64)
def coefficients(
    mechanism: mechanisms.Mechanism, steps: Optional[int] = None) -> Optional[Tuple[float, ...]]:
  """Returns the coefficients of a Toeplitz C >= 0, in the larger precision; None for any other C.

  Args:
    mechanism: A `Mechanism`.
    steps: How many of them; all steps by default.
  """
  steps = mechanism.steps or 1 if steps is None else steps
  try:
    strategies = [np.asarray(mechanism.rounded(dtype).strategy(steps)) for dtype in _DTYPES]
  except ValueError:  # It is no Toeplitz matrix, and too large to be written out.
    return None
  if any(c.ndim != 1 or np.any(c < 0) for c in strategies):
    return None
  return tuple(np.maximum(*strategies).tolist())


@dataclasses.dataclass(frozen=True)
class MonteCarloDpEvent(dp_accounting.DpEvent):
  """A Toeplitz strategy with secret patterns of participation.

  Attributes:
    coefficients: The nonzero coefficients of C.
    steps: How many releases.
    noise_multiplier: sigma.
    draws: The random draws of the privacy loss.
    bound: An event that costs at least as much, and is accounted for without draws.
  """

  coefficients: Tuple[float, ...] = dataclasses.field(repr=False)
  steps: int
  noise_multiplier: float
  draws: int
  bound: dp_accounting.DpEvent = dataclasses.field(repr=False)

  def losses(self, rng: np.random.Generator, draws: int, present: bool) -> np.ndarray:
    """Returns [draws] of L, under P if `present`, else under Q."""
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class BallsInBinsDpEvent(MonteCarloDpEvent):
  """Every record is in one of `cycle` random bins. Step t uses bin t mod `cycle`."""

  cycle: int

  @functools.cached_property
  def _root(self) -> np.ndarray:
    """[k, cycle] R with R^T R the Gram matrix of C x_j / sigma over the bins j."""
    bins, column = np.zeros((self.steps, self.cycle)), np.array(self.coefficients)
    for step in range(self.steps):
      length = min(len(column), self.steps - step)
      bins[step:step + length, step % self.cycle] += column[:length]
    bins = bins[:, :min(self.steps, self.cycle)] / self.noise_multiplier
    return np.array(np.linalg.qr(bins, mode='r'))

  def losses(self, rng: np.random.Generator, draws: int, present: bool) -> np.ndarray:
    root = self._root
    empty = self.cycle - root.shape[1]  # Bins that no step used so far.
    half = np.sum(root**2, axis=0) / 2
    losses, size = [], max(1, _CHUNK // self.cycle)
    for begin in range(0, draws, size):
      z = rng.standard_normal((min(size, draws - begin), len(root)))
      if present:
        bins = rng.integers(self.cycle, size=len(z))
        z[bins < root.shape[1]] += root.T[bins[bins < root.shape[1]]]
      log_ratio = z @ root - half
      losses.append(np.logaddexp(special.logsumexp(log_ratio, axis=1),
                                 math.log(empty) if empty else -math.inf) - math.log(self.cycle))
    return np.concatenate(losses)


@dataclasses.dataclass(frozen=True)
class MinSeparationDpEvent(MonteCarloDpEvent):
  """A record takes part with `probability` unless it did in the last `min_sep - 1` steps."""

  min_sep: int
  probability: float

  def losses(self, rng: np.random.Generator, draws: int, present: bool) -> np.ndarray:
    size = max(1, _CHUNK // self.steps)
    return np.concatenate([
        self._chunk(rng, min(size, draws - begin), present) for begin in range(0, draws, size)])

  def _chunk(self, rng: np.random.Generator, draws: int, present: bool) -> np.ndarray:
    c = np.array(self.coefficients)[:self.steps] / self.noise_multiplier
    steps, b, p = self.steps, self.min_sep, self.probability
    y = rng.standard_normal((steps, draws))
    if present:
      pattern = self._pattern(rng, draws)
      for lag, value in enumerate(c):
        y[lag:] += value * pattern[:steps - lag]
    log_stay, log_go = math.log1p(-p) if p < 1 else -math.inf, math.log(p)
    after = np.zeros((b, draws))  # l of the next b steps, that of step i at i mod b.
    for i in reversed(range(steps)):
      column = c[:steps - i]
      score = column @ y[i:i + len(column)] - column @ column / 2
      after[i % b] = np.logaddexp(log_stay + after[(i + 1) % b], log_go + score + after[i % b])
    # Stationary: free at step 0, or from step 1, ..., b - 1 on.
    waiting = np.concatenate([after[:1], log_go + after[1:]])
    return special.logsumexp(waiting, axis=0) - math.log1p((b - 1) * p)

  def _pattern(self, rng: np.random.Generator, draws: int) -> np.ndarray:
    b, p = self.min_sep, self.probability
    pattern = np.zeros((self.steps, draws), bool)
    blocked = np.ceil((rng.random(draws) * (1 + (b - 1) * p) - 1) / p).clip(0, b - 1)
    at = blocked.astype(np.int64) + rng.geometric(p, draws) - 1
    while True:
      inside = np.flatnonzero(at < self.steps)
      if not len(inside):
        return pattern
      pattern[at[inside], inside] = True
      at[inside] += b - 1 + rng.geometric(p, len(inside))


def delta(event: MonteCarloDpEvent, epsilon: float) -> float:
  """Returns an upper bound of delta at `epsilon`, unless the draws were unlucky (`BETA`)."""
  return _bounded(event, epsilon, 'verify', event.draws)


def epsilon(event: MonteCarloDpEvent, target_delta: float, most: float) -> float:
  """Returns an upper bound of epsilon at `target_delta`, unless the draws were unlucky (`BETA`).

  Args:
    event: The event to draw from.
    target_delta: The delta of the epsilon.
    most: Epsilon of `event.bound`, which is returned if the draws prove no smaller one.
  """
  gap = lambda value: _bounded(event, value, 'search', event.draws) - target_delta
  if most == math.inf or gap(most) > 0:
    return most
  estimate = 0.0 if gap(0.0) <= 0 else optimize.brentq(gap, 0.0, most, xtol=1e-6, rtol=1e-6)
  for margin in _MARGINS:
    tried = max(margin * estimate, 1e-6)
    if tried < most and _bounded(event, tried, 'verify', event.draws) <= target_delta:
      return tried
  return most


def calibrate(
    event_of: Callable[[float], MonteCarloDpEvent],
    epsilon_of: Callable[[MonteCarloDpEvent], float], target_epsilon: float, target_delta: float,
    whole: float) -> float:
  """Returns the smallest noise multiplier for a target that the draws can prove.

  Args:
    event_of: `noise_multiplier -> MonteCarloDpEvent`.
    epsilon_of: `event -> epsilon` at `target_delta`, of the event or its bound.
    target_epsilon: The target, which is never exceeded.
    target_delta: The delta of the target.
    whole: The noise multiplier that meets the target by `event.bound`, without draws.
  """
  def gap(log_sigma: float) -> float:
    event = event_of(math.exp(log_sigma))
    reached = _bounded(event, target_epsilon, 'search', max(1, event.draws // _SEARCH),
                       _SEARCH)
    return math.log(reached) - math.log(target_delta)

  log_whole = math.log(whole)
  if gap(log_whole) > 0:
    return whole
  low = log_whole
  while gap(low) <= 0 and low > log_whole - 12:
    low -= 0.7
  log_sigma = optimize.brentq(gap, low, low + 0.7, xtol=1e-3) if low < log_whole else low
  for _ in range(_TRIES - 1):
    sigma = math.exp(log_sigma)
    achieved = epsilon_of(event_of(sigma))
    if achieved <= target_epsilon:
      return sigma
    log_sigma = min(log_whole, log_sigma + max(5e-3, min(0.3, math.log(achieved / target_epsilon))))
  return whole


def upper_delta(mean: float, draws: int, beta: float) -> float:
  """Returns the largest delta of which so small a mean of [0, 1] draws has probability `beta`."""
  wanted = math.log(1 / beta) / draws
  if mean >= 1:
    return 1.0
  entropy = lambda d: float(special.rel_entr(mean, d) + special.rel_entr(1 - mean, 1 - d)) - wanted
  if entropy(1 - 1e-16) <= 0:
    return 1.0
  return optimize.brentq(entropy, max(mean, 1e-300), 1 - 1e-16, xtol=1e-300, rtol=1e-12) * (
      1 + 1e-9)


def _bounded(event: MonteCarloDpEvent, target_epsilon: float, purpose: str, draws: int,
             pretended: int = 1) -> float:
  """Returns the larger bound of both directions. Draws of a search count `pretended` times."""
  beta = BETA / (2 * _NUMBERS * _TRIES)
  means = _means(_losses(event, purpose, draws), target_epsilon)
  return max(upper_delta(mean, draws * pretended, beta) for mean in means)


def _means(losses: Tuple[np.ndarray, ...], target_epsilon: float) -> Tuple[float, float]:
  present, absent = losses
  # The losses of the draws are rounded by at most this much.
  epsilon_ = target_epsilon - 1e-9 * (1 + target_epsilon)
  over = lambda gap: float(np.mean(-np.expm1(np.minimum(gap, 0.0))))
  return over(epsilon_ - present), over(epsilon_ + absent)


@functools.lru_cache(maxsize=4)
def _losses(event: MonteCarloDpEvent, purpose: str, draws: int) -> Tuple[np.ndarray, ...]:
  """Draws under P and Q. A search reuses the draws for every noise multiplier."""
  same = dataclasses.replace(event, noise_multiplier=1.0) if purpose == 'search' else event
  text = repr((purpose, same, same.coefficients))
  seed = int.from_bytes(hashlib.sha256(text.encode()).digest(), 'big')
  return tuple(event.losses(np.random.default_rng([seed, present]), draws, bool(present))
               for present in (1, 0))
