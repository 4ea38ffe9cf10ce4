# SPDX-License-Identifier: Apache-2.0
"""A Keras optimizer that takes no gradients from anywhere but its own private step."""

import contextlib
from typing import Any, Iterator

from tfdp_adaptive import compat
from tfdp_adaptive import errors


class GuardedOptimizer(compat.keras.optimizers.Optimizer):
  """Refuses every public way by which Keras hands gradients to an optimizer."""

  _applying = False

  @contextlib.contextmanager
  def _allow_apply(self) -> Iterator[None]:
    self._applying = True
    try:
      yield
    finally:
      self._applying = False

  def _refuse_gradients(self) -> None:
    if not self._applying:
      raise errors.PrivacyError(
          f'{self.name} was handed gradients that were not clipped per example. {errors.FIX}')

  def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
    self._refuse_gradients()
    return super().apply_gradients(grads_and_vars, *args, **kwargs)

  def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
    self._refuse_gradients()
    return super().apply(grads, trainable_variables)

  def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> Any:
    raise errors.PrivacyError(f'{self.name} does not hand out gradients. {errors.FIX}')
