# SPDX-License-Identifier: Apache-2.0
"""A run goes on with the records that it began with, each in its place.

Where coins are not drawn at every step, a record's place decides when it takes part: moved,
it would take part sooner than is accounted for. So an optimizer remembers, as long as it
lives, some records of its first `fit` by a digest, and `BackupAndRestore` keeps that beside
the backup. A saved model has none: it may be published, and a digest tells of records. There
the file of `plan.batches(data, coins=PATH)` does the same.
"""

import pathlib
from typing import Any
import warnings

from tfdp_adaptive import errors

_FILE = 'records'


def check(optimizer: Any, batches: Any) -> None:
  """Refuses batches of other records than those of the steps before; remembers them.

  Args:
    optimizer: A `DPOptimizer`.
    batches: Of its plan.
  """
  found = batches.tfdp_records()
  if found is None:  # Places decide nothing.
    return
  if optimizer.steps_done and optimizer.records is not None:
    _compare(optimizer, found)
  elif optimizer.steps_done and not batches.tfdp_coins.in_file:
    warnings.warn(
        f'The {optimizer.steps_done} steps so far were taken elsewhere, and nothing tells whether '
        'the records are the same, in the same order: in other places they would take part sooner '
        'than is accounted for. Name a SECRET file that knows, when a run begins and when it goes '
        'on: `plan.batches(data, coins=PATH)`; or use `tfdp.callbacks.BackupAndRestore`.',
        errors.Caution, stacklevel=4)
  optimizer.records = found


def keep(optimizer: Any, folder: pathlib.Path) -> None:
  """Writes what is known of the records into a SECRET folder."""
  if optimizer.records is not None:
    (folder / _FILE).write_text(optimizer.records, encoding='utf-8')


def restore(optimizer: Any, folder: pathlib.Path) -> None:
  """Refuses to go on from a folder of `keep` with other records, now and later."""
  found = optimizer.records
  if found is not None and (folder / _FILE).exists():
    optimizer.records = (folder / _FILE).read_text(encoding='utf-8')
    _compare(optimizer, found)


def _compare(optimizer: Any, found: str) -> None:
  if optimizer.records != found:
    raise errors.PrivacyError(
        f'A run by {optimizer.plan.sampling} goes on with the records that it began with, in the '
        'same order: by their places they would take part sooner than they are accounted for. '
        f'Received: after {optimizer.steps_done} steps, other records, or in another order. Give '
        'those of the first `fit`; for others make a new plan, optimizer and run.')
