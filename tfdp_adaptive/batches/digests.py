# SPDX-License-Identifier: Apache-2.0
"""Digests of the records of every batch, by which an auditor checks what ran.

The file is SECRET, because it tells the sizes of batches. It is JSON Lines: a header, then one line
for a batch. Digests are keyed by the coins of the run. Without the coins nobody can tell from a
digest whether a record was used, nor change a line without being noticed.
"""

import hashlib
import json
import os
import pathlib
from typing import Any, Dict, Iterator, List, Tuple, Union

import numpy as np

from tfdp_adaptive import checks
from tfdp_adaptive import runfolder
from tfdp_adaptive import terms as terms_lib
from tfdp_adaptive import trees
from tfdp_adaptive.batches import sampling_seed
from tfdp_adaptive.batches import sources

_FORMAT, _VERSION = 'tfdp_adaptive.digests', 1


class Log:
  """Writes the digests of a run's batches, as they are drawn.

  Args:
    path: Path of the file; lines are added to a file of an earlier part of the run.
    seed: The `SamplingSeed` of the run, which must be in a file.
    plan: The plan of the run.
    size: SECRET number of records.
    unit: What the records are.
  """

  def __init__(self, path: Union[str, 'os.PathLike[str]'], seed: sampling_seed.SamplingSeed,
               plan: terms_lib.Terms, size: int, unit: str = 'example') -> None:
    if not seed.in_file or plan.unit != unit or plan.seed is not None:
      raise ValueError(
          '`digests_to` needs the coins of a run in a file, by which its batches can be drawn '
          'again: `plan.batches(data, coins=PATH, digests_to=FILE)`, with unit="example" and no '
          f'seed. Received: coins in a file: {seed.in_file}, unit={plan.unit!r}, seed={plan.seed}.')
    self._path, self._seed, self._size = pathlib.Path(path), seed, size

  def add(self, step: int, records: Any, numbers: np.ndarray) -> None:
    """Writes the line of a batch of records with these numbers."""
    self.write(step, records.take(numbers, step, self._seed)[0])

  def write(self, step: int, taken: sources.Nest) -> None:
    """Writes the line of a batch of these records."""
    key = self._seed.key(step)
    line = {'pass': self._seed.passes, 'step': step, 'records': list(of_records(taken, key))}
    line['seal'] = seal(key, self._size, line)
    if not self._path.exists():  # SECRET: it tells the sizes of the batches.
      header = {'format': _FORMAT, 'version': _VERSION, 'size': self._size}
      runfolder.create(self._path, (json.dumps(header) + '\n').encode())
    with open(self._path, 'ab') as file:  # At once: a process that ends leaves no half of a line.
      file.write((json.dumps(line) + '\n').encode())


def of_records(taken: sources.Nest, key: int) -> Iterator[str]:
  """Yields the digest of each record of a nest of arrays [n, ...]."""
  for parts in zip(*sources.leaves(taken)):
    digest = _keyed(key)
    for part in map(np.asarray, parts):
      digest.update(repr((part.shape, part.dtype.str)).encode())
      digest.update(trees.content(part))
    yield digest.hexdigest()


def seal(key: int, size: int, line: Dict[str, Any]) -> str:
  """Returns the digest of a line and of the number of records, which only the coins give."""
  digest = _keyed(key)
  digest.update(json.dumps([size, line['pass'], line['step'], line['records']]).encode())
  return digest.hexdigest()


def _keyed(key: int) -> Any:
  secret = hashlib.sha256(f'tfdp_adaptive.records {key}'.encode()).digest()
  return hashlib.blake2b(key=secret, digest_size=16)


def read(path: pathlib.Path) -> Tuple[int, List[Dict[str, Any]]]:
  """Returns the number of records, and the lines of all batches.

  Raises:
    ValueError: If it is no file of digests.
  """
  try:
    header, *lines = map(json.loads, path.read_text(encoding='utf-8').splitlines())
    if (header['format'], header['version']) != (_FORMAT, _VERSION):
      raise ValueError('another format')
    for line in lines:
      if {key: type(value) for key, value in line.items()} != {
          'pass': int, 'step': int, 'records': list, 'seal': str} or not all(
              isinstance(one, str) for one in line['records']):
        raise ValueError('a line that is no batch')
    checks.whole(size=header['size'])
    return header['size'], lines
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise ValueError(f'{path} must be a file of digests, which `plan.batches(data, coins=PATH, '
                     f'digests_to=FILE)` writes. Received: {str(error)[:80]}.') from error
