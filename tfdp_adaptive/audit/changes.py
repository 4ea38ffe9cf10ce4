# SPDX-License-Identifier: Apache-2.0
"""The largest change of any release by one record, searched over neighbouring batches.

A release of noise multiplier sigma costs what is claimed if, and only if, no record
moves the joint vector of everything released at a step by more than 1 / sigma units of
its noise. Both batches run from the same state, so the noise is the same and cancels:
what is left is exact but for rounding. A search proves nothing about batches that it
has not tried; what it finds is a proof.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Optional, Sequence, Tuple, TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
  from tfdp_adaptive.audit import subjects

TOLERANCE = 1e-3  # Relative; below it, a change is taken for rounding.
_EPS = float(np.finfo(np.float32).eps)
_HUGE, _SMALL = 1e12, 1e-3  # Gradients in clip norms.


class Change(NamedTuple):
  """The worst pair of neighbours.

  Attributes:
    size: Its distance over the one allowed: above 1 refutes the claim.
    rounding: The part of `size` that rounding can explain.
    where: The pair, in words.
    pairs: The number of pairs that were tried.
  """

  size: float
  rounding: float
  where: str
  pairs: int

  @property
  def violated(self) -> bool:
    return not self.size <= 1 + TOLERANCE + self.rounding


class _Search:
  """The largest change so far."""

  def __init__(self, claims: subjects.Claims) -> None:
    self._claims = claims
    self.worst, self.pairs = Change(0.0, 0.0, 'nothing changed', 0), 0

  def compare(self, left: Any, right: Any, where: str) -> None:
    self.pairs += 1
    size, rounding = distance(left, right, self._claims.noise_multiplier)
    if not size - rounding <= self.worst.size + 1e-6:  # The first of equals.
      self.worst = Change(size, rounding, where, 0)


def distance(left: Any, right: Any, noise_multiplier: float) -> Tuple[float, float]:
  """(distance over the allowed one, how much of it may be rounding) of two steps' parts."""
  if len(left) != len(right):
    return math.inf, 0.0
  joint, error, separate = 0.0, 0.0, 0.0
  for a, b in zip(left, right):
    moved = float(np.linalg.norm(a.value - b.value))
    scale = max(float(np.linalg.norm(a.value)), float(np.linalg.norm(b.value)))
    if not moved < math.inf or a.unit != b.unit:
      return math.inf, 0.0
    if not a.unit:
      moved, rounding = math.inf if moved > 8 * _EPS * scale else 0.0, 0.0
    else:
      moved, rounding = moved / a.unit, 8 * _EPS * scale / a.unit
    if a.separate:
      separate = max(separate, moved * a.separate)
    else:
      joint = math.hypot(joint, moved)
    error = math.hypot(error, rounding)
  return noise_multiplier * max(joint, separate), noise_multiplier * error


def largest(
    subject: subjects.Subject, seed: Optional[int] = None,
    history: Sequence[int] = (0, 1, 3)) -> Change:
  """Searches from the states after so many steps on ordinary records.

  Args:
    subject: A `Subject`.
    seed: The seed of the ordinary records and the noise; for tests.
    history: Numbers of steps taken before a step is looked at.
  """
  rng = np.random.default_rng(seed)
  search = _Search(subject.claims)
  state = subject.fresh(seed)
  last = subject.limit(max(history) + 1) - 1
  for step in range(last + 1):
    if step in history:
      _at(subject, state, search, f'after {step} steps')
    if step < last:
      ordinary = rng.standard_normal((_whole(subject), subject.size)) * 3 / math.sqrt(subject.size)
      _, state = subject.step(state, ordinary)
  if subject.participations:
    _with_memory(subject, search, seed)
  return search.worst._replace(pairs=search.pairs)


def of_records(subject: subjects.Subject, seed: Optional[int] = None,
               history: Sequence[int] = (0, 1, 3), targets: int = 3) -> Change:
  """Runs the same search on records of a data set instead of chosen gradients.

  Args:
    subject: A `Subject` of `own_models`.
    seed: The seed of the choice of records and of the noise; for tests.
    history: See `largest`.
    targets: The number of records to remove at every inspected step.
  """
  rng = np.random.default_rng(seed)
  search = _Search(subject.claims)
  state = subject.fresh(seed)
  last = subject.limit(max(history) + 1) - 1
  whole = int(min(_whole(subject), subject.largest_batch))
  sizes = sorted({0, 1, whole - 1}) if subject.largest_batch == math.inf else [whole - 1]
  for step in range(last + 1):
    if step in history:
      for target in rng.choice(subject.count, min(targets, subject.count), replace=False):
        for size in sizes:
          others = rng.integers(subject.count // 2, size=(size, 1)) * 1.0
          _records(subject, state, search, others, target, f'{size} others, after {step} steps')
        alike = np.full((whole - 1, 1), target * 1.0)
        _records(subject, state, search, alike, target, f'{whole - 1} like it, after {step} steps')
    if step < last:
      ordinary = rng.integers(subject.count // 2, size=(whole, 1)) * 1.0
      _, state = subject.step(state, ordinary)
  return search.worst._replace(pairs=search.pairs)


def _records(subject: subjects.Subject, state: Any, search: _Search, others: np.ndarray,
             target: int, name: str) -> None:
  batch = np.concatenate([others, [[target * 1.0]]])
  present = np.ones(len(batch))
  with_it, _ = subject.step(state, batch, present)
  again, _ = subject.step(state, batch, present)
  if any(not np.array_equal(a.value, b.value) for a, b in zip(with_it, again)):
    raise ValueError(
        'The model must do the same twice from the same state, so that batches can be compared. '
        'Received: a model that draws numbers without a seed of its own, such as dropout in Keras '
        '2. Set its rate to 0 for the audit.')
  zeroed = present.copy()
  zeroed[-1] = 0
  without, _ = subject.step(state, batch, zeroed)
  place = f'record {int(target) % (subject.count // 2)}' + (
      ', enlarged,' if target >= subject.count // 2 else '')
  search.compare(with_it, without, f'{place} among {name}, against weight zero')
  batch[-1] = subject.count
  blank, _ = subject.step(state, batch, zeroed)
  search.compare(with_it, blank, f'{place} among {name}, against padding')
  if subject.claims.adjacency == 'add_remove' and len(others):
    absent, _ = subject.step(state, others, present[:-1])
    search.compare(with_it, absent, f'{place} among {name}, against its absence')
  if subject.claims.adjacency == 'replace':
    batch[-1] = (target + 1) % subject.count
    replaced, _ = subject.step(state, batch, present)
    search.compare(with_it, replaced, f'{place} among {name}, against another')


def _whole(subject: subjects.Subject) -> int:
  return max(1, int(math.ceil(subject.claims.batch_size)))


def _at(subject: subjects.Subject, state: Any, search: _Search, when: str) -> None:
  """Returns all pairs of batches of one state, with and without one record."""
  whole = _whole(subject)
  basis = np.eye(1, subject.size)[0]
  dense = np.ones(subject.size) / math.sqrt(subject.size)
  for direction, shape in ((basis, 'one-sparse'), (dense, 'dense')):
    target = _HUGE * direction
    for count in sorted({0, 1, whole - 1, whole, 3 * whole - 1}):
      if count >= max(1, subject.largest_batch):
        continue
      kinds = {'equal': target, 'opposite': -target, 'small': _SMALL * direction}
      for kind, other in kinds.items() if count else (('no', target),):
        if kind != 'equal' and (shape == 'dense' or count > whole):
          continue
        others = np.tile(other, (count, 1))
        name = f'a huge {shape} record among {count} {kind} others, {when}'
        _pairs(subject, state, search, others, target, name)
  target = _SMALL * dense
  _pairs(subject, state, search, np.zeros([0, subject.size]), target, f'a small record, {when}')


def _pairs(
    subject: subjects.Subject, state: Any, search: _Search, others: np.ndarray, target: np.ndarray,
    name: str) -> None:
  batch = np.concatenate([others, target[np.newaxis]])
  present = np.ones(len(batch))
  zeroed = present.copy()
  zeroed[-1] = 0
  with_it, _ = subject.step(state, batch, present)
  without, _ = subject.step(state, batch, zeroed)
  search.compare(with_it, without, f'{name}, against weight zero')
  if subject.claims.adjacency == 'add_remove':
    removed, _ = subject.step(state, others, present[:-1])
    search.compare(with_it, removed, f'{name}, against its absence')
  if subject.claims.adjacency == 'replace':
    batch[-1] *= -1
    replaced, _ = subject.step(state, batch, present)
    search.compare(with_it, replaced, f'{name}, against its opposite')
    inside = _just_inside(subject, state, -target)
    if inside is not None:  # What rides along counts who is inside.
      batch[-1] = inside
      replaced, _ = subject.step(state, batch, present)
      search.compare(with_it, replaced, f'{name}, against an opposite that is not clipped')


def _just_inside(
    subject: subjects.Subject, state: Any, target: np.ndarray) -> Optional[np.ndarray]:
  """The longest record along `target` that is not clipped; None where nothing rides along."""
  if not subject.rides:
    return None
  direction = target / np.linalg.norm(target)

  def moved(length: float) -> float:
    """Returns how far a record of this norm moves the mean, in scaled units over B."""
    records = length * direction[np.newaxis]
    (there, *_), _ = subject.step(state, records)
    (gone, *_), _ = subject.step(state, records, np.zeros(1))
    return float(np.linalg.norm(there.value - gone.value))

  length, longest = _SMALL, moved(_HUGE)
  for share in (0.5, 1 - 5e-4):  # The second time from a length that rounding matters less to.
    change = moved(length)
    if not 0 < change < longest < math.inf:
      return None
    length *= share * longest / change
  return length * direction


def _with_memory(subject: subjects.Subject, search: _Search, seed: Optional[int]) -> None:
  """A record of many steps, seen through all later releases: the others' are the same."""
  target = _HUGE * np.eye(1, subject.size)
  state = other = subject.fresh(seed)
  for step in range(subject.limit(12)):
    present = np.full(1, step < subject.participations)
    with_it, state = subject.step(state, target, present)
    without, other = subject.step(other, target, np.zeros(1))
    other = subject.with_secret_of(state, other)
    search.compare(with_it, without, f'a huge record in {subject.participations} steps, seen in '
                   f'step {step + 1}')
