# SPDX-License-Identifier: Apache-2.0
"""Bounds agree with published values, and refute true claims as rarely as they say."""

import math

import numpy as np
import pytest
from scipy import special
from scipy import stats

from tfdp_adaptive import audit
from tfdp_adaptive.accounting import gaussian
from tfdp_adaptive.audit import bounds


# (canaries, guesses, correct) -> both bounds at 95%; reproduced by other implementations.
@pytest.mark.parametrize('counts, pure, approximate, gaussian', [
    ((1000, 100, 100), 3.4930, 3.4654, 5.5490), ((1000, 100, 90), 1.6308, 1.6261, 2.4564),
    ((1000, 1000, 700), 0.7320, 0.7317, 1.3720)])
def test_published_values(counts, pure, approximate, gaussian):
  canaries, guesses, correct = counts
  assert bounds.one_run_epsilon(correct, guesses, canaries) == pytest.approx(pure, abs=1e-4)
  assert bounds.one_run_epsilon(correct, guesses, canaries, 1e-5) == pytest.approx(
      approximate, abs=1e-4)
  assert bounds.one_run_gaussian_epsilon(correct, guesses, canaries, 1e-5) == pytest.approx(
      gaussian, abs=1e-4)


@pytest.mark.parametrize('mu, truth, estimate', [
    (1, 4.887, 4.758), (2, 10.997, 10.843), (4, 26.357, 26.155)])
def test_the_estimate_of_normal_quantiles(mu, truth, estimate):
  quantiles = special.ndtri((np.arange(10_000) + 0.5) / 10_000)
  result = bounds.gaussian_estimate(quantiles + mu, quantiles, 1e-6)
  assert gaussian.epsilon(1 / mu, 1e-6) == pytest.approx(truth, abs=1e-3)
  assert result.epsilon == pytest.approx(estimate, abs=1e-3)
  assert result.mu == pytest.approx(mu) and result.standard_error == pytest.approx(
      math.sqrt(2) / 100, rel=1e-2)


def test_nothing_is_estimated_of_too_few_or_of_chance():
  assert bounds.gaussian_estimate([1.0], [0.0, 0.1], 1e-5).epsilon == 0
  assert bounds.gaussian_estimate([0.0, 1.0], [0.0, 1.0], 1e-5).epsilon == 0


def attack(rng, mu, count, guesses):
  """Right guesses at `count` scores of a Gaussian mechanism, most extreme ones first."""
  coins = rng.random(count) < 0.5
  order = np.argsort(rng.standard_normal(count) + mu * coins)
  return int(np.sum(coins[order[-guesses // 2:]]) + np.sum(~coins[order[:guesses // 2]]))


@pytest.mark.parametrize('mu', [0.5, 2.0])
def test_the_gaussian_bound_is_valid_and_closer_than_the_general_one(mu):
  rng = np.random.default_rng(1)
  truth = gaussian.epsilon(1 / mu, 1e-5)
  correct = [attack(rng, mu, 500, 250) for _ in range(150)]
  values = {c: bounds.one_run_gaussian_epsilon(c, 250, 500, 1e-5) for c in set(correct)}
  refuted = np.mean([values[c] > truth for c in correct])
  assert refuted <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 150)
  typical = int(np.median(correct))
  assert bounds.one_run_epsilon(typical, 250, 500, 1e-5) < values[typical] < truth
  assert values[typical] > 0.3 * truth


def test_the_gaussian_bound_by_its_recursion():
  """The rejection rule at the bound, written out."""
  canaries, guesses, correct, delta = 200, 100, 80, 1e-5

  def rejects(epsilon):
    mu = [m for m in np.linspace(0.01, 6, 6000)
          if gaussian.epsilon(1 / m, delta) <= epsilon][-1]
    right, wrong = 0.05 * correct / canaries, 0.05 * (guesses - correct) / canaries
    for i in reversed(range(correct)):
      smallest = max(wrong, stats.norm.cdf(stats.norm.ppf(right) - mu))
      if smallest == wrong:
        break
      right = min(1.0, right + i / (guesses - i) * (smallest - wrong))
      wrong = smallest
    return right + wrong > guesses / canaries

  bound = bounds.one_run_gaussian_epsilon(correct, guesses, canaries, delta)
  assert rejects(bound * 0.99) and not rejects(bound * 1.01)


def test_chance_refutes_no_gaussian():
  assert bounds.one_run_gaussian_epsilon(50, 100, 100, 1e-5) == 0.0
  with pytest.raises(ValueError, match='`delta` must be in'):
    bounds.one_run_gaussian_epsilon(90, 100, 100, 0.0)
  with pytest.raises(ValueError, match='`correct` must be at most'):
    bounds.one_run_gaussian_epsilon(101, 100, 100, 1e-5)


def test_what_it_would_take():
  for epsilon in (1.0, 3.0):
    needed = bounds.canaries_to_refute(epsilon)
    assert bounds.provable_epsilon(needed) > epsilon >= bounds.provable_epsilon(needed // 2)
  assert bounds.canaries_to_refute(20.0, 1e-5) is None


def test_public_names():
  for name in ('canaries_to_refute', 'gaussian_estimate', 'one_run_epsilon',
               'one_run_gaussian_epsilon', 'provable_epsilon'):
    assert getattr(audit, name) is getattr(bounds, name)


def one_sided(scores, included, delta, confidence):
  """The bound of jax_privacy: "in" above a threshold, all of which share the confidence.

  Only thresholds that are 3% apart are tried, so that this is a little less than theirs.
  """
  right = np.cumsum(included[np.argsort(-scores)])
  counts = np.unique(np.geomspace(8, len(scores), 180).astype(int))
  best = 0.0
  for guesses in counts[np.argsort(-right[counts - 1] / counts)]:
    correct = int(right[guesses - 1])
    if correct / guesses > 1 / (1 + math.exp(-best)):  # Else it cannot prove more.
      best = max(best, bounds.one_run_epsilon(
          correct, int(guesses), len(scores), delta, 1 - (1 - confidence) / len(scores)))
  return best


@pytest.mark.thorough
@pytest.mark.parametrize('count', [512, 5000])
def test_attempts_prove_more_than_others(count):
  """Than two fixed parts of all canaries, and than every threshold of one side, whatever mu."""
  for mu in (0.5, 1.0, 2.0, 4.0):
    rng = np.random.default_rng(1)
    found = {'ours': [], 'two parts': [], 'thresholds': []}
    for _ in range(16):
      included = rng.random(count) < 0.5
      scores = rng.standard_normal(count) + mu * included
      order = np.argsort(scores)
      right = lambda side: int(included[order[-side:]].sum() + (~included[order[:side]]).sum())
      found['ours'].append(bounds.guess(scores, included, 1e-6, 0.95).epsilon_lower)
      found['two parts'].append(max(bounds.one_run_epsilon(
          right(side), 2 * side, count, 1e-6, 0.975) for side in (count // 2, count // 8)))
      found['thresholds'].append(one_sided(scores, included, 1e-6, 0.95))
    means = {name: np.mean(values) for name, values in found.items()}
    assert means['ours'] > max(means['two parts'], means['thresholds']), (mu, means)
    assert max(found['ours']) < gaussian.epsilon(1 / mu, 1e-6)


def test_attempts_share_the_confidence():
  for count in (2, 64, 512, 1000, 5000):
    levels = bounds._levels(count, 0.95)
    assert sum(1 - level for _, level in levels) == pytest.approx(0.05)
    assert all(1 <= side <= max(1, count // 2) for side, _ in levels)
  assert [[side for side, _ in bounds._levels(n, 0.95)] for n in (128, 512, 1000, 5000)] == [
      [64, 32], [256, 128, 64], [500, 250, 62], [2500, 1250, 312, 78]]
