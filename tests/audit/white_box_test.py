# SPDX-License-Identifier: Apache-2.0
"""Every class passes its audit, and every bug planted into it is caught."""

import json

import numpy as np
import planted
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import rules
from tfdp_adaptive.audit import changes
from tfdp_adaptive.audit import noise_rows
from tfdp_adaptive.audit import subjects
from tfdp_adaptive.cli import main
from tfdp_adaptive.examples import white_box
from tfdp_adaptive.keras import named_optimizers

SMALL = 1e-3 * 0.05  # False alarms that probes are allowed here.


def optimizer(name, steps=24, seed=5):
  return white_box.make(name, (), 4.0, 1e-6, 128, steps, 16, seed)


def test_every_class_is_audited():
  public = {name for name, value in vars(named_optimizers).items()
            if getattr(value, 'factory', None) is not None}
  assert public == set(white_box.METHODS)


@pytest.mark.thorough(but=['DPSGD'])
@pytest.mark.parametrize('name', sorted(set(white_box.METHODS) - {'NonPrivateNoiselessAdam'}))
def test_a_correct_class_is_not_refuted(name):
  report = tfdp.audit.white_box(optimizer(name), canaries=128, seed=1)
  assert not report.violated, str(report)
  assert [one.name for one in report.findings] == [
      'changes', 'noise', 'accounting', 'batches', 'canaries', 'writes']
  assert 0.999 < report.change.size < 1.001  # The bound is attained: the search is no formality.
  assert 0.95 < report.noise.size < 1.05 and report.claimed == pytest.approx(4, rel=0.01)
  assert 'violated' not in str(report).lower() and 'Not refuted' in str(report)
  assert json.loads(json.dumps(report.to_dict(), allow_nan=False))['violated'] is False


@pytest.mark.thorough(but=['DPSGD', 'DP2Yogi'])
@pytest.mark.parametrize('name', sorted(set(white_box.METHODS) - {'NonPrivateNoiselessAdam'}))
def test_planted_bugs_are_caught(name):
  with planted.switched() as bugs:
    subject = subjects.of(optimizer(name), 64)
    subject.fresh(0)
    missed = []
    for bug in planted.applying(name):
      bugs.only(bug)
      if not planted.caught(subject, planted.SWITCHED[bug]):
        missed.append(bug)
    bugs.only(None)
    assert not missed
    assert not planted.caught(subject, 'noise') and not planted.caught(subject, 'changes')


@pytest.mark.parametrize('name', planted.SQUARED_MEAN)
def test_b_for_2b_minus_1_is_caught(name):
  with planted.b_for_2b_minus_1():
    change = changes.largest(subjects.of(optimizer(name), 64), 1, history=(0,))
  assert change.violated and change.size == pytest.approx(np.sqrt((1 + (31 / 16)**2) / 2), rel=1e-3)


def test_half_the_noise_is_caught_when_it_is_announced():
  with planted.half_the_noise_announced():
    report = tfdp.audit.white_box(optimizer('DPAdam'), canaries=128, seed=1)
  assert report.violated and 'VIOLATED' in str(report) and 'claim is violated' in str(report)
  assert report.change.size == pytest.approx(2, rel=1e-3)
  assert report.noise.size == pytest.approx(1, abs=0.05)  # As announced.


@pytest.mark.thorough(but=['cyclic batches'])
@pytest.mark.parametrize('bug', sorted(planted.BATCHES))
def test_batches_of_another_law_are_caught(bug):
  with planted.BATCHES[bug]():
    report = tfdp.audit.white_box(optimizer('DPSGD'), canaries=128, seed=1)
  assert [one.name for one in report.findings if one.violated] == ['batches']


QUERIES = {
    'dp_adam': rules.dp_adam, 'dp_adam_ime': rules.dp_adam_ime,
    'dp_adam_jme': rules.dp_adam_jme, 'pasan': rules.pasan,
    'scale_then_privatize': lambda: rules.scale_then_privatize(scale_epsilon=0.1),
    'dp2_extra_query': lambda: rules.dp2_adagrad(2, 2, ablation='extra_query')}


def query(name, **kwargs):
  queries = pytest.importorskip('tfdp_adaptive.queries')
  specs = {'kernel': tf.TensorSpec([8, 6]), 'bias': tf.TensorSpec([6])}
  return queries.RuleQuery(QUERIES[name](), specs, **{**dict(
      l2_norm_clip=0.5, noise_multiplier=2.0, batch_size=16,
      adjacency='replace' if name == 'dp_adam_jme' else 'zero_out'), **kwargs})


@pytest.mark.thorough
@pytest.mark.parametrize('name', sorted(QUERIES))
def test_queries_are_audited_and_their_bugs_caught(name):
  report = tfdp.audit.white_box(query(name), seed=1)
  assert not report.violated and 0.999 < report.change.size < 1.001, str(report)
  with planted.switched() as bugs:
    subject = subjects.of(query(name), None)
    for bug in ('no clipping', 'half the noise', 'the same noise at each step', *(
        ['clipping before scaling'] if name == 'scale_then_privatize' else []), *(
            ['a square not projected'] if name == 'dp_adam_ime' else [])):
      bugs.only(bug)
      assert planted.caught(subject, planted.SWITCHED[bug]), bug


def test_a_query_with_a_plan_of_users():
  plan = tfdp.PrivacyPlan(population_size=100, batch_size=10, steps=10, l2_norm_clip=0.5,
                          noise_multiplier=2.0, target_delta=1e-5, unit='user')
  report = tfdp.audit.white_box(
      query('dp_adam', l2_norm_clip=None, noise_multiplier=None, batch_size=None, adjacency=None,
            plan=plan),
      plan=plan, seed=1)
  assert not report.violated and report.claimed == plan.epsilon() and report.batches.steps == 10


@pytest.mark.thorough
def test_a_plan_of_users_by_the_command_line(capsys):
  command = ['audit', '--white-box', '--unit', 'user', '--method', 'DPAdam', '--canaries', '64',
             '--steps', '8', '--batch-size', '8', '--confidence', '0.999999', '--json']
  assert main.main(command) == 0
  report = json.loads(capsys.readouterr().out)
  plan = white_box.make('DPAdam', (), 4.0, 1e-6, 64, 8, 8, unit='user').plan
  assert plan.unit == 'user' and report['claimed'] == pytest.approx(plan.epsilon())
  assert report['batches']['steps'] == 8 and report['change']['size'] == pytest.approx(1, rel=1e-3)
  with planted.examples_as_records():
    assert main.main(command) == 3
  report = json.loads(capsys.readouterr().out)
  assert report['findings'][0]['violated']
  assert report['change']['size'] == pytest.approx(3, rel=1e-3)


@pytest.mark.thorough(but=['mechanism0'])
@pytest.mark.parametrize('mechanism', [
    tfdp.mechanisms.BandedToeplitz(bands=3, steps=8), tfdp.mechanisms.BLT(buffers=2, steps=8),
    tfdp.mechanisms.Tree(steps=8)])
def test_correlated_noise_is_compared_with_its_mechanism(mechanism):
  right = subjects.of(query('dp_adam', mechanism=mechanism), None)
  assert noise_rows.measure(right, 1).p_value > SMALL
  assert changes.largest(right, 1, history=(0, 2)).size == pytest.approx(1, rel=1e-3)
  right.mechanism = tfdp.mechanisms.IndependentGaussian()
  assert noise_rows.measure(right, 1).p_value < SMALL


def test_an_epsilon_that_was_never_claimed_is_refuted():
  report = tfdp.audit.white_box(
      tfdp.DPSGD(l2_norm_clip=1.0, noise_multiplier=0.3, batch_size=128), epsilon=0.5,
      canaries=128, seed=1)
  assert [one.name for one in report.findings if one.violated] == [
      'accounting', 'canaries']
  assert report.canaries.epsilon_lower > 0.5


@pytest.mark.thorough
def test_what_claims_nothing_is_not_refuted_unless_a_claim_is_made():
  make = lambda: optimizer('NonPrivateNoiselessAdam')
  report = tfdp.audit.white_box(make(), canaries=64)
  assert report.vacuous and not report.violated and 'can prove nothing' in str(report)
  claimed = tfdp.audit.white_box(make(), canaries=64, epsilon=4.0, seed=1)
  assert claimed.violated and claimed.findings[0].violated
  assert claimed.to_dict()['change']['size'] is None  # Infinitely far.


@pytest.mark.thorough
def test_what_cannot_be_audited_is_refused():
  used = optimizer('DPSGD')
  tfdp.audit.white_box(used, canaries=64)
  with pytest.raises(ValueError, match='no model has used yet'):
    tfdp.audit.white_box(used, canaries=64)
  with pytest.raises(ValueError, match='An audit is of a private optimizer'):
    tfdp.audit.white_box(tf.keras.optimizers.Adam())
  with pytest.raises(ValueError, match='`canaries` must be an integer >= 16'):
    tfdp.audit.white_box(optimizer('DPSGD'), canaries=2)
