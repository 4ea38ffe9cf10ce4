# SPDX-License-Identifier: Apache-2.0
"""simulate draws the cohorts of the plan, and leaves nothing behind."""

import numpy as np
import pytest
import regression
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import rules
from tfdp_adaptive.federated import rounds


@pytest.mark.thorough(rows=['tff'])
def test_simulate_is_the_process_on_the_cohorts_of_the_plan(engine):
  plan = regression.make_plan(steps=4)
  process = regression.build(rules.dp_adam(), plan, engine)
  users = tfdp.federated.Users(regression.make_users(), batch_size=4)
  evaluate = tfdp.federated.evaluator(
      regression.model_fn, users.all_examples(), loss=tf.keras.losses.MeanSquaredError())
  result = tfdp.federated.simulate(
      process, users, rounds=3, evaluate=evaluate, rounds_per_evaluation=2, progress=False)
  state = process.initialize()
  losses = []
  for indices, _ in zip(plan.index_batches(6), range(3)):
    state, _ = process.next(
        state, [users.create_tf_dataset_for_client(f'user{i}') for i in indices])
    weights = process.get_model_weights(state)
    together = [np.concatenate([u[k] for u in regression.make_users().values()]) for k in 'xy']
    kernel, bias = weights.trainable
    losses.append(np.mean((together[0] @ kernel + bias - together[1])**2))
  np.testing.assert_allclose(regression.flat(result.weights), regression.flat(weights), rtol=1e-5)
  assert [row.get('loss') for row in result.history] == [
      None, pytest.approx(losses[1], rel=1e-4), pytest.approx(losses[2], rel=1e-4)]
  assert result.rounds == 3 and 'after 3 of the 4 planned steps' in result.statement
  assert 'user' in result.statement and 'Secure aggregation is not simulated' in result.statement
  # Weights, both moments of Adam, and a little more.
  assert 3 * 4 * 4 < result.speed['state_bytes'] < 3 * 4 * 4 + 100
  assert result.speed['clients_per_second'] > 0


@pytest.mark.pitfall(
    'A user takes part more often, or sooner, than was accounted for.',
    severity='critical', stops='the plan draws the cohorts')
@pytest.mark.parametrize('sampling, batch_size, participation', [
    (tfdp.sampling.FixedOrder(), 3, (2, 3)), (tfdp.sampling.CyclicPoisson(cycle=2), 2, None)])
def test_nobody_takes_part_more_often_than_was_accounted_for(
    sampling, batch_size, participation, monkeypatch):
  """What the plan says of separation and participations is what the cohorts keep to."""
  mechanism = tfdp.mechanisms.BandedToeplitz(bands=2, steps=5)
  plan = regression.make_plan(
      steps=5, batch_size=batch_size, mechanism=mechanism, sampling=sampling)
  process = regression.build(rules.dp_sgd(), plan)
  cohorts = []
  original = rounds.run

  def spy(process, workers, state, cohort, *args, **kwargs):
    cohorts.append(cohort)
    return original(process, workers, state, cohort, *args, **kwargs)

  monkeypatch.setattr(rounds, 'run', spy)
  users = tfdp.federated.Users(regression.make_users(), batch_size=4)
  tfdp.federated.simulate(process, users, progress=False)
  assert len(cohorts) == 5 and any(cohorts)
  for user in users.client_ids:
    steps = [step for step, cohort in enumerate(cohorts) if user in cohort]
    assert len({step % 2 for step in steps}) <= 1
    if participation:
      assert plan.participation() == participation
      assert 1 <= len(steps) <= participation[1] and min(np.diff(steps)) >= participation[0]


def test_a_round_without_answers_is_noise_and_a_warning():
  class OnlyOnce:
    client_ids = [f'user{i}' for i in range(6)]
    element_type_structure = regression.SPEC
    gone = ()

    def create_tf_dataset_for_client(self, client_id):
      if client_id in self.gone:
        raise OSError('gone')
      return users.create_tf_dataset_for_client(client_id)

  users = tfdp.federated.Users(regression.make_users(), batch_size=4)
  data = OnlyOnce()
  process = regression.build(rules.dp_sgd(), regression.make_plan(
      steps=2, sampling=tfdp.sampling.FixedOrder()))
  seen = []

  def evaluate(weights):
    seen.append(regression.flat(weights))
    data.gone = data.client_ids
    return {}

  with pytest.warns(UserWarning, match='No client of round 2 could be trained'):
    result = tfdp.federated.simulate(process, data, progress=False,
                                     evaluate=evaluate, rounds_per_evaluation=1)
  noise = 0.5 * 0.2 * regression.noise_rows(2)[1] / 3
  np.testing.assert_allclose(seen[1] - seen[0], -0.5 * noise, rtol=1e-4)
  assert sum(result.failed.values()) == 3


@pytest.mark.parametrize('name', ['round', 'private/loss', 'not_private/seconds'])
def test_what_evaluate_may_not_call_its_numbers(name):
  process = regression.build(rules.dp_sgd(), regression.make_plan(steps=1))
  with pytest.raises(ValueError, match='say what is private'):
    tfdp.federated.simulate(
        process, tfdp.federated.Users(regression.make_users(), batch_size=4), progress=False,
        evaluate=lambda weights: {name: 0.0})


def test_refusals():
  plan = regression.make_plan(steps=4)
  process = regression.build(rules.dp_sgd(), plan)
  users = tfdp.federated.Users(regression.make_users(), batch_size=4)
  with pytest.raises(ValueError, match="between 1 and the plan's 4"):
    tfdp.federated.simulate(process, users, rounds=5)
  with pytest.raises(ValueError, match='come from one plan'):
    tfdp.federated.simulate(process, users, plan=regression.make_plan(steps=5))
  with pytest.raises(ValueError, match='population_size=6'):
    tfdp.federated.simulate(
        process, tfdp.federated.Users(regression.make_users(5), batch_size=4))


@pytest.mark.thorough
@pytest.mark.pitfall(
    'Weights of a federated run are trained further in Keras, or the other way round, and '
    'only one run is stated.',
    severity='critical', stops='`assign_weights_to` and models that are passed on keep the ledger')
def test_the_ledger_goes_from_users_to_keras_and_back(tmp_path):
  plan, model, path = regression.make_plan(steps=2), regression.model_fn(), tmp_path / 'm.keras'

  def simulated(model_fn):
    process = tfdp.federated.build_private_fed_avg(
        model_fn, server_rule=rules.dp_sgd(), plan=plan, server_learning_rate=0.1,
        loss=tf.keras.losses.MeanSquaredError(), client_optimizer_fn=regression.client_optimizer)
    users = tfdp.federated.Users(regression.make_users(), batch_size=4)
    return tfdp.federated.simulate(process, users, progress=False)

  simulated(regression.model_fn).weights.assign_weights_to(model)
  assert tfdp.make_private(model).ledger.epsilon() == pytest.approx(plan.epsilon())
  model.save(path)
  again = simulated(lambda: tf.keras.models.load_model(path))
  assert again.card().epsilon == pytest.approx((plan + plan).epsilon())
  assert 'of all 2 run(s) together' in again.statement


def test_models_that_get_weights_between_the_rounds_get_their_ledger():
  plan, model, spent = regression.make_plan(steps=2), regression.model_fn(), []
  process, data = regression.build(rules.dp_sgd(), plan), regression.make_users()
  ledger = lambda: tfdp.make_private(model).ledger

  def evaluate(weights):
    weights.assign_weights_to(model)
    spent.append([entry.steps for entry in ledger().entries])
    return {}

  users = tfdp.federated.Users(data, batch_size=4)
  tfdp.federated.simulate(
      process, users, evaluate=evaluate, rounds_per_evaluation=1, progress=False)
  assert spent == [[1], [2]] and ledger().epsilon() == plan.epsilon()
  state, _ = process.next(process.initialize(), [
      users.create_tf_dataset_for_client(client) for client in ('user0', 'user2')])
  process.get_model_weights(state).assign_weights_to(model)
  entry, = ledger().entries
  assert entry.steps == 1 and entry.seeded and '`next`' in entry.own_sampler


def test_a_simulation_whose_epsilon_overflows_returns_its_result():
  plan = regression.make_plan(steps=1, noise_multiplier=1e-4)
  result = tfdp.federated.simulate(
      regression.build(rules.dp_sgd(), plan), tfdp.federated.Users(
          regression.make_users(), batch_size=4), progress=False)
  assert result.rounds == 1 and result.weights.ledger.epsilon() == float('inf')
  assert result.card().epsilon is None and 'noise is too small' in result.statement
  assert 'FIXED SEED was used for the noise' in result.statement
