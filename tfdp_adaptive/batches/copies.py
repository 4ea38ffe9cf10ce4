# SPDX-License-Identifier: Apache-2.0
"""Finds duplicate records, and sources that return other records when they are read again.

A guarantee for one record does not protect a person with five copies of it. Oversampling, or a
source that draws from a few records at random, makes such copies, and the plan does not know of
them.
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
    self._source, self._changing, self._counts = source, changing, counts
    self._digests: Dict[int, bytes] = {}
    self._first: Dict[bytes, int] = {}
    self._copies = 0
    self.specs = source.specs

  def look(self) -> None:
    """Warns about copies among some records, before the first batch."""
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
    """Returns whether more than `SHARE` of the records that were read are copies of others."""
    return self._copies > max(_FEW, SHARE * len(self._digests))

  def notes(self) -> List[str]:
    """Returns sentences for the statement."""
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
          '`data` must give the same record for a number whenever it is read. Otherwise one record '
          'could take several places. Received: a source that gave another record. It must not '
          'draw random numbers. If it augments each record, say how: '
          "`plan.batches(data, changing='how')`. The statement repeats this text.")


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
