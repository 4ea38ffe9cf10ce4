# SPDX-License-Identifier: Apache-2.0
"""Private Shampoo and SOAP: whole matrices against the formulas, noise taken off, limits."""

import loop
import numpy as np
import oracles_matrix as matrix
import pytest
import tensorflow as tf

from tfdp_adaptive import contract
from tfdp_adaptive import geometry
from tfdp_adaptive import mechanisms
from tfdp_adaptive import rules
from tfdp_adaptive import weights
from tfdp_adaptive.clipping import projection
from tfdp_adaptive.rules import kfc
from tfdp_adaptive.rules import kronecker

SHAPES = ((1,), (2, 2))
RULES = {False: rules.dp_shampoo, True: rules.dp_soap}


def leaves(vector):
  return [tf.constant(vector[:1]), tf.constant(vector[1:].reshape(2, 2))]


def run(rule, p):
  """`loop.run` on a [2, 2] matrix and a vector of one."""
  state = rule.init([tf.TensorSpec(shape, tf.float64) for shape in SHAPES])
  std = p.factor * p.clip * p.sigma / p.divisor
  theta, iterates = p.theta, [p.theta]
  for t in range(len(p.sizes)):
    (query,) = rule.query(state)
    records = [projection.project_record(
        contract.Ask(), query, tf.constant(p.clip, tf.float64), leaves(g)).total
               for g in p.gradients(theta, t)]
    total = sum((loop.join(record) for record in records), np.zeros(5))
    release = contract.Release(
        leaves(total / p.divisor + std * p.z[t]), tf.constant(std**2, tf.float64))
    direction, state = rule.update(state, (release,))
    theta = theta - p.rate * loop.join(direction)
    iterates.append(theta)
  return np.array(iterates)


@pytest.mark.parametrize('rotated', RULES)
@pytest.mark.parametrize('every', [1, 3])
def test_matrices_of_two_sides_equal_the_formulas(rotated, every):
  problem = loop.Problem(sigma=.3)
  rule = RULES[rotated](0.8, 0.9, 0.05, scale_epsilon=0.1, refresh_every=every)
  expected = matrix.kronecker(rotated, 0.8, 0.9, 0.05, 0.1, every, SHAPES)(problem)
  np.testing.assert_allclose(run(rule, problem), expected, atol=1e-8)
  louder = matrix.kronecker(rotated, 0.8, 0.9, 0.05, 0.1, every, SHAPES)(loop.Problem(sigma=.303))
  assert np.abs(louder - expected).max() > 1e-4


def follow(rule, state, signal, z, variance):
  (query,) = rule.query(state)
  mean = [geometry.times(query.scale[0], tf.constant(signal)) + z]
  return rule.update(state, (contract.Release(mean, tf.cast(variance, tf.float64)),))[1]


def test_the_noise_is_taken_off_without_bias():
  """One update from one state with many draws: its mean is the update without noise.

  A factor wrong by a tenth is noticed.
  """
  rng, rule = np.random.default_rng(0), rules.dp_soap(beta_2=.5, scale_epsilon=.1, refresh_every=10)
  signal = rng.normal(size=(3, 2)) * [[3], [1], [.3]]
  state = rule.init([tf.TensorSpec([3, 2], tf.float64)])
  for _ in range(10):  # Until the geometry has a shape.
    state = follow(rule, state, signal, .1 * rng.normal(size=(3, 2)), .01)
  (query,) = rule.query(state)
  assert min(np.linalg.cond(side) for side in (query.scale[0].left, query.scale[0].right)) > 1.2
  clean, z = follow(rule, state, signal, np.zeros((3, 2)), 0.0), rng.normal(size=(20000, 3, 2))

  @tf.function(autograph=False)
  def draws(variance):
    def one(draw):
      after = follow(rule, state, signal, draw, variance)
      return after.left[0].moment, after.right[0].moment, after.second[0]
    return tf.vectorized_map(one, tf.constant(z))

  def deviation(variance):
    """Largest distance of a trace from that without noise, in standard errors."""
    worst = 0.0
    for got, want in zip(draws(tf.constant(variance, tf.float64)), (
        clean.left[0].moment, clean.right[0].moment, clean.second[0])):
      got = got.numpy().reshape(len(z), -1)
      error = got.std(0) / np.sqrt(len(z))
      worst = max(worst, np.abs((got.mean(0) - want.numpy().ravel()) / error).max())
    return worst

  assert deviation(1.0) < 4.5
  assert deviation(1.1) > 6


def test_large_scale_epsilon_is_isotropic():
  """All of a side is multiplied by the same: DP-SGD's geometry but for its unit."""
  rule = rules.dp_shampoo(scale_epsilon=1e8, refresh_every=1)
  state = rule.init([tf.TensorSpec([3, 2], tf.float64)])
  for t in range(3):
    state = follow(rule, state, np.random.default_rng(t).normal(size=(3, 2)), 0.0, 0.0)
  (query,) = rule.query(state)
  np.testing.assert_allclose(query.scale[0].left, 1e-2 * np.eye(3), atol=1e-8)


def test_a_stretched_geometry_has_a_bounded_condition():
  """cond A <= ((d + eps) / eps)^(1/4), whatever the releases were."""
  rule = rules.dp_soap(scale_epsilon=.01, refresh_every=1)
  state = rule.init([tf.TensorSpec([4, 3], tf.float64)])
  for _ in range(4):
    state = follow(rule, state, np.outer(np.eye(4)[0], np.eye(3)[1]) * 1e6, 0.0, 0.0)
  (query,) = rule.query(state)
  assert np.linalg.cond(query.scale[0].left) == pytest.approx((4.01 / .01)**.25)
  assert np.linalg.cond(query.scale[0].right) == pytest.approx((3.01 / .01)**.25)


def test_nothing_but_noise_and_nothing_at_all_is_isotropic():
  rule = rules.dp_shampoo(refresh_every=1)
  state = rule.init([tf.TensorSpec([3, 2], tf.float64), tf.TensorSpec([2], tf.float64)])
  zeros = [tf.zeros([3, 2], tf.float64), tf.zeros([2], tf.float64)]
  for variance in (0.0, 1.0):
    _, after = rule.update(state, (contract.Release(zeros, tf.constant(variance, tf.float64)),))
    (query,) = rule.query(after)
    assert np.linalg.cond(query.scale[0].left) == pytest.approx(1)
    assert np.ptp(query.scale[1]) == pytest.approx(0)


def test_what_is_not_finite_leaves_the_geometry_as_it_is():
  rule = rules.dp_soap(refresh_every=1)
  state = follow(rule, rule.init([tf.TensorSpec([3, 2], tf.float64)]),
                 np.random.default_rng(0).normal(size=(3, 2)), 0.0, 0.0)
  after = follow(rule, state, np.full((3, 2), np.nan), 0.0, 0.0)
  np.testing.assert_array_equal(after.left[0].scale, state.left[0].scale)


@pytest.mark.parametrize('make', [rules.dp_shampoo, rules.dp_soap, rules.dp_kfc],
                         ids=lambda make: make.__name__)
@pytest.mark.parametrize('size, variance', [
    (0.0, 0.0), (0.0, 1.0), (1e25, 1.0), (1e-42, 0.0), (1e-3, 1e30)])
def test_scales_of_any_rank_stay_finite_whatever_comes(make, size, variance):
  """Empty batches, huge and denormal releases, nothing but noise."""
  shapes = (), (3,), (2, 3), (2, 2, 3, 4), (2, 1, 3, 2, 4)
  rule, rng = make(refresh_every=1), np.random.default_rng(0)
  state = rule.init(tuple(tf.TensorSpec(shape, tf.float32) for shape in shapes))
  public = () if rule.public is None else tuple(
      tuple(tf.constant(size * (np.eye(*side) if len(side) == len(pair) == 2 else np.ones(side)),
                        tf.float32) for side in pair) for pair in map(kfc.sides, shapes))
  for _ in range(2):
    release = contract.Release(
        tuple(tf.constant(size * rng.normal(size=shape), tf.float32) for shape in shapes),
        tf.constant(variance))
    _, state = rule.update(state, (release,), public)
    (query,) = rule.query(state, public)
    assert all(np.isfinite(leaf).all() for leaf in tf.nest.flatten(geometry.packed(query.scale)))


@pytest.mark.parametrize('shape, expected', [
    ((), None), ((7,), None), ((5, 3), (1, 5, 3)), ((8, 2, 4), (1, 8, 8)), ((2, 4, 8), (1, 8, 8)),
    ((3, 3, 4, 6), (1, 36, 6)), ((3, 3, 200, 6), (9, 200, 6)), ((3, 3, 4, 1), None)])
def test_variables_are_seen_as_matrices(shape, expected):
  assert kronecker.matrices(shape, 1024) == expected


def test_kernels_of_many_channels_and_long_sides():
  """A convolution's channels, and a side that is left as it is, against a full matrix."""
  rule = rules.dp_soap(refresh_every=1, max_size=8)
  specs = [tf.TensorSpec(shape, tf.float64) for shape in ((2, 2, 3, 4), (9, 3))]
  state = rule.init(specs)
  rng = np.random.default_rng(0)
  for _ in range(2):
    (query,) = rule.query(state)
    raw = [tf.constant(rng.normal(size=spec.shape)) for spec in specs]
    mean = [geometry.times(scale, g) for scale, g in zip(query.scale, raw)]
    direction, state = rule.update(
        state, (contract.Release(mean, tf.constant(0.0, tf.float64)),))
  (query,) = rule.query(state)
  assert query.scale[0].left.shape == [3, 3] and query.scale[1].left.shape == [9]
  np.testing.assert_array_equal(query.scale[1].left, np.ones(9))
  assert all(np.all(np.isfinite(d)) and d.shape == s.shape for d, s in zip(direction, specs))


@pytest.mark.thorough(rows=['False'])
@pytest.mark.parametrize('rotated', RULES)
def test_the_same_compiled(rotated):
  rule = RULES[rotated](refresh_every=2)
  state = rule.init([tf.TensorSpec([3, 2], tf.float32)])
  releases = tf.constant(np.random.default_rng(0).normal(size=(4, 3, 2)), tf.float32)
  results = []
  for jit in (False, True):
    step = tf.function(lambda state, mean: rule.update(
        state, (contract.Release([mean], tf.constant(.1)),)), jit_compile=jit, autograph=False)
    now = state
    for mean in tf.unstack(releases):
      direction, now = step(now, mean)
    results.append(direction[0])
  np.testing.assert_allclose(*results, rtol=1e-3, atol=1e-4)


def test_groups_of_scaled_matrices_are_refused():
  with pytest.raises(ValueError, match='one unit'):
    rules.grouped(rules.dp_soap(), (0, 0))


def test_steps_between_two_refreshes_need_no_public_factors():
  """Whatever they are given, NaN if it must be: nothing of it is used, at once or later."""
  rule, rng = rules.dp_kfc(refresh_every=3), np.random.default_rng(0)
  specs = [tf.TensorSpec([3, 2], tf.float64), tf.TensorSpec([2], tf.float64)]
  seen, given = [], [(np.cov(rng.normal(size=(d, 9)))) for d in (3, 2)]
  public = [tuple(map(tf.constant, given)), (tf.ones([2], tf.float64),)]
  results = []
  for fill in (0.0, np.nan):
    state = rule.init(specs)
    for t in range(7):
      due = bool(rule.public_due(state))
      seen.append(due)
      now = tf.nest.map_structure(lambda x: x * (t + 1) if due else x * 0 + fill, public)
      release = contract.Release([tf.ones(s.shape, s.dtype) for s in specs], tf.zeros([]))
      rule.query(state, now)
      direction, state = rule.update(state, (release,), now)
    results.append(tf.nest.flatten((direction, state)))
  assert seen[:7] == [True, False, True, False, False, True, False]
  for a, b in zip(*results):
    np.testing.assert_array_equal(a, b)


def test_a_look_at_public_data_that_is_not_finite_is_as_if_there_was_none():
  rule = rules.dp_kfc(refresh_every=1)
  specs, rng = [tf.TensorSpec([3, 2], tf.float64)], np.random.default_rng(0)
  release = contract.Release([tf.ones([3, 2], tf.float64)], tf.zeros([]))
  looks = [tuple(tf.constant(np.cov(rng.normal(size=(d, 9)))) for d in (3, 2)) for _ in range(3)]
  results = []
  for seen in (looks, looks[:2] + [tuple(x * np.nan for x in looks[0])] + looks[2:]):
    state = rule.init(specs)
    for look in seen:
      _, state = rule.update(state, (release,), [look])
    results.append(tf.nest.flatten((state.moments, state.scale)))
  for a, b in zip(*results):
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize('wrap', [
    rules.quantile_clip, lambda rule: rules.slack_clip(rule, 2),
    lambda rule: rules.grouped(rule, (0,)), lambda rule: rules.with_clipping(rule, weights.AutoS()),
    lambda rule: rules.partition([(lambda spec: True, rule)])])
def test_wrappers_do_not_say_when_public_factors_are_due_of_another_state(wrap):
  try:
    rule = wrap(rules.dp_kfc()._replace(own_clip=False))
  except ValueError:
    return
  if rule.public_due is not None:
    rule.public_due(rule.init([tf.TensorSpec([3, 2])]))


def test_signs_of_eigenvectors_change_nothing():
  """Sides are symmetric: with `diag(roots)^-1 Q'` the noise of two refreshes would not cancel.

  Of square-root noise, which is correlated, the prefix sum of 200 steps then has 92 times the
  variance: that of steps of which each has a sign of its own.
  """
  rule, rng = rules.dp_soap(refresh_every=2), np.random.default_rng(0)
  state = rule.init([tf.TensorSpec([3, 2], tf.float64)])
  for _ in range(2):
    state = follow(rule, state, rng.normal(size=(3, 2)), 0.0, 0.0)
  left, signs = state.left[0], tf.constant([1.0, -1.0, -1.0], tf.float64)
  turned = state._replace(
      first=[signs[:, tf.newaxis] * state.first[0]],
      left=(left._replace(basis=left.basis * signs,
                          moment=left.moment * signs * signs[:, tf.newaxis]),))
  signal, releases = rng.normal(size=(3, 2)), []
  for one in (state, turned):
    np.testing.assert_allclose(one.left[0].scale, left.scale)
    for _ in range(2):
      one = follow(rule, one, signal, 0.0, 0.0)
    releases.append((one.left[0].scale, one.right[0].scale, one.second[0]))
  for a, b in zip(*releases):
    np.testing.assert_allclose(a, b, atol=1e-12)
  c = mechanisms.SquareRoot(200).noising(200)
  rows = np.array([[c[i - j] if i >= j else 0.0 for j in range(200)] for i in range(200)])
  assert np.sum(rows**2) / np.sum(rows.sum(0)**2) == pytest.approx(92.4, abs=.1)
