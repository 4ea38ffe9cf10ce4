# SPDX-License-Identifier: Apache-2.0
"""Subspaces, constraint sets and ellipsoids."""

import math

import numpy as np
import oracles_convex as convex
import pytest
from scipy import optimize
import tensorflow as tf

from tfdp_adaptive import contract
from tfdp_adaptive import rules
from tfdp_adaptive import trees
from tfdp_adaptive.rules import constraints
from tfdp_adaptive.rules import subspaces

# Subspaces.


@pytest.mark.parametrize('n, m', [(4, 30), (30, 4), (25, 25)])
def test_top_is_the_largest_singular_vectors(n, m):
  """Of a decaying spectrum; the smallest ones, as eigh's order tempts to, are far away."""
  rng = np.random.default_rng(0)
  u, v = (np.linalg.qr(rng.normal(size=(d, d)))[0] for d in (n, m))
  r = min(n, m)
  matrix = (u[:, :r] * 2.0**-np.arange(r)) @ v[:, :r].T
  basis = subspaces.top(tf.constant(matrix), 3).numpy()
  np.testing.assert_allclose(basis.T @ basis, np.eye(3), atol=1e-9)
  np.testing.assert_allclose(basis @ basis.T, v[:, :3] @ v[:, :3].T, atol=1e-6)


def test_top_of_too_few_directions_is_smaller():
  matrix = np.outer(np.ones(4), [3.0, 4.0, 0.0])
  basis = subspaces.top(tf.constant(matrix), 2).numpy()
  np.testing.assert_allclose(basis @ basis.T, np.outer([.6, .8, 0], [.6, .8, 0]), atol=1e-12)
  np.testing.assert_array_equal(subspaces.top(tf.zeros([4, 3]), 2), np.zeros((3, 2)))


def test_flatten_round_trip():
  tree = {'a': tf.ones([2, 3]), 'b': tf.range(4.0)}
  vector = trees.flatten(tree)
  assert vector.shape == [10]
  tf.nest.map_structure(np.testing.assert_array_equal, trees.unflatten(vector, tree), tree)


# Constraint sets.


@pytest.mark.parametrize('spread', [0.0, 1.0, 4.0])
def test_weighted_ball_is_the_nearest_point_in_its_metric(spread):
  for seed in range(5):
    rng = np.random.default_rng(seed)
    h, y = 10**rng.uniform(-spread, spread, size=6), 3 * rng.normal(size=6)
    x = constraints.into_ball_weighted(0.8, tf.constant(h), tf.constant(y)).numpy()
    np.testing.assert_allclose(x, convex.metric_ball(h, y, 0.8), rtol=1e-6, atol=1e-8)
    if spread == 1.0:
      nearest = optimize.minimize(
          lambda v: np.sum(h * (v - y)**2), np.zeros(6), jac=lambda v: 2 * h * (v - y),
          method='SLSQP', constraints={'type': 'ineq', 'fun': lambda v: 0.64 - v @ v},
          options={'ftol': 1e-14, 'maxiter': 300})
      np.testing.assert_allclose(x, nearest.x, atol=1e-4)


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
  limit = convex.metric_ball(h + 1e-10, y, 0.8)
  np.testing.assert_allclose(x, limit, atol=1e-5)
  assert np.linalg.norm(x) == pytest.approx(0.8)


def test_box_and_ball():
  y = (tf.constant([-3.0, 0.2]), tf.constant([5.0]))
  clipped = constraints.projection((-1, 2), None, None)(None, y)
  np.testing.assert_allclose(np.concatenate(clipped), [-1, 0.2, 2])
  for radius, expected in ((1.0, [0.6, 0.8]), (9.0, [3, 4])):
    np.testing.assert_allclose(constraints.into_ball_weighted(
        radius, tf.ones([2]), tf.constant([3.0, 4.0])), expected, rtol=1e-6)


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
  release = contract.Release((tf.ones([k], tf.float64),), tf.constant(1.0, tf.float64),
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
    optimum = optimize.minimize(lambda v: np.log(objective(np.exp(v))), np.zeros(5), tol=1e-10)
    best = np.exp(optimum.x)
    np.testing.assert_allclose(best / best[0], make(s) / make(s)[0], rtol=1e-3)


def test_ellipsoid_refuses_zero_stddevs():
  with pytest.raises(ValueError, match='`stddevs` must be positive'):
    rules.pagan_ellipsoid(np.array([1.0, 0.0]))
