# SPDX-License-Identifier: Apache-2.0
"""The error of a step that would not be private, the one of a command, and the warning."""

import contextlib
from typing import Iterator

FIX = ('Use `tfdp.make_private(model)`, `tfdp.DPSequential` or a class that derives from '
       '`tfdp.DPModel`, and `fit` or `train_on_batch`.')


class PrivacyError(Exception):
  """Going on would void the privacy guarantee."""


class Caution(UserWarning):
  """Every warning of this library is one: something goes on that may not be what was meant."""


class UsageError(ValueError):
  """A command cannot be carried out; the message says how to put it right."""


@contextlib.contextmanager
def usage() -> Iterator[None]:
  """Raises a `ValueError` of the library as a `UsageError`: its user wrote the values."""
  try:
    yield
  except ValueError as error:
    raise UsageError(str(error)) from error
