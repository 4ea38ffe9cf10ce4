# SPDX-License-Identifier: Apache-2.0
"""State and ledger are restored together, or the earlier run is closed and a new one begins."""

import importlib
import io
import stat
import warnings

import h5py
import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.privacy import weight_digests
from tfdp_adaptive.report import card_checks
from tfdp_adaptive.report import card_json

keras = compat.keras
RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 4)).astype('float32')
Y = X[:, :1]


def make_plan(**changes):
  return tfdp.PrivacyPlan(**{**dict(
      population_size=40, batch_size=10, steps=8, l2_norm_clip=1.0, noise_multiplier=1.0,
      target_delta=1e-5), **changes})


PLAN, BATCH = make_plan(), np.ones(9, np.float32)


def build(optimizer=None, frozen=()):
  base = keras.Sequential([keras.layers.Input([4]), keras.layers.Dense(4, 'tanh'),
                           keras.layers.Dense(4, 'tanh'), keras.layers.Dense(1)])
  for number in frozen:
    base.layers[number].trainable = False
  model = tfdp.make_private(base)
  model.compile(optimizer or tfdp.DPAdam(0.05, plan=PLAN), 'mse')
  return model


def trained(steps, **kwargs):
  model = build(**kwargs)
  model.fit(PLAN.batches((X, Y)), steps_per_epoch=steps, verbose=0)
  return model


CHANGES = {
    'frozen': ((), lambda model: setattr(model.layers[0], 'trainable', False)),
    'thawed': ((0,), lambda model: setattr(model.layers[0], 'trainable', True)),
    'others of the same shape': ((0,), lambda model: [
        setattr(model.layers[0], 'trainable', True), setattr(model.layers[1], 'trainable', False)]),
}


@pytest.mark.thorough(but=['frozen', 'thawed'])
@pytest.mark.pitfall(
    "A run continues from a file of weights without the optimizer's state, so its first steps "
    'are not counted.',
    severity='critical', stops='the earlier run is closed and a new one begins')
@pytest.mark.parametrize('change', CHANGES)
def test_a_file_whose_state_does_not_fit_closes_its_run(change, tmp_path):
  frozen, apply = CHANGES[change]
  model = trained(6, frozen=frozen)
  apply(model)
  model.save(tmp_path / 'm.keras')
  with pytest.warns(tfdp.errors.Caution, match='a new run begins'):
    again = keras.models.load_model(tmp_path / 'm.keras')
  assert again.optimizer.steps_done == 0
  again.fit(PLAN.batches((X, Y)), steps_per_epoch=8, verbose=0)
  assert sorted(entry.steps for entry in again.ledger.entries) == [6, 8]
  assert again.ledger.epsilon() == pytest.approx(make_plan(steps=14).epsilon(), rel=1e-3)


def test_a_file_whose_state_fits_goes_on(tmp_path):
  trained(6).save(tmp_path / 'm.keras')
  with warnings.catch_warnings():
    warnings.simplefilter('error', tfdp.errors.Caution)
    again = keras.models.load_model(tmp_path / 'm.keras')
  assert again.optimizer.steps_done == 6
  again.fit(PLAN.batches((X, Y)), steps_per_epoch=2, verbose=0)
  assert [entry.steps for entry in again.ledger.entries] == [8]


class Stop(keras.callbacks.Callback):

  def on_epoch_end(self, epoch, logs=None):
    if epoch == 2:
      raise KeyboardInterrupt


OTHERS = {
    'rule': lambda: build(tfdp.DPSGD(0.05, plan=PLAN)),
    'ema': lambda: build(tfdp.DPAdam(0.05, plan=PLAN, use_ema=True)),
    'frozen layer': lambda: build(frozen=[0]),
}


def fit(model, folder, *callbacks):
  model.fit(PLAN.batches((X, Y)), steps_per_epoch=2, epochs=4, verbose=0,
            callbacks=[tfdp.callbacks.BackupAndRestore(folder), *callbacks])


@pytest.mark.thorough(but=['ema', 'rule'])
@pytest.mark.parametrize('other', OTHERS)
def test_a_backup_is_of_one_optimizer_and_one_set_of_variables(other, tmp_path):
  with pytest.raises(KeyboardInterrupt):
    fit(build(), tmp_path / 'backup', Stop())
  with pytest.raises(tfdp.PrivacyError, match='must be restored into the optimizer'):
    fit(OTHERS[other](), tmp_path / 'backup')
  model = build()
  fit(model, tmp_path / 'backup')
  assert [entry.steps for entry in model.ledger.entries] == [8]


def checkpoint(folder, **parts):
  return tf.train.Checkpoint(**parts).save(str(folder / 'checkpoint'))


def test_a_checkpoint_without_the_state_closes_its_run(tmp_path):
  model = trained(6)
  path = checkpoint(tmp_path, run=model.optimizer.run)
  again = build()
  again.optimizer.build(again.trainable_variables)
  tf.train.Checkpoint(run=again.optimizer.run).restore(path)
  for number, batch in enumerate(PLAN.batches((X, Y))):  # No ledger is asked for in between.
    if number < 7:
      again.train_on_batch(*batch)
  assert sorted(entry.steps for entry in again.ledger.entries) == [6, 7]


def test_a_checkpoint_of_other_variables_of_the_same_shapes_is_refused(tmp_path):
  model = trained(6, frozen=[0])
  path = checkpoint(tmp_path, optimizer=model.optimizer)
  again = build(frozen=[1])
  again.optimizer.build(again.trainable_variables)
  tf.train.Checkpoint(optimizer=again.optimizer).restore(path)
  with pytest.raises(tfdp.PrivacyError, match='set of trained variables'):
    again.fit(PLAN.batches((X, Y)), steps_per_epoch=2, verbose=0)


def test_an_entry_has_the_clip_norms_of_its_steps(tmp_path):
  first = build(tfdp.DPSGD(0.1, plan=PLAN, l2_norm_clip=8.0))
  first.fit(PLAN.batches((X, Y)), steps_per_epoch=4, verbose=0)
  path = checkpoint(tmp_path, model=first, optimizer=first.optimizer)
  model = build(tfdp.DPSGD(0.1, plan=PLAN, l2_norm_clip=0.25))
  model.optimizer.build(model.trainable_variables)
  tf.train.Checkpoint(model=model, optimizer=model.optimizer).restore(path)
  model.fit(PLAN.batches((X, Y)), steps_per_epoch=4, verbose=0)
  entry, = model.ledger.entries
  assert entry.clip_norms == ((4, 8.0), (4, 0.25)) and entry.plan.l2_norm_clip == 0.25
  assert tfdp.Ledger.from_json(model.ledger.to_json()) == model.ledger
  assert '8 in 4 steps, then 0.25 in 4 steps' in model.optimizer.statement()


def test_ctrl_c_is_noted(tmp_path):
  model = build()
  with pytest.raises(KeyboardInterrupt):
    model.fit(PLAN.batches((X, Y)), steps_per_epoch=2, epochs=4, verbose=0,
              callbacks=[Stop(), tfdp.callbacks.PrivacyReport(card=tmp_path)])
  card = card_json.read(tmp_path / 'card.json')
  assert card.epsilon == model.privacy_card().epsilon == PLAN.epsilon(6)
  assert any('interrupted after 6 steps' in note for note in card.notes)


def test_the_card_that_fit_writes_counts_its_stop(tmp_path):
  model = build()
  with pytest.warns(tfdp.errors.Caution, match='decides when training stops'):
    model.fit(PLAN.batches((X, Y)), steps_per_epoch=2, epochs=4, verbose=0, callbacks=[
        keras.callbacks.EarlyStopping('loss', patience=0, min_delta=100.0),
        tfdp.callbacks.PrivacyReport(card=tmp_path)])
  entry, = model.ledger.entries
  assert (entry.steps, entry.taken) == (8, 4)
  card = card_json.read(tmp_path / 'card.json')
  assert card.epsilon == model.privacy_card().epsilon == PLAN.epsilon()
  assert any('stopped after 4 steps' in note for note in card.notes)


def average(*models):
  inputs = keras.Input([4])
  return tfdp.make_private(keras.Model(inputs, keras.layers.Average()([m(inputs) for m in models])))


def sgd():
  return tfdp.DPSGD(0.05, plan=PLAN)


@pytest.mark.pitfall(
    'Two models train on the same batches, and their costs are added up as if sampled twice.',
    severity='high',
    stops='both ledger entries name each other, and their sum claims no amplification')
def test_two_runs_on_the_same_batches_are_not_amplified_together():
  one, two, three = (build(sgd()) for _ in range(3))
  for batch in PLAN.batches((X, Y)):
    one.train_on_batch(*batch)
    one.evaluate(*batch[:2], verbose=0)
    two.train_on_batch(*batch)
  three.fit(PLAN.batches((X, Y)), verbose=0)
  # One sample of every step, and the noise of two means of it.
  both = average(one, two).ledger
  assert both.epsilon(1e-5) >= make_plan(noise_multiplier=0.5**0.5).epsilon()
  assert average(one, three).ledger.epsilon(1e-5) == pytest.approx(
      make_plan(steps=16).epsilon(), rel=1e-3)
  assert one.ledger.epsilon() == PLAN.epsilon() and 'other steps took' in one.optimizer.statement()
  assert tfdp.Ledger.from_json(both.to_json()).epsilon(1e-5) == both.epsilon(1e-5)


@pytest.mark.parametrize('eager', [False, True])
def test_copies_of_batches_are_not_amplified_twice(eager):
  plan = make_plan(steps=6)
  next(iter(plan.batches((X, Y))))  # Somebody has looked at one.
  one, two, three = (build(tfdp.DPSGD(0.05, plan=plan)) for _ in range(3))
  take = lambda model, batch: (
      model.train_step(batch) if eager else model.train_on_batch(*batch))
  batches = plan.batches((X, Y)).cache() if eager else list(plan.batches((X, Y)))
  for model in (one, two):
    for batch in batches:
      take(model, tf.nest.map_structure(tf.identity, batch))
  for batch in plan.batches((X, Y)):
    take(three, batch)
  assert average(one, two).ledger.epsilon(1e-5) >= make_plan(
      steps=6, noise_multiplier=0.5**0.5).epsilon()
  assert average(one, three).ledger.epsilon(1e-5) == pytest.approx(
      make_plan(steps=12).epsilon(), rel=1e-3)


def test_batches_of_ones_own_are_not_amplified_twice():
  plan = make_plan(steps=2)
  one, two, three = (build(tfdp.DPSGD(0.05, plan=plan, own_sampler='mine')) for _ in range(3))
  for model in (one, two):
    model.train_on_batch(X[:9], Y[:9], BATCH)
  three.train_on_batch(X[:9], Y[:9], BATCH.copy())
  assert average(one, two).ledger.epsilon(1e-5) > average(two, three).ledger.epsilon(1e-5)


def test_a_stored_list_of_batches_is_not_amplified_twice():
  model, batches = build(sgd()), list(PLAN.batches((X, Y)))
  for _ in range(2):
    for batch in batches:
      model.train_on_batch(*batch)
    model.compile(sgd(), 'mse')
  assert model.ledger.epsilon(1e-5) >= make_plan(noise_multiplier=0.5**0.5).epsilon()


def test_one_eager_step_takes_its_batch_once():
  model = build(sgd())
  model.compile(sgd(), 'mse', run_eagerly=True)
  model.train_on_batch(*next(iter(PLAN.batches((X, Y)))))
  assert not model.ledger.entries[0].shared


def test_a_step_that_fails_takes_no_batch():
  models = [build(sgd()), build(sgd())]
  x, y, weight = next(iter(PLAN.batches((X, Y))))
  with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
    models[0].train_on_batch(x[:, :2], y, weight)
  models[1].train_on_batch(x, y, weight)
  assert not models[1].ledger.entries[0].shared


class Compiled:
  """A `compile` with an argument of its own."""

  def compile(self, optimizer, loss='mse', gamma=1.0, **kwargs):
    self.gamma = gamma
    super().compile(optimizer, loss, **kwargs)


@keras.saving.register_keras_serializable('restored_state')
class OwnBefore(Compiled, tfdp.DPSequential):
  pass


@keras.saving.register_keras_serializable('restored_state')
class OwnAfter(tfdp.DPModel, Compiled, keras.Sequential):
  pass


@pytest.mark.parametrize('kind', (OwnBefore, OwnAfter))
def test_a_model_with_its_own_compile_is_not_compiled_as_it_is_loaded(kind, tmp_path):
  model = kind([keras.layers.Input([4]), keras.layers.Dense(1)])
  model.compile(tfdp.DPAdam(0.05, plan=PLAN), 'mse')
  model.fit(PLAN.batches((X, Y)), steps_per_epoch=6, verbose=0)
  model.save(tmp_path / 'm.keras')
  loaded = keras.models.load_model(tmp_path / 'm.keras')  # Keras warns, or logs a warning.
  assert getattr(loaded, 'optimizer', None) is None and not hasattr(loaded, 'gamma')
  assert loaded.ledger.epsilon(1e-5) == model.ledger.epsilon(1e-5) > 0


@pytest.mark.skipif(not hasattr(keras, 'ops'), reason='file objects are of Keras 3')
def test_models_are_saved_to_file_objects():
  saving = importlib.import_module('keras.src.saving.saving_lib')
  plain = keras.Sequential([keras.layers.Input([4]), keras.layers.Dense(1)])
  for model in (plain, trained(6)):
    file = io.BytesIO()
    saving.save_model(model, file)
    file.seek(0)
    again = saving.load_model(file)
    np.testing.assert_array_equal(again.get_weights()[0], model.get_weights()[0])
  assert again.optimizer.steps_done == 6


def test_a_card_is_compared_with_the_ledger_in_the_file(tmp_path):
  model = trained(8)
  model.compile(tfdp.DPAdam(0.05, plan=PLAN), 'mse')
  model.fit(PLAN.batches((X, Y)), verbose=0)
  path = tmp_path / 'm.weights.h5'
  model.save_weights(str(path))
  card = model.privacy_card()
  wrongs = lambda one: [found.text for found in card_checks.check(one, path)
                        if found.kind == card_checks.WRONG]
  assert not wrongs(card)
  alone = tfdp.Ledger((card.runs[-1],)).card(weights=card.weights)
  assert 'has 2 run(s)' in wrongs(alone)[0]


def test_digests_know_integer_weights_and_no_random_states(tmp_path):
  class Quantized(keras.layers.Layer):

    def build(self, shape):
      self.k = self.add_weight(shape=(4, 4), dtype='int8', initializer='zeros', trainable=False,
                               name='k')

    def call(self, x):
      return tf.matmul(x, tf.cast(tf.convert_to_tensor(self.k), x.dtype))

  model = keras.Sequential([keras.layers.Input([4]), Quantized(), keras.layers.Dropout(0.5, seed=1),
                            keras.layers.Dense(1)])
  before = weight_digests.of(model.weights)
  model.layers[0].k.assign(np.full((4, 4), 7, 'int8'))
  after = weight_digests.of(model.weights)
  assert len(set(before) & set(after)) == len(before) - 1
  model.save_weights(str(tmp_path / 'm.weights.h5'))
  assert weight_digests.of_file(tmp_path / 'm.weights.h5').weights == after


@pytest.mark.both_stacks
def test_what_others_read_has_no_exact_metric_and_what_resumes_is_the_owners(tmp_path):
  model = build(tfdp.DPAdam(0.05, plan=PLAN, seed=3))
  model.compile(model.optimizer, 'mse', metrics=['mae'])
  model.fit(PLAN.batches((X, Y)), steps_per_epoch=1, verbose=0)
  assert [entry.seeded for entry in model.ledger.entries] == [True]
  exact = {float(v) for metric in model.metrics for one in metric.variables
           for v in np.ravel(one) if v} - {1.0}
  assert exact
  found = []
  model.save_weights(tmp_path / 'model.weights.h5')
  with h5py.File(tmp_path / 'model.weights.h5') as file:
    file.visititems(lambda _, one: found.extend(np.ravel(one)) if hasattr(one, 'dtype') else None)
  tf.saved_model.save(model, str(tmp_path / 'folder'))
  reader = tf.train.load_checkpoint(str(tmp_path / 'folder' / 'variables' / 'variables'))
  for name in reader.get_variable_to_shape_map():
    found.extend(np.ravel(reader.get_tensor(name)))
  numbers = {float(one) for one in found if isinstance(one, (np.number, float))}
  assert len(numbers) > 20 and not exact & numbers
  tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(tmp_path / 'checkpoint')
  files = list(tmp_path.glob('checkpoint-1.*'))
  assert files and {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
