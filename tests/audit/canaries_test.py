# SPDX-License-Identifier: Apache-2.0
"""Bounds are valid where the truth is known, and find what is broken."""

import math

import numpy as np
import pytest
from scipy import stats
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import audit


def logit(p):
  return math.log(p / (1 - p))


def test_public_name():
  assert tfdp.audit is audit


# --- Bounds.


@pytest.mark.parametrize('correct, guesses', [(90, 100), (100, 100), (61, 100), (400, 500)])
def test_one_run_without_delta_is_randomized_response(correct, guesses):
  # Pure DP: guesses are right with probability e^eps / (1 + e^eps) at most.
  # The lower end is one-sided 95%.
  low = stats.binomtest(correct, guesses).proportion_ci(0.90, 'exact').low
  got = audit.one_run_epsilon(correct, guesses, 1000, 0.0, 0.95)
  assert got == pytest.approx(logit(low), abs=1e-6)


def test_one_run_with_delta_by_its_definition():
  def p_value(correct, guesses, canaries, epsilon, delta):
    q = math.exp(epsilon) / (1 + math.exp(epsilon))
    pmf = [stats.binom.pmf(k, guesses, q) for k in range(guesses + 1)]
    slope = max(sum(pmf[correct - i:correct]) / i for i in range(1, correct + 1))
    return sum(pmf[correct:]) + 2 * canaries * delta * slope

  arguments = 70, 80, 200
  for delta in (1e-6, 1e-3):
    epsilon = audit.one_run_epsilon(*arguments, delta, 0.95)
    assert p_value(*arguments, epsilon, delta) <= 0.05
    assert p_value(*arguments, epsilon + 1e-4, delta) > 0.05
  assert audit.one_run_epsilon(*arguments, 1e-3) < audit.one_run_epsilon(*arguments, 0.0)


def test_one_run_bound_is_valid_and_not_vacuous_for_randomized_response():
  rng = np.random.default_rng(2)
  truth, guesses = 1.0, 400
  bounds = np.array([
      audit.one_run_epsilon(int(rng.binomial(guesses, 1 / (1 + math.exp(-truth)))), guesses,
                            guesses) for _ in range(300)])
  assert np.mean(bounds > truth) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 300)
  assert np.mean(bounds > truth) > 0.005 and np.median(bounds) > 0.7


@pytest.mark.parametrize('correct', [0, 40, 50])
def test_chance_proves_nothing(correct):
  assert audit.one_run_epsilon(correct, 100, 100) == 0.0


# --- Canaries and reports.


def test_canaries_get_wrong_labels_and_a_coin():
  x, y = np.arange(100.0)[:, None], np.arange(100)
  indices = np.arange(20, 60)
  canaries = audit.insert((x, y), indices, seed=4)
  found_x, found_y, weight = canaries.data
  rest = np.setdiff1d(np.arange(100), indices)
  np.testing.assert_array_equal(found_x, x)
  np.testing.assert_array_equal(found_y[rest], y[rest])
  assert not np.any(found_y[indices] == y[indices])
  np.testing.assert_array_equal(np.sort(found_y), y)
  np.testing.assert_array_equal(weight[indices], canaries.included)
  assert weight[rest].all() and 8 < canaries.included.sum() < 32
  np.testing.assert_array_equal(y, np.arange(100))  # The caller's labels are left alone.
  coins = [tuple(audit.insert((x, y), indices).included) for _ in range(5)]
  assert len(set(coins)) == 5


@pytest.mark.parametrize('indices, message', [
    ([1], 'two or more'), ([1, 1], 'two or more different'),
    ([0, 100], 'below the number of records'), ([-1, 3], 'at least 0 and below')])
def test_insert_refuses(indices, message):
  with pytest.raises(ValueError, match=message):
    audit.insert((np.zeros((100, 1)), np.zeros(100)), indices)


def test_report_of_perfect_scores_and_of_none():
  included = np.arange(1000) % 2 == 0
  perfect = audit.report(included.astype(float), included, claimed=1.0, delta=1e-5)
  assert perfect.violated and perfect.auc == 1.0 and perfect.correct == perfect.guesses
  assert perfect.epsilon_lower > 4 and 'REFUTED' in str(perfect)
  rng = np.random.default_rng(5)
  chance = audit.report(rng.standard_normal(1000), included, claimed=1.0, delta=1e-5)
  assert not chance.violated and abs(chance.auc - 0.5) < 0.1 and 'cannot prove' in str(chance)


def test_many_attempts_share_the_confidence():
  rng = np.random.default_rng(6)
  bounds = []
  for _ in range(300):  # A mechanism of epsilon = 1: each score is the coin, or its opposite.
    included = rng.random(200) < 0.5
    truthful = rng.random(200) < 1 / (1 + math.exp(-1))
    scores = np.where(truthful, included, ~included) + 1e-6 * rng.random(200)
    bounds.append(audit.report(scores, included, 1.0, 0.0).epsilon_lower)
  assert np.mean(np.array(bounds) > 1.0) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 300)
  assert np.mean(bounds) > 0.3


@pytest.mark.parametrize('scores', [[1.0, np.nan], [1.0], [[1.0, 2.0]]])
def test_report_refuses(scores):
  with pytest.raises(ValueError, match='`scores` must be finite, one per canary'):
    audit.report(scores, [True, False], 1.0, 1e-5)


def test_confidence_close_to_one():
  included = np.arange(1000) % 2 == 0
  bounds = [audit.report(included.astype(float), included, 1.0, 0.0, confidence).epsilon_lower
            for confidence in (.95, .999, audit.LARGEST_CONFIDENCE)]
  assert bounds[0] > bounds[1] > bounds[2] > 3
  closer = 1 - 1e-16
  with pytest.raises(ValueError, match='at most 1 - 1e-9'):
    audit.report([0.0, 1.0], [False, True], 1.0, 1e-5, closer)


@pytest.mark.parametrize('loss', ['sparse_categorical_crossentropy', 'object'])
def test_loss_scores_are_minus_the_losses_of_the_records(loss):
  if loss == 'object':
    loss = tf.keras.losses.SparseCategoricalCrossentropy()
  model = tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Softmax()])
  model.compile('sgd', loss)
  x, y = np.array([[0.0, 1.0], [2.0, 0.0], [0.0, 0.0]], np.float32), np.array([1, 1, 0])
  expected = np.log([1 / (1 + math.exp(-1)), 1 / (1 + math.exp(2)), 0.5])
  np.testing.assert_allclose(audit.loss_scores(model, x, y), expected, rtol=1e-5)
  np.testing.assert_allclose(audit.loss_scores(model, x, y, expected), 0, atol=1e-5)


# --- One call.


def one_call(noise_multiplier):
  rng = np.random.default_rng(0)
  n, d = 240, 3000
  x = rng.standard_normal((n, d)).astype(np.float32)
  y = rng.integers(0, 2, n)
  plan = tfdp.PrivacyPlan(population_size=n, batch_size=120, steps=40, l2_norm_clip=1.0,
                          noise_multiplier=noise_multiplier, target_delta=1e-5)

  def build():
    model = tfdp.DPSequential([
        tf.keras.Input([d]), tf.keras.layers.Dense(2, kernel_initializer='zeros')])
    model.compile(tfdp.DPSGD(learning_rate=2.0, plan=plan),
                  tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model

  return plan, audit.run(build, (x, y), plan, seed=1)


@pytest.mark.thorough
def test_one_call_audit_finds_what_a_model_with_little_noise_remembers():
  plan, report = one_call(0.3)
  assert report.canaries == 240 and report.included.any() and not report.included.all()
  assert report.claimed == plan.epsilon() and not report.violated
  assert report.auc > 0.95 and report.epsilon_lower > 1.5
  # The same run would refute a plan that claims the epsilon of twenty times the noise.
  claimed = tfdp.PrivacyPlan(
      population_size=240, batch_size=120, steps=40, l2_norm_clip=1.0, noise_multiplier=20.0,
      target_delta=1e-5).epsilon()
  assert audit.report(report.scores, report.included, claimed, 1e-5).violated


@pytest.mark.thorough
def test_one_call_audit_of_much_noise_finds_little():
  _, report = one_call(20.0)
  assert not report.violated and report.epsilon_lower < 0.5


def test_user_level_plans_are_not_audited_by_examples():
  plan = tfdp.PrivacyPlan(population_size=10, batch_size=2, steps=1, l2_norm_clip=1.0,
                          noise_multiplier=1.0, target_delta=1e-5, unit='user')
  with pytest.raises(ValueError, match='`plan` must be example-level'):
    audit.run(None, (np.zeros((10, 1)), np.zeros(10)), plan)


def test_what_can_be_proven_is_said_before_training(caplog):
  from tfdp_adaptive.audit import canaries  # pylint: disable=g-import-not-at-top
  assert 'prove NOTHING' in canaries.foresight(64, 8.0, 1e-5)
  assert 'would prove epsilon' in canaries.foresight(1000, 1.0, 1e-5)
  included = np.arange(64) % 2 == 0
  most = audit.report(included * 1.0, included, 8.0, 1e-5).provable
  assert f'{most:.3g}' in canaries.foresight(64, 8.0, 1e-5)

  def build():
    assert 'prove' in caplog.text  # Before the model is even made.
    raise KeyboardInterrupt

  plan = tfdp.PrivacyPlan(population_size=64, batch_size=8, steps=4, l2_norm_clip=1.0,
                          noise_multiplier=1.0, target_delta=1e-5)
  with pytest.raises(KeyboardInterrupt):
    audit.run(build, (np.zeros([64, 2]), np.arange(64) % 2), plan)
