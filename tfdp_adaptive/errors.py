# SPDX-License-Identifier: Apache-2.0
"""The error of a step that would not be private."""

FIX = ('Use `tfdp.make_private(model)`, `tfdp.DPSequential` or a class that derives from '
       '`tfdp.DPModel`, and `fit` or `train_on_batch`.')


class PrivacyError(Exception):
  """Going on would void the privacy guarantee."""
