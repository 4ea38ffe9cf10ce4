# SPDX-License-Identifier: Apache-2.0
"""Checks records as they are read: copies, overlapping windows, records that change.

A guarantee for one record does not protect a person with five copies of it. Oversampling, or a
source that draws from a few records at random, makes such copies, and the plan does not know of
them. Overlapping windows of a series have values that are in many records.
"""

import hashlib
import math
from typing import Any, Dict, Iterator, List, Optional, Sequence

import numpy as np

from tfdp_adaptive import errors
from tfdp_adaptive import trees
from tfdp_adaptive.batches import sources

_SHARE, _FEW = 0.05, 32  # More copies than that share, and than a few, are warned of.
_SAMPLED = 64  # Records that are read first: so many neighbors, and so many apart.
_BYTES = 1 << 16  # Larger arrays of a record are sampled.
_MOST = 1 << 20  # Records that are remembered.
_LONGEST_MOVE = 16  # Steps by which windows are moved.
_MOST_WINDOWS, _WINDOW_BYTES = 4096, 1 << 24  # Of records that are compared in any order.
_CHANCE = 16  # So many records may be another one moved.
_COPIES = (
    f'More than {_SHARE:.0%} of the records are exact copies of others. If a person gave several '
    'of them, the guarantee for one record does not cover that person.')
_REMOVE_COPIES = (
    'Remove copies (weight records by `sample_weight` instead of repeating them), or protect '
    'users: `unit="user"`.')
_WINDOWS = (
    'Many records repeat values of others, some steps earlier, as overlapping windows of a series '
    'do. The guarantee for one record does not cover a value that is in many of them.')
_CUT_WINDOWS = (
    'Cut the series into windows that do not overlap; or protect whole series, by a plan with '
    "`unit='user'` and `plan.batches(data, users=ids_of_series, examples_per_user=m)`.")


class CheckedSource(sources.Source):
  """The records of a source. Each is compared with itself and with others when it is read.

  Args:
    source: The source of the records.
    changing: Why a record may differ when it is read again, such as augmentation of each record;
      None if it must not.
    counts: Whether to count copies; not if several records may belong to one user.

  Raises:
    PrivacyError: If a record differs when it is read again.
  """

  def __init__(self, source: sources.Source, changing: Optional[str] = None,
               counts: bool = True) -> None:
    if changing is not None and not (isinstance(changing, str) and changing):
      raise ValueError('`changing` must say in words how a record differs whenever it is read. '
                       f'Received: changing={changing!r}.')
    super().__init__(len(source), source.specs, source.take, source.at_hand, source.entries)
    if changing is not None and source.at_hand:
      raise ValueError(
          '`changing` is for a source that is read anew at every step. Received: '
          f'changing={changing!r} and data that are read once, a `tf.data.Dataset` or arrays: '
          'their records never change. Give the function that changes one record: '
          '`plan.batches(data, augment=f)`; or a source with `__len__` and `__getitem__`.')
    self.base, self.views = source.base, source.views
    self._changing, self._counts = changing, counts
    self._digests: Dict[int, bytes] = {}
    self._overlaps = False

  def warn_of_copies(self) -> None:
    """Warns about copies among some records, before the first batch."""
    count = len(self)
    if self.at_hand and not self._digests:
      self.take(np.unique(np.concatenate([
          np.arange(min(_SAMPLED, count)),
          np.linspace(0, count - 1, min(count, _SAMPLED)).astype(np.int64)])))
      if self._counts:
        first = sources.leaves(self.take(np.arange(min(_SAMPLED, count))))
        most = _WINDOW_BYTES * len(first[0]) // max(1, sum(part.nbytes for part in first))
        most = min(most, _MOST_WINDOWS, count)
        some = np.random.default_rng(0).choice(count, most, replace=False)
        self._overlaps = overlapping(first) or overlapping(sources.leaves(self.take(some)))
    if self.many:
      errors.caution(f'{_COPIES} {_REMOVE_COPIES}')
    if self._overlaps:
      errors.caution(f'{_WINDOWS} {_CUT_WINDOWS}')

  @property
  def many(self) -> bool:
    """Returns whether more than 5% of the records that were read are copies of others."""
    read = len(self._digests)
    copies = read - len(set(self._digests.values()))
    return self._counts and copies > max(_FEW, _SHARE * read)

  def notes(self) -> List[str]:
    notes = super().notes() + [_COPIES] * self.many + [_WINDOWS] * self._overlaps
    if self._changing is not None:
      notes.append('Records change from reading to reading. Whoever trained the model says of it: '
                  f'{self._changing!r}. The guarantee holds if each is changed by itself alone.')
    return notes

  def take(self, indices: np.ndarray) -> Any:
    taken = super().take(indices)
    if self._changing is None:
      for index, digest in zip(np.asarray(indices).tolist(), _digests(sources.leaves(taken))):
        compares = index in self._digests or len(self._digests) < _MOST
        if compares and self._digests.setdefault(index, digest) != digest:
          raise errors.PrivacyError(
              '`data` must give the same record for a number whenever it is read. Otherwise one '
              'record could take several places. Received: a source that gave another record. It '
              'must not draw random numbers. If it augments each record, say how: '
              "`plan.batches(data, changing='how')`. The statement repeats this text.")
    return taken


def _digests(arrays: List[np.ndarray]) -> Iterator[bytes]:
  """Yields a digest of each record, of arrays [n, ...] that hold n of them."""
  parts: List[Any] = []
  for array in arrays:
    if array.dtype.kind in 'OSU':
      parts.append([trees.content(np.asarray(value)) for value in array])
    elif len(array):
      flat = np.ascontiguousarray(array).reshape(len(array), -1).view(np.uint8)
      parts.append(np.ascontiguousarray(flat[:, ::-(-flat.shape[1] // _BYTES) or 1]))
  for record in zip(*parts):
    digest = hashlib.blake2b(digest_size=8)
    for part in record:
      digest.update(part)
    yield digest.digest()


def overlapping(arrays: Sequence[np.ndarray]) -> bool:
  """Whether many records [n, length, ...] are another one of them, moved by some steps.

  Examples:
    >>> series = np.sin(np.arange(20.0))
    >>> overlapping([np.stack([series[i:i + 6] for i in range(10)])])
    True
    >>> overlapping([series.reshape(5, 4)])
    False
  """
  return any(_moved(array) for array in arrays if array.ndim > 1 and array.dtype.kind in 'fiu')


def _moved(array: np.ndarray) -> bool:
  rows = array.reshape(*array.shape[:2], math.prod(array.shape[2:]))
  least = 2 if array.dtype.kind == 'f' else 4  # Few integers are alike by chance.
  found = 0
  for steps in range(1, min(_LONGEST_MOVE, rows.shape[1] - least) + 1):
    varied = (rows[:, steps:] != rows[:, steps:steps + 1]).any((1, 2))
    begins = {row[:-steps].tobytes() for row in rows}
    same = sum(row[steps:].tobytes() in begins for row in rows[varied])
    # Where k records begin alike, about 2k are alike by chance when they are moved.
    found += max(0, same - 6 * (1 + len(rows) - len(begins)))
  return found > max(_CHANCE, _SHARE * len(rows))
