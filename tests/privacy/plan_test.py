# SPDX-License-Identifier: Apache-2.0
"""What a plan refuses, says and remembers."""

import dataclasses
import json
import math
import re
import types

import numpy as np
import pytest

import tfdp_adaptive as tfdp
from tfdp_adaptive import contract
from tfdp_adaptive import mechanisms
from tfdp_adaptive import rules
from tfdp_adaptive.accounting import gaussian
from tfdp_adaptive.accounting import sampling
from tfdp_adaptive.batches import sources
from tfdp_adaptive.privacy import card as card_lib
from tfdp_adaptive.privacy import plan as plan_lib
from tfdp_adaptive.privacy import statement

FIELDS = dict(population_size=1000, batch_size=50, steps=40, l2_norm_clip=2.0,
              noise_multiplier=1.5, target_delta=1e-5)


def make_plan(**changes):
  return plan_lib.PrivacyPlan(**dict(FIELDS, **changes))


def make_rule(*statistics):
  """A stand-in for `contract.Rule`: the plan reads these attributes only."""
  asks = tuple(contract.Ask(second=s) for s in statistics)
  return types.SimpleNamespace(name='some_rule', asks=asks)


def make_statistic(**changes):
  return types.SimpleNamespace(**dict(
      dict(amplifiable=True, private=True, participations=0, relative_noise=1.0), **changes))


def test_public_names():
  assert tfdp.PrivacyPlan is plan_lib.PrivacyPlan
  assert tfdp.sampling is sampling


@pytest.mark.parametrize('changes, message', [
    (dict(batch_size=0), '`batch_size` must be positive and finite. Received: batch_size=0'),
    (dict(batch_size=-3), '`batch_size` must be positive and finite'),
    (dict(batch_size=math.nan), '`batch_size` must be positive and finite'),
    (dict(batch_size=1001), '`batch_size` must be at most the population size'),
    (dict(steps=0), '`steps` must be a positive integer. Received: steps=0'),
    (dict(steps=40.0), '`steps` must be a positive integer. Received: steps=40.0'),
    (dict(steps=True), '`steps` must be a positive integer'),
    (dict(l2_norm_clip=0.0), '`l2_norm_clip` must be positive'),
    (dict(l2_norm_clip=math.inf), '`l2_norm_clip` must be positive'),
    (dict(noise_multiplier=-0.1), '`noise_multiplier` must be finite and >= 0'),
    (dict(noise_multiplier=math.nan), '`noise_multiplier` must be finite and >= 0'),
    (dict(noise_multiplier=None), '`noise_multiplier` must be finite and >= 0'),
    (dict(target_delta=0.0), r'`target_delta` must be in \(0, 1\)'),
    (dict(target_delta=1.0), r'`target_delta` must be in \(0, 1\)'),
    (dict(target_delta=math.nan), r'`target_delta` must be in \(0, 1\)'),
    (dict(population_size=0), '`population_size` must be a positive integer'),
    (dict(population_size=None), '`population_size` must be given'),
    (dict(unit='batch'), "`unit` must be one of \\('example', 'user'\\)"),
    (dict(adjacency='swap'), '`adjacency` must be one of'),
    (dict(sampling='poisson'), '`sampling` must be a scheme of `tfdp.sampling`'),
    (dict(mechanism='tree'), '`mechanism` must be a mechanism of `tfdp.mechanisms`'),
    (dict(seed=-1), '`seed` must be an integer >= 0'),
    (dict(adjacency='add_remove'), 'so it must be public'),
    (dict(adjacency='add_remove', sampling=sampling.FixedOrder(), population_is_public=True),
     "FixedOrder cannot be accounted for under 'add_remove'"),
    (dict(adjacency='replace', sampling=sampling.CyclicPoisson(cycle=2)),
     "CyclicPoisson cannot be accounted for under 'replace'"),
    (dict(sampling=sampling.FixedOrder(), batch_size=50.5),
     '`batch_size` must be a positive integer'),
    (dict(sampling=sampling.CyclicPoisson(cycle=21)),
     '`cycle` must be at most population_size / batch_size'),
    (dict(sampling=sampling.BallsInBins(cycle=10)),
     '`batch_size` must be population_size / cycle = 100'),
    (dict(sampling=sampling.Poisson(sampling_probability=0.04)),
     '`batch_size` must be sampling_probability \\* population_size'),
    (dict(mechanism=mechanisms.BandedToeplitz(bands=4, steps=39),
          sampling=sampling.CyclicPoisson(cycle=4)), 'was designed for 39 steps'),
    (dict(mechanism=mechanisms.BandedToeplitz(bands=4, steps=40)),
     'Poisson amplifies privacy only for independent noise; use CyclicPoisson'),
    (dict(mechanism=mechanisms.BandedToeplitz(bands=5, steps=40),
          sampling=sampling.CyclicPoisson(cycle=4)), 'with at most `cycle` bands'),
    (dict(mechanism=mechanisms.SquareRoot(steps=40), sampling=sampling.CyclicPoisson(cycle=4)),
     'use FixedOrder for any other'),
    (dict(mechanism=mechanisms.Tree(steps=40), sampling=sampling.Poisson()),
     'Poisson amplifies privacy only'),
    (dict(mechanism=mechanisms.BandedInverse(inverse_bands=2, steps=40),
          sampling=sampling.CyclicPoisson(cycle=4)), 'use FixedOrder for any other'),
    (dict(sampling=sampling.FixedOrder(), min_sep=21), '`min_sep` must be at most 20'),
    (dict(sampling=sampling.FixedOrder(), max_participations=1),
     '`max_participations` must be at least 2'),
    (dict(max_participations=39), '`max_participations` must be at least 40'),
])
def test_refusals(changes, message):
  with pytest.raises(ValueError, match=message):
    make_plan(**changes)


@pytest.mark.parametrize('scheme, arguments', [
    (sampling.Poisson, dict(sampling_probability=0.0)),
    (sampling.Poisson, dict(sampling_probability=1.5)),
    (sampling.TruncatedPoisson, dict(max_batch_size=0)),
    (sampling.CyclicPoisson, dict(cycle=0)),
    (sampling.CyclicPoisson, dict(cycle=2.0)),
    (sampling.BallsInBins, dict(cycle=-1)),
])
def test_schemes_refuse(scheme, arguments):
  with pytest.raises(ValueError, match=f'`{next(iter(arguments))}` must be'):
    scheme(**arguments)


@pytest.mark.pitfall(
    'The number of records is private, and the plan publishes it.',
    severity='high', stops='ValueError, unless it is declared public')
def test_the_private_size_of_a_population_stays_out_of_the_plan():
  plan = plan_lib.PrivacyPlan(
      batch_size=50, steps=40, l2_norm_clip=1.0, noise_multiplier=1.0, target_delta=1e-5,
      adjacency='add_remove', sampling=sampling.Poisson(sampling_probability=0.05))
  assert not plan.population_is_public
  same = make_plan(l2_norm_clip=1.0, noise_multiplier=1.0)
  assert plan.epsilon() == same.epsilon()
  assert 'stays private' in plan.statement()


def test_more_participations_than_the_sampling_has_may_be_assumed():
  fixed = make_plan(sampling=sampling.FixedOrder())
  wider = make_plan(sampling=sampling.FixedOrder(), max_participations=5, min_sep=7,
                    mechanism=mechanisms.SquareRoot(steps=40))
  assert fixed.participation() == (20, 2) and wider.participation() == (7, 5)
  assert wider.epsilon() > make_plan(
      sampling=sampling.FixedOrder(), mechanism=mechanisms.SquareRoot(steps=40)).epsilon()


def test_steps_done_are_at_most_the_plan():
  with pytest.raises(ValueError, match="`steps` must be at most the plan's 40. Received: steps=41"):
    make_plan().epsilon(41)
  with pytest.raises(ValueError, match='All 40 steps of the plan are used up'):
    make_plan().index_batches(start_step=40)


@pytest.mark.pitfall(
    'The data have another size than the plan: the sampling probability is wrong.',
    severity='high', stops='ValueError')
@pytest.mark.parametrize('size', [999, 1001, 1])
def test_other_data_than_planned_is_refused_by_name(size):
  with pytest.raises(ValueError, match='population_size=1000 records. Received: data with another'):
    make_plan().index_batches(size)


def test_unknown_accountants_are_refused():
  with pytest.raises(ValueError, match='`accountant` must be one of'):
    make_plan().epsilon(accountant='gdp')


# --- Rules.


def test_rules_that_use_the_present_batch_only_are_fine():
  assert make_plan().check_rule(make_rule(None))
  assert make_plan().check_rule(make_rule(None, make_statistic()))


@pytest.mark.pitfall(
    'A rule releases a statistic of all past clean data at every step, and amplification by '
    'sampling is claimed for it.',
    severity='critical', stops='ValueError: the plan must count the statistic in full')
def test_statistics_of_past_clean_data_are_not_amplified():
  rule = make_rule(make_statistic(amplifiable=False, relative_noise=2.0))
  with pytest.raises(ValueError, match=r'must be \(2.0,\) for the rule .some_rule., .*amplify'):
    make_plan().check_rule(rule)
  with pytest.raises(ValueError, match='claim no amplification'):
    make_plan(extra_releases=(2.0,))
  with pytest.raises(ValueError, match='with independent noise'):
    make_plan(extra_releases=(2.0,), sampling=sampling.FixedOrder(),
              mechanism=mechanisms.Tree(steps=40))
  with pytest.raises(ValueError, match=r'must be \(2.0,\)'):  # Its cost would be forgotten.
    make_plan(sampling=sampling.FixedOrder()).check_rule(rule)
  plan = make_plan(sampling=sampling.FixedOrder(), extra_releases=[2.0])
  assert plan.check_rule(rule)
  with pytest.raises(ValueError, match=r'must be \(\) for the rule'):
    plan.check_rule(make_rule(None))


def test_statistics_of_past_clean_data_are_paid_for_at_every_step():
  plan = make_plan(sampling=sampling.FixedOrder(), extra_releases=(2.0, 4.0))
  for steps in (1, 20, 21, 40):
    seen = -(-steps // 20)
    expected = 1.5 / math.sqrt(seen + steps / 4 + steps / 16)
    np.testing.assert_allclose(plan.event(steps).noise_multiplier, expected, rtol=1e-12)
  assert 'further statistic' in plan.statement()


@pytest.mark.pitfall(
    'A rule was made for fewer participations than records have in the plan.',
    severity='critical', stops='ValueError')
def test_noisy_adagrad():
  plan = make_plan(sampling=sampling.FixedOrder(), extra_releases=(3.0,))
  rule = rules.noisy_adagrad(participations=2, diagonal=True, relative_noise=3.0)
  assert plan.check_rule(rule)
  np.testing.assert_allclose(
      # A record is in two releases of the mean and in all 40 of the root: GDP adds up.
      plan.event().noise_multiplier, 1.5 / np.sqrt(2 + 40 / 3.0**2))
  once = rules.noisy_adagrad(participations=1, diagonal=True, relative_noise=3.0)
  with pytest.raises(ValueError, match=r'must be made for participations=2.*Received: \[1\]'):
    plan.check_rule(once)


@pytest.mark.parametrize('rule', [make_rule(make_statistic()), make_rule(None, None)])
def test_only_one_sum_is_accounted_for_under_poisson_and_replace(rule, monkeypatch):
  monkeypatch.setattr(plan_lib.cost, '_HAS_TRUNCATED', True)
  plan = make_plan(adjacency='replace')
  with pytest.raises(ValueError, match='one clipped sum per step only'):
    plan.check_rule(rule)
  assert plan.check_rule(make_rule(None))
  assert make_plan(adjacency='replace', sampling=sampling.FixedOrder()).check_rule(rule)


def test_a_rule_without_noise_has_no_guarantee():
  rule = make_rule(make_statistic(private=False, amplifiable=False))
  assert make_plan().epsilon(rule=rule) == math.inf
  text = make_plan().statement(rule=rule)
  assert text.startswith('NO PRIVACY GUARANTEE') and 'Guarantee: (' not in text


# --- Statement and configuration.


def test_statement_says_what_the_reporting_list_asks_for():
  plan = make_plan(unit='user')
  text = plan.statement(rule=make_rule(None))
  for words in (f'({statement.rounded_up(plan.epsilon())}, 1e-05)-differential privacy after all '
                '40 steps',
                'one user, with all their data', 'zero-out', '1000, is treated as public',
                'Poisson sampling', 'probability 0.05', 'IndependentGaussian',
                'noise multiplier 1.5', 'clip norm 2', 'standard deviation 3', 'constant 50',
                'dp_accounting', 'Amplification by sampling is claimed', 'all intermediate weights',
                'hyperparameters', 'vocabulary', 'metrics', 'not cryptographic', 'some_rule',
                'trusted curator'):
    assert words in text, words
  assert 'SEED' not in text and 'WARNING' not in text


@pytest.mark.parametrize('plan', [
    make_plan(), make_plan(sampling=sampling.FixedOrder())], ids=['sampled', 'whole'])
def test_statement_says_what_it_means_in_its_first_paragraph(plan):
  first = plan.statement().split('\n\n')[0]
  percent = float(re.search('at most ([0-9.]+)% at a 1% false-positive rate', first).group(1))
  mu = float(re.search('mu = ([0-9.]+[0-9])', first).group(1))
  assert plan.epsilon() <= gaussian.epsilon(1 / mu, 1e-5) <= 1.01 * plan.epsilon()
  # The Gaussian's best test is one of those bounded, if there is a Gaussian.
  best = 100 * gaussian.true_positive_rate(mu)
  assert 1 < percent < 100 * math.exp(plan.epsilon()) * 0.01 + 0.01
  assert percent < 2.5 * best and (plan.amplified or percent >= best * 0.999)


@pytest.mark.parametrize('mu', [0.01, 0.5, 3.0])
def test_no_test_of_a_gaussian_is_better_than_the_bound(mu):
  delta_of = lambda epsilon: gaussian.delta(1 / mu, epsilon)
  epsilon = gaussian.epsilon(1 / mu, 1e-5)
  assert gaussian.mu_of(epsilon, 1e-5) == pytest.approx(mu, rel=1e-9)
  for rate in (1e-4, 0.01, 0.5):
    bound = gaussian.detection_bound([(fraction * epsilon, delta_of(fraction * epsilon))
                           for fraction in card_lib.FRACTIONS], rate)
    assert gaussian.true_positive_rate(mu, rate) <= bound <= 1


@pytest.mark.parametrize('epsilon, shown', [
    (1.82801, '1.829'), (1.828, '1.828'), (4.9999999, '5.000'), (149.0927, '149.1'),
    (0.000123401, '0.0001235'), (12345.6, '12350'), (0.0, '0.0')])
def test_statement_rounds_epsilon_up(epsilon, shown):
  assert statement.rounded_up(epsilon) == shown


def test_a_plan_is_printed_as_a_table_with_its_epsilon():
  plan = make_plan()
  rows = dict(line.split('  ', 1) for line in str(plan).splitlines())
  assert rows['epsilon'].strip() == (
      f'{statement.rounded_up(plan.epsilon())} at delta {plan.target_delta:g}')
  assert rows['steps'].strip() == str(plan.steps) and rows['sampling'].strip() == 'Poisson'
  assert 5 < len(rows) < 12 and max(map(len, str(plan).splitlines())) < 80
  assert 'Infinity at delta' in str(make_plan(noise_multiplier=0.0))


def test_statement_follows_the_accountant():
  plan = make_plan()
  text = plan.statement(accountant='rdp')
  assert 'Renyi' in text and statement.rounded_up(plan.epsilon(accountant='rdp')) in text
  assert 'loss distributions' in plan.statement()
  with pytest.raises(ValueError, match='`accountant` must be one of'):
    plan.statement(accountant='zcdp')


def test_statement_of_a_run_in_progress():
  plan = make_plan(sampling=sampling.FixedOrder())
  text = plan.statement(steps=20)
  assert 'after 20 of the 40 planned steps' in text and 'at the end' in text
  for steps in (20, None):
    assert statement.rounded_up(plan.epsilon(steps)) in text
  assert 'at most 1 times, at least 20 steps apart' in text
  assert 'No amplification is claimed' in text
  assert 'no step has been taken' in plan.statement(steps=0)


def test_statement_mentions_what_weakens_the_guarantee():
  assert 'FIXED SEED' in make_plan(seed=3).statement()
  assert 'twice the clip norm' in make_plan(
      adjacency='replace', sampling=sampling.FixedOrder()).statement()
  with pytest.warns(UserWarning, match='below 1/N = 0.001 for the N = 1000 records'):
    assert 'delta is not below 1/1000' in make_plan(target_delta=1e-3).statement()


def test_statement_and_json_hold_no_fresh_secret():
  plan = make_plan()
  list(plan.index_batches())
  assert plan.statement() == make_plan().statement() and plan.to_json() == make_plan().to_json()


@pytest.mark.parametrize('changes', [
    dict(), dict(sampling=sampling.FixedOrder(shuffle_seed=None), unit='user', seed=3),
    dict(sampling=sampling.CyclicPoisson(cycle=4), steps=np.int64(30),
         noise_multiplier=np.float32(2), mechanism=mechanisms.BandedToeplitz(bands=4, steps=40)),
    dict(sampling=sampling.FixedOrder(), mechanism=mechanisms.Tree(steps=40), adjacency='replace',
         min_sep=3, max_participations=4),
    dict(sampling=sampling.FixedOrder(), extra_releases=(0.5, 2.0)),
    dict(population_size=None, adjacency='add_remove',
         sampling=sampling.Poisson(sampling_probability=0.05)),
])
def test_json_round_trip(changes):
  plan = make_plan(**changes)
  again = plan_lib.PrivacyPlan.from_json(plan.to_json())
  assert again == plan and hash(again) == hash(plan)
  assert again.epsilon() == plan.epsilon() and again.statement() == plan.statement()


def test_no_number_of_a_plan_is_narrow():
  plan = make_plan(noise_multiplier=np.float32(1.3), l2_norm_clip=np.float32(0.7),
                   batch_size=np.float64(50), target_delta=np.float32(1e-5))
  for number in (plan.noise_multiplier, plan.l2_norm_clip, plan.batch_size, plan.target_delta):
    assert type(number) is float
  assert plan.noise_multiplier == np.float32(1.3)


def test_damaged_json_is_refused():
  content = json.loads(make_plan().to_json())
  with pytest.raises(ValueError, match='must be the JSON of a plan'):
    plan_lib.PrivacyPlan.from_json('{"a": 1}')
  with pytest.raises(ValueError, match='of version 1. Received: .* of version 2'):
    plan_lib.PrivacyPlan.from_json(json.dumps(dict(content, version=2)))
  with pytest.raises(ValueError, match='must be what `to_json` wrote'):
    plan_lib.PrivacyPlan.from_json(json.dumps({'format': content['format'], 'version': 1}))
  content['plan']['noise_multiplier'] = -1
  with pytest.raises(ValueError, match='`noise_multiplier` must be'):
    plan_lib.PrivacyPlan.from_json(json.dumps(content))


@pytest.mark.parametrize('part', [
    lambda x: x, lambda x: x.tolist(), lambda x: x.astype('float64'),
    lambda x: {'a': x, 'b': x[:, :1]}, lambda x: (x.astype('int8'), x)])
@pytest.mark.parametrize('where', [0, 3, 11])
def test_public_examples_among_private_ones_are_named(monkeypatch, part, where):
  monkeypatch.setattr(sources, '_READ', 4)  # The last one is in a part of its own.
  x, seen = np.float32(np.arange(36).reshape(12, 3)), np.float32(-1 - np.arange(9).reshape(3, 3))
  plan = make_plan(population_size=12, batch_size=4, public=part(seen))
  plan.batches((part(x), x))
  x[where], y = seen[2], np.concatenate([seen] * 4)  # Targets may be equal to public inputs.
  with pytest.raises(ValueError, match=r'Received: 1 public examples .* \[2\]'):
    plan.batches((part(x), y))
  other = make_plan(population_size=12, batch_size=4)
  other.batches((part(x), y))
  assert plan == other and hash(plan) == hash(other) and plan.to_json() == other.to_json()
  with pytest.raises(ValueError, match='1 public examples'):
    dataclasses.replace(plan, steps=3).batches((part(x), y))


def test_plans_are_constants():
  plan = make_plan()
  with pytest.raises(dataclasses.FrozenInstanceError):
    plan.noise_multiplier = 0.1
  assert len({plan, make_plan(), make_plan(steps=41)}) == 2


def test_calibrate_finds_the_noise_and_takes_none():
  fields = {k: v for k, v in FIELDS.items() if k != 'noise_multiplier'}
  assert plan_lib.PrivacyPlan.calibrate(target_epsilon=3.0, **fields).l2_norm_clip == 2.0
  with pytest.raises(ValueError, match='`noise_multiplier` is what `calibrate` finds'):
    plan_lib.PrivacyPlan.calibrate(target_epsilon=3.0, noise_multiplier=1.0, **fields)
