# SPDX-License-Identifier: Apache-2.0
"""Callbacks of this library, and those of Keras under a plan."""

import glob
import math
import warnings

import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.keras_adapter import divergence
from tfdp_adaptive.keras_adapter import history as history_lib

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
  history_lib.begin(trained.trainable_variables, history_lib.Run(plan, None, entry=before))
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


@pytest.mark.slow
def test_backup_and_restore_goes_on_with_its_epsilon(tmp_path):
  plan = make_plan()

  class Fails(keras.callbacks.Callback):

    def on_epoch_begin(self, epoch, logs=None):
      if epoch == 1:
        raise KeyboardInterrupt

  backup = lambda: keras.callbacks.BackupAndRestore(str(tmp_path / 'backup'))
  with pytest.raises(KeyboardInterrupt):
    fit(make_model(plan), [backup(), Fails()], epochs=2)
  resumed = make_model(plan)
  budget = tfdp.callbacks.StopAtBudget(plan.epsilon(3))
  history = fit(resumed, [budget, backup(), tfdp.callbacks.PrivacyReport()], epochs=2)
  assert resumed.optimizer.steps_done == 3  # Two of the first process, one of the second.
  assert history['epsilon'] == [plan.epsilon(3)]


def watched(callback, model, weights, epochs=1):
  """Callback and model after epochs that end with these weights, without any step."""
  callback.set_model(model)
  callback.on_train_begin()
  for _ in range(epochs):
    model.set_weights(weights)
    callback.on_epoch_end(0, {})
  return callback.reason


@pytest.mark.parametrize('weights, words', [
    (float('nan'), 'not finite'), (float('inf'), 'not finite'), (200.0, 'root mean square'),
    (5.0, '')])
def test_weights_that_diverge_stop_the_training(model, weights, words):
  model.set_weights([np.ones_like(w) for w in model.get_weights()])
  model.stop_training = False
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    reason = watched(tfdp.callbacks.StopIfDiverged(growth=100.0), model, [
        np.full_like(w, weights) for w in model.get_weights()], epochs=2)
  assert words in reason and bool(reason) == bool(words) == model.stop_training
  assert len([w for w in caught if 'has diverged' in str(w.message)]) == bool(words)


def test_public_data_tell_of_divergence(model):
  model.set_weights([np.zeros_like(w) for w in model.get_weights()])
  callback = tfdp.callbacks.StopIfDiverged(public_data=(X, Y), factor=2.0)
  good = [np.zeros_like(w) for w in model.get_weights()]
  bad = [20 * np.ones_like(w) * [1, -1] for w in good]
  with pytest.warns(UserWarning, match='loss on public data is'):
    watched(callback, model, good)
    model.set_weights(bad)
    callback.on_epoch_end(1, {})
  assert 'and was 0.6931' in callback.reason


def test_every_fit_looks_whether_weights_are_finite():
  callbacks = divergence.watched(None)
  assert [type(c) for c in callbacks] == [tfdp.callbacks.StopIfDiverged]
  mine = tfdp.callbacks.StopIfDiverged(growth=3.0)
  assert divergence.watched([mine]) == [mine] and divergence.watched(mine) == [mine]
  complete = keras.callbacks.CallbackList([])
  assert divergence.watched(complete) is complete
