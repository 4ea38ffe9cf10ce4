# SPDX-License-Identifier: Apache-2.0
"""A Keras optimizer that takes no gradients from anywhere but its own private step."""

import contextlib

from tfdp_adaptive import compat
from tfdp_adaptive import errors


class GuardedOptimizer(compat.keras.optimizers.Optimizer):
  """Refuses every public way by which Keras hands gradients to an optimizer."""

  _applying = False

  @contextlib.contextmanager
  def _allow_apply(self):
    self._applying = True
    try:
      yield
    finally:
      self._applying = False

  def _refuse_gradients(self):
    if not self._applying:
      raise errors.PrivacyError(
          f'{self.name} was handed gradients that were not clipped per example. {errors.FIX}')

  def apply_gradients(self, grads_and_vars, *args, **kwargs):
    self._refuse_gradients()
    return super().apply_gradients(grads_and_vars, *args, **kwargs)

  def apply(self, grads, trainable_variables=None):
    self._refuse_gradients()
    return super().apply(grads, trainable_variables)

  def compute_gradients(self, loss, var_list, tape=None):
    raise errors.PrivacyError(f'{self.name} does not hand out gradients. {errors.FIX}')
