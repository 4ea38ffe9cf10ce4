# SPDX-License-Identifier: Apache-2.0
"""Second moments in one release: sums, sensitivity, noise, cost, and refusals."""

import dataclasses
import math

import numpy as np
import pytest
from scipy import optimize
from scipy import stats
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive.estimates import moments as moments_lib

RNG = np.random.default_rng(0)
LITTLE = dict(noise_multiplier=1e-9, target_delta=1e-3)


def clipped(rows, bound):
  norm = np.linalg.norm(rows, axis=-1, keepdims=True)
  return rows * np.minimum(1, bound / np.maximum(norm, 1e-300))


def vector(found, share, norm, target_bound):
  """The released vector: what has sensitivity one under zero_out."""
  size = len(found.covariance)
  above = found.covariance[np.triu_indices(size, 1)] * math.sqrt(2)
  s = np.concatenate([np.diag(found.covariance), above]) / norm**2
  if found.cross is None:
    return s
  return np.concatenate([math.sqrt(share) * s,
                         math.sqrt(1 - share) * found.cross.ravel() / (norm * target_bound)])


@pytest.mark.parametrize('views', [0, 3])
def test_the_sums_are_those_of_numpy(views):
  x = 2 * RNG.normal(size=[9000, views, 4] if views else [9000, 4])
  y = RNG.integers(0, 3, size=9000)
  x[5] = np.nan
  x[6], x[7] = 1e200, 1e-200
  found = tfdp.estimates.second_moments(x, y, bound=1.5, constant=.3, **LITTLE)
  rows = clipped(np.nan_to_num(x[:, :1] if views else x[:, None]), 1.5)
  rows = clipped(np.stack([np.nan_to_num(x[i]) for i in range(9000)]).reshape(9000, -1, 4), 1.5)
  rows[6] = .75  # 1.5 in the direction of ones.
  rows = np.concatenate([rows, np.full((*rows.shape[:2], 1), .3)], 2)
  rows[5] = 0
  np.testing.assert_allclose(
      found.covariance, np.einsum('nvi,nvj->ij', rows, rows) / rows.shape[1], atol=1e-5)
  np.testing.assert_allclose(found.cross, np.einsum('nvi,nk->ik', rows, np.eye(3)[y])
                             / rows.shape[1], atol=1e-5)


def test_numbers_are_clipped_to_their_bound_and_features_may_stand_alone():
  x, y = RNG.normal(size=[50, 3]), 5 * RNG.normal(size=50)
  found = tfdp.estimates.second_moments(x, y, target_bound=.5, **LITTLE)
  np.testing.assert_allclose(
      found.cross, clipped(x, 1).T @ np.clip(y, -.5, .5)[:, None], atol=1e-6)
  alone = tfdp.estimates.second_moments(x, **LITTLE)
  assert alone.cross is None and alone.cross_stddev == 0
  np.testing.assert_allclose(alone.covariance, found.covariance, atol=1e-6)


def distance(pair, adjacency, share, one_hot, constant):
  """By how much the vector moves between data sets that differ in one record."""
  (x, y), (u, v) = pair
  same = dict(bound=1.0, constant=constant, target_bound=2.0, share=share, seed=0,
              classes=2 if one_hot else None, **LITTLE)
  norm, most = math.hypot(1.0, constant), 1.0 if one_hot else 2.0
  first, second = (
      vector(tfdp.estimates.second_moments(*data, **same), share, norm, most)
      for data in ((x, y), (u, v)))
  if adjacency == 'replace':
    return np.linalg.norm(first - second)
  return np.linalg.norm(first - vector(tfdp.estimates.second_moments(
      np.full_like(x, np.nan), y, **same), share, norm, most))


@pytest.mark.parametrize('adjacency, share', [
    ('zero_out', .65), ('replace', .65), ('replace', .1), ('replace', .95)])
def test_no_pair_of_records_is_further_apart_than_the_sensitivity(adjacency, share):
  """A search over pairs of unit records finds the stated distance, and nothing above it."""
  a, b = math.sqrt(share), math.sqrt(1 - share)
  stated = moments_lib._sensitivity(adjacency, a, b)

  def moved(angles):
    x, u, y, v = (np.array([math.cos(t), math.sin(t)]) for t in angles)
    if adjacency != 'replace':
      u, v = np.zeros(2), np.zeros(2)
    return math.sqrt(share * np.sum((np.outer(x, x) - np.outer(u, u))**2)
                     + (1 - share) * np.sum((np.outer(x, y) - np.outer(u, v))**2))

  found = max(-optimize.minimize(
      lambda t: -moved(t), RNG.uniform(0, 6.3, 4), method='Nelder-Mead',
      options=dict(xatol=1e-9, fatol=1e-12)).fun for _ in range(8))
  assert found <= stated + 1e-9
  assert found == pytest.approx(stated, rel=1e-5)  # It is reached.


@pytest.mark.parametrize('one_hot, constant', [(True, 0.0), (True, .3), (False, .5)])
@pytest.mark.parametrize('adjacency', ['zero_out', 'replace'])
def test_the_released_vector_moves_by_no_more(adjacency, one_hot, constant):
  stated = moments_lib._sensitivity(adjacency, math.sqrt(.65), math.sqrt(.35))
  largest = 0.0
  for _ in range(60):
    records = []
    for _ in range(2):
      x = RNG.normal(size=[1, 3]) * 10.0**RNG.integers(-1, 5)
      y = RNG.integers(0, 2, size=1) if one_hot else 10.0**RNG.integers(0, 3) * RNG.normal(
          size=[1, 2])
      records.append((x, y))
    largest = max(largest, distance(records, adjacency, .65, one_hot, constant))
  assert .6 * stated < largest <= stated * (1 + 1e-6)


def p_values(sample, std):
  """Two-sided p-value of the variance of a normal sample."""
  p = stats.chi2.cdf(np.sum(np.square(sample)) / std**2, len(sample))
  return 2 * min(p, 1 - p)


@pytest.mark.parametrize('adjacency', ['zero_out', 'replace', 'add_remove'])
def test_the_noise_is_as_stated_and_other_noise_is_noticed(adjacency):
  d, k, norm = 150, 100, math.hypot(2.0, .5)
  found = tfdp.estimates.second_moments(
      np.full([8, d - 1], np.nan), np.zeros([8, k]), bound=2.0, constant=.5, target_bound=3.0,
      noise_multiplier=1.5, target_delta=1e-3, adjacency=adjacency, seed=1,
      population_size=8 if adjacency == 'add_remove' else None)
  distance_ = moments_lib._sensitivity(adjacency, math.sqrt(.65), math.sqrt(.35))
  std = 1.5 * distance_
  of_s, of_t = std * norm**2 / math.sqrt(.65), std * norm * 3.0 / math.sqrt(.35)
  above = found.covariance[np.triu_indices(d, 1)]
  assert found.stddev == pytest.approx(of_s / math.sqrt(2))
  assert found.cross_stddev == pytest.approx(of_t)
  np.testing.assert_array_equal(found.covariance, found.covariance.T)
  for sample, true in ((above, of_s / math.sqrt(2)), (np.diag(found.covariance), of_s),
                       (found.cross.ravel(), of_t)):
    assert p_values(sample, true) > 1e-3
    assert p_values(sample, true * 1.4) < 1e-6 and p_values(sample, true / 1.4) < 1e-6
  assert p_values(above, of_s / math.sqrt(2) * 1.05) < 1e-6


def test_no_two_releases_have_the_same_noise():
  x = RNG.normal(size=[20, 2])
  one, other = (tfdp.estimates.second_moments(x, noise_multiplier=1.0, target_delta=1e-3)
                for _ in range(2))
  assert not np.any(one.covariance == other.covariance)


@pytest.mark.parametrize('adjacency', ['zero_out', 'replace', 'add_remove'])
def test_the_cost_is_that_of_one_gaussian(adjacency):
  x = RNG.normal(size=[1000, 2])
  more = dict(population_size=1100) if adjacency == 'add_remove' else {}
  found = tfdp.estimates.second_moments(
      x, target_epsilon=.7, target_delta=1e-5, adjacency=adjacency, **more)
  assert .69 < found.ledger.epsilon(1e-5) <= .7
  sigma = found.plan.noise_multiplier
  delta = stats.norm.cdf(.5 / sigma - .7 * sigma) - math.exp(.7) * stats.norm.cdf(
      -.5 / sigma - .7 * sigma)
  assert delta == pytest.approx(1e-5, rel=.05)
  assert found.plan.noise_stddev == pytest.approx(sigma * moments_lib._sensitivity(
      adjacency, 1.0, 0.0))
  assert '1000' not in found.ledger.statement() or adjacency != 'add_remove'


def test_inputs_for_kfc_have_the_second_moments_that_were_released():
  x = RNG.normal(size=[5000, 4]) * [1, .5, .2, .1]
  found = tfdp.estimates.second_moments(x, bound=2.0, constant=.3, **LITTLE)
  public = found.public_data(classes=3)
  inputs, labels = public()
  np.testing.assert_allclose(
      inputs.T @ inputs / len(inputs), found.covariance[:4, :4] / 5000, atol=1e-6)
  assert set(labels) == {0, 1, 2} and public.ledger is found.ledger


@pytest.mark.parametrize('power, floor', [(.3, .01), (.5, 1e-6), (0, 1.0)])
def test_whitening_is_its_formula(power, floor):
  x = RNG.normal(size=[5000, 4]) * [.5, .2, .1, .05] + [.3, 0, 0, .1]
  x /= np.maximum(np.linalg.norm(x, axis=1, keepdims=True) / 2, 1)
  found = tfdp.estimates.second_moments(x, bound=2.0, constant=.5, **LITTLE)
  base = found.whitening(power, floor)
  covariance = np.cov(x.T, bias=True)
  values, vectors = np.linalg.eigh(covariance)
  rows = (x - x.mean(0)) @ (vectors * (values / values.sum() + floor)**-power) @ vectors.T
  rows /= np.linalg.norm(rows, axis=1, keepdims=True)
  np.testing.assert_allclose(base.predict(x.astype(np.float32), verbose=0), rows, atol=1e-3)
  features = tfdp.features(base, x.astype(np.float32))
  assert features.ledger.entries == found.ledger.entries and not base.trainable_variables


def test_whitening_leaves_out_eigenvalues_of_noise():
  """One direction stands out of the noise, which moves its eigenvalue up; 99 do not."""
  size, count, strong, weak = 100, 20_000, .2, .002
  x = np.random.default_rng(0).normal(size=[count, size]) * np.sqrt(weak)
  x[:, 0] *= np.sqrt(strong / weak)
  noise = dict(noise_multiplier=55.0, bound=2.0, constant=.5)
  stddev = 55 * 4.25 / np.sqrt(2) / count  # Of the noise of the covariance, above its diagonal.
  assert 2 * stddev * np.sqrt(size) > 30 * weak and stddev**2 * size > .15 * strong**2
  found = []
  for seed in range(10):
    base = tfdp.estimates.second_moments(x, seed=seed, **noise).whitening(.5, .01)
    total = 1 / np.square(np.linalg.svd(base.get_weights()[0])[1]) - .01
    np.testing.assert_allclose(total[:-1], 0, atol=1e-6)
    found.append(total[-1])
  release = [tfdp.estimates.second_moments(x, seed=seed, **noise) for seed in range(10)]
  traces = [np.trace(one.covariance[:-1, :-1]) * .25 / one.covariance[-1, -1] for one in release]
  assert np.mean(np.multiply(found, traces)) == pytest.approx(strong, rel=.1)
  # As it is released, the eigenvalue is a sixth larger.
  values = [np.linalg.eigvalsh(one.covariance[:-1, :-1])[-1] / count for one in release]
  assert np.mean(values) > 1.12 * strong


def test_a_head_on_whitened_features_has_the_cost_of_the_release():
  x, y = RNG.normal(size=[200, 3]).astype(np.float32), RNG.integers(2, size=200)
  found = tfdp.estimates.second_moments(
      x, bound=2.0, constant=.5, noise_multiplier=5.0, target_delta=1e-3)
  plan = tfdp.PrivacyPlan.calibrate(
      target_epsilon=2.0, target_delta=1e-3, population_size=200, batch_size=20, steps=3,
      l2_norm_clip=1.0, spent=found.ledger)
  head = tfdp.make_private(tf.keras.Sequential([
      tf.keras.layers.Input([3]), tf.keras.layers.Dense(2)]))
  head.compile(tfdp.DPSGD(.1, plan=plan), tf.keras.losses.SparseCategoricalCrossentropy(
      from_logits=True))
  base = found.whitening()
  head.fit(plan.batches(tfdp.features(base, (x, y))), verbose=0)
  assert len(head.ledger.entries) == 2
  assert plan.epsilon() < head.ledger.epsilon() == pytest.approx(2.0, rel=.01)
  whole = tfdp.join(base, head)
  assert whole.ledger.epsilon() == pytest.approx(head.ledger.epsilon())
  np.testing.assert_allclose(
      whole.predict(x, verbose=0), head.predict(base.predict(x, verbose=0), verbose=0), rtol=1e-5)


@pytest.mark.parametrize('arguments, message', [
    (dict(power=-.1), '`power` must be in'), (dict(power=.6), '`power` must be in'),
    (dict(power=float('nan')), '`power` must be in'), (dict(floor=0), '`floor` must be positive')])
def test_whitening_that_is_refused(arguments, message):
  found = tfdp.estimates.second_moments(
      np.ones([50, 2]), bound=2.0, constant=.5, seed=0, **LITTLE)
  with pytest.raises(ValueError, match=message):
    found.whitening(**arguments)


@pytest.mark.parametrize('changes, message', [
    (dict(constant=0.0), 'needs the mean'),
    (dict(covariance=np.diag([-1.0, -1.0, 1.0])), 'positive number of records and variance'),
    (dict(covariance=-np.eye(3)), 'positive number of records and variance')])
def test_releases_that_give_no_whitening(changes, message):
  found = tfdp.estimates.second_moments(
      np.ones([50, 2]), bound=2.0, constant=.5, seed=0, **LITTLE)
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(found, **changes).whitening()


def test_whitening_keeps_its_cost_in_a_file_and_in_front_of_a_head(tmp_path):
  x = RNG.normal(size=[200, 3]).astype(np.float32)
  found = tfdp.estimates.second_moments(
      x, bound=2.0, constant=.5, noise_multiplier=5.0, target_delta=1e-3)
  base = found.whitening()
  base.save(str(tmp_path / 'base.keras'))
  again = tf.keras.models.load_model(str(tmp_path / 'base.keras'))
  np.testing.assert_allclose(again.predict(x, verbose=0), base.predict(x, verbose=0), rtol=1e-5)
  whole = tfdp.make_private(tf.keras.Sequential([
      tf.keras.layers.Input([3]), again, tf.keras.layers.Dense(2)]))
  for ledger in (tfdp.features(base, x).ledger, tfdp.features(again, x).ledger, whole.ledger):
    assert ledger.epsilon(1e-3) == pytest.approx(found.ledger.epsilon(1e-3))


@pytest.mark.parametrize('arguments, message', [
    (dict(noise_multiplier=None), 'One of `noise_multiplier` and `target_epsilon`'),
    (dict(target_epsilon=1.0), 'One of `noise_multiplier` and `target_epsilon`'),
    (dict(noise_multiplier=0), 'without noise'),
    (dict(noise_multiplier=-1.0), 'noise_multiplier'),
    (dict(bound=0), '`bound` must be positive'),
    (dict(bound=float('nan')), '`bound` must be positive'),
    (dict(constant=-1), '`constant`'),
    (dict(share=1.0), '`share` must be in'),
    (dict(adjacency='other'), 'adjacency'),
    (dict(adjacency='add_remove'), 'number of records is private'),
    (dict(population_size=10), '`population_size` must be the number of records'),
    (dict(targets=np.arange(3)), 'one row for each record'),
    (dict(targets=np.array([0, 1, 2, -1])), r'classes in \[0, classes\)'),
    (dict(targets=np.array([0, 1, 2, 3]), classes=3), r'classes in \[0, classes\)'),
    (dict(targets=np.array(['a'] * 4)), r'`targets` must be \[n\] classes'),
    (dict(targets=np.array([0., 1., 2., 1.]), classes=3), r'which are integers'),
    (dict(targets=np.eye(4), classes=4), r'without `classes`'),
    (dict(features={'a': np.zeros([4, 2]), 'b': np.zeros([4, 2])}), 'in one array'),
    (dict(features=(np.zeros([4, 2]), np.zeros(4, int), np.ones(4))), 'without sample weights'),
    (dict(features=({'a': np.zeros([4, 2])}, np.zeros(4, int))), 'in one array'),
    (dict(features=np.zeros([4, 2, 2, 2])), r'`features` must be \[n, d\]')])
def test_refusals(arguments, message):
  given = dict(dict(features=np.zeros([4, 2]), noise_multiplier=1.0, target_delta=1e-3),
               **arguments)
  with pytest.raises((ValueError, tfdp.PrivacyError), match=message):
    tfdp.estimates.second_moments(**given)
