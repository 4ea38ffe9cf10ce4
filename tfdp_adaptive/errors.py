# SPDX-License-Identifier: Apache-2.0
"""The errors and the warning of this library."""

import contextlib
import sys
import threading
from typing import Any, Iterator, Type
import warnings

FIX = ('Use `tfdp.make_private(model)`, `tfdp.DPSequential` or a '
       '`class MyModel(tfdp.DPModel, keras.Model)`, and `fit` or `train_on_batch`.')

# Modules whose frames stand between a program and this library.
_LIBRARIES = ('tfdp_adaptive', 'keras', 'keras_hub', 'tensorflow', 'concurrent', 'threading',
              'contextlib')


class PrivacyError(Exception):
  """Raised if the next step would void the privacy guarantee."""


class Caution(UserWarning):
  """The category of all warnings of this library."""


def caution(message: str) -> None:
  """Warns at the line of the user's program, wherever Keras or a thread called from."""
  own, main = sys._getframe(1), sys._current_frames().get(threading.main_thread().ident or 0)
  for start in (own, main):
    frame: Any = start
    while frame is not None:
      name = frame.f_globals.get('__name__', '').partition('.')[0]
      if name not in _LIBRARIES and 'autograph' not in frame.f_code.co_filename:
        warnings.warn_explicit(
            message, Caution, frame.f_code.co_filename, frame.f_lineno,
            registry=frame.f_globals.setdefault('__warningregistry__', {}))
        return
      frame = frame.f_back
  warnings.warn(message, Caution, stacklevel=2)


@contextlib.contextmanager
def unwrapped(kind: Type[Exception]) -> Iterator[None]:
  """Raises a `PrivacyError` of a data source that TensorFlow has wrapped in an error of its own."""
  try:
    yield
  except kind as error:
    _, name, text = str(error).partition('PrivacyError: ')
    if not name:
      raise
    raise PrivacyError(text.partition('\n')[0].strip()) from None


class UsageError(ValueError):
  """Raised if a command cannot run. The message says how to fix it."""


@contextlib.contextmanager
def usage() -> Iterator[None]:
  """Raises a `ValueError` of the library as a `UsageError`: its user wrote the values."""
  try:
    yield
  except ValueError as error:
    raise UsageError(str(error)) from error
