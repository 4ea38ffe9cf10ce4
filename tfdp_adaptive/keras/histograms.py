# SPDX-License-Identifier: Apache-2.0
"""Histograms of the results of private training, for TensorBoard."""

import os
from typing import Any, Dict, List, Optional, Union

import numpy as np
import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import compat
from tfdp_adaptive import errors
from tfdp_adaptive.keras import diagnostics

_BINS = 30
Callback: Any = compat.keras.callbacks.Callback


class TensorBoardHistograms(Callback):
  """Writes histograms of the results of private training to TensorBoard, every epoch.

  For each trainable variable it writes `weights/...`, `update/...` (the change in the epoch) and,
  if the rule has second moments, `preconditioner/...` (log10 of the positive ones). It also writes
  the norms of all weights and of all updates. All of these are computed from noisy gradients, so
  they are as public as the weights. It writes no exact numbers, such as `diagnostics=True` or the
  losses that Keras' own TensorBoard callback writes.

  Args:
    log_dir: Folder of the event files, as for `keras.callbacks.TensorBoard`.
    every: Number of epochs between two histograms.
  """

  def __init__(self, log_dir: Union[str, 'os.PathLike[str]'], every: int = 1) -> None:
    super().__init__()
    checks.whole(every=every)
    self._log_dir, self._every = str(log_dir), every
    self._writer: Any = None
    self._before: Optional[List[np.ndarray]] = None

  def on_train_begin(self, logs: Optional[Dict[str, Any]] = None) -> None:
    optimizer = self.model.optimizer
    if any(ask.second is not None and not ask.second.private for ask in optimizer.rule.asks):
      raise errors.PrivacyError(
          f'The rule {optimizer.rule.name} keeps statistics of the data without noise, which must '
          'not be shown. Leave `TensorBoardHistograms` out.')
    self._writer = tf.summary.create_file_writer(self._log_dir)
    self._before = self._weights() if self.model.built else None

  def on_epoch_end(self, epoch: int, logs: Optional[Dict[str, Any]] = None) -> None:
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

  def on_train_end(self, logs: Optional[Dict[str, Any]] = None) -> None:
    if self._writer is not None:
      self._writer.close()

  def _weights(self) -> List[np.ndarray]:
    return [compat.read(v).astype(np.float32) for v in self.model.trainable_variables]


def _summaries(kind: str, names: List[str], values: List[np.ndarray]) -> List[Any]:
  """Returns a histogram of each variable, and the norm of all."""
  norm = float(np.sqrt(sum(np.sum(np.square(value, dtype=np.float64)) for value in values)))
  return [_histogram(f'{kind}/{name}', value) for name, value in zip(names, values)] + [
      tf.compat.v1.Summary.Value(tag=f'{kind}_norm', simple_value=norm)]


def _histogram(tag: str, values: np.ndarray) -> Any:
  """Writes a histogram without the package tensorboard, which `tf.summary.histogram` needs."""
  values = np.asarray(values[np.isfinite(values)], np.float64)
  counts, edges = np.histogram(values, _BINS)
  return tf.compat.v1.Summary.Value(tag=tag, histo=tf.compat.v1.HistogramProto(
      min=values.min(initial=0.0), max=values.max(initial=0.0), num=values.size,
      sum=values.sum(), sum_squares=np.sum(values**2), bucket_limit=edges[1:], bucket=counts))
