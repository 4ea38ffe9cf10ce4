# SPDX-License-Identifier: Apache-2.0
"""The ledger belongs to the weights: another optimizer, plan, model or file adds up."""

import types

import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive import runfolder
from tfdp_adaptive.keras import run as run_lib
from tfdp_adaptive.keras import weight_ledger
from tfdp_adaptive.privacy import ledger

keras = compat.keras
RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 3)).astype('float32')
Y = X.sum(1, keepdims=True)


def make_plan(**changes):
  return tfdp.PrivacyPlan(**dict(dict(
      batch_size=8, steps=4, l2_norm_clip=1.0, noise_multiplier=1.0, target_delta=1e-3,
      population_size=64), **changes))


def trained(plan, model=None, steps=4, rule=None):
  model = model or tfdp.make_private(keras.Sequential([
      keras.layers.Input([3]), keras.layers.Dense(1)]))
  model.compile((rule or tfdp.DPAdam)(0.1, plan=plan), loss='mse')
  model.fit(plan.batches((X, Y)), steps_per_epoch=steps, verbose=0)
  return model


def plain():
  return keras.Sequential([keras.layers.Input([3]), keras.layers.Dense(1)])


def spent(plan, steps=2):
  """A private model whose weights went through steps of a run that has ended."""
  model = tfdp.make_private(plain())
  entry = ledger.Entry(plan, steps, rule='dp_adam', run=ledger.new_run())
  weight_ledger.Ledger(model.trainable_variables).attach([entry])
  return model


def both(plan):
  return (plan + plan).epsilon(plan.target_delta)


@pytest.mark.skipif(not compat.KERAS_3, reason='Keras 2 has neither')
@pytest.mark.parametrize('steps', [('lora',), ('lora', 'file'), ('lora', 'weights'),
                                   ('quantize', 'file'), ('lora', 'frozen')], ids='-'.join)
def test_adapters_and_fewer_bits_keep_what_was_spent(steps, tmp_path):
  """They give layers other variables; a run with the adapter is added."""
  plan = make_plan()
  model = spent(plan, steps=4)
  for step in steps:
    if step == 'lora':
      model.layers[0].enable_lora(1)
    elif step == 'quantize':
      model.quantize('int8')
    elif step == 'frozen':
      head = keras.Sequential([keras.layers.Input([3]), model.layers[0], keras.layers.Dense(1)])
      model.layers[0].trainable = False
      model = tfdp.make_private(head)
    elif step == 'weights':
      model.save_weights(tmp_path / 'm.weights.h5')
      model = plain()
      model.layers[0].enable_lora(1)
      model.load_weights(tmp_path / 'm.weights.h5')
      model = tfdp.make_private(model)
    else:
      model.save(tmp_path / 'm.keras')
      model = keras.models.load_model(tmp_path / 'm.keras')
  assert model.ledger.epsilon() == pytest.approx(plan.epsilon())
  if 'quantize' not in steps:  # Quantized weights do not train.
    assert trained(plan, model).ledger.epsilon() == pytest.approx(both(plan))


@pytest.mark.pitfall(
    'A second optimizer trains the same weights, and states the epsilon of one run.',
    severity='critical', stops='the ledger belongs to the weights, so both runs are counted')
def test_a_second_optimizer_adds_up():
  plan = make_plan()
  model = trained(plan)
  assert model.optimizer.epsilon() == pytest.approx(plan.epsilon())
  assert 'TRAINED BEFORE' not in model.optimizer.statement()
  trained(plan, model, rule=tfdp.DPSGD)
  assert [(e.steps, e.rule) for e in model.ledger.entries] == [(4, 'dp_adam'), (4, 'dp_sgd')]
  assert model.optimizer.epsilon() == pytest.approx(both(plan))
  assert both(plan) > plan.epsilon()
  assert model.ledger.epsilon() == pytest.approx(both(plan))
  assert 'TRAINED BEFORE' in model.optimizer.statement()


@pytest.mark.thorough(but=['file', 'checkpoint'])
@pytest.mark.pitfall(
    'Older weights replace newer ones that somebody has already seen.',
    severity='high', stops='the replaced steps stay in the ledger as a separate run')
@pytest.mark.parametrize('how', ['file', 'optimizer', 'checkpoint'])
def test_steps_that_are_undone_stay_counted(how, tmp_path):
  plan = make_plan()
  model, drawn = trained(plan, steps=1), list(plan.batches((X, Y)))
  optimizer, path = model.optimizer, str(tmp_path / 'model.keras')
  checkpoint, store = tf.train.Checkpoint(model=model, optimizer=optimizer), {}
  optimizer.save_own_variables(store)
  store = {name: np.array(value) for name, value in store.items()}
  model.save(path)
  saved = checkpoint.write(str(tmp_path / 'checkpoint'))
  for times in (1, 2):
    for batch in drawn[1:3]:
      model.train_on_batch(*batch)
    if how == 'checkpoint':
      checkpoint.read(saved)
    elif how == 'optimizer' or not compat.KERAS_3:
      optimizer.load_own_variables(store)
    else:
      model.load_weights(path)
    assert optimizer.steps_done == 1
    assert sorted(entry.steps for entry in model.ledger.entries) == [1] + times * [3]
  model.train_on_batch(*drawn[1])
  assert sorted(entry.steps for entry in optimizer.ledger.entries) == [2, 3, 3]
  model.save(path)
  again = keras.models.load_model(path)
  assert sorted(entry.steps for entry in again.ledger.entries) == [2, 3, 3]
  assert model.ledger.epsilon() > plan.epsilon()


@pytest.mark.pitfall(
    'A run is resumed from a checkpoint under another plan, and the statement has the epsilon '
    'of the other plan.',
    severity='critical', stops='no epsilon is stated, and `fit` refuses to go on')
def test_a_checkpoint_of_another_plan_leaves_no_epsilon(tmp_path):
  def made(**changes):
    model = tfdp.make_private(keras.Sequential([
        keras.layers.Input([3]), keras.layers.Dense(1)]))
    model.compile(tfdp.DPAdam(0.1, plan=make_plan(**changes)), loss='mse')
    model.optimizer.build(model.trainable_variables)
    return model, tf.train.Checkpoint(model=model, optimizer=model.optimizer)

  def restored(**changes):
    model, checkpoint = made(**changes)
    checkpoint.restore(path)
    assert model.optimizer.steps_done == 2
    return model

  plan, (first, checkpoint) = make_plan(), made()
  first.optimizer.run.state[1].noise.row.assign(2)
  path = checkpoint.save(str(tmp_path / 'c'))
  for more in ({}, dict(l2_norm_clip=3.0)):  # Noise comes in units of the clip norm.
    same = restored(**more)
    assert same.ledger.epsilon() == pytest.approx(plan.epsilon(2))
    assert same.optimizer.epsilon() == pytest.approx(plan.epsilon())
  for more in (dict(noise_multiplier=2.0), dict(steps=9), dict(batch_size=4)):
    other = restored(**more)
    assert other.ledger.epsilon() == other.optimizer.epsilon() == float('inf')
    assert 'Epsilon is infinite' in other.optimizer.statement()
    with pytest.raises(tfdp.PrivacyError, match='a checkpoint of another plan'):
      other.fit(other.optimizer.plan.batches((X, Y), start_step=2), verbose=0)


@pytest.mark.thorough
def test_spent_is_less_than_planned():
  model = trained(make_plan(), steps=1)
  assert model.ledger.epsilon() == pytest.approx(make_plan().epsilon(1))
  assert model.ledger.epsilon() < model.optimizer.epsilon()


@pytest.mark.thorough
@pytest.mark.pitfall(
    'The model is wrapped again, or shares a layer with another.',
    severity='critical', stops='runs on any of its weights are counted')
def test_wrapping_again_or_sharing_a_layer_hides_nothing():
  plan, inner = make_plan(), keras.Sequential([keras.layers.Input([3]), keras.layers.Dense(1)])
  trained(plan, tfdp.make_private(inner))
  again = trained(plan, tfdp.make_private(inner))
  assert again.optimizer.epsilon() == pytest.approx(both(plan))
  head = tfdp.make_private(keras.Sequential([
      keras.layers.Input([3]), inner.layers[-1], keras.layers.Dense(1)]))
  assert trained(plan, head).optimizer.epsilon() > both(plan)


@pytest.mark.pitfall(
    'Guarantees about different neighbours are added.',
    severity='high', stops='an error')
def test_neighbours_of_two_kinds_have_no_common_epsilon():
  model = spent(make_plan())
  other = make_plan(adjacency='replace', sampling=tfdp.sampling.FixedOrder())
  model.compile(tfdp.DPAdam(0.1, plan=other), loss='mse')
  model.optimizer.build(model.trainable_variables)
  with pytest.raises(ValueError, match='same `adjacency`'):
    model.optimizer.epsilon()
  assert 'no epsilon of all runs together can be stated' in model.optimizer.statement()


@pytest.mark.thorough
@pytest.mark.pitfall(
    'Weights were trained in a run that left no record.',
    severity='critical', stops='no epsilon is stated')
def test_a_run_without_plan_leaves_no_epsilon():
  model = tfdp.make_private(keras.Sequential([keras.layers.Input([3]), keras.layers.Dense(1)]))
  model.compile(tfdp.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=8), loss='mse')
  model.fit(X, Y, batch_size=8, verbose=0)
  plan = make_plan()
  assert trained(plan, model).optimizer.epsilon() == float('inf')


@pytest.mark.thorough
@pytest.mark.pitfall(
    'The history is lost when the model is saved.',
    severity='critical', stops='the ledger is saved with the weights')
@pytest.mark.parametrize('compiled', [True, False])
def test_files_carry_it(tmp_path, compiled):
  plan = make_plan()
  model = trained(plan, steps=2)
  model.save(tmp_path / 'model.keras')
  loaded = keras.models.load_model(tmp_path / 'model.keras', compile=compiled)
  assert [e.steps for e in loaded.ledger.entries] == [2]
  if compiled:  # It is one run, that goes on.
    loaded.fit(plan.batches((X, Y), start_step=2), verbose=0)
    assert [e.steps for e in loaded.ledger.entries] == [4]
    assert loaded.optimizer.epsilon() == pytest.approx(plan.epsilon())
  else:  # Another optimizer is another run.
    trained(plan, loaded)
    assert [e.steps for e in loaded.ledger.entries] == [2, 4]
  loaded.save(tmp_path / 'again.keras')
  again = keras.models.load_model(tmp_path / 'again.keras')
  assert again.ledger == loaded.ledger
  weights = str(tmp_path / 'model.weights.h5')
  loaded.save_weights(weights)
  fresh = tfdp.make_private(plain())
  fresh.load_weights(weights)
  assert fresh.ledger == loaded.ledger


@pytest.mark.pitfall(
    'A checkpoint of the model alone, without its optimizer, forgets what was spent.',
    severity='critical', stops='the ledger is part of the model in checkpoints, too')
def test_checkpoints_of_the_model_carry_it(tmp_path):
  plan, path = make_plan(), str(tmp_path / 'checkpoint')
  model = spent(plan)
  tf.train.Checkpoint(model=model).write(path)

  def read(target):
    tf.train.Checkpoint(model=target).read(path).expect_partial()
    return target

  private = read(tfdp.make_private(plain()))
  unbuilt = read(tfdp.make_private(keras.Sequential([keras.layers.Dense(1)])))
  unbuilt(X)
  for other in (private, unbuilt, tfdp.make_private(read(plain()))):
    np.testing.assert_array_equal(other(X), model(X))
    assert other.ledger == model.ledger != tfdp.Ledger()
  private.compile(tfdp.DPAdam(0.1, plan=plan), loss='mse')  # Another run of the same plan.
  private.optimizer.build(private.trainable_variables)
  private.optimizer.run.state[1].noise.row.assign(3)
  assert [entry.steps for entry in private.ledger.entries] == [2, 3]
  tf.train.Checkpoint(private).write(path)  # That run is reported twice, and counted once.
  for compiled_first in (True, False):
    resumed = tfdp.make_private(plain())
    for compiles in (compiled_first, not compiled_first):
      if compiles:
        resumed.compile(tfdp.DPAdam(0.1, plan=plan), loss='mse')
      else:
        tf.train.Checkpoint(resumed).read(path)
    resumed.make_train_function()
    assert resumed.optimizer.steps_done == 3
    assert resumed.ledger == private.ledger


def test_a_plain_model_reads_the_weights_and_shares_what_was_spent(tmp_path):
  model, path = spent(make_plan()), str(tmp_path / 'model.weights.h5')
  model.save_weights(path)
  public = plain()
  public.load_weights(path)
  np.testing.assert_array_equal(public(X), model(X))
  tf.saved_model.save(model, str(tmp_path / 'folder'))
  inner = plain()
  private = tfdp.make_private(inner)
  weight_ledger.Ledger(private.variables).attach(model.ledger.entries)
  inner.save_weights(path)
  again = tfdp.make_private(plain())
  again.load_weights(path)
  assert again.ledger == model.ledger


def test_fit_goes_on_with_a_checkpoint_that_is_restored_before_the_optimizer_is_built(tmp_path):
  plan, path = make_plan(), str(tmp_path / 'checkpoint')
  model = trained(plan, steps=1)
  tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(path)
  again = tfdp.make_private(plain())
  again.compile(tfdp.DPAdam(0.1, plan=plan), loss='mse')
  tf.train.Checkpoint(model=again, optimizer=again.optimizer).read(path)
  with pytest.raises(tfdp.PrivacyError, match='covers 4 steps, of which 1 are done'):
    again.fit(plan.batches((X, Y)), verbose=0)
  assert again.ledger == model.ledger


def test_a_run_restored_knows_what_the_file_says_of_users():
  plan = make_plan(unit='user')
  run = run_lib.Run(plan, tfdp.rules.dp_adam())
  row = types.SimpleNamespace(noise=types.SimpleNamespace(row=tf.Variable(2, dtype=tf.int64)))
  run.begin(None, types.SimpleNamespace(privatizer=row), [tf.Variable(0.0)])  # Restored, too.
  read = ledger.Entry(plan, 2, run='other.0', examples_per_user=3)
  run.deserialize(tfdp.Ledger((read,)).to_json().encode())
  assert run.entries(2)[-1].examples_per_user == 3
  run.say(examples_per_user=5)  # Since then.
  assert ledger.distinct([read, *run.entries(2)]).entries[0].examples_per_user == 5
  with pytest.raises(ValueError, match='examples_per_user'):
    ledger.Entry(plan, 2, examples_per_user=-1)


@pytest.mark.pitfall(
    'A trained model is compiled again with the same plan and saved before it trains. After '
    'loading, its second run replaces the first in the ledger.',
    severity='critical', stops='a loaded optimizer continues a run only if it was saved with steps')
def test_a_run_in_a_file_is_only_that_of_an_optimizer_with_steps(tmp_path):
  plan, path = make_plan(), tmp_path / 'model.keras'
  model = tfdp.make_private(plain())
  steps = lambda one: one.optimizer.run.state[1].noise.row
  done = []
  for saved, taken in ((0, 2), (0, 3), (1, 2)):  # The last goes on with a step that it had.
    model.compile(tfdp.DPSGD(0.1, plan=plan), 'mse')
    model.optimizer.build(model.trainable_variables)
    steps(model).assign(saved)
    model.save(path)
    model = keras.models.load_model(path)
    steps(model).assign(taken)
    done.append(taken)
    assert [entry.steps for entry in model.ledger.entries] == done


@pytest.mark.pitfall(
    'A run with its own sampling or a fixed seed is resumed by an optimizer without them, and '
    'the statement does not mention them.',
    severity='critical', stops='both belong to the run and are restored with it')
def test_what_is_said_of_a_run_goes_on_with_it(tmp_path):
  def made(**arguments):
    model = tfdp.make_private(plain())
    model.compile(tfdp.DPAdam(0.1, plan=make_plan(), **arguments), loss='mse')
    model.optimizer.build(model.trainable_variables)
    return model, tf.train.Checkpoint(model=model, optimizer=model.optimizer)

  first, checkpoint = made(own_sampler='as they came')
  first.optimizer.run.state[1].noise.row.assign(2)
  path = checkpoint.write(str(tmp_path / 'c'))
  resumed, checkpoint = made()
  checkpoint.read(path).expect_partial()
  assert [entry.steps for entry in resumed.ledger.entries] == [2]
  for one in (resumed, trained(make_plan(), resumed, steps=1)):
    assert 'as they came' in one.ledger.statement()
    assert 'as they came' in one.optimizer.statement()
  seeded, _ = made(seed=1)
  seeded.optimizer.run.state[1].noise.row.assign(2)
  assert 'A FIXED SEED was used for the noise' in seeded.optimizer.statement()
  trained(make_plan(), seeded, steps=1)
  assert 'A FIXED SEED was used for the noise' in seeded.ledger.statement()
  assert 'A FIXED SEED was used for the noise' in seeded.optimizer.statement()


@pytest.mark.pitfall(
    'A checkpoint of TensorFlow holds the SECRET state of a private optimizer, and others may '
    'read it.',
    severity='high', stops='a warning when the checkpoint is written')
def test_checkpoints_with_an_optimizer_say_that_they_are_secret(tmp_path, caplog, monkeypatch):
  monkeypatch.setattr(runfolder, '_told', [])
  model = trained(make_plan(), steps=1)
  tf.train.Checkpoint(layers=model.layers).write(str(tmp_path / 'layers'))
  tf.saved_model.save(model, str(tmp_path / 'folder'))
  model.save_weights(str(tmp_path / 'm.weights.h5'))
  backup = tfdp.callbacks.BackupAndRestore(tmp_path / 'own')
  model.fit(model.optimizer.plan.batches((X, Y)), steps_per_epoch=1, verbose=0, callbacks=[backup])
  assert not [record for record in caplog.records if 'stores python values' in record.getMessage()
              or 'SECRET' in record.getMessage()]
  tf.train.Checkpoint(optimizer=model.optimizer).write(str(tmp_path / 'optimizer'))
  assert 'mode 600' in caplog.text and 'SECRET' in caplog.text
  modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.glob('optimizer.*')}
  assert len(modes) > 1 and set(modes.values()) == {0o600}
  saved = tf.train.Checkpoint(optimizer=model.optimizer).save(str(tmp_path / 'numbered'))
  assert all(path.stat().st_mode & 0o777 == 0o600 for path in tmp_path.glob('numbered-1.*')), saved


def test_a_model_without_weights_has_a_statement():
  model = tfdp.make_private(keras.Sequential([keras.layers.Dense(1)]))
  model.compile(tfdp.DPAdam(0.1, plan=make_plan()), loss='mse')
  assert model.ledger == tfdp.Ledger()
  assert model.optimizer.epsilon() == pytest.approx(make_plan().epsilon())
