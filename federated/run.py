# SPDX-License-Identifier: Apache-2.0
"""State and history of a run, in memory and, if it has a folder, on disk."""

import csv
import io
import json
import pathlib
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import runfolder
from tfdp_adaptive.privacy import ledger as ledger_lib

from . import engines
from . import identity
from . import server as server_lib
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

  def release(self, rows: Sequence[Numbers]) -> None:
    """Writes the rows of all rounds so far, the last of which is a new one."""
    rows = [{name: np.asarray(number).tolist() for name, number in row.items()} for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)))
    writer.writeheader()
    writer.writerows(rows)
    runfolder.replace(self._table, text.getvalue().encode(), 0o666)
    self._write_events(rows[-1][_KEY], rows[-1])

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


Row = Dict[str, Any]  # The numbers of a round.
Described = Any  # Settings as JSON.
_RECORD = ('identity', 'history', 'failed', 'pending')


class Run:
  """A run that starts, or resumes from its saved state.

  Args:
    process: A `PrivateFedAvg`.
    folder: A `RunFolder`, or None to keep nothing.
    train_data: The clients' data.
    client_ids: Their ids, in the order that cohorts are drawn from.

  Attributes:
    state: SECRET state of the server.
    history: Rows of the released rounds.
    pending: The row of the last round, which is saved and perhaps not released yet.
    failed: {client: rounds in which it failed}.
    ever_succeeded: Whether any client could ever be trained.
    notes: Sentences for the run's entry of the ledger.
    before: Entries of the ledger of the weights that the first round began with.
    seeded: Whether any round had a fixed seed.
  """

  def __init__(
      self, process: engines.PrivateFedAvg, folder: Optional[storage.RunFolder],
      train_data: engines.ClientData, client_ids: Sequence[engines.Client]) -> None:
    self._process, self._folder = process, folder
    self.history: List[Row] = []
    self.failed: Dict[engines.Client, int] = {}
    self.pending: Row = {}
    self.notes: Tuple[str, ...] = ()
    self.before, self.seeded = tuple(process.history()), process.seed is not None
    self._id = ledger_lib.new_run()
    self._resumed: Tuple[Tuple[str, int], ...] = ()
    self.ever_succeeded = False
    self.state: server_lib.State = tf.nest.map_structure(tf.constant, process.initialize())
    if folder is None:
      return
    self._identity = _identity(process, train_data, client_ids)
    saved = folder.load()
    if saved is None:
      _check_released(folder.path, None)
      return
    arrays, record = saved
    state = self._state_of(folder.path, arrays, record)
    _check_released(folder.path, int(state.round))
    self.state = state if process.seed is not None else storage.with_fresh_keys(state)
    self.history, self.failed, self.pending = (
        record['history'], record['failed'], record['pending'])
    self.ever_succeeded, self.notes = True, tuple(record.get('notes', ()))
    if 'ledger' in record:  # Not of the model that is given now, whose weights are not used.
      *before, mine = ledger_lib.Ledger.from_json(record['ledger']).entries
      self.before, self.seeded = (*before, *self.before), self.seeded or mine.seeded
      self._resumed = (*mine.resumed, (mine.run, mine.steps))

  def _state_of(
      self, path: pathlib.Path, arrays: Sequence[np.ndarray], record: storage.Record
  ) -> server_lib.State:
    """Returns the saved state, after checking that this run can resume from it."""
    if not isinstance(record, dict) or not set(_RECORD) <= set(record):
      raise storage.SavedRunError(f'{path} must hold what a run saved, and does not. Give '
                                  'another folder.')
    if record['identity'] != self._identity:
      received, expected = _differences(self._identity, record['identity'])
      raise storage.SavedRunError(
          f'The run in {path} has another plan or other settings, in '
          f'{sorted(received)}. Received: {received}. '
          f'Expected: {expected}. Give those to go on, or give another folder.')
    wanted = [np.asarray(x) for x in tf.nest.flatten(self.state)]
    if [(x.shape, x.dtype) for x in arrays] != [(x.shape, x.dtype) for x in wanted]:
      raise storage.SavedRunError(f'The run saved in {path} has another model, rule or mechanism. '
                                  'Give the process it was started with, or another folder.')
    return tf.nest.pack_sequence_as(self.state, [tf.constant(x) for x in arrays])

  @property
  def done(self) -> int:
    """Returns the number of rounds of the plan that are used up."""
    return int(self.state.round)

  def commit(self, note: str) -> None:
    """Notes what the sampling seed commits to, unless this is not the seed of the first round."""
    self.notes = (note,) if not self.done or note in self.notes else ()

  def ledger(self) -> ledger_lib.Ledger:
    """Returns the ledger of the weights after the rounds so far."""
    return ledger_lib.distinct((*self.before, self._process.entry(
        self.done, run=self._id, resumed=self._resumed, seeded=self.seeded, notes=self.notes)))

  def weights(self) -> server_lib.ModelWeights:
    """Returns the weights; those of a Keras model, which may get them, with their ledger."""
    weights = self.state.global_model_weights
    arrays = tf.nest.map_structure(np.asarray, tuple(weights))
    if isinstance(weights, server_lib.ModelWeights):
      return engines.trained(arrays, self.ledger())
    return type(weights)(*arrays)  # TFF's.

  def advance(self, state: server_lib.State, released: Row,
              failed: Iterable[engines.Client]) -> None:
    """Takes the next state and saves it before anything of it is released."""
    self.state = state
    # The size of the cohort is left out: under add_remove it is private. So is its time.
    self.pending = {
        'round': self.done,
        **{f'private/{name}': value for name, value in released.items()}}
    for client in failed:
      self.failed[client] = self.failed.get(client, 0) + 1
    if self._folder is not None:
      self._folder.save(tf.nest.flatten(state), {
          'identity': self._identity, 'history': self.history, 'failed': self.failed,
          'pending': self.pending, 'notes': self.notes, 'ledger': self.ledger().to_json()})


def _identity(process: engines.PrivateFedAvg, train_data: engines.ClientData,
              client_ids: Sequence[engines.Client]) -> storage.Record:
  """Returns what a run must have in common with the saved run that it resumes."""
  return json.loads(json.dumps({
      'plan': json.loads(process.plan.to_json()),
      'client_ids': identity.of_clients(client_ids), 'data': identity.of_data(train_data),
      **{name: identity.describe(value, name) for name, value in process.settings.items()}}))


def _check_released(path: pathlib.Path, saved_round: Optional[int]) -> None:
  """Raises if rounds were released that the saved state does not contain."""
  last = last_round(path)
  if last is not None and (saved_round is None or saved_round < last):
    raise storage.SavedRunError(
        f'{last} rounds were released into {path}, but '
        + ('its state is gone' if saved_round is None else f'its state is of round {saved_round}')
        + '. To train them again would release them twice, and cost privacy twice. Put the last '
        'state back, or give another folder; what was spent in this one then counts as well.')


def _differences(left: Described, right: Described) -> Tuple[Described, Described]:
  """Returns two trees of settings without the settings that are equal."""
  if not (isinstance(left, dict) and isinstance(right, dict)):
    return left, right
  pairs = {key: _differences(left.get(key), right.get(key)) for key in {**left, **right}
           if left.get(key) != right.get(key)}
  return ({key: pair[0] for key, pair in pairs.items()},
          {key: pair[1] for key, pair in pairs.items()})
