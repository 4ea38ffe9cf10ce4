# SPDX-License-Identifier: Apache-2.0
"""Keras training with a progress bar, a learning curve and the time of a step."""

from __future__ import annotations

import statistics
import time
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple, TYPE_CHECKING

import tensorflow as tf
import tqdm

if TYPE_CHECKING:
  from tfdp_adaptive import compat

Curve = Sequence[Tuple[int, float, float]]  # (step, loss, accuracy).
POINTS = 10  # Of a learning curve, besides its start.


class Run(NamedTuple):
  """What one training run measured."""

  curve: Tuple[Tuple[int, float, float], ...]  # (step, loss, accuracy) on held-out words.
  seconds_per_step: float  # Median over steps, tracing and evaluation left out.

  @property
  def loss(self) -> float:
    return self.curve[-1][1]

  @property
  def accuracy(self) -> float:
    return self.curve[-1][2]


class Recorder:
  """Takes the time of steps and evaluates now and then; also a progress bar.

  Args:
    steps: Number of steps of the whole run.
    evaluate: `() -> (loss, accuracy)`.
    label: Stands before the progress bar.
    points: Number of evaluations, the last step always included.
    done: Steps done already, by a run that goes on.
    save: None, or `curve -> None`, called before every evaluation: steps whose loss was
      shown are then never taken a second time, with other noise.
    save_every: Steps after which it is called besides.
    curve: Of the steps done already.
  """

  def __init__(
      self, steps: int, evaluate: Callable[[], Tuple[float, float]], label: str,
      points: int = POINTS, *, done: int = 0, save: Callable[[Curve], None] = lambda curve: None,
      save_every: Optional[int] = None, curve: Curve = ()) -> None:
    self._steps, self._evaluate, self._save = steps, evaluate, save
    self._every, self._save_every = -(-steps // points), save_every or steps
    self._done, self._curve = done, list(curve)
    self._seconds: List[float] = []
    self._bar: Any = None
    self._label, self._began = label, 0.0

  def __enter__(self) -> 'Recorder':
    self._bar = tqdm.tqdm(total=self._steps, initial=self._done, desc=self._label, leave=True,
                          dynamic_ncols=True)
    if self._evaluated() and (not self._curve or self._curve[-1][0] < self._done):
      self._measure()
    return self

  def __exit__(self, *error: Any) -> None:
    self._bar.close()

  def begin(self) -> None:
    self._began = time.perf_counter()

  def end(self) -> None:
    """After a step."""
    self._seconds.append(time.perf_counter() - self._began)
    self._done += 1
    if self._evaluated() or self._done % self._save_every == 0:
      self._save(self._curve)
    self._bar.update()
    if self._evaluated():
      self._measure()

  def _evaluated(self) -> bool:
    return self._done % self._every == 0 or self._done == self._steps

  def _measure(self) -> None:
    self._curve.append((self._done, *self._evaluate()))
    self._bar.set_postfix(loss=f'{self._curve[-1][1]:.3f}', refresh=False)

  def result(self) -> Run:
    """After the last step."""
    return Run(tuple(self._curve), statistics.median(self._seconds or [0.0]))


def fit(model: compat.Model, batches: Any, recorder: Recorder) -> Run:
  """The steps that are left, one batch each, with a compiled model."""
  callback = tf.keras.callbacks.LambdaCallback(
      on_train_batch_begin=lambda batch, logs: recorder.begin(),
      on_train_batch_end=lambda batch, logs: recorder.end())
  with recorder:
    if batches is not None:
      # Keras 3 warns of its own default otherwise.
      model.fit(batches, epochs=1, verbose=0, shuffle=False, callbacks=[callback])
  return recorder.result()


def from_history(start: Any, simulation: Any) -> Run:
  """The `Run` of a `tfdp.federated.Simulation`, evaluated at `start` as well."""
  curve = [(0, *start)] + [(row['round'], row['loss'], row['accuracy'])
                           for row in simulation.history if 'loss' in row]
  return Run(tuple(curve), statistics.median(simulation.speed['seconds'] or [0.0]))
