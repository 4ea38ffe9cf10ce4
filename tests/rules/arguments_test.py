# SPDX-License-Identifier: Apache-2.0
"""Factories refuse what makes no sense, and say what they want."""

import inspect
import math
import re

import loop
import numpy as np
import pytest
import tensorflow as tf

from tfdp_adaptive import contract
from tfdp_adaptive import optimizers
from tfdp_adaptive import rules
from tfdp_adaptive import trees
from tfdp_adaptive.rules import bias_corrected
from tfdp_adaptive.rules import moments
from tfdp_adaptive.rules import subspaces

GATED = dict(allow_non_private=True)
# Names that mean the same in every rule, and what is wrong for each of them.
DECAY, NUMBER = (-0.1, 1.0, math.nan), (-1.0, math.inf, math.nan)
COMMON = {**dict.fromkeys(('beta_1', 'beta_2', 'decay', 'momentum', 'rho'), DECAY),
          **dict.fromkeys(('epsilon', 'scale_epsilon', 'initial_accumulator_value'), NUMBER)}
REQUIRED = {'noisy_adagrad': dict(participations=1)}  # The audit takes it from its plan.


@pytest.mark.parametrize('factory, arguments, name', [
    (row.rule, row.audit, name)
    for row in {row.rule: row for row in optimizers.OPTIMIZERS.values()}.values()
    for name in inspect.signature(getattr(rules, row.rule)).parameters if name in COMMON])
def test_common_arguments_are_checked_by_every_rule(factory, arguments, name):
  for wrong in COMMON[name]:
    with pytest.raises(ValueError, match=rf'`{name}` must be .*\. Received: {name}={wrong}'):
      getattr(rules, factory)(**{**REQUIRED.get(factory, {}), **arguments, name: wrong})


@pytest.mark.parametrize('factory, arguments, message', [
    (rules.dp_sgd, dict(nesterov=True), '`momentum` must be positive with `nesterov=True`'),
    (rules.dp_adam_bc, dict(epsilon=0.0), '`epsilon` must be positive and finite'),
    (rules.dp_adam_ime, dict(epsilon=0.0), '`epsilon` must be positive'),
    (rules.dp_adam_ime, dict(share=1.0), r'`share` must be in \(0, 1\). Received: share=1.0'),
    (rules.dp_adam_ime, dict(update_clip=0.0), '`update_clip` must be positive'),
    (rules.dp_adagrad_ime, dict(square_then_average=True, printed_2B_plus_1=True),
     '`printed_2B_plus_1` must be False with `square_then_average=True`'),
    (rules.dp_adam_jme, dict(relative_lambda=0.0), '`relative_lambda` must be positive'),
    (rules.scale_then_privatize, dict(scale_epsilon=0.0), '`scale_epsilon` must be positive'),
    (rules.dp_adagrad_stp, dict(scale_epsilon=math.inf), '`scale_epsilon` must be positive'),
    (rules.dp_shampoo, dict(scale_epsilon=0.0), '`scale_epsilon` must be positive'),
    (rules.dp_shampoo, dict(refresh_every=0), '`refresh_every` must be a positive integer'),
    (rules.dp_soap, dict(epsilon=0.0), '`epsilon` must be positive'),
    (rules.dp_soap, dict(max_size=0.5), '`max_size` must be a positive integer'),
    (rules.dp_kfc, dict(power=1.5), '`power` must be at most one'),
    (rules.dp_kfc, dict(frame='own'), '`frame` must be one of'),
    (rules.dp2, dict(sgd_steps=0, adaptive_steps=1), '`sgd_steps` must be a positive integer'),
    (rules.dp2, dict(sgd_steps=2, adaptive_steps=0.5), '`adaptive_steps` must be a positive'),
    (rules.dp2, dict(sgd_steps=2, adaptive_steps=2, epsilon=0.0), '`epsilon` must be positive'),
    (rules.dp2, dict(sgd_steps=2, adaptive_steps=2, ablation='both'), '`ablation` must be one of'),
    (rules.dp2, dict(sgd_steps=2, adaptive_steps=3, ablation='extra_query'),
     '`adaptive_steps` must equal `sgd_steps`'),
    (rules.dp2, dict(preconditioner='adam'), "`preconditioner` must be one of .*'yogi'"),
    (rules.muon, dict(momentum=1.0), r'`momentum` must be in \[0, 1\)'),
    (rules.muon, dict(steps=0), '`steps` must be a positive integer'),
    (rules.dp_muon, dict(relative_adam_learning_rate=0), '`relative_adam_learning_rate` must be'),
    (rules.adadps, dict(preconditioner='yogi'), '`preconditioner` must be one of'),
    (rules.adadps, dict(epsilon=0), '`epsilon` must be positive'),
    (rules.pda_dpmd, dict(steps=0), '`steps` must be a positive integer'),
    (rules.pdp_sgd, {}, 'Exactly one of `dimension` and `basis`'),
    (rules.pdp_sgd, dict(dimension=2, basis=np.eye(5)), 'Exactly one of `dimension` and `basis`'),
    (rules.pdp_sgd, dict(basis=np.ones((5, 2))), '`basis` must have orthonormal columns'),
    (rules.pdp_sgd, dict(basis=np.ones((2, 5))), r'`basis` must be an \[m, k\] matrix'),
    (rules.pasan, dict(projection='oblique'), '`projection` must be one of'),
    (rules.pasan, dict(box=(1, 0)), '`box` must be a pair'),
    (rules.pagan, dict(box=(0, 1), radius=1.0), 'At most one of `box` and `radius`'),
    (rules.pagan, dict(radius=-1.0), '`radius` must be positive'),
    (rules.pagan, dict(ellipsoid=0.0), '`ellipsoid` must be positive'),
    (rules.pagan, dict(ellipsoid=[np.array([1.0, math.inf])]), '`ellipsoid` must be positive'),
    (rules.noisy_adagrad, dict(participations=0, basis=np.eye(5)), '`participations` must be a'),
    (rules.noisy_adagrad, dict(participations=1), 'Exactly one of `dimension` and `basis`'),
    (rules.noisy_adagrad, dict(participations=1, basis=np.eye(5), mode='drop'), '`mode` must be'),
    (rules.noisy_adagrad, dict(participations=1, basis=np.eye(5), box=(0, 1)),
     '`box` must be None unless `diagonal=True`'),
    (rules.noisy_adagrad, dict(participations=1, basis=np.eye(5), mode='pinv', radius=1.0),
     "`mode` must be 'truncate' or 'floor'"),
    (rules.non_private_noiseless_adam, {}, '`allow_non_private` must be True'),
    (rules.non_private_noiseless_adam, dict(allow_non_private=1), '`allow_non_private` must be'),
    (rules.non_private_noiseless_adam, dict(scale_epsilon=0.0, **GATED), '`scale_epsilon` must'),
])
def test_refused(factory, arguments, message):
  with pytest.raises(ValueError, match=message):
    factory(**arguments)


@pytest.mark.parametrize('factory', [
    rules.dp2_rmsprop, rules.pda_dpmd, rules.noisy_adagrad])
def test_no_default_where_none_is_safe(factory):
  with pytest.raises(TypeError, match='missing'):
    factory()


def test_boundaries_are_allowed():
  rules.dp_sgd(momentum=0.0)
  rules.dp_adam(beta_1=0.0, beta_2=0.0, epsilon=0.0)
  rules.dp2(sgd_steps=1, adaptive_steps=0)
  rules.pdp_sgd(basis=np.eye(5))


@pytest.mark.parametrize('rule, message', [
    (rules.side_information_adam(second_moment=[np.ones(3)]), '`second_moment` must be a number'),
    (rules.pagan([np.ones(5)]), r'`ellipsoid` must be .* shapes \[\(2,\), \(1, 3\)\]'),
    (rules.noisy_adagrad(1, basis=np.eye(4)), '`basis` must have one row per parameter, 5'),
])
def test_shapes_are_checked_against_the_parameters(rule, message):
  with pytest.raises(ValueError, match=message):
    rule.init(loop.SPECS)


def test_yogi_has_no_bias_correction():
  with pytest.raises(ValueError, match='must have a linear second moment'):
    bias_corrected.corrected(moments.yogi(0.9, 0.999, 0.0), 1e-3, 'yogi_bc')


def test_subspace_needs_enough_records():
  with pytest.raises(ValueError, match='`dimension` must be at most the number of public records'):
    subspaces.top(tf.ones([3, 5]), 4)


def test_gates_of_the_statistics():
  noiseless = rules.non_private_noiseless_adam(**GATED).asks[0].second
  assert not noiseless.private and not noiseless.amplifiable
  assert noiseless.stddevs(1.0, 4.0, 'zero_out') == (0.25, 0.0)
  root = rules.noisy_adagrad(3, basis=np.eye(5), relative_noise=2.0).asks[0].second
  assert root.private and not root.amplifiable
  assert root.participations == 3 and root.relative_noise == 2.0
  for rule in (rules.dp_adam_ime(), rules.dp_adam_jme(), rules.dp_adagrad_ime()):
    assert rule.asks[0].second.private and rule.asks[0].second.amplifiable


def test_rules_that_need_independent_noise_say_so():
  assert rules.dp2(sgd_steps=2, adaptive_steps=2, subtract_bias=True).independent_noise
  assert not rules.dp2(sgd_steps=2, adaptive_steps=2).independent_noise
  assert rules.noisy_adagrad(1, diagonal=True).independent_noise
  assert not rules.dp_adam_bc().independent_noise


# Cautions of rules about settings.


@pytest.mark.parametrize('rule, clip, std, messages', [
    (rules.dp_adam_bc(epsilon=1e-4), 1.0, 1e-3, []),
    (rules.dp_adam_bc(epsilon=1e-4), 1.0, 2.1e-3, ['epsilon=0.0001.* 21 learning rates long']),
    (rules.dp_rmsprop_bc(epsilon=1e-4), 1.0, 0.9e-5, ['epsilon rather than the second moment']),
    (rules.dp_adam_bc(epsilon=1e-4), 1.0, 0.0, []),
    (rules.dp_adam_ime(epsilon=1e-4), 1.0, 0.1, ['1e\\+03 learning rates']),
    (rules.dp_adam_jme(epsilon=0.1), 1.0, 0.1, []),
    (rules.scale_then_privatize(scale_epsilon=1e-3), 30.0, 0.89, []),
    (rules.scale_then_privatize(scale_epsilon=1e-3), 30.0, 0.9, ['is 0.9 in scaled units']),
    (rules.dp_adagrad_stp(scale_epsilon=1e-3), 1.0, 0.1, ['l2_norm_clip=1 is in scaled units']),
    (rules.dp_rmsprop_stp(scale_epsilon=1e-3), 1e4, 2.0, ['noise feeds itself', 'has norm 32']),
    (rules.dp_adam(), 1e9, 1e9, []),
])
def test_cautions(rule, clip, std, messages):
  texts = rule.cautions(clip, std, 1000)
  assert len(texts) == len(messages)
  for text, message in zip(texts, messages):
    assert re.search(message, text)


# Small helpers.


def test_numbers_keep_their_precision():
  """0.1 in float64, not the float32 nearest to it."""
  (filled,) = trees.constant_like(0.1, (tf.TensorSpec([2], tf.float64),), 'x')
  np.testing.assert_array_equal(filled, [0.1, 0.1])


def test_normalizer_keeps_its_digits_near_one():
  step = tf.constant(1, tf.int64)
  assert float(moments.normalizer(0.9999999, step, tf.float32)) == pytest.approx(1e-7, rel=1e-6)
  assert float(moments.normalizer(0.0, step, tf.float32)) == 1.0
  assert float(moments.normalizer(0.9, tf.constant(3, tf.int64), tf.float64)) == pytest.approx(
      1 - 0.9**3, rel=1e-14)


@pytest.mark.parametrize('steps, expected', [(1, 0.6827), (2, 0.632), (10, 0.555)])
def test_negative_fraction_of_pure_noise(steps, expected):
  """A coordinate without gradient; P(chi^2_1 < 1) at the first step."""
  rng = np.random.default_rng(0)
  rule = rules.dp_adam_bc(beta_2=0.999)
  spec = (tf.TensorSpec([100000], tf.float64),)
  state = rule.init(spec)
  for _ in range(steps):
    noise = (tf.constant(0.1 * rng.normal(size=100000)),)
    _, state = rule.update(state, (contract.Release(noise, tf.constant(0.01, tf.float64)),))
  assert float(rules.negative_fraction(state.second, state.bias)) == pytest.approx(
      expected, abs=0.006)
