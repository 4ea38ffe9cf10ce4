# SPDX-License-Identifier: Apache-2.0
"""Averages of gradients ahead: exact where gradients are linear, with the exact noise."""

import loop
import numpy as np
import pytest
import tensorflow as tf

from tfdp_adaptive import contract
from tfdp_adaptive import mechanisms
from tfdp_adaptive import privatizer
from tfdp_adaptive import rules

KAPPA = 0.7
GAMMA = (1 - KAPPA) / KAPPA


def descend(rule, gradient, steps=12, rate=0.1, mechanism=None):
  """[steps + 1, 5] points of the model and the states, without noise, in float64."""
  rule = privatizer.bound(rule, mechanism)
  state, y = rule.init(loop.SPECS), np.linspace(-1, 2, loop.SIZE)
  path, states = [y], []
  for _ in range(steps):
    release = contract.Release(loop.split(gradient(y)), tf.constant(0.04, tf.float64))
    direction, state = rule.update(state, (release,))
    y = y - rate * loop.join(direction)
    path.append(y)
    states.append(state)
  return np.array(path), states


def quadratic():
  a = np.random.default_rng(0).normal(size=(7, loop.SIZE))
  return lambda x: a.T @ (a @ x - 1) / 7


@pytest.mark.parametrize('rule', [
    rules.dp_sgd(), rules.dp_sgd(momentum=0.8), rules.dp_adam(0.8, 0.9, 1e-2)],
                         ids=['sgd', 'momentum', 'adam'])
def test_of_a_quadratic_it_is_the_gradient_where_the_weights_are(rule):
  """So the iterates x are those of the rule itself; the model holds x + gamma d."""
  gradient = quadratic()
  plain, _ = descend(rule, gradient)
  ahead, states = descend(rules.denoised(rule, KAPPA), gradient)
  x = plain[1:] + GAMMA * np.diff(plain, axis=0)
  np.testing.assert_allclose(ahead[1:], x, rtol=1e-7)
  for where, state in zip(plain, states):
    np.testing.assert_allclose(loop.join(state.estimate), gradient(where), rtol=1e-6, atol=1e-9)


def test_the_printed_gain_and_weight_do_not_fit_each_other():
  """New gradients weighted by 1 - kappa with the point of gain kappa: the identity fails."""
  gradient, x = quadratic(), np.linspace(-1, 2, loop.SIZE)
  before, estimate = x, gradient(x)
  for _ in range(12):
    before, x = x, x - 0.1 * estimate
    estimate = KAPPA * estimate + (1 - KAPPA) * gradient(x + GAMMA * (x - before))
  assert np.linalg.norm(estimate - gradient(x)) > 0.01 * np.linalg.norm(gradient(x))


def test_kappa_of_one_is_the_rule():
  gradient = lambda x: np.tanh(quadratic()(x))
  for rule in (rules.dp_sgd(0.5), rules.dp_adam_bc(epsilon=0.05)):
    np.testing.assert_allclose(descend(rules.denoised(rule, 1.0), gradient)[0],
                               descend(rule, gradient)[0], rtol=1e-6)


@pytest.mark.parametrize('mechanism', [
    mechanisms.IndependentGaussian(), mechanisms.SquareRoot(60), mechanisms.BLT(2, 60)], ids=repr)
def test_the_variance_that_the_rule_is_given(mechanism):
  """Of explicit rows of C^-1, the first of which enters whole."""
  probe = contract.Rule(
      lambda specs: (), contract.isotropic,
      lambda state, releases, public=(): (releases[0].mean, releases[0].variance), name='probe')
  probe = probe._replace(init=lambda specs: tf.zeros([]))
  rule = privatizer.bound(rules.denoised(probe, KAPPA), mechanism)
  run = mechanism.rounded('float32')
  inverse = run.materialize_inverse(60)
  u, state = inverse[0], rule.init(tf.TensorSpec([1]))
  step = tf.function(lambda state, variance: rule.update(
      state, (contract.Release(tf.zeros([1]), variance),))[1])
  for t, row in enumerate(inverse):
    u = row if t == 0 else (1 - KAPPA) * u + KAPPA * row
    state = step(state, tf.constant(np.sum(row**2), tf.float32))
    assert float(state.rule) == pytest.approx(np.sum(u**2), rel=1e-4)
  if isinstance(mechanism, mechanisms.IndependentGaussian):
    assert float(state.rule) == pytest.approx(KAPPA / (2 - KAPPA), rel=1e-4)  # .538


@pytest.mark.parametrize('make, match', [
    (lambda: rules.denoised(rules.dp_sgd(), 0.0), '`kappa`'),
    (lambda: rules.denoised(rules.dp_sgd(), 1.1), '`kappa`'),
    (lambda: rules.denoised(rules.dp_adam_ime()), '`rule`'),
    (lambda: rules.denoised(rules.pasan(radius=1.0)), '`rule`'),
    (lambda: rules.denoised(rules.adadps()), '`rule`'),
    (lambda: rules.denoised(rules.dp2_rmsprop(2, 1)), '`rule`'),
    (lambda: rules.denoised(rules.low_pass(rules.dp_sgd())), '`rule`'),
    (lambda: rules.denoised(rules.dp_sgd()).init(loop.SPECS), 'not known yet')])
def test_refusals(make, match):
  with pytest.raises(ValueError, match=match):
    make()
