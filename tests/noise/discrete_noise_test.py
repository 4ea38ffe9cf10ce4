# SPDX-License-Identifier: Apache-2.0
"""Discrete Gaussian noise: the law of the draws, and how far a record moves what is rounded."""

import random

import numpy as np
import pytest
from scipy import stats
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import contract
from tfdp_adaptive import mechanisms
from tfdp_adaptive import privatizer as privatizer_lib
from tfdp_adaptive.noise import discrete

ROUNDING = mechanisms.IndependentGaussian(rounding=2**-7)


def coins(seed):
  """A source of bytes whose draws are the same in every run of the tests."""
  return random.Random(seed).randbytes


def masses(sigma, reach):
  """Exact probabilities of -reach, ..., reach."""
  weight = lambda n: np.exp(-n**2 / (2 * sigma**2))
  return weight(np.arange(-reach, reach + 1)) / weight(np.arange(-60 * sigma, 60 * sigma + 1)).sum()


@pytest.mark.parametrize('sigma', [1, 2, 5])
def test_draws_have_the_law_and_no_other(sigma):
  count, reach = 60_000, 3 * sigma
  draws = discrete.discrete_gaussian(sigma, count, coins(sigma))
  seen = np.array([np.sum(draws == n) for n in range(-reach, reach + 1)])
  p_value = lambda p: stats.chisquare(
      np.append(seen, count - seen.sum()), count * np.append(p, 1 - p.sum())).pvalue
  assert p_value(masses(sigma, reach)) > 1e-3
  for wrong in (0.97, 1.03):
    assert p_value(masses(wrong * sigma, reach)) < 1e-6
  # Rounded normals are not it, either.
  edges = stats.norm(0, sigma).cdf(np.arange(-reach, reach + 2) - .5)
  assert sigma > 1 or p_value(np.diff(edges)) < 1e-6


def test_large_draws_are_normal_and_fresh():
  stddev = 3_000_000
  draws = discrete.discrete_gaussian(stddev, 20_000, coins(0))
  assert stats.kstest(draws / stddev, 'norm').pvalue > 1e-3
  for wrong in (0.9, 1.1):
    assert stats.kstest(draws / (wrong * stddev), 'norm').pvalue < 1e-6
  assert len(set(discrete.discrete_gaussian(stddev, 1000).tolist())) > 990
  assert discrete.discrete_gaussian(3, 0).shape == (0,)


def test_the_tail_is_cut_at_64_standard_deviations_and_no_earlier(monkeypatch):
  """Sizes are u + sigma k: all k below 64 are kept, whose chance is a number, and none above."""
  sigma, wholes = 100, np.arange(70)
  drawn = [np.zeros(70, np.uint64), np.ones(70, np.uint64)]  # u, and signs: all positive.
  monkeypatch.setattr(discrete, 'below', lambda bound, count, source: drawn.pop(0)[:count])
  monkeypatch.setattr(discrete, 'exp_minus', lambda n, d, source: np.ones(len(n), bool))
  powers = [wholes.astype(np.uint64), np.full(70, 10**6, np.uint64)]  # k, and coins that keep all.
  monkeypatch.setattr(discrete, '_powers', lambda count, source: powers.pop(0)[:count])
  kept = -discrete._candidates(sigma, 70, None)
  np.testing.assert_array_equal(kept, sigma * wholes[1:64])  # Minus zero is drawn as zero only.


@pytest.mark.parametrize('bound', [1, 2, 3, 255, 256, 257, 2**33 + 1, 2**63])
def test_integers_below_a_bound_are_uniform(bound):
  numbers = discrete.below(bound, 3000, coins(bound))
  assert numbers.dtype == np.uint64 and numbers.max() < bound
  bins = min(bound, 10)
  counts = np.bincount((numbers.astype(object) * bins // bound).astype(int), minlength=bins)
  if bins > 1:
    sizes = np.diff([-(-k * bound // bins) for k in range(bins + 1)]).astype(float)
    assert stats.chisquare(counts, 3000 * sizes / sizes.sum()).pvalue > 1e-3


@pytest.mark.parametrize('numerator', [0, 1, 7, 10])
def test_coins_have_exponential_probabilities(numerator):
  heads = discrete.exp_minus(
      np.full(20_000, numerator, np.uint64), 10, coins(numerator)).sum()
  assert stats.binomtest(int(heads), 20_000, np.exp(-numerator / 10)).pvalue > 1e-3


def test_rounding_moves_neighbours_by_no_more_than_is_accounted_for():
  """A search of neighbours, close to the edges of the grid: in units of the noise."""
  rng, size, worst = np.random.default_rng(0), 50, 0.0
  for rounding, sigma in [(2**-7, 1.0), (0.3, 0.7), (0.9, 2.0)]:
    stddev = discrete.integer_stddev(sigma, rounding, size)
    std = np.float32(sigma)  # The clip norm is one.
    grid = float(std) / stddev
    zero = tf.zeros([size], tf.int64)
    for _ in range(30):
      steps = rng.integers(-1000, 1000, size=size)
      edge = rng.choice([.499, -.499], size=size)
      one = (steps + edge) * grid
      away = np.sign(edge) * rng.choice([1, rng.choice([-1, 1])], size=size)
      move = away * rng.choice([.003, .5, 1.001, 3][:rng.integers(1, 5)], size=size) * grid
      for scale in (1.0, 1 / np.linalg.norm(move)):  # Moves of the grid, and of the clip norm.
        other = one + move * scale
        moved = np.linalg.norm(one - other)
        if moved > 1:
          continue
        after = np.linalg.norm(
            discrete.add(tf.constant(one), zero, tf.constant(std), stddev)
            - discrete.add(tf.constant(other), zero, tf.constant(std), stddev))
        worst = max(worst, (after - moved) / rounding)
        assert after <= moved + rounding
  assert worst > 0.9  # The search does come close to the bound.


def releases(steps=1, shape=(400,), sigma=1.0, asks=(contract.Ask(),), total=0.0):
  """The releases of a privatizer, one row per step."""
  specs = [tf.TensorSpec(shape, tf.float32)]
  privatizer = privatizer_lib.Privatizer(
      asks, specs, l2_norm_clip=2.0, noise_multiplier=sigma, batch_size=4, mechanism=ROUNDING)
  state, rows = privatizer.init(), []
  query = tuple(contract.Query() for _ in asks)
  sums = tuple(contract.Sums([tf.fill(shape, total)]) for _ in asks)
  for _ in range(steps):
    (release,), state = privatizer.release(state, query, sums)
    rows.append(release.mean[0].numpy())
  return np.stack(rows), float(release.variance), int(state.noise.row)


def test_releases_are_on_the_grid_with_the_noise_announced():
  rows, variance, row = releases(steps=5, total=1.0)
  assert row == 5 and variance == pytest.approx((2.0 / 4)**2)
  noise = rows.astype(np.float64) - 0.25
  assert noise.std() == pytest.approx(0.5, rel=0.06) and abs(noise.mean()) < 0.05
  grid = 0.5 / discrete.integer_stddev(1.0, 2**-7, 400)
  steps = rows / grid
  np.testing.assert_allclose(steps, np.round(steps), atol=2e-3 * np.abs(steps).max() / 1e3)
  assert len(np.unique(noise)) > 1500  # None is used twice.


def test_what_it_cannot_do_is_refused():
  with pytest.raises(ValueError, match='`rounding` must be'):
    mechanisms.IndependentGaussian(rounding=2)
  specs = [tf.TensorSpec([3], tf.float32)]
  make = lambda **changes: privatizer_lib.Privatizer((contract.Ask(),), specs, **{**dict(
      l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=1, mechanism=ROUNDING), **changes})
  with pytest.raises(ValueError, match='has no seed'):
    make(seed=1)
  for noise_multiplier in (0.0, 1e9):
    with pytest.raises(ValueError, match='steps of its grid per standard deviation'):
      make(noise_multiplier=noise_multiplier)
  model = tfdp.DPSequential([tf.keras.layers.Input([2]), tf.keras.layers.Dense(1)])
  optimizer = tfdp.DPSGD(l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=2, mechanism=ROUNDING)
  with pytest.raises(ValueError, match='which XLA cannot compile'):
    model.compile(optimizer, 'mse', jit_compile=True)


def test_queries_refuse_it():
  queries = pytest.importorskip('tfdp_adaptive.queries')
  specs = [tf.TensorSpec([3], tf.float32)]
  with pytest.raises(ValueError, match='is for Keras optimizers'):
    queries.MechanismSumQuery(specs, ROUNDING, 1.0, 1.0)
  with pytest.raises(ValueError, match='is for Keras optimizers'):
    queries.RuleQuery(tfdp.rules.dp_sgd(), specs, l2_norm_clip=1.0, noise_multiplier=1.0,
                      batch_size=1, mechanism=ROUNDING)


def test_replicas_are_refused_when_it_is_made_and_when_it_is_drawn(monkeypatch):
  specs = [tf.TensorSpec([3], tf.float32)]
  stream = discrete.stream(ROUNDING, 1.0)
  state = stream.init(specs)
  monkeypatch.setattr(type(tf.distribute.get_strategy()), 'num_replicas_in_sync', 2)
  for draw in (lambda: stream.init(specs), lambda: stream.next(state, specs)):
    with pytest.raises(ValueError, match='another on every replica'):
      draw()


def test_training_saving_and_going_on(tmp_path):
  x = np.ones([8, 2], np.float32)
  plan = tfdp.PrivacyPlan(population_size=8, batch_size=4, steps=4, l2_norm_clip=1.0,
                          noise_multiplier=1.0, target_delta=1e-3, mechanism=ROUNDING)
  model = tfdp.DPSequential([tf.keras.layers.Input([2]), tf.keras.layers.Dense(1)])
  model.compile(tfdp.DPAdam(0.1, plan=plan), 'mse')
  before = model.get_weights()
  model.fit(plan.batches((x, x[:, :1])), steps_per_epoch=2, epochs=1, verbose=0)
  assert any(np.any(a != b) for a, b in zip(before, model.get_weights()))
  model.save(tmp_path / 'model.keras')
  again = tf.keras.models.load_model(tmp_path / 'model.keras')
  assert again.optimizer.mechanism == ROUNDING and again.optimizer.steps_done == 2
  assert again.optimizer.plan == plan
