# SPDX-License-Identifier: Apache-2.0
"""Batches of the claimed distribution pass as often as they should; those of another are caught."""

import math

import numpy as np
import planted
import pytest

import tfdp_adaptive as tfdp
from tfdp_adaptive.audit import batch_distribution

CYCLIC = tfdp.sampling.CyclicPoisson(cycle=4)
SCHEMES = {
    'poisson': {}, 'poisson-add_remove': dict(adjacency='add_remove', population_is_public=True),
    'truncated': dict(sampling=tfdp.sampling.TruncatedPoisson(max_batch_size=24)),
    'cyclic': dict(sampling=CYCLIC), 'uneven': dict(sampling=CYCLIC, population_size=203),
    'cyclic-add_remove': dict(
        sampling=CYCLIC, adjacency='add_remove', population_is_public=True),
    'bins': dict(sampling=tfdp.sampling.BallsInBins(cycle=10, draws=0)),
    'allocated': dict(sampling=tfdp.sampling.RandomAllocation(cycle=10)),
    'secret bins': dict(sampling=tfdp.sampling.BallsInBins(cycle=10, draws=9)),
    'separated': dict(sampling=tfdp.sampling.MinSeparation(4, draws=9)),
    'fixed': dict(sampling=tfdp.sampling.FixedOrder()),
}


def plan_of(seed=0, **kwargs):
  return tfdp.PrivacyPlan(**{**dict(
      population_size=200, batch_size=20, steps=24, l2_norm_clip=1.0, noise_multiplier=1.0,
      target_delta=1e-5, seed=seed), **kwargs})


def drawn(plan):
  return list(plan.index_batches(plan.population_size))


@pytest.mark.parametrize('scheme', sorted(SCHEMES))
def test_a_law_that_is_kept_is_refuted_as_rarely_as_stated(scheme):
  seeds = 60
  plans = [plan_of(seed, **SCHEMES[scheme]) for seed in range(seeds)]
  p_values = np.array([batch_distribution.check(plan, drawn(plan)).p_value for plan in plans])
  for level in (0.05, 0.2):
    assert np.mean(p_values <= level) <= level + 3 * math.sqrt(level * (1 - level) / seeds)
  assert p_values.min() > 1e-5


@pytest.mark.parametrize('bug', sorted(planted.BATCHES))
def test_what_a_model_is_fed_is_looked_at(bug):
  assert batch_distribution.check(plan_of()).p_value > 1e-3
  with planted.BATCHES[bug]():
    found = batch_distribution.check(plan_of())
  assert found.p_value < 1e-6, found


@pytest.mark.parametrize('scheme', ['truncated', 'cyclic', 'uneven'])
def test_other_coins_are_caught_too(scheme):
  plan = plan_of(**SCHEMES[scheme])
  batches = drawn(plan)
  cycle = plan.sampling.cycle
  assert batch_distribution.check(plan, [batches[t % cycle] for t in range(24)]).p_value < 1e-6
  if scheme == 'cyclic':
    # Poisson sampling leaves the groups.
    assert batch_distribution.check(plan, drawn(plan_of())).p_value == 0


def test_sizes_that_do_not_vary_are_caught():
  rng = np.random.default_rng(0)
  found = batch_distribution.check(plan_of(), [rng.permutation(200)[:20] for _ in range(24)])
  assert found.p_value < 1e-4 and 'equally many' in found.what


@pytest.mark.parametrize('scheme, wrong', [
    ('secret bins', dict(sampling=tfdp.sampling.BallsInBins(cycle=10, draws=0))),  # Public.
    ('separated', dict(sampling=tfdp.sampling.BallsInBins(cycle=10, draws=9))),  # A fixed period.
    ('allocated', dict(sampling=tfdp.sampling.BallsInBins(cycle=10))),  # The same bin again.
    ('allocated', {}), ('allocated', dict(sampling=tfdp.sampling.FixedOrder())),
    ('separated', dict(sampling=tfdp.sampling.FixedOrder())),
    ('separated', dict(sampling=tfdp.sampling.MinSeparation(4, draws=9), batch_size=115))])
def test_patterns_of_another_law_are_caught(scheme, wrong):
  sizes = dict(steps=40, population_size=1000, batch_size=100)
  plan = plan_of(**SCHEMES[scheme], **sizes)
  found = batch_distribution.check(plan, drawn(plan_of(**{**sizes, **wrong})))
  assert found.p_value < 1e-3, found


@pytest.mark.parametrize('change, what', [
    (lambda b: [b[0], *b[:-1]], 'steps apart'), (lambda b: [np.r_[b[0], b[0]], *b[1:]], 'twice'),
    (lambda b: [b[0] + 200, *b[1:]], 'not in the population'),
    (lambda b: b + b[:1], 'not at')])
@pytest.mark.parametrize('scheme', ['fixed', 'bins'])
def test_fixed_schemes_are_refuted_by_one_batch(scheme, change, what):
  plan = plan_of(**SCHEMES[scheme])
  found = batch_distribution.check(plan, change(drawn(plan)))
  assert found.p_value == 0 and what in found.what


def test_a_truncated_batch_is_never_larger():
  plan = plan_of(**SCHEMES['truncated'])
  found = batch_distribution.check(plan, [np.arange(25)])
  assert found.p_value == 0 and 'more than 24' in found.what
