# SPDX-License-Identifier: Apache-2.0
"""Callbacks of private training; all of them look at releases only, which costs nothing.

docs/callbacks.md says what those of Keras cost.
"""

import math
import pathlib
from typing import Any, List, Optional

import numpy as np
import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import compat
from tfdp_adaptive import errors
from tfdp_adaptive.keras import diagnostics
from tfdp_adaptive.keras.backups import BackupAndRestore as BackupAndRestore
from tfdp_adaptive.keras.divergence import StopIfDiverged as StopIfDiverged
from tfdp_adaptive.privacy import card_page

_BINS = 30
Callback: Any = compat.keras.callbacks.Callback


class PrivacyReport(Callback):
  """Puts the epsilon that is spent so far into the logs of every epoch, as `epsilon`.

  Progress bar, history and every callback after it (TensorBoard, CSVLogger) show it. It
  counts all runs that the weights went through, in this process and in files.

  Args:
    target_delta: The delta; by default the largest of the plans.
    name: Of the entry in the logs.
    card: A folder that the privacy card is written to when training ends.
  """

  def __init__(self, target_delta: Optional[float] = None, name: str = 'epsilon',
               card: Any = None) -> None:
    super().__init__()
    if target_delta is not None:
      checks.probability(target_delta=target_delta)
    self._target_delta, self._name = target_delta, name
    self._card = None if card is None else pathlib.Path(card)

  def on_train_begin(self, logs: Any = None) -> None:
    _check_plan(self)

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    if logs is not None:
      logs[self._name] = self.model.ledger.epsilon(self._target_delta)

  def on_train_end(self, logs: Any = None) -> None:
    if self._card is not None:
      self._card.mkdir(parents=True, exist_ok=True)
      card_page.write(self.model.privacy_card(), self._card)


class StopAtBudget(Callback):
  """Ends training before the step that would exceed a budget.

  All runs that the weights went through count. How far the budget goes is computed from
  the plan before the first step, from public constants alone.

  Args:
    target_epsilon: The budget.
    target_delta: Its delta; by default the plan's.

  Raises:
    PrivacyError: From `fit`, if not even one more step is left.
  """

  def __init__(self, target_epsilon: float, target_delta: Optional[float] = None) -> None:
    super().__init__()
    checks.positive(target_epsilon=target_epsilon)
    if target_delta is not None:
      checks.probability(target_delta=target_delta)
    self._epsilon, self._delta = target_epsilon, target_delta
    self._last: Optional[float] = None
    self.reason = ''  # Why training was stopped.

  @property
  def affordable(self) -> Optional[float]:
    """The largest number of this run's steps that the budget covers; None before the first."""
    return self._last

  def on_train_begin(self, logs: Any = None) -> None:
    self._last, self.reason = None, ''
    _check_plan(self)

  def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
    if self._last is None:  # Now, when a run that another callback restores is restored.
      self._last = self._affordable()
    if self._next() > self._last:
      raise errors.PrivacyError(
          f'The budget of epsilon {self._epsilon:g} does not cover another step. Received: '
          f'{self.model.optimizer.steps_done} steps done, of which {self._last} are covered.')

  def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
    if self._last is not None and self._next() > self._last:
      self.reason = f'step {self._last + 1} would exceed epsilon {self._epsilon:g}'
      self.model.stop_training = True

  def _next(self) -> int:
    """Steps done when the next call of the training function returns."""
    at_once = getattr(self.model, 'steps_per_execution', None)
    if at_once is None:
      at_once = getattr(self.model, '_steps_per_execution', 1)
    return self.model.optimizer.steps_done + int(np.asarray(at_once))

  def _affordable(self) -> float:
    """The largest number of this run's steps that the budget covers."""
    optimizer = self.model.optimizer
    delta = optimizer.plan.target_delta if self._delta is None else self._delta
    spent = lambda steps: optimizer.ledger_after(steps).epsilon(delta)
    least, most = -1, optimizer.plan.steps
    if spent(most) <= self._epsilon:
      return math.inf  # The plan itself ends it, and says so.
    while most - least > 1:
      middle = (least + most) // 2
      least, most = (middle, most) if spent(middle) <= self._epsilon else (least, middle)
    return max(least, 0)


class TensorBoardHistograms(Callback):
  """Writes histograms of what private training released to TensorBoard, every epoch.

  Per trainable variable: `weights/...`, `update/...` (how they moved in the epoch) and, for
  rules that keep one, `preconditioner/...` (log10 of the second moment, where it is
  positive); and the norms of all weights and of all updates. All are functions of noised
  releases, hence as public as the weights. What is exact (`diagnostics=True`, the
  losses that Keras' own TensorBoard callback writes) is not among it.

  Args:
    log_dir: Folder of the event files, as for `keras.callbacks.TensorBoard`.
    every: Epochs between two looks.
  """

  def __init__(self, log_dir: Any, every: int = 1) -> None:
    super().__init__()
    checks.whole(every=every)
    self._log_dir, self._every = str(log_dir), every
    self._writer: Any = None
    self._before: Optional[List[np.ndarray]] = None

  def on_train_begin(self, logs: Any = None) -> None:
    optimizer = self.model.optimizer
    if any(ask.second is not None and not ask.second.private for ask in optimizer.rule.asks):
      raise errors.PrivacyError(
          f'The rule {optimizer.rule.name} keeps statistics of the data without noise, which must '
          'not be shown. Leave `TensorBoardHistograms` out.')
    self._writer = tf.summary.create_file_writer(self._log_dir)
    self._before = self._weights() if self.model.built else None

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    if (epoch + 1) % self._every:
      return
    now, before = self._weights(), self._before
    names = [getattr(v, 'path', None) or v.name for v in self.model.trainable_variables]
    summaries = _summaries('weights', names, now)
    if before is not None:
      summaries += _summaries('update', names, [a - b for a, b in zip(now, before)])
    second = diagnostics.second_moment(self.model.optimizer)
    if second is not None:
      summaries += [_histogram(f'preconditioner/{name}', np.log10(value[value > 0]))
                    for name, value in zip(names, second) if np.any(value > 0)]
    with self._writer.as_default():
      tf.summary.experimental.write_raw_pb(
          tf.compat.v1.Summary(value=summaries).SerializeToString(), step=epoch)
    self._before = now
    self._writer.flush()

  def on_train_end(self, logs: Any = None) -> None:
    if self._writer is not None:
      self._writer.close()

  def _weights(self) -> List[np.ndarray]:
    return [compat.read(v).astype(np.float32) for v in self.model.trainable_variables]


def _summaries(kind: str, names: List[str], values: List[np.ndarray]) -> List[Any]:
  """A histogram of each variable, and the norm of all."""
  norm = float(np.sqrt(sum(np.sum(np.square(value, dtype=np.float64)) for value in values)))
  return [_histogram(f'{kind}/{name}', value) for name, value in zip(names, values)] + [
      tf.compat.v1.Summary.Value(tag=f'{kind}_norm', simple_value=norm)]


def _histogram(tag: str, values: np.ndarray) -> Any:
  """Without the package tensorboard, which `tf.summary.histogram` needs to write."""
  values = np.asarray(values[np.isfinite(values)], np.float64)
  counts, edges = np.histogram(values, _BINS)
  return tf.compat.v1.Summary.Value(tag=tag, histo=tf.compat.v1.HistogramProto(
      min=values.min(initial=0.0), max=values.max(initial=0.0), num=values.size,
      sum=values.sum(), sum_squares=np.sum(values**2), bucket_limit=edges[1:], bucket=counts))


def _check_plan(callback: Any) -> None:
  """Raises where nothing is accounted for."""
  optimizer = callback.model.optimizer
  if getattr(optimizer, 'plan', None) is None:
    raise ValueError(
        f'`{type(callback).__name__}` needs a private model whose optimizer has a plan: without '
        f'one nothing is accounted for. Received: optimizer={optimizer!r}.')
