# SPDX-License-Identifier: Apache-2.0
"""Upper bounds of epsilon and delta of composed steps, at any delta.

The loss S of all steps is a sum. Its distribution is weighted by `exp(theta S - K)`, where K is
its log moment generating function at theta, and theta comes from Chernoff's bound. The
weighted distribution is centred at the losses that decide delta. So the rounding errors of the
transform are relative to delta, however small it is. In

    delta(epsilon) = exp(K - theta epsilon) E_theta[exp(-theta u) (1 - exp(-u))_+],  u = S - epsilon

every part errs upwards:
  * One step's loss is spread to its two neighbours on a grid so that both P and
    Q keep their mass (Doroshenko et al., arXiv 2207.04380), which only adds to
    every divergence. What lies beyond the grid above counts as a loss without
    bound, what lies below it as the lowest loss there is.
  * Sums wrap around a window; what Chernoff's bound leaves outside is added.
  * Rounding: a fast Fourier transform errs by at most three units per level of
    the sum of what it transforms in every entry, and powers by `count` times
    that; what this may change in delta, by the largest error of an entry or by
    their sum of squares, is added, and if it is much, numbers are taken longer.
    Losses, moments and masses are off by some units per step, which is added in
    epsilon and delta.

With tens of millions of steps that sample 1e-5 of the records, the window is so wide beside one
step's losses that its grid has to be longer than elsewhere; an epsilon then takes 10 to 30 seconds.
It is less than 1% above the truth wherever this was compared.
"""

import math
from typing import Any, Callable, NamedTuple, Sequence, Tuple

import numpy as np
import numpy.typing as npt
from scipy import fft
from scipy import optimize
from scipy import special

from tfdp_adaptive.accounting import losses

_UNIT = np.finfo(np.float64).eps
_ROUNDING = 1e-13  # Relative error of one step's masses and moments.
_FAR = losses.FAR
_OUTSIDE = 30.0  # -log of the (weighted) mass left outside the window, per side.
_LARGEST = 2**22  # Entries of a window, and of one step's grid.
_FINEST = 2**24  # The same for an epsilon, where the grid is coarse; seconds each.
_COARSE = 16.0  # Ratio to the interval that would do: some tenths of a percent of epsilon.
_MARGIN = 12.0  # -log of the fraction of delta that the largest losses may have.
_PASSES = 4
_ROUNDED = 1e-3  # Fraction of delta that rounding may take before longer numbers are used.


class _Step(NamedTuple):
  """Losses of one step and the logarithms of their masses."""

  count: int  # type: ignore[assignment]  # Not `tuple.count`.
  loss: np.ndarray
  log_mass: np.ndarray
  beyond: float  # Mass of larger losses.
  exponent: float  # See `losses.Pair`.


class Composition:
  """The composed losses of all steps in one direction.

  Args:
    steps: `(mixture, count)` pairs of `losses.directions`.
    reach: -log of the mass of a step's losses on either side that are not composed: the
      largest count as losses without bound, the others as the lowest one.
  """

  def __init__(self, steps: losses.Steps, reach: float = _FAR) -> None:
    self._given, self._reach = steps, min(reach, _FAR)
    self._steps = [_one_step(mixture, count, self._reach) for mixture, count in steps]
    self._count = sum(step.count for step in self._steps)
    self._beyond = sum(step.count * (step.beyond + 2 * math.exp(-_FAR)) for step in self._steps)

  def _within(self, log_delta: float) -> 'Composition':
    """Returns a copy without losses of negligible mass compared with `delta`.

    Where few records are sampled these decide the moments, and nothing else: Chernoff's
    bound, weights and window would be made for them.
    """
    reach = _MARGIN - log_delta + math.log(self._count)
    return self if reach >= self._reach else Composition(self._given, reach)

  def _moment(self, theta: npt.ArrayLike) -> np.ndarray:
    """Returns K at every theta, an array."""
    theta = np.atleast_1d(theta)
    moments = [step.count * np.array([
        special.logsumexp(step.log_mass + t * step.loss) for t in theta])
               for step in self._steps]
    return np.asarray(sum(moments))

  def _least(self, objective: Callable[[Any, Any], Any]) -> Tuple[float, float]:
    """Returns the theta > 0 of the least value of a function of (theta, K + correction)."""
    def of(log_theta: npt.ArrayLike) -> Any:
      theta = np.exp(np.atleast_1d(log_theta))
      return objective(theta, self._moment(theta) + _log_peak(theta))

    grid = np.linspace(math.log(1e-4), math.log(1e15), 80)
    values = of(grid)
    best = int(np.nanargmin(values))
    low, high = grid[max(0, best - 1)], grid[min(len(grid) - 1, best + 1)]
    result = optimize.minimize_scalar(
        lambda t: float(of(t)[0]), bounds=(low, high), method='bounded',
        options=dict(xatol=1e-3))
    value, log_theta = min((float(result.fun), float(result.x)), (float(values[best]), grid[best]))
    return math.exp(log_theta), value

  def chernoff_epsilon(self, delta: float) -> Tuple[float, float]:
    """Returns `(theta, epsilon)` of the best moment bound; within about a tenth of the truth."""
    log_delta = math.log(delta - self._beyond)
    return self._least(lambda theta, log_moment: (log_moment - log_delta) / theta)

  def chernoff_log_delta(self, epsilon: float) -> Tuple[float, float]:
    """Returns `(theta, log(delta))` of the best moment bound."""
    theta, value = self._least(lambda theta, log_moment: log_moment - theta * epsilon)
    return theta, float(np.logaddexp(value, math.log(self._beyond)))

  def epsilon(self, delta: float, tolerance: float) -> float:
    """Returns an upper bound of epsilon at `delta`."""
    log_delta = math.log(delta)
    within = self._within(log_delta)
    theta, bound = within.chernoff_epsilon(delta)
    widest, number, largest = math.inf, np.float64, _LARGEST
    for _ in range(_PASSES):
      if bound <= 0:
        return 0.0
      weighted = within._weighted(theta, tolerance * theta * bound, widest, number, largest)
      gap = lambda epsilon: weighted.log_delta(epsilon) - log_delta  # pylint: disable=cell-var-from-loop
      if gap(bound) > 0:
        return bound
      if gap(0.0) <= 0:
        return 0.0
      before, bound = bound, min(bound, (1 + 2e-9) * optimize.brentq(
          gap, 0.0, bound, xtol=1e-9 * bound, rtol=1e-11))
      # Where Chernoff's bound is far off, theta and the grid were chosen for another epsilon.
      fits = bound > 0.5 * before and weighted.interval < bound / 50 or weighted.interval >= widest
      rounded = weighted.rounding > _ROUNDED and number is np.float64
      coarse = weighted.coarse and largest < _FINEST
      if fits and not rounded and not coarse:
        return bound
      largest = 2 * largest if coarse else largest
      number = np.longdouble if rounded else number
      theta, widest = within.chernoff_log_delta(bound)[0], bound / 500
    return bound

  def log_delta(self, epsilon: float, tolerance: float) -> float:
    """Returns an upper bound of the logarithm of delta at `epsilon`."""
    bound, last, within = min(0.0, self.chernoff_log_delta(epsilon)[1]), math.inf, self
    while bound < last - 1:  # Until what was left out is nothing beside what there is.
      last, within = bound, self._within(bound)
      theta, bound = within.chernoff_log_delta(epsilon)
    bound = min(bound, last)
    for number in (np.float64, np.longdouble):
      weighted = within._weighted(
          theta, tolerance, epsilon / 500 if epsilon else math.inf, number, _LARGEST)
      bound = min(0.0, bound, weighted.log_delta(epsilon))
      if weighted.rounding <= _ROUNDED:
        break
    return bound

  def _weighted(
      self, theta: float, excess: float, widest: float, number: type, largest: int) -> '_Weighted':
    """Returns the weighted distribution of S, on a grid that adds at most `excess` to K.

    The grid is coarser where a window of `largest` entries asks for it.
    """
    low, high = self._window(theta)
    wanted = min(self._interval(theta, excess), widest)
    span = max(np.ptp(step.loss) for step in self._steps)
    interval = max(wanted, (high - low) / (largest - 4), span / largest)
    size = 1 << max(4, math.ceil(math.log2((high - low) / interval + 4)))
    return _Weighted(self._steps, theta, interval, math.floor(low / interval) - 1, size, number,
                     self._beyond, interval > _COARSE * wanted)

  def _window(self, theta: float) -> Tuple[float, float]:
    """Returns an interval with weighted mass `exp(-_OUTSIDE)` outside on each side."""
    moment = self._moment(theta)[0]
    s = np.geomspace(1e-4, 1e4, 49) / self._deviation(theta)
    up, down = self._moment(theta + s) - moment, self._moment(theta - s) - moment
    return np.max((-_OUTSIDE - down) / s), np.min((_OUTSIDE + up) / s)

  def _deviation(self, theta: float) -> float:
    variance = 0.0
    for step in self._steps:
      weight = special.softmax(step.log_mass + theta * step.loss)
      mean = weight @ step.loss
      variance += step.count * (weight @ (step.loss - mean)**2)
    return math.sqrt(max(variance, 1e-300))

  def _interval(self, theta: float, excess: float) -> float:
    """Returns the widest power of two as interval that adds at most `excess` to K, if any."""
    weights = [special.softmax(step.log_mass + theta * step.loss) for step in self._steps]

    def added(interval: float) -> float:
      total = 0.0
      for step, weight in zip(self._steps, weights):
        low = np.floor(step.loss / interval) * interval
        upper = losses.upper_fraction(step.loss - low, interval)
        with np.errstate(over='ignore'):
          gain = (1 - upper) * np.expm1(theta * (low - step.loss)) + upper * np.expm1(
              theta * (low + interval - step.loss))
        total += step.count * (weight @ gain)
      return total

    widest = 2.0**math.ceil(math.log2(self._deviation(theta)))
    return next((widest / 2**k for k in range(30) if added(widest / 2**k) <= excess), 0.0)


class _Weighted:
  """The weighted distribution of S on `interval * (first + [0, size))`."""

  def __init__(
      self, steps: Sequence[_Step], theta: float, interval: float, first: int, size: int,
      number: type, beyond: float, coarse: bool) -> None:
    self._theta, self.interval, self._first, self.coarse = theta, interval, first, coarse
    self._beyond, self._log_moment, self._shift = beyond, 0.0, 0.0
    spectrum: Any = None
    count = sum(step.count for step in steps)
    own = float(np.finfo(number).eps)
    unit = 3 * (math.log2(size) + 2) * own
    self._slack, self.rounding = count * _ROUNDING, 0.0
    bins = fft.rfftfreq(size)
    twice = np.where((bins > 0) & (bins < 0.5), 2.0, 1.0)  # Entries that stand for two.
    relative: np.ndarray = np.zeros(len(bins), number)
    for step in steps:
      mass, log_moment, off = _on_grid(step, theta, interval, size)
      self._log_moment += step.count * log_moment
      largest = float(np.abs(step.loss).max())
      self._shift += step.count * 16 * _UNIT * min(1.0, largest) * (1 + step.exponent)
      self._slack += step.count * off
      once = fft.rfft(mass.astype(number))
      size_once = np.maximum(np.abs(once), 1e-300)
      logarithm = np.log(np.where(np.abs(once) > 0, once, 1e-300))
      power = np.exp(step.count * logarithm)
      # (x + e)^n - x^n is at most n e (|x| + e)^(n - 1); relative to |x|^n where that is exact.
      relative += step.count * (
          np.log1p(unit / size_once) + 2 * own * (1 + np.abs(logarithm)))
      spectrum = power if spectrum is None else spectrum * power
    with np.errstate(over='ignore', invalid='ignore'):
      upper = np.abs(spectrum) * np.expm1(np.minimum(relative, 700))
    upper = np.where(np.isfinite(upper), np.minimum(upper, 2.0), 2.0)
    self._largest_error = float((twice * upper).sum()) / size
    self._error_norm = math.sqrt(float((twice * upper**2).sum()) / size)  # By Parseval's identity.
    self._last_error = unit * float((twice * np.abs(spectrum)).sum()) / size
    weighted = np.roll(fft.irfft(spectrum, size), -(first % size))
    self._weighted = np.maximum(weighted.astype(np.float64) * (1 + _UNIT), 0.0)
    self._outside = 2 * math.exp(-_OUTSIDE) * (1 + count * _ROUNDING)

  def log_delta(self, epsilon: float) -> float:
    theta, interval = self._theta, self.interval
    epsilon = epsilon - self._shift
    start = max(0, math.floor(epsilon / interval) + 1 - self._first)
    reach = max(0.0, self._first * interval - epsilon)
    stop = start + math.ceil((60 + theta * reach) / theta / interval) if (
        theta * interval < 60) else start + 60
    weighted = self._weighted[start:stop]
    above = (float(self._first + start) + np.arange(len(weighted))) * interval - epsilon
    weight = np.exp(-theta * above) * -np.expm1(-above)
    peak = math.exp(float(_log_peak(np.array([theta]))[0]))
    rounding = self._last_error * weight.sum() + min(
        self._largest_error * weight.sum(), self._error_norm * math.sqrt(weight @ weight))
    total = weighted @ weight + rounding + self._outside * peak + math.exp(-60)
    self.rounding = rounding / total
    log_weighted = (self._log_moment - theta * epsilon + math.log(total) + self._slack)
    return float(np.logaddexp(log_weighted, math.log(max(self._beyond, 1e-300))))


def _one_step(mixture: losses.Mixture, count: int, reach: float) -> _Step:
  atoms = [(loss, log_mass + math.log(weight)) for weight, (loss, log_mass) in (
      (weight, pair.atoms(reach)) for weight, pair in mixture)]
  loss, log_mass = map(np.concatenate, zip(*atoms))
  kept = log_mass > -_FAR
  return _Step(count, loss[kept], log_mass[kept],
               sum(weight * pair.beyond(reach) for weight, pair in mixture),
               max(pair.exponent(reach) for _, pair in mixture))


def _on_grid(
    step: _Step, theta: float, interval: float, size: int) -> Tuple[np.ndarray, float, float]:
  """Returns one step on the grid.

  Returns:
    Weighted masses modulo `size`, the logarithm of their sum before, and the largest
    relative error of a mass.
  """
  reference = special.logsumexp(step.log_mass + theta * step.loss)
  index = np.floor(step.loss / interval).astype(np.int64)
  lower = index * interval
  upper = losses.upper_fraction(step.loss - lower, interval)
  tilted = np.exp(step.log_mass + theta * lower - reference)
  result = np.bincount(index % size, tilted * (1 - upper), size) + np.bincount(
      (index + 1) % size, math.exp(min(700.0, theta * interval)) * tilted * upper, size)
  # Exponentials of large numbers, and sums of many, are off by as many units.
  exponents = float(np.max(40 + theta * interval - step.log_mass + theta * np.abs(lower)))
  total = result.sum()
  return (result / total, reference + math.log(total),
          2 * _UNIT * (exponents + abs(reference)))


def _log_peak(theta: np.ndarray) -> Any:
  """Returns the maximum of exp(-theta u) (1 - exp(-u))."""
  return theta * np.log(theta) - (1 + theta) * np.log1p(theta)
