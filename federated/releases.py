# SPDX-License-Identifier: Apache-2.0
"""Writes the released numbers of rounds into the folder of their run."""

from __future__ import annotations

import csv
import io
import pathlib
from typing import Any, Mapping, Optional, Sequence

import numpy as np
import tensorflow as tf

from tfdp_adaptive import runfolder

from . import storage

_METRICS, _KEY, _EVENTS = 'metrics.csv', 'round', 'events.out.tfevents.'
Numbers = Mapping[str, Any]


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


class Releases:
  """The released numbers of a run in its folder: a table, and events for TensorBoard.

  The table is replaced at every round, so that no row is ever cut. Events have the round as time,
  since real times are not private.
  """

  def __init__(self, path: pathlib.Path) -> None:
    self._table, self._events = path / _METRICS, path / 'tensorboard'
    self._writer: Any = None
    if not self._table.exists():
      self._write_table([_KEY], [])

  def release(self, row: Numbers) -> None:
    """Writes a row in the place of this round's and all later ones'."""
    with open(self._table, encoding='utf-8', newline='') as file:
      reader = csv.DictReader(file)
      names, rows = list(reader.fieldnames or [_KEY]), list(reader)
    row = {name: np.asarray(number).tolist() for name, number in row.items()}
    earlier = [one for one in rows if int(one[_KEY]) < row[_KEY]]
    self._write_table(list(dict.fromkeys([*names, *row])), [*earlier, row])
    self._write_events(row[_KEY], row)

  def _write_table(self, names: Sequence[str], rows: Sequence[Numbers]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, names)
    writer.writeheader()
    writer.writerows(rows)
    runfolder.replace(self._table, text.getvalue().encode(), 0o666)

  def _write_events(self, key: int, row: Numbers) -> None:
    events = []
    if self._writer is None:  # One file per process, named by its first round.
      self._events.mkdir(parents=True, exist_ok=True)
      self._writer = tf.io.TFRecordWriter(str(self._events / f'{_EVENTS}{key:08d}'))
      events.append(tf.compat.v1.Event(wall_time=0, file_version='brain.Event:2'))
    summary = tf.compat.v1.Summary(value=[
        tf.compat.v1.Summary.Value(tag=name, simple_value=float(number))
        for name, number in row.items() if name != _KEY and np.ndim(number) == 0])
    events.append(tf.compat.v1.Event(wall_time=key, step=key, summary=summary))
    for event in events:
      self._writer.write(event.SerializeToString())
    self._writer.flush()
