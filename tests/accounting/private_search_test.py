# SPDX-License-Identifier: Apache-2.0
"""The cost of releasing the best of a random number of runs (arXiv 2110.03620)."""

import collections
import dataclasses
import math

import dp_accounting
from dp_accounting import rdp
import numpy as np
import pytest
from scipy import stats

import tfdp_adaptive as tfdp
from tfdp_adaptive.accounting import cost
from tfdp_adaptive.accounting import private_search

pytestmark = pytest.mark.skipif(
    not cost._HAS_TRUNCATED, reason='needs a current dp-accounting')
DELTA = 1e-5
FIELDS = dict(population_size=1000, batch_size=50, steps=40, l2_norm_clip=1.0, target_delta=DELTA,
              sampling=tfdp.sampling.FixedOrder())  # Others take seconds.


def epsilon_of(search, sigma):
  return cost.epsilon(search.event(dp_accounting.GaussianDpEvent(sigma)), DELTA)


def by_the_theorems(mean, shape, sigma, score_noise=None):
  """Epsilon in a few lines of NumPy, with the Renyi divergence of Gaussians in closed form."""
  orders = np.asarray(rdp.rdp_privacy_accountant.DEFAULT_RDP_ORDERS, np.float64)
  rate = sigma**-2 + (score_noise**-2 if score_noise else 0.0)
  one = orders * rate / 2
  if shape == math.inf:
    delta = [min(math.exp(min(  # Delta of one run at ln(1 + 1 / (l - 1)), by RDP.
        (k - 1) * (e - math.log1p(1 / (l - 1)) + math.log1p(-1 / k)) - math.log(k)
        if k > 1.01 else 0.0, .5 * math.log1p(-math.exp(-e)))) for k, e in zip(orders, one))
             for l in orders]
    total = one + mean * np.array(delta) + math.log(mean) / (orders - 1)
  else:
    gamma = private_search.halting(mean, shape)
    constant = (1 + shape) * np.min((1 - 1 / orders) * one - math.log(gamma) / orders)
    total = one + constant + math.log(mean) / (orders - 1)
    total = np.array([np.min(total[orders >= l]) for l in orders])
  return rdp.compute_epsilon(orders, total, DELTA)[0]


@pytest.mark.parametrize('sigma, mean, shape, expected', [
    (2, 10, 0, 3.6385), (2, 10, .5, 3.9977), (2, 10, 1, 4.3151), (2, 10, math.inf, 4.9082),
    (2, 100, 0, 4.3260), (2, 100, .5, 4.8893), (2, 100, 1, 5.4366), (2, 100, math.inf, 20.00),
    (5, 10, 0, 1.4180), (5, 10, .5, 1.5765), (5, 10, 1, 1.7183), (5, 10, math.inf, 1.8595)])
def test_published_numbers(sigma, mean, shape, expected):
  search = tfdp.privacy.Search(mean, shape, score_noise=None)
  epsilon = epsilon_of(search, float(sigma))
  assert epsilon == pytest.approx(expected, abs=6e-5 if expected < 20 else 6e-3)
  assert epsilon == pytest.approx(by_the_theorems(mean, shape, sigma), rel=1e-6)


@pytest.mark.parametrize('sigma, one', [(2, 2.1657), (5, .7945)])
def test_one_run_is_one_run(sigma, one):
  alone = epsilon_of(tfdp.privacy.Search(1, 0, None), float(sigma))
  rdp_alone = cost.epsilon(dp_accounting.GaussianDpEvent(float(sigma)), DELTA, 'rdp')
  assert alone <= rdp_alone == pytest.approx(one, abs=6e-5)
  poisson = epsilon_of(tfdp.privacy.Search(1, math.inf, None), float(sigma))
  assert poisson > one  # It may be more than one run.
  if sigma == 2:
    assert poisson == pytest.approx(2.4136, abs=6e-5)


def test_scores_on_private_records_cost_too():
  free, paid = (epsilon_of(tfdp.privacy.Search(10, 1, noise), 2.0) for noise in (None, 4.0))
  assert paid == pytest.approx(by_the_theorems(10, 1, 2.0, 4.0), rel=1e-6)
  assert paid > 1.1 * free


@pytest.mark.parametrize('shape, gamma', [(0, .026918), (.5, .0625), (1, .1)])
def test_halting_probabilities(shape, gamma):
  assert private_search.halting(10, shape) == pytest.approx(gamma, rel=2e-5)
  assert private_search.expected(gamma, shape) == pytest.approx(10, rel=1e-4)


@pytest.mark.parametrize('mean, shape', [(4, 0), (4, .5), (4, 1), (4, 3), (4, math.inf)])
def test_the_number_of_runs_has_its_distribution(mean, shape):
  search = tfdp.privacy.Search(mean, shape)
  draws = collections.Counter(search.draw() for _ in range(4000))
  gamma = None if shape == math.inf else private_search.halting(mean, shape)
  law = {0: lambda: stats.logser(1 - gamma), math.inf: lambda: stats.poisson(mean)}.get(
      shape, lambda: stats.nbinom(shape, gamma))()
  least = 0 if shape == math.inf else 1
  expected = np.array([law.pmf(k) for k in range(least, 9)])
  expected /= 1.0 if least == 0 or shape == 0 else law.sf(0)
  cells = 4000 * np.append(expected, 1 - expected.sum())
  counts = [draws[k] for k in range(least, 9)]
  counts.append(4000 - sum(counts))
  assert draws[0] == 0 or least == 0
  assert stats.chisquare(counts, cells).pvalue > 1e-6
  assert stats.chisquare(np.roll(counts, 1), cells).pvalue < 1e-6  # Off by one is found.


@pytest.mark.parametrize('mean', [1.0001, 50, 1000, 1e4])
@pytest.mark.parametrize('shape', [0, .5, 1, 100, math.inf])
def test_numbers_of_runs_have_their_mean(mean, shape):
  """Where SciPy's logarithmic law raises errors, and where sums that start at exp(-1000) stay 0."""
  search = tfdp.privacy.Search(mean, shape)
  draws = np.array([search.draw() for _ in range(1000)])
  assert draws.min() >= (0 if shape == math.inf else 1)
  spread = {0: draws.std(), math.inf: mean**.5}.get(shape, (mean + mean**2 / (shape or 1))**.5)
  assert abs(draws.mean() - mean) < 6 * spread / 1000**.5 + .01


def test_a_plan_is_calibrated_for_the_whole_search():
  search = tfdp.privacy.Search(10, 1)
  plan = tfdp.PrivacyPlan.calibrate(target_epsilon=3.0, search=search, **FIELDS)
  alone = tfdp.PrivacyPlan.calibrate(target_epsilon=3.0, **FIELDS)
  assert 2.97 < plan.epsilon() <= 3.0 and plan.epsilon() == plan.epsilon(accountant='rdp')
  assert plan.noise_multiplier > 1.2 * alone.noise_multiplier
  assert plan.epsilon(1) == plan.epsilon() and plan.epsilon(0) == 0  # Others ran to the end.
  assert plan.delta(plan.epsilon()) == pytest.approx(DELTA, rel=1e-6)
  assert tfdp.PrivacyPlan.from_json(plan.to_json()) == plan
  assert 'search' not in alone.to_json()
  sampled = dataclasses.replace(plan, sampling=tfdp.sampling.Poisson())
  accountant = rdp.RdpAccountant().compose(sampled.event())
  assert accountant.get_epsilon(DELTA) == sampled.epsilon() < .5 * plan.epsilon()
  text = plan.statement()
  for words in ('secret, random number of runs (geometric, 10 expected)', 'noise of standard',
                'Renyi', 'arXiv 2110.03620'):
    assert words in text, words
  assert 'the choice of hyperparameters' not in text and 'Selection' not in alone.statement()


def test_a_searched_model_that_is_trained_further_costs_more():
  plan = tfdp.PrivacyPlan(noise_multiplier=2.0, search=tfdp.privacy.Search(10, 1), **FIELDS)
  ledger = plan + dataclasses.replace(plan, search=None)
  assert ledger.epsilon() > plan.epsilon()
  assert 'Selection' in ledger.statement() and 'Renyi' not in ledger.entries[1].plan.statement()


@pytest.mark.parametrize('changes', [
    dict(adjacency='replace', sampling=tfdp.sampling.Poisson()),
    dict(sampling=tfdp.sampling.TruncatedPoisson(max_batch_size=80)), dict(search=10)])
def test_what_has_no_renyi_divergence_is_refused(changes):
  with pytest.raises(ValueError, match='private search|`search` must be'):
    tfdp.PrivacyPlan(**{**FIELDS, 'noise_multiplier': 1.0, 'search': tfdp.privacy.Search(10),
                        **changes})


def test_targets_that_no_noise_reaches_are_refused():
  with pytest.raises(ValueError, match='number of runs alone cost an epsilon of .*score_noise'):
    tfdp.PrivacyPlan.calibrate(target_epsilon=.2, search=tfdp.privacy.Search(10), **FIELDS)


def test_scores_are_bounded_before_they_are_noised():
  values = np.array([2.0, -3.0, float('nan'), float('inf'), .5])
  assert private_search.noisy_score(values, None) == pytest.approx((1 + .5) / 5)
  draws = np.array([private_search.noisy_score(values, 10.0) for _ in range(2000)])
  assert np.std(5 * draws) == pytest.approx(10, rel=.1) and abs(np.mean(5 * draws) - 1.5) < 1.5


def test_a_search_on_batches_that_another_run_took_is_not_amplified():
  """One sample cannot hide a record from both runs, of which one is the best of several."""
  plan = tfdp.PrivacyPlan(**{**FIELDS, 'sampling': tfdp.sampling.Poisson()}, noise_multiplier=2.0,
                          search=tfdp.privacy.Search(4))
  other = dataclasses.replace(plan, search=None)
  runs = [tfdp.Ledger().begin(one).done(40).entries[0] for one in (plan, other)]
  apart, together = (tfdp.Ledger(tuple(
      dataclasses.replace(entry, run=run, shared=shared)
      for entry, run, shared in zip(runs, 'ab', names)))
                     for names in (((), ()), (('b',), ('a',))))
  assert 'PoissonSampled' in repr(apart.event()) and 'PoissonSampled' not in repr(together.event())
  assert together.epsilon() > apart.epsilon()
