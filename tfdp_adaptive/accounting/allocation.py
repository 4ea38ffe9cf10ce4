# SPDX-License-Identifier: Apache-2.0
"""The exact privacy loss of a record that is in one secret batch of several (random allocation).

The record falls into bin j with probability 1/b, which moves that bin's sum by s_j. With
independent noise sigma and m_j = s_j / sigma, the pair P = mean_j N(m_j e_j, I), Q = N(0, I)
dominates vectors and adaptive steps (Feldman and Shenfeld, arXiv 2502.08202 and 2602.17284), and

    R = dP/dQ = mean_j X_j,     X_j = exp(m_j z_j - m_j^2 / 2),  z_j normal and independent under Q.

Both directions are means of convex functions of R under Q:

    delta(P||Q) = E(R - e^epsilon)_+          delta(Q||P) = E(1 - e^epsilon R)_+

so whatever spreads X_j without moving its mean only adds to delta, and so do sums of spread
numbers: convex order is kept by independent sums. Upper bounds move each mass to its two neighbours
on a grid, with the mean kept; lower bounds collect the masses of a cell at their mean. Sums of b
numbers take about 2 log2(b) such steps. All terms are positive: errors of rounding are relative to
every single mass, however small, and there is no draw and no Fourier transform.
"""

import dataclasses
import functools
import math
from typing import ClassVar, List, NamedTuple, Sequence, Tuple

import dp_accounting
import numpy as np
from scipy import fft
from scipy import special

_CHUNK = 1 << 18


class Ratio(NamedTuple):
  """The distribution of R = dP/dQ under Q.

  Attributes:
    points: [n] values of R, ascending, the first may be 0.
    mass: [n] of Q.
    infinite: Mass of P where Q has none.
  """

  points: np.ndarray
  mass: np.ndarray
  infinite: float = 0.0


class Precision(NamedTuple):
  """How R is rounded.

  Attributes:
    reach: -log of the mass of P and of Q that may be left out at either end, in each sum.
    bulk: Step of the grid near the middle of a sum, in widths of its distribution.
    tail: Step of the grid elsewhere, in standard deviations of one normal.
    upper: Whether delta is bounded from above, else from below.
  """

  reach: float
  bulk: float = 0.025
  tail: float = 0.015
  upper: bool = True


@dataclasses.dataclass(frozen=True)
class AllocationDpEvent(dp_accounting.DpEvent):
  """A record falls into one of some bins, each as likely, and noise hides which.

  Attributes:
    noise_multiplier: sigma.
    bins: `(how many, sensitivity)` of bins that are alike; 0 for those no step used so far.
  """

  noise_multiplier: float
  bins: Tuple[Tuple[int, float], ...]

  def ratio(self, precision: Precision) -> Ratio:
    """Returns the distribution of dP/dQ."""
    return _mean(tuple((count, size / self.noise_multiplier) for count, size in self.bins if count),
                 precision)

  most_shift: ClassVar[float] = 10.0  # An epsilon beyond 50.

  @property
  def largest_shift(self) -> float:
    """The shift of the largest bin, in standard deviations."""
    return max(size for count, size in self.bins if count) / self.noise_multiplier

  @property
  def unamplified(self) -> dp_accounting.DpEvent:
    """The Gaussian of a record whose bin is known."""
    return dp_accounting.GaussianDpEvent(1 / self.largest_shift)


def correlated(coefficients: Sequence[float], steps: int, cycle: int,
               noise_multiplier: float) -> List[dp_accounting.DpEvent]:
  """Returns events each of which costs at least as much as secret bins with a Toeplitz C >= 0.

  Bin j stands for steps j, j + b, ..., and moves the releases by m_j = C x_j / sigma: R is a mean
  of exp(<m_j, z> - |m_j|^2 / 2). A mean of a convex function of R grows with every inner product
  <m_j, m_k> (Kahane, 1986), so these may be raised to one number g of all pairs: R is then that of
  one Gaussian of size sqrt(g), times that of an allocation of independent noise whose bins have
  size sqrt(|m_j|^2 - g). Before that, the remainder of the bin modulo a spacing s may be told,
  which only adds to delta too: only b / s bins are left, and g falls to the largest product of
  bins that are a multiple of s apart; for C with p bands, g = 0 at s = p.

  Args:
    coefficients: The coefficients of C, >= 0.
    steps: How many releases.
    cycle: Number b of bins.
    noise_multiplier: sigma.

  Returns:
    An event for each of some spacings, from the widest, which is that of a known bin. Trying all
    spacings would mostly gain less than a percent.
  """
  column = tuple(np.trim_zeros(np.array(coefficients[:steps]), 'b').tolist())
  products, least = _products(column, steps, cycle)
  known: dp_accounting.DpEvent = dp_accounting.GaussianDpEvent(
      noise_multiplier / math.sqrt(products[0]))
  events = [known]
  spacings = {cycle >> i for i in range(1, cycle.bit_length())} | {min(cycle, len(column))}
  for spacing in sorted(spacings - {cycle}, reverse=True):
    count, common = cycle // spacing, float(np.max(products[spacing::spacing], initial=0.0))
    more = min(count, -(-(steps % cycle) // spacing))  # Bins that are used once more.
    one = AllocationDpEvent(noise_multiplier, tuple(
        (number, math.sqrt(max(0.0, square - common)))
        for number, square in ((more, float(products[0])), (count - more, least))))
    events.append(one if not common else dp_accounting.ComposedDpEvent(
        (one, dp_accounting.GaussianDpEvent(noise_multiplier / math.sqrt(common)))))
  return events


@functools.lru_cache(maxsize=32)
def _products(
    column: Tuple[float, ...], steps: int, cycle: int) -> Tuple[np.ndarray, float]:
  """Returns `([b], least)`: largest inner products of bins by distance; the least square."""
  moved = np.zeros(steps)  # C x_0; that of another bin is the same, later and cut.
  for start in range(0, steps, cycle):
    length = min(len(column), steps - start)
    moved[start:start + length] += column[:length]
  spectrum = fft.rfft(moved, fft.next_fast_len(2 * steps))
  products = np.zeros(cycle)
  lags = min(cycle, steps)
  products[:lags] = fft.irfft(
      np.abs(spectrum)**2, fft.next_fast_len(2 * steps))[:lags] + 1e-11 * (moved @ moved)
  products[len(column):max(len(column), cycle - len(column) + 1)] = 0.0
  last = moved[:steps - steps % cycle]  # First bin that is used once less.
  return products, float(last @ last) * (1 + 1e-11)


@functools.lru_cache(maxsize=32)
def _mean(groups: Tuple[Tuple[int, float], ...], precision: Precision) -> Ratio:
  """Returns the distribution of the mean of all X_j: `(count, m)` of those that are alike."""
  total = sum(count for count, _ in groups)
  constant = sum(count for count, shift in groups if not shift)
  step = precision.tail * min((shift for _, shift in groups if shift), default=1.0)
  ratio = None
  for count, shift in groups:
    if shift:
      more = _power(lognormal(shift, precision), count, step, precision)
      ratio = more if ratio is None else _sum(ratio, more, step, precision)
  if ratio is None:
    return Ratio(np.ones(1), np.ones(1))
  points, infinite = (ratio.points + constant) / total, ratio.infinite / total
  if precision.upper:  # Restores what rounding took of the mean, some 1e-12.
    points = points * max(1.0, (1 - infinite) / float(points @ ratio.mass))
  return Ratio(points, ratio.mass, infinite)


def lognormal(shift: float, precision: Precision) -> Ratio:
  """Returns the distribution of one X_j."""
  size = math.sqrt(2 * precision.reach)
  z = np.linspace(-size, size + shift, 2 + math.ceil((2 * size + shift) / precision.tail))
  edges = np.concatenate([[-np.inf], z, [np.inf]])
  grid = np.concatenate([[0.0], np.exp(shift * z - shift**2 / 2)])
  return rounded(grid, normal_cells(edges), normal_cells(edges - shift), 0.0, precision)


def normal_cells(edges: np.ndarray) -> np.ndarray:
  """Returns the normal masses between edges, with small relative errors."""
  low, high = edges[:-1], edges[1:]
  turned = low > 0
  low, high = np.where(turned, -high, low), np.where(turned, -low, high)
  return np.maximum(special.ndtr(high) - special.ndtr(low), 0.0)


def _power(ratio: Ratio, count: int, step: float, precision: Precision) -> Ratio:
  """Returns the distribution of a sum of `count` independent numbers."""
  result = None
  while True:
    if count & 1:
      result = ratio if result is None else _sum(result, ratio, step, precision)
    count >>= 1
    if not count:
      assert result is not None
      return result
    ratio = _sum(ratio, ratio, step, precision)


def _sum(one: Ratio, two: Ratio, step: float, precision: Precision) -> Ratio:
  """Returns the distribution of the sum of two independent numbers, on a grid of its own."""
  grid = _grid(one, two, step, precision)
  mass, first = np.zeros(len(grid)), np.zeros(len(grid))
  rows = max(1, _CHUNK // len(two.points))
  for begin in range(0, len(one.points), rows):
    block = slice(begin, begin + rows)
    factor = two.mass
    left = 0
    if one is two:  # The pairs below the diagonal are those above it, mirrored.
      left, factor = begin, np.where(np.arange(len(two.mass)) < begin + rows, 1, 2) * two.mass
    sums = (one.points[block, None] + two.points[left:]).ravel()
    masses = (one.mass[block, None] * factor[left:]).ravel()
    cell = np.searchsorted(grid, sums, 'right') - 1
    mass += np.bincount(cell, masses, len(grid))
    first += np.bincount(cell, masses * sums, len(grid))
  infinite = one.infinite + two.infinite
  return _trimmed(rounded(grid, mass, first, infinite, precision), precision)


def _grid(one: Ratio, two: Ratio, step: float, precision: Precision) -> np.ndarray:
  """Returns 0, then a grid of log sums: at most `step` apart, finer near the middle."""
  (low, middle, high), (low_, middle_, high_) = _quantiles(one), _quantiles(two)
  middle += middle_
  width = max(math.hypot(high - low, high_ - low_) / 2 / middle, 1e-9)
  start = math.log(sum(ratio.points[ratio.points > 0][0] for ratio in (one, two)) / middle)
  stop = math.log((one.points[-1] + two.points[-1]) / middle)
  bent = np.arange(math.asinh(start / width), math.asinh(stop / width), precision.bulk)
  points = np.sort(np.concatenate([width * np.sinh(bent), np.arange(start, stop, step)]))
  points = points[(points > start) & (points < stop)]
  points = points[np.diff(points, prepend=start) > 1e-3 * precision.bulk * width]
  # Values that one of two numbers alone can take lie below: they go to 0 and to the first point.
  points = np.concatenate([[start - 1e-9], points, [stop + 1e-9]])
  return np.concatenate([[0.0], middle * np.exp(points)])


def _quantiles(ratio: Ratio) -> np.ndarray:
  at = np.searchsorted(np.cumsum(ratio.mass), np.array([0.16, 0.5, 0.84]) * ratio.mass.sum())
  return ratio.points[np.minimum(at, len(ratio.points) - 1)]


def rounded(
    grid: np.ndarray, mass: np.ndarray, first: np.ndarray, infinite: float, precision: Precision
    ) -> Ratio:
  """Returns the distribution of numbers whose mass and first moment in each cell are given.

  Cell i is above `grid[i]`; the last one has no end.
  """
  if not precision.upper:
    kept = (mass > 0) & (first > 0)
    return Ratio(first[kept] / mass[kept], mass[kept])
  over = np.maximum(first - mass * grid, 0.0)
  width = np.diff(grid)  # 0 where rounding has made points one: all is at its place then.
  moved = np.minimum(over[:-1] / np.where(width > 0, width, np.inf), mass[:-1])
  return Ratio(grid, mass - np.append(moved, 0.0) + np.append(0.0, moved),
               infinite + float(over[-1]))


def _trimmed(ratio: Ratio, precision: Precision) -> Ratio:
  """Moves points of negligible mass at the ends to 0 and to infinity."""
  if not precision.upper:
    return ratio
  points, mass, infinite = ratio
  least, moment = math.exp(-precision.reach), mass * points
  above = np.cumsum(moment[::-1])[::-1] > least * moment.sum()  # Points of P to keep.
  end = max(3, int(above.sum()))
  start = int(np.clip(np.searchsorted(np.cumsum(mass), least), 1, end - 2))
  kept = mass[start:end].copy()
  top = float(mass[end:].sum())
  kept[-1] += top
  infinite += max(0.0, float(moment[end:].sum()) - top * points[end - 1])
  bottom = float(mass[:start].sum())
  up = min(bottom, float(moment[:start].sum()) / points[start])
  kept[0] += up
  return Ratio(np.append(0.0, points[start:end]), np.append(bottom - up, kept), infinite)
