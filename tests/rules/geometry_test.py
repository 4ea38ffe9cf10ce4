"""Subspaces, constraint sets and ellipsoids."""

import math

import dp_accounting
import numpy as np
import pytest
from scipy import optimize
from scipy import stats
import tensorflow as tf

import oracles
from tfdp_adaptive import rules
from tfdp_adaptive.privacy import accounting
from tfdp_adaptive.rules import base
from tfdp_adaptive.rules import constraints
from tfdp_adaptive.rules import ellipsoids
from tfdp_adaptive.rules import subspaces

# Subspaces.


@pytest.mark.parametrize('method', subspaces.METHODS)
@pytest.mark.parametrize('n, m', [(4, 30), (30, 4), (25, 25)])
def test_top_is_the_largest_singular_vectors(method, n, m):
  """Of a decaying spectrum; the smallest ones, as eigh's order tempts to, are far away."""
  rng = np.random.default_rng(0)
  u, v = (np.linalg.qr(rng.normal(size=(d, d)))[0] for d in (n, m))
  r = min(n, m)
  matrix = (u[:, :r] * 2.0**-np.arange(r)) @ v[:, :r].T
  basis = subspaces.top(tf.constant(matrix), 3, method).numpy()
  np.testing.assert_allclose(basis.T @ basis, np.eye(3), atol=1e-9)
  np.testing.assert_allclose(basis @ basis.T, v[:, :3] @ v[:, :3].T, atol=1e-6)


def test_top_of_too_few_directions_is_smaller():
  matrix = np.outer(np.ones(4), [3.0, 4.0, 0.0])
  basis = subspaces.top(tf.constant(matrix), 2).numpy()
  np.testing.assert_allclose(basis @ basis.T, np.outer([.6, .8, 0], [.6, .8, 0]), atol=1e-12)
  np.testing.assert_array_equal(subspaces.top(tf.zeros([4, 3]), 2), np.zeros((3, 2)))


def test_flatten_round_trip():
  tree = {'a': tf.ones([2, 3]), 'b': tf.range(4.0)}
  vector = subspaces.flatten(tree)
  assert vector.shape == [10]
  tf.nest.map_structure(np.testing.assert_array_equal, subspaces.unflatten(vector, tree), tree)


# Constraint sets.


@pytest.mark.parametrize('spread', [0.0, 1.0, 4.0])
def test_weighted_ball_is_the_nearest_point_in_its_metric(spread):
  for seed in range(5):
    rng = np.random.default_rng(seed)
    h, y = 10**rng.uniform(-spread, spread, size=6), 3 * rng.normal(size=6)
    x = constraints.into_ball_weighted(0.8, tf.constant(h), tf.constant(y)).numpy()
    np.testing.assert_allclose(x, oracles.metric_ball(h, y, 0.8), rtol=1e-6, atol=1e-8)
    if spread == 1.0:
      found = optimize.minimize(
          lambda v: np.sum(h * (v - y)**2), np.zeros(6), jac=lambda v: 2 * h * (v - y),
          method='SLSQP', constraints={'type': 'ineq', 'fun': lambda v: 0.64 - v @ v},
          options={'ftol': 1e-14, 'maxiter': 300})
      np.testing.assert_allclose(x, found.x, atol=1e-4)


def test_weighted_ball_leaves_inner_points_and_its_scale_does_not_matter():
  rng = np.random.default_rng(0)
  h, y = rng.uniform(0.1, 9, size=6), rng.normal(size=6)
  inside = constraints.into_ball_weighted(10.0, tf.constant(h), tf.constant(y))
  np.testing.assert_allclose(inside, y, rtol=1e-14)
  np.testing.assert_allclose(
      constraints.into_ball_weighted(0.5, tf.constant(h), tf.constant(y)),
      constraints.into_ball_weighted(0.5, tf.constant(1e-9 * h), tf.constant(y)), rtol=1e-9)


@pytest.mark.parametrize('inner', [0.3, 3.0])
def test_weighted_ball_with_zero_weights_is_the_limit(inner):
  h, y = np.array([2.0, 0.5, 0.0, 0.0]), np.array([inner, inner / 2, 1.0, -2.0])
  x = constraints.into_ball_weighted(0.8, tf.constant(h), tf.constant(y)).numpy()
  limit = oracles.metric_ball(h + 1e-10, y, 0.8)
  np.testing.assert_allclose(x, limit, atol=1e-5)
  assert np.linalg.norm(x) == pytest.approx(0.8)


def test_box_and_ball():
  y = (tf.constant([-3.0, 0.2]), tf.constant([5.0]))
  clipped = constraints.into_box((-1, 2), y)
  np.testing.assert_allclose(np.concatenate(clipped), [-1, 0.2, 2])
  np.testing.assert_allclose(constraints.into_ball(1.0, tf.constant([3.0, 4.0])), [0.6, 0.8])
  np.testing.assert_allclose(constraints.into_ball(9.0, tf.constant([3.0, 4.0])), [3, 4])


# Eigenvalues of a noised preconditioner.


@pytest.mark.parametrize('mode, inverse', [
    ('truncate', [0, 0, 1 / 1.1, 1 / 5]), ('floor', [1, 1, 1 / 1.1, 1 / 5]),
    ('pinv', [-1 / 3, 1 / 0.9, 1 / 1.1, 1 / 5])])
def test_eigenvalues_near_the_noise(mode, inverse):
  """2 sqrt(k) sigma_B, where sigma_B of the GOE is the released noise over sqrt(2)."""
  sigma_b, k = 0.07, 4
  threshold = 2 * math.sqrt(k) * sigma_b
  rule = rules.noisy_adagrad(1, basis=np.eye(k), mode=mode)
  noised = tf.linalg.diag(tf.constant(threshold * np.array([-3, 0.9, 1.1, 5])))
  release = base.Release((tf.ones([k], tf.float64),), tf.constant(1.0, tf.float64),
                         noised, tf.constant(2 * sigma_b**2, tf.float64))
  (direction,), _ = rule.update(rule.init((tf.TensorSpec([k], tf.float64),)), (release,))
  np.testing.assert_allclose(direction, np.array(inverse) / threshold, rtol=1e-12)


# Ellipsoids.


@pytest.mark.parametrize('make, power', [(rules.pagan_ellipsoid, -4 / 3),
                                         (rules.pasan_ellipsoid, -1)])
def test_ellipsoid_bounds_the_root_mean_square(make, power):
  stddevs = np.arange(1, 7)**-1.5
  a = make(stddevs)
  np.testing.assert_allclose(np.sum(a * stddevs**2), 1.0)  # E ||g||_A^2.
  np.testing.assert_allclose(a / a[0], (stddevs / stddevs[0])**power)
  np.testing.assert_allclose(make(stddevs, bound=2.0), stddevs**power / 4)
  parts = make([stddevs[:2], stddevs[2:].reshape(2, 2)])
  np.testing.assert_allclose(np.concatenate([p.ravel() for p in parts]), a)


def test_powers_are_optimal():
  """C = sigma^(-4/3) minimises E||g||_C tr(C^(-1/2)), 1 / sigma E||g||_C sqrt(tr(C^-1))."""
  s = np.arange(1, 6)**-1.5
  for objective, make in (
      (lambda c: np.sqrt(np.sum(c * s**2)) * np.sum(c**-0.5), rules.pagan_ellipsoid),
      (lambda c: np.sqrt(np.sum(c * s**2)) * np.sqrt(np.sum(1 / c)), rules.pasan_ellipsoid)):
    found = optimize.minimize(lambda v: np.log(objective(np.exp(v))), np.zeros(5), tol=1e-10)
    best = np.exp(found.x)
    np.testing.assert_allclose(best / best[0], make(s) / make(s)[0], rtol=1e-3)


@pytest.mark.parametrize('dimension, rounds', [(1, 1), (2, 2), (4, 3), (10, 5), (100, 10)])
@pytest.mark.parametrize('epsilon', [0.5, 1.0, 10.0])
def test_private_stddevs_are_calibrated_exactly(dimension, rounds, epsilon):
  got_rounds, multiplier = ellipsoids.calibration(dimension, epsilon, 1e-5)
  assert got_rounds == rounds
  mu = math.sqrt(rounds) / multiplier
  delta = stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * stats.norm.cdf(
      -mu / 2 - epsilon / mu)
  assert delta <= 1e-5 and delta == pytest.approx(1e-5, rel=1e-5)
  # An accountant that composes the rounds finds the same.
  accountant = dp_accounting.pld.PLDAccountant()
  accountant.compose(dp_accounting.GaussianDpEvent(multiplier), rounds)
  assert accountant.get_epsilon(1e-5) == pytest.approx(epsilon, rel=2e-3)


def test_printed_noise_is_too_small_for_few_rounds():
  """T sqrt(ln(T / delta)) / epsilon per round: true epsilons of section 15."""
  for rounds, claimed, true in ((1, 1.0, 1.110), (2, 1.0, 0.735), (2, 10.0, 10.14),
                                (10, 10.0, 3.63)):
    printed = rounds * math.sqrt(math.log(rounds / 1e-5)) / claimed
    epsilon = accounting.gaussian_epsilon(printed / math.sqrt(rounds), 1e-5)
    assert epsilon == pytest.approx(true, rel=5e-3)


def test_private_stddevs_within_a_factor_of_two():
  rng = np.random.default_rng(0)
  stddevs = 2.0**-np.arange(6)
  records = rng.normal(size=(200000, 6)) * stddevs
  estimate = rules.private_stddevs(
      records, scale=1.0, moment_ratio=1.0, target_epsilon=5.0, target_delta=1e-5, rng=rng)
  assert np.all(estimate <= 2 * stddevs) and np.all(estimate >= stddevs / 2)
  assert np.all(np.log2(estimate) == np.round(np.log2(estimate)))


class Recorder:
  """Stands in for a random generator; notes how often it is asked, and adds nothing."""

  def __init__(self, value=0.0):
    self.value, self.sizes = value, []

  def standard_normal(self, size):
    self.sizes.append(size)
    return np.full(size, self.value)


def test_private_stddevs_by_hand():
  """Without noise: threshold on standard deviations, and what was found is not asked again."""
  records = np.array([[1.0, 0.3, 0.0], [-1.0, 0.3, np.sqrt(2) * 0.12]])
  recorder = Recorder()
  estimate = rules.private_stddevs(
      records, scale=1.0, moment_ratio=1.0, target_epsilon=1.0, target_delta=1e-5, rng=recorder)
  # 3 rounds for d = 3: thresholds 1/4, 1/8, 1/16.
  np.testing.assert_array_equal(estimate, [0.5, 0.5, 0.25 / 2])
  assert recorder.sizes == [3, 1, 1]


@pytest.mark.parametrize('excess, expected', [(1.1, 0.5), (0.9, 0.125)])
def test_private_stddevs_noise_follows_the_sensitivity(excess, expected):
  """No signal, one standard deviation of noise: found just above the threshold, not below."""
  rounds, multiplier = ellipsoids.calibration(3, 0.1, 1e-5)
  assert rounds == 3
  # sqrt(|S|) rho^2 / n times the multiplier, with rho = 4, against the square of 1/4.
  n = round(multiplier * math.sqrt(3) * 4.0**2 / 0.25**2 / excess)
  estimate = rules.private_stddevs(np.zeros((n, 3)), scale=1.0, moment_ratio=1.0,
                                   target_epsilon=0.1, target_delta=1e-5, rng=Recorder(1.0))
  np.testing.assert_array_equal(estimate, expected)


def test_private_stddevs_truncate_and_ignore_what_is_not_finite():
  """One record moves the released squares by at most rho^2 in every coordinate."""
  huge, broken = np.zeros((100, 2)), np.zeros((100, 2))
  huge[0], broken[0] = 1e200, (np.nan, 1e200)
  arguments = dict(scale=1.0, moment_ratio=1.0, target_epsilon=1.0, target_delta=1e-5)
  found = rules.private_stddevs(huge, rng=Recorder(), **arguments)
  assert np.all(found == 0.5)  # sqrt(16 / 100) >= 1/4.
  found = rules.private_stddevs(broken, rng=Recorder(), **arguments)
  assert np.all(found == 2.0**-2)  # Nothing there: the last round's value.


@pytest.mark.parametrize('records, arguments, message', [
    (np.zeros(3), {}, r'`records` must be a \[n, d\] matrix'),
    (np.zeros((3, 2)), dict(scale=0.0), '`scale` must be positive'),
    (np.zeros((3, 2)), dict(moment_ratio=0.5), '`moment_ratio` must be >= 1'),
    (np.zeros((3, 2)), dict(target_epsilon=0.0), '`target_epsilon` must be positive'),
    (np.zeros((3, 2)), dict(target_delta=1.0), r'`target_delta` must be in \(0, 1\)'),
])
def test_private_stddevs_refuse(records, arguments, message):
  with pytest.raises(ValueError, match=message):
    rules.private_stddevs(records, **{**dict(
        scale=1.0, moment_ratio=1.0, target_epsilon=1.0, target_delta=1e-5), **arguments})


def test_ellipsoid_refuses_zero_stddevs():
  with pytest.raises(ValueError, match='`stddevs` must be positive'):
    rules.pagan_ellipsoid(np.array([1.0, 0.0]))


def test_estimated_moments_feed_pagan():
  stddevs = rules.private_stddevs(
      np.random.default_rng(0).normal(size=(50000, 4)) * [1, .5, .25, .1], scale=1.0,
      moment_ratio=1.0, target_epsilon=3.0, target_delta=1e-5, rng=np.random.default_rng(1))
  rule = rules.pagan([rules.pagan_ellipsoid(stddevs)])
  (query,) = rule.query(rule.init((tf.TensorSpec([4], tf.float32),)))
  np.testing.assert_allclose(query.scale[0]**2, rules.pagan_ellipsoid(stddevs), rtol=1e-5)
