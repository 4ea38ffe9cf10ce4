# SPDX-License-Identifier: Apache-2.0
"""The card of a trained model: its statement, its weights in every file, no secret."""

import numpy as np
import pytest

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.cli import main
from tfdp_adaptive.privacy import statement
from tfdp_adaptive.privacy import weight_digests
from tfdp_adaptive.report import card_checks
from tfdp_adaptive.report import card_json

keras = compat.keras


@pytest.fixture(scope='module', name='trained')
def make_trained(tmp_path_factory):
  folder = tmp_path_factory.mktemp('run')
  rng = np.random.default_rng(0)
  x = rng.standard_normal((64, 3)).astype(np.float32)
  y = (x[:, :1] > 0).astype(np.float32)
  plan = tfdp.PrivacyPlan(batch_size=8, steps=6, l2_norm_clip=1.0, noise_multiplier=1.0,
                          target_delta=1e-3, population_size=64)
  model = tfdp.make_private(keras.Sequential([
      keras.layers.Input([3]), keras.layers.Dense(4, 'relu'), keras.layers.Dense(1)]))
  model.compile(tfdp.DPAdam(0.1, plan=plan), 'mse')
  model.fit(plan.batches((x, y)), steps_per_epoch=4, verbose=0,
            callbacks=[tfdp.callbacks.PrivacyReport(card=folder)])
  return model, folder


@pytest.mark.thorough
def test_a_model_its_optimizer_and_its_report_say_one_thing(trained):
  model, folder = trained
  card = model.privacy_card()
  assert card.done == 4 and card.epsilon == model.ledger.epsilon()
  assert card.planned_epsilon == model.optimizer.epsilon()
  assert statement.of(card) == model.optimizer.statement(4)
  assert card_json.read(folder / 'card.json') == card
  assert not [one for one in card_checks.check(card) if one.kind == card_checks.WRONG]


def test_a_run_that_stops_at_a_look_states_the_claim_of_the_look(tmp_path):
  plan = tfdp.PrivacyPlan(batch_size=8, steps=9, l2_norm_clip=1.0, noise_multiplier=1.0,
                          target_delta=1e-3, population_size=64)
  looks = tfdp.privacy.Looks((4, 6, 9), total=(9,))

  def fit(stop):
    model = tfdp.make_private(keras.Sequential([keras.layers.Input([3]), keras.layers.Dense(1)]))
    model.compile(tfdp.DPSGD(0.1, plan=plan), 'mse')
    stopping = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: setattr(model, 'stop_training', epoch + 1 == stop))
    return model.fit(
        plan.batches((np.ones([64, 3]), np.ones(64))), steps_per_epoch=2, epochs=4, verbose=0,
        callbacks=[stopping, tfdp.callbacks.PrivacyReport(card=tmp_path, looks=looks)])

  shown = fit(3).history['epsilon']  # After 2, 4 and 6 steps.
  np.testing.assert_array_equal(shown, [looks.epsilon(plan, step) for step in (4, 4, 6)])
  assert shown[-1] > plan.epsilon(6)
  card = card_json.read(tmp_path / 'card.json')
  assert card.epsilon == looks.epsilon(plan, 6) and '3 looks were fixed' in statement.of(card)
  with pytest.raises(ValueError, match='after the looks that were fixed beforehand'):
    fit(1)
  looks = tfdp.privacy.Looks((4, 10))
  with pytest.raises(ValueError, match='at most those of the plan'):  # Before the first step.
    fit(2)


@pytest.mark.parametrize('seed', [None, 3])
def test_a_fixed_seed_of_the_noise_is_said(seed):
  plan = tfdp.PrivacyPlan(batch_size=8, steps=6, l2_norm_clip=1.0, noise_multiplier=1.0,
                          target_delta=1e-3, population_size=64)
  said = 'A FIXED SEED was used for the noise' in tfdp.DPSGD(0.1, plan=plan, seed=seed).statement()
  assert said == (seed is not None)


def test_words_and_an_audit_are_on_the_card(trained):
  model, _ = trained

  class Report:
    name, violated = 'mine', False

  card = model.privacy_card(words={'the data': 'made up'}, audits=[Report()])
  assert [own.text for own in card.words] == ['made up'] and not card.audits[0].refuted


@pytest.mark.thorough
@pytest.mark.parametrize('name', ['model.keras', 'model.weights.h5', 'weights.npz'])
def test_verify_knows_the_file_of_the_model_and_no_other(trained, tmp_path, capsys, name):
  model, folder = trained
  path = tmp_path / name
  if name == 'weights.npz':
    np.savez(path, *model.get_weights())
  else:
    (model.save if name == 'model.keras' else model.save_weights)(path)
  assert main.main(['verify', str(folder / 'card.json'), '--weights', str(path)]) == 0
  assert 'are those of the card' in capsys.readouterr().out
  other = keras.Sequential([
      keras.layers.Input([3]), keras.layers.Dense(4, 'relu'), keras.layers.Dense(1)])
  other.save(tmp_path / 'other.keras')
  assert main.main(['verify', str(folder / 'card.json'), '--weights',
                    str(tmp_path / 'other.keras')]) == 3


@pytest.mark.skipif(not compat.KERAS_3, reason='Keras 2 has no LoRA.')
def test_verify_knows_the_file_of_a_model_with_lora(tmp_path, capsys):
  x = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)
  base = keras.Sequential([keras.layers.Input([3]), keras.layers.Dense(4, 'relu'),
                           keras.layers.Dense(1)])
  base.layers[0].enable_lora(2)
  plan = tfdp.PrivacyPlan(batch_size=4, steps=2, l2_norm_clip=1.0, noise_multiplier=1.0,
                          target_delta=1e-2, population_size=8)
  model = tfdp.make_private(base)
  model.compile(tfdp.DPSGD(0.1, plan=plan), 'mse')
  model.fit(plan.batches((x, x[:, :1])), verbose=0)
  card, weights = tmp_path / 'card.json', tmp_path / 'model.weights.h5'
  card.write_text(card_json.to_json(model.privacy_card()), encoding='utf-8')
  model.save_weights(weights)  # Keras writes the kernel with LoRA added to it.
  assert main.main(['verify', str(card), '--weights', str(weights)]) == 0
  assert 'The 4 arrays of weights' in capsys.readouterr().out
  base.layers[0].lora_kernel_b.assign_add(np.ones((2, 4)))
  model.save_weights(weights)
  assert main.main(['verify', str(card), '--weights', str(weights)]) == 3


def test_a_saved_model_gives_a_card_of_its_ledger(trained, tmp_path, capsys):
  model, _ = trained
  model.save(tmp_path / 'model.keras')
  assert main.main(['card', str(tmp_path / 'model.keras'), '--json']) == 0
  card = card_json.from_json(capsys.readouterr().out)
  assert card.epsilon == model.ledger.epsilon() and card.weights == model.privacy_card().weights


def test_a_card_is_made_of_ledger_and_weights_alone(trained):
  """No key, no state of the noise and nothing of the data can be in it."""
  model, _ = trained
  card = model.privacy_card()
  assert card == tfdp.Ledger(model.ledger.entries).card(
      weights=weight_digests.of(model.get_weights()), facts=card.facts)
