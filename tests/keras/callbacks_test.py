# SPDX-License-Identifier: Apache-2.0
"""Callbacks of this library, and those of Keras under a plan."""

import glob
import math
import subprocess
import sys
import warnings

import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.keras import backups
from tfdp_adaptive.keras import weight_ledger

keras, layers = compat.keras, compat.keras.layers
N = 16
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 4)).astype('float32')
Y = RNG.integers(0, 2, size=N).astype('int32')


def make_plan(**changes):
  return tfdp.PrivacyPlan(**{**dict(
      population_size=N, batch_size=8, steps=6, l2_norm_clip=1.0, noise_multiplier=1.0,
      target_delta=1e-3), **changes})


def make_model(plan, optimizer=tfdp.DPAdam, **arguments):
  model = tfdp.make_private(keras.Sequential([
      layers.Input([4]), layers.Dense(2, activation='softmax')]))
  model.compile(optimizer(0.1, plan=plan), 'sparse_categorical_crossentropy', **arguments)
  return model


def fit(model, callbacks, epochs=3, steps=2, **kwargs):
  plan = model.optimizer.plan
  left = plan.batches((X, Y), start_step=model.optimizer.steps_done, pad_to=N)
  return model.fit(left, epochs=epochs, steps_per_epoch=steps, callbacks=callbacks,
                   verbose=0, **kwargs).history


@pytest.fixture(scope='module')
def model():
  """One model for all tests of a kind, traced once; every test gets new weights and steps."""
  return make_model(make_plan(steps=1000))


def histograms(folder):
  tags = set()
  for path in glob.glob(f'{folder}/*'):
    for event in tf.compat.v1.train.summary_iterator(path):
      tags |= {value.tag for value in event.summary.value}
  return tags


def test_reports_stops_and_draws_in_one_training(tmp_path):
  """With Keras' own callbacks beside them, all of which see the epsilon that is spent."""
  plan = make_plan()
  trained = make_model(plan)
  budget = tfdp.callbacks.StopAtBudget(plan.epsilon(5))
  seen = []
  path = str(tmp_path / 'best.keras')
  with warnings.catch_warnings():
    warnings.simplefilter('ignore', tfdp.Caution)  # Some callbacks decide by the loss.
    history = fit(trained, [
        tfdp.callbacks.PrivacyReport(),
        tfdp.callbacks.TensorBoardHistograms(tmp_path / 'board'),
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(
            logs['epsilon'])),
        keras.callbacks.ModelCheckpoint(path, monitor='loss', save_best_only=False),
        keras.callbacks.ReduceLROnPlateau(monitor='loss', factor=.5, patience=1, min_delta=100.0),
        keras.callbacks.EarlyStopping(monitor='loss', patience=10),
        budget])
  assert trained.optimizer.steps_done == 5  # The sixth would exceed it.
  assert 'step 6 would exceed' in budget.reason
  assert history['epsilon'] == seen == [plan.epsilon(2), plan.epsilon(4), plan.epsilon(5)]
  assert float(np.asarray(trained.optimizer.learning_rate)) == pytest.approx(.025)
  tags = histograms(tmp_path / 'board')
  for kind in ('weights/', 'update/', 'preconditioner/', 'weights_norm', 'update_norm'):
    assert any(tag.startswith(kind) for tag in tags), kind
  loaded = keras.models.load_model(path)
  assert loaded.ledger.epsilon() == plan.epsilon(5)
  with pytest.raises(tfdp.PrivacyError, match='does not cover another step'):
    fit(trained, [tfdp.callbacks.StopAtBudget(plan.epsilon(5))], epochs=1, steps=1)
  with pytest.raises(tfdp.PrivacyError, match='of which 0 are covered'):
    fit(loaded, [tfdp.callbacks.StopAtBudget(plan.epsilon(1) / 2)], epochs=1, steps=1)


@pytest.mark.parametrize('best, path', [
    (True, 'x.weights.h5'), (False, '{epoch}.weights.h5'),
    pytest.param(True, 'x.keras', marks=pytest.mark.skipif(
        not compat.KERAS_3, reason='`ModelCheckpoint` of Keras 2.14 fails for the best `.keras`'))])
def test_a_file_of_the_best_weights_counts_all_steps_they_were_chosen_from(best, path, tmp_path):
  """Which weights are best depends on the releases of every step."""
  class Scores(keras.callbacks.Callback):

    def on_epoch_end(self, epoch, logs=None):
      logs['score'] = [1.0, 2.0, 0.0, 1.0][epoch]

  plan = make_plan(steps=10)
  trained, path = make_model(plan), str(tmp_path / path)
  checkpoint = keras.callbacks.ModelCheckpoint(
      path, monitor='score', mode='max', save_best_only=best, save_weights_only='.w' in path)
  with warnings.catch_warnings():
    warnings.simplefilter('ignore', tfdp.Caution)  # It chooses by a score.
    history = fit(trained, [Scores(), checkpoint, tfdp.callbacks.PrivacyReport()],
                  epochs=4, steps=2)
  assert history['epsilon'] == [plan.epsilon(steps) for steps in (2, 4, 6, 8)]
  assert trained.ledger.epsilon() == plan.epsilon(8)
  saved = make_model(plan)
  if path.endswith('.keras'):
    saved = keras.models.load_model(path)
  else:
    saved.load_weights(path.format(epoch=2))
  entry, = saved.ledger.entries
  assert saved.ledger.epsilon() == plan.epsilon(plan.steps if best else 4)
  assert (entry.done, entry.taken) == ((4, 4) if best else (4, None))
  assert ('stopped after 4 steps' in saved.optimizer.statement(0)) == best


@pytest.mark.parametrize('budget, steps', [(0.999, 2), (1.0, 3), (1.001, 3), (100.0, math.inf)])
def test_how_far_a_budget_goes(budget, steps):
  """To the step, whatever the rounding: what is left is never negative."""
  plan = make_plan()
  callback = tfdp.callbacks.StopAtBudget(budget * plan.epsilon(3))
  callback.set_model(make_model(plan))
  assert callback._affordable() == steps
  assert steps == math.inf or plan.epsilon(steps) <= budget * plan.epsilon(3)


def test_budgets_count_what_the_weights_cost_before():
  plan = make_plan()
  trained = make_model(plan)
  before = tfdp.Ledger().begin(plan).done(2).entries[0]
  weight_ledger.Ledger(trained.trainable_variables).attach([before])
  assert trained.ledger.epsilon() == plan.epsilon(2)
  callback = tfdp.callbacks.StopAtBudget(trained.ledger.epsilon() * 1.01)
  callback.set_model(trained)
  assert callback._affordable() == 0
  report = tfdp.callbacks.PrivacyReport(target_delta=1e-4)
  report.set_model(trained)
  logs = {}
  report.on_epoch_end(0, logs)
  assert logs['epsilon'] == trained.ledger.epsilon(1e-4) > trained.ledger.epsilon()


def test_several_steps_at_once_stop_before_the_budget_too():
  plan = make_plan()
  for affordable, stops in ((1, True), (2, False)):
    callback = tfdp.callbacks.StopAtBudget(plan.epsilon(affordable))
    callback.set_model(make_model(plan, steps_per_execution=2))
    callback.on_train_begin()
    assert callback._next() == 2
    if stops:
      with pytest.raises(tfdp.PrivacyError, match='of which 1 are covered'):
        callback.on_train_batch_begin(0)
    else:
      callback.on_train_batch_begin(0)


@pytest.mark.parametrize('callback', [
    tfdp.callbacks.PrivacyReport, lambda: tfdp.callbacks.StopAtBudget(1.0)])
def test_without_a_plan_there_is_nothing_to_report(callback):
  callback = callback()
  plain = keras.Sequential([layers.Input([4]), layers.Dense(2)])
  plain.compile('sgd', 'mse')
  callback.set_model(plain)
  with pytest.raises(ValueError, match='needs a private model whose optimizer has a plan'):
    callback.on_train_begin()


def test_statistics_without_noise_are_not_drawn(tmp_path):
  callback = tfdp.callbacks.TensorBoardHistograms(tmp_path)
  callback.set_model(make_model(make_plan(), lambda rate, plan: tfdp.NonPrivateNoiselessAdam(
      rate, plan=plan, allow_non_private=True)))
  with pytest.raises(tfdp.PrivacyError, match='without noise, which must not be shown'):
    callback.on_train_begin()


class Interrupts(keras.callbacks.Callback):
  """Ends the process at the beginning of an epoch, so to speak."""

  def __init__(self, epoch):
    super().__init__()
    self._epoch = epoch

  def on_epoch_begin(self, epoch, logs=None):
    if epoch == self._epoch:
      raise KeyboardInterrupt


def half(whole, writing, share):
  """What a kill leaves of a backup while it is written: of each file a part."""
  for path in whole.rglob('*'):
    if path.is_file():
      copy = writing / path.relative_to(whole)
      copy.parent.mkdir(parents=True, exist_ok=True)
      content = path.read_bytes()
      copy.write_bytes(content[:int(share * len(content))])


def forget(model):
  """What another process knows of the run: nothing."""
  for w in (*model.weights, model.optimizer.run.state[1].noise.row):
    w.assign(np.zeros(w.shape))


def damage_is_refused(whole):
  """Any bit of any file of a backup, or all after it."""
  rng = np.random.default_rng(0)
  for path in [path for path in whole.rglob('*') if path.is_file()]:
    good = path.read_bytes()
    for place in range(len(good)) if len(good) < 200 else rng.integers(len(good), size=25):
      flipped = good[place] ^ 1 << int(rng.integers(8))
      for content in (good[:place], good[:place] + bytes([flipped]) + good[place + 1:]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match='must be what was written there'):
          backups._check(whole)
    path.unlink()
    with pytest.raises(ValueError, match='must be what was written there'):
      backups._check(whole)
    path.write_bytes(good)
  backups._check(whole)


def test_backups_survive_kills_while_they_are_written(tmp_path):
  plan = make_plan(steps=6)
  folder = tmp_path / 'backup'
  backup = lambda: tfdp.callbacks.BackupAndRestore(folder)
  first = make_model(plan)
  first.optimizer.build(first.trainable_variables)
  for epoch in (1, 2):  # The second goes on, and writes over the backup of the first.
    forget(first)
    with pytest.raises(KeyboardInterrupt):
      fit(first, [backup(), Interrupts(epoch)])
    assert [path.name for path in folder.glob('[!.]*')] == [f'whole-{epoch}']
    assert first.optimizer.steps_done == 2 * epoch
  weights = first.get_weights()
  assert folder.stat().st_mode & 0o777 == 0o700
  for share in (0.0, 0.5, 0.99, 1.0):
    half(folder / 'whole-2', folder / 'writing', share)
    half(folder / 'whole-2', folder / 'whole-1', 0.3)  # Killed while the old one was removed.
    forget(first)
    with pytest.raises(KeyboardInterrupt):
      fit(first, [backup(), Interrupts(2)])
    np.testing.assert_array_equal(np.concatenate([w.ravel() for w in first.get_weights()]),
                                  np.concatenate([w.ravel() for w in weights]))
    assert first.optimizer.steps_done == 4
  damage_is_refused(folder / 'whole-2')
  forget(first)
  budget = tfdp.callbacks.StopAtBudget(plan.epsilon(5))
  history = fit(first, [budget, backup(), tfdp.callbacks.PrivacyReport()])
  assert first.optimizer.steps_done == 5 and history['epsilon'] == [plan.epsilon(5)]
  assert not folder.exists()


@pytest.mark.thorough
def test_backups_are_of_one_plan_and_one_process(tmp_path):
  folder, plan = tmp_path / 'backup', make_plan(steps=6)
  backup = lambda: tfdp.callbacks.BackupAndRestore(folder)
  with pytest.raises(KeyboardInterrupt):
    fit(make_model(plan), [backup(), Interrupts(1)])
  script = ('import fcntl, os, sys\n'
            'held = os.open(sys.argv[1] + "/.lock", os.O_RDWR | os.O_CREAT)\n'
            'try: fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)\n'
            'except BlockingIOError: print("refused", end="")\n'
            'else: print("held", flush=True); sys.stdin.read()')
  other = [sys.executable, '-c', script, str(folder)]
  # This process is still at it, though it was interrupted.
  assert subprocess.run(other, capture_output=True, text=True, check=True).stdout == 'refused'
  backups._LOCKED.pop(str(folder.resolve())).close()  # As if it had ended.
  with subprocess.Popen(other, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
    assert process.stdout.readline() == 'held\n'
    with pytest.raises(BlockingIOError, match='Another process works in'):
      fit(make_model(plan), [backup()])
    process.stdin.close()
  again = make_model(plan)  # Its optimizer is not built yet.
  with pytest.raises(KeyboardInterrupt):
    fit(again, [backup(), Interrupts(2)])
  assert again.optimizer.steps_done == 4
  assert [entry.steps for entry in again.ledger.entries] == [4]
  unbuilt = tfdp.make_private(keras.Sequential([layers.Dense(2, activation='softmax')]))
  unbuilt.compile(tfdp.DPAdam(0.1, plan=plan), 'sparse_categorical_crossentropy')
  with pytest.raises(ValueError, match='needs a model that is built'):
    fit(unbuilt, [backup()])
  model = make_model(make_plan(steps=6, noise_multiplier=9.0))
  with pytest.raises(tfdp.PrivacyError, match='a checkpoint of another plan'):
    fit(model, [backup()])
  assert model.ledger.epsilon() == float('inf')


@pytest.mark.parametrize('folder', ['', None, 3])
def test_backups_need_a_folder(folder):
  with pytest.raises(ValueError, match='`backup_dir` must be the path'):
    tfdp.callbacks.BackupAndRestore(folder)


@pytest.mark.parametrize('weights, diverged', [
    (float('nan'), True), (float('inf'), True), (200.0, False)])
def test_weights_that_diverge_stop_the_training(model, weights, diverged):
  model.stop_training = False
  callback, = tfdp.callbacks.with_divergence_check(None)
  callback.set_model(model)
  model.set_weights([np.full_like(w, weights) for w in model.get_weights()])
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    for _ in range(2):
      callback.on_epoch_end(0, {})
  assert model.stop_training == diverged
  assert len([w for w in caught if 'has diverged' in str(w.message)]) == diverged


def test_every_fit_looks_whether_weights_are_finite():
  own, = tfdp.callbacks.with_divergence_check(None)
  mine = keras.callbacks.Callback()
  for given in (mine, [mine]):
    first, last = tfdp.callbacks.with_divergence_check(given)
    assert first is mine and type(last) is type(own)
  complete = keras.callbacks.CallbackList([])
  assert tfdp.callbacks.with_divergence_check(complete) is complete
