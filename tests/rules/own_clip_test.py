# SPDX-License-Identifier: Apache-2.0
"""A rule that moves its clip norm, or scales matrices, says so in `own_clip`."""

import loop
import numpy as np
import pytest
import table
import tensorflow as tf

from tfdp_adaptive import contract
from tfdp_adaptive import geometry
from tfdp_adaptive import rules

WRAPPERS = {
    'itself': lambda rule: rule,
    'quantile': lambda rule: rules.quantile_clip(rule, learning_rate=1.0),
    'grouped': lambda rule: rules.grouped(rule, (0, 1)),
    'groups that follow': lambda rule: rules.grouped(
        rules.quantile_clip(rule, learning_rate=1.0), (0, 1)),
    'partition': lambda rule: rules.partition([
        (lambda spec: spec.shape == [2], rule), (lambda spec: True, rule)])}


def moves_its_clip_norm(rule):
  """Whether a rule scales matrices or moves its clip norm in four steps."""
  rng = np.random.default_rng(0)
  state, own = rule.init(loop.SPECS), False
  problem = loop.Problem()
  for _ in range(4):
    public = loop.public_of(rule, problem, rng.normal(size=loop.SIZE))
    queries, releases = rule.query(state, public), []
    for ask, query in zip(rule.asks, queries):
      own |= geometry.is_kronecker(query.scale) or (
          ask.side_query is None and not np.isclose(query.relative_clip, 1))
      release = contract.Release(
          loop.split(rng.normal(size=loop.SIZE)), tf.constant(.01, tf.float64))
      if ask.second is not None:
        second = tf.nest.map_structure(
            lambda s: tf.constant(rng.normal(size=s.shape)**2, s.dtype),
            ask.second.specs(loop.SPECS))
        release = release._replace(second=second, second_variance=tf.constant(.01, tf.float64))
      if ask.side_query is not None:
        release = release._replace(
            side_mean=tf.constant(rng.normal(size=ask.side_query.size)),
            side_variance=tf.constant(.01, tf.float64))
      releases.append(release)
    _, state = rule.update(state, tuple(releases), public)
  return own


def made():
  for case in table.RULES:
    for name, wrap in WRAPPERS.items():
      yield pytest.param(case, wrap, id=f'{name}-{case.name}')


@pytest.mark.parametrize('case, wrap', list(made()))
def test_a_rule_that_moves_its_clip_norm_says_so(case, wrap):
  try:
    rule = wrap(case.rule())
    own = moves_its_clip_norm(rule)
  except (ValueError, tf.errors.InvalidArgumentError):
    pytest.skip('refused, whatever for')
  assert rule.own_clip or not own or len(rule.asks) > 1


def test_the_table_has_rules_of_both_kinds():
  moving = {case.name for case in table.RULES if moves_its_clip_norm(case.rule())}
  assert {'dp_soap', 'dp2_rmsprop'} <= moving
  assert not {'dp_sgd', 'dp_adam_ime', 'pagan', 'scale_then_privatize'} & moving
