# SPDX-License-Identifier: Apache-2.0
"""Refuses to go on with other records than those a run began with, where their places count."""

from typing import Any, Callable
import warnings

from tfdp_adaptive import errors


def check(run: Any, digest: Callable[[], str], in_file: bool = False) -> None:
  """Refuses records that differ from those of earlier steps. Stores new ones.

  Where random numbers are not drawn at every step, the place of a record decides when it takes
  part: moved, it would take part sooner than is accounted for.

  Args:
    run: The `Run`.
    digest: Returns a digest of the records; called where their places decide something.
    in_file: Whether a file of `coins` knows the records, too.
  """
  if run.plan.sampling.drawn_each_step:
    return
  found = digest()
  if run.steps and run.records is not None and run.records != found:
    raise errors.PrivacyError(
        f'A run by {run.plan.sampling} goes on with the records that it began with, in the '
        'same order: by their places they would take part sooner than they are accounted for. '
        f'Received: after {run.steps} steps, other records, or in another order. Give '
        'those of the first `fit`; for others make a new plan, optimizer and run.')
  if run.steps and run.records is None and not in_file:
    warnings.warn(
        f'The {run.steps} steps so far were taken elsewhere, and nothing tells whether '
        'the records are the same, in the same order: in other places they would take part '
        'sooner than is accounted for. Name a SECRET file that knows, when a run begins and when '
        'it goes on: `plan.batches(data, coins=PATH)`; or use '
        '`tfdp.callbacks.BackupAndRestore`.', errors.Caution, stacklevel=4)
  run.records = found
