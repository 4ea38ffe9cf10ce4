# SPDX-License-Identifier: Apache-2.0
"""Notices records that are there twice, and sources that give others when they are read again.

A guarantee for one record does not protect what five records say. Copies that were made by
oversampling, or by a source that draws at random from a few records, hide that from the plan.
"""

import hashlib
from typing import Any, Dict, List, Optional
import warnings

import numpy as np

from tfdp_adaptive import errors
from tfdp_adaptive.batches import sources

SHARE, _FEW = 0.05, 32  # More copies than that share, and than a few, are warned of.
_SAMPLED = 64  # Records that are looked at first: so many neighbours, and so many apart.
_BYTES = 1 << 16  # Of one array of a record, of which larger ones are sampled.
_MOST = 1 << 20  # Records that are remembered.


class Watched(sources.Source):
  """The records of a source, each compared with itself and the others as it is read.

  Args:
    source: Gives the records.
    changing: Why a record may differ when it is read again, as with augmentation of each by
      itself; None if it may not.
    counts: Whether copies matter; not where several records may be one user's.

  Raises:
    PrivacyError: For records that differ when they are read again.
  """

  def __init__(self, source: sources.Source, changing: Optional[str] = None,
               counts: bool = True) -> None:
    if changing is not None and not (isinstance(changing, str) and changing):
      raise ValueError('`changing` must say in words how a record differs whenever it is read. '
                       f'Received: changing={changing!r}.')
    self._source, self._changing, self._counts = source, changing, counts
    self._digests: Dict[int, bytes] = {}
    self._first: Dict[bytes, int] = {}
    self._copies = 0
    self.specs = source.specs

  def look(self) -> None:
    """Warns of copies among some records that are at hand, before the first batch."""
    count = len(self._source)
    if self._source.at_hand and not self._digests:
      self.take(np.unique(np.concatenate([
          np.arange(min(_SAMPLED, count)),
          np.linspace(0, count - 1, min(count, _SAMPLED)).astype(np.int64)])))
    if self.many:
      warnings.warn(f'{_WARNING} {_FIX}', errors.Caution, stacklevel=4)

  def __len__(self) -> int:
    return len(self._source)

  @property
  def many(self) -> bool:
    """Whether more than `SHARE` of the records that were read are copies of others."""
    return self._copies > max(_FEW, SHARE * len(self._digests))

  def notes(self) -> List[str]:
    """Sentences for the statement."""
    said = [_WARNING] if self.many else []
    if self._changing is not None:
      said.append('Records change from reading to reading. Whoever trained the model says of it: '
                  f'{self._changing!r}. The guarantee holds if each is changed by itself alone.')
    return said

  def take(self, indices: np.ndarray) -> Any:
    taken = self._source.take(indices)
    if self._changing is None:
      arrays = sources.leaves(taken)
      for row, index in enumerate(np.asarray(indices).tolist()):
        known = self._digests.get(index)
        if known is not None or len(self._digests) < _MOST:
          self._compare(index, known, _digest([array[row] for array in arrays]))
    return taken

  def _compare(self, index: int, known: Optional[bytes], digest: bytes) -> None:
    if known is None:
      self._digests[index] = digest
      if self._counts and self._first.setdefault(digest, index) != index:
        self._copies += 1
    elif known != digest:
      raise errors.PrivacyError(
          '`data` must give the same record for a number whenever it is read: else one record may '
          'stand in the place of many. Received: a source that gave another one. Draw nothing at '
          'random in it. If each record is changed by itself (augmentation), say so: '
          "`plan.batches(data, changing='how')`; the statement repeats it.")


_WARNING = (f'More than {SHARE:.0%} of the records are exact copies of others. If a person gave '
            'several of them, the guarantee for one record does not cover that person.')
_FIX = ('Remove copies (weight records by `sample_weight` instead of repeating them), or protect '
        'users: `unit="user"`.')


def _digest(arrays: List[Any]) -> bytes:
  digest = hashlib.blake2b(digest_size=8)
  for array in arrays:
    array = np.asarray(array)
    if array.dtype.kind in 'OSU':
      digest.update(repr(array.tolist()).encode())
      continue
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    digest.update((flat if flat.size <= _BYTES else np.ascontiguousarray(
        flat[::-(-flat.size // _BYTES)])).data)
  return digest.digest()
