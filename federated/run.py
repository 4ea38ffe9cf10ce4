# SPDX-License-Identifier: Apache-2.0
"""State and history of a run, in memory and, if it has a folder, on disk."""

from __future__ import annotations

import json
from typing import Any, Dict, Optional, Sequence, Tuple, TYPE_CHECKING

import numpy as np
import tensorflow as tf

from . import identity
from . import releases
from . import storage

if TYPE_CHECKING:
  import pathlib

_RECORD = ('identity', 'history', 'failed', 'pending')


class Run:
  """A run that starts, or resumes from its saved state.

  Args:
    process: A `PrivateFedAvg`.
    folder: A `RunFolder`, or None to keep nothing.
    resume: Whether to resume a run that is found there.
    train_data: The clients' data.
    client_ids: Their ids, in the order that cohorts are drawn from.

  Attributes:
    state: SECRET state of the server.
    history: Rows of the released rounds.
    pending: The row of the last round, which is saved and perhaps not released yet.
    failed: {client: rounds in which it failed}.
    ever_succeeded: Whether any client could ever be trained.
  """

  def __init__(
      self, process: Any, folder: Optional[storage.RunFolder], resume: bool, train_data: Any,
      client_ids: Sequence[str]) -> None:
    self._folder = folder
    self.history, self.failed, self.pending = [], {}, {}
    self.ever_succeeded = False
    self.state = tf.nest.map_structure(tf.constant, process.initialize())
    if folder is None:
      return
    self._identity = _identity(process, train_data, client_ids)
    saved = folder.load(self.state, self._check)
    _check_released(folder.path, None if saved is None else int(saved[0].round))
    if saved is None:
      return
    if not resume:
      raise FileExistsError(f'There is a run in {folder.path}. Go on with it (resume=True), or '
                            'give another folder; its privacy loss would add to that of a new run.')
    state, record = saved
    self.state = state if process.seed is not None else storage.with_fresh_keys(state)
    self.history, self.failed, self.pending = (
        record['history'], record['failed'], record['pending'])
    self.ever_succeeded = True

  def _check(self, record: Dict[str, Any]) -> None:
    """Raises unless this run can resume from the saved record."""
    folder: Any = self._folder
    path = folder.path
    if not isinstance(record, dict) or not set(_RECORD) <= set(record):
      raise storage.SavedRunError(f'{path} must hold what a run saved, and does not. Give '
                                  'another folder.')
    if record['identity'] != self._identity:
      received, expected = _differences(self._identity, record['identity'])
      raise storage.SavedRunError(
          f'The run in {path} has another plan or other settings, in '
          f'{sorted(received)}. Received: {received}. '
          f'Expected: {expected}. Give those to go on, or give another folder.')

  @property
  def done(self) -> int:
    """Number of rounds of the plan that are used up."""
    return int(self.state.round)

  def weights(self) -> Any:
    weights = self.state.global_model_weights
    return type(weights)(*tf.nest.map_structure(np.asarray, tuple(weights)))

  def advance(self, state: Any, released: Any, exact: Any, failed: Any) -> None:
    """Takes the next state and saves it before anything of it is released."""
    self.state = state
    # The size of the cohort is left out: under add_remove it is private. So is its time.
    self.pending = {
        'round': self.done,
        **{f'private/{name}': value for name, value in released.items()},
        **{f'not_private/{name}': value for name, value in exact.items()}}
    for client in failed:
      self.failed[client] = self.failed.get(client, 0) + 1
    if self._folder is not None:
      self._folder.save(state, {
          'identity': self._identity, 'history': self.history, 'failed': self.failed,
          'pending': self.pending})


def _identity(process: Any, train_data: Any, client_ids: Sequence[str]) -> Dict[str, Any]:
  """Returns what a run must have in common with the saved run that it resumes."""
  return json.loads(json.dumps({
      'plan': json.loads(process.plan.to_json()),
      'client_ids': identity.of_clients(client_ids), 'data': identity.of_data(train_data),
      **{name: identity.describe(value, name) for name, value in process.settings.items()}}))


def _check_released(path: pathlib.Path, saved_round: Optional[int]) -> None:
  """Raises if rounds were released that the saved state does not contain."""
  last = releases.last_round(path)
  if last is not None and (saved_round is None or saved_round < last):
    raise storage.SavedRunError(
        f'{last} rounds were released into {path}, but '
        + ('its state is gone' if saved_round is None else f'its state is of round {saved_round}')
        + '. To train them again would release them twice, and cost privacy twice. Put the last '
        'state back, or give another folder; what was spent in this one then counts as well.')


def _differences(left: Any, right: Any) -> Tuple[Any, Any]:
  """Returns two trees of settings without the settings that are equal."""
  if not (isinstance(left, dict) and isinstance(right, dict)):
    return left, right
  pairs = {key: _differences(left.get(key), right.get(key)) for key in {**left, **right}
           if left.get(key) != right.get(key)}
  return ({key: pair[0] for key, pair in pairs.items()},
          {key: pair[1] for key, pair in pairs.items()})
