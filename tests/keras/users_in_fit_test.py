# SPDX-License-Identifier: Apache-2.0
"""Private training whose records are users, from `plan.batches` to the weights."""

import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat

keras = compat.keras
N, USERS, STEPS, CLIP = 24, 6, 3, 0.7
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 3)).astype(np.float32)
Y = RNG.normal(size=(N, 1)).astype(np.float32)
IDS = RNG.permutation(np.repeat(np.arange(USERS), [1, 2, 3, 4, 6, 8]))


def make_plan(unit='user', population=USERS, **changes):
  return tfdp.PrivacyPlan(**dict(dict(
      population_size=population, batch_size=population // 2, steps=STEPS, l2_norm_clip=CLIP,
      noise_multiplier=0.3, target_delta=1e-3, unit=unit, seed=4), **changes))


def make_model(plan, optimizer=tfdp.DPSGD, **arguments):
  keras.utils.set_random_seed(1)
  model = tfdp.DPSequential([keras.Input([3]), keras.layers.Dense(1)])
  arguments.setdefault('learning_rate', 0.5)
  model.compile(optimizer(plan=plan, seed=2, **arguments), loss='mse', metrics=['mae'])
  return model


def gradient_of(weights, example):
  """Of (x w + b - y)^2, flat."""
  kernel, bias = weights
  error = X[example] @ kernel + bias - Y[example]
  return np.concatenate([2 * X[example] * error, 2 * error])


@pytest.mark.parametrize('record', ['mean', pytest.param('sum', marks=pytest.mark.slow)])
def test_a_step_is_that_of_users_one_by_one(record):
  plan = make_plan(noise_multiplier=0.0)
  with pytest.warns(UserWarning, match='NOT private'):
    model = make_model(plan)
  batches = plan.batches((X, Y), users=IDS, examples_per_user=8, record=record)
  weights = [v.copy() for v in model.get_weights()]
  losses = []
  for drawn in plan.index_batches():
    total = np.zeros(4)
    own_losses = []
    for user in drawn:
      own = np.flatnonzero(IDS == user)
      gradients = [gradient_of(weights, i) for i in own]
      gradient = np.sum(gradients, 0) / (len(own) if record == 'mean' else 1)
      total += gradient * min(1, CLIP / np.linalg.norm(gradient))
      squares = (X[own] @ weights[0] + weights[1] - Y[own])**2
      own_losses.append(np.mean(squares) if record == 'mean' else np.sum(squares))
    losses.append(np.mean(own_losses) if own_losses else np.nan)
    step = 0.5 * total / plan.batch_size
    weights = [weights[0] - step[:3, np.newaxis], weights[1] - step[3:]]
  history = model.fit(batches, steps_per_epoch=1, epochs=STEPS, verbose=0).history
  for value, expected in zip(model.get_weights(), weights):
    np.testing.assert_allclose(value, expected, rtol=2e-5, atol=1e-6)
  np.testing.assert_allclose(history['loss'], losses, rtol=1e-4)
  assert np.isfinite(history['mae']).all()


def test_a_strategy_of_one_replica_takes_the_same_steps():
  """Keras 3 builds metrics from the specs of a batch, in which users are an axis of their own."""
  plan, trained = make_plan(), []
  for strategy in (tf.distribute.get_strategy(), tf.distribute.MirroredStrategy(['CPU:0'])):
    with strategy.scope():
      model = make_model(plan)
    model.fit(plan.batches((X, Y), users=IDS, examples_per_user=8), verbose=0)
    trained.append(model.get_weights())
  for value, expected in zip(*trained):
    np.testing.assert_allclose(value, expected, rtol=1e-6)


def one_of_each(optimizer, **arguments):
  """Weights after a run on examples, and on users that have one each."""
  plans = [make_plan(unit, N) for unit in ('example', 'user')]
  for plan, users in zip(plans, ({}, dict(users=np.arange(N), examples_per_user=1))):
    model = make_model(plan, optimizer, **arguments)
    for batch in plan.batches((X, Y), pad_to=N, **users):
      model.train_on_batch(*batch)
    yield np.concatenate([np.ravel(v) for v in model.get_weights()])


@pytest.mark.thorough
def test_users_with_one_example_are_examples():
  examples, users = one_of_each(tfdp.DPAdam)
  np.testing.assert_allclose(users, examples, rtol=1e-6)


STP = dict(scale_epsilon=0.1)
DP2 = dict(sgd_steps=1, adaptive_steps=1, relative_adaptive_clip=0.5 / CLIP,
           relative_adaptive_learning_rate=0.2)


@pytest.mark.slow
@pytest.mark.parametrize('name, arguments', [
    ('DPSGD', {}), ('DPAdaGrad', {}), ('DPRMSprop', {}), ('DPYogi', {}), ('DPAdamBC', {}),
    ('DPAdamIME', {}), ('DPAdamJME', {}), ('DPAdamSTP', STP), ('DPAdaGradSTP', STP),
    ('DP2RMSprop', DP2), ('PASAN', {})])
def test_users_with_one_example_are_examples_for_every_rule(name, arguments):
  examples, users = one_of_each(getattr(tfdp, name), **arguments)
  np.testing.assert_allclose(users, examples, rtol=1e-6)


@pytest.mark.slow
def test_copies_of_an_example_do_not_matter_in_a_mean():
  plan = make_plan(population=N)
  trained = []
  for copies in (1, 3):
    model = make_model(plan)
    model.fit(plan.batches((np.repeat(X, copies, 0), np.repeat(Y, copies, 0)),
                           users=np.repeat(np.arange(N), copies), examples_per_user=4), verbose=0)
    trained.append(np.concatenate([np.ravel(v) for v in model.get_weights()]))
  np.testing.assert_allclose(*trained, rtol=1e-5)


@pytest.mark.thorough
def test_what_is_no_batch_of_users_is_refused():
  plan = make_plan()
  model = make_model(plan)
  examples = make_plan('example', N).batches((X, Y))
  with pytest.raises(tfdp.PrivacyError):
    model.fit(examples, verbose=0)
  with pytest.raises(tfdp.PrivacyError, match=r'\[users, examples of a user'):
    model.train_on_batch(X, Y[:, 0])
  own = make_model(plan, own_sampler='by hand')
  with pytest.raises(tfdp.PrivacyError, match='examples of a user'):
    own.train_on_batch(X[:, np.newaxis], Y[:, [0, 0]])
  own = make_model(plan, own_sampler='by hand')
  own.train_on_batch(X.reshape(8, 3, 3), Y.reshape(8, 3, 1))
  assert own.optimizer.steps_done == 1 and model.optimizer.steps_done == 0
  said = own.optimizer.statement()
  assert 'one user, with all their data' in said and 'at most 3 example(s) of each' in said
  assert 'at most 3 example(s) of each' in own.ledger.statement()
  read = tfdp.Ledger.from_json(own.ledger.to_json())
  assert read == own.ledger and read.entries[0].examples_per_user == 3
  assert 'example(s)' not in make_plan('example').statement()


def test_a_user_with_a_gradient_that_is_not_finite_is_no_record():
  with pytest.warns(UserWarning, match='NOT private'):
    model = make_model(make_plan(noise_multiplier=0.0), own_sampler='all of them')
  before, trained = model.get_weights(), []
  x, y = X.reshape(6, 4, 3).copy(), Y.reshape(6, 4, 1)
  weights = np.ones((6, 4), np.float32)
  x[5, 1] = np.inf
  for there in (1, 0):
    weights[5] = there
    model.set_weights(before)
    model.train_on_batch(x, y, weights)
    trained.append(np.concatenate([np.ravel(v) for v in model.get_weights()]))
  assert np.isfinite(trained).all() and np.ptp([trained[0], np.concatenate(
      [np.ravel(v) for v in before])]) > 0
  np.testing.assert_allclose(*trained, rtol=1e-6)
