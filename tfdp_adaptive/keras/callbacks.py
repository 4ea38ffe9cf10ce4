# SPDX-License-Identifier: Apache-2.0
"""Callbacks of private training. They read noisy results only, which costs no privacy.

docs/callbacks.md says what the callbacks of Keras cost.
"""

import contextlib
import functools
import math
import os
import pathlib
from typing import Any, Dict, Iterator, Optional, Sequence, Union

import numpy as np
import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import compat
from tfdp_adaptive import errors
from tfdp_adaptive.accounting import stopping
from tfdp_adaptive.independence import disclosures
from tfdp_adaptive.keras.backups import BackupAndRestore as BackupAndRestore
from tfdp_adaptive.keras.diagnostics import TensorBoardHistograms as TensorBoardHistograms
from tfdp_adaptive.report import card_page

_CHECK_EVERY = 20  # Steps.
Callback: Any = compat.keras.callbacks.Callback
Callbacks = Any  # One, a list of them, or a `CallbackList`.
_CHOICES = {
    'EarlyStopping': 'decides when training stops',
    'ReduceLROnPlateau': 'decides the learning rate',
    'ModelCheckpoint': 'decides which weights are saved',
}
_REFUSED = {
    'OrbaxCheckpoint': 'it writes weights without their ledger, and the SECRET optimizer state',
    **({'BackupAndRestore': 'it keeps weights alone, from which no run can go on'}
       if compat.BACKUPS_ARE_WEIGHTS else {}),
}


class PrivacyReport(Callback):
  """Adds the epsilon spent so far to the logs of every epoch, as `epsilon`.

  Progress bar, history and all later callbacks (TensorBoard, CSVLogger) show it. It counts all
  private runs on the weights, in this process and in files.

  Args:
    target_delta: The delta; by default the largest of the plans.
    name: Name of the entry in the logs.
    card: Folder to which the privacy card is written when training ends.
    looks: The steps after which the run may stop early because of a release, such as a noisy
      metric. They are fixed before the run begins. The logs and the card then state the epsilon of
      a run that stops at the next of these steps. The run must stop after one of these steps.
  """

  def __init__(self, target_delta: Optional[float] = None, name: str = 'epsilon',
               card: Union[str, 'os.PathLike[str]', None] = None,
               looks: Optional[stopping.Looks] = None) -> None:
    super().__init__()
    if target_delta is not None:
      checks.probability(target_delta=target_delta)
    self._target_delta, self._name = target_delta, name
    self._card, self._looks = None if card is None else pathlib.Path(card), looks
    self._began = False

  def on_train_begin(self, logs: Optional[Dict[str, Any]] = None) -> None:
    _check_plan(self)
    if self._looks is not None:
      self._looks.claim(self.model.optimizer.plan, self._looks.steps[-1])  # Raises for other plans.
    self._began = True

  def on_epoch_end(self, epoch: int, logs: Optional[Dict[str, Any]] = None) -> None:
    if logs is not None:
      ledger = self.model.ledger
      if self._looks is not None:
        ledger = self.model.optimizer.ledger_after(
            self._looks.next(self.model.optimizer.steps_done))
      logs[self._name] = ledger.epsilon(self._target_delta, looks=self._looks)

  def write_card(self) -> None:
    """Writes the card, if a folder was given; `fit` calls it when it knows how training ended."""
    if self._card is not None and self._began:
      card_page.write(card_page.files(self.model.privacy_card(looks=self._looks)), self._card)


class StopAtBudget(Callback):
  """Stops training before the step that would exceed a budget.

  All private runs on the weights count. The number of steps that the budget covers is computed
  before the first step, from public constants of the plan.

  Args:
    target_epsilon: The budget.
    target_delta: Its delta; by default the plan's.

  Raises:
    PrivacyError: From `fit`, if the budget does not cover another step.
  """

  def __init__(self, target_epsilon: float, target_delta: Optional[float] = None) -> None:
    super().__init__()
    checks.positive(target_epsilon=target_epsilon)
    if target_delta is not None:
      checks.probability(target_delta=target_delta)
    self._epsilon, self._delta = target_epsilon, target_delta
    self.affordable: Optional[float] = None  # Steps that the budget covers, once one began.
    self.reason = ''  # Why training was stopped.

  def on_train_begin(self, logs: Optional[Dict[str, Any]] = None) -> None:
    self.affordable, self.reason = None, ''
    _check_plan(self)

  def on_train_batch_begin(self, batch: int, logs: Optional[Dict[str, Any]] = None) -> None:
    if self.affordable is None:  # Now, when a run that another callback restores is restored.
      self.affordable = self._affordable()
    if self._next() > self.affordable:
      raise errors.PrivacyError(
          f'The budget of epsilon {self._epsilon:g} does not cover another step. Received: '
          f'{self.model.optimizer.steps_done} steps done, of which {self.affordable} are covered.')

  def on_train_batch_end(self, batch: int, logs: Optional[Dict[str, Any]] = None) -> None:
    if self.affordable is not None and self._next() > self.affordable:
      self.reason = f'step {self.affordable + 1} would exceed epsilon {self._epsilon:g}'
      self.model.stop_training = True

  def _next(self) -> int:
    """Returns the number of steps after the next call of the training function."""
    at_once = getattr(
        self.model, 'steps_per_execution', getattr(self.model, '_steps_per_execution', 1))
    return self.model.optimizer.steps_done + int(np.asarray(at_once))

  def _affordable(self) -> float:
    """Returns the largest number of this run's steps that the budget covers."""
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


def _check_plan(callback: Callbacks) -> None:
  """Raises if the optimizer has no plan."""
  optimizer = callback.model.optimizer
  if getattr(optimizer, 'plan', None) is None:
    raise ValueError(
        f'`{type(callback).__name__}` needs a private model whose optimizer has a plan: without '
        f'one nothing is accounted for. Received: optimizer={optimizer!r}.')


class _StopIfNotFinite(Callback):
  """Stops a `fit` whose weights are not finite. It reads no logs: nothing waits for them."""

  def __init__(self) -> None:
    super().__init__()
    self.async_safe = self._supports_tf_logs = True
    self._batches = 0

  def on_train_batch_end(self, batch: int, logs: Optional[Dict[str, Any]] = None) -> None:
    self._batches += 1
    if self._batches % _CHECK_EVERY == 0:
      self._check()

  def on_epoch_end(self, epoch: int, logs: Optional[Dict[str, Any]] = None) -> None:
    self._check()

  def _check(self) -> None:
    norm = tf.linalg.global_norm([
        tf.cast(tf.convert_to_tensor(v), tf.float32) for v in self.model.trainable_variables])
    if math.isfinite(norm) or self.model.stop_training:
      return
    self.model.stop_training = True
    errors.caution(
        'Training has diverged and was stopped: the weights are not finite. Lower the learning '
        'rate, take larger batches, or a larger stability constant (`epsilon`, `scale_epsilon`). '
        'The steps done are spent: see `model.ledger`.')


def with_divergence_check(callbacks: Callbacks) -> Any:
  """Returns the callbacks of a `fit`, with one that checks whether weights are finite."""
  if isinstance(callbacks, compat.keras.callbacks.CallbackList):
    return callbacks  # It is complete.
  return [*(c for c in tf.nest.flatten(callbacks) if c is not None), _StopIfNotFinite()]


def before_fit(model: compat.Model, callbacks: Callbacks, notes: Sequence[str] = ()) -> None:
  """Warns before the first step about callbacks that decide by private numbers.

  Args:
    model: A compiled private model. Its statement repeats the warning.
    callbacks: What `with_divergence_check` returned.
    notes: Sentences about the data for the statement.

  Raises:
    PrivacyError: For callbacks that write secrets, or weights without their ledger.
  """
  run = model.optimizer.run
  run.note(*notes)
  given: Any = getattr(callbacks, 'callbacks', callbacks)
  own = sorted({type(one).__name__ for one in given if disclosures.is_own(one)})
  if own:
    run.note(f'Callbacks of its own ran between the steps, {own}. If they used private data to '
             'change weights, settings or data, no epsilon covers that.')
  for one in given:
    name = next((kind.__name__ for kind in type(one).__mro__ if kind.__name__ in {
        *_CHOICES, *_REFUSED} and kind.__module__.startswith('keras')), '')
    if name in _REFUSED and not type(one).__module__.startswith('tfdp_adaptive'):
      raise errors.PrivacyError(
          f'`{name}` cannot be used with a private model: {_REFUSED[name]}. Use '
          '`tfdp.callbacks.BackupAndRestore` to resume, and `ModelCheckpoint` with '
          '`.weights.h5` to publish.')
    monitor = getattr(one, 'monitor', None)
    if name not in _CHOICES or (name == 'ModelCheckpoint' and not one.save_best_only):
      continue
    sentence = f'{type(one).__name__} {_CHOICES[name]} by `{monitor}`'
    errors.caution(
        f'{sentence}. On private data this choice is not covered by epsilon. Let it monitor public '
        'data, or fix the number of steps beforehand. The statement names it.')
    run.note(f'NOT COVERED IF PRIVATE: {sentence}. If `{monitor}` is computed from private data, '
             'no epsilon covers that choice. If it is computed from public data, the epsilon of '
             'all planned steps holds.')
    if name == 'ModelCheckpoint':  # Its files hold the weights that all steps were compared for.
      compat.around_saves(one, functools.partial(_counting_all, run, given))


@contextlib.contextmanager
def _counting_all(run: Any, given: Sequence[Any]) -> Iterator[None]:
  """Counts all steps that a run can take, in what is written inside."""
  stopped = run.stopped
  if run.plan is not None and run.steps:
    run.stopped = _most(run, given)
  try:
    yield
  finally:
    run.stopped = stopped


def _most(run: Any, given: Sequence[Any]) -> int:
  """Returns the steps that a run can take: those of its plan, or of a budget."""
  budget = [one.affordable for one in given if getattr(one, 'affordable', None) is not None]
  return int(min([run.plan.steps, *budget]))


def after_fit(model: compat.Model, callbacks: Callbacks, notes: Sequence[str] = ()) -> None:
  """Counts all planned steps of a run that was stopped, and writes the cards of reports.

  A `fit` that was not stopped has taken the number of steps that was set before it began. Only
  these steps count, because a callback that could have ended `fit` sooner saw only their releases.
  `notes` are later findings about the data; for the other arguments, see `before_fit`.
  """
  run = model.optimizer.run
  for note in notes:
    if note not in run.said['notes']:
      errors.caution(note)
      run.note(note)
  given: Any = getattr(callbacks, 'callbacks', callbacks)
  if model.stop_training and run.plan is not None and run.steps:
    run.stopped = _most(run, given)
  for one in given:
    if isinstance(one, PrivacyReport):
      one.write_card()
