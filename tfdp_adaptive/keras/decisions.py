# SPDX-License-Identifier: Apache-2.0
"""Finds callbacks and layers that saw data, for the privacy statement.

Epsilon after t steps holds for a t that was fixed beforehand. If noisy or private numbers decide
when to stop, only the planned total can be stated. The state of a layer that was adapted to data
is an exact statistic of the data.
"""

from typing import Any, List, Sequence
import warnings

import numpy as np

from tfdp_adaptive import compat
from tfdp_adaptive import errors
from tfdp_adaptive.independence import captured
from tfdp_adaptive.keras import lines

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
    notes: Sentences about the data for the statement.

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
    notes: Later findings about the data.
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


_PUBLIC = '_tfdp_public'


def label(layer: Any) -> str:
  """The name in the ledger of a layer's private adaptation."""
  return f'estimates.adapt({layer.name})'


def say_public(layer: Any, source: str) -> None:
  """Records that a layer was adapted to public data."""
  object.__setattr__(layer, _PUBLIC, source)


def check(model: Any, run: Any) -> None:
  """Warns of adapted layers whose cost is not in the ledger; the statement of `run` names them."""
  found = compat.all_layers(model)
  inner = [getattr(layer, '_lookup_layer', None) for layer in found]
  unknown = [layer.name for layer in found
             if all(layer is not one for one in inner) and is_adapted(layer)
             and not hasattr(layer, _PUBLIC)
             and label(layer) not in [one.rule for one in lines.entries(lines.lines([layer]))]]
  for layer in found:
    if hasattr(layer, _PUBLIC):
      run.note(f'{layer.name} was adapted to data that are public in the words of whoever trained '
               f'the model: {getattr(layer, _PUBLIC)!r}.')
  if unknown:
    warnings.warn(
        f'Layers {unknown} hold a vocabulary or exact statistics. If these come from private data, '
        'no epsilon covers them. Use `tfdp.estimates.adapt(layer, data, ...)`, whose cost is in '
        'the ledger. If they are public, say so: '
        "`tfdp.estimates.adapt(layer, data, public='where the data come from')`.",
        errors.Caution, stacklevel=2)
    run.note(f'NOT COVERED IF PRIVATE: layers {unknown} hold a vocabulary or exact statistics. If '
             'these come from private data, no epsilon covers them.')


def is_adapted(layer: Any) -> bool:
  """Whether a layer holds something that it may have computed from data."""
  if not hasattr(layer, 'adapt'):
    return False
  inner = getattr(layer, '_lookup_layer', layer)
  if hasattr(inner, 'get_vocabulary'):
    return getattr(inner, 'input_vocabulary', None) is None and bool(_words(inner))
  if hasattr(layer, 'num_bins'):
    return layer.num_bins is not None and bool(len(layer.bin_boundaries or ()))
  mean, variance = (getattr(layer, name, None) for name in ('adapt_mean', 'adapt_variance'))
  return mean is not None and bool(
      np.any(np.asarray(mean) != 0) or np.any(np.asarray(variance) != 1))


def _words(layer: Any) -> List[Any]:
  try:
    return list(layer.get_vocabulary(include_special_tokens=False))
  except (AttributeError, RuntimeError, ValueError):  # It has none yet.
    return []
