# SPDX-License-Identifier: Apache-2.0
"""What is chosen for a plan, can be accounted for, and is the best of the candidates."""

import dataclasses
import pathlib
import sys

import numpy as np
import pytest

from tfdp_adaptive import advice
from tfdp_adaptive import mechanisms
from tfdp_adaptive.accounting import composition
from tfdp_adaptive.accounting import sampling
from tfdp_adaptive.privacy import plan as plan_lib

sys.path.append(str(pathlib.Path(__file__).parents[2] / 'benchmarks' / 'speed'))
import least_error_plans


def make_plan(scheme, steps=300, batch_size=100, population_size=10_000):
  return plan_lib.PrivacyPlan(
      batch_size=batch_size, steps=steps, l2_norm_clip=1., noise_multiplier=2.,
      target_delta=1e-6, population_size=population_size, sampling=scheme)


@pytest.mark.parametrize('scheme,memory,kind,bands', [
    (sampling.Poisson(), 32, 'IndependentGaussian', 1),
    (sampling.CyclicPoisson(cycle=1), 32, 'IndependentGaussian', 1),
    (sampling.CyclicPoisson(cycle=20), 0, 'IndependentGaussian', 1),
    (sampling.CyclicPoisson(cycle=20), 32, 'BandedToeplitz', 20),
    (sampling.CyclicPoisson(cycle=100), 32, 'BandedToeplitz', 33),
    (sampling.FixedOrder(), 32, 'BLT', None),
    (sampling.FixedOrder(), 2, 'BLT', None),
    (sampling.FixedOrder(), 0, 'BandedInverse', None),
    (sampling.FixedOrder(), 100, 'BandedToeplitz', 100),
    (sampling.BallsInBins(cycle=100), 32, 'BLT', None),
], ids=str)
def test_choice(scheme, memory, kind, bands):
  plan = make_plan(scheme)
  chosen = advice.choose(plan, memory=memory)
  assert type(chosen).__name__ == kind and chosen.bands == bands
  assert chosen.memory() <= memory
  assert len(chosen.reason) > 40 and chosen.reason.endswith('.')
  run = dataclasses.replace(plan, mechanism=chosen)  # Accountable, or it raises.
  assert run.amplified != isinstance(scheme, sampling.FixedOrder)
  assert 0 < run.epsilon() < 20


def test_without_amplification_it_is_the_least_error_that_fits():
  plan = make_plan(sampling.FixedOrder())
  min_sep, k = plan.participation()
  assert (min_sep, k) == (100, 3)
  pattern = dict(min_sep=min_sep, max_participations=k)
  chosen = advice.choose(plan)
  for other in (mechanisms.BandedToeplitz(33, 300), mechanisms.Tree(300),
                mechanisms.BLT(1, 300, **pattern), mechanisms.BandedInverse(4, 300, **pattern)):
    assert chosen.rmse(**pattern) < other.rmse(**pattern)
  assert f'{chosen.rmse(**pattern):.4g}' in chosen.reason


def test_one_epoch_needs_no_bands():
  plan = make_plan(sampling.FixedOrder(), steps=100)
  assert isinstance(advice.choose(plan, memory=1000), mechanisms.BLT)


def test_one_step_has_nothing_to_correlate():
  plan = make_plan(sampling.FixedOrder(), steps=1)
  assert isinstance(advice.choose(plan), mechanisms.IndependentGaussian)


@pytest.mark.parametrize('objective', ['mean', 'max', 'last'])
def test_workload_and_objective_are_passed_on(objective):
  workload = mechanisms.Workload(.9)
  chosen = advice.choose(
      make_plan(sampling.FixedOrder(), steps=40), workload=workload, objective=objective)
  assert chosen.workload == workload and chosen.objective == objective
  schedule = mechanisms.Workload(.9, tuple(range(40, 0, -1)))
  under = advice.choose(
      make_plan(sampling.FixedOrder(), steps=40), workload=schedule, objective=objective)
  assert under.workload == schedule and under.objective == objective
  assert under.get_config()['buffers'] == chosen.get_config()['buffers']


def test_the_reason_is_not_part_of_the_mechanism():
  plan = make_plan(sampling.CyclicPoisson(cycle=20))
  assert advice.choose(plan) == mechanisms.BandedToeplitz(20, 300)


@pytest.mark.parametrize('memory', [-1, 1.5, True])
def test_memory_is_a_count(memory):
  with pytest.raises(ValueError, match='`memory`'):
    advice.choose(make_plan(sampling.FixedOrder()), memory=memory)


@pytest.mark.thorough
def test_the_chosen_plan_keeps_epsilon_and_has_less_error():
  given = make_plan(sampling.Poisson(), steps=64, batch_size=50, population_size=800)
  chosen = least_error_plans.choose_plan(given, memory=16)
  assert chosen.epsilon() <= given.epsilon() and chosen.steps == given.steps
  assert chosen.noise_multiplier * chosen.mechanism.rmse(64) < given.noise_multiplier * (
      given.mechanism.rmse(64))
  assert isinstance(chosen.sampling, sampling.RandomAllocation)
  assert repr(chosen.sampling) in chosen.mechanism.reason
  # With one step of memory at most, and much noise, nothing is better than Poisson sampling.
  plain = least_error_plans.choose_plan(dataclasses.replace(given, noise_multiplier=20.), memory=0)
  assert plain.sampling == sampling.RandomAllocation(16)
  assert plain.epsilon() <= dataclasses.replace(given, noise_multiplier=20.).epsilon()


def test_a_choice_looks_at_few_plans_closely(monkeypatch):
  """Counts where its time goes: transforms, and losses of one step."""
  transforms, steps = [], []
  transform, made = composition.Composition._weighted, composition.Composition.__init__
  monkeypatch.setattr(composition.Composition, '_weighted', lambda self, *args: (
      transforms.append(1) or transform(self, *args)))
  monkeypatch.setattr(composition.Composition, '__init__', lambda self, *args: (
      steps.append(1) or made(self, *args)))
  least_error_plans.choose_plan(make_plan(sampling.FixedOrder(), 64, 50, 800), memory=16)
  assert 0 < len(transforms) <= 13 and 0 < len(steps) <= 100


def error(plan):
  return plan.noise_multiplier * plan.mechanism.rmse(plan.steps)


@pytest.mark.thorough
@pytest.mark.parametrize('seed', [0, *[pytest.param(s, marks=pytest.mark.slow) for s in (1, 2)]])
def test_no_factor_of_the_population_is_better(seed):
  """The formula of jax_privacy's choice, with as many bands as groups."""
  rng = np.random.default_rng(seed)
  population, steps = 60 * int(rng.integers(2, 9)), int(rng.integers(9, 40))
  given = make_plan(sampling.Poisson(), steps, int(rng.integers(8, 20)), population)
  given = dataclasses.replace(given, noise_multiplier=float(rng.uniform(.5, 1.5)))
  chosen = least_error_plans.choose_plan(given, memory=steps)
  assert chosen.epsilon() <= given.epsilon()
  for cycle in range(2, int(min(population // given.batch_size, steps)) + 1):
    if population % cycle == 0:
      theirs = dataclasses.replace(
          given, sampling=sampling.CyclicPoisson(cycle), noise_multiplier=error(chosen) / (
              mechanisms.BandedToeplitz(cycle, steps).rmse(steps)) * .9995,
          mechanism=mechanisms.BandedToeplitz(cycle, steps))
      if theirs.mechanism == chosen.mechanism:
        continue
      assert theirs.epsilon() > given.epsilon()


@pytest.mark.thorough
@pytest.mark.filterwarnings('ignore:`target_delta` should be')
def test_bins_and_gaps_are_chosen_where_draws_show_that_they_are_better():
  given = dataclasses.replace(make_plan(sampling.FixedOrder(), 16, 50, 800), target_delta=.02,
                              noise_multiplier=1.)
  exact, drawn = (least_error_plans.choose_plan(given, memory=16, draws=draws)
                  for draws in (0, 20_000))
  assert exact.sampling == sampling.FixedOrder() or exact.sampling.cycle
  assert drawn.epsilon() <= given.epsilon()
  assert isinstance(drawn.sampling, (sampling.BallsInBins, sampling.MinSeparation))
  assert error(drawn) < .96 * error(exact)
  few = least_error_plans.choose_plan(
      dataclasses.replace(given, target_delta=1e-5), memory=8, draws=100)
  assert not few.sampling.draws  # Draws prove nothing at this delta.


@pytest.mark.parametrize('draws', [-1, 1.5, True])
def test_draws_are_a_count(draws):
  with pytest.raises(ValueError, match='`draws`'):
    least_error_plans.choose_plan(make_plan(sampling.FixedOrder()), draws=draws)


@pytest.mark.parametrize('change', [
    dict(noise_multiplier=0.), dict(adjacency='add_remove', population_is_public=True)])
def test_no_plan_is_chosen_for_what_has_no_public_answer(change):
  with pytest.raises(ValueError, match='can be chosen for zero_out'):
    least_error_plans.choose_plan(dataclasses.replace(make_plan(sampling.Poisson()), **change))
