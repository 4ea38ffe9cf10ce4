# SPDX-License-Identifier: Apache-2.0
"""The account of discrete Gaussian noise, against sums over the integers."""

import dataclasses

import dp_accounting
import numpy as np
import pytest

import tfdp_adaptive as tfdp
from tfdp_adaptive import mechanisms
from tfdp_adaptive.accounting import cost
from tfdp_adaptive.accounting import discrete_gaussian

ROUNDING = mechanisms.IndependentGaussian(rounding=2**-4)


def make_plan(**changes):
  return tfdp.PrivacyPlan(**{**dict(
      population_size=1000, batch_size=50, steps=40, l2_norm_clip=1.0, noise_multiplier=1.0,
      target_delta=1e-5, mechanism=ROUNDING), **changes})


def masses(stddev, mean):
  n = np.arange(-60 * stddev, 60 * stddev + 1, dtype=np.float64)
  weights = np.exp(-(n - mean)**2 / (2 * stddev**2))
  return weights / weights.sum()


@pytest.mark.parametrize('q', [1.0, 0.3, 0.01])
@pytest.mark.parametrize('stddev, mean', [(1, 1), (2, 3), (3, 1), (5, 4)])
def test_renyi_divergences_are_below_the_account(q, stddev, mean):
  """Both directions, by sums over the integers, of one release with sensitivity `mean`."""
  without, with_it = masses(stddev, 0), masses(stddev, mean)
  mixed = (1 - q) * without + q * with_it
  event = discrete_gaussian.DiscreteGaussianDpEvent(stddev / mean)
  event = event if q == 1 else dp_accounting.PoissonSampledDpEvent(q, event)
  orders = [2, 3, 5, 8]
  account = dp_accounting.rdp.RdpAccountant(orders).compose(
      discrete_gaussian.as_continuous(event))._rdp
  kept = (mixed > 0) & (without > 0)
  for order, bound in zip(orders, account):
    for one, other in [(mixed[kept], without[kept]), (without[kept], mixed[kept])]:
      divergence = np.log(np.sum(other * (one / other)**order)) / (order - 1)
      assert divergence <= bound * (1 + 1e-9)


def test_the_other_direction_is_never_more():
  """Term by term, as the proof needs it: for all ratios r of the two masses."""
  r, q = np.meshgrid(np.logspace(-6, 6, 121), np.linspace(0, 1, 41))
  u, v = 1 - q + q * r, (1 - q) * r + q
  for order in (1.5, 2, 3, 7, 20):
    low = u**(1 - order) + r**order * v**(1 - order)
    high = u**order + r**(1 - order) * v**order
    assert np.all(low <= high * (1 + 1e-12))


def test_delta_of_one_release_is_below_the_account():
  without, with_it = masses(4, 0), masses(4, 3)
  event = discrete_gaussian.DiscreteGaussianDpEvent(4 / 3)
  for epsilon in (0.5, 1.0, 2.0):
    truth = np.sum(np.maximum(with_it - np.exp(epsilon) * without, 0))
    assert truth <= cost.delta(event, epsilon)


@pytest.mark.parametrize('sampling', [tfdp.sampling.Poisson(), tfdp.sampling.FixedOrder()])
def test_plans_pay_for_rounding_and_use_integer_orders_only(sampling):
  plan = make_plan(sampling=sampling)
  plain = dataclasses.replace(plan, mechanism=mechanisms.IndependentGaussian())
  less = dataclasses.replace(plain, noise_multiplier=plan.noise_multiplier / (1 + 2**-4))
  assert plain.epsilon() < less.epsilon() < plan.epsilon()
  assert plan.epsilon() == plan.epsilon(accountant='rdp') >= less.epsilon(accountant='rdp')
  assert discrete_gaussian.present(plan.event()) and not discrete_gaussian.present(plain.event())
  assert all(order == int(order) for order in discrete_gaussian.ORDERS)
  assert plan.delta(plan.epsilon()) <= 1e-5 * (1 + 1e-6)


def test_ledgers_calibration_and_files():
  plan = tfdp.PrivacyPlan.calibrate(target_epsilon=2.0, **{
      f.name: getattr(make_plan(), f.name) for f in dataclasses.fields(tfdp.PrivacyPlan)
      if f.name not in ('noise_multiplier', 'min_sep', 'max_participations')})
  assert 1.98 <= plan.epsilon() <= 2.0
  assert tfdp.PrivacyPlan.from_json(plan.to_json()) == plan
  assert mechanisms.from_json(ROUNDING.to_json()) == ROUNDING != mechanisms.IndependentGaussian()
  plain = make_plan(mechanism=mechanisms.IndependentGaussian())
  both = plan + plain
  assert both.epsilon() == both.epsilon(accountant='rdp') > plan.epsilon()
  assert 'Renyi differential privacy' in plan.statement()
  for words in ('rounded to a public grid', 'drawn exactly, from the discrete Gaussian',
                "noise comes from the operating system's generator and is added in integers"):
    assert words in plan.statement() and words not in plain.statement()


def test_integers_of_numpy_are_numbers():
  plan = make_plan(sampling=tfdp.sampling.FixedOrder(), noise_multiplier=np.int64(2),
                   extra_releases=(np.int64(2),), mechanism=mechanisms.IndependentGaussian())
  event = dp_accounting.ComposedDpEvent([dp_accounting.GaussianDpEvent(np.int64(2))] * 2)
  assert plan.epsilon() > 0 and cost.epsilon(event, 1e-5) > 0


@pytest.mark.parametrize('changes', [
    dict(adjacency='replace', population_is_public=True),
    dict(sampling=tfdp.sampling.TruncatedPoisson(max_batch_size=60)),
    dict(sampling=tfdp.sampling.BallsInBins(20, draws=1000)),
    dict(sampling=tfdp.sampling.FixedOrder(), extra_releases=(1.0,))],
                         ids=['replace', 'truncated', 'draws', 'past'])
def test_what_has_no_valid_account_is_refused(changes):
  with pytest.raises(ValueError, match='Noise on a grid is accounted for'):
    make_plan(**changes)
