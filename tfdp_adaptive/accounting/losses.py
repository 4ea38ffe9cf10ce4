# SPDX-License-Identifier: Apache-2.0
"""The privacy loss of one step, exactly: the pairs of distributions that dominate it.

A pair (P, Q) is described on the line of one standard normal z, such that `L(z) = log P/Q` grows
with z. With m = sensitivity over noise, sampling rate a and l = log(1 - a + a e^(m z - m^2 / 2)):

    remove   P = (1 - a) N(0, 1) + a N(m, 1),  Q = N(0, 1)                       L = l(z)
    add      P = N(0, 1),  Q = (1 - a) N(0, 1) + a N(-m, 1)                      L = -l(-z)
    replace  P = (1 - a) N(0, 1) + a N(m, 1),  Q = (1 - a) N(0, 1) + a N(-m, 1)  L = l(z) - l(-z)
"""

import math
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import dp_accounting
import numpy as np
from scipy import special
from scipy import stats

from tfdp_adaptive.accounting import allocation
from tfdp_adaptive.accounting import events
from tfdp_adaptive.accounting import user_examples

_RELATION = dp_accounting.NeighboringRelation
_CELL = 0.03  # Width of z over which four nodes integrate a normal density to 1e-13.
_NARROW = 3e-4  # Width over which two nodes do.
_NO_PRIVACY = 1e6  # A loss of one step from which on no bound is worth its cost.
FAR = 600.0  # -log of the mass that the first bounds leave out.
_CHUNK = 2**17
_REACHES = (40.0, 80.0, 160.0, 320.0)  # Reaches for which distributions are computed once.
_ROUGH = allocation.Precision(_REACHES[-1], bulk=0.12, tail=0.1)
_NODES = {count: np.polynomial.legendre.leggauss(count) for count in (2, 4)}


class Pair(NamedTuple):
  """A dominating pair, see the module."""

  kind: str
  probability: float  # a
  shift: float  # m

  def loss(self, z: np.ndarray) -> np.ndarray:
    if self.kind == 'remove':
      return self._one_sided(z)
    if self.kind == 'add':
      return -self._one_sided(-z)
    return self._one_sided(z) - self._one_sided(-z)

  def density(self, z: np.ndarray) -> np.ndarray:
    """Returns the density of P at z."""
    return self._of_p(lambda x: np.exp(-x**2 / 2) / np.sqrt(2 * np.pi), z)

  def above(self, z: np.ndarray) -> np.ndarray:
    """Returns the mass of P above z, rounded up."""
    return self._of_p(lambda x: special.ndtr(-x), z) * (1 + 1e-9)

  def below(self, z: np.ndarray) -> np.ndarray:
    """Returns the mass of P below z, rounded up."""
    return self._of_p(special.ndtr, z) * (1 + 1e-9)

  def _of_p(self, of_normal: Callable[[np.ndarray], np.ndarray], z: np.ndarray) -> np.ndarray:
    """Returns what P has at z, given the same for one standard normal."""
    if self.kind == 'add':
      return of_normal(z)
    a = self.probability
    return (1 - a) * of_normal(z) + a * of_normal(z - self.shift)

  def where(self, loss: np.ndarray) -> np.ndarray:
    """Returns the z with a given loss, or infinity if there is none."""
    if self.kind == 'remove':
      return self._where_one_sided(loss)
    if self.kind == 'add':
      return -self._where_one_sided(-loss)
    # exp(m z) solves a quadratic: m z = L / 2 + asinh(sinh(L / 2) (1 - a) / (a exp(-m^2 / 2))).
    half = np.abs(loss) / 2
    with np.errstate(divide='ignore'):
      log_sinh = half + np.log(-np.expm1(-2 * half)) - np.log(2)
      log_y = log_sinh + np.log1p(-self.probability) - np.log(self.probability) + (
          self.shift**2 / 2)
    asinh = np.where(log_y > 20, log_y + np.log(2), np.arcsinh(np.exp(np.minimum(log_y, 30))))
    return np.sign(loss) * (half + asinh) / self.shift

  def _one_sided(self, z: np.ndarray) -> np.ndarray:
    a, t = self.probability, self.shift * z - self.shift**2 / 2
    if a == 1:
      return t
    near = np.log1p(a * np.expm1(np.minimum(t, 30)))
    far = np.log(a) + t + np.log1p((1 - a) / a * np.exp(-np.maximum(t, 30)))
    return np.where(t > 30, far, near)

  def _where_one_sided(self, loss: np.ndarray) -> np.ndarray:
    a = self.probability
    if a == 1:
      t = loss
    else:
      with np.errstate(divide='ignore', invalid='ignore'):
        near = np.log1p(np.maximum(np.expm1(np.minimum(loss, 30)) / a, -1))
        far = loss - np.log(a) + np.log1p(-(1 - a) * np.exp(-np.maximum(loss, 30)))
      t = np.where(loss > 30, far, near)
    return (t + self.shift**2 / 2) / self.shift

  def atoms(self, reach: float) -> Tuple[np.ndarray, np.ndarray]:
    """Returns `(losses, log of their mass of P)`, with all that is below as the lowest loss."""
    low, high = self.range(reach)
    z, mass, _ = nodes(self, self.breaks(low, high))
    with np.errstate(divide='ignore'):
      return self.loss(np.append(z, low)), np.log(np.append(mass, self.below(np.array(low))))

  def beyond(self, reach: float) -> float:
    """Returns the mass of P of larger losses than these."""
    return float(self.above(np.array(self.range(reach)[1])))

  def extent(self, reach: float) -> np.ndarray:
    """Returns `[lowest, largest]` of these losses."""
    return self.loss(np.array(self.range(reach)))

  def exponent(self, reach: float) -> float:
    """Returns the size of the largest exponent that decides a loss."""
    return self.shift * (self.shift + max(map(abs, self.range(reach))))

  def cells(self, interval: float, reach: float) -> Iterator[Tuple[np.ndarray, ...]]:
    """Yields `(index, loss, mass of P)` in the cells of a grid, above `index * interval`."""
    low, high = self.range(reach)
    ends = self.loss(np.array([low, high]))
    lowest = math.ceil(ends[0] / interval)  # Losses below count as the lowest one.
    yield np.array([lowest]), np.array([lowest * interval]), self.below(np.array([low]))
    breaks = self.breaks(low, high)
    first, last = math.floor(ends[0] / interval), math.ceil(ends[1] / interval)
    for begin in range(first, last, _CHUNK):
      end = min(last, begin + _CHUNK)
      edges = np.clip(self.where(np.arange(begin, end + 1) * interval), low, high)
      if begin == first:
        edges[0] = low
      if end == last:
        edges[-1] = high
      edges = np.maximum.accumulate(edges)
      inside = breaks[(breaks > edges[0]) & (breaks < edges[-1])]
      parts = np.sort(np.concatenate([edges, inside]))
      of = np.clip(np.searchsorted(edges, (parts[1:] + parts[:-1]) / 2, 'right') - 1,
                   0, end - begin - 1)
      z, mass, index = nodes(self, parts)
      yield begin + of[index], self.loss(z), mass

  def range(self, log_mass: float) -> Tuple[float, float]:
    """Returns `(low, high)`: P has at most `exp(-log_mass)` on either side."""
    size = np.sqrt(2 * log_mass)
    return -size, size if self.kind == 'add' else size + self.shift

  def breaks(self, low: float, high: float) -> np.ndarray:
    """Returns cells over which a few nodes integrate densities and losses to 1e-13.

    Losses bend around `log((1 - a) / a)`: the cells' width is in proportion to
    the distance from there.
    """
    parts = [np.linspace(low, high, 2 + int((high - low) / _CELL))]
    if self.probability < 1:
      a, m = self.probability, self.shift
      bend = (np.log1p(-a) - np.log(a) + m**2 / 2) / m
      reach = np.arcsinh(m * (high - low + abs(bend)))
      around = np.sinh(np.linspace(-reach, reach, 2 + int(reach / 0.04))) / m
      centers = {'remove': (bend,), 'add': (-bend,), 'replace': (bend, -bend)}[self.kind]
      parts += [center + around for center in centers]
    points = np.unique(np.concatenate(parts))
    return points[(points >= low) & (points <= high)]


class Listed(NamedTuple):
  """A dominating pair of which the distribution of R = dP/dQ under Q is known at points.

  Attributes:
    kind: 'remove' for the loss log R under P, 'add' for -log R under Q.
    event: Has `ratio(precision)`, an `allocation.Ratio`.
  """

  kind: str
  event: Any

  def _ratio(self, reach: float) -> allocation.Ratio:
    if reach >= FAR:
      return self.event.ratio(_ROUGH)
    return self.event.ratio(allocation.Precision(
        next((r for r in _REACHES if r >= reach), _REACHES[-1])))

  def atoms(self, reach: float) -> Tuple[np.ndarray, np.ndarray]:
    """See `Pair`."""
    points, mass, _ = self._ratio(reach)
    kept = (points > 0) & (mass > 0)
    log_ratio, log_mass = np.log(points[kept]), np.log(mass[kept])
    if self.kind == 'add':
      return -log_ratio[::-1], log_mass[::-1]
    return log_ratio, log_mass + log_ratio

  def beyond(self, reach: float) -> float:
    """See `Pair`."""
    points, mass, infinite = self._ratio(reach)
    return infinite if self.kind == 'remove' else float(mass[points == 0].sum())

  def extent(self, reach: float) -> np.ndarray:
    """See `Pair`."""
    return self.atoms(reach)[0][[0, -1]]

  def exponent(self, reach: float) -> float:
    """See `Pair`."""
    del reach
    return 3e5  # Rounding has changed a loss by at most 1e-9 of it.

  def cells(self, interval: float, reach: float) -> Iterator[Tuple[np.ndarray, ...]]:
    """See `Pair`."""
    loss, log_mass = self.atoms(reach)
    yield np.floor(loss / interval).astype(np.int64), loss, np.exp(log_mass)


_LISTED = (allocation.AllocationDpEvent, user_examples.UserExamplesDpEvent)
Mixture = Sequence[Tuple[float, Any]]  # Weights and pairs; which one it is may be known.
Steps = Sequence[Tuple[Mixture, int]]  # Mixtures, and how often each is composed.


def nodes(pair: Pair, edges: np.ndarray) -> Tuple[np.ndarray, ...]:
  """Returns quadrature: `(z, mass of P, index of the cell)` over the cells between `edges`."""
  width = np.diff(edges)
  pieces = []
  for count, chosen in ((2, width < _NARROW), (4, width >= _NARROW)):
    index = np.flatnonzero(chosen)
    if not len(index):
      continue
    at, weight = _NODES[count]
    half = width[index, None] / 2
    z = edges[index, None] + half * (1 + at)
    pieces.append((z.ravel(), (pair.density(z) * weight * half).ravel(),
                   np.repeat(index, count)))
  return tuple(np.concatenate(part) for part in zip(*pieces))


def directions(
    dp_event: dp_accounting.DpEvent,
    neighbors: dp_accounting.NeighboringRelation) -> Optional[List[Steps]]:
  """Returns the `(Mixture, count)` pairs to account for in each direction, or None.

  None stands for events with no bound that is worth anything. Raises ValueError for events that are
  not (sampled, truncated) Gaussians.
  """
  parts = list(events.composed(dp_event))
  if any(_without_noise(event) for event, _ in parts):
    return None
  kinds = ('replace',) if neighbors is _RELATION.REPLACE_ONE else ('remove', 'add')
  if len(kinds) == 2 and all(isinstance(e, dp_accounting.GaussianDpEvent) for e, _ in parts):
    kinds = ('remove',)
  per_kind = [_merged([_step(event, count, kind) for event, count in parts]) for kind in kinds]
  largest = max((pair.shift * (10 + pair.shift / 2) for steps in per_kind for mixture, _ in steps
                 for _, pair in mixture if isinstance(pair, Pair)), default=0)
  return None if largest > _NO_PRIVACY else per_kind


def _without_noise(event: dp_accounting.DpEvent) -> bool:
  return isinstance(event, dp_accounting.NonPrivateDpEvent) or (
      getattr(getattr(event, 'event', event), 'noise_multiplier', 1) == 0)


def _step(event: dp_accounting.DpEvent, count: int, kind: str) -> Tuple[Mixture, int]:
  truncated = getattr(dp_accounting, 'TruncatedSubsampledGaussianDpEvent', ())
  if isinstance(event, dp_accounting.GaussianDpEvent):
    return ((1.0, Pair(kind, 1.0, count**0.5 / event.noise_multiplier)),), 1
  if isinstance(event, dp_accounting.PoissonSampledDpEvent) and isinstance(
      event.event, dp_accounting.GaussianDpEvent):
    sigma = event.event.noise_multiplier
    return ((1.0, Pair(kind, event.sampling_probability, 1 / sigma)),), count
  if truncated and isinstance(event, truncated):
    return _truncated(event, kind), count
  if isinstance(event, _LISTED) and kind != 'replace':
    if event.largest_shift > event.most_shift:  # Not worth it.
      return _step(event.unamplified, count, kind)
    return ((1.0, Listed(kind, event)),), count
  raise ValueError(f'Privacy loss distributions are implemented for Gaussian noise, with '
                   f'Poisson sampling or without. Received: {event}. Use accountant="rdp".')


def _truncated(event: dp_accounting.DpEvent, kind: str) -> Mixture:
  """Returns truncated batches (arXiv 2508.15089): in a cut one, a record replaces another."""
  size, q, most = event.dataset_size, event.sampling_probability, event.truncated_batch_size
  whole = Pair(kind, q, 1 / event.noise_multiplier)
  cut = min(1.0, stats.binom.sf(most - 1, size - 1, q) * (1 + 1e-9))
  chosen = cut and min(1.0, stats.binom.sf(most, size, q) * most / size / cut * (1 + 1e-8))
  if not chosen:
    return ((1.0, whole),)
  parts = [(1 - cut, whole)] if cut < 1 else []
  return tuple(parts + [(cut, Pair('replace', chosen, 2 / event.noise_multiplier))])


def _merged(steps: Steps) -> Steps:
  """Merges equal steps, and all whole Gaussians of one kind into one."""
  counts: Dict[Mixture, int] = {}
  squares: Dict[str, float] = {}
  for mixture, count in steps:
    pair = mixture[0][1]
    if len(mixture) == 1 and isinstance(pair, Pair) and pair.probability == 1:
      squares[pair.kind] = squares.get(pair.kind, 0.0) + count * pair.shift**2
    else:
      counts[mixture] = counts.get(mixture, 0) + count
  counts.update({((1.0, Pair(kind, 1.0, square**0.5)),): 1 for kind, square in squares.items()})
  return tuple(counts.items())
