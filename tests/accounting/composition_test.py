# SPDX-License-Identifier: Apache-2.0
"""Composed losses against accountants that share nothing with ours, at any delta.

`ACCOUNTING_PLANS=1000 pytest tests/accounting/composition_test.py` runs the whole sweep.
"""

import math
import os

import accounting_oracle
import dp_accounting
import mpmath
import numpy as np
import pytest

from tfdp_adaptive.accounting import composition
from tfdp_adaptive.accounting import cost
from tfdp_adaptive.accounting import gaussian
from tfdp_adaptive.accounting import losses

ADD_OR_REMOVE = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE = dp_accounting.NeighboringRelation.REPLACE_ONE
# Error of the oracle itself, found by moving its path of integration. It matters if records take
# part less than about once, because the transform then hardly falls.
ORACLE = 1e-4
PLANS = int(os.environ.get('ACCOUNTING_PLANS', '8'))


def sampled(q, sigma, count):
  return dp_accounting.SelfComposedDpEvent(
      dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma)), count)


def random_plan(seed):
  """Some that cost next to nothing, some far too much; records take part .3 to 1,000 times."""
  rng = np.random.default_rng(seed)
  q = 10**rng.uniform(-5, -0.1)
  count = math.ceil(10**rng.uniform(-0.5, 3) / q)
  sigma = max(0.35, 10**rng.uniform(-0.5, 0.7) * q * math.sqrt(count) + rng.uniform(0, 0.6))
  return float(q), float(sigma), count, 10**rng.uniform(-15, -3)


def single_step(q, sigma, epsilon):
  """Exact delta of one sampled step when a record is removed, with fifty digits."""
  with mpmath.workdps(50):
    q, sigma, epsilon = map(mpmath.mpf, (q, sigma, epsilon))
    ratio = (mpmath.exp(epsilon) - 1 + q) / q
    z = (sigma**2 * mpmath.log(ratio) + mpmath.mpf(1) / 2) / sigma
    absent, present = mpmath.erfc(z / mpmath.sqrt(2)) / 2, mpmath.erfc(
        (z - 1 / sigma) / mpmath.sqrt(2)) / 2
    return (1 - q) * absent + q * present - mpmath.exp(epsilon) * absent


# --- Never below, at most one percent above.


@pytest.mark.thorough(rows=['3'])
@pytest.mark.pitfall(
    'The accountant is below the truth at a tiny delta, by its own rounding.',
    severity='critical',
    stops='the accountant returns a proven upper bound, and tests compare it with an independent '
          'one')
@pytest.mark.parametrize('seed', [
    *range(PLANS), pytest.param(391, marks=pytest.mark.slow, id='57 million steps')])
def test_epsilon_is_never_below_the_truth_and_at_most_a_percent_above(seed):
  q, sigma, count, delta = random_plan(seed)
  epsilon = cost.epsilon(sampled(q, sigma, count), delta)
  truth = accounting_oracle.Oracle(q, sigma, count, 'remove')
  assert truth.log_delta(epsilon) <= math.log(delta) + ORACLE
  assert truth.log_delta(0.99 * epsilon) > math.log(delta)


def test_adding_a_record_is_counted_too():
  (_, steps) = losses.directions(sampled(0.05, 1.5, 40), ADD_OR_REMOVE)
  epsilon = composition.Composition(steps).epsilon(1e-5, 1e-6)
  truth = accounting_oracle.Oracle(0.05, 1.5, 40, 'add')
  assert truth.log_delta(epsilon) <= math.log(1e-5) < truth.log_delta(0.9999 * epsilon)


def test_losses_that_are_not_composed_count_in_full():
  steps, _ = losses.directions(sampled(0.05, 1.5, 40), ADD_OR_REMOVE)
  part, whole = (composition.Composition(steps, reach).epsilon(1e-3, 1e-6)
                 for reach in (8.0, 600.0))
  assert part > whole


@pytest.mark.parametrize('q, sigma, count, delta, epsilon', [
    (3e-5, 0.35, 5000, 1e-12, 12.876853), (0.01, 1.0, 1000, 1e-5, 1.8282367),
    (0.1, 3.0, 512, 1e-6, 3.7696838)])  # By the oracle, at finer accuracy.
def test_epsilons_known_from_elsewhere(q, sigma, count, delta, epsilon):
  got = cost.epsilon(sampled(q, sigma, count), delta)
  assert epsilon <= got <= epsilon * (1 + 2e-5)


@pytest.mark.thorough(rows=['1e-06-0.4-1e-08'])
@pytest.mark.parametrize('delta', [1e-3, 1e-8, 1e-15, 1e-40, 1e-90])
@pytest.mark.parametrize('q, sigma', [(1e-6, 0.4), (0.01, 1.0), (0.6, 0.2), (0.3, 20.0)])
def test_one_step_at_any_delta(q, sigma, delta):
  epsilon = cost.epsilon(sampled(q, sigma, 1), delta)
  if epsilon:
    assert single_step(q, sigma, epsilon) <= delta
    # Where epsilon is next to nothing and delta almost flat, the bound on rounding shows.
    assert single_step(q, sigma, (0.999 if epsilon > 0.01 else 0.9) * epsilon) > delta
  else:
    assert single_step(q, sigma, 0) <= delta


@pytest.mark.parametrize(
    'sigma, count, delta', [(0.3, 1, 1e-15), (5.0, 40, 1e-12), (40., 1000, 1e-30)])
def test_whole_batches_are_the_closed_form(sigma, count, delta):
  steps = (((((1.0, losses.Pair('remove', 1.0, 1 / sigma)),), count)),)
  got = composition.Composition(steps).epsilon(delta, 1e-6)
  exact = gaussian.epsilon(sigma / math.sqrt(count), delta)
  assert exact <= got <= exact * (1 + 3e-6)


@pytest.mark.parametrize('delta', [1e-4, 1e-13])
def test_replacement_is_never_below_the_truth(delta):
  epsilon = cost.epsilon(sampled(0.02, 1.6, 300), delta, neighbors=REPLACE)
  truth = accounting_oracle.Oracle(0.02, 1.6, 300, 'replace').log_delta
  assert truth(epsilon) <= math.log(delta) < truth(0.9999 * epsilon)


def test_delta_inverts_epsilon():
  event = sampled(0.02, 1.2, 200)
  for delta in (1e-4, 1e-14):
    epsilon = cost.epsilon(event, delta)
    assert delta * 0.999 <= cost.delta(event, epsilon) <= delta * 1.001


@pytest.mark.parametrize('delta', [1e-6, 1e-14])
def test_finer_grids_come_down_to_the_truth(delta):
  """Every grid is an upper bound: none is below a finer one."""
  (steps, _) = losses.directions(sampled(0.003, 0.6, 700), ADD_OR_REMOVE)
  one = composition.Composition(steps)
  epsilons = [one.epsilon(delta, tolerance) for tolerance in (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)]
  assert epsilons == sorted(epsilons, reverse=True)
  assert epsilons[0] < one.chernoff_epsilon(delta)[1] * (1 + 1e-9)


# --- Parts.


@pytest.mark.parametrize('kind', ['remove', 'add', 'replace'])
@pytest.mark.parametrize('q, m', [(1e-6, 3.0), (0.1, 0.01), (0.7, 1.0), (1.0, 2.0), (0.01, 100.0)])
def test_atoms_keep_the_mass_of_both_distributions(kind, q, m):
  pair = losses.Pair(kind, q, m)
  loss, log_mass = pair.atoms(40.0)
  assert (np.diff(loss) >= 0).all()
  mass = np.exp(log_mass)
  assert mass.sum() == pytest.approx(1, abs=1e-13)  # The mass of P.
  of_q = (mass * np.exp(-loss)).sum()  # The mass of Q, without its part far from P.
  assert of_q == pytest.approx(1, abs=1e-12 if m < 10 else q) and of_q <= 1 + 1e-12


def test_losses_are_the_logarithm_of_two_densities():
  normal = lambda z, mean: np.exp(-(z - mean)**2 / 2)
  z = np.linspace(-5, 5, 101)
  mixed = lambda mean: 0.3 * normal(z, mean) + 0.7 * normal(z, 0)
  for kind, p, q in (('remove', mixed(2), normal(z, 0)), ('add', normal(z, 0), mixed(-2)),
                     ('replace', mixed(2), mixed(-2))):
    np.testing.assert_allclose(losses.Pair(kind, 0.3, 2.0).loss(z), np.log(p / q), rtol=1e-12,
                               atol=1e-14)


# --- What is answered in seconds, or refused.


@pytest.mark.thorough
@pytest.mark.parametrize('count', [10**7])
def test_very_long_runs_are_answered(count):
  q = 1e-5
  epsilon = cost.epsilon(sampled(q, 1.0, count), 1e-9)
  mu = q * math.sqrt(count * math.expm1(1.0))  # The limit, as a plain Gaussian.
  assert gaussian.epsilon(1 / mu, 1e-9) * 0.98 < epsilon < 1.25 * (
      gaussian.epsilon(1 / mu, 1e-9))


@pytest.mark.pitfall(
    'A delta is requested that floating-point numbers cannot express.',
    severity='high', stops='ValueError')
def test_deltas_beyond_floating_point_are_refused():
  with pytest.raises(ValueError, match='`target_delta` must be at least 1e-100'):
    cost.epsilon(sampled(0.1, 1.0, 10), 1e-200)


def test_other_events_are_refused_by_name():
  with pytest.raises(ValueError, match='implemented for Gaussian noise.*LaplaceDpEvent'):
    cost.epsilon(dp_accounting.LaplaceDpEvent(1.0), 1e-5)


@pytest.mark.thorough(rows=['1e-09-1e-05'])
@pytest.mark.parametrize('target, delta', [(1e-9, 1e-5), (1e-3, 1e-3), (500.0, 1e-6)])
def test_calibration_to_extreme_targets(target, delta):
  event_of = lambda sigma: sampled(0.01, sigma, 1000)
  sigma = cost.calibrate(event_of, target, delta)
  assert cost.epsilon(event_of(sigma), delta) <= target
  assert cost.delta(event_of(0.999 * sigma), target) > delta


@pytest.mark.thorough(rows=['0.0001-100000-0.01'])
@pytest.mark.parametrize('q, count, target', [(1e-4, 10**5, 0.01), (0.01, 1000, 2.0)])
def test_a_calibration_takes_few_transforms(q, count, target, monkeypatch):
  """What its time is spent on; each transform of four million numbers takes a second."""
  sizes, of = [], composition.fft.rfft
  monkeypatch.setattr(composition.fft, 'rfft', lambda x: sizes.append(len(x)) or of(x))
  sigma = cost.calibrate(lambda sigma: sampled(q, sigma, count), target, 1e-9)
  assert 0.99 * target < cost.epsilon(sampled(q, sigma, count), 1e-9) <= target
  assert len(sizes) <= 16 and sum(sizes) <= 1 << 24


def test_unsampled_steps_beside_sampled_ones_are_one_gaussian():
  """Sixteen Gaussians of noise 8 are one of noise 2, also in what is composed with others."""
  sampled = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(1.0))
  sixteen = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(8.0), 16)
  together, one = (cost.epsilon(dp_accounting.ComposedDpEvent((event, sampled)), 1e-5)
                   for event in (sixteen, dp_accounting.GaussianDpEvent(2.0)))
  assert together == pytest.approx(one, rel=1e-6)
