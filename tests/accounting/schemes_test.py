# SPDX-License-Identifier: Apache-2.0
"""One contract for all sampling schemes and their accountants; a new scheme is one line of `CASES`.

The truth is found from the batches themselves, and shares nothing with any accountant: many
records of `plan.index_batches` tell how likely each pattern of participation is, and the
privacy loss of that mixture of Gaussians is integrated numerically over all releases of a run of
three steps. It holds for any C, and for both directions of neighbours.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any, Dict

import dp_accounting
import numpy as np
import pytest
from scipy import stats

from tfdp_adaptive import mechanisms
from tfdp_adaptive.accounting import gaussian
from tfdp_adaptive.accounting import sampling
from tfdp_adaptive.accounting import second_accountant
from tfdp_adaptive.audit import batch_distribution
from tfdp_adaptive.privacy import ledger
from tfdp_adaptive.privacy import plan as plan_lib

pytestmark = pytest.mark.filterwarnings('ignore:`target_delta` should be')
STEPS, RECORDS, DRAWS = 3, 1_200_000, 30_000
BANDED = mechanisms.Banded(2, STEPS)  # All columns, up to the last step, have equal norms.
POSITIVE = mechanisms.BandedToeplitz(2, STEPS, coefficients=(0.8, 0.6))
NEGATIVE = mechanisms.BandedToeplitz(2, STEPS, coefficients=(0.8, -0.6))
BLT = mechanisms.BLT(1, STEPS)
SAMPLED = 0.004  # Tolerance of frequencies of this many records, as a fraction of delta.


@dataclasses.dataclass(frozen=True)
class Case:
  """A scheme, and what the contract must know of it.

  Attributes:
    scheme: Of three steps; its expected batch is half of the records, or a third with `b=3`.
    b: Records over the expected batch.
    above: How far above the truth its delta may be, as a share: 0.01 for exact accounts.
    changes: Of the plan.
    exact: Whether one record's patterns are all that matters: batches that are cut depend on
      others.
  """

  scheme: Any
  b: int = 2
  above: float = 0.01
  changes: Dict[str, Any] = dataclasses.field(default_factory=dict)
  exact: bool = True

  def plan(self, **changes):
    size = changes.pop('population_size', 600)
    return plan_lib.PrivacyPlan(**{**dict(
        population_size=size, batch_size=size // self.b, steps=STEPS, l2_norm_clip=1.0,
        noise_multiplier=1.1, target_delta=0.01, sampling=self.scheme, population_is_public=True,
        **self.changes), **changes})

  def __str__(self):
    return f'{self.scheme!r} {self.changes}'


CASES = [
    Case(sampling.Poisson()),
    Case(sampling.Poisson(), changes=dict(adjacency='add_remove')),
    Case(sampling.Poisson(), changes=dict(adjacency='replace')),
    Case(sampling.CyclicPoisson(2), b=3, changes=dict(mechanism=BANDED)),
    Case(sampling.CyclicPoisson(2), b=3, above=0.4, changes=dict(mechanism=NEGATIVE)),
    Case(sampling.RandomAllocation(2)),
    Case(sampling.RandomAllocation(3), b=3, changes=dict(adjacency='add_remove')),
    Case(sampling.RandomAllocation(4, groups=2), b=4, changes=dict(mechanism=BANDED)),
    Case(sampling.BallsInBins(2)),
    Case(sampling.BallsInBins(3), b=3, changes=dict(adjacency='add_remove')),
    Case(sampling.BallsInBins(3), b=3, above=0.5, changes=dict(mechanism=POSITIVE)),
    Case(sampling.BallsInBins(4), b=4, above=2.0, changes=dict(mechanism=POSITIVE)),  # Begun.
    Case(sampling.BallsInBins(2), above=0.25, changes=dict(mechanism=BLT)),
    Case(sampling.BallsInBins(3), b=3, changes=dict(mechanism=NEGATIVE)),
    Case(sampling.BallsInBins(3, draws=DRAWS), b=3, above=0.25, changes=dict(mechanism=BLT)),
    Case(sampling.MinSeparation(2, draws=DRAWS), b=3, above=0.5, changes=dict(mechanism=POSITIVE)),
    Case(sampling.FixedOrder(), changes=dict(mechanism=BLT)),
    Case(sampling.FixedOrder(), changes=dict(adjacency='replace')),
    Case(sampling.PoissonExamples(examples_per_user=3), b=4, changes=dict(unit='user')),
]
if hasattr(dp_accounting, 'TruncatedSubsampledGaussianDpEvent'):
  CASES.append(Case(sampling.TruncatedPoisson(max_batch_size=320), exact=False))
else:
  CASES = [case for case in CASES if not (
      case.scheme.amplified and case.changes.get('adjacency') == 'replace')]
cases = pytest.mark.parametrize('case', CASES, ids=str)
exact_cases = pytest.mark.parametrize('case', [case for case in CASES if case.exact], ids=str)


def test_every_scheme_is_under_the_contract():
  assert {type(case.scheme) for case in CASES} >= set(sampling.SCHEMES.values()) - {
      sampling.TruncatedPoisson}


# --- The truth.


@functools.lru_cache(maxsize=None)
def patterns(number):
  """[(probabilities, [n, steps] patterns)] of records that are publicly told apart."""
  case = CASES[number]
  plan = case.plan(population_size=RECORDS)
  taken = np.zeros((RECORDS, STEPS), np.int64)
  for step, batch in enumerate(plan.index_batches()):
    taken[batch, step] = 1
  secret = plan.amplified and plan.sampling.most_bands == 1 or plan.sampling.pattern == 'gaps'
  if plan.unit == 'user':
    taken = taken.reshape(-1, plan.sampling.examples_per_user, STEPS).sum(axis=1)
  if secret and plan.amplified:
    kinds = np.zeros(len(taken), int)
  elif plan.amplified:  # Public groups: the order is part of the scheme.
    kinds = np.random.RandomState(0).permutation(RECORDS) % plan.sampling.most_bands
  else:  # Every record has its known place.
    kinds = np.unique(taken, axis=0, return_inverse=True)[1].ravel()
  found = []
  for kind in np.unique(kinds):
    rows, counts = np.unique(taken[kinds == kind], axis=0, return_counts=True)
    found.append((counts / counts.sum(), rows))
  return found


def truth(case, noise_multiplier, epsilon):
  """The largest delta of any record and direction, by integration over all three releases."""
  plan = case.plan()
  distance = 2.0 if plan.adjacency == 'replace' else 1.0
  sigma = noise_multiplier * distance
  axis = np.linspace(-7.0, 7.0, 141) * (1 + 0.4 / noise_multiplier)
  y = np.stack(np.meshgrid(axis, axis, axis, indexing='ij'), -1).reshape(-1, STEPS)
  base = np.exp(-np.sum(y**2, axis=1) / 2) * ((axis[1] - axis[0]) / math.sqrt(2 * math.pi))**STEPS
  c = plan.mechanism.materialize(STEPS)
  largest = 0.0
  for chances, rows in patterns(CASES.index(case)):
    def density(sign, chances=chances, rows=rows):
      centers = sign * (rows @ c.T) / sigma
      return sum(p * np.exp(y @ m - m @ m / 2) for p, m in zip(chances, centers))
    p, q = density(1), density(-1) if plan.adjacency == 'replace' else 1.0
    largest = max(largest, *(float(base @ np.maximum(a - math.exp(epsilon) * b, 0.0))
                             for a, b in ((p, q), (q, p))))
  return largest


@pytest.mark.thorough(but=[
    '1.0-RandomAllocation(cycle=3*', '1.0-CyclicPoisson(cycle=2)*',
    '1.0-BallsInBins(cycle=2, draws=None) {}', '1.0-FixedOrder*adjacency*',
    '1.0-Poisson(sampling_probability=None) {}', '1.0-TruncatedPoisson*'])
@exact_cases
@pytest.mark.parametrize('epsilon', [0.3, 1.0])
def test_delta_is_never_below_the_truth_and_hardly_above(case, epsilon):
  plan = case.plan()
  exact, stated = truth(case, plan.noise_multiplier, epsilon), plan.delta(epsilon)
  assert stated >= exact * (1 - SAMPLED)
  assert stated <= exact * (1 + case.above + SAMPLED) + 0.003 * (case.above > 0.01)
  # The truth of 3% less noise would show.
  assert truth(case, 0.97 * plan.noise_multiplier, epsilon) > 1.01 * exact
  if case.above <= 0.01:
    assert case.plan(noise_multiplier=1.03 * plan.noise_multiplier).delta(epsilon) < exact


# --- What is stated.


@cases
def test_epsilon_and_delta_say_the_same(case):
  plan = case.plan()
  epsilon = plan.epsilon()
  assert 0 < epsilon < math.inf
  assert plan.delta(epsilon) <= plan.target_delta * (1 + 2e-4)
  if case.above <= 0.01:
    assert plan.delta(0.99 * epsilon) > plan.target_delta


@pytest.mark.thorough(rows=['BallsInBins(*mechanism*'])
@cases
def test_more_noise_costs_less_and_more_steps_more(case):
  plan = case.plan()
  with_noise = [case.plan(noise_multiplier=sigma).epsilon() for sigma in (0.8, 1.1, 2.0)]
  assert with_noise == sorted(with_noise, reverse=True) and with_noise[0] > with_noise[-1]
  after = [plan.epsilon(steps) for steps in range(STEPS + 1)]
  assert after[0] == 0 < after[1] and after == sorted(after) and after[-1] == plan.epsilon()


@cases
def test_amplification_is_worth_something_and_a_larger_share_costs_more(case):
  plan = case.plan()
  whole = plan.mechanism.sensitivity(min_sep=1, max_participations=STEPS) * (
      case.scheme.examples_per_user)  # Sensitivity to a record in every batch.
  assert plan.epsilon() < gaussian.epsilon(plan.noise_multiplier / whole, plan.target_delta)
  if case.scheme.drawn_each_step:
    more = case.plan(batch_size=1.05 * plan.batch_size)
    assert more.epsilon() > plan.epsilon()


@pytest.mark.thorough(rows=['BallsInBins(*mechanism*'])
@cases
def test_a_calibrated_plan_keeps_to_its_target(case):
  fields = {field.name: getattr(case.plan(), field.name) for field in dataclasses.fields(
      plan_lib.PrivacyPlan) if field.name != 'noise_multiplier'}
  plan = plan_lib.PrivacyPlan.calibrate(**{**fields, 'target_epsilon': 1.0})
  assert (0.99 if case.above <= 0.01 else 0.9) < plan.epsilon() <= 1.0


@pytest.mark.thorough(rows=['PoissonExamples*'])
@cases
def test_a_second_accountant_says_the_same(case):
  plan = case.plan(target_delta=1e-4)
  answer = second_accountant.answer((ledger.Entry(plan, plan.steps),), 1e-4)
  if answer.epsilon is None:  # Bounds of this library alone, which have no other.
    assert case.scheme.pattern == 'gaps' and plan.mechanism.bands != 1
    return
  assert plan.epsilon() >= answer.epsilon * (1 - answer.tolerance)
  if answer.exact:
    assert plan.epsilon() <= 1.01 * answer.epsilon + 1e-6
    less = case.plan(target_delta=1e-4, noise_multiplier=1.03 * plan.noise_multiplier)
    assert less.epsilon() < answer.epsilon * (1 - answer.tolerance)  # It would show.


def test_a_second_accountant_knows_bins_without_a_turn_exactly():
  """The first of five steps is one of Poisson sampling: other bins tell nothing yet."""
  plan = plan_lib.PrivacyPlan(
      batch_size=12, steps=1, noise_multiplier=2.0, target_delta=1e-3, l2_norm_clip=1.0,
      population_size=60, sampling=sampling.RandomAllocation(5))
  answer = second_accountant.answer((ledger.Entry(plan, 1),), plan.target_delta)
  poisson = dataclasses.replace(plan, sampling=sampling.Poisson())
  assert answer.epsilon == pytest.approx(poisson.epsilon(), rel=5e-4)


@pytest.mark.thorough(rows=['BallsInBins(*mechanism*'])
@cases
def test_a_plan_comes_back_from_json_and_says_its_sampling(case):
  plan = case.plan()
  assert plan_lib.PrivacyPlan.from_json(plan.to_json()) == plan
  text = plan.statement()
  assert plan.sampling.describe(plan) in text
  assert ('Amplification by sampling is claimed' in text) == plan.amplified
  if plan.amplified and not plan.sampling.renyi:
    with pytest.raises(ValueError, match='accountant'):
      plan.epsilon(accountant='rdp')


# --- What is drawn.


@cases
def test_batches_follow_the_scheme_of_the_audit_which_knows_them_from_others(case):
  plan = case.plan(steps=23, **({} if 'mechanism' not in case.changes else {
      'mechanism': mechanisms.IndependentGaussian()
      if case.scheme.amplified and case.scheme.most_bands == 1 else
      mechanisms.BandedToeplitz(min(2, case.scheme.most_bands), 23)}))
  batches = list(plan.index_batches())
  assert batch_distribution.check(plan, batches).p_value > 1e-6
  cycle = plan.sampling.cycle
  if plan.amplified and plan.sampling.pattern != 'gaps':  # The same batches again and again.
    assert batch_distribution.check(plan, batches[:cycle] * (23 // cycle)).p_value < 1e-6
  for batch in batches:
    assert len(set(batch.tolist())) == len(batch)
    assert batch.min(initial=0) >= 0 and batch.max(initial=0) < 600


@exact_cases
def test_frequencies_are_those_of_the_expected_batch(case):
  plan = case.plan()
  for chances, rows in patterns(CASES.index(case)):
    assert np.all(np.abs(chances.sum() - 1) < 1e-12) and len(rows) == len(np.unique(rows, axis=0))
  weighted = [chances @ rows for chances, rows in patterns(CASES.index(case))]
  if plan.amplified and not case.scheme.cycle > 1:
    of_user = case.scheme.examples_per_user
    rate = of_user * plan.batch_size / plan.population_size
    error = math.sqrt(rate / RECORDS)
    np.testing.assert_allclose(np.mean(weighted, axis=0), rate, atol=6 * error)
    assert stats.norm.sf(0.01 * rate / error) < 1e-6  # A rate of 1% more would show.


@cases
def test_a_run_that_is_resumed_goes_on_with_its_coins(case, tmp_path):
  plan = case.plan(steps=STEPS, seed=None)
  whole = list(plan.index_batches(coins=tmp_path / 'coins'))
  rest = list(plan.index_batches(start_step=1, coins=tmp_path / 'coins'))
  assert len(whole) == STEPS and len(rest) == STEPS - 1
  same = [np.array_equal(np.sort(a), np.sort(b)) for a, b in zip(whole[1:], rest)]
  # Coins of a step are drawn again; those of a run are kept.
  assert not any(same) if plan.sampling.drawn_each_step or isinstance(
      case.scheme, sampling.CyclicPoisson) else all(same)
  fixed = case.plan(seed=5)
  for a, b in itertools.zip_longest(
      itertools.islice(fixed.index_batches(), 1, None), fixed.index_batches(start_step=1)):
    np.testing.assert_array_equal(a, b)


@cases
def test_another_run_has_other_coins(case):
  plan = case.plan(seed=None)
  runs = [[np.sort(batch) for batch in plan.index_batches()] for _ in range(2)]
  assert plan.amplified != all(map(np.array_equal, *runs))
