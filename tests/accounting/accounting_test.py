# SPDX-License-Identifier: Apache-2.0
"""Golden values, independent oracles, and the wrong variants that must not be what comes out."""

import dataclasses
import math

import dp_accounting
import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest
from scipy import integrate

from tfdp_adaptive import mechanisms
from tfdp_adaptive.accounting import cost
from tfdp_adaptive.accounting import gaussian
from tfdp_adaptive.accounting import sampling
from tfdp_adaptive.privacy import plan as plan_lib

CURRENT = hasattr(dp_accounting, 'TruncatedSubsampledGaussianDpEvent')
needs_current = pytest.mark.skipif(not CURRENT, reason='needs dp-accounting 0.6.0')


def make_plan(**changes):
  fields = dict(population_size=10_000, batch_size=100, steps=1000, l2_norm_clip=1.0,
                noise_multiplier=1.0, target_delta=1e-5)
  fields.update(changes)
  return plan_lib.PrivacyPlan(**fields)


def hockey_stick(p, q, epsilon, low=-60, high=60):
  """`max over both orders of int max(0, p - e^epsilon q)` by quadrature on a fine grid."""
  x = np.linspace(low, high, 2_000_001)
  p, q = p(x), q(x)
  return max(integrate.trapezoid(np.maximum(a - math.exp(epsilon) * b, 0), x)
             for a, b in ((p, q), (q, p)))


def normal(mean, std):
  return lambda x: np.exp(-((x - mean) / std)**2 / 2) / (std * math.sqrt(2 * math.pi))


# --- Published and independently computed values.


@pytest.mark.parametrize('sigma, squared_sensitivity, delta, expected', [
    (1.411, 0.6, 1e-10, 3.4240074094),  # Gboard es-ES.
    (8.35, 2.0, 1e-10, 0.9935500951),  # Gboard pt-BR.
    (1.0, 3.0, 1e-7, 10.0452904),
    (0.134466, 3.0, 1e-7, 149.0927),
])
def test_gaussian_epsilons_are_the_published_ones(sigma, squared_sensitivity, delta, expected):
  got = gaussian.epsilon(sigma / math.sqrt(squared_sensitivity), delta)
  # They were published by privacy loss distributions, which are up to 1.4e-7 above the truth.
  np.testing.assert_allclose(got, expected, rtol=4e-7)
  if CURRENT:
    exact = dp_accounting.get_epsilon_gaussian(sigma / math.sqrt(squared_sensitivity), delta)
    np.testing.assert_allclose(got, exact, rtol=1e-11)


@pytest.mark.parametrize('sigma', [0.3, 1.0, 5.0, 40.0])
@pytest.mark.parametrize('epsilon', [0.0, 0.1, 1.0, 6.0])
def test_gaussian_delta_is_the_hockey_stick_divergence(sigma, epsilon):
  got = gaussian.delta(sigma, epsilon)
  oracle = hockey_stick(normal(0, sigma), normal(1, sigma), epsilon, -400, 400)
  np.testing.assert_allclose(got, oracle, rtol=2e-5, atol=1e-12)


@pytest.mark.parametrize('sigma', [1e-3, 0.05, 1.0, 30.0, 1e4])
@pytest.mark.parametrize('delta', [1e-12, 1e-5, 0.1])
def test_gaussian_epsilon_inverts_delta_on_the_private_side(sigma, delta):
  epsilon = gaussian.epsilon(sigma, delta)
  assert gaussian.delta(sigma, epsilon) <= delta * (1 + 1e-6)
  if epsilon:
    assert gaussian.delta(sigma, epsilon * (1 - 1e-5)) > delta


@pytest.mark.parametrize('bands, expected', [
    (1, 0.363020), (8, 1.452344), (32, 3.208604), (128, 6.463809)])
def test_banded_noise_with_cyclic_poisson_sampling(bands, expected):
  plan = make_plan(
      population_size=1_700_000, batch_size=2048, steps=2000, target_delta=1e-7,
      mechanism=mechanisms.BandedToeplitz(bands=bands, steps=2000),
      sampling=sampling.CyclicPoisson(cycle=bands))
  assert -1e-6 < plan.epsilon() - expected < 3e-5  # `plan` states an upper bound.


@pytest.mark.both_stacks
def test_the_cycle_is_accounted_for_and_not_the_bands():
  plan = make_plan(
      population_size=1_700_000, batch_size=2048, steps=2000, target_delta=1e-7,
      mechanism=mechanisms.BandedToeplitz(bands=8, steps=2000),
      sampling=sampling.CyclicPoisson(cycle=32))
  assert plan.epsilon() == pytest.approx(3.2086, abs=1e-3)  # Not 1.452.


@pytest.mark.parametrize('sigma, expected', [(1.0, 10.0453), (0.134466, 149.09)])
def test_published_table_of_three_epochs_of_banded_noise(sigma, expected):
  plan = make_plan(
      population_size=2800, batch_size=4, steps=2000, target_delta=1e-7, noise_multiplier=sigma,
      mechanism=mechanisms.BandedToeplitz(bands=128, steps=2000),
      sampling=sampling.FixedOrder())
  assert plan.participation() == (700, 3)
  np.testing.assert_allclose(plan.epsilon(), expected, rtol=1e-4)


@pytest.mark.both_stacks
def test_dp_sgd():
  plan = make_plan(population_size=1000, steps=512, noise_multiplier=3.0, target_delta=1e-6)
  np.testing.assert_allclose(plan.epsilon(), 3.769687, rtol=1e-5)


def test_tree_is_accounted_for_exactly_and_tighter_than_by_rdp():
  tree = mechanisms.Tree(steps=2000)
  plan = make_plan(
      population_size=2000 * 4, batch_size=4, steps=2000, target_delta=1e-7,
      noise_multiplier=2 / math.sqrt(11), mechanism=tree, sampling=sampling.FixedOrder())
  np.testing.assert_allclose(plan.epsilon(), 9.546, rtol=1e-3)
  np.testing.assert_allclose(plan.epsilon(accountant='rdp'), 10.090, rtol=1e-3)


def test_rdp_is_looser():
  plan = make_plan(population_size=2800, batch_size=4, steps=2000, target_delta=1e-7,
                   sampling=sampling.FixedOrder())
  np.testing.assert_allclose(plan.epsilon(accountant='rdp'), 10.61, rtol=1e-3)


@pytest.mark.parametrize('adjacency', ['zero_out', 'replace'])
def test_unsampled_noise_is_in_units_of_the_sensitivity_under_both_adjacencies(adjacency):
  plan = make_plan(sampling=sampling.FixedOrder(), adjacency=adjacency, steps=200)
  assert plan.event() == dp_accounting.GaussianDpEvent(1 / math.sqrt(2))
  assert plan.noise_stddev == {'zero_out': 1.0, 'replace': 2.0}[adjacency]
  np.testing.assert_allclose(
      plan.epsilon(), gaussian.epsilon(1 / math.sqrt(2), 1e-5))


# --- Wrong variants, q = .01, sigma = 1, 1000 steps, delta = 1e-5.


@pytest.mark.pitfall(
    'Amplification by sampling is claimed for shuffled batches.',
    severity='critical', stops='the plan claims no amplification for such batches')
def test_poisson_amplification_is_claimed_for_poisson_batches_only():
  assert make_plan().epsilon() == pytest.approx(1.828, abs=2e-3)
  fixed = make_plan(sampling=sampling.FixedOrder())
  bins = make_plan(sampling=sampling.BallsInBins(cycle=100, draws=0))
  # Ten full participations; 10.37 is what one can prove to leak from fixed-size sampling.
  assert fixed.epsilon() == bins.epsilon() == pytest.approx(
      gaussian.epsilon(1 / math.sqrt(10), 1e-5))
  assert fixed.epsilon() > 10.37


def test_two_queries_of_one_batch_are_one_event():
  joint = dp_accounting.SelfComposedDpEvent(
      dp_accounting.PoissonSampledDpEvent(.01, dp_accounting.GaussianDpEvent(2**-.5)), 1000)
  split = dp_accounting.SelfComposedDpEvent(
      dp_accounting.PoissonSampledDpEvent(.01, dp_accounting.GaussianDpEvent(1.0)), 2000)
  assert cost.epsilon(joint, 1e-5) == pytest.approx(4.48, abs=0.01)
  assert cost.epsilon(split, 1e-5) == pytest.approx(2.58, abs=0.01)
  event = make_plan().event()
  assert event.count == 1000 and event.event.event.noise_multiplier == 1.0


@needs_current
def test_poisson_under_replace_is_read_as_replacement_of_one_sum():
  plan = make_plan(adjacency='replace')
  assert cost.relation(plan) is dp_accounting.NeighboringRelation.REPLACE_ONE
  assert plan.event().event.event.noise_multiplier == 2.0  # The doubled noise, in clip norms.
  half = cost.epsilon(make_plan(noise_multiplier=2.0).event(), 1e-5)
  assert half < plan.epsilon() < make_plan().epsilon()


def test_sensitivity_divides_the_noise_multiplier_once():
  mechanism = mechanisms.SquareRoot(steps=300)
  plan = make_plan(steps=300, mechanism=mechanism, sampling=sampling.FixedOrder())
  sensitivity = mechanism.sensitivity(min_sep=100, max_participations=3)
  assert sensitivity > math.sqrt(3)
  np.testing.assert_allclose(plan.event().noise_multiplier, 1 / sensitivity, rtol=1e-6)


def test_the_larger_sensitivity_counts_of_the_strategy_as_designed_and_as_rounded():
  of = lambda m: m.sensitivity(min_sep=20, max_participations=2)
  larger = set()
  for steps in range(30, 40):
    mechanism = mechanisms.SquareRoot(steps=steps)
    designed, rounded = of(mechanism), of(mechanism.rounded('float32'))
    assert cost.sensitivity(mechanism, 20, 2) == max(designed, rounded)
    larger.add(rounded > designed)
  assert larger == {True, False}


# --- Truncation.


@needs_current
@pytest.mark.both_stacks
def test_truncated_batches_cost_more_and_a_wide_limit_costs_nothing():
  poisson = make_plan(population_size=2000, steps=10).epsilon()
  cut, whole = [
      make_plan(population_size=2000, steps=10,
                sampling=sampling.TruncatedPoisson(max_batch_size=limit)).epsilon()
      for limit in (110, 400)]
  assert cut > 1.1 * poisson
  np.testing.assert_allclose(whole, poisson, rtol=1e-6)


def test_old_library_refuses_what_it_does_not_know(monkeypatch):
  monkeypatch.setattr(cost, '_HAS_TRUNCATED', False)
  with pytest.raises(ValueError, match='TruncatedPoisson needs dp-accounting 0.6.0'):
    make_plan(sampling=sampling.TruncatedPoisson(max_batch_size=200))
  with pytest.raises(ValueError, match='replace adjacency needs dp-accounting 0.6.0'):
    make_plan(adjacency='replace')
  assert make_plan(adjacency='replace', sampling=sampling.FixedOrder()).epsilon() > 0


# --- Calibration.


@pytest.mark.thorough
@hypothesis.settings(max_examples=7)
@hypothesis.given(
    target=st.floats(0.01, 30), log_delta=st.floats(-9, -4), steps=st.integers(1, 3000),
    share=st.floats(0.001, 1.0), scheme=st.sampled_from([
        sampling.Poisson(), sampling.FixedOrder(), sampling.CyclicPoisson(cycle=2)]))
def test_calibrated_plans_keep_to_the_target(target, log_delta, steps, share, scheme):
  batch_size = max(1, int(20_000 * share))
  hypothesis.assume(not isinstance(scheme, sampling.CyclicPoisson) or batch_size <= 10_000)
  plan = plan_lib.PrivacyPlan.calibrate(
      target_epsilon=target, target_delta=10**log_delta, population_size=20_000,
      batch_size=batch_size, steps=steps, l2_norm_clip=1.0, sampling=scheme)
  assert 0.99 * target <= plan.epsilon() <= target


@pytest.mark.both_stacks
def test_calibration_golden_value():
  plan = plan_lib.PrivacyPlan.calibrate(
      target_epsilon=8.0, target_delta=1e-7, population_size=1_700_000, batch_size=2048,
      steps=2000, l2_norm_clip=1.0, mechanism=mechanisms.BandedToeplitz(bands=32, steps=2000),
      sampling=sampling.CyclicPoisson(cycle=32))
  assert plan.noise_multiplier == pytest.approx(0.682337, rel=5e-4)
  assert plan.noise_multiplier >= 0.682336


def test_orders_that_are_left_out_are_not_talked_about(caplog):
  event = dp_accounting.PoissonSampledDpEvent(0.125, dp_accounting.GaussianDpEvent(1.341604))
  assert 0 < cost.epsilon(event, 1e-5, 'rdp') < 10
  assert not caplog.records
  dp_accounting.rdp.RdpAccountant().compose(event)  # It is so for one's own use only.
  assert 'Excluding this order' in caplog.text


def test_calibration_by_rdp():
  fields = dict(target_epsilon=2.0, target_delta=1e-5, population_size=10_000, batch_size=100,
                steps=100, l2_norm_clip=1.0)
  plan = plan_lib.PrivacyPlan.calibrate(accountant='rdp', **fields)
  assert 1.98 <= plan.epsilon(accountant='rdp') <= 2.0
  assert plan.noise_multiplier > plan_lib.PrivacyPlan.calibrate(**fields).noise_multiplier


def test_calibration_refuses_targets_that_need_no_noise():
  with pytest.raises(ValueError, match='is no privacy'):
    plan_lib.PrivacyPlan.calibrate(
        target_epsilon=1e13, target_delta=1e-5, population_size=100, batch_size=10, steps=1,
        l2_norm_clip=1.0, sampling=sampling.FixedOrder())


@pytest.mark.parametrize('target', [0.0, -1.0, math.nan, math.inf])
def test_calibration_refuses_senseless_targets(target):
  with pytest.raises(ValueError, match='`target_epsilon` must be positive and finite'):
    plan_lib.PrivacyPlan.calibrate(target_epsilon=target, target_delta=1e-5, population_size=100,
                                   batch_size=10, steps=1, l2_norm_clip=1.0)


# --- Steps.


def test_a_cycle_begun_counts_whole():
  plan = make_plan(sampling=sampling.CyclicPoisson(cycle=10), steps=95)
  assert [plan.event(s).count for s in (1, 10, 11, 95)] == [1, 1, 2, 10]
  fixed = make_plan(sampling=sampling.FixedOrder(), steps=250)
  assert [fixed.participation(s) for s in (1, 100, 101, 250)] == [
      (100, 1), (100, 1), (100, 2), (100, 3)]


@pytest.mark.pitfall(
    'A run without noise has a finite epsilon.',
    severity='critical', stops='epsilon is infinite')
def test_without_noise_there_is_no_privacy():
  plan = make_plan(noise_multiplier=0)
  assert plan.epsilon() == math.inf and plan.delta(5.0) == 1.0 and plan.epsilon(0) == 0
  assert 'NO PRIVACY GUARANTEE' in plan.statement()


@pytest.mark.parametrize('sigma', [0.01, 0.02, 0.1])
def test_tiny_noise_is_accounted_for_in_reasonable_time(sigma):
  plan = make_plan(noise_multiplier=sigma, steps=10)
  assert 10 < plan.epsilon() < 1e6
  once = gaussian.epsilon(sigma, 1e-5) + math.log(0.01)  # Sampled, and seen at once.
  assert once < plan.epsilon()


@pytest.mark.parametrize('sigma', [1e-5, 1e-12, 1e-200])
def test_next_to_no_noise_is_no_privacy(sigma):
  plan = make_plan(noise_multiplier=sigma, steps=10)
  assert plan.epsilon() == math.inf and plan.delta(1e9) == 1


def test_a_longer_run_costs_what_its_parts_cost_together():
  plan = make_plan(steps=200)
  twice = dp_accounting.SelfComposedDpEvent(dataclasses.replace(plan, steps=100).event(), 2)
  np.testing.assert_allclose(cost.epsilon(twice, 1e-5), plan.epsilon(), rtol=1e-9)
