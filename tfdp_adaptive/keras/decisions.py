# SPDX-License-Identifier: Apache-2.0
"""Finds callbacks that decide, by what they see, when a `fit` ends or which weights are kept.

Epsilon after t steps holds for a t that was fixed beforehand. Where releases or private numbers
decide when to stop, the planned total is what can be stated.
"""

from typing import Any, List, Sequence
import warnings

from tfdp_adaptive import compat
from tfdp_adaptive import errors
from tfdp_adaptive.independence import captured

callbacks_lib: Any = compat.keras.callbacks
_CHOICES = {
    'EarlyStopping': 'decides when training stops',
    'ReduceLROnPlateau': 'decides the learning rate',
    'ModelCheckpoint': 'decides which weights are kept',
}
_REFUSED = {
    'OrbaxCheckpoint': 'it writes weights without their ledger, and the SECRET optimizer state',
    **({'BackupAndRestore': 'it keeps weights alone, from which no run can go on'}
       if compat.BACKUPS_ARE_WEIGHTS else {}),
}


def foresee(model: Any, callbacks: Any, notes: Sequence[str] = ()) -> None:
  """Warns of callbacks that decide by private numbers, before the first step.

  Args:
    model: A compiled private model, whose statement says it, too.
    callbacks: The list that `fit` was given.
    notes: What the statement is to say of the data.

  Raises:
    PrivacyError: For callbacks that write secrets, or weights without their ledger.
  """
  run = model.optimizer.run
  for note in notes:
    run.note(note)
  flat = _flat(callbacks)
  own = sorted({type(one).__name__ for one in flat if captured.is_own(one)})
  if own:
    run.note(f'Callbacks of its own ran between the steps, {own}. If they used private data to '
             'change weights, settings or data, no epsilon covers that.')
  for one in flat:
    name = next((kind.__name__ for kind in type(one).__mro__ if kind.__name__ in {
        *_CHOICES, *_REFUSED} and kind.__module__.startswith('keras')), '')
    if name in _REFUSED and not type(one).__module__.startswith('tfdp_adaptive'):
      raise errors.PrivacyError(
          f'`{name}` cannot be used with a private model: {_REFUSED[name]}. Use '
          '`tfdp.callbacks.BackupAndRestore` to resume, and `ModelCheckpoint` with '
          '`.weights.h5` to publish.')
    monitor = getattr(one, 'monitor', None)
    if name not in _CHOICES or (name == 'ModelCheckpoint' and not one.save_best_only):
      continue
    sentence = f'{type(one).__name__} {_CHOICES[name]} by `{monitor}`'
    warnings.warn(
        f'{sentence}. On private data this choice is not covered by epsilon. Let it monitor public '
        'data, or fix the number of steps beforehand. The statement names it.', errors.Caution,
        stacklevel=4)
    run.note(f'NOT COVERED IF PRIVATE: {sentence}. If `{monitor}` is computed from private data, '
             'no epsilon covers that choice. If it is computed from public data, the epsilon of '
             'all planned steps holds.')


def look_back(model: Any, callbacks: Any, notes: Sequence[str] = ()) -> None:
  """Counts all planned steps of a run that something it had seen has stopped.

  A `fit` that was not stopped has taken the steps that it was given beforehand. What could have
  ended it sooner saw releases of these steps alone, so they are all that is to be counted.

  Args:
    model: As for `foresee`.
    callbacks: As for `foresee`.
    notes: What was found of the data since then.
  """
  run = model.optimizer.run
  for note in notes:
    if note not in run.notes:
      warnings.warn(note, errors.Caution, stacklevel=4)
      run.note(note)
  if not model.stop_training or run.plan is None:
    return
  budget = [one.affordable for one in _flat(callbacks)
            if getattr(one, 'affordable', None) is not None]
  run.stopped = int(min([run.plan.steps, *budget]))
  if run.stopped > run.steps:
    run.note(f'Training was stopped after {run.steps} steps by something that had been seen, so '
             f'that all {run.stopped} steps that it could have taken are counted.')


def _flat(callbacks: Any) -> List[Any]:
  if isinstance(callbacks, callbacks_lib.CallbackList):
    return list(callbacks.callbacks)
  return list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
