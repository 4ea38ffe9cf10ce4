# SPDX-License-Identifier: Apache-2.0
"""The error of a step that would not be private, and the warning of this library."""

FIX = ('Use `tfdp.make_private(model)`, `tfdp.DPSequential` or a class that derives from '
       '`tfdp.DPModel`, and `fit` or `train_on_batch`.')


class PrivacyError(Exception):
  """Going on would void the privacy guarantee."""


class Caution(UserWarning):
  """Every warning of this library is one: something goes on that may not be what was meant."""
