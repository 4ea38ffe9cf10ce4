# SPDX-License-Identifier: Apache-2.0
"""A silo counts the steps of all rounds, whatever process or model takes them."""

import os
import shutil
import stat
import subprocess
import sys

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import runfolder
from tfdp_adaptive.report import card_checks

keras = tf.keras
RNG = np.random.default_rng(0)
X = RNG.normal(size=[60, 4]).astype(np.float32)
Y = X.sum(1, keepdims=True)
Silo = tfdp.federated.Silo


def make_plan(**changed):
  return tfdp.PrivacyPlan(**{**dict(
      batch_size=20, steps=12, l2_norm_clip=1.0, noise_multiplier=1.0, target_delta=1e-3,
      population_size=60, seed=7), **changed})


def make(plan, kind=tfdp.DPAdam, seed=3, **kwargs):
  model = tfdp.make_private(keras.Sequential([
      keras.layers.Input([4]), keras.layers.Dense(1, kernel_initializer='ones')]))
  model.compile(kind(0.1, plan=plan, seed=seed, **kwargs), 'mse')
  return model


def rounds(folder, plan, steps, **kwargs):
  """The weights after rounds of so many steps, each with a model and silo of its own."""
  weights = make(plan, **kwargs).get_weights()
  for number in steps:
    weights = Silo(folder, plan=plan).train(
        make(plan, **kwargs), weights, (X, Y), steps=number)
  return weights


PLANS = {
    'Poisson': {},
    'correlated': dict(mechanism=tfdp.mechanisms.BandedToeplitz(bands=3, steps=12),
                       sampling=tfdp.sampling.FixedOrder()),
    'coins of the whole run': dict(sampling=tfdp.sampling.RandomAllocation(cycle=3)),
}


@pytest.mark.thorough(but=['correlated'])
@pytest.mark.parametrize('name', PLANS)
def test_rounds_are_one_fit_with_the_same_weights_passed_through(name, tmp_path):
  plan = make_plan(**PLANS[name])
  model = make(plan)
  model.fit(plan.batches((X, Y)), verbose=0)
  weights = rounds(tmp_path / 'silo', plan, [5, 7])
  for ours, theirs in zip(weights, model.get_weights()):
    np.testing.assert_array_equal(ours, theirs)
  silo = Silo(tmp_path / 'silo', plan=plan)
  assert [entry.steps for entry in silo.ledger.entries] == [12]
  assert silo.ledger.epsilon() == model.ledger.epsilon() == pytest.approx(plan.epsilon())
  assert silo.card().weights == model.privacy_card().weights


def test_other_weights_of_the_server_are_trained_from(tmp_path):
  plan = make_plan(noise_multiplier=0.0, sampling=tfdp.sampling.FixedOrder())
  model, silo = make(plan, tfdp.DPSGD), Silo(tmp_path / 'silo', plan=plan)
  zero = [np.zeros_like(w) for w in model.get_weights()]
  silo.train(model, zero, (X, Y), steps=2)
  trained = silo.train(model, zero, (X, Y), steps=1)
  third = list(plan.index_batches())[2]
  x, y = X[third], Y[third]  # From zero, gradients are -2 y x, clipped.
  gradients = np.concatenate([-2 * y * x, -2 * y], 1)
  gradients *= np.minimum(1, 1 / np.linalg.norm(gradients, axis=1))[:, np.newaxis]
  np.testing.assert_allclose(
      np.concatenate([trained[0][:, 0], trained[1]]), -0.1 * gradients.mean(0), atol=1e-6)


@pytest.mark.pitfall(
    'A client of a silo makes a new model in every round, whose ledger begins at zero.',
    severity='critical', stops='`Silo` counts all rounds in one folder; without it a `Caution`')
def test_epsilon_is_that_of_all_rounds(tmp_path):
  plan = make_plan(steps=40, seed=None)
  silo, spent = Silo(tmp_path / 'silo', plan=plan), []
  assert silo.ledger.epsilon() == 0 and 'no step has been taken' in silo.statement()
  for _ in range(2):
    model = make(plan, seed=None)
    silo.train(model, model.get_weights(), (X, Y), steps=4)
    spent.append(silo.ledger.epsilon())
  assert spent == pytest.approx([plan.epsilon(4), plan.epsilon(8)])
  statement = silo.statement()
  assert 'after 8 of the 40' in statement and 'One of several silos' in statement
  assert 'trusts nobody else' in statement and 'curator' not in statement
  assert silo.card().epsilon == pytest.approx(spent[-1])
  other = make(plan, seed=None)
  with pytest.warns(tfdp.Caution, match='tfdp.federated.Silo'):
    other.set_weights(model.get_weights())
  other.fit(plan.batches((X, Y)), steps_per_epoch=4, verbose=0)
  assert 'Weights were set by hand' in other.optimizer.statement()
  assert other.ledger.epsilon() < spent[-1]


def test_weights_that_were_set_before_a_plan_are_told_of_too():
  plan = make_plan()
  model = tfdp.make_private(keras.Sequential([keras.layers.Input([4]), keras.layers.Dense(1)]))
  model.set_weights(model.get_weights())
  model.compile(tfdp.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=20), 'mse')
  with pytest.warns(tfdp.Caution, match='Silo'):
    model.compile(tfdp.DPSGD(0.1, plan=plan), 'mse')
  with pytest.warns(tfdp.Caution, match='Silo'):  # As a copy is that had an optimizer.
    model.optimizer = tfdp.DPSGD(0.1, plan=plan)
  model.compile(tfdp.DPSGD(0.1, plan=plan), 'mse')
  model.fit(plan.batches((X, Y)), steps_per_epoch=1, verbose=0)
  assert 'Weights were set by hand' in model.ledger.statement()
  model.set_weights(model.get_weights())  # These have a ledger.


@pytest.mark.thorough
def test_what_the_weights_cost_before_is_counted_once(tmp_path):
  base, plan = make_plan(steps=3), make_plan()
  model = make(base)
  model.fit(base.batches((X, Y)), verbose=0)
  model.compile(tfdp.DPAdam(0.1, plan=plan, seed=3), 'mse')
  silo = Silo(tmp_path / 'silo', plan=plan)
  weights = silo.train(model, model.get_weights(), (X, Y), steps=2)
  for _ in range(2):
    weights = silo.train(make(plan), weights, (X, Y), steps=2)
  assert sorted(entry.steps for entry in silo.ledger.entries) == [3, 6]


def test_a_round_that_was_not_answered_is_answered_from_the_folder(tmp_path):
  plan = make_plan(seed=None, sampling=tfdp.sampling.RandomAllocation(cycle=3))
  model, silo = make(plan), Silo(tmp_path / 'silo', plan=plan)
  digests = dict(digests_to=tmp_path / 'digests')
  first = silo.train(model, model.get_weights(), (X, Y), steps=3, server_round=1, **digests)
  coins = (tmp_path / 'silo' / 'coins').read_bytes()
  again = Silo(tmp_path / 'silo', plan=plan).train(
      make(plan), model.get_weights(), (X, Y), steps=3, server_round=1, **digests)
  assert (tmp_path / 'silo' / 'coins').read_bytes() == coins
  for ours, theirs in zip(first, again):
    np.testing.assert_array_equal(ours, theirs)
  assert silo.ledger.entries[0].steps == 3
  with pytest.raises(tfdp.PrivacyError, match='goes on with the records'):  # Another silo.
    silo.train(make(plan), first, (X + 1, Y), steps=3, server_round=1)
  silo.train(make(plan), first, (X, Y), steps=3, server_round=np.int64(2))
  assert silo.ledger.entries[0].steps == 6


@pytest.mark.thorough
def test_the_learning_rate_is_that_of_the_round(tmp_path):
  plan = make_plan(noise_multiplier=0.0)
  silo, moved = Silo(tmp_path / 'silo', plan=plan), []
  for rate in (0.1, 0.1, 0.001):
    model = make(plan, tfdp.DPSGD)
    model.optimizer.learning_rate = rate
    start = model.get_weights()
    end = silo.train(model, start, (X, 0 * Y - 50), steps=1)
    moved.append(max(np.abs(a - b).max() for a, b in zip(start, end)))
  assert moved[2] < 0.05 * moved[1]


def test_steps_before_an_error_are_taken_and_nothing_else_is(tmp_path):
  plan, silo = make_plan(), Silo(tmp_path / 'silo', plan=make_plan())
  model = make(plan)
  start, fit = model.get_weights(), model.fit

  def interrupt(batch, logs=None):
    if batch == 1:
      raise KeyboardInterrupt

  model.fit = lambda *args, **kwargs: fit(*args, callbacks=[
      keras.callbacks.LambdaCallback(on_train_batch_end=interrupt)], **kwargs)
  with pytest.raises(KeyboardInterrupt):
    silo.train(model, start, (X, Y), steps=4, server_round=1)
  assert silo.ledger.entries[0].steps == 2
  silo.train(make(plan), start, (X, Y), steps=4, server_round=1)  # It was not answered.
  assert silo.ledger.entries[0].steps == 6


@pytest.fixture(scope='module')
def used(tmp_path_factory):
  folder = tmp_path_factory.mktemp('silos') / 'used'
  plan = make_plan()
  Silo(folder, plan=plan).train(make(plan), make(plan).get_weights(), (X, Y), steps=8)
  return folder


REFUSED = {
    'beyond the plan': (dict(steps=5), 'covers 12 steps of all rounds, of which 8 are done'),
    'other records': (dict(data=(X + 1, Y)), 'goes on with the records'),
    'another order': (dict(data=(X[::-1], Y[::-1])), 'goes on with the records'),
    'another plan': (dict(optimizer=make_plan(steps=50)), 'must have the plan of the silo'),
    'other weights': (dict(weights=[np.zeros([3, 1]), np.zeros([1])]), 'shape|set_weights'),
    'another rule': (dict(kind=tfdp.DPYogi), 'has the state of another optimizer'),
    'another state': (dict(seed=None), 'has the state of another optimizer'),
    'no steps': (dict(steps=0), '`steps` must'),
}


@pytest.mark.parametrize('name', REFUSED)
def test_rounds_that_are_refused_take_no_step(name, used):
  changed, said = REFUSED[name]
  plan = make_plan()
  model = make(changed.get('optimizer', plan), changed.get('kind', tfdp.DPAdam),
               changed.get('seed', 3))
  with pytest.raises((ValueError, tfdp.PrivacyError), match=said):
    Silo(used, plan=plan).train(model, changed.get('weights', model.get_weights()),
                                changed.get('data', (X, Y)), steps=changed.get('steps', 1))
  assert Silo(used, plan=plan).ledger.entries[0].steps == 8


def test_an_optimizer_with_steps_of_its_own_is_refused(used):
  plan = make_plan()
  model = make(plan)
  model.fit(plan.batches((X, Y)), steps_per_epoch=8, verbose=0)
  with pytest.raises(tfdp.PrivacyError, match='8 steps that are not in the ledger'):
    Silo(used, plan=plan).train(model, model.get_weights(), (X, Y), steps=1)


def test_models_that_are_not_private_are_refused(used):
  plain = keras.Sequential([keras.layers.Input([4]), keras.layers.Dense(1)])
  for model in (plain, tfdp.make_private(plain)):
    with pytest.raises(ValueError, match='private model that is built and compiled'):
      Silo(used, plan=make_plan()).train(model, plain.get_weights(), (X, Y), steps=1)


@pytest.mark.pitfall(
    'A silo begins in a new folder, so that its ledger begins at zero.',
    severity='critical',
    stops='an error if a folder beside it has the same examples, or if the state is lost or the '
          'round is later')
def test_a_fresh_folder_beside_an_old_one_is_refused(used, tmp_path):
  plan = make_plan()
  begin = lambda folder, data=(X, Y), new=False, **kwargs: Silo(folder, plan=plan, new=new).train(
      make(plan), make(plan).get_weights(), data, steps=1, **kwargs)
  with pytest.raises(tfdp.PrivacyError, match=f'{used} has a ledger of the same records'):
    begin(used.with_name('fresh'))
  with pytest.raises(tfdp.PrivacyError, match='has a ledger of the same records'):
    begin(used.with_name('fresh'))  # And again: the first attempt left nothing.
  begin(used.with_name('other'), data=(X + 2, Y))  # Another silo of a simulation.
  with pytest.raises(tfdp.PrivacyError, match='Round 2 needs the ledger'):
    begin(tmp_path / 'late', server_round=2)
  begin(tmp_path / 'late', server_round=2, new=True)
  (tmp_path / 'late' / 'silo.npz').unlink()
  with pytest.raises(tfdp.PrivacyError, match='is gone, and with it the ledger'):
    begin(tmp_path / 'late')


def test_copies_of_a_folder_that_both_go_on_draw_the_same_batches_and_cost_more(tmp_path):
  plan, drawn, silos = make_plan(seed=None), [], []
  original = tfdp.sampling.Poisson.index_batches

  def spy(*args):
    for indices in original(*args):
      drawn.append(indices.tolist())
      yield indices

  def train(place, steps):
    silo = Silo(tmp_path / place / 'silo', plan=plan)
    silo.train(make(plan, seed=None), make(plan).get_weights(), (X, Y), steps=steps)
    return silo

  train('here', 2)
  shutil.copytree(tmp_path / 'here', tmp_path / 'there')
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(tfdp.sampling.Poisson, 'index_batches', spy)
    for place in ('here', 'there'):
      train(place, 2)
      silos.append(train(place, 2))
  assert drawn[:2] == drawn[len(drawn) // 2:][:2]  # A step of each is one step with less noise.
  step = lambda count, sigma: dp_accounting.SelfComposedDpEvent(dp_accounting.PoissonSampledDpEvent(
      1 / 3, dp_accounting.GaussianDpEvent(sigma)), count)
  accountant = dp_accounting.pld.PLDAccountant()
  accountant.compose(step(2, 1.0)).compose(step(4, 1 / np.sqrt(2)))
  truth = accountant.get_epsilon(plan.target_delta)
  both = silos[0].ledger + silos[1].ledger
  assert truth > 1.3 * silos[0].ledger.epsilon() and both.epsilon() > truth
  assert 'may have taken its steps on the same batches' in both.statement()
  found = card_checks.check(both.card(plots=False))
  assert not [one for one in found if one.kind == card_checks.WRONG]
  assert 'runs took steps on the same batches' in str(found)


@pytest.mark.parametrize('older', [False, True])
def test_a_ledger_that_goes_back_in_a_process_is_refused(used, tmp_path, older):
  """The folder was cleaned, or an older copy was put back."""
  plan, folder = make_plan(), tmp_path / 'silo'
  shutil.copytree(used, folder)
  silo = Silo(folder, plan=plan)
  silo.train(make(plan), make(plan).get_weights(), (X, Y), steps=1)
  shutil.rmtree(folder)
  if older:
    shutil.copytree(used, folder)
  for ask in (silo.statement, lambda: silo.train(
      make(plan), make(plan).get_weights(), (X, Y), steps=1)):
    with pytest.raises(tfdp.PrivacyError, match='had 9 steps. Received: a folder with [08]'):
      ask()


def test_another_plan_and_a_changed_file_are_refused(used, tmp_path):
  with pytest.raises(tfdp.PrivacyError, match='has the ledger of another plan'):
    Silo(used, plan=make_plan(steps=13))
  (tmp_path / 'silo.npz').write_bytes((used / 'silo.npz').read_bytes()[:-1] + b'0')
  with pytest.raises(tfdp.PrivacyError, match='must be what a run saved'):
    Silo(tmp_path, plan=make_plan())
  runfolder.save(tmp_path / 'silo.npz', (), {'rounds': 3})  # The state of another kind of run.
  with pytest.raises(tfdp.PrivacyError, match='must be what a silo saved'):
    Silo(tmp_path, plan=make_plan())
  for wrong in ('', 3):
    with pytest.raises(ValueError, match='path of a folder must be'):
      Silo(wrong, plan=make_plan())
  with pytest.raises(ValueError, match='`plan` must be'):
    Silo(tmp_path, plan=None)


def test_a_second_process_is_refused_and_the_folder_is_its_owners(used):
  holder = subprocess.Popen(
      [sys.executable, '-c', 'import fcntl, sys; f = open(sys.argv[1], "a"); '
       'fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); sys.stdin.read()', used / '.lock'],
      stdin=subprocess.PIPE, stdout=subprocess.PIPE)
  holder.stdout.readline()
  try:
    with pytest.raises(tfdp.PrivacyError, match='Another process works in'):
      Silo(used, plan=make_plan()).train(
          make(make_plan()), make(make_plan()).get_weights(), (X, Y), steps=1)
  finally:
    holder.communicate()
  (used / '.lock').unlink()
  assert stat.S_IMODE(used.stat().st_mode) == 0o700
  for file in used.iterdir():
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600, file


def test_a_first_round_that_failed_before_a_step_leaves_plan_and_records_open(tmp_path):
  wrong, plan, data = make_plan(noise_multiplier=2.0), make_plan(), (X + 1, Y)
  with pytest.raises(ValueError, match='shape|set_weights'):
    Silo(tmp_path / 'silo', plan=wrong).train(
        make(wrong), [np.zeros([3, 1]), np.zeros([1])], (X, Y), steps=1)
  Silo(tmp_path / 'silo', plan=plan).train(make(plan), make(plan).get_weights(), data, steps=1)
  Silo(tmp_path / 'other', plan=plan).train(  # Nothing was spent on these.
      make(plan), make(plan).get_weights(), (X, Y), steps=1)
  for changed in (dict(plan=wrong), dict(data=(X, Y))):
    with pytest.raises(tfdp.PrivacyError, match='of another plan|goes on with the records'):
      Silo(tmp_path / 'silo', plan=changed.get('plan', plan)).train(
          make(plan), make(plan).get_weights(), changed.get('data', data), steps=1)


def test_the_state_is_on_disk_before_the_answer(used, monkeypatch):
  """Nothing is answered where it cannot be saved."""
  def full(*args, **kwargs):
    raise OSError('no space left')

  plan = make_plan()
  monkeypatch.setattr(runfolder, 'save', full)
  with pytest.raises(OSError, match='no space'):
    Silo(used, plan=plan).train(make(plan), make(plan).get_weights(), (X, Y), steps=1)
