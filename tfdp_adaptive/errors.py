# SPDX-License-Identifier: Apache-2.0
"""The error of a step that would not be private, the one of a command, and the warning."""

import contextlib
from typing import Iterator

FIX = ('Use `tfdp.make_private(model)`, `tfdp.DPSequential` or a '
       '`class MyModel(tfdp.DPModel, keras.Model)`, and `fit` or `train_on_batch`.')


class PrivacyError(Exception):
  """Going on would void the privacy guarantee."""


class Caution(UserWarning):
  """The category of all warnings of this library."""


class UsageError(ValueError):
  """Raised if a command cannot run. The message says how to fix it."""


@contextlib.contextmanager
def usage() -> Iterator[None]:
  """Raises a `ValueError` of the library as a `UsageError`: its user wrote the values."""
  try:
    yield
  except ValueError as error:
    raise UsageError(str(error)) from error
