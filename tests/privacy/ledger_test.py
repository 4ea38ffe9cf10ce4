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
from tfdp_adaptive.accounting import sampling

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
CORRELATED = make_plan(sampling=sampling.FixedOrder(), mechanism=mechanisms.SquareRoot(steps=40))


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
  expected = cost.gaussian_epsilon(sum(m**-2 for m in multipliers)**-0.5, 1e-5)
  np.testing.assert_allclose(ledger.epsilon(), expected, rtol=1e-12)


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
      cost.gaussian_epsilon(1.5 / math.sqrt(2 + 2), 1e-5), rel=1e-3)
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
  for words in ('of all 2 run(s) on these weights together', 'Run 1 of 2: 40 steps',
                'Poisson sampling', 'Run 2 of 2', 'SquareRoot', 'rule: dp_adam', 'hyperparameters',
                'as if every record had been in each'):
    assert words in text, words
  plan = make_plan()
  assert make_ledger(plan).statement() == plan.statement()
  assert 'no step has been taken' in tfdp.Ledger().statement()


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
