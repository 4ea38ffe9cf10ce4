# SPDX-License-Identifier: Apache-2.0
"""How far one record moves a release: searched over neighbouring batches, bound and attained.

Distances are joint and in units of the noise: sqrt(|d mean|^2 / std_mean^2 +
|d value|^2 / std_value^2) for a noise multiplier of one. A release costs what
DP-SGD costs if, and only if, no pair of neighbours exceeds 1.
"""

import functools
import importlib
import math

import loop
import numpy as np
import pytest
from scipy import optimize
import tensorflow as tf

from tfdp_adaptive import contract
from tfdp_adaptive.clipping import projection
from tfdp_adaptive.rules import statistics

# The package has a function of the same name.
noisy_adagrad = importlib.import_module('tfdp_adaptive.rules.noisy_adagrad')

DIMENSION = 3
PAIRS = 400


def neighbours(rng, size, adjacency, clip, pairs=PAIRS):
  """Two [pairs, size, d] arrays of clipped records that differ in the first one.

  A quarter each: random, nearly equal, equal, and equal and one-sparse.
  """
  records = rng.normal(size=(pairs, size, DIMENSION))
  quarter = pairs // 4
  records[quarter:] = records[quarter:, :1] + 0.3 * records[quarter:]
  records[2 * quarter:] = records[2 * quarter:, :1]
  records[3 * quarter:] = np.sign(records[3 * quarter:]) * [1, 0, 0]
  records *= clip / np.linalg.norm(records, axis=-1, keepdims=True)
  records[:quarter] *= rng.uniform(0.3, 1, size=(quarter, size, 1))
  other = records.copy()
  if adjacency == 'replace':
    direction = rng.normal(size=(pairs, DIMENSION))
    direction *= clip / np.linalg.norm(direction, axis=-1, keepdims=True)
    opposite = rng.random(pairs) < 0.5
    other[:, 0] = np.where(opposite[:, np.newaxis], -records[:, 0], direction)
  else:
    other[:, 0] = 0  # Added, removed or zeroed: the same sums.
  return records, other


@functools.lru_cache(maxsize=None)
def batched(measure):
  """`measure` over a leading axis, traced once per shape."""

  @tf.function(autograph=False)
  def values(means, squares, clip):
    return tf.vectorized_map(lambda xs: measure(xs[0], xs[1], clip, ())[0], (means, squares))

  return values


def measured(statistic, records, divisor, clip):
  """([pairs, d] mean, [pairs, d] value) of the statistic, by its own code."""
  mean, square = records.sum(1) / divisor, (records**2).sum(1) / divisor
  value = batched(statistic.measure)(
      tf.constant(mean), tf.constant(square), tf.constant(clip, tf.float64))
  return mean, value.numpy()


def distances(statistic, pair, divisor, clip, stds):
  (m, v), (m_, v_) = (measured(statistic, records, divisor, clip) for records in pair)
  return np.sqrt(np.sum((m - m_)**2, -1) / stds[0]**2 + np.sum((v - v_)**2, -1) / stds[1]**2)


def worst(statistic, size, divisor, adjacency, clip, stds=None, rounds=30):
  """The largest joint distance found: many starts, the better half mutated."""
  rng = np.random.default_rng(size)
  stds = statistic.stddevs(clip, divisor, adjacency) if stds is None else stds
  left, right = neighbours(rng, size, adjacency, clip)
  best = distances(statistic, (left, right), divisor, clip, stds)
  for step in range(rounds):
    keep = np.argsort(best)[::-1][:PAIRS // 4]
    left, right = (np.concatenate([x[keep]] * 4) for x in (left, right))
    moves = rng.normal(size=left.shape) * 0.3 * clip * 0.9**step
    moves[:len(keep)] = 0
    left, shared = project(left + moves, clip), project(right + moves, clip)
    shared[:, 0] = right[:, 0]
    if adjacency == 'replace':
      shared[:, 0] = project(right[:, 0] + rng.permutation(moves[:, 0]), clip)
      shared[:len(keep), 0] = right[:len(keep), 0]
    shared[:, 1:] = left[:, 1:]
    right = shared
    best = distances(statistic, (left, right), divisor, clip, stds)
  return best.max()


def project(x, clip):
  return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True) / clip, 1)


SQUARE_OF_MEAN = statistics.square_of_mean()
MEAN_OF_SQUARES = statistics.mean_of_squares(0.3)
JOINT_RECORDS = statistics.joint_mean_of_squares()
JOINT_MEAN = statistics.joint_square_of_mean()


# (statistic, batch size, divisor, adjacency, clip norm, the bound is attained).
@pytest.mark.pitfall(
    'The noise of second moments is too small for batches of some size.',
    severity='critical', stops='the sensitivity holds for every batch size, which a search checks')
@pytest.mark.parametrize('statistic, size, divisor, adjacency, clip, attained', [
    (SQUARE_OF_MEAN, 4, 4, 'zero_out', 1.0, True),
    (SQUARE_OF_MEAN, 4, 4, 'zero_out', 0.1, True),  # Units cancel.
    (SQUARE_OF_MEAN, 2, 2, 'add_remove', 3.0, True),
    (SQUARE_OF_MEAN, 3, 4, 'add_remove', 1.0, False),  # Poisson: fewer than expected,
    (SQUARE_OF_MEAN, 6, 4, 'add_remove', 1.0, False),  # more,
    (SQUARE_OF_MEAN, 12, 4, 'add_remove', 1.0, False),  # many more.
    (SQUARE_OF_MEAN, 4, 4, 'replace', 1.0, True),
    (SQUARE_OF_MEAN, 1, 1, 'zero_out', 1.0, False),
    (SQUARE_OF_MEAN, 3, 1, 'add_remove', 1.0, False),
    (statistics.square_of_mean(0.8), 4, 4, 'zero_out', 1.0, True),
    (MEAN_OF_SQUARES, 4, 4, 'zero_out', 1.0, True),
    (MEAN_OF_SQUARES, 12, 4, 'add_remove', 0.5, True),  # The others do not matter.
    (MEAN_OF_SQUARES, 4, 4, 'replace', 1.0, False),  # Two suprema at different pairs.
    (JOINT_RECORDS, 4, 4, 'replace', 1.0, True),
    (JOINT_RECORDS, 4, 4, 'replace', 0.2, True),
    (JOINT_RECORDS, 6, 4, 'add_remove', 2.0, True),
    (statistics.joint_mean_of_squares(2.0), 4, 4, 'replace', 1.0, True),
    (JOINT_MEAN, 4, 4, 'replace', 1.0, True),
    (JOINT_MEAN, 4, 4, 'zero_out', 0.3, True),
    (JOINT_MEAN, 9, 4, 'add_remove', 1.0, False),
    (JOINT_MEAN, 1, 1, 'replace', 1.0, False),
    (JOINT_MEAN, 3, 1, 'replace', 1.0, False),  # More records than expected,
    (JOINT_MEAN, 5, 1.2, 'replace', 0.4, False),  # under every adjacency,
    (statistics.joint_square_of_mean(3.0), 4, 0.6, 'replace', 1.0, False),
    (JOINT_MEAN, 3, 0.5, 'add_remove', 1.0, False),  # Expected batch below one record.
])
def test_bound_holds(statistic, size, divisor, adjacency, clip, attained):
  largest = worst(statistic, size, float(divisor), adjacency, clip)
  assert largest <= 1 + 1e-9
  assert largest > (1 - 1e-4 if attained else 0.3)


def test_square_sensitivity_of_a_full_batch_is_2b_minus_1():
  for b in (2.0, 4.0, 100.0):
    assert statistics.square_sensitivity(1 / b) == pytest.approx((2 * b - 1) / b**2, rel=1e-12)
  assert statistics.square_sensitivity(1.0) == pytest.approx(math.sqrt(1.5))
  assert statistics.square_sensitivity(2 / 4) == pytest.approx(4 * (4 - 1) / 4**2)


@pytest.mark.parametrize('distance', [0.1, 0.5, 0.66, 0.67, 0.9, 1.2, 1.41, 1.5, 2.0])
def test_square_sensitivity_by_search(distance):
  """(4.3) itself: sup of |x^2 - y^2| in the unit ball, in every branch."""
  assert _supremum(distance, 0.0, 1.0) == pytest.approx(
      statistics.square_sensitivity(distance), rel=1e-5)


@pytest.mark.parametrize('lam', [0.25, 0.5, 2.0])
@pytest.mark.parametrize('distance', [0.3, 0.67, 1.0, 1.6, 2.0])
def test_joint_sensitivity_by_search(distance, lam):
  """(5.1) itself, in every branch."""
  assert _supremum(distance, 1.0, lam) == pytest.approx(
      statistics.joint_sensitivity(distance, lam), rel=1e-5)


def _supremum(distance, first, lam):
  """max of sqrt(first |x - y|^2 + lam |x^2 - y^2|^2) in the unit ball, |x - y| <= distance."""
  rng = np.random.default_rng(0)

  def gap(v):
    x, y = v[:DIMENSION], v[DIMENSION:]
    return -(first * np.sum((x - y)**2) + lam * np.sum((x**2 - y**2)**2))

  def room(v):
    x, y = v[:DIMENSION], v[DIMENSION:]
    return np.array([1 - x @ x, 1 - y @ y, distance**2 - np.sum((x - y)**2)])

  best = 0.0
  for _ in range(40):
    x, step = rng.normal(size=(2, DIMENSION))
    x *= rng.uniform(0.3, 0.9) / np.linalg.norm(x)
    step *= 0.5 * min(distance, 0.1) / np.linalg.norm(step)
    optimum = optimize.minimize(gap, np.concatenate([x, x + step]), method='SLSQP',
                                options={'maxiter': 300, 'ftol': 1e-12},
                                constraints={'type': 'ineq', 'fun': room})
    if np.all(room(optimum.x) > -1e-7):
      best = max(best, -optimum.fun)
  return math.sqrt(best)


# The wrong variants: each is exceeded, so the search can tell.


def test_2b_minus_1_without_projection_fails_under_poisson():
  unprojected = SQUARE_OF_MEAN._replace(
      measure=lambda mean, square, clip, secret: (tf.square(mean), secret))
  assert worst(unprojected, 4, 4.0, 'add_remove', 1.0) <= 1 + 1e-9  # Full batches are fine,
  assert worst(unprojected, 6, 4.0, 'add_remove', 1.0) > 1.2  # larger ones are not,
  printed = statistics.square_of_mean(printed_2B_plus_1=True)
  assert worst(unprojected, 8, 4.0, 'add_remove', 1.0,
               printed.stddevs(1.0, 4.0, 'add_remove')) > 1.2  # nor does 2 B + 1 help.


def test_smaller_noise_than_2b_minus_1_fails():
  std_mean, std_value = SQUARE_OF_MEAN.stddevs(1.0, 4.0, 'zero_out')
  assert worst(SQUARE_OF_MEAN, 4, 4.0, 'zero_out', 1.0, (std_mean, 0.9 * std_value)) > 1.05


def test_free_second_moment_fails_for_squares_of_means():
  """lambda = 1 / (2 zeta^2) with S = 2 zeta / B is for squares of records alone."""
  free = JOINT_RECORDS.stddevs(1.0, 4.0, 'replace')
  np.testing.assert_allclose(free, (0.5, 0.5 * math.sqrt(2)))
  assert worst(JOINT_MEAN, 4, 4.0, 'replace', 1.0, free) > 1.4


def test_free_second_moment_fails_under_zero_out():
  """There one record's sensitivity is zeta / B for the mean alone."""
  std_mean, std_value = JOINT_RECORDS.stddevs(1.0, 4.0, 'replace')
  assert worst(JOINT_RECORDS, 4, 4.0, 'zero_out', 1.0, (std_mean / 2, std_value / 2)) > 1.2


def test_printed_bound_on_the_joint_scale_fails_for_small_clip_norms():
  """c = 1 / (2 zeta^2) is lambda = 1 / (4 zeta^4): more than 1 / (2 zeta^2) at zeta = 0.4."""
  clip = 0.4
  lam = 1 / (4 * clip**4)
  stds = 2 * clip / 4, 2 * clip / 4 / math.sqrt(lam)
  assert worst(JOINT_RECORDS, 4, 4.0, 'replace', clip, stds) > 1.05


def test_replace_costs_twice_zero_out():
  stds = MEAN_OF_SQUARES.stddevs(1.0, 4.0, 'zero_out')
  assert worst(MEAN_OF_SQUARES, 4, 4.0, 'replace', 1.0, stds) > 1.4


def test_printed_noise_needs_zero_out():
  with pytest.raises(ValueError, match="'zero_out' or 'add_remove'"):
    statistics.square_of_mean(printed_2B_plus_1=True).stddevs(1.0, 4.0, 'replace')


# Noisy AdaGrad: the secret root over several steps.


def roots(statistic, rows):
  secret = statistic.init((tf.TensorSpec([DIMENSION], tf.float64),))
  for row in rows:
    value, secret = statistic.measure((tf.constant(row),), (), 1.0, secret)
  return np.ravel(value)


@pytest.mark.parametrize('diagonal', [False, True])
@pytest.mark.parametrize('participations', [1, 2])
def test_running_root_bound(diagonal, participations):
  rng = np.random.default_rng(participations)
  statistic = noisy_adagrad.running_root(participations, diagonal)
  mean_std, bound = statistic.stddevs(1.0, 4.0, 'zero_out')
  assert mean_std == 0.25
  assert bound == pytest.approx(0.25 * math.sqrt(participations * (1 if diagonal else 2)))
  largest = 0.0
  for trial in range(60):
    rows = rng.normal(size=(4, DIMENSION)) * rng.choice([0.02, 0.3, 2.0], size=(4, 1))
    rows[:, 2] *= rng.choice([0, 1])
    other = rows.copy()
    changed = rng.choice(4, participations, replace=False)
    step = rng.normal(size=(participations, DIMENSION))
    other[changed] += 0.25 * step / np.linalg.norm(step, axis=1, keepdims=True)
    if trial % 2:  # Small turns of the only rows there are come close to the bound.
      rows[:], other[:] = 0, 0
      rows[changed, 0], other[changed, 0] = 20.0, 20.0
      other[changed, 1] = 0.25 if not diagonal else 0.0
      if diagonal:
        rows[changed, 0], other[changed, 0] = 0.0, 0.25
    largest = max(largest, np.linalg.norm(roots(statistic, rows) - roots(statistic, other)))
  assert largest <= bound * (1 + 1e-6)
  assert largest > 0.99 * bound  # sqrt(2) for the matrix is attained in the limit.


def test_running_root_stays_exact_in_single_precision():
  """Rounding may not move it by more than a fraction of what a record does."""
  rng = np.random.default_rng(0)
  size, steps = 30, 20
  statistic = noisy_adagrad.running_root(1)
  spec = (tf.TensorSpec([size], tf.float32),)
  secret = statistic.init(spec)
  rows = rng.normal(size=(steps, size)).astype(np.float32)
  for row in rows:
    value, secret = statistic.measure((tf.constant(row),), (), 1.0, secret)
  assert value.dtype == tf.float32 and secret.dtype == tf.float64
  _, s, v = np.linalg.svd(rows.astype(np.float64), full_matrices=False)
  np.testing.assert_allclose(value, (v.T * s) @ v, atol=2e-6 * s[0])


def test_full_matrix_is_refused_for_many_parameters():
  statistic = noisy_adagrad.running_root(1)
  with pytest.raises(ValueError, match='at most 4096 parameters. Received: 5000'):
    statistic.specs((tf.TensorSpec([5000], tf.float32),))
  assert noisy_adagrad.running_root(1, diagonal=True).specs(loop.SPECS) is loop.SPECS



# Scaled geometries: what the per-record map returns, in the space the noise is added.


@pytest.mark.parametrize('kind', ['rescale', 'euclidean'])
def test_records_move_the_scaled_sum_by_at_most_the_clip_norm(kind):
  rng = np.random.default_rng(0)
  ask = contract.Ask(kind)
  scale = loop.split(rng.uniform(0.1, 30, size=loop.SIZE))
  for size in (1e-3, 1.0, 1e4, 1e150):
    gradient = loop.split(size * rng.normal(size=loop.SIZE))
    total = projection.project_record(
        ask, contract.Query(scale), tf.constant(0.7, tf.float64), gradient)
    norm = np.linalg.norm(loop.join(total.total))
    assert norm <= 0.7 * (1 + 1e-12)
    assert size < 1 or norm > 0.699
