# SPDX-License-Identifier: Apache-2.0
"""Bounds from draws of the privacy loss: never the estimate, and above what is known exactly."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from scipy import stats

from tfdp_adaptive import mechanisms
from tfdp_adaptive.accounting import allocation
from tfdp_adaptive.accounting import gaussian
from tfdp_adaptive.accounting import monte_carlo
from tfdp_adaptive.accounting import sampling
from tfdp_adaptive.privacy import plan as plan_lib

pytestmark = pytest.mark.filterwarnings('ignore:`target_delta` should be')
DRAWS = 20_000
BINS = monte_carlo.BallsInBinsDpEvent((1.,), 10, 1., 1., DRAWS, 10)


def make_plan(scheme, **changes):
  return plan_lib.PrivacyPlan(**{**dict(
      population_size=200, batch_size=20, steps=30, l2_norm_clip=1.0, noise_multiplier=2.0,
      target_delta=1e-2, sampling=scheme), **changes})


def estimate(event, epsilon, draws=200_000):
  return monte_carlo._means(monte_carlo._losses(event, 'test', draws), epsilon)


@pytest.mark.parametrize('draws, mean, expected', [
    (1e6, 1e-6, 1.023e-5), (1e7, 1e-6, 2.675e-6), (1e7, 5e-6, 8.108e-6)])
def test_golden_bounds(draws, mean, expected):
  assert monte_carlo.upper_delta(mean, draws, 1e-3) == pytest.approx(expected, rel=1e-3)


def test_golden_values_of_ten_bins():
  for epsilon, there, back in ((.5, .02685, .01906), (1., .002783, 4.862e-4)):
    deltas = estimate(BINS, epsilon)
    for one, golden in zip(deltas, (there, back)):
      assert one == pytest.approx(golden, abs=5 * math.sqrt(golden / 2e5))
    assert monte_carlo._bounded(BINS, epsilon, 'test', 200_000) > there  # The larger of both.


def test_a_bound_holds_as_often_as_it_says():
  # The mean of n draws lies below what bounds it from above with probability beta at most.
  truth, draws, beta = 3e-3, 2000, .05
  counts = np.arange(draws + 1)
  bounds = np.array([monte_carlo.upper_delta(k / draws, draws, beta) for k in counts[:40]])
  wrong = counts[:40][bounds < truth]
  assert len(wrong) and stats.binom.cdf(wrong.max(), draws, truth) <= beta
  assert monte_carlo.upper_delta(1., draws, beta) == 1 and np.all(np.diff(bounds) > 0)


@pytest.mark.parametrize('event', [
    dataclasses.replace(BINS, cycle=1, steps=3, coefficients=(.9, .4, .2)),
    monte_carlo.MinSeparationDpEvent((.9,), 3, 1.3, 1., DRAWS, 1, 1.)], ids=str)
def test_without_a_secret_it_is_one_gaussian(event):
  x = np.sum([np.pad(event.coefficients, (i, 3))[:3] for i in range(3)], axis=0)
  for epsilon in (.5, 1.5):
    exact = gaussian.delta(event.noise_multiplier / np.linalg.norm(x), epsilon)
    np.testing.assert_allclose(estimate(event, epsilon), exact, atol=5 * math.sqrt(exact / 2e5))


def test_separation_of_one_is_poisson_sampling_and_of_all_is_bins():
  poisson = make_plan(sampling.Poisson())
  event = monte_carlo.MinSeparationDpEvent((1.,), 30, 2., 1., DRAWS, 1, .1)
  assert max(estimate(event, .5)) == pytest.approx(poisson.delta(.5), rel=.1)
  bins = dataclasses.replace(BINS, steps=30, noise_multiplier=2.)
  all_of_it = monte_carlo.MinSeparationDpEvent((1.,), 30, 2., 1., DRAWS, 10, 1.)
  np.testing.assert_allclose(estimate(bins, .5), estimate(all_of_it, .5), rtol=.1)


def patterns(event):
  """(probability, [steps] pattern) of a record, from the definition."""
  if isinstance(event, monte_carlo.BallsInBinsDpEvent):
    for first in range(event.cycle):
      yield 1 / event.cycle, (np.arange(event.steps) % event.cycle == first) * 1.
    return
  b, p = event.min_sep, event.probability
  for waits in range(b):
    start = (1 if waits == 0 else p) / (1 + (b - 1) * p)
    for bits in itertools.product((0, 1), repeat=event.steps):
      chance, free_at = start, waits
      for step, bit in enumerate(bits):
        if step < free_at:
          chance *= 1 - bit
        else:
          chance *= p if bit else 1 - p
          free_at = step + b if bit else free_at
      if chance:
        yield chance, np.array(bits, float)


@pytest.mark.parametrize('event', [
    monte_carlo.BallsInBinsDpEvent((.8, .5, .3), 5, .9, 1., DRAWS, 3),
    monte_carlo.BallsInBinsDpEvent((.8, .5), 2, .9, 1., DRAWS, 3),
    monte_carlo.MinSeparationDpEvent((.8, .5), 5, .9, 1., DRAWS, 2, .4),
    monte_carlo.MinSeparationDpEvent((.8, .5, .2), 6, .9, 1., DRAWS, 3, 1.)], ids=str)
def test_losses_are_those_of_the_mixture(event):
  c = np.zeros((event.steps,) * 2)
  for lag, value in enumerate(event.coefficients):
    c += value * np.eye(event.steps, k=-lag)
  chances, centers = zip(*((chance, c @ x) for chance, x in patterns(event)))
  assert sum(chances) == pytest.approx(1)

  sigma = event.noise_multiplier
  y = sigma * np.random.default_rng(1).standard_normal((100_000, event.steps))
  exact = np.log(sum(
      p * np.exp((y @ v - v @ v / 2) / sigma**2) for p, v in zip(chances, centers)))
  drawn = event.losses(np.random.default_rng(2), 100_000, False)
  assert stats.ks_2samp(exact, drawn).pvalue > 1e-4
  index = np.random.default_rng(3).choice(len(chances), 100_000, p=np.array(chances))
  y = y + np.array(centers)[index]
  exact = np.log(sum(
      p * np.exp((y @ v - v @ v / 2) / sigma**2) for p, v in zip(chances, centers)))
  drawn = event.losses(np.random.default_rng(4), 100_000, True)
  assert stats.ks_2samp(exact, drawn).pvalue > 1e-4
  assert stats.ks_2samp(exact * 1.03, drawn).pvalue < 1e-2  # It could have told.


@pytest.mark.parametrize('scheme', [
    sampling.BallsInBins(cycle=10, draws=DRAWS), sampling.MinSeparation(5, draws=DRAWS)], ids=repr)
def test_a_plan_reports_bounds_between_the_estimate_and_no_amplification(scheme):
  plan = make_plan(scheme, mechanism=mechanisms.BandedToeplitz(2, 30))
  epsilon, delta = plan.epsilon(), plan.delta(1.)
  assert delta > max(estimate(plan.event(), 1.)) and plan.delta(epsilon) <= plan.target_delta
  whole = dataclasses.replace(plan, sampling=dataclasses.replace(scheme, draws=0))
  assert 0 < epsilon < whole.epsilon() and delta < whole.delta(1.)
  assert plan.epsilon() == epsilon  # The draws are fixed beforehand.
  assert plan.epsilon(7) < epsilon
  text = plan.statement()
  assert f'{DRAWS} draws' in text and 'confidence 1 - 1e-06' in text and 'secret' in text
  assert plan_lib.PrivacyPlan.from_json(plan.to_json()) == plan
  with pytest.raises(ValueError, match='Received: accountant="rdp"'):
    plan.epsilon(accountant='rdp')


def test_of_a_delta_that_the_draws_cannot_resolve_nothing_is_claimed():
  plan = make_plan(sampling.BallsInBins(cycle=10, draws=1000), target_delta=1e-5,
                   mechanism=mechanisms.BandedToeplitz(2, 30))
  bound, whole = (dataclasses.replace(plan, sampling=sampling.BallsInBins(cycle=10, draws=draws))
                  for draws in (None, 0))
  assert plan.epsilon() == bound.epsilon() < whole.epsilon()


def test_several_runs_add_up_without_amplification():
  plan = make_plan(sampling.MinSeparation(5, draws=DRAWS))
  ledger = plan + plan
  sigma = 2. / math.sqrt(2 * 6)  # Six participations in each.
  assert ledger.epsilon() == pytest.approx(gaussian.epsilon(sigma, 1e-2), rel=1e-6)
  one = plan_lib.ledger.Ledger().begin(plan).done(plan.steps)
  assert one.epsilon() == plan.epsilon()


def test_calibration_keeps_to_the_target():
  fields = dict(population_size=200, batch_size=20, steps=20, l2_norm_clip=1.0, target_delta=1e-2)
  for scheme in (sampling.BallsInBins(10, draws=DRAWS), sampling.MinSeparation(4, draws=DRAWS)):
    plan = plan_lib.PrivacyPlan.calibrate(target_epsilon=1.5, sampling=scheme, **fields)
    assert plan.epsilon() <= 1.5
    # Draws belong to the noise asked about, so that bounds of near ones differ by a tenth.
    less = dataclasses.replace(plan, noise_multiplier=.8 * plan.noise_multiplier)
    assert less.epsilon() > 1.5
    whole = plan_lib.PrivacyPlan.calibrate(
        target_epsilon=1.5, sampling=dataclasses.replace(scheme, draws=0), **fields)
    assert plan.noise_multiplier < whole.noise_multiplier


@pytest.mark.parametrize('mechanism, scheme', [
    (mechanisms.BandedToeplitz(6, 30), sampling.MinSeparation(5)),
    (mechanisms.BLT(2, 30, min_sep=5, max_participations=6), sampling.MinSeparation(5)),
    (mechanisms.Tree(30), sampling.BallsInBins(10, draws=9)),
    (mechanisms.BandedToeplitz(2, 30, coefficients=(.8, -.6)),
     sampling.BallsInBins(10, draws=9))], ids=repr)
def test_what_is_not_proven_is_refused(mechanism, scheme):
  with pytest.raises(ValueError, match='without negative entries'):
    make_plan(scheme, mechanism=mechanism)


def test_a_matrix_that_cannot_be_written_out_is_no_toeplitz_matrix():
  assert monte_carlo.coefficients(mechanisms.Tree(2**14)) is None


@pytest.mark.parametrize('adjacency', ['add_remove', 'replace'])
def test_only_zero_out_is_amplified(adjacency):
  for scheme in (sampling.BallsInBins(10, draws=9), sampling.MinSeparation(5)):
    with pytest.raises(ValueError, match='cannot be accounted for under'):
      make_plan(scheme, adjacency=adjacency, population_is_public=True)
    make_plan(dataclasses.replace(scheme, draws=0), adjacency=adjacency, population_is_public=True)


def test_correlated_noise_in_secret_bins():
  blt = mechanisms.BLT(2, 30, min_sep=10, max_participations=3)
  plan = make_plan(sampling.BallsInBins(10, draws=DRAWS), mechanism=blt)
  without, whole = (dataclasses.replace(plan, sampling=sampling.BallsInBins(10, draws=draws))
                    for draws in (None, 0))
  assert plan.epsilon() < without.epsilon() < whole.epsilon()
  c = blt.materialize(30)
  exact = [np.linalg.norm(c[:, first::10].sum(1)) for first in range(10)]
  known, *others = allocation.correlated(monte_carlo.coefficients(blt, 30), 30, 10, 2.0)
  assert known.noise_multiplier == pytest.approx(2.0 / max(exact), rel=1e-6)
  assert plan.event().bound in others
  assert plan.sampling.claims(plan)
