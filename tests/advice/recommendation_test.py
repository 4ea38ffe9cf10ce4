# SPDX-License-Identifier: Apache-2.0
"""The chooser reads its evidence right, says what it does not know, and keeps to the plan."""

import json
import math

import numpy as np
import pytest

import tfdp_adaptive as tfdp
from tfdp_adaptive.advice import evidence
from tfdp_adaptive.advice import recommendation
from tfdp_adaptive.advice import task_facts

TASK = dict(
    population_size=20_000, batch_size=256, steps=20, target_epsilon=1.0, parameters=32)

ROWS = evidence.ROWS  # Before a test puts others in their place.


def row(task, facts, **losses):
  """Evidence in which the methods named have these losses, the others 1."""
  return evidence.Row(task, 1.0, 2.0, facts, tuple(
      evidence.Result(method, correlated, losses.get(method, 1.0) + .01 * correlated,
                      .001, .1, .5, .3)
      for method in ('DPSGD', 'DPAdam', 'DPAdamBC', 'DPAdamSTP') for correlated in (False, True)))


UNEVEN = row('uneven', (.1, 1.0, .1, .05), DPAdamSTP=.5)
EVEN = row('even', (.1, 1.0, .9, .05), DPSGD=.5)


@pytest.fixture(scope='module')
def two():
  """(even, uneven): recommendations for gradients of two kinds."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(evidence, 'ROWS', (UNEVEN, EVEN))
    yield tuple(tfdp.recommend(gradients=gradients(spread), **TASK) for spread in (1, 1e-4))


def gradients(spread, seed=0):
  return (np.random.default_rng(seed).normal(size=[400, 32]) + .3) * np.geomspace(1, spread, 32)


def test_public_name():
  assert tfdp.recommend is recommendation.recommend


def test_the_task_that_is_most_alike_decides(two):
  even, uneven = two
  assert (even.method, even.like[0][0]) == ('DPSGD', 'even')
  assert (uneven.method, uneven.like[0][0]) == ('DPAdamSTP', 'uneven')
  # The best gains 2 - .5, the others half of it less or 2 - 1.
  assert 0 <= min(even.expected.values()) < .1 and even.expected['DPAdamSTP', False] > .2


@pytest.mark.parametrize('scale', [1e-6, 1.0, 1e6])
def test_facts_of_made_up_gradients(scale):
  rng = np.random.default_rng(0)
  noise = rng.normal(size=[50_000, 4])
  facts = task_facts.facts_of(scale * noise * [2, 1, 1, 0])
  assert facts['evenness'] == pytest.approx(16 / (4 * 6), rel=.02)
  assert facts['agreement'] == pytest.approx(0, abs=1e-3)
  facts = task_facts.facts_of(scale * (noise + 1)[:100])
  assert facts['agreement'] == pytest.approx(.5, abs=.05)
  assert task_facts.facts_of(np.ones([3, 2])) == dict(evenness=1.0, agreement=1.0)


def test_evenness_of_a_last_layer_is_that_of_its_gradients():
  rng = np.random.default_rng(0)
  shares, sizes = np.array([.6, .3, .08, .02]), np.geomspace(1, .03, 6)
  x = rng.normal(size=[20_000, 6]) * sizes
  delta = shares - np.eye(4)[rng.choice(4, 20_000, p=shares)]
  for a, b, given in [(x, delta, dict(input_sizes=7 * sizes, class_frequencies=9 * shares)),
                      (x, np.ones([20_000, 1]), dict(input_sizes=sizes)),
                      (np.ones([20_000, 1]), delta, dict(class_frequencies=shares))]:
    gradients = (a[:, :, None] * b[:, None, :]).reshape(20_000, -1)
    expected = task_facts.facts_of(gradients)['evenness']
    assert task_facts.evenness_of(**given) == pytest.approx(expected, rel=.03)
  assert task_facts.evenness_of() is None
  assert task_facts.evenness_of([2, 2], [.5, .5]) == pytest.approx(1)


def test_frequencies_and_sizes_help_where_there_are_no_gradients(two, monkeypatch):
  monkeypatch.setattr(evidence, 'ROWS', (UNEVEN, EVEN))
  for sizes, method in ((np.ones(8), 'DPSGD'), (np.geomspace(1, 1e-4, 8), 'DPAdamSTP')):
    found = tfdp.recommend(input_sizes=sizes, class_frequencies=[.5, .3, .2], **TASK)
    assert found.method == method and 'is a guess' in found.warnings[0]
    assert any('Evenness' in text for text in found.reasons)


def test_agreement_has_no_bias_of_few_records():
  found = [np.square(g.mean(0)).sum() / np.square(g).sum(1).mean()
           for g in np.random.default_rng(1).normal(size=[300, 4, 50])]
  assert np.mean(found) == pytest.approx(.25, abs=.01)  # What is corrected.
  rng = np.random.default_rng(1)
  assert np.mean([task_facts.facts_of(rng.normal(size=[4, 50]))['agreement']
                  for _ in range(300)]) < .05


def test_noise_to_signal_is_that_of_a_step():
  rng = np.random.default_rng(2)
  size, batch, sigma = 40, 8, .7
  sizes = np.geomspace(1, .01, size)
  records = lambda count: (rng.normal(size=[count, size]) + .2) * sizes
  known = task_facts.facts_of(records(50_000))
  facts = task_facts.Facts(sigma * math.sqrt(size) / batch, 1.0, **known, batch_size=batch)
  norm = math.sqrt(1.04 * np.square(sizes).sum())
  signal = np.mean([np.square(records(batch).mean(0)).sum() for _ in range(4000)])
  # Noise that is proportional to the roots of the sizes, scaled to cost as much as a ball's.
  shape = np.sqrt(sizes * sizes.sum() / np.square(sizes).sum())
  noise = np.square(sigma * norm / batch * shape).sum()
  assert facts.noise_to_signal == pytest.approx(math.sqrt(noise / signal), rel=.03)
  assert task_facts.Facts(.1, 1.0, .5, None, 8).noise_to_signal is None


def test_where_steps_are_noise_nothing_is_made_of_second_moments(monkeypatch):
  # Scale-then-privatize was best where steps are signal, bias correction where they are noise.
  monkeypatch.setattr(evidence, 'ROWS', (
      row('signal', (.1, 1.0, .5, .05, 256), DPAdamSTP=.2),
      row('noise', (3.0, 1.0, .5, .05, 256), DPAdamBC=.2, DPAdam=.3)))
  alone = dict(TASK, gradients=gradients(.1), mechanism=tfdp.mechanisms.IndependentGaussian())
  found = [tfdp.recommend(**dict(alone, batch_size=size)) for size in (256, 2)]
  assert [one.method for one in found] == ['DPAdamSTP', 'DPAdam']
  assert {method for method, _ in found[1].expected} == {'DPSGD', 'DPAdam'}
  assert [one.like[0][0] for one in found] == ['signal', 'noise']
  assert 'left out' in found[1].reasons[-1] and 'left out' not in found[0].reasons[-1]


@pytest.mark.parametrize('method, evenness, saving, correlated', [
    ('DPAdamSTP', .6, 1.6, True), ('DPAdamSTP', .3, 1.6, False), ('DPAdamSTP', .6, 1.4, False),
    ('DPAdamSTP', None, 1.6, False), ('DPSGD', .3, 1.6, True), ('DPAdamBC', None, 1.6, True)])
def test_banded_noise_where_sums_gain_and_second_moments_lose_little(
    method, evenness, saving, correlated):
  facts = task_facts.Facts(.1, saving, evenness)
  expected = {(method, False): .1, (method, True): .2, ('DPAdam', False): .3}
  assert recommendation.best_of(facts, expected) == (method, correlated)
  del expected[method, True]  # Another mechanism was asked for.
  assert recommendation.best_of(facts, expected) == (method, False)


def test_plan_settings_and_clip_norms_fit_together(two):
  sgd, result = two
  assert .98 < result.plan.epsilon() <= 1 and result.plan.target_delta == 1e-5
  low, high = result.ranges['l2_norm_clip']
  assert low == pytest.approx(math.sqrt(32)) and high == pytest.approx(math.sqrt(32 * 256))
  assert result.plan.l2_norm_clip == pytest.approx(.5 * math.sqrt(32))
  norm = np.median(np.linalg.norm(gradients(1e-4), axis=1))
  assert result.settings['scale_epsilon'] == pytest.approx(.3 * norm / math.sqrt(32))
  assert sgd.settings['learning_rate'] == pytest.approx(.1 / sgd.plan.l2_norm_clip)
  assert not sgd.warnings
  for one in (result, sgd):
    getattr(tfdp, one.method)(plan=one.plan, **one.settings)


def test_epsilon_far_above_the_floor_is_called_what_it_is(monkeypatch):
  monkeypatch.setattr(evidence, 'ROWS', (row('adam', (.1, 1.0, .5, .05), DPAdam=.5),))
  alone = dict(TASK, gradients=gradients(1), mechanism=tfdp.mechanisms.IndependentGaussian())
  result = tfdp.recommend(epsilon=1e-9, **alone)
  plan, floor = result.plan, result.ranges['epsilon'][1]
  assert floor == pytest.approx(plan.l2_norm_clip * plan.noise_multiplier / plan.batch_size)
  assert not result.warnings
  assert not any(correlated for _, correlated in result.expected)
  for epsilon, said in ((11 * floor, True), (9 * floor, False)):
    result = tfdp.recommend(epsilon=epsilon, **alone)
    assert any('this is DP-SGD with' in text for text in result.warnings) == said


def test_it_says_what_it_does_not_know(two):
  blind = tfdp.recommend(**TASK)
  assert len(blind.warnings) == 2 and 'No public gradients' in blind.warnings[0]
  far = tfdp.recommend(**dict(TASK, parameters=32 * 10**8))
  assert any('this is a guess' in text for text in far.warnings)
  assert far.method != 'DPAdamSTP' and any('feed itself' in text for text in far.warnings)


def test_what_is_given_is_kept(two):
  fixed = tfdp.recommend(sampling=tfdp.sampling.FixedOrder(), **TASK)
  assert isinstance(fixed.plan.sampling, tfdp.sampling.FixedOrder)
  assert type(fixed.plan.mechanism).__name__ in ('BLT', 'BandedToeplitz')
  assert all(correlated for _, correlated in fixed.expected)
  alone = tfdp.recommend(**dict(TASK, batch_size=20_000, steps=5))
  assert not any(correlated for _, correlated in alone.expected)  # Nothing to cycle through.


def test_replaced_records_count_the_noise_twice(two):
  shared = dict(TASK, gradients=gradients(1e-4), sampling=tfdp.sampling.FixedOrder(),
                mechanism=tfdp.mechanisms.IndependentGaussian())
  one, other = (tfdp.recommend(adjacency=a, **shared) for a in ('zero_out', 'replace'))
  assert one.plan.noise_multiplier == pytest.approx(other.plan.noise_multiplier)
  said = [float(result.reasons[1].split(' is ')[1].rstrip('.')) for result in (one, other)]
  assert said[1] == pytest.approx(2 * said[0], rel=.01)


def test_text_and_json_have_all_of_it(two):
  _, result = two
  text, content = str(result), json.loads(json.dumps(result.to_dict()))
  for part in (result.method, *result.reasons, *result.warnings, *result.ranges):
    assert part in text
  assert content['method'] == result.method and content['settings'] == result.settings


@pytest.mark.parametrize('changes, message', [
    (dict(population_size=0), '`population_size`'), (dict(parameters=1.5), '`parameters`'),
    (dict(batch_size=20_001), '`batch_size` must be at most'), (dict(batch_size=0), '`batch_size`'),
    (dict(gradients=np.ones([5, 31])), 'one column per parameter'),
    (dict(gradients=np.zeros([5, 32])), 'not all zero'), (dict(gradients=np.ones(32)), 'shape'),
    (dict(gradients=np.full([5, 32], np.nan)), 'finite'), (dict(gradient_norm=0), 'gradient_norm'),
    (dict(epsilon=-1), '`epsilon`'), (dict(input_sizes=[1, 2]), 'one or the other'),
    (dict(gradients=None, input_sizes=[1, -2]), '`input_sizes` must be'),
    (dict(gradients=None, class_frequencies=[1.0]), '`class_frequencies` must be'),
    (dict(gradients=None, class_frequencies=[1, 0]), 'for two classes'),
    (dict(l2_norm_clip=1.0), 'is recommended'), (dict(target_epsilon=0), '`target_epsilon`')])
def test_refusals(two, changes, message):
  with pytest.raises(ValueError, match=message):
    tfdp.recommend(**dict(dict(TASK, gradients=gradients(1)), **changes))


def test_the_evidence_is_whole():
  tasks = {one.task for one in ROWS}
  assert len(tasks) >= 6
  for one in ROWS:
    assert len(one.results) == len({r[:2] for r in one.results}) == 8
    assert all(math.isfinite(value) and value > 0 for value in one.facts)
    assert all(r.loss > 0 and r.rate > 0 and r.clip > 0 and hasattr(tfdp, r.method)
               for r in one.results)


def test_bands_are_proposed_only_if_their_sums_have_less_error():
  for target_epsilon, better in ((.05, False), (8.0, True)):
    task = dict(TASK, steps=200, target_epsilon=target_epsilon)
    plan = dict({key: task[key] for key in task if key != 'parameters'}, l2_norm_clip=1.0,
                target_delta=1e-5)
    alone = tfdp.PrivacyPlan.calibrate(**plan)
    banded = tfdp.PrivacyPlan.calibrate(
        **plan, sampling=tfdp.accounting.sampling.CyclicPoisson(cycle=16),
        mechanism=tfdp.mechanisms.BandedToeplitz(16, 200))
    errors = [one.noise_multiplier * one.mechanism.rmse(200) for one in (alone, banded)]
    assert (errors[1] < errors[0]) == better
    found = tfdp.recommend(**task)
    assert any(correlated for _, correlated in found.expected) == better


def test_its_own_clip_norm_is_stable(monkeypatch):
  wide = row('wide', UNEVEN.facts, DPAdamSTP=.5)
  monkeypatch.setattr(evidence, 'ROWS', (wide._replace(results=tuple(
      one._replace(clip=1e6) for one in wide.results)),))
  found = tfdp.recommend(gradients=gradients(1e-4), **TASK)
  plan = found.plan
  noise = plan.noise_multiplier / plan.batch_size * np.max(plan.mechanism.row_norms(plan.steps))
  assert found.method == 'DPAdamSTP' and math.isclose(plan.l2_norm_clip * noise, .9)
  assert found.ranges['l2_norm_clip'][1] <= plan.l2_norm_clip * (1 + 1e-9)
  assert not any('Scale-then-privatize' in text for text in found.warnings)


def test_it_names_the_noise_with_which_a_method_is_left_out():
  task = dict(TASK, steps=200, target_epsilon=8.0)
  found = tfdp.recommend(**dict(task, parameters=20_000))
  scaled = {correlated for method, correlated in found.expected if method == 'DPAdamSTP'}
  text, = [text for text in found.warnings if 'left out' in text]
  assert scaled == {False} and 'with correlated noise is left out' in text
