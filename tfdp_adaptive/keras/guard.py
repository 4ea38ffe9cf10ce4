# SPDX-License-Identifier: Apache-2.0
"""A Keras optimizer with fixed settings, which takes gradients from its own private step only."""

import contextlib
from typing import Any, FrozenSet, Iterator

from tfdp_adaptive import compat
from tfdp_adaptive import errors


class GuardedOptimizer(compat.GlobalOptimizer):
  """Refuses every public way by which Keras hands gradients to an optimizer.

  From when it is made it also refuses other settings: it would go on with those that it has.
  """

  _applying = False
  _fixed: FrozenSet[str] = frozenset()

  def __setattr__(self, name: str, value: Any) -> None:
    setter = getattr(getattr(type(self), name, None), 'fset', None)
    if name in self._fixed and setter is None:
      raise AttributeError(
          f'`{name}` of {self.name} cannot be changed: it would go on as it was made. Make another '
          f'optimizer and compile the model with it, or set `learning_rate`, which may change at '
          f'any time. Received: {name}={value!r}.')
    super().__setattr__(name, value)

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

  def minimize(self, loss: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuses what plain Keras 2 models call: the gradient of a whole batch."""
    del loss, args, kwargs
    raise errors.PrivacyError(f'{self.name} trains private models only. {errors.FIX}')
