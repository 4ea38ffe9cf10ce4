# SPDX-License-Identifier: Apache-2.0
"""The per-record map: radial clipping and the Euclidean projection, against SciPy."""

import numpy as np
import pytest
from scipy import optimize
import tensorflow as tf

from tfdp_adaptive import contract
from tfdp_adaptive.clipping import projection

EUCLIDEAN = contract.Ask('euclidean')


def tree(vector, dtype=tf.float64):
  vector = np.asarray(vector)
  return {'b': tf.constant(vector[:2], dtype), 'w': tf.constant(vector[2:].reshape(1, -1), dtype)}


def join(nest):
  return np.concatenate([np.ravel(leaf) for leaf in tf.nest.flatten(nest)])


def euclidean(scale, bound, x, dtype=tf.float64):
  """In the original space."""
  y = projection.euclidean(tree(scale, dtype), tf.constant(bound, dtype), tree(x, dtype))
  return join(y).astype(np.float64) / scale


def oracle(scale, bound, x):
  """The multiplier of the Lagrangian, bracketed and solved by Brent's method."""
  a = (scale / bound)**2

  def excess(log_lam):
    return np.log(np.sum(a * (x / (1 + np.exp(log_lam) * a))**2))

  if np.sum(a * x**2) <= 1:
    return x
  low, high = -60.0, 60.0
  while excess(high) > 0:
    high += 30
  lam = np.exp(optimize.brentq(excess, low, high, xtol=1e-14, rtol=1e-15))
  return x / (1 + lam * a)


@pytest.mark.parametrize('spread', [0.0, 1.0, 4.0])  # Decades between the axes.
@pytest.mark.parametrize('size', [0.1, 1.0, 1e3, 1e12])
def test_euclidean_equals_the_lagrangian(spread, size):
  for seed in range(5):
    rng = np.random.default_rng(seed)
    scale = 10**rng.uniform(-spread, spread, size=7)
    x = size * rng.normal(size=7) / scale
    np.testing.assert_allclose(
        euclidean(scale, 0.7, x), oracle(scale, 0.7, x), rtol=1e-7, atol=1e-12 * np.abs(x).max())


def test_euclidean_is_the_nearest_point():
  """A general solver finds nothing nearer in the ellipsoid."""
  for seed in range(5):
    rng = np.random.default_rng(seed)
    scale, x = rng.uniform(0.3, 3, size=5), 2 * rng.normal(size=5)
    y = euclidean(scale, 0.7, x)
    nearest = optimize.minimize(
        lambda v: np.sum((v - x)**2), np.zeros(5), jac=lambda v: 2 * (v - x), method='SLSQP',
        constraints={'type': 'ineq', 'fun': lambda v: 0.49 - np.sum((scale * v)**2)},
        options={'ftol': 1e-14, 'maxiter': 200})
    np.testing.assert_allclose(y, nearest.x, atol=1e-5)
    rescaled = join(projection.clip(tree(scale * x), tf.constant(0.7, tf.float64))) / scale
    assert np.linalg.norm(y - x) < np.linalg.norm(rescaled - x)


@pytest.mark.parametrize('spread', [0.0, 3.0, 6.0])
@pytest.mark.parametrize('size', [1e-3, 1.0, 1e6, 1e20])
def test_euclidean_in_single_precision(spread, size):
  for seed in range(5):
    rng = np.random.default_rng(seed)
    scale = (10**rng.uniform(-spread, spread, size=7)).astype(np.float32).astype(np.float64)
    x = (size * rng.normal(size=7) / scale).astype(np.float32).astype(np.float64)
    y = euclidean(scale, 0.7, x, tf.float32)
    assert np.linalg.norm(scale * y) <= 0.7 * (1 + 1e-6)
    if size * 10**spread < 1e25:  # Beyond, the multiplier overflows and the record counts as zero.
      np.testing.assert_allclose(scale * y, scale * oracle(scale, 0.7, x), atol=1e-5)


def test_the_bound_holds_where_newton_does_not_arrive():
  """After its sixteen steps this point is 900 times as far out as it may be."""
  scale = tf.constant([31433.137, 2.3989942e13, 3.124973e-10])
  x = tf.constant([0.072644889, 1.2105187e14, 1.2551495e14])
  y = projection.euclidean(scale, tf.constant(43.055553), x)
  assert np.linalg.norm(np.float64(y)) <= 43.055553 * (1 + 1e-6)


def test_euclidean_without_a_scale_is_clipping():
  x = tree(np.arange(7.0))
  bound = tf.constant(0.7, tf.float64)
  np.testing.assert_array_equal(
      join(projection.euclidean((), bound, x)), join(projection.clip(x, bound)))
  np.testing.assert_allclose(
      euclidean(np.ones(7), 0.7, np.arange(7.0)), join(projection.clip(x, bound)), rtol=1e-12)


@pytest.mark.parametrize('dtype', [tf.float32, tf.float64])
def test_clip_is_the_formula(dtype):
  rng = np.random.default_rng(0)
  for size in (1e-3, 0.1, 1.0, 1e10):
    x = size * rng.normal(size=7)
    norm = np.linalg.norm(x)
    expected = x if norm <= 0.7 else x * 0.7 / norm
    y = join(projection.clip(tree(x, dtype), tf.constant(0.7, dtype)))
    np.testing.assert_allclose(y, expected, rtol=1e-6 if dtype == tf.float32 else 1e-14)


def test_inside_is_left_alone_to_the_last_bit():
  x = tree(np.random.default_rng(0).normal(size=7), tf.float32)
  for ask in (EUCLIDEAN, contract.Ask()):
    kept = projection.project_record(ask, contract.Query(), tf.constant(10.0), x).total
    np.testing.assert_array_equal(join(kept), join(x))


def test_zero_stays_zero():
  for ask in (EUCLIDEAN, contract.Ask()):
    for scale in ((), tree(np.ones(7))):
      zero = projection.project_record(
          ask, contract.Query(scale), tf.constant(0.7, tf.float64), tree(np.zeros(7))).total
      np.testing.assert_array_equal(join(zero), np.zeros(7))


@pytest.mark.parametrize('ask', [EUCLIDEAN, contract.Ask()], ids=['euclidean', 'rescale'])
@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
def test_a_record_that_is_not_finite_is_no_record(ask, bad):
  x = np.ones(7)
  x[3] = bad
  for scale in ((), tree(np.full(7, 2.0))):
    total = projection.project_record(
        ask, contract.Query(scale), tf.constant(0.7, tf.float64), tree(x)).total
    np.testing.assert_array_equal(join(total), np.zeros(7))


@pytest.mark.parametrize('ask', [EUCLIDEAN, contract.Ask()], ids=['euclidean', 'rescale'])
def test_nothing_overflows(ask):
  """Finite records beyond the square root of the largest float, scaled up further."""
  bound = tf.constant(0.7)
  for x, s in ((3e34, 1e3), (3e38, 1.0), (1e30, 1e-30)):
    gradient = np.full(7, x)
    gradient[0] = 0
    total = join(projection.project_record(
        ask, contract.Query(tree(np.full(7, s), tf.float32)), bound,
        tree(gradient, tf.float32)).total)
    assert np.all(np.isfinite(total))
    assert np.linalg.norm(total) <= 0.7 * (1 + 1e-6)
    if x < 3e38 or ask is not EUCLIDEAN:  # There 1 / x underflows: the record counts as zero.
      assert np.linalg.norm(total) > 0.69
  # Where the scaled record itself overflows, it counts as zero.
  total = projection.project_record(
      ask, contract.Query(tree(np.full(7, 1e8), tf.float32)), bound,
      tree(np.full(7, 3e34), tf.float32)).total
  np.testing.assert_array_equal(join(total), np.zeros(7))


def test_square_is_of_the_clipped_record():
  statistic = contract.Statistic(True, None, None)
  sums = projection.project_record(
      contract.Ask(second=statistic), contract.Query(tree(np.full(7, 3.0))),
      tf.constant(0.7, tf.float64), tree(np.arange(7.0)))
  np.testing.assert_allclose(join(sums.square), join(sums.total)**2)
  assert np.sum(join(sums.square)) == pytest.approx(0.49)


@pytest.mark.thorough
def test_xla_and_vectorized():
  """As engines call it: mapped over records, with and without a compiler."""
  rng = np.random.default_rng(0)
  scale = rng.uniform(0.1, 10, size=7)
  records = 2 * rng.normal(size=(4, 7))

  def project(x):
    return tf.vectorized_map(
        lambda g: projection.project_record(
            EUCLIDEAN, contract.Query(tree(scale)), tf.constant(0.7, tf.float64),
            {'b': g[:2], 'w': g[tf.newaxis, 2:]}).total, x)

  expected = np.array([scale * oracle(scale, 0.7, x) for x in records])
  for jit in (False, True):
    total = tf.function(project, jit_compile=jit)(tf.constant(records))
    np.testing.assert_allclose(
        np.concatenate([total['b'], total['w'][:, 0]], 1), expected, rtol=1e-7)


@pytest.mark.parametrize('bad', [np.nan, np.inf])
@pytest.mark.parametrize('groups', [(), (0, 1)])
def test_a_record_that_is_not_finite_has_no_numbers(bad, groups):
  """Nor where another group is; a number of its own would still move the clip norm."""
  side = contract.SideQuery(2, lambda norm, clip: tf.stack(
      [norm * 0 + 1, clip * 0 + 1], -1) if not (
      groups) else tf.ones([2]), lambda sigma, size: (1.0, 1.0), of_groups=bool(groups))
  ask = contract.Ask(side_query=side, groups=groups)
  query = contract.Query(groups=contract.Groups(tf.ones([2]), tf.fill([2], 0.7)) if groups else ())
  numbers = lambda x: projection.project_record(
      ask, query, tf.constant(1.0), tree([3.0, x, 1.0], tf.float32)).side_sum
  np.testing.assert_array_equal(numbers(bad), [0, 0])
  np.testing.assert_array_equal(numbers(2.0), [1, 1])


def test_unknown_projection():
  with pytest.raises(ValueError, match='`projection` must be one of'):
    projection.project_record(
        contract.Ask('oblique'), contract.Query(), tf.constant(1.0), tf.ones([2]))


@pytest.mark.parametrize('bound', [1e-30, 1e-13, 0.7, 1e30])
def test_clipping_equals_its_formula(bound):
  """Of records of every size a float32 has; nothing is left of those that are not finite."""
  rng = np.random.default_rng(0)
  run = tf.function(lambda record: projection.clip(record, bound), autograph=False)
  for size in (0.0, 1e-45, 1e-38, 1e-30, 1e-12, 1.0, 1e12, 1e18, 1e20, 3e38, np.inf, np.nan):
    record = tree(np.float32(size) * rng.uniform(0.5, 1, size=6), tf.float32)
    clipped, exact = join(run(record)), join(record).astype(np.float64)
    assert np.linalg.norm(clipped.astype(np.float64)) <= bound * (1 + 1e-5)
    if not np.isfinite(size):
      assert not np.any(clipped)
    else:
      norm = np.linalg.norm(exact)
      np.testing.assert_allclose(
          clipped, exact * min(1, bound / norm) if norm else exact, rtol=1e-5, atol=2e-38)
