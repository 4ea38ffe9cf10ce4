# SPDX-License-Identifier: Apache-2.0
"""Scores of canaries have the mean that the accounting says, whatever the noise."""

import math

import numpy as np
import planted
import pytest
from scipy import stats

import tfdp_adaptive as tfdp
from tfdp_adaptive.accounting import gaussian
from tfdp_adaptive.audit import bounds
from tfdp_adaptive.audit import gradient_canaries
from tfdp_adaptive.audit import subjects

SIGMA, SIZE = 2.0, 400


def run(plan, seed=0, **kwargs):
  subject = subjects.of(tfdp.DPSGD(plan=plan, **kwargs), SIZE)
  return gradient_canaries.run(subject, plan, SIZE, seed)


def plan_of(**kwargs):
  return tfdp.PrivacyPlan(**{**dict(
      population_size=SIZE, batch_size=100, steps=8, l2_norm_clip=0.5, noise_multiplier=SIGMA,
      target_delta=1e-6, sampling=tfdp.sampling.FixedOrder(), seed=1), **kwargs})


@pytest.mark.thorough(but=['tree', 'replace'])
@pytest.mark.parametrize('plan', [
    plan_of(), plan_of(adjacency='replace'), plan_of(mechanism=tfdp.mechanisms.Tree(steps=8)),
    plan_of(mechanism=tfdp.mechanisms.BandedToeplitz(bands=3, steps=8), steps=4),
    plan_of(mechanism=tfdp.mechanisms.SquareRoot(steps=8))], ids=[
        'independent', 'replace', 'tree', 'banded', 'square root'])
def test_the_difference_is_what_a_plan_without_amplification_accounts_for(plan):
  """Of the most exposed canaries; all others move by less."""
  scores, included = run(plan)
  np.testing.assert_allclose(scores[~included].std(), 1, atol=0.2)
  mu = 1 / plan.event().noise_multiplier
  estimate = bounds.gaussian_estimate(scores[included], scores[~included], 1e-6)
  assert estimate.mu < mu + 4 * estimate.standard_error
  if not isinstance(plan.mechanism, (tfdp.mechanisms.Tree, tfdp.mechanisms.SquareRoot)):
    assert estimate.mu > mu - 4 * estimate.standard_error  # Every record is as exposed as any.
  assert stats.kstest(scores[~included] - scores[~included].mean(), 'norm').pvalue > 1e-4


@pytest.mark.parametrize('plan', [
    plan_of(sampling=tfdp.sampling.Poisson(), batch_size=40, steps=10),
    plan_of(sampling=tfdp.sampling.PoissonExamples(examples_per_user=3), unit='user', batch_size=90,
            population_size=3 * SIZE, steps=10)], ids=['coins', "users' examples"])
def test_likelihood_ratios_of_coins_are_calibrated(plan):
  """E[exp(score)] is one for canaries that are out, and E[exp(-score)] for those that are in."""
  scores, included = run(plan)
  for ratio in (np.exp(scores[~included]), np.exp(-scores[included])):
    assert abs(ratio.mean() - 1) < 4 * ratio.std() / math.sqrt(len(ratio))
  assert scores[included].mean() > scores[~included].mean()


def test_a_run_is_a_function_of_its_seeds():
  first, included = run(plan_of())
  second, again = run(plan_of())
  np.testing.assert_array_equal(included, again)
  np.testing.assert_allclose(first, second)


def test_guesses_of_right_scores_are_right_as_often_as_stated():
  rng, truth = np.random.default_rng(0), gaussian.epsilon(1 / 1.5, 1e-6)
  lower, higher = [], []
  for _ in range(60):
    included = rng.random(300) < 0.5
    guessed = bounds.guess(
        rng.standard_normal(300) + 1.5 * included, included, 1e-6, 0.95)
    lower.append(guessed.epsilon_lower)
    higher.append(guessed.gaussian_lower)
    assert guessed.provable >= guessed.epsilon_lower
  for values in (lower, higher):
    refuted = np.mean(np.array(values) > truth)
    assert refuted <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 60)
  assert np.mean(higher) > np.mean(lower) > 0.1


def test_little_noise_is_convicted_by_canaries_alone():
  plan = plan_of(noise_multiplier=8.0)
  with planted.switched(batch_size=100) as bugs:
    bugs.only('no clipping')
    scores, included = run(plan)
  guessed = bounds.guess(scores, included, 1e-6, 0.95)
  assert guessed.gaussian_lower > plan.epsilon()
