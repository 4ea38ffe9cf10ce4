# SPDX-License-Identifier: Apache-2.0
"""What several runs on the same weights cost together."""

import dataclasses
import json
import math

import dp_accounting
import numpy as np
import pytest

import tfdp_adaptive as tfdp
from tfdp_adaptive import mechanisms
from tfdp_adaptive import rules
from tfdp_adaptive.accounting import cost
from tfdp_adaptive.accounting import gaussian
from tfdp_adaptive.accounting import private_search
from tfdp_adaptive.accounting import sampling
from tfdp_adaptive.batches import sampling_seed
from tfdp_adaptive.privacy import ledger as ledger_lib
from tfdp_adaptive.report import card_checks
from tfdp_adaptive.report import card_page

FIELDS = dict(population_size=1000, batch_size=50, steps=40, l2_norm_clip=2.0,
              noise_multiplier=1.5, target_delta=1e-5)


def make_plan(**changes):
  return tfdp.PrivacyPlan(**dict(FIELDS, **changes))


def make_ledger(*plans, rule=''):
  ledger = tfdp.Ledger()
  for plan in plans:
    ledger = ledger.begin(plan, rule).done(plan.steps)
  return ledger


FIXED = make_plan(sampling=sampling.FixedOrder())
# Two runs of 40 steps without amplification.
FIXED_SEED_EACH_STEP = make_plan(steps=80, batch_size=1000, sampling=sampling.FixedOrder())
CORRELATED = make_plan(sampling=sampling.FixedOrder(), mechanism=mechanisms.SquareRoot(steps=40))


def test_a_plan_of_a_class_of_ones_own_is_read_back():
  @dataclasses.dataclass(frozen=True)
  class OwnPlan(tfdp.PrivacyPlan):
    pass

  @dataclasses.dataclass(frozen=True)
  class OwnPlanOfOwn(OwnPlan):
    pass

  for kind in (OwnPlan, OwnPlanOfOwn):
    ledger = make_ledger(kind(**FIELDS))
    read = tfdp.Ledger.from_json(ledger.to_json())
    assert type(read.entries[0].plan) is kind
    assert read.epsilon() == ledger.epsilon() == make_ledger(make_plan()).epsilon()


def test_the_same_plan_twice_costs_twice_as_many_steps():
  plan = make_plan()
  longer = dataclasses.replace(plan, steps=80)
  twice = make_ledger(plan, plan)
  np.testing.assert_allclose(twice.epsilon(), longer.epsilon(), rtol=1e-4)
  np.testing.assert_allclose(twice.delta(1.0), longer.delta(1.0), rtol=1e-3)
  assert make_ledger(plan).epsilon() == plan.epsilon() < twice.epsilon()


def test_gaussians_add_up_in_closed_form():
  ledger = make_ledger(FIXED, CORRELATED)
  multipliers = [plan.event().noise_multiplier for plan in (FIXED, CORRELATED)]
  expected = gaussian.epsilon(sum(m**-2 for m in multipliers)**-0.5, 1e-5)
  np.testing.assert_allclose(ledger.epsilon(), expected, rtol=1e-12)


@pytest.mark.pitfall(
    'Two runs on one data set share their secret bins, but are added up as if each had its own.',
    severity='high', stops='their sum is computed without amplification')
@pytest.mark.parametrize('scheme', [sampling.BallsInBins, sampling.RandomAllocation])
@pytest.mark.parametrize('noise', [0.7, 1.0, 4.0])
def test_runs_that_share_their_bins_cost_what_they_cost(scheme, noise):
  plan = make_plan(population_size=200, steps=4, noise_multiplier=noise, sampling=scheme(cycle=4))
  batches = plan.batches(np.arange(200.))
  passes = [[x.numpy()[w.numpy() > 0] for x, _, w in batches] for _ in range(2)]
  for one, other in zip(*passes):
    np.testing.assert_array_equal(one, other)
  truth = dataclasses.replace(plan, steps=8, sampling=sampling.BallsInBins(cycle=4))
  assert (plan + plan).epsilon() >= truth.epsilon() > plan.epsilon()
  # With runs whose batches are drawn at every step, one run of bins keeps its amplification.
  other = make_plan(population_size=200, steps=4, noise_multiplier=noise)
  alone = (plan + other).epsilon()
  assert plan.epsilon() < alone < (plan + plan + other).epsilon()
  assert alone < (dataclasses.replace(plan, sampling=sampling.FixedOrder()) + other).epsilon()


def test_runs_share_bins_only_if_their_batches_may_be_the_same():
  plan = make_plan(population_size=200, steps=8, sampling=sampling.BallsInBins(cycle=4))
  longer = dataclasses.replace(plan, steps=12)  # Its steps refuse the batches of `plan`.
  own = cost.epsilon(dp_accounting.ComposedDpEvent((plan.event(), longer.event())), 1e-5)
  assert (plan + longer).epsilon() == own < (plan + plan).epsilon()
  fixed = dataclasses.replace(plan, sampling=sampling.FixedOrder())
  both = cost.epsilon(dp_accounting.ComposedDpEvent((plan.event(), fixed.event())), 1e-5)
  assert (plan + fixed).epsilon() == both
  # Noise is no part of what batches are, seeds may draw the same bins, and others may do anything.
  for ledger in (plan + dataclasses.replace(plan, noise_multiplier=2.0),
                 dataclasses.replace(plan, seed=1) + dataclasses.replace(longer, seed=1),
                 make_ledger(plan).begin(longer, own_sampler='mine').done(12)):
    assert all(isinstance(event, dp_accounting.GaussianDpEvent) for event in ledger.event().events)
    assert 'may have had the same secret bins' in ledger.statement()
  assert 'same secret bins' not in (plan + longer).statement()


@pytest.mark.filterwarnings('ignore:`target_delta` should be')
def test_all_laws_add_up_to_one_number_and_the_statement_says_how():
  fields = dict(population_size=200, steps=8, unit='user', target_delta=0.02)
  banded = mechanisms.BandedToeplitz(2, 8)
  drawn = make_plan(**fields, mechanism=banded, sampling=sampling.BallsInBins(4, draws=20_000))
  runs = [
      make_plan(**fields), make_plan(**fields, sampling=sampling.RandomAllocation(4)),
      make_plan(**fields, sampling=sampling.PoissonExamples(examples_per_user=2)), drawn,
      make_plan(**fields, mechanism=banded, sampling=sampling.FixedOrder())]
  ledger = make_ledger(*runs)
  total = ledger.epsilon()
  assert max(run.epsilon() for run in runs) < total < sum(run.epsilon() for run in runs)
  events = ledger.event().events  # With the bound of the one that only draws account for tightly.
  assert total == cost.epsilon(dp_accounting.ComposedDpEvent(events), 0.02)
  assert cost.epsilon(events[3], 0.02) > drawn.epsilon()
  text = ledger.statement()
  assert 'added up by a bound without draws' in text and 'draws were that unlucky' not in text
  # A layer that was adapted privately, and the delta for words of one record alone.
  whole = make_plan(**{**fields, 'batch_size': 200, 'steps': 1, 'noise_multiplier': 4.0})
  prepared = tfdp.Ledger((*ledger.entries, ledger_lib.Entry(whole, 1, delta=0.005)))
  assert prepared.epsilon() == pytest.approx(cost.epsilon(
      dp_accounting.ComposedDpEvent((*events, whole.event())), 0.02 - 0.005))
  assert prepared.epsilon() > total
  # With a search there are only Renyi divergences, which are not known of three of these.
  search = make_plan(**fields, search=private_search.Search(runs=2.0, score_noise=None))
  more = make_ledger(*runs, search)
  assert total < more.epsilon() < math.inf
  assert more.statement().count('are not known of this sampling') == 3


@pytest.mark.parametrize('order', [1, -1])
def test_sampled_and_whole_runs_add_up_in_any_order(order):
  plans = (make_plan(), CORRELATED)[::order]
  ledger = make_ledger(*plans)
  accountant = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-3)
  for plan in plans:
    accountant.compose(plan.event())
  np.testing.assert_allclose(ledger.epsilon(), accountant.get_epsilon(1e-5), rtol=1e-3)
  assert ledger.epsilon(accountant='rdp') > ledger.epsilon()


def test_plans_add_up_to_ledgers():
  first, second, third = make_plan(), make_plan(steps=10), CORRELATED
  ledger = first + second
  assert isinstance(ledger, tfdp.Ledger)
  assert [entry.plan for entry in (ledger + third).entries] == [first, second, third]
  assert [entry.plan for entry in (third + ledger).entries] == [third, first, second]
  assert (ledger + ledger).entries == ledger.entries * 2
  with pytest.raises(TypeError):
    first + 1  # pylint: disable=pointless-statement


def test_steps_are_counted_as_they_are_done():
  plan = make_plan()
  ledger = tfdp.Ledger()
  assert ledger.epsilon() == 0 and ledger.delta(1.0) == 0
  ledger = ledger.begin(plan)
  assert ledger.epsilon() == 0
  assert ledger.done(7).epsilon() == plan.epsilon(7)
  with pytest.raises(ValueError, match='What is done stays done: the last run has taken 7'):
    ledger.done(7).done(6)
  with pytest.raises(ValueError, match='No run has begun'):
    tfdp.Ledger().done(1)
  with pytest.raises(ValueError, match="at most the plan's 40. Received: steps=41"):
    ledger.done(41)


def test_a_run_that_nothing_is_known_of_ends_the_guarantee():
  known = make_ledger(make_plan())
  for ledger in (known.begin(None).done(1), known.begin(make_plan(noise_multiplier=0)).done(1),
                 known.begin(make_plan(), rules.non_private_noiseless_adam(
                     allow_non_private=True)).done(1)):
    assert ledger.epsilon() == math.inf and ledger.delta(9.0) == 1 and not ledger.guaranteed
    assert ledger.event() == dp_accounting.NonPrivateDpEvent()
    assert ledger.statement().startswith('NO PRIVACY GUARANTEE: run 2 of 2')
  assert known.begin(None).epsilon() == known.epsilon()  # It has done nothing yet.


def test_the_statement_of_several_runs_says_what_one_of_a_single_run_does():
  one, text = FIXED.statement(), make_ledger(FIXED, CORRELATED).statement()
  for paragraph in ('Covered:', 'Not covered:', 'Caveats:'):
    paragraphs = [[p for p in t.split('\n\n') if p.startswith(paragraph)] for t in (one, text)]
    assert len(paragraphs[0]) == 1 and paragraphs[0] == paragraphs[1]
  assert 'WARNING' not in text and 'SEED' not in text
  text = make_ledger(
      dataclasses.replace(FIXED, seed=1), dataclasses.replace(FIXED, target_delta=.01)).statement()
  assert 'A FIXED SEED was used for sampling' in text
  assert 'WARNING: delta is not below 1/1000' in text
  assert 'Caveats' not in tfdp.Ledger().statement()  # Nothing was drawn.


def test_the_plan_checks_the_rule():
  rule = rules.noisy_adagrad(participations=2, diagonal=True)
  with pytest.raises(ValueError, match='`extra_releases` of the plan must be'):
    tfdp.Ledger().begin(make_plan(), rule)
  assert tfdp.Ledger().begin(make_plan(), rules.dp_adam()).entries[0].rule == 'dp_adam'


@pytest.mark.parametrize('changes, name', [
    (dict(unit='user'), 'unit'),
    (dict(adjacency='replace', sampling=sampling.FixedOrder()), 'adjacency'),
    (dict(adjacency='add_remove', population_is_public=True), 'adjacency')])
def test_guarantees_about_different_neighbours_do_not_add_up(changes, name):
  ledger = make_plan() + make_plan(**changes)
  for answer in (ledger.epsilon, ledger.event, ledger.statement, lambda: ledger.delta(1.0)):
    with pytest.raises(ValueError, match=f'must have the same `{name}`'):
      answer()


def test_replacement_counts_every_noise_in_the_same_unit():
  sampled = make_plan(adjacency='replace')
  whole = make_plan(adjacency='replace', sampling=sampling.FixedOrder())
  ledger = sampled + whole
  assert ledger.relation() is dp_accounting.NeighboringRelation.REPLACE_ONE
  # A batch that is everyone is a whole one, and all noise is twice that of the clip norm.
  everyone = make_plan(adjacency='replace', batch_size=1000, steps=2)
  assert make_ledger(everyone, whole).epsilon() == pytest.approx(
      gaussian.epsilon(1.5 / math.sqrt(2 + 2), 1e-5), rel=1e-3)
  assert ledger.epsilon() > max(sampled.epsilon(), whole.epsilon())


def test_truncated_batches_add_up_with_others():
  truncated = make_plan(sampling=sampling.TruncatedPoisson(max_batch_size=200))
  ledger = truncated + make_plan()
  assert ledger.relation() is dp_accounting.NeighboringRelation.REPLACE_SPECIAL
  assert ledger.epsilon() == pytest.approx((make_plan() + make_plan()).epsilon(), rel=1e-3)
  assert (truncated + CORRELATED).epsilon() > CORRELATED.epsilon()


def test_the_largest_delta_is_the_default():
  ledger = make_plan() + make_plan(target_delta=1e-6)
  assert ledger.epsilon() == ledger.epsilon(1e-5) < ledger.epsilon(1e-7)
  with pytest.raises(ValueError, match='`target_delta` must be in'):
    ledger.epsilon(0.0)
  with pytest.raises(ValueError, match='`accountant` must be one of'):
    ledger.epsilon(accountant='zcdp')


def test_statement_names_every_run():
  text = make_ledger(make_plan(), CORRELATED, rule='dp_adam').statement()
  for words in ('of all 2 run(s) together', 'Run 1 of 2: 40 steps',
                'Poisson sampling', 'Run 2 of 2', 'SquareRoot', 'rule: dp_adam', 'hyperparameters',
                'as if every record had been in each'):
    assert words in text, words
  plan = make_plan()
  assert make_ledger(plan).statement() == plan.statement()
  assert 'no step has been taken' in tfdp.Ledger().statement()


@pytest.mark.parametrize('changes', [
    {}, dict(sampling=sampling.Poisson(sampling_probability=1.0), population_size=None,
             adjacency='add_remove'),
    dict(sampling=sampling.CyclicPoisson(cycle=4), batch_size=250,
         mechanism=mechanisms.BandedToeplitz(bands=3, steps=40))], ids=str)
def test_coins_that_leave_nothing_to_chance_claim_no_amplification(changes):
  """All records are in all batches (of their turn), as with a fixed order."""
  ledger = make_ledger(make_plan(**{'batch_size': 1000, **changes}))
  participations = 10 if 'batch_size' in changes else 40
  multiplier = FIELDS['noise_multiplier'] / participations**0.5
  assert ledger.epsilon() == pytest.approx(gaussian.epsilon(multiplier, 1e-5), rel=1e-6)
  text, card = ledger.statement(), ledger.card(plots=False)
  assert f'at most {participations} times' in text and 'No amplification is claimed' in text
  assert 'is claimed; it holds' not in text and 'Claimed' not in card_page.markdown(card)
  findings = card_checks.check(card)
  assert not any(one.kind == card_checks.WRONG for one in findings)
  assert any('no amplification' in one.text for one in findings)
  assert any(f'gives {participations**0.5:.6g}.' in one.text for one in findings)
  less = make_ledger(make_plan(batch_size=999))
  assert 'Amplification by sampling is claimed' in less.statement()


def test_runs_with_fixed_seeds_may_share_their_batches():
  """A seed draws the same records again, so that one sample hides a record from neither run."""
  seeded = make_plan(seed=3)
  both = make_ledger(seeded, seeded)
  assert both.epsilon() >= make_plan(noise_multiplier=FIELDS['noise_multiplier'] / 2**.5).epsilon()
  assert both.epsilon() == pytest.approx(make_ledger(FIXED_SEED_EACH_STEP).epsilon(), rel=1e-4)
  assert 'may have taken its steps on the same batches' in both.statement()
  card = both.card(plots=False)  # It has no seeds, and says that there were some.
  assert 'added up without amplification' in card_page.markdown(card)
  assert not [one for one in card_checks.check(card) if one.kind == card_checks.WRONG]
  once = make_ledger(seeded, make_plan())
  assert once.epsilon() == make_ledger(make_plan(), make_plan()).epsilon()
  release = make_plan(batch_size=1000, steps=1, seed=3, sampling=sampling.FixedOrder())
  assert make_ledger(release, seeded).epsilon() == make_ledger(
      dataclasses.replace(release, seed=None), make_plan()).epsilon()


def test_runs_with_one_file_of_coins_share_their_batches():
  seed = sampling_seed.COMMITTED.format
  with_coins = lambda *digests: tfdp.Ledger(tuple(
      dataclasses.replace(entry, notes=(seed(digest),))
      for entry, digest in zip(make_ledger(*[make_plan()] * len(digests)).entries, digests)))
  other, same = with_coins('a', 'b'), with_coins('a', 'a')
  assert other.epsilon() == make_ledger(make_plan(), make_plan()).epsilon()
  assert same.epsilon() == pytest.approx(make_ledger(FIXED_SEED_EACH_STEP).epsilon(), rel=1e-4)


def test_json_round_trip():
  ledger = make_ledger(make_plan(), CORRELATED, rule='dp_adam').begin(None, 'own').done(
      np.int64(3)).begin(make_plan()).done(2)
  again = tfdp.Ledger.from_json(ledger.to_json())
  assert again == ledger and hash(again) == hash(ledger)
  assert again.statement() == ledger.statement()


def test_damaged_json_is_refused():
  content = json.loads(make_ledger(make_plan()).to_json())
  with pytest.raises(ValueError, match='must be the JSON of a ledger'):
    tfdp.Ledger.from_json('{"a": 1}')
  with pytest.raises(ValueError, match='of version 1. Received: .* of version 2'):
    tfdp.Ledger.from_json(json.dumps(dict(content, version=2)))
  content['entries'][0]['steps'] = 41
  with pytest.raises(ValueError, match="at most the plan's 40"):
    tfdp.Ledger.from_json(json.dumps(content))
  content['entries'][0]['plan']['kind'] = 'Other'
  with pytest.raises(ValueError, match='`kind` must be one of'):
    tfdp.Ledger.from_json(json.dumps(content))
