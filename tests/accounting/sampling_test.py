# SPDX-License-Identifier: Apache-2.0
"""The batches that run are the ones that were accounted for."""

import collections
import itertools

import dp_accounting
import numpy as np
import pytest
from scipy import stats

from tfdp_adaptive.accounting import sampling
from tfdp_adaptive.batches import sampling_seed
from tfdp_adaptive.privacy import plan as plan_lib


def make_plan(scheme, **changes):
  fields = dict(population_size=200, batch_size=20, steps=60, l2_norm_clip=1.0,
                noise_multiplier=1.0, target_delta=1e-5, sampling=scheme, seed=7)
  fields.update(changes)
  return plan_lib.PrivacyPlan(**fields)


SCHEMES = [
    sampling.Poisson(), sampling.TruncatedPoisson(max_batch_size=25),
    sampling.CyclicPoisson(cycle=4), sampling.BallsInBins(cycle=10, draws=0),
    sampling.BallsInBins(cycle=10), sampling.RandomAllocation(cycle=10), sampling.FixedOrder(),
    sampling.FixedOrder(shuffle_seed=None)]
CURRENT = hasattr(dp_accounting, 'TruncatedSubsampledGaussianDpEvent')
if not CURRENT:
  SCHEMES = [s for s in SCHEMES if not isinstance(s, sampling.TruncatedPoisson)]


def steps_of_record(batches):
  """{record: steps in which it takes part}."""
  steps = collections.defaultdict(list)
  for step, batch in enumerate(batches):
    for record in batch:
      steps[record].append(step)
  return steps


@pytest.mark.parametrize('scheme', [
    scheme for scheme in SCHEMES if isinstance(scheme, sampling.Poisson)], ids=repr)
def test_the_rate_is_not_rounded(scheme):
  """What is drawn, divided by and accounted for is B / N to the last digit: here 1 / 299."""
  plan = make_plan(scheme, population_size=2990, batch_size=10, steps=4000,
                   population_is_public=True)
  cycle = scheme.cycle
  assert scheme.probability(plan) == pytest.approx(cycle * 10 / 2990, rel=1e-14)
  total = sum(map(len, plan.index_batches()))
  law = stats.binom(2990 * 4000 // cycle, cycle / 299)
  assert 1e-6 < law.cdf(total) < 1 - 1e-6
  wrong = stats.binom(2990 * 4000 // cycle, cycle * .003)
  assert not 1e-6 < wrong.cdf(total) < 1 - 1e-6


@pytest.mark.parametrize('scheme', [
    sampling.FixedOrder(), sampling.BallsInBins(cycle=10, draws=0),
    sampling.CyclicPoisson(cycle=4)],
    ids=repr)
@pytest.mark.parametrize('start_step', [1, 13, 59])
def test_a_resumed_run_keeps_the_pattern(scheme, start_step):
  plan = make_plan(scheme, seed=None)
  first = list(itertools.islice(plan.index_batches(), start_step))
  batches = first + list(plan.index_batches(start_step=start_step))
  assert len(batches) == plan.steps
  min_sep, _ = plan.participation()
  for steps in steps_of_record(batches).values():
    assert all((b - a) % min_sep == 0 and b > a for a, b in zip(steps, steps[1:]))


@pytest.mark.parametrize('scheme', [s for s in SCHEMES if s.amplified], ids=repr)
def test_coins_are_never_repeated(scheme):
  plan = make_plan(scheme, seed=None)
  runs = [[tuple(sorted(b)) for b in plan.index_batches()] for _ in range(3)]
  assert len({batch for run in runs for batch in run}) == 3 * plan.steps
  fixed = make_plan(scheme)
  assert len({tuple(sorted(b)) for b in fixed.index_batches()}) == plan.steps


@pytest.mark.parametrize('scheme', [sampling.BallsInBins(cycle=10),
                                    sampling.CyclicPoisson(cycle=4)], ids=repr)
def test_groups_under_add_remove_are_secret_and_not_resumed(scheme):
  plan = make_plan(scheme, adjacency='add_remove', population_is_public=True, seed=None)
  with pytest.raises(ValueError, match='cannot resume.*start_step=3'):
    next(plan.index_batches(start_step=3))


def test_groups_of_records_do_not_move_when_one_is_removed():
  # With its own die per record, the others' dice are the same whoever comes last.
  plan = make_plan(sampling.BallsInBins(cycle=10), adjacency='add_remove',
                   population_is_public=True)
  groups = plan.sampling._groups(plan, 200, 0, sampling_seed.SamplingSeed(plan))
  fewer = plan.sampling._groups(plan, 199, 0, sampling_seed.SamplingSeed(plan))
  for group, same in zip(groups, fewer):
    np.testing.assert_array_equal(group[group < 199], same)


def participation_counts(plan, runs):
  counts, sizes, total = np.zeros(200), [], 0
  for _ in range(runs):
    for batch in plan.index_batches():
      counts[batch] += 1
      sizes.append(len(batch))
      total += 1
  return counts, np.array(sizes), total


@pytest.mark.parametrize('scheme', [sampling.Poisson(), sampling.CyclicPoisson(cycle=4)],
                         ids=repr)
def test_the_rate_is_the_accounted_one_and_a_wrong_one_would_show(scheme):
  plan = make_plan(scheme, steps=200, seed=None)
  counts, sizes, total = participation_counts(plan, 20)
  draws = total * 200 // scheme.cycle

  def p_value(probability):
    z = (counts.sum() - draws * probability) / np.sqrt(draws * probability * (1 - probability))
    return 2 * stats.norm.sf(abs(z))

  q = scheme.probability(plan)
  assert p_value(q) > 1e-6
  assert p_value(q * 0.95) < 1e-6 and p_value(q * 1.05) < 1e-6
  # The sizes spread like independent coins, not like fixed-size batches.
  group = 200 // scheme.cycle
  variance = group * q * (1 - q)
  assert abs(np.var(sizes) / variance - 1) < 6 * np.sqrt(2 / total)
  # All records alike.
  per_record = draws // 200
  chi2 = np.sum((counts - per_record * q)**2) / (per_record * q * (1 - q))
  assert stats.chi2.sf(chi2, 200) > 1e-6 and stats.chi2.cdf(chi2, 200) > 1e-6


def test_coins_of_two_records_are_independent():
  plan = make_plan(sampling.Poisson(), steps=4000, batch_size=60, seed=None)
  both = np.zeros((2, 2))
  for batch in plan.index_batches():
    present = np.isin([3, 77], batch).astype(int)
    both[present[0], present[1]] += 1
  assert stats.chi2_contingency(both)[1] > 1e-6
  assert both.min() > 100  # The table could have shown a dependence.


@pytest.mark.skipif(not CURRENT, reason='needs dp-accounting 0.6.0')
def test_truncation_never_exceeds_its_limit_and_treats_all_records_alike():
  plan = make_plan(sampling.TruncatedPoisson(max_batch_size=21), steps=3000, seed=None)
  counts, sizes, _ = participation_counts(plan, 1)
  assert sizes.max() == 21 and np.mean(sizes == 21) > 0.3
  assert stats.chisquare(counts)[1] > 1e-6


def test_fixed_order_visits_everything_once_per_epoch_in_one_order():
  plan = make_plan(sampling.FixedOrder(), population_size=210, steps=33)
  batches = list(plan.index_batches())
  epoch = np.concatenate(batches[:11])
  np.testing.assert_array_equal(np.sort(epoch), np.arange(210))
  assert not np.array_equal(epoch, np.arange(210))
  assert [len(b) for b in batches[:11]] == [20] * 10 + [10]
  for step in range(11, 33):
    np.testing.assert_array_equal(batches[step], batches[step - 11])
  assert plan.participation() == (11, 3)


def test_the_public_order_is_the_same_on_every_machine():
  order = list(make_plan(sampling.FixedOrder(), steps=1).index_batches())[0]
  np.testing.assert_array_equal(order[:6], [18, 170, 107, 98, 177, 182])


def test_fixed_order_without_shuffling_is_the_order_of_the_data():
  plan = make_plan(sampling.FixedOrder(shuffle_seed=None))
  np.testing.assert_array_equal(next(plan.index_batches()), np.arange(20))


def test_bins_split_the_records():
  for adjacency in ('zero_out', 'add_remove'):
    plan = make_plan(sampling.BallsInBins(cycle=10, draws=0), adjacency=adjacency,
                     population_is_public=True)
    bins = list(plan.index_batches())[:10]
    np.testing.assert_array_equal(np.sort(np.concatenate(bins)), np.arange(200))
    assert (np.ptp([len(b) for b in bins]) == 0) == (adjacency == 'zero_out')


def test_an_empty_batch_is_a_batch():
  plan = make_plan(sampling.Poisson(), population_size=200, batch_size=0.2, steps=50)
  sizes = [len(b) for b in plan.index_batches()]
  assert 0 in sizes and len(sizes) == 50


def test_a_private_population_needs_no_size_in_the_plan():
  plan = plan_lib.PrivacyPlan(
      batch_size=20, steps=5, l2_norm_clip=1.0, noise_multiplier=1.0, target_delta=1e-5,
      adjacency='add_remove', sampling=sampling.Poisson(sampling_probability=0.1))
  for size in (199, 200, 5000):
    sizes = [len(b) for b in plan.index_batches(size)]
    assert len(sizes) == 5 and abs(np.mean(sizes) - size / 10) < 5 * np.sqrt(size / 10)
  with pytest.raises(ValueError, match='`size` must be given'):
    plan.index_batches()


def test_no_step_is_lost_to_rounding():
  assert int(3 / (1 / 75)) == 224  # epochs / q, rounded down: why plans take integers only.
  plan = make_plan(sampling.FixedOrder(), population_size=7500, batch_size=100, steps=225)
  assert plan.participation() == (75, 3)
  assert len(list(plan.index_batches())) == 225
