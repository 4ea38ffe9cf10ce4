# SPDX-License-Identifier: Apache-2.0
"""A trial is the private step of the library, on public examples."""

import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive import mechanisms
from tfdp_adaptive import rules
from tfdp_adaptive.advice import trial as trial_lib

layers = compat.keras.layers
INDEPENDENT = mechanisms.IndependentGaussian()
RULES = {'sgd': rules.dp_sgd(), 'plain': rules.dp_sgd(), 'adam': rules.dp_adam(),
         'scaled': rules.scale_then_privatize(scale_epsilon=.1), 'kfc': rules.dp_kfc()}
RULES[trial_lib.ADAM] = RULES['adam']


def made(hidden=False, loss='mse'):
  compat.keras.utils.set_random_seed(0)
  model = compat.keras.Sequential([
      layers.Input([3]), *([layers.Dense(4, activation='tanh')] if hidden else []),
      layers.Dense(1)])
  rng = np.random.default_rng(0)
  x = rng.normal(size=[24, 3]).astype(np.float32)
  return trial_lib.Trial(model, loss, RULES), tf.constant(x), x[:, :1] - 2 * x[:, 1:2]


def course(rule='sgd', clip=1e6, rate=.1, steps=4, stddev=0.0, mechanism=INDEPENDENT, seed=1):
  return trial_lib.Course(rule, clip, np.full(steps, rate), stddev, mechanism, seed,
                          .5 if rule == 'sgd' else 0.0)


def trained(trial, x, y, one, rows=None, decay=.5, weights=None):
  rows = np.arange(24) if rows is None else rows
  state = trial.begin(one, trial.start if weights is None else weights)
  return trial.advance(one, state, x, y, rows, len(one.rates), decay)


def test_steps_are_those_of_clipped_gradients_written_in_numpy():
  trial, x, y = made()
  one = course(clip=.7)
  state = trained(trial, x, y, one)
  drawn = np.random.default_rng([1, 0]).choice(np.arange(24), [4, trial_lib.BATCH])
  w = np.concatenate([trial.start[0][:, 0], trial.start[1]]).astype(np.float64)
  wide, moment, average = np.append(x.numpy(), np.ones([24, 1]), 1), 0, w
  for i, rows in enumerate(drawn):
    gradients = 2 * (wide[rows] @ w - y[rows, 0])[:, None] * wide[rows]
    norms = np.linalg.norm(gradients, axis=1, keepdims=True)
    moment = .5 * moment + np.mean(gradients * np.minimum(1, .7 / norms), 0)
    w = w - .1 * moment
    average = w if i == 0 else .5 * average + .5 * w
  found = np.concatenate([np.ravel(part) for part in state.weights])
  np.testing.assert_allclose(found, w, atol=1e-5)
  np.testing.assert_allclose(
      np.concatenate([np.ravel(part) for part in state.average]), average, atol=1e-5)


@pytest.mark.parametrize('mechanism', [INDEPENDENT, mechanisms.BandedToeplitz(2, 200)])
def test_noise_is_that_of_the_plan(mechanism):
  """Without gradients the weights are a sum of noise rows, whose variance is known."""
  trial, x, y = made(loss=lambda y, outputs: 0 * (y - outputs))
  start = np.concatenate([np.ravel(part) for part in trial.start])
  ends = []
  for seed in range(40):
    one = course('plain', 2.0, rate=1.0, steps=200, stddev=.5, mechanism=mechanism, seed=seed)
    end = trained(trial, x, y, one).weights
    ends.append(np.concatenate([np.ravel(part) for part in end]) - start)
  total = np.concatenate(ends)  # In standard deviations: the clip norm is 2, times .5.
  rows = mechanism.materialize_inverse(200).sum(0)
  wanted = np.sum(np.square(rows))
  assert .7 < np.mean(np.square(total)) / wanted < 1.4
  if mechanism is not INDEPENDENT:  # Its sums have less noise than those of as many rows alone.
    assert np.mean(np.square(total)) < .7 * 200 * np.square(mechanism.row_norms(200)).mean()


@pytest.mark.parametrize('rule', list(RULES))
def test_training_in_two_parts_keeps_what_the_rule_keeps(rule):
  trial, x, y = made(hidden=True)
  one = course(rule, clip=1.0, rate=.05, steps=6, stddev=.01)
  state = trial.begin(one, trial.start)
  for until in (2, 6):
    state = trial.advance(one, state, x, y, np.arange(24), until, .5)
  assert state.step == 6 and np.isfinite(np.concatenate([np.ravel(w) for w in state.weights])).all()
  losses = [trial.judge(x, y, weights)[1].mean() for weights in (trial.start, state.weights)]
  assert losses[1] < losses[0]


def test_without_privacy_it_is_the_same_rule_without_clipping_and_noise():
  trial, x, y = made(hidden=True)
  ends = [trained(trial, x, y, course(rule, clip)).weights
          for rule, clip in (('adam', 1e6), (trial_lib.ADAM, .01))]
  for one, other in zip(*ends):
    np.testing.assert_allclose(one, other, atol=1e-5)


def test_same_seed_same_weights_and_other_seed_other_weights():
  trial, x, y = made(hidden=True)
  ends = [np.concatenate([np.ravel(part) for part in trained(
      trial, x, y, course(stddev=.1, clip=1.0, seed=seed)).weights]) for seed in (1, 1, 2)]
  np.testing.assert_array_equal(*ends[:2])
  assert np.abs(ends[0] - ends[2]).max() > 1e-3


def test_norms_are_those_of_single_gradients_and_the_model_is_restored():
  trial, x, y = made(hidden=True)
  model = trial.model
  with tf.GradientTape() as tape:
    losses = tf.square(model(x)[:, 0] - y[:, 0])
  jacobians = tape.jacobian(losses, model.trainable_variables)
  wanted = np.sqrt(sum(np.square(part).reshape(24, -1).sum(1) for part in jacobians))
  np.testing.assert_allclose(trial.norms(x, y, trial.start, 'sgd'), wanted, rtol=1e-4)
  before = model.get_weights()
  trained(trial, x, y, course())
  trial.restore()
  for one, other in zip(before, model.get_weights()):
    np.testing.assert_array_equal(one, other)


def test_a_trial_without_noise_is_the_library_without_noise():
  """The same batches through `fit` of a private model, at a noise multiplier of zero."""
  trial, x, y = made(hidden=True)
  one = course('adam', clip=1.0, rate=.05)
  drawn = np.random.default_rng([1, 0]).choice(np.arange(24), [4, trial_lib.BATCH])
  state = trained(trial, x, y, one)
  trial.restore()
  model = tfdp.make_private(trial.model)
  with pytest.warns(tfdp.Caution):
    model.compile(tfdp.DPAdam(.05, l2_norm_clip=1.0, noise_multiplier=0.0,
                              batch_size=trial_lib.BATCH), 'mse')
  for rows in drawn:
    model.train_on_batch(x.numpy()[rows], y[rows])
  for found, wanted in zip(state.weights, model.get_weights()):
    np.testing.assert_allclose(found, wanted, atol=1e-5)
