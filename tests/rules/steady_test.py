# SPDX-License-Identifier: Apache-2.0
"""A rule is steady only if its scale never moves: what filters remember is in one unit."""

import loop
import numpy as np
import pytest
import table
import tensorflow as tf

from tfdp_adaptive import contract
from tfdp_adaptive import geometry
from tfdp_adaptive import privatizer
from tfdp_adaptive import rules

WRAPPERS = {
    'itself': lambda rule: rule,
    'quantile': lambda rule: rules.quantile_clip(rule, learning_rate=1.0),
    'grouped': lambda rule: rules.grouped(rule, (0, 1)),
    'groups that follow': lambda rule: rules.grouped(
        rules.quantile_clip(rule, learning_rate=1.0), (0, 1)),
    'partition': lambda rule: rules.partition([
        (lambda spec: spec.shape == [2], rule), (lambda spec: True, rule)]),
    'low_pass': rules.low_pass}


def units(rule):
  """[4 steps][numbers] of the scales that a rule asks for, and whether its clip norm moves."""
  rule, rng = privatizer.bound(rule), np.random.default_rng(0)
  state, seen, own = rule.init(loop.SPECS), [], False
  problem = loop.Problem()
  for _ in range(4):
    public = loop.public_of(rule, problem, rng.normal(size=loop.SIZE))
    queries, releases = rule.query(state, public), []
    for ask, query in zip(rule.asks, queries):
      own |= geometry.is_kronecker(query.scale) or (
          ask.rider is None and not np.isclose(query.relative_clip, 1))
      release = contract.Release(
          loop.split(rng.normal(size=loop.SIZE)), tf.constant(.01, tf.float64))
      if ask.second is not None:
        second = tf.nest.map_structure(
            lambda s: tf.constant(rng.normal(size=s.shape)**2, s.dtype),
            ask.second.specs(loop.SPECS))
        release = release._replace(second=second, second_variance=tf.constant(.01, tf.float64))
      if ask.rider is not None:
        release = release._replace(
            rider=tf.constant(rng.normal(size=ask.rider.size)),
            rider_variance=tf.constant(.01, tf.float64))
      releases.append(release)
    seen.append([np.ravel(leaf) for query in queries for leaf in tf.nest.flatten(
        (geometry.packed(query.scale), () if query.groups == () else query.groups.scale))])
    _, state = rule.update(state, tuple(releases), public)
  return seen, own


def moves(seen):
  first = seen[0]
  return any(len(one) != len(first) or not all(
      np.allclose(a, b, rtol=1e-6) for a, b in zip(one, first)) for one in seen[1:])


def made():
  for case in table.RULES:
    for name, wrap in WRAPPERS.items():
      yield pytest.param(case, wrap, id=f'{name}-{case.name}')


@pytest.mark.parametrize('case, wrap', list(made()))
def test_what_is_steady_does_not_move_its_scale(case, wrap):
  try:
    rule = wrap(case.rule())
    seen, own = units(rule)
  except (ValueError, tf.errors.InvalidArgumentError):
    pytest.skip('refused, whatever for')
  assert not (contract.is_steady(rule) and moves(seen))
  assert rule.own_clip or not own or len(rule.asks) > 1
  if moves(seen):
    for average in (rules.low_pass, rules.denoised):
      with pytest.raises(ValueError, match='`rule` must'):
        average(rule)


def test_the_table_has_rules_of_both_kinds():
  moving = {case.name for case in table.RULES if moves(units(case.rule())[0])}
  assert {'scale_then_privatize', 'dp_rmsprop_stp', 'adadps', 'dp_soap', 'dp_kfc',
          'dp2_rmsprop', 'non_private_noiseless_adam-scaled'} <= moving
  assert not {'dp_sgd', 'dp_adam_ime', 'pagan', 'pasan-rescale', 'noisy_adagrad'} & moving


def test_a_rule_of_ones_own_is_steady_by_its_raw_gradients_or_by_its_word():
  scaled = lambda state, public=(): (contract.Query(loop.split(np.ones(loop.SIZE))),)
  rule = contract.Rule(lambda specs: (), scaled, lambda state, releases, public=(): (0, state))
  assert not contract.is_steady(rule) and contract.is_steady(rule._replace(steady=True))
  assert contract.is_steady(rule._replace(query=contract.isotropic))
