# SPDX-License-Identifier: Apache-2.0
"""Every file that Keras writes or reads, of whatever model, keeps the ledger of its weights.

A file of weights holds weights and the ledger. The state of an optimizer, which is SECRET,
goes only into files that resume training: `.keras` files and backups, for their owner alone.
"""

import contextlib
import logging
import threading
from typing import Any, Iterator, List

import numpy as np

from tfdp_adaptive import compat
from tfdp_adaptive.keras import lines

_SECRET = (
    '%s holds the state of a private optimizer, which is SECRET (noise that is still in the '
    'weights, and statistics of the data), and resumes training. %s. Publish '
    '`model.save_weights("NAME.weights.h5")` or `model.export(folder)`.')
_files = threading.local()
_told: List[str] = []  # Kinds of secret files: once in a process.


@contextlib.contextmanager
def resuming() -> Iterator[None]:
  """Lets files hold the SECRET state of optimizers."""
  before, _files.resuming = getattr(_files, 'resuming', False), True
  try:
    yield
  finally:
    _files.resuming = before


def writes_state() -> bool:
  """Returns whether the file being written includes the optimizer's state."""
  return getattr(_files, 'resuming', False) or not getattr(_files, 'writing', False)


@contextlib.contextmanager
def _writing(saved: Any, store: Any) -> Iterator[None]:
  before, _files.writing = getattr(_files, 'writing', False), True
  exact = [v for metric in saved.metrics for v in metric.variables] if hasattr(
      type(saved), 'ledger') and not writes_state() else []  # Sums of private numbers.
  values = [np.asarray(v) for v in exact]
  try:
    for v in exact:
      v.assign(np.zeros(v.shape))
    yield
  finally:
    _files.writing = before
    for v, value in zip(exact, values):
      v.assign(value)
  found = lines.ledger(saved) if hasattr(saved, 'variables') else None
  if found is not None and found.entries:
    store.make(lines.NAME)['0'] = np.frombuffer(found.to_json().encode(), np.uint8)


def _read(saved: Any, store: Any, partly: bool) -> None:
  content = store.get(lines.NAME)
  if '0' in content and hasattr(saved, 'variables'):
    found = lines.parsed(np.asarray(content['0'])).entries
    lines.hang(lines.variables_of(saved), found, replace=not partly)
    if compat.is_model(saved):
      lines.follow(saved)


def tell(what: str, readable: str) -> None:
  """Warns once per process who can read a SECRET file. A backup's folder is its owner's."""
  if readable not in _told and not getattr(_files, 'resuming', False):
    _told.append(readable)
    logging.getLogger('tfdp_adaptive').warning(_SECRET, what, readable)


@contextlib.contextmanager
def _whole(saved: Any, path: str) -> Iterator[None]:
  """While a `.keras` file is written, which resumes."""
  if getattr(getattr(saved, 'optimizer', None), 'run', None) is None:
    yield
    return
  with resuming(), compat.owner_only(path):
    yield
  tell(path, 'Only its owner can read it (mode 600)')


def _legacy(saved: Any, wanted: str, *_: Any) -> None:
  if hasattr(type(saved), 'ledger') or (compat.is_model(saved) and lines.lines(saved.variables)):
    raise ValueError(
        'Legacy formats lose the ledger, which says what the weights have cost in privacy. '
        f'Received: {type(saved).__name__} {getattr(saved, "name", "")!r}. Save to a path that '
        f'ends in {wanted!r}; `model.export(folder)` makes a SavedModel for serving.')


compat.on_files(_writing, _read, _whole, _legacy)
