# SPDX-License-Identifier: Apache-2.0
"""Ends a training that has diverged, by what may be looked at: the weights, and public data.

The loss that `fit` shows is exact, hence private: to stop by it would tell of single
records. Weights are made of noised releases, so that looking at them costs nothing.
"""

from typing import Any, List, Optional
import warnings

import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import compat
from tfdp_adaptive import errors

_LOOK_EVERY = 20  # Steps.
_SMALL = 0.1  # Root mean square of weights: growth from less, as from zeros, is no sign.


class StopIfDiverged(compat.keras.callbacks.Callback):
  """Stops when weights are not finite or too large, or the loss on public data is too large.

  Every `fit` of a private model stops, with a warning, when its weights are no longer
  finite; give this callback for more. It costs no privacy. The exact training loss,
  which it does not look at, would.

  Args:
    growth: Also stop when the root mean square of the weights is so many times what it
      was at the start (or 0.1, if that was less).
    public_data: `(x, y)` that is really public; the loss on it is evaluated after every
      epoch, and training stops when that is not finite, or `factor` times its least
      value so far.
    factor: See above.
  """

  def __init__(self, growth: Optional[float] = None, public_data: Any = None,
               factor: float = 2.0) -> None:
    super().__init__()
    self.async_safe = self._supports_tf_logs = True  # It looks at no logs: nothing waits for them.
    if growth is not None:
      checks.positive(growth=growth)
    checks.positive(factor=factor)
    self._growth, self._public_data, self._factor = growth, public_data, factor
    self._start: Optional[float] = None
    self._least = float('inf')
    self._batches = 0
    self.reason = ''  # Why training was stopped.

  def on_train_begin(self, logs: Any = None) -> None:
    self._start, self._least, self._batches, self.reason = None, float('inf'), 0, ''
    if self.model.built:
      self._start = self._size()

  def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
    self._batches += 1
    if self._batches % _LOOK_EVERY == 0:
      self._look_at_weights()

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    self._look_at_weights()
    if self._public_data is None or self.reason:
      return
    x, y = self._public_data
    loss = float(self.model.evaluate(x, y, verbose=0, return_dict=True)['loss'])
    if not loss <= self._factor * self._least and self._least < float('inf') or loss != loss:
      self._stop(f'the loss on public data is {loss:.4g}, and was {self._least:.4g}')
    self._least = min(self._least, loss)

  def _size(self) -> float:
    """Root mean square of the weights."""
    weights = [tf.cast(tf.convert_to_tensor(v), tf.float32)
               for v in self.model.trainable_variables]
    count = sum(v.shape.num_elements() for v in weights)
    return float(tf.linalg.global_norm(weights)) / max(1, count)**0.5 if weights else 0.0

  def _look_at_weights(self) -> None:
    size = self._size()
    if self._start is None:
      self._start = size
    if size != size or size == float('inf'):
      self._stop('the weights are not finite')
    elif self._growth is not None and size > self._growth * max(self._start, _SMALL):
      self._stop(f'the root mean square of the weights is {size:.4g}, and was {self._start:.4g}')

  def _stop(self, reason: str) -> None:
    if self.reason:
      return
    self.reason, self.model.stop_training = reason, True
    warnings.warn(
        f'Training has diverged and was stopped: {reason}. Lower the learning rate, take larger '
        'batches, or a larger stability constant (`epsilon`, `scale_epsilon`). The steps done '
        'are spent: see `model.ledger`.', errors.Caution, stacklevel=2)


def watched(callbacks: Any) -> Any:
  """The callbacks of a `fit`, with a look at whether weights are finite."""
  if isinstance(callbacks, compat.keras.callbacks.CallbackList):
    return callbacks  # It is complete.
  given: List[Any] = [c for c in tf.nest.flatten(callbacks) if c is not None]
  return given if any(isinstance(c, StopIfDiverged) for c in given) else given + [StopIfDiverged()]
