"""Keras training with a progress bar, a learning curve and the time of a step."""

import statistics
import time
from typing import NamedTuple, Tuple

import tensorflow as tf
import tqdm

POINTS = 10  # Of a learning curve, besides its start.


class Run(NamedTuple):
  """What one training run measured."""

  curve: Tuple[Tuple[int, float, float], ...]  # (step, loss, accuracy) on held-out words.
  seconds_per_step: float  # Median over steps, tracing and evaluation left out.

  @property
  def loss(self):
    return self.curve[-1][1]

  @property
  def accuracy(self):
    return self.curve[-1][2]


class Recorder:
  """Takes the time of steps and evaluates now and then; also a progress bar.

  Args:
    steps: Number of steps to come.
    evaluate: `() -> (loss, accuracy)`.
    label: Stands before the progress bar.
    points: Number of evaluations, the last step always included.
  """

  def __init__(self, steps, evaluate, label, points=POINTS):
    self._steps, self._evaluate = steps, evaluate
    self._every = -(-steps // points)
    self._curve = [(0, *evaluate())]
    self._seconds = []
    self._bar = tqdm.tqdm(total=steps, desc=label, leave=True, dynamic_ncols=True)
    self._began = 0.0

  def begin(self):
    self._began = time.perf_counter()

  def end(self):
    """After a step."""
    self._seconds.append(time.perf_counter() - self._began)
    done = len(self._seconds)
    self._bar.update()
    if done % self._every == 0 or done == self._steps:
      self._curve.append((done, *self._evaluate()))
      self._bar.set_postfix(loss=f'{self._curve[-1][1]:.3f}', refresh=False)

  def finish(self) -> Run:
    self._bar.close()
    return Run(tuple(self._curve), statistics.median(self._seconds))


class _Callback(tf.keras.callbacks.Callback):

  def __init__(self, recorder):
    super().__init__()
    self._recorder = recorder

  def on_train_batch_begin(self, batch, logs=None):
    self._recorder.begin()

  def on_train_batch_end(self, batch, logs=None):
    self._recorder.end()


def fit(model, batches, steps, evaluate, label, points=POINTS, callbacks=()) -> Run:
  """One epoch of `steps` batches with a compiled model."""
  recorder = Recorder(steps, evaluate, label, points)
  model.fit(batches, epochs=1, verbose=0, callbacks=[_Callback(recorder), *callbacks])
  return recorder.finish()


def from_history(start, history) -> Run:
  """The `Run` of a `tfdp.federated.simulate` history, evaluated at `start` as well."""
  curve = [(0, *start)] + [(row['round'], row['loss'], row['accuracy'])
                           for row in history if 'loss' in row]
  return Run(tuple(curve), statistics.median(
      row['not_private/seconds'] for row in history))
