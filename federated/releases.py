# SPDX-License-Identifier: Apache-2.0
"""Writes released numbers to release managers, which have TFF's `async release(value, key)`.

CSV and TensorBoard do not need TFF. A `tff.program.ReleaseManager` works, too.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import csv
import io
import pathlib
from typing import Any, List, Mapping, Optional, Protocol, Sequence

import numpy as np
import tensorflow as tf

from tfdp_adaptive import runfolder

from . import storage

_METRICS, _KEY, _EVENTS = 'metrics.csv', 'round', 'events.out.tfevents.'
Numbers = Mapping[str, Any]


class Manager(Protocol):
  """Publishes the numbers of a round; a `tff.program.ReleaseManager` is one."""

  async def release(self, value: Numbers, key: int) -> None:
    """Publishes the numbers of round `key`."""


def managers(path: pathlib.Path) -> List[Manager]:
  """Returns release managers for CSV and TensorBoard files in a run's folder."""
  return [_Csv(path / _METRICS), _TensorBoard(path / 'tensorboard')]


def release(release_managers: Sequence[Manager], row: Numbers) -> None:
  """Passes a row of numbers to every release manager."""
  values = {name: value for name, value in row.items() if name != _KEY}

  async def to_all() -> None:
    await asyncio.gather(*(manager.release(values, row[_KEY]) for manager in release_managers))

  # A thread of its own, since notebooks already run an event loop in this one.
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    pool.submit(asyncio.run, to_all()).result()


def last_round(path: pathlib.Path) -> Optional[int]:
  """Returns the last round that was released into a folder, or None.

  Raises:
    SavedRunError: If `metrics.csv` was not written by a run.
  """
  rounds = [int(file.name.rsplit('.', 1)[1]) for file in (path / 'tensorboard').glob(_EVENTS + '*')
            if file.name.rsplit('.', 1)[1].isdecimal()]
  try:
    if (path / _METRICS).exists():
      with open(path / _METRICS, encoding='utf-8', newline='') as file:
        rows = csv.DictReader(file, strict=True)
        if _KEY not in (rows.fieldnames or ()):
          raise ValueError(f'there is no column {_KEY!r}')
        for row in rows:
          if None in row or not (row[_KEY] or '').isdecimal():
            raise ValueError(f'there is a row that is none, {list(row.values())[:3]}')
          rounds.append(int(row[_KEY]))
  except (OSError, ValueError, csv.Error) as error:
    raise storage.SavedRunError(
        f'{path / _METRICS} must be what a run released, and cannot be read: {error}. Put the '
        'file back, or give another folder.') from error
  return max(rounds, default=None)


class _Csv:
  """Replaces one table of all rounds at every round, so that no row is ever cut."""

  def __init__(self, path: pathlib.Path) -> None:
    self._path = path
    if not path.exists():
      self._write([_KEY], [])

  async def release(self, value: Numbers, key: int) -> None:
    """Writes a row in the place of this round's and all later ones'."""
    with open(self._path, encoding='utf-8', newline='') as file:
      reader = csv.DictReader(file)
      names, rows = list(reader.fieldnames or [_KEY]), list(reader)
    row = {_KEY: key, **{name: np.asarray(number).tolist() for name, number in value.items()}}
    earlier = [one for one in rows if int(one[_KEY]) < key]
    self._write(list(dict.fromkeys([*names, *row])), [*earlier, row])

  def _write(self, names: Sequence[str], rows: Sequence[Numbers]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, names)
    writer.writeheader()
    writer.writerows(rows)
    runfolder.replace(self._path, text.getvalue().encode(), 0o666)


class _TensorBoard:
  """Writes numbers for TensorBoard with the round as time, since real times are not private."""

  def __init__(self, path: pathlib.Path) -> None:
    self._path = path
    self._writer: Any = None

  async def release(self, value: Numbers, key: int) -> None:
    if self._writer is None:  # One file per process, named by its first round.
      self._path.mkdir(parents=True, exist_ok=True)
      self._writer = tf.io.TFRecordWriter(str(self._path / f'{_EVENTS}{key:08d}'))
      self._write(tf.compat.v1.Event(wall_time=0, file_version='brain.Event:2'))
    summary = tf.compat.v1.Summary(value=[
        tf.compat.v1.Summary.Value(tag=name, simple_value=float(number))
        for name, number in value.items() if np.ndim(number) == 0])
    self._write(tf.compat.v1.Event(wall_time=key, step=key, summary=summary))

  def _write(self, event: tf.compat.v1.Event) -> None:
    self._writer.write(event.SerializeToString())
    self._writer.flush()
