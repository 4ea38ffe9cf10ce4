# SPDX-License-Identifier: Apache-2.0
"""What is recommended is best in simulation, does no harm there, and keeps to the plan."""

import json
import math

import numpy as np
import pytest

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.advice import best
from tfdp_adaptive.advice import methods
from tfdp_adaptive.advice import recommendation
from tfdp_adaptive.advice import trial

TASK = dict(population_size=20_000, batch_size=256, steps=40, target_epsilon=1.0)


def public(spread=1.0, count=120, size=16, signal=2.0, seed=0, unit=1.0):
  """Of a logistic regression whose inputs have sizes from 1 to `spread`."""
  rng = np.random.default_rng(seed)
  x = rng.normal(size=[count, size])
  y = rng.random(count) < 1 / (1 + np.exp(-signal * x @ np.ones(size) / math.sqrt(size)))
  x = unit * x * np.geomspace(1, spread, size)
  return dict(parameters=size, gradients=(.5 - y)[:, None] * x, losses=np.full(count, math.log(2)))


@pytest.fixture(scope='module')
def two():
  """(even, uneven): recommendations for gradients of two kinds."""
  return tuple(tfdp.recommend(**public(spread), **TASK) for spread in (1, 1e-3))


def test_public_name():
  assert tfdp.recommend is recommendation.recommend


def test_the_least_simulated_loss_wins(two):
  for found in two:
    first = found.tried[0]
    assert (first.method, first.more) == (found.method, 0)
    losses = [one.loss for one in found.tried[1:]]
    assert losses == sorted(losses) and first.loss < found.start
    assert {one.method for one in found.tried} == {'DPSGD', 'DPAdam', 'DPAdamSTP'}


def test_uneven_coordinates_want_second_moments(two):
  even, uneven = ({one.method: one.loss for one in reversed(found.tried)} for found in two)
  assert uneven['DPAdamSTP'] < uneven['DPSGD'] - .05
  assert even['DPSGD'] < even['DPAdamSTP'] + .02


@pytest.mark.parametrize('unit', [1e-4, 1e4])
def test_units_change_nothing_but_the_settings(unit, two):
  found, base = tfdp.recommend(**public(1e-3, unit=unit), **TASK), two[1]
  assert found.method == base.method
  assert found.tried[0].loss == pytest.approx(base.tried[0].loss, rel=.02)
  rates = [one.settings['learning_rate'].initial_learning_rate for one in (found, base)]
  assert rates[0] * unit == pytest.approx(rates[1], rel=.02)


def test_where_training_does_harm_it_says_so():
  """Every record has its opposite: what one half teaches is wrong of the other."""
  g = np.random.default_rng(0).normal(size=[60, 16])
  found = tfdp.recommend(parameters=16, gradients=np.concatenate([g, -g]),
                         losses=np.full(120, math.log(2)), **TASK)
  assert 'get worse with every setting' in found.reasons[1]
  assert found.tried[0].loss < found.start + .01  # The smallest steps there are.


def test_a_rate_that_is_too_large_for_the_model_itself_is_not_proposed():
  """Each loss has 10,000 |w|^4 more than at the first weights can be seen."""
  records, asked = public(), []
  signs = np.sign(records['gradients'][:, :1])
  x = 2 * records['gradients'] * signs  # The inputs, up to a sign that is the label.

  def look(w, rows):
    asked.append(len(rows) if rows is not None else len(x))
    moved = signs[:, 0] * (x @ w)
    gradients = (signs / (1 + np.exp(-moved))[:, None]) * x + 40_000 * (w @ w) * w
    found = gradients, np.logaddexp(0, moved) + 10_000 * (w @ w)**2
    return found if rows is None else tuple(part[rows] for part in found)

  np.testing.assert_allclose(look(np.zeros(16), None)[0], records['gradients'])
  blind, seeing = (tfdp.recommend(**records, **TASK, **more) for more in ({}, dict(look=look)))
  rates = [one.settings['learning_rate'].initial_learning_rate for one in (blind, seeing)]
  assert seeing.method != blind.method or rates[1] < rates[0] / 3
  assert max(one.loss for one in seeing.tried) < seeing.start == pytest.approx(math.log(2))
  assert len(seeing.tried) == 3 and set(asked) == {60, 120}
  assert 'The model itself was not trained' in blind.reasons[0]
  assert 'on half of 120 public records' in seeing.reasons[0]


def test_settings_that_harm_records_not_trained_on_are_not_proposed(monkeypatch):
  """Losses (1 + s)^2 / 2 at s = -.5 -+ .6 are less in the mean than at -.2, but .605 unseen."""
  half = np.where(np.isin(np.arange(40), np.random.default_rng(0).permutation(40)[:20]), 1.0, -1.0)
  records = trial.Records(np.stack([np.ones(40), half], 1), np.full(40, .5), True)

  def train(candidate, seen, *_):
    weights = np.zeros([len(candidate.settings), 2])
    weights[5:7, 0] = -.2
    weights[12:14] = [-.5, -.6 * seen.gradients[0, 1]]
    return weights

  monkeypatch.setattr(trial, 'train', train)
  plan = tfdp.PrivacyPlan.calibrate(**TASK, target_delta=1e-5, l2_norm_clip=1.0)
  one = next(methods.of(plan, records, 1.0))
  found = best.in_simulation(one, records)
  assert found.helps and found.setting == one.candidate.settings[5]
  np.testing.assert_allclose(found.losses, .32)
  # Alone, the harmful setting is not taken even where nothing else moves.
  monkeypatch.setattr(trial, 'train', lambda *args: train(*args) * (
      np.arange(len(args[0].settings)) > 9)[:, None])
  assert best.in_simulation(one, records).losses.mean() == pytest.approx(.5)


def test_a_rate_is_judged_together_with_the_next(monkeypatch):
  """At rate 5 records have the loss .005, beside it .98; at rates 12 and 13 both .32."""
  def train(candidate, *_):
    weights = np.zeros([len(candidate.settings), 1])
    weights[[4, 5, 6, 12, 13], 0] = -2.4, -.9, -2.4, -.2, -.2
    return weights

  monkeypatch.setattr(trial, 'train', train)
  records = trial.Records(np.ones([20, 1]), np.full(20, .5), True)
  plan = tfdp.PrivacyPlan.calibrate(**TASK, target_delta=1e-5, l2_norm_clip=1.0)
  one = next(methods.of(plan, records, 1.0))
  assert best.in_simulation(one, records).setting == one.candidate.settings[12]


HALF = np.random.default_rng(0).permutation(20)[:10]
LOSSES = {-6.5: (1, 1), -6: (1, 1), -5.5: (.98, .98), -5: (.98, .98), -4.5: (.98, .98),
          -4: (.95, .95), -3.5: (.9, .9), -3: (.9, .9), -2.5: (.8, .8), -2: (.7, .7),
          -1.5: (.7, .7), -1: (.1, .8), -.5: (.1, .8), 0: (.3, .9), .5: (.3, .9)}


def three(rate, clip, losses):
  """The same losses at a rate and beside it."""
  return {(rate + notches, clip): losses for notches in (-.5, 0, .5)}


def of_the_model(monkeypatch, changes, name='DPSGD'):
  """(outcome, (notches of rate, of clip norm)): losses are those of `LOSSES` and `changes`.

  They are of the half that trains and of the other one, 1 before, by notches. Other settings
  double them.
  """
  table = {(rate, 0): losses for rate, losses in LOSSES.items()}
  table.update({at if isinstance(at, tuple) else (at, 0): one for at, one in changes.items()})

  def look(w, rows):
    seen, unseen = table.get(tuple(w), (2, 2))
    losses = np.full(20, float(unseen))
    losses[HALF] = seen
    return np.ones([20, 2]), losses

  records = trial.Records(np.ones([20, 2]), np.ones(20), True, look)
  plan = tfdp.PrivacyPlan.calibrate(**TASK, target_delta=1e-5, l2_norm_clip=1.0)
  one, = (method for method in methods.of(plan, records, 1.0) if method.name == name)
  start = one.candidate.settings[8]
  notches = lambda setting: tuple(
      round(2 * math.log(value / first, methods.NOTCH)) / 2 for value, first in zip(setting, start))
  monkeypatch.setattr(
      trial, 'train', lambda candidate, *_: np.array([notches(candidate.settings[0])]))
  found, = best.of_the_model([best.Outcome(one, start, True, np.ones(20))], records)
  return found, notches(found.setting)


@pytest.mark.parametrize('changes, chosen, helps, loss', [
    ({}, -1, True, .5125),  # The mean of both halves; of others alone it would be -2.
    ({-.5: (.2, 1.05)}, -2, True, .725),  # 1.8 times the rate does harm to the others.
    ({-1.5: (.4, 1.05)}, 0, True, .5625),
    ({-1: (.2, 1.05)}, 0, True, .5625),
    ({k / 2: (.2, 1.05) for k in range(-7, 2)}, -5, True, .98),  # Smaller rates alone help.
    ({k / 2: (.2, 1.5 + k / 40) for k in range(-13, 2)}, -6, False, .7125)])  # -5.5 is worst.
def test_rates_of_the_model_itself_are_judged_by_all_records(
    changes, chosen, helps, loss, monkeypatch):
  found, at = of_the_model(monkeypatch, changes)
  assert (at, found.helps) == ((chosen, 0), helps)
  assert found.losses.mean() == pytest.approx(loss)


LARGER = three(-.5, 1, (.1, .7))


@pytest.mark.parametrize('changes, chosen, loss', [
    (LARGER, (-.5, 1), .4),
    ({**LARGER, **three(0, 2, (.1, .5)), **three(.5, 3, (.1, .1))}, (0, 2), .3),  # Two steps.
    ({**LARGER, (-.5, 1): (.5, .6)}, (-1, 0), .5125),  # The rate in the middle is not better.
    ({**LARGER, (0, 1): (.2, 1.05)}, (-1, 0), .5125),  # Beside it others get worse.
    ({**LARGER, (0, 1): (.8, .9), (-1, 1): (.8, .9)}, (-1, 0), .5125),  # The mean is not better.
    ({-1: (.2, 1.05), **three(1, 0, (.1, .8))}, (1, 0), .45),
    ({-1: (.2, 1.05), **three(1, 0, (.1, .8)), **three(1.5, 1, (.1, .6))}, (1.5, 1), .35),
    ({0: (.1, .86), .5: (0, .5)}, (-1, 0), .5125)])  # One that is less by itself was better.
def test_larger_rates_and_clip_norms_are_taken_while_they_are_better(
    changes, chosen, loss, monkeypatch):
  found, at = of_the_model(monkeypatch, changes)
  assert at == chosen and found.helps
  assert found.losses.mean() == pytest.approx(loss)


@pytest.mark.parametrize('name, chosen', [('DPAdam', (-1, 2)), ('DPAdamSTP', (-1, 0))])
def test_clip_norms_of_adam_grow_alone(name, chosen, monkeypatch):
  """Its steps do not depend on them; those of scale-then-privatize are held back by its noise."""
  changes = {**LARGER, **three(-1, 1, (.1, .7)), **three(-1, 2, (.1, .6))}
  assert of_the_model(monkeypatch, changes, name)[1] == chosen


@pytest.mark.parametrize('columns, kept', [(8, 8), (3, 3), (5000, 2048)])
def test_norms_of_some_columns_are_those_of_all(columns, kept):
  gradients = np.random.default_rng(0).choice([-1.0, 1.0], size=[20, columns])
  found = recommendation._records(gradients, np.ones(20), False, 9000)
  assert found.gradients.shape == (20, kept)
  np.testing.assert_allclose(np.linalg.norm(found.gradients, axis=1), math.sqrt(9000))


def test_more_is_the_difference_over_records(two):
  for found in two:
    for one in found.tried[1:]:
      assert one.more == pytest.approx(one.loss - found.tried[0].loss, abs=1e-9)
      assert one.interval > 0
    said = found.reasons[1]
    close = [one for one in found.tried[1:] if one.more <= one.interval]
    assert ('may be as good' in said) == bool(close)


@pytest.mark.parametrize('errors, helps, preferred', [
    (.9, True, True), (1.1, True, False), (.9, False, False)])
def test_scale_then_privatize_is_taken_within_one_standard_error(
    errors, helps, preferred, monkeypatch):
  spread = np.resize([-.1, .1], 120)
  error = spread.std(ddof=1) / math.sqrt(120)
  losses = {'DPSGD': .5, 'DPAdam': .4, 'DPAdamSTP': .4 + errors * error + spread}
  monkeypatch.setattr(best, 'in_simulation', lambda one, _: best.Outcome(
      one, one.candidate.settings[4], helps or one.name != 'DPAdamSTP',
      np.broadcast_to(losses[one.name], [120])))
  found = tfdp.recommend(
      sampling=tfdp.sampling.Poisson(), mechanism=tfdp.mechanisms.IndependentGaussian(),
      **public(), **TASK)
  assert found.method == found.tried[0].method == ('DPAdamSTP' if preferred else 'DPAdam')
  assert any('one standard error' in reason for reason in found.reasons) == preferred
  if preferred:
    assert found.tried[1].more == pytest.approx(-errors * error)


def method(name, shrunk=1.0, steps=40, gradients=None):
  made = tfdp.PrivacyPlan.calibrate(**dict(TASK, steps=steps), target_delta=1e-5, l2_norm_clip=1.0)
  records = trial.Records(np.asarray(gradients), np.full(len(gradients), .5), True)
  one, = (m for m in methods.of(made, records, shrunk) if m.name == name)
  return one.candidate.settings[4], methods.settled(
      one, one.candidate.settings[4], records, shrunk)


SMALL, LARGE = np.full([20, 8], 1e-6), np.full([20, 8], 1e6)


@pytest.mark.parametrize('name, gradients, rate, clip', [
    ('DPSGD', SMALL, 1, 1), ('DPAdamSTP', SMALL, 1 / 3, 3), ('DPAdamSTP', LARGE, 1 / 3, 3)])
def test_a_sample_of_coordinates_stands_for_all(name, gradients, rate, clip):
  """Nine times the coordinates, each a third: Adam moves each by the rate, DP-SGD by its size."""
  setting, found = method(name, 3.0, gradients=gradients)
  unit = setting.clip if name == 'DPSGD' else 1.0
  assert found.settings['learning_rate'].initial_learning_rate == pytest.approx(
      rate * setting.rate / unit, rel=.01)
  assert found.plan.l2_norm_clip == pytest.approx(clip * setting.clip, rel=.01)


def test_adams_rate_depends_on_what_it_divides_by():
  """By noise, which is the same in all coordinates, or by their size, which is a third."""
  mixed = np.tile([[1.0], [-1.0]], [10, 8]) + 1e-6  # Their mean is far below the noise.
  for gradients, rate in ((mixed, 1.0), (np.ones([20, 8]), 1 / 3)):
    setting, found = method('DPAdam', 3.0, gradients=gradients)
    assert found.settings['learning_rate'].initial_learning_rate == pytest.approx(
        rate * setting.rate, rel=.1)


def test_rates_of_fewer_steps_are_those_of_all():
  setting, found = method('DPSGD', steps=4000, gradients=SMALL)
  assert found.settings['learning_rate'].initial_learning_rate == pytest.approx(
      setting.rate / 10 / setting.clip, rel=.01)
  decay = found.settings['learning_rate']
  assert decay(0) > 0 and float(decay(4000)) == 0


def test_clip_norms_of_scale_then_privatize_are_stable():
  for batch_size in (8, 64, 1000):
    plan = tfdp.PrivacyPlan.calibrate(
        **dict(TASK, batch_size=batch_size), target_delta=1e-5, l2_norm_clip=1.0)
    records = trial.Records(np.ones([20, 64]), np.ones(20), False)
    one = list(methods.of(plan, records, 2.0))[-1]
    assert one.name == 'DPAdamSTP'
    largest = 2 * max(setting.clip for setting in one.candidate.settings)
    assert largest * plan.noise_multiplier / batch_size <= .9 * (1 + 1e-9)


def test_optimizers_are_built_of_what_is_found_and_of_what_is_printed(two):
  for found in two:
    assert .98 < found.plan.epsilon() <= 1 and found.plan.target_delta == 1e-5
    built = getattr(tfdp, found.method)(plan=found.plan, **found.settings)
    lines = [line.strip() for line in str(found).splitlines() if line.startswith('  ')]
    names = dict(keras=compat.keras, tfdp=tfdp, found=found)
    exec(lines[0], names)  # pylint: disable=exec-used
    printed = eval(lines[1], names)  # pylint: disable=eval-used
    assert type(printed) is type(built)
    schedules = [one.get_config()['learning_rate']['config'] for one in (built, printed)]
    assert schedules[0]['initial_learning_rate'] == schedules[1]['initial_learning_rate']
    for name in set(found.settings) - {'learning_rate'}:
      assert printed.get_config()[name] == pytest.approx(built.get_config()[name], rel=.01)
    low, high = found.ranges['l2_norm_clip']
    assert low * .99 <= found.plan.l2_norm_clip <= high * 1.01


def test_it_says_what_it_does_not_know():
  one, other = (tfdp.recommend(parameters=32, gradient_norm=norm, **TASK) for norm in (1, 5.0))
  assert one.method == 'DPAdam' and 'this is a guess' in one.reasons[0]
  assert (one.plan.l2_norm_clip, other.plan.l2_norm_clip) == (1, 5)
  assert other.settings['epsilon'] == pytest.approx(5 * one.settings['epsilon'])
  assert json.loads(json.dumps(one.to_dict()))['tried'] == [] and 'guess' in str(one)
  tfdp.DPAdam(plan=one.plan, **one.settings)
  with pytest.raises(ValueError, match='could make the model worse'):
    tfdp.recommend(parameters=32, **TASK)


@pytest.mark.parametrize('sampling', [tfdp.sampling.FixedOrder(), tfdp.sampling.BallsInBins(78)])
def test_what_is_given_is_kept(sampling):
  found = tfdp.recommend(sampling=sampling, **public(), **dict(TASK, population_size=19_968))
  assert found.plan.sampling == sampling
  assert len({one.noise for one in found.tried}) == 1


def test_replaced_records_count_the_noise_twice():
  shared = dict(TASK, sampling=tfdp.sampling.FixedOrder(),
                mechanism=tfdp.mechanisms.IndependentGaussian(), parameters=4, gradient_norm=1.0)
  one, other = (tfdp.recommend(adjacency=a, **shared) for a in ('zero_out', 'replace'))
  assert one.plan.noise_multiplier == pytest.approx(other.plan.noise_multiplier)
  assert other.settings['epsilon'] == pytest.approx(2 * one.settings['epsilon'])


def test_text_and_json_have_all_of_it(two):
  _, found = two
  text, content = str(found), json.loads(json.dumps(found.to_dict()))
  for part in (found.method, *found.reasons, *(one.method for one in found.tried)):
    assert part in text
  assert content['method'] == found.method and len(content['tried']) == len(found.tried)
  assert content['settings']['learning_rate'] == found.settings['learning_rate'].get_config()[
      'initial_learning_rate']


@pytest.mark.parametrize('changes, message', [
    (dict(population_size=0), '`population_size`'), (dict(parameters=1.5), '`parameters`'),
    (dict(batch_size=20_001), '`batch_size` must be at most'), (dict(batch_size=0), '`batch_size`'),
    (dict(parameters=15), 'one column per parameter'), (dict(losses=None), '`losses` of public'),
    (dict(parameters=17, look=print), 'With `look`'),
    (dict(gradients=None), '`losses` of public'), (dict(gradient_norm=1.0), '`gradient_norm`'),
    (dict(gradient_norm=0), 'gradient_norm'), (dict(gradients=np.zeros([120, 16])), 'not all zero'),
    (dict(gradients=np.ones(16)), 'shape'), (dict(gradients=np.ones([19, 16])), '20 records'),
    (dict(gradients=np.full([120, 16], np.nan)), 'finite'), (dict(gradients='x'), 'array of'),
    (dict(losses=np.ones(119)), 'one number per row'), (dict(losses=-np.ones(120)), 'negative'),
    (dict(losses=np.full(120, np.inf)), 'one number per row'),
    (dict(l2_norm_clip=1.0), 'is recommended'), (dict(target_epsilon=0), '`target_epsilon`')])
def test_refusals(changes, message):
  with pytest.raises(ValueError, match=message):
    tfdp.recommend(**dict(dict(TASK, **public()), **changes))


def test_bands_are_proposed_only_if_their_sums_have_less_error():
  for target_epsilon, better in ((.05, False), (8.0, True)):
    plan = dict(TASK, steps=200, target_epsilon=target_epsilon, l2_norm_clip=1.0, target_delta=1e-5)
    plans = recommendation._plans(plan, None, None)
    errors = [one.noise_multiplier * one.mechanism.rmse(200) for one in plans]
    assert (len(plans) == 2) == better and errors == sorted(errors, reverse=True)
  alone = recommendation._plans(dict(plan, batch_size=20_000, steps=5), None, None)
  assert len(alone) == 1  # Nothing to cycle through.
