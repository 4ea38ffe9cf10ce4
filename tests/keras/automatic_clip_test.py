# SPDX-License-Identifier: Apache-2.0
"""Without a clip norm it follows the examples, at any noise, as part of the same cost."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive import contract

keras = compat.keras
PLAN = dict(population_size=400, batch_size=40, steps=60, target_delta=1e-4)


def examples(unit=1.0):
  rng = np.random.default_rng(0)
  x = rng.normal(size=[400, 3])
  return (unit * x).astype(np.float32), (x.sum(1) > 0).astype(np.float32)[:, None]


def trained(optimizer, data, steps=60, **more):
  keras.utils.set_random_seed(0)
  model = tfdp.DPSequential([
      keras.layers.Input([3]), keras.layers.Dense(1, activation='sigmoid')])
  model.compile(optimizer, 'binary_crossentropy', **more)
  history = model.fit(optimizer.plan.batches(data), epochs=1, steps_per_epoch=steps, verbose=0)
  return model, history.history


@pytest.mark.thorough(but=['DPAdam-1000.0', 'DPSGD-0.001'])
@pytest.mark.parametrize('unit', [1e-3, 1e3])
@pytest.mark.parametrize('make', [tfdp.DPSGD, tfdp.DPAdam])
def test_the_clip_norm_finds_gradients_of_any_size(make, unit):
  plan = tfdp.PrivacyPlan(noise_multiplier=.5, **PLAN)
  optimizer = make(.1, plan=plan, seed=3)
  x, y = examples(unit)
  model, history = trained(optimizer, (x, y))
  norm = float(tf.exp(optimizer.rule_state.log_factor))
  p = model.predict(x, verbose=0)
  norms = np.abs(p - y)[:, 0] * np.sqrt(1 + np.square(x).sum(1))
  assert .6 < np.mean(norms <= norm) <= 1
  assert 0 <= history['clipped'][0] <= 1


def test_directions_of_dp_sgd_have_the_unit_of_the_clip_norm():
  """With gradients a thousand times larger, the same draws give the same weights."""
  rule = tfdp.clipping.Automatic().rule(tfdp.rules.dp_sgd(.5), 40.0, .5)
  ends = []
  for unit in (1.0, 1000.0):
    state = rule.init((tf.TensorSpec([2], tf.float32),))
    state = state._replace(log_factor=tf.math.log(unit))
    for mean in ([1.0, -2.0], [.5, .25]):
      clip = float(tf.exp(state.log_factor))
      release = contract.Release(
          (tf.constant(mean) * clip,), tf.constant(clip**2), side_mean=tf.constant([.3]),
          side_variance=tf.constant(.01))
      direction, state = rule.update(state, (release,), ())
    ends.append((direction[0].numpy(), float(state.log_factor) - np.log(unit)))
  np.testing.assert_allclose(ends[0][0], ends[1][0], rtol=1e-5)
  np.testing.assert_allclose(ends[0][0], .5 * np.array([1.0, -2.0]) + [.5, .25], rtol=1e-5)
  # log C moved by the gain times (quantile - fraction), twice: the fraction is .3 + 1/2.
  assert ends[0][1] == pytest.approx(2 * 1.0 * (.9 - .8), abs=1e-4)
  assert ends[1][1] == pytest.approx(ends[0][1], abs=1e-4)


@pytest.mark.thorough(but=['0.3'])
@pytest.mark.parametrize('sigma', [.3, 8.0, 300.0])
def test_it_works_at_every_noise_and_keeps_the_cost(sigma):
  """The count and the sum together have the sensitivity of the sum alone at sigma."""
  rule = tfdp.clipping.Automatic().rule(tfdp.rules.dp_adam(), 40.0, sigma)
  factor, std = rule.asks[0].side_query.noise(sigma, 40.0)
  assert (factor * sigma)**-2 + (2 * std)**-2 == pytest.approx(sigma**-2, rel=1e-6)
  assert 1 < factor < 1.04
  plan = tfdp.PrivacyPlan(noise_multiplier=sigma, **PLAN)
  with warnings.catch_warnings():
    warnings.simplefilter('ignore', tfdp.Caution)
    model, history = trained(tfdp.DPAdam(.05, plan=plan), examples(), 5)
  assert np.isfinite(history['loss'][0])
  assert model.ledger.epsilon() == pytest.approx(plan.epsilon(5))
  assert 'quantile_clip(dp_adam)' in model.ledger.statement()


def test_what_is_given_stays_what_it_is():
  plan = tfdp.PrivacyPlan(noise_multiplier=1.0, l2_norm_clip=.5, **PLAN)
  bare = tfdp.PrivacyPlan(noise_multiplier=1.0, **PLAN)
  hard = tfdp.clipping.Hard()
  assert tfdp.DPSGD(.1, plan=plan).clipping == hard
  assert tfdp.DPSGD(.1, plan=bare, l2_norm_clip=2.0).clipping == hard
  assert tfdp.DPSGD(.1, plan=bare).clipping == tfdp.clipping.Automatic()
  slack = tfdp.DPSGD(.1, plan=bare, clipping=tfdp.clipping.Slack())
  assert (slack.clipping, slack.l2_norm_clip) == (tfdp.clipping.Slack(), 1.0)
  with pytest.raises(ValueError, match='`l2_norm_clip` must be given'):
    tfdp.DPSGD(.1, plan=bare, clipping=hard)
  with pytest.raises(ValueError, match='`l2_norm_clip` must be given for the rule dp_kfc'):
    tfdp.DPKFC(.1, plan=bare)
  assert 'not fixed' in str(bare) and 'clip norm not fixed' in bare.statement()
  assert tfdp.PrivacyPlan.from_json(bare.to_json()) == bare


def test_it_is_saved_with_the_optimizer():
  one = tfdp.DPAdam(.1, plan=tfdp.PrivacyPlan(noise_multiplier=1.0, **PLAN),
                    clipping=tfdp.clipping.Automatic(.8))
  again = tfdp.DPAdam.from_config(one.get_config())
  assert again.clipping == one.clipping and again.l2_norm_clip == 1.0
  assert again.plan.l2_norm_clip is None


@pytest.mark.parametrize('clipping', [
    tfdp.clipping.AutoS(), tfdp.clipping.AutoV(), tfdp.clipping.Quantile(.5)])
def test_biased_clipping_is_warned_of(clipping):
  plan = tfdp.PrivacyPlan(noise_multiplier=1.0, l2_norm_clip=1.0, **PLAN)
  with pytest.warns(tfdp.Caution, match='rare examples little weight'):
    tfdp.DPSGD(.1, plan=plan, clipping=clipping)
  with warnings.catch_warnings():
    warnings.simplefilter('error', tfdp.Caution)
    tfdp.DPSGD(.1, plan=plan, clipping=tfdp.clipping.Quantile(.9))
