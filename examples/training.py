# SPDX-License-Identifier: Apache-2.0
"""Keras training with a progress bar, a learning curve and the time of a step."""

from __future__ import annotations

import statistics
import time
from typing import Any, Callable, List, Tuple, TYPE_CHECKING

import tensorflow as tf
import tqdm

from . import report

if TYPE_CHECKING:
  from tfdp_adaptive import compat

POINTS = 10  # Points of a learning curve, besides its start.


class Recorder:
  """Takes the time of steps and evaluates now and then; also a progress bar.

  Args:
    steps: Number of steps of the whole run.
    evaluate: `() -> (loss, accuracy)`.
    label: Stands before the progress bar.
    points: Number of evaluations, the last step always included.
  """

  def __init__(
      self, steps: int, evaluate: Callable[[], Tuple[float, float]], label: str,
      points: int = POINTS) -> None:
    self.steps, self._evaluate, self._label = steps, evaluate, label
    self._every, self._done = -(-steps // points), 0
    self._curve: List[Any] = []
    self._seconds: List[float] = []
    self._bar: Any = None
    self._began = 0.0

  def begin(self) -> None:
    self._bar = tqdm.tqdm(total=self.steps, desc=self._label, leave=True, dynamic_ncols=True)
    self._measure()

  def begin_step(self) -> None:
    self._began = time.perf_counter()

  def end_step(self) -> None:
    self._seconds.append(time.perf_counter() - self._began)

  def end_epoch(self) -> None:
    self._done += 1
    self._bar.update()
    if self._done % self._every == 0 or self._done == self.steps:
      self._measure()

  def _measure(self) -> None:
    self._curve.append((self._done, *self._evaluate()))
    self._bar.set_postfix(loss=f'{self._curve[-1][1]:.3f}', refresh=False)

  def close(self) -> None:
    if self._bar is not None:
      self._bar.close()

  def result(self) -> report.Run:
    """After the last step."""
    return report.Run(tuple(map(tuple, self._curve)), statistics.median(self._seconds or [0.0]))


def fit(model: compat.Model, batches: Any, recorder: Recorder) -> report.Run:
  """Trains a compiled model; every step is an epoch of its own.

  Args:
    model: Compiled.
    batches: Of all steps.
    recorder: Of the run.
  """
  callback = tf.keras.callbacks.LambdaCallback(
      on_train_begin=lambda logs: recorder.begin(),
      on_train_batch_begin=lambda batch, logs: recorder.begin_step(),
      on_train_batch_end=lambda batch, logs: recorder.end_step(),
      on_epoch_end=lambda epoch, logs: recorder.end_epoch())
  try:
    # Keras 3 warns of its own default of `shuffle` otherwise.
    model.fit(batches, epochs=recorder.steps, steps_per_epoch=1, verbose=0, shuffle=False,
              callbacks=[callback])
  finally:
    recorder.close()
  return recorder.result()


def from_history(start: Any, simulation: Any) -> report.Run:
  """The `report.Run` of a `tfdp.federated.Simulation`, evaluated at `start` as well."""
  curve = [(0, *start)] + [(row['round'], row['loss'], row['accuracy'])
                           for row in simulation.history if 'loss' in row]
  return report.Run(tuple(curve), statistics.median(simulation.speed['seconds'] or [0.0]))
