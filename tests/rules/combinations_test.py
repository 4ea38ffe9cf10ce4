# SPDX-License-Identifier: Apache-2.0
"""Any wrappers around any rule, in any order: exactly the formulas together, or refused in words.

The second writing knows no wrappers: one release in raw units, by group. Noise is explicit,
correlated or not.
"""

import random

import loop
import numpy as np
import pytest
import tensorflow as tf

from tfdp_adaptive import contract
from tfdp_adaptive import mechanisms
from tfdp_adaptive import rules
from tfdp_adaptive import weights
from tfdp_adaptive.clipping import projection

STEPS, SIGMA, ZETA, B, RATE = 5, 0.6, 1.2, 4.0, 0.1
NORMS, CUT = np.array([1.0, 3.0]), 2
STD, QUANTILE, MOVE, FLOOR = 2.0, 0.6, 0.5, 0.05


def first(spec):
  return spec.shape == [CUT]


def rest(spec):
  del spec
  return True


BASES = {
    'sgd': lambda: rules.dp_sgd(0.5), 'adam_bc': lambda: rules.dp_adam_bc(0.8, 0.9, FLOOR),
    'parted': lambda: rules.partition([
        (first, rules.dp_sgd(0.5)), (rest, rules.dp_adam_bc(0.8, 0.9, FLOOR))])}
WRAPPERS = {
    'auto_s': lambda rule: rules.with_clipping(rule, weights.AutoS()),
    'tanh': lambda rule: rules.with_clipping(rule, weights.Tanh()),
    'quantile': lambda rule: rules.quantile_clip(rule, QUANTILE, MOVE, STD),
    'slack': lambda rule: rules.slack_clip(rule, 2, QUANTILE, MOVE),
    'grouped': lambda rule: rules.grouped(rule, (0, 1), norms=NORMS)}
MECHANISMS = {'independent': lambda: np.eye(STEPS),
              'banded': lambda: mechanisms.BandedToeplitz(2, STEPS)}


def refused(names):
  """Why these, from the inside out, do not go together; '' if they do."""
  place = {name: i for i, name in enumerate(names)}
  inside = lambda a, b: place[a] < place[b]
  reasons = []
  if {'auto_s', 'slack'} <= set(names):
    reasons.append('Slack is what')
  following = {'quantile', 'slack'} & set(names)
  if len(following) == 2:
    reasons.append('fixed clip norm')
  for follow in following:
    moving = 'grouped' in names and inside(follow, 'grouped')
    if moving and any(inside('grouped', name) for name in following):
      reasons.append('one unit')
  return '|'.join(reasons)


def noising(mechanism):
  if isinstance(mechanism, np.ndarray):
    return mechanism
  matrix = np.asarray(mechanism.noising(STEPS))
  return matrix if matrix.ndim == 2 else np.array(
      [[matrix[t - j] if j <= t else 0.0 for j in range(STEPS)] for t in range(STEPS)])


def library(rule, inverse, p, z):
  """[STEPS + 1, 5] iterates; checks at every step what one record adds."""
  ask, = rule.asks
  factor, std = ask.side_query.noise(SIGMA, B) if ask.side_query else (1.0, 0.0)
  state, theta, path = rule.init(loop.SPECS), p.theta, [p.theta]
  rows = inverse @ z
  for t in range(STEPS):
    query, = rule.query(state)
    zeta = ZETA * float(query.relative_clip)
    total, numbers = np.zeros(5), np.zeros(ask.side_query.size if ask.side_query else 0)
    for g in p.gradients(theta, t):
      sums = projection.project_record(ask, query, tf.constant(zeta, tf.float64), loop.split(g))
      r, f = loop.join(sums.total), np.ravel(sums.side_sum)
      joint = np.sum(r**2) / (factor * zeta)**2 + (
          SIGMA**2 * np.sum(f**2) / std**2 if len(f) else 0)
      assert joint <= 1 + 1e-9
      total, numbers = total + r, numbers + f
    scale = factor * SIGMA * zeta / B
    release = contract.Release(
        loop.split(total / B + scale * rows[t, :5]),
        tf.constant(scale**2 * np.sum(inverse[t]**2), tf.float64))
    if ask.side_query:
      release = release._replace(
          side_mean=tf.constant((numbers + std * rows[t, 5:5 + len(numbers)]) / B))
    direction, state = rule.update(state, (release,))
    theta = theta - RATE * loop.join(direction)
    path.append(theta)
  return np.array(path)


def formula(base, names, inverse, p, z):
  """The same from one release in raw units."""
  rows, place = inverse @ z, {name: i for i, name in enumerate(names)}
  grouped = 'grouped' in names
  follow = next((name for name in ('quantile', 'slack') if name in names), None)
  apart = grouped and follow is not None and place[follow] < place['grouped']
  blocks = [np.arange(CUT), np.arange(CUT, 5)] if grouped else [np.arange(5)]
  start = ZETA * (NORMS / np.linalg.norm(NORMS) if grouped else np.ones(1))
  move = np.ones(len(blocks) if apart else 1)
  kind = next((name for name in ('auto_s', 'tanh') if name in names), 'hard')
  x, gs, variances, path = p.theta, [], [], [p.theta]
  for t in range(STEPS):
    raw = start * move
    zeta = np.linalg.norm(raw)
    share = raw * np.sqrt([len(b) for b in blocks])
    share = share / share.sum()
    scales = np.sqrt(share) * zeta / raw
    s = np.concatenate([np.full(len(b), scale) for b, scale in zip(blocks, scales)])
    total, norms = np.zeros(5), []
    for g in p.gradients(x, t) * s:
      parts = [np.linalg.norm(g[b]) for b in blocks]
      norms.append(parts if apart else [np.linalg.norm(g)])
      for b, n, c in zip(blocks, parts, np.sqrt(share) * zeta):
        total[b] += g[b] * {'hard': min(1, c / n), 'auto_s': c / (n + 0.01),
                            'tanh': c * np.tanh(n / c) / n}[kind]
    clips = np.sqrt(share) * zeta if apart else np.array([zeta])
    count = np.array([len(clips)])[0]
    factor, norms = 1.0, np.reshape(norms, [-1, count])
    if follow == 'quantile':
      factor = (1 - (SIGMA / (2 * STD))**2)**-0.5
      drawn = STD * np.sqrt(count) * rows[t, 5:5 + count]
      estimate = 0.5 + (np.sum(np.where(norms <= clips, 0.5, -0.5), 0) + drawn) / B
    if follow == 'slack':
      unit = clips / zeta  # The first of two numbers each moves the clip norm.
      slack = np.clip(np.sqrt(2) * (1 - 1e-6) * np.maximum(1 - norms / clips, 0), 0, 2**-0.5)
      drawn = SIGMA * rows[t, 5:5 + 2 * count:2] / unit
      estimate = np.sqrt(2) * (np.sum(slack, 0) + drawn) / B
    tau = factor * SIGMA * zeta / B / s
    gs.append(total / B / s + tau * rows[t, :5])
    variances.append(tau**2 * np.sum(inverse[t]**2))
    momentum = sum(0.5**(t - j) * g for j, g in enumerate(gs))
    decay = lambda values, beta: (1 - beta) * sum(
        beta**(t - j) * v for j, v in enumerate(values)) / (1 - beta**(t + 1))
    adam = decay(gs, 0.8) / np.sqrt(np.maximum(
        decay(np.square(gs), 0.9) - decay(variances, 0.9), FLOOR**2))
    direction = {'sgd': momentum, 'adam_bc': adam,
                 'parted': np.concatenate([momentum[:CUT], adam[CUT:]])}[base]
    x = x - RATE * direction
    path.append(x)
    if follow == 'quantile':
      move = move * np.exp(-MOVE * (estimate - QUANTILE))
    if follow == 'slack':
      move = move * np.exp(MOVE * (QUANTILE - estimate))
  return np.array(path)


def sampled(count, seed):
  draw = random.Random(seed)
  for _ in range(count):
    names = draw.sample(sorted(WRAPPERS), draw.choice((2, 2, 3)))
    if {'auto_s', 'tanh'} <= set(names):
      names.remove('tanh')
    yield draw.choice(sorted(BASES)), tuple(names), draw.choice(sorted(MECHANISMS))


@pytest.mark.parametrize('base, names, mechanism', [
    *sampled(14, 1), *(pytest.param(*one, marks=pytest.mark.slow) for one in sampled(150, 2))])
def test_together_they_are_the_formulas_together_or_are_refused(base, names, mechanism):
  mechanism = MECHANISMS[mechanism]()
  inverse = noising(mechanism)
  p = loop.Problem(sizes=(4,) * STEPS, divisor=B)
  z = np.random.default_rng(4).normal(size=(STEPS, 9))

  def run():
    rule = BASES[base]()
    for name in names:
      rule = WRAPPERS[name](rule)
    contract.check_side_query(rule.asks[0])
    return library(rule, inverse, p, z)

  expected = refused(names)
  if expected:
    with pytest.raises(ValueError, match=expected) as error:
      run()
    assert 'Received' in str(error.value)
    return
  np.testing.assert_allclose(run(), formula(base, names, inverse, p, z), rtol=2e-5, atol=2e-6)
