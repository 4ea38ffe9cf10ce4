# SPDX-License-Identifier: Apache-2.0
"""Keras training with a progress bar, a learning curve and the time of a step."""

from __future__ import annotations

import pathlib
import statistics
import time
from typing import Any, Callable, List, Optional, Tuple, TYPE_CHECKING

import tensorflow as tf
import tqdm

from tfdp_adaptive import runfolder

from . import report

if TYPE_CHECKING:
  from tfdp_adaptive import compat

POINTS = 10  # Of a learning curve, besides its start.


class Recorder:
  """Takes the time of steps and evaluates now and then; also a progress bar.

  Args:
    steps: Number of steps of the whole run.
    evaluate: `() -> (loss, accuracy)`.
    label: Stands before the progress bar.
    points: Number of evaluations, the last step always included.
    kept: None, or a file that keeps the learning curve of a run that may be interrupted.
  """

  def __init__(
      self, steps: int, evaluate: Callable[[], Tuple[float, float]], label: str,
      points: int = POINTS, kept: Optional[pathlib.Path] = None) -> None:
    self.steps, self._evaluate, self._label = steps, evaluate, label
    self._every, self._kept = -(-steps // points), kept
    self._done, self._curve = 0, []  # type: int, List[Any]
    self._seconds: List[float] = []
    self._bar: Any = None
    self._began = 0.0

  def begin(self, done: int) -> None:
    """Before the first step, or the next one of a run that goes on after so many."""
    self._done, self._curve = done, self._load()
    self._bar = tqdm.tqdm(total=self.steps, initial=done, desc=self._label, leave=True,
                          dynamic_ncols=True)
    if self._curve and self._curve[-1][0] > done:
      raise report.unreadable(self._kept, 'steps that it knows of are not in the backup')
    if self.evaluates(done) and (not self._curve or self._curve[-1][0] < done):
      self._measure()

  def begin_step(self) -> None:
    self._began = time.perf_counter()

  def end_step(self) -> None:
    self._seconds.append(time.perf_counter() - self._began)

  def end_epoch(self) -> None:
    """After a step, and after what it is kept in."""
    self._done += 1
    self._bar.update()
    if self.evaluates(self._done):
      self._measure()

  def evaluates(self, done: int) -> bool:
    """Whether the model is evaluated after so many steps."""
    return done % self._every == 0 or done == self.steps

  def _measure(self) -> None:
    self._curve.append((self._done, *self._evaluate()))
    self._bar.set_postfix(loss=f'{self._curve[-1][1]:.3f}', refresh=False)
    if self._kept is not None:
      runfolder.save(self._kept, [], {'curve': self._curve})

  def _load(self) -> List[Any]:
    try:
      return runfolder.load(self._kept)[1]['curve'] if self._kept is not None else []
    except FileNotFoundError:
      return []
    except runfolder.Damaged as error:
      raise report.unreadable(self._kept, error) from error

  def close(self) -> None:
    if self._bar is not None:
      self._bar.close()

  def result(self) -> report.Run:
    """After the last step."""
    return report.Run(tuple(map(tuple, self._curve)), statistics.median(self._seconds or [0.0]))


def fit(model: compat.Model, batches: Any, recorder: Recorder, *backups: Any) -> report.Run:
  """Trains a compiled model; every step is an epoch of its own, so that any may be the last saved.

  Args:
    model: Compiled.
    batches: Of all steps.
    recorder: Of the run.
    *backups: Callbacks that restore and save before the recorder looks.
  """
  callback = tf.keras.callbacks.LambdaCallback(
      on_train_begin=lambda logs: recorder.begin(getattr(model.optimizer, 'steps_done', 0)),
      on_train_batch_begin=lambda batch, logs: recorder.begin_step(),
      on_train_batch_end=lambda batch, logs: recorder.end_step(),
      on_epoch_end=lambda epoch, logs: recorder.end_epoch())
  try:
    # Keras 3 warns of its own default of `shuffle` otherwise.
    model.fit(batches, epochs=recorder.steps, steps_per_epoch=1, verbose=0, shuffle=False,
              callbacks=[*backups, callback])
  finally:
    recorder.close()
  return recorder.result()


def from_history(start: Any, simulation: Any) -> report.Run:
  """The `report.Run` of a `tfdp.federated.Simulation`, evaluated at `start` as well."""
  curve = [(0, *start)] + [(row['round'], row['loss'], row['accuracy'])
                           for row in simulation.history if 'loss' in row]
  return report.Run(tuple(curve), statistics.median(simulation.speed['seconds'] or [0.0]))
