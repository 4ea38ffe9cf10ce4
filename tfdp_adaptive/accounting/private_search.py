# SPDX-License-Identifier: Apache-2.0
"""A search that releases only the best run, with one epsilon for all runs.

This is Papernot and Steinke, arXiv 2110.03620. The number of runs is random and secret. Each run
draws its settings uniformly from a fixed grid. Only the run with the best score is released. The
cost then grows with the logarithm of the expected number of runs:

    truncated negative binomial (Theorem 2), of shape eta and parameter gamma:
      e'(l) = e(l) + (1 + eta) min_k [(1 - 1/k) e(k) + ln(1/gamma) / k] + ln E[K] / (l - 1)
    Poisson (Theorem 6):  e'(l) = e(l) + E[K] delta(l) + ln E[K] / (l - 1)

where e is the Renyi divergence of one run and its score. dp_accounting accounts for these as
`RepeatAndSelectDpEvent`. This module makes the event and draws the number of runs.
"""

import dataclasses
import math
import secrets
from typing import Optional

import dp_accounting
from dp_accounting import dp_event as dp_event_lib
import numpy as np
from scipy import optimize
from scipy import stats

from tfdp_adaptive import checks
from tfdp_adaptive.accounting import events

_LARGEST = 1e4  # Expected runs.
_EVEN = 100.0  # Shapes beyond are Poisson's.


@dataclasses.dataclass(frozen=True)
class Search:
  """The distribution of the number of runs, and the noise of their scores. A public constant.

  Attributes:
    runs: The expected number E[K] of runs, at least 1.
    shape: eta of the distribution: 0 logarithmic (cheapest, often a single run), 1 geometric, inf
      Poisson (most even and most expensive); other values give negative binomials. With Poisson
      there may be no run at all, and then nothing is released.
    score_noise: Standard deviation of the noise on a run's score, in records. The score is a sum
      over PRIVATE validation records, each of which adds between 0 and 1. None for scores that are
      computed on public data.
  """

  runs: float
  shape: float = 1.0
  score_noise: Optional[float] = 10.0

  def __post_init__(self) -> None:
    checks.require(checks.is_number(self.runs) and 1 <= self.runs <= _LARGEST,
                   f'be from 1 to {_LARGEST:g}: it is the expected number of runs', runs=self.runs)
    checks.require(
        checks.is_number(self.shape) and (0 <= self.shape <= _EVEN or self.shape == math.inf),
        f'be from 0 to {_EVEN:g}, or inf', shape=self.shape)
    if self.score_noise is not None:
      checks.positive(score_noise=self.score_noise)

  def event(self, run: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
    """Returns the event of the whole search, given the event of the training of one run."""
    if isinstance(run, (dp_accounting.NoOpDpEvent, dp_accounting.NonPrivateDpEvent)):
      return run
    if self.score_noise is not None:
      run = dp_accounting.ComposedDpEvent((run, dp_accounting.GaussianDpEvent(self.score_noise)))
    if self.runs == 1 and self.shape < math.inf:
      return run  # One run, for sure.
    return dp_event_lib.RepeatAndSelectDpEvent(run, float(self.runs), float(self.shape))

  def draw(self) -> int:
    """Draws a SECRET number of runs, from the operating system's entropy.

    It inverts the distribution function. A logarithmic number is drawn as a geometric number with a
    random parameter (Kemp, 1981). The guarantee does not cover publishing this number.
    """
    coin, other = (1 - secrets.SystemRandom().random() for _ in range(2))  # Both are in (0, 1].
    if self.shape == math.inf:
      return max(0, int(stats.poisson.isf(coin, self.runs)))
    if self.runs == 1:
      return 1
    gamma = halting(self.runs, self.shape)
    if not self.shape:
      return 1 + int(math.log(coin) / math.log(-math.expm1(other * math.log(gamma))))
    some = -math.expm1(self.shape * math.log(gamma))  # P(negative binomial > 0).
    return max(1, int(stats.nbinom.isf(coin * some, self.shape, gamma)))

  def describe(self) -> str:
    """Returns a paragraph of the privacy statement."""
    distribution = ('Poisson' if self.shape == math.inf else 'logarithmic' if not self.shape else
           'geometric' if self.shape == 1 else
           f'truncated negative binomial (shape {self.shape:g})')
    scored = ('on data that are taken to be public' if self.score_noise is None else
              'on private records, each adding between 0 and 1, with noise of standard deviation '
              f'{self.score_noise:g}, which is part of the guarantee')
    return (f'Selection: the best of a secret, random number of runs ({distribution}, '
            f'{self.runs:g} expected), each with settings drawn uniformly from a grid that was '
            f'fixed before, scored {scored}. Only the best run was released; the guarantee is of '
            'the whole selection (arXiv 2110.03620). How long it took tells of the number of runs '
            'and must stay secret, as must all of the other runs.')


def halting(mean: float, shape: float) -> float:
  """Returns gamma of the truncated negative binomial with this mean; see the module."""
  if shape == 1:
    return 1 / mean
  gap = lambda log_gamma: math.log(expected(math.exp(log_gamma), shape)) - math.log(mean)
  return math.exp(optimize.brentq(gap, math.log(1e-12 / mean), -1e-12, xtol=1e-14))


def expected(gamma: float, shape: float) -> float:
  """Returns the mean eta (1 - gamma) / (gamma (1 - gamma^eta))."""
  log_gamma = math.log(gamma)
  if not shape:
    return math.expm1(-log_gamma) / -log_gamma
  return shape * -math.expm1(log_gamma) / (gamma * -math.expm1(shape * log_gamma))


def selects(event: dp_accounting.DpEvent) -> bool:
  """Returns whether an event has a selection as a part; only Renyi divergences account for it."""
  kind = getattr(dp_event_lib, 'RepeatAndSelectDpEvent', ())
  return any(isinstance(part, kind) for part, _ in events.composed(event))


def noisy_score(values: np.ndarray, noise: Optional[float]) -> float:
  """Returns the mean of per-record scores, each clipped to [0, 1], with the noise of a `Search`."""
  values = np.asarray(values, np.float64)
  values = np.clip(np.where(np.isfinite(values), values, 0.0), 0.0, 1.0)
  total = float(np.sum(values))
  if noise is not None:
    total += noise * float(np.random.default_rng(secrets.randbits(256)).standard_normal())
  return total / len(values)
