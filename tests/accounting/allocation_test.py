# SPDX-License-Identifier: Apache-2.0
"""Random allocation: never below the truth, at most a percent above, drawn as accounted for."""

import dataclasses
import math

import dp_accounting
import numpy as np
import pytest
from scipy import integrate
from scipy import optimize
from scipy import stats

from tfdp_adaptive.accounting import allocation
from tfdp_adaptive.accounting import cost
from tfdp_adaptive.accounting import gaussian
from tfdp_adaptive.accounting import sampling
from tfdp_adaptive.mechanisms import BandedToeplitz
from tfdp_adaptive.privacy import plan as plan_lib

FINE = allocation.Precision(60.0)
CHUNK = 20_000


def deltas(ratio, epsilon):
  """Returns `(delta(P||Q), delta(Q||P))` of one allocation."""
  return (ratio.infinite + float(ratio.mass @ np.maximum(ratio.points - math.exp(epsilon), 0)),
          float(ratio.mass @ np.maximum(1 - math.exp(epsilon) * ratio.points, 0)))


def event(bins, sigma=1.0, size=1.0):
  return allocation.AllocationDpEvent(sigma, ((bins, size),))


def below(one, delta, precision=FINE):
  """A proven lower bound of epsilon, of the larger direction."""
  law = one.ratio(precision._replace(upper=False))
  return max(optimize.brentq(lambda e, k=k: deltas(law, e)[k] - delta, 0, 200)
             if deltas(law, 0)[k] > delta else 0.0 for k in (0, 1))


def two_bins(sigma, epsilon):
  """delta(P||Q) and delta(Q||P) of two bins, by a numerical integral over one of them."""
  m = 1 / sigma
  ratio = lambda z: np.exp(m * z - m**2 / 2)
  z = lambda r: (np.log(r) + m**2 / 2) / m if r > 0 else -math.inf

  def remove(a):  # E over the other bin of (R - e^eps)_+.
    need = 2 * math.exp(epsilon) - ratio(a)
    return stats.norm.pdf(a) / 2 * (stats.norm.sf(z(need) - m) - need * stats.norm.sf(z(need)))

  def add(a):
    need = 2 * math.exp(-epsilon) - ratio(a)
    if need <= 0:
      return 0.0
    return stats.norm.pdf(a) * math.exp(epsilon) / 2 * (
        need * stats.norm.cdf(z(need)) - stats.norm.cdf(z(need) - m))

  bends = [z(2 * math.exp(epsilon)), z(2 * math.exp(-epsilon))]
  integral = lambda f: integrate.quad(
      f, -12, 12 + m, limit=2000, epsabs=1e-14, epsrel=1e-9, points=bends)[0]
  return integral(remove), integral(add)


@pytest.mark.parametrize('sigma, epsilon', [(1.0, 0.5), (1.0, 2.0), (0.5, 6.0), (4.0, 0.3)])
def test_two_bins_are_bounded_by_their_integral_from_both_sides(sigma, epsilon):
  exact = two_bins(sigma, epsilon)
  above = deltas(event(2, sigma).ratio(FINE), epsilon)
  under = deltas(event(2, sigma).ratio(FINE._replace(upper=False)), epsilon)
  for low, value, high in zip(under, exact, above):
    assert low <= value * (1 + 1e-6) + 1e-13 and value <= high * (1 + 1e-6) + 1e-13
    assert high - low <= 0.01 * value + 1e-12


@pytest.mark.parametrize('groups, sigma', [
    (((64, 1.0),), 1.0), (((5, 1.0),), 0.6), (((3, 1.0), (7, 0.0)), 1.0),
    (((3, 2**0.5), (4, 1.0)), 1.5), (((200, 1.0),), 0.7)], ids=str)
def test_draws_of_the_loss_agree(groups, sigma):
  rng, draws = np.random.default_rng(5), 200_000
  m = np.concatenate([np.full(count, size / sigma) for count, size in groups])
  remove, add, epsilons = np.zeros(3), np.zeros(3), np.array([0.2, 0.7, 1.5])
  for _ in range(0, draws, CHUNK):
    z = rng.standard_normal((CHUNK, len(m)))
    loss = np.log(np.mean(np.exp(m * z - m**2 / 2), axis=1))  # Under Q.
    add += np.maximum(-np.expm1(epsilons[:, None] + loss), 0).sum(1) / draws
    bins = rng.integers(len(m), size=CHUNK)
    z[np.arange(CHUNK), bins] += m[bins]
    loss = np.log(np.mean(np.exp(m * z - m**2 / 2), axis=1))  # Under P.
    remove += np.maximum(-np.expm1(epsilons[:, None] - loss), 0).sum(1) / draws
  law = allocation.AllocationDpEvent(sigma, groups).ratio(FINE)
  for i, epsilon in enumerate(epsilons):
    for drawn, bound in zip((remove[i], add[i]), deltas(law, epsilon)):
      error = math.sqrt(max(drawn, 2 / draws) / draws)
      assert bound > drawn - 4 * error
      assert bound < 1.01 * drawn + 4 * error


@pytest.mark.parametrize('one, delta, golden', [
    (event(64), 1e-5, (0.821, 0.848)), (event(16, 2.878, 2.0), 1e-6, (0.963, 1.0)),
    (event(1000), 1e-6, (0.1686, 0.1757))])
def test_bounds_lie_between_those_of_another_library(one, delta, golden):
  low, high = below(one, delta), cost.epsilon(one, delta)
  assert golden[0] < low <= high < golden[1]
  assert high < 1.005 * low


@pytest.mark.parametrize('bins, size, sigma, delta', [
    (2, 1, 0.3, 1e-6), (3, 1, 10, 1e-9), (7, 2, 1, 1e-30), (100, 1, 0.4, 1e-5), (1000, 4, 3, 1e-8),
    (100_000, 1, 1, 1e-9), (64, 1, 100, 1e-7)])
def test_bounds_are_close_anywhere(bins, size, sigma, delta):
  one = event(bins, sigma, size)
  low = below(one, delta, allocation.Precision(40.0 - math.log(delta)))
  high = cost.epsilon(one, delta)
  assert low * (1 - 1e-9) <= high <= 1.01 * low


def test_one_bin_is_one_gaussian():
  law = event(1, 2.0).ratio(FINE)
  for epsilon in (0.1, 1.0):
    for delta in deltas(law, epsilon):
      exact = gaussian.delta(2.0, epsilon)
      assert exact <= delta * (1 + 1e-9) and delta <= 1.005 * exact
  assert event(3, 0.05).unamplified == dp_accounting.GaussianDpEvent(0.05)
  assert cost.epsilon(event(3, 0.05), 1e-6) == pytest.approx(  # Not worth its cost.
      gaussian.epsilon(0.05, 1e-6), rel=1e-5)


def test_the_mean_of_the_ratio_is_one_and_every_spread_only_adds():
  coarse, fine = (event(10).ratio(allocation.Precision(40.0, bulk, tail))
                  for bulk, tail in ((0.2, 0.1), (0.02, 0.01)))
  for law in (coarse, fine):
    assert law.mass.sum() == pytest.approx(1, abs=1e-12)
    assert law.mass @ law.points + law.infinite == pytest.approx(1, abs=1e-12)
  for epsilon in (0.1, 1.0, 3.0):
    assert all(a > b for a, b in zip(deltas(coarse, epsilon),
                                     deltas(fine, epsilon)))


def make_plan(scheme, **changes):
  return plan_lib.PrivacyPlan(**{**dict(
      population_size=4096, batch_size=256, steps=64, l2_norm_clip=1.0, noise_multiplier=2.272,
      target_delta=1e-6, sampling=scheme), **changes})


FRESH, SAME = sampling.RandomAllocation(cycle=16), sampling.BallsInBins(cycle=16)


def test_a_fresh_bin_costs_less_than_coins_and_one_bin_more():
  def noise(scheme):
    fields = dataclasses.asdict(make_plan(scheme))
    for name in ('noise_multiplier', 'sampling', 'mechanism', 'search'):
      del fields[name]
    return plan_lib.PrivacyPlan.calibrate(
        target_epsilon=1.0, sampling=scheme, **fields).noise_multiplier

  fresh, same, coins = noise(FRESH), noise(SAME), noise(sampling.Poisson())
  assert fresh == pytest.approx(2.2365, abs=2e-3) and coins == pytest.approx(2.440, abs=2e-3)
  assert same == pytest.approx(2.852, abs=2e-3)
  whole = make_plan(dataclasses.replace(SAME, draws=0), noise_multiplier=8.449)
  assert whole.epsilon() == pytest.approx(1.0, abs=2e-3)


@pytest.mark.parametrize('change', [
    dict(adjacency='replace'), dict(mechanism=BandedToeplitz(2, 64, coefficients=(0.8, -0.6))),
    dict(extra_releases=(1.0,))],
    ids=str)
def test_what_is_not_proven_is_not_claimed(change):
  with pytest.raises(ValueError, match='amplif|cannot be accounted|extra_releases'):
    make_plan(FRESH, **change)
  plan = make_plan(SAME, **change)
  assert not plan.amplified
  assert plan.epsilon() == make_plan(dataclasses.replace(SAME, draws=0), **change).epsilon()


def test_bins_of_a_plan_that_was_written_before_are_public_still():
  text = make_plan(dataclasses.replace(SAME, draws=0)).to_json()
  assert not plan_lib.PrivacyPlan.from_json(text).amplified


def test_a_round_is_one_pass_and_rounds_are_drawn_anew():
  plan = make_plan(FRESH)
  batches = [list(plan.index_batches()) for _ in range(2)]
  for begin in range(0, 64, 16):
    one = np.concatenate(batches[0][begin:begin + 16])
    np.testing.assert_array_equal(np.sort(one), np.arange(4096))
  place = np.array([[next(t for t in range(16) if record in set(run[begin + t].tolist()))
                     for record in range(200)] for run in batches for begin in (0, 16)])
  for i in range(4):
    for j in range(i):  # 200 / 16 = 12.5 agree by chance.
      assert 1 <= np.sum(place[i] == place[j]) <= 32


def test_between_rounds_no_coins_are_needed_and_within_a_round_they_are(tmp_path):
  plan = make_plan(FRESH)
  next(plan.index_batches(start_step=32))
  with pytest.raises(ValueError, match='cannot resume'):
    next(plan.index_batches(start_step=33))
  whole = list(plan.index_batches(coins=tmp_path / 'coins'))
  rest = list(plan.index_batches(start_step=37, coins=tmp_path / 'coins'))
  assert all(map(np.array_equal, whole[37:], rest)) and len(rest) == 27
