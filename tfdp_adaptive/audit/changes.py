# SPDX-License-Identifier: Apache-2.0
"""Searches for the largest change of any release by one record, over neighboring batches.

A release of noise multiplier sigma costs what is claimed if, and only if, no record
moves the joint vector of everything released at a step by more than 1 / sigma units of
its noise. Both batches run from the same state, so the noise is the same and cancels:
what is left is exact but for rounding. A search proves nothing about batches that it
has not tried; what it finds is a proof.

Weights, state and whatever else a step writes may depend on the batch through noised releases only
(`past_noise`). So one step is run on different batches from the same state, and its releases are
replaced by fixed numbers: what then still differs was taken past the noise, as by a training step
of one's own that moves a weight itself, or keeps a mean. This is exact, for the batches that were
tried. Metrics are left out: they are exact and not private, as said.
"""

import itertools
import math
from typing import Any, Iterator, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from tfdp_adaptive.audit import interface

TOLERANCE = 1e-3  # Relative; below it, a change is taken for rounding.
_EPS = float(np.finfo(np.float32).eps)
_HUGE, _SMALL = 1e12, 1e-3  # Gradients in clip norms.
_TARGETS = 3  # Number of given records that are left out at each inspected step.


class Change(NamedTuple):
  """The worst pair of neighbors.

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


def distance(
    left: Sequence[interface.Part], right: Sequence[interface.Part], noise_multiplier: float
    ) -> Tuple[float, float]:
  """Returns (distance over the allowed one, its part that may be rounding) of two steps."""
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
    subject: interface.Subject, seed: Optional[int] = None, history: Sequence[int] = (0, 1, 3)
    ) -> Change:
  """Searches from the states after so many steps on ordinary records.

  Args:
    subject: A `Subject`.
    seed: The seed of the ordinary records and the noise; for tests.
    history: Numbers of steps before the inspected ones.
  """
  rng = np.random.default_rng(seed)
  worst, pairs = Change(0.0, 0.0, 'nothing changed', 0), 0
  for left, right, where in itertools.chain(
      _neighbours(subject, rng, seed, history), _with_memory(subject, seed)):
    pairs += 1
    size, rounding = distance(left, right, subject.noise_multiplier)
    if not size - rounding <= worst.size + 1e-6:  # The first of equals.
      worst = Change(size, rounding, where, 0)
  return worst._replace(pairs=pairs)


def _neighbours(
    subject: interface.Subject, rng: np.random.Generator, seed: Optional[int],
    history: Sequence[int]) -> Iterator[Tuple[Any, Any, str]]:
  """Yields (parts, parts, text) of steps on pairs of batches that differ by one record."""
  for step, state in subject.history(rng, seed, history):
    for others, target, name in _batches(subject, rng):
      batch = np.concatenate([others, target[np.newaxis]])
      with_it, _ = subject.step(state, batch)
      if subject.count:
        _check_repeatable(with_it, subject.step(state, batch)[0])
      for without, present, kind in _without(subject, state, batch):
        parts, _ = subject.step(state, without, present)
        yield with_it, parts, f'{name}, after {step} steps, against {kind}'


def _batches(subject: interface.Subject, rng: np.random.Generator
             ) -> Iterator[Tuple[np.ndarray, np.ndarray, str]]:
  """Yields (others, record, text), to compare with the others alone."""
  whole = max(1, math.ceil(subject.batch_size))
  if not subject.count:
    yield from _chosen(subject, whole)
    return
  half = subject.count // 2
  whole = int(min(whole, subject.largest_batch))
  sizes = sorted({0, 1, whole - 1}) if subject.largest_batch == math.inf else [whole - 1]
  for target in rng.choice(subject.count, min(_TARGETS, subject.count), replace=False):
    record, name = np.array([target * 1.0]), f'record {int(target) % half}'
    if target >= half:
      name += ', enlarged,'
    for size in sizes:
      place = f'among {size} others' if size else 'alone'
      yield rng.integers(half, size=(size, 1)) * 1.0, record, f'{name} {place}'
    yield np.full((whole - 1, 1), record), record, f'{name} among {whole - 1} like it'


def _chosen(subject: interface.Subject,
            whole: int) -> Iterator[Tuple[np.ndarray, np.ndarray, str]]:
  """Yields the `_batches` of records that may be anything."""
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
        place = f'among {count} {kind} others' if count else 'alone'
        yield np.tile(other, (count, 1)), target, f'a huge {shape} record {place}'
  yield np.zeros([0, subject.size]), _SMALL * dense, 'a small record'


def _without(subject: interface.Subject, state: interface.State,
             batch: np.ndarray) -> Iterator[Tuple[np.ndarray, np.ndarray, str]]:
  """Yields (batch, weights, text) of the neighbors that lack the last record of a batch."""
  present = np.ones(len(batch))
  zeroed = present.copy()
  zeroed[-1] = 0

  def instead(record: Union[int, np.ndarray]) -> np.ndarray:
    return np.concatenate([batch[:-1], np.reshape(record, [1, -1])])

  yield batch, zeroed, 'weight zero'
  if subject.count:
    yield instead(subject.count), zeroed, 'padding'
  if subject.adjacency == 'add_remove' and (len(batch) > 1 or not subject.count):
    yield batch[:-1], present[:-1], 'its absence'
  if subject.adjacency == 'replace':
    if subject.count:
      yield instead((batch[-1] + 1) % subject.count), present, 'another'
      return
    yield instead(-batch[-1]), present, 'its opposite'
    inside = _just_inside(subject, state, -batch[-1])
    if inside is not None:  # The extra release counts the records that are not clipped.
      yield instead(inside), present, 'an opposite that is not clipped'


def _check_repeatable(once: Sequence[interface.Part], again: Sequence[interface.Part]) -> None:
  if any(not np.array_equal(a.value, b.value) for a, b in zip(once, again)):
    raise ValueError(
        'The model must do the same twice from the same state, so that batches can be compared. '
        'Received: a model that draws numbers without a seed of its own, such as dropout in Keras '
        '2. Set its rate to 0 for the audit.')


def _just_inside(
    subject: interface.Subject, state: interface.State, target: np.ndarray) -> Optional[np.ndarray]:
  """Returns the longest record along `target` that is not clipped, or None without side queries."""
  if not any(ask.side_query is not None for ask in subject.rule.asks):
    return None
  direction = target / np.linalg.norm(target)

  def moved(length: float) -> float:
    """Returns how far a record of this norm moves the mean, in scaled units over B."""
    records = length * direction[np.newaxis]
    (there, *_), _ = subject.step(state, records)
    (gone, *_), _ = subject.step(state, records, np.zeros(1))
    return float(np.linalg.norm(there.value - gone.value))

  length, longest = _SMALL, moved(_HUGE)
  for share in (0.5, 1 - 5e-4):  # Rounding matters less at the second length.
    change = moved(length)
    if not 0 < change < longest < math.inf:
      return None
    length *= share * longest / change
  return length * direction


def _with_memory(subject: interface.Subject,
                 seed: Optional[int]) -> Iterator[Tuple[Any, Any, str]]:
  """Yields pairs of steps with and without a record of many steps, given equal releases."""
  if not subject.participations or subject.count:
    return
  target = _HUGE * np.eye(1, subject.size)
  state = other = subject.fresh(seed)
  for step in range(subject.limit(12)):
    present = np.full(1, step < subject.participations)
    with_it, state = subject.step(state, target, present)
    without, other = subject.step(other, target, np.zeros(1))
    other = subject.with_secret_of(state, other)
    yield with_it, without, (
        f'a huge record in {subject.participations} steps, seen in step {step + 1}')


_HISTORY = (0, 2)  # Steps taken before the inspected one.


class Writes(NamedTuple):
  """The result of the check.

  Attributes:
    past_noise: Names of what depends on the batch though the releases do not.
    looked_at: The number of tensors that a step writes.
    pairs: How many pairs of batches were tried.
  """

  past_noise: Tuple[str, ...]
  looked_at: int
  pairs: int


def past_noise(subject: interface.Subject, seed: Optional[int] = None) -> Writes:
  """Compares the state after a step on ordinary, other and no records."""
  rng = np.random.default_rng(seed)
  found, pairs = set(), 0
  for _, state in subject.history(rng, seed, _HISTORY):
    batch, other = subject.ordinary(rng, share=1.0), subject.ordinary(rng, share=1.0)
    all_of_it, none = np.ones(len(batch)), np.zeros(len(batch))
    left = subject.written(state, batch, all_of_it)
    for right in (subject.written(state, other, all_of_it), subject.written(state, batch, none)):
      found |= {name for name in left if not np.array_equal(left[name], right[name])}
      pairs += 1
  return Writes(tuple(sorted(found)), len(left), pairs)
