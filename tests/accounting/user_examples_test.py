# SPDX-License-Identifier: Apache-2.0
"""Users by their examples: the golden numbers, the law that is drawn, and no user above the cap."""

import math

import dp_accounting
import numpy as np
import pytest
from scipy import optimize
from scipy import stats

from tfdp_adaptive.accounting import cost
from tfdp_adaptive.accounting import gaussian
from tfdp_adaptive.accounting import losses
from tfdp_adaptive.accounting import poisson
from tfdp_adaptive.accounting import sampling
from tfdp_adaptive.privacy import plan as plan_lib


def exact(sigma, q, most, epsilon):
  """delta(P||Q) and delta(Q||P) of one step, by the point where the loss is epsilon."""
  k = np.arange(most + 1)
  weights, m = stats.binom.pmf(k, most, q), k / sigma
  loss = lambda z: math.log(float(weights @ np.exp(m * z - m**2 / 2)))
  z = optimize.brentq(lambda z: loss(z) - epsilon, -30, 60)
  remove = weights @ stats.norm.sf(z - m) - math.exp(epsilon) * stats.norm.sf(z)
  if loss(-30) > -epsilon:
    return remove, 0.0
  z = optimize.brentq(lambda z: loss(z) + epsilon, -30, 60)
  return remove, stats.norm.cdf(z) - math.exp(epsilon) * (weights @ stats.norm.cdf(z - m))


@pytest.mark.parametrize('sigma, q, most', [(1.0, 0.01, 8), (4.0, 0.2, 8), (2.0, 0.5, 3)])
def test_one_step_is_never_below_its_exact_delta_and_hardly_above(sigma, q, most):
  event = poisson.UserExamplesDpEvent(sigma, q, most)
  for epsilon in (0.2, 1.0):
    truth = max(exact(sigma, q, most, epsilon))
    assert truth <= cost.delta(event, epsilon) <= 1.001 * truth


@pytest.mark.parametrize('kind', ['remove', 'add'])
@pytest.mark.parametrize('sigma, q, most', [(0.3, 0.01, 1), (0.3, 0.25, 3), (1.0, 0.5, 8)])
def test_no_mass_is_lost(kind, sigma, q, most):
  loss, log_mass = losses.Pair(kind, q, 1 / sigma, most).atoms(40.0)
  mass = np.exp(log_mass)
  assert mass.sum() == pytest.approx(1, abs=1e-13)
  of_q = mass @ np.exp(-loss)  # Less what is far from P.
  assert of_q <= 1 + 1e-9 and (kind == 'add' or of_q == pytest.approx(1, abs=1e-9))


def test_golden_values():
  event = poisson.UserExamplesDpEvent(1.0, 0.01, 8)
  assert cost.delta(event, 1.0) == pytest.approx(2.410e-4, rel=1e-3)
  for sigma, golden in ((4.0, 3.031), (8.0, 1.387)):
    composed = dp_accounting.SelfComposedDpEvent(
        poisson.UserExamplesDpEvent(sigma, 0.01, 8), 1000)
    assert cost.epsilon(composed, 1e-6) == pytest.approx(golden, abs=2e-3)


def test_one_example_is_example_level_and_all_at_once_one_gaussian():
  one = dp_accounting.SelfComposedDpEvent(poisson.UserExamplesDpEvent(2.0, 0.05, 1), 50)
  coins = dp_accounting.SelfComposedDpEvent(
      dp_accounting.PoissonSampledDpEvent(0.05, dp_accounting.GaussianDpEvent(2.0)), 50)
  assert cost.epsilon(one, 1e-6) == pytest.approx(cost.epsilon(coins, 1e-6), rel=1e-3)
  assert cost.epsilon(one, 1e-6) >= cost.epsilon(coins, 1e-6) * (1 - 1e-6)
  whole = cost.epsilon(poisson.UserExamplesDpEvent(10.0, 1.0, 4), 1e-6)
  assert whole == pytest.approx(gaussian.epsilon(2.5, 1e-6), rel=1e-3)
  huge = poisson.UserExamplesDpEvent(0.5, 0.9, 64)
  assert cost.epsilon(huge, 1e-6) == pytest.approx(gaussian.epsilon(0.5 / 64, 1e-6), rel=1e-3)


def make_plan(**changes):
  return plan_lib.PrivacyPlan(**{**dict(
      population_size=120, batch_size=30, steps=40, l2_norm_clip=1.0, noise_multiplier=4.0,
      target_delta=1e-4, unit='user', seed=3,
      sampling=sampling.PoissonExamples(examples_per_user=3)), **changes})


def test_a_plan_costs_more_than_examples_and_less_than_all_of_a_user_at_once():
  plan = make_plan()
  examples = make_plan(unit='example', sampling=sampling.Poisson())
  group = plan.sampling.__class__(examples_per_user=6)
  assert examples.epsilon() < plan.epsilon() < make_plan(sampling=group).epsilon()
  assert plan.epsilon(10) < plan.epsilon()
  assert plan_lib.PrivacyPlan.from_json(plan.to_json()) == plan
  assert 'At most 3 examples of a user' in plan.statement() and 'one user' in plan.statement()
  # Two runs with a fixed seed may have drawn the same records.
  both = plan + make_plan(unit='user', sampling=sampling.Poisson(), seed=None)
  assert plan.epsilon() < both.epsilon() < math.inf
  for wrong in (dict(unit='example'), dict(adjacency='replace')):
    with pytest.raises(ValueError, match='Received'):
      make_plan(**wrong)


def rows_of(batches):
  return [x[w != 0] for x, _, w in batches.as_numpy_iterator()]


def test_no_user_has_more_examples_than_the_cap_and_all_others_their_rate():
  plan, users = make_plan(), np.r_[np.repeat(np.arange(10), 6), np.arange(10, 70)]
  drawn = rows_of(plan.batches((np.arange(120), np.zeros(120)), users=users))
  used = np.unique(np.concatenate(drawn))
  assert np.bincount(users[used], minlength=70)[:10].tolist() == [3] * 10
  times = np.bincount(np.concatenate(drawn).astype(int), minlength=120)
  total = times[used].sum()
  law = stats.binom(len(used) * 40, 0.25)
  assert 1e-4 < law.cdf(total) < 1 - 1e-4
  with pytest.raises(ValueError, match='whose each one is'):
    plan.batches((np.arange(120), np.zeros(120)))
  with pytest.raises(ValueError, match='another number of ids than of examples'):
    plan.batches((np.arange(120), np.zeros(120)), users=users[:-1])
  with pytest.raises(ValueError, match='Received: examples_per_user=None|as many of a user'):
    plan.batches((np.arange(120), np.zeros(120)), users=users, examples_per_user=4)


def test_which_of_a_user_are_kept_does_not_depend_on_other_users():
  ids = np.array([0, 0, 0, 1, 1, 1, 1, 2])
  seen = {tuple(np.flatnonzero(poisson.kept(ids, 2, np.random.default_rng(seed)))[:2])
          for seed in range(60)}
  assert seen == {(0, 1), (0, 2), (1, 2)}
  others = np.array([0, 0, 0, 5, 6, 7, 7, 7])
  for seed in range(20):
    a = poisson.kept(ids, 2, np.random.default_rng(seed))
    b = poisson.kept(others, 2, np.random.default_rng(seed))
    np.testing.assert_array_equal(a[:3], b[:3])


def test_no_owner_of_several_has_more_than_the_cap():
  rng = np.random.default_rng(0)
  owners = np.sort(rng.integers(-1, 12, size=(200, 3)), axis=1)[:, ::-1].copy()
  owners[owners[:, 0] < 0, 0] = 3
  for most in (1, 5, 1000):
    used = poisson.kept(owners, most, rng)
    counts = [sum(owner in row for row in owners[used]) for owner in range(12)]
    assert max(counts) <= most and (most < 1000 or used.all())
    # None that is left out could be added.
    assert all(any(counts[owner] == most for owner in row if owner >= 0)
               for row in owners[~used])
  with pytest.raises(ValueError, match='must have an owner'):
    poisson.kept(np.array([[1, -1], [-1, -1]]), 1, rng)
