# SPDX-License-Identifier: Apache-2.0
"""The privacy loss of one step: the pairs of distributions that dominate it.

A pair (P, Q) is described on the line of one standard normal z, such that `L(z) = log P/Q` grows
with z. With m = sensitivity over noise, sampling rate a and l = log(1 - a + a e^(m z - m^2 / 2)):

    remove   P = (1 - a) N(0, 1) + a N(m, 1),  Q = N(0, 1)                       L = l(z)
    add      P = N(0, 1),  Q = (1 - a) N(0, 1) + a N(-m, 1)                      L = -l(-z)
    replace  P = (1 - a) N(0, 1) + a N(m, 1),  Q = (1 - a) N(0, 1) + a N(-m, 1)  L = l(z) - l(-z)
"""

import functools
import math
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import dp_accounting
import numpy as np
from scipy import special
from scipy import stats

from tfdp_adaptive.accounting import allocation
from tfdp_adaptive.accounting import events
from tfdp_adaptive.accounting import poisson

_RELATION = dp_accounting.NeighboringRelation
_CELL, _ROUGH_CELL = 0.002, 0.02  # Width of z of which the mass is divided between two losses.
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(4)  # Quadrature of a density to 1e-15.
_NO_PRIVACY = 1e6  # A loss of one step from which on no bound is worth its cost.
FAR = 600.0  # -log of the mass that the first bounds leave out.
_REACHES = (40.0, 80.0, 160.0, 320.0)  # Reaches for which distributions are computed once.
_ROUGH = allocation.Precision(_REACHES[-1], bulk=0.12, tail=0.1)


class Pair(NamedTuple):
  """A dominating pair, see the module.

  With several examples of a user, each taken with probability a, k of them move z by k m.
  """

  kind: str
  probability: float  # a
  shift: float  # m
  examples: int = 1

  def loss(self, z: np.ndarray) -> np.ndarray:
    if self.kind == 'remove':
      return self._one_sided(z)
    if self.kind == 'add':
      return -self._one_sided(-z)
    return self._one_sided(z) - self._one_sided(-z)

  def _moves(self) -> List[Tuple[float, float]]:
    """Returns the probabilities of the moves of z, without those that are too rare to count."""
    taken = np.arange(self.examples + 1)
    more = stats.binom.sf(taken, self.examples, self.probability)
    chances = stats.binom.pmf(taken, self.examples, self.probability)
    return [(chance, k * self.shift) for k, chance in enumerate(
        chances[:1 + int(np.argmax(more <= math.exp(-FAR)))]) if chance]

  def _one_sided(self, z: np.ndarray) -> np.ndarray:
    terms = [(chance, move * z - move**2 / 2) for chance, move in self._moves()]
    far = functools.reduce(np.logaddexp, [np.log(chance) + t for chance, t in terms])
    near = np.log1p(sum(chance * np.expm1(np.minimum(t, 700)) for chance, t in terms))
    return np.where(np.abs(far) < 1, near, far)  # Small losses need their own digits.

  def _of_p(self, of_normal: Callable[[Any], Any], z: Any) -> Any:
    """Returns what P has at z, given the same for one standard normal."""
    if self.kind == 'add':
      return of_normal(z)
    return sum(chance * of_normal(z - move) for chance, move in self._moves())

  def _range(self, reach: float) -> Tuple[float, float]:
    """Returns `(low, high)`: P has at most `exp(-reach)` on either side."""
    size = math.sqrt(2 * reach)
    return -size, size if self.kind == 'add' else size + self._moves()[-1][1]

  def atoms(self, reach: float) -> Tuple[np.ndarray, np.ndarray]:
    """Returns `(losses, log of their mass of P)`, with all that is below as the lowest loss.

    The mass between two losses moves to both of them so that P and Q keep theirs, which
    only adds to every divergence (Doroshenko et al., arXiv 2207.04380).
    """
    low, high = self._range(reach)
    cells = math.ceil((high - low) / (_CELL if reach < FAR else _ROUGH_CELL))
    edges, half = np.linspace(low, high, cells + 1), (high - low) / cells / 2
    loss = self.loss(edges)
    z = edges[:-1, np.newaxis] + half * (1 + _NODES)
    mass = half * _WEIGHTS * self._of_p(lambda x: np.exp(-x**2 / 2) / math.sqrt(2 * math.pi), z)
    upper = mass * upper_fraction(
        self.loss(z) - loss[:-1, np.newaxis], np.diff(loss)[:, np.newaxis])
    below = self._of_p(special.ndtr, low) * (1 + 1e-9)
    with np.errstate(divide='ignore'):
      return loss, np.log(np.append(np.sum(mass - upper, axis=1), 0.0)
                          + np.append(below, np.sum(upper, axis=1)))

  def beyond(self, reach: float) -> float:
    """Returns the mass of P of larger losses than these, rounded up."""
    return float(self._of_p(lambda x: special.ndtr(-x), self._range(reach)[1]) * (1 + 1e-9))

  def exponent(self, reach: float) -> float:
    """Returns the size of the largest exponent that decides a loss."""
    move = self._moves()[-1][1]
    return move * (move + max(map(abs, self._range(reach))))


def upper_fraction(above: np.ndarray, interval: Any) -> np.ndarray:
  """Returns the fraction of a mass, `above` the lower point, that moves up by an interval."""
  with np.errstate(divide='ignore', invalid='ignore'):
    fraction = np.expm1(-above) / np.expm1(-interval)
  return np.where(interval > 0, np.clip(fraction, 0.0, 1.0), 1.0)


class Listed(NamedTuple):
  """A dominating pair of which the distribution of R = dP/dQ under Q is known at points.

  Attributes:
    kind: 'remove' for the loss log R under P, 'add' for -log R under Q.
    event: A secret bin.
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

  def exponent(self, reach: float) -> float:
    """See `Pair`."""
    del reach
    return 3e5  # Rounding has changed a loss by at most 1e-9 of it.


Mixture = Sequence[Tuple[float, Any]]  # Weights and pairs; which one it is may be known.
Steps = Sequence[Tuple[Mixture, int]]  # Mixtures, and how often each is composed.


def directions(
    dp_event: dp_accounting.DpEvent,
    neighbors: dp_accounting.NeighboringRelation) -> Optional[List[Steps]]:
  """Returns the `(Mixture, count)` pairs to account for in each direction, or None.

  Returns None for events without a useful bound. Raises ValueError for events that are not
  (sampled, truncated) Gaussians.
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
  users = isinstance(event, poisson.UserExamplesDpEvent)
  if (users or isinstance(event, allocation.AllocationDpEvent)) and kind != 'replace':
    if event.largest_shift > event.most_shift:  # Not worth it.
      return _step(event.unamplified, count, kind)
    pair: Any = Listed(kind, event)
    if users:
      pair = Pair(kind, event.sampling_probability, 1 / event.noise_multiplier,
                  event.examples_per_user)
    return ((1.0, pair),), count
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
  """Merges equal steps, and all Gaussians without sampling of one kind into one."""
  counts: Dict[Mixture, int] = {}
  squares: Dict[str, float] = {}
  for mixture, count in steps:
    pair = mixture[0][1]
    if len(mixture) == 1 and isinstance(pair, Pair) and pair[1::2] == (1.0, 1):
      squares[pair.kind] = squares.get(pair.kind, 0.0) + count * pair.shift**2
    else:
      counts[mixture] = counts.get(mixture, 0) + count
  counts.update({((1.0, Pair(kind, 1.0, square**0.5)),): 1 for kind, square in squares.items()})
  return tuple(counts.items())
