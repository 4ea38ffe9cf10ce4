# SPDX-License-Identifier: Apache-2.0
"""Every file that Keras writes or reads, of whatever model, keeps the ledger of its weights.

A file of weights holds weights and the ledger. The state of an optimizer, which is SECRET,
goes only into files that resume training: `.keras` files and backups, for their owner alone.
"""

import contextlib
import os
from typing import Any, Iterator

import numpy as np

from tfdp_adaptive import compat
from tfdp_adaptive import runfolder
from tfdp_adaptive.keras import weight_ledger


@contextlib.contextmanager
def _writing(saved: Any, store: Any) -> Iterator[None]:
  # Before anything is written.
  found = weight_ledger.Ledger.of(saved).ledger() if hasattr(saved, 'variables') else None
  with runfolder.writing(runfolder.WEIGHTS):
    exact = [v for metric in saved.metrics for v in metric.variables] if hasattr(
        type(saved), 'ledger') and not runfolder.may_be_secret() else []  # Sums of private numbers.
    values = [compat.read(v) for v in exact]
    try:
      for v in exact:
        v.assign(np.zeros(v.shape))
      yield
    finally:
      for v, value in zip(exact, values):
        v.assign(value)
  if found is not None and found.entries:
    store.make(weight_ledger.NAME)['0'] = np.frombuffer(found.to_json().encode(), np.uint8)


def _read(saved: Any, store: Any, partly: bool) -> None:
  content = store.get(weight_ledger.NAME)
  if '0' in content and hasattr(saved, 'variables'):
    found = weight_ledger.parsed(np.asarray(content['0'])).entries
    weight_ledger.Ledger.of(saved).attach(found, replace=not partly)


@contextlib.contextmanager
def _whole(saved: Any, path: Any) -> Iterator[None]:
  """While a `.keras` file is written, which resumes."""
  if getattr(getattr(saved, 'optimizer', None), 'run', None) is None:
    yield
    return
  on_disk = isinstance(path, (str, os.PathLike))
  with runfolder.writing(runfolder.STATE), (
      compat.owner_only(os.fspath(path)) if on_disk else contextlib.nullcontext()):
    yield
  if on_disk:
    runfolder.tell(path, 'Only its owner can read it (mode 600)')
  else:
    runfolder.tell('A file object', 'Whoever gets its content can read it')


def _legacy(saved: Any, wanted: str, *_: Any) -> None:
  if hasattr(type(saved), 'ledger') or (
      compat.is_model(saved) and weight_ledger.Ledger(saved.variables).lines()):
    raise ValueError(
        'Legacy formats lose the ledger, which says what the weights have cost in privacy. '
        f'Received: {type(saved).__name__} {getattr(saved, "name", "")!r}. Save to a path that '
        f'ends in {wanted!r}; `model.export(folder)` makes a SavedModel for serving.')


compat.on_files(_writing, _read, _whole, _legacy)
compat.on_checkpoints(runfolder.was_in_checkpoint)
