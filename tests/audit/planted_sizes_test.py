# SPDX-License-Identifier: Apache-2.0
"""Whatever is planted, however large, is convicted: status 3, never a traceback."""

import contextlib
import functools
import math

import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import privatizer
from tfdp_adaptive.accounting import cost
from tfdp_adaptive.accounting import gaussian
from tfdp_adaptive.audit import bounds
from tfdp_adaptive.audit import changes
from tfdp_adaptive.audit import noise_rows
from tfdp_adaptive.audit import subjects
from tfdp_adaptive.cli import main
from tfdp_adaptive.clipping import engines
from tfdp_adaptive.examples import white_box
from tfdp_adaptive.noise import streams

COMMAND = ['audit', '--white-box', '--method', 'DPAdam', '--canaries', '64', '--steps', '8',
           '--batch-size', '8']


@contextlib.contextmanager
def clipped_at(factor):
  """Clip norms times `factor`: infinity is no clipping at all, NaN whatever comes of it."""
  choose = engines.choose

  def chosen(*arguments):
    engine = choose(*arguments)
    return functools.wraps(engine)(
        lambda model, loss, batch, request: engine(model, loss, batch, request._replace(
            clips=tuple(tf.fill(clip.shape, tf.constant(math.inf)) if factor == math.inf
                        else factor * clip for clip in request.clips))))

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(engines, 'choose', chosen)
    yield


@contextlib.contextmanager
def noise_times(factor):
  add = privatizer._sum
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(privatizer, '_sum', lambda value, row, std, asked: add(
        value, row, factor * std, asked))
    yield


@pytest.mark.thorough(rows=[
    'noise times 0', 'noise times 0.7', 'noise times inf', 'clip times 1e+12', 'clip times inf'])
@pytest.mark.parametrize('plant', [
    *(pytest.param(lambda f=f: clipped_at(f), id=f'clip times {f:g}')
      for f in (1.1, 1e12, math.inf, math.nan)),
    *(pytest.param(lambda f=f: noise_times(f), id=f'noise times {f:g}')
      for f in (.7, 1e-9, 0.0, math.inf))])
def test_every_size_ends_with_status_3(plant, capsys):
  with plant():
    assert main.main(COMMAND) == 3
  assert 'VIOLATED' in capsys.readouterr().out


@pytest.mark.parametrize('sigma', [0.0, 5e-324, 1e-300, 1e-160, 1e-30, 1e-12, 1e-9, 1e-3, .02, 1.])
@pytest.mark.parametrize('delta', [1e-100, 1e-12, 1e-6, .5])
def test_the_epsilon_of_any_noise_is_a_number(sigma, delta):
  value = gaussian.epsilon(sigma, delta)
  assert value >= 0 and 0 <= gaussian.delta(sigma, 1.0) <= 1
  if 1e-100 < sigma:
    mu = 1 / sigma  # Phi(mu/2 - eps/mu) - e^eps Phi(..) <= delta, and about the first term.
    assert value <= mu * (mu / 2 + math.sqrt(-2 * math.log(delta))) * (1 + 1e-9)


@pytest.mark.parametrize('mu', [0.0, 1e-3, 1.0, 60.0, 1e9, 1e200, math.inf, math.nan])
def test_estimates_of_scores_of_any_size(mu):
  rng = np.random.default_rng(0)
  with np.errstate(all='ignore'):
    estimate = bounds.gaussian_estimate(
        mu + rng.standard_normal(50), rng.standard_normal(50), 1e-6)
  assert estimate.epsilon >= 0


def optimizer(**changed):
  return tfdp.DPSGD(plan=tfdp.PrivacyPlan(**{**dict(
      population_size=64, batch_size=8, steps=8, l2_norm_clip=1.0, noise_multiplier=1.0,
      target_delta=1e-6, adjacency='replace', sampling=tfdp.sampling.FixedOrder()), **changed.pop(
          'plan', {})}), seed=5, **changed)


@pytest.mark.thorough
@pytest.mark.parametrize('clipping', [tfdp.clipping.Quantile(stddev=1.0), tfdp.clipping.Slack()])
def test_the_noise_of_what_rides_along_is_seen_under_replace(clipping):
  """Outside the clip norm against an opposite just inside: the mean and the count both move."""
  right = changes.largest(subjects.of(optimizer(clipping=clipping), 64), 1, history=(0,))
  assert not right.violated, right
  with pytest.MonkeyPatch.context() as patch:
    whole = privatizer.Privatizer._side_noise
    patch.setattr(privatizer.Privatizer, '_side_noise', lambda self, ask: (
        whole(self, ask)[0], whole(self, ask)[1] / 2))
    wrong = changes.largest(subjects.of(optimizer(clipping=clipping), 64), 1, history=(0,))
  assert wrong.violated, wrong
  if isinstance(clipping, tfdp.clipping.Quantile):
    # (1 - 1/4) + 4/4: the count's share is 1 / (2 stddev)^2.
    assert right.size == pytest.approx(1, rel=1e-3)
    assert wrong.size == pytest.approx(math.sqrt(1.75), rel=1e-3)


@pytest.mark.thorough
def test_a_tail_that_is_cut_is_seen():
  transform = streams._transform
  right = noise_rows.measure(subjects.of(optimizer(plan=dict(steps=12)), 512), 3)
  assert right.p_value > 1e-3, right
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(streams, '_transform',
                  lambda *bits: tf.clip_by_value(transform(*bits), -3.7, 3.7))
    wrong = noise_rows.measure(subjects.of(optimizer(plan=dict(steps=12)), 512), 3)
  assert wrong.p_value < 1e-3 and 'far from zero' in wrong.what


@pytest.mark.thorough(but=['half the steps'])
@pytest.mark.parametrize('bug', ['half the steps', '1e4 delta', None])
def test_wrong_accounting_is_seen(bug):
  with pytest.MonkeyPatch.context() as patch:
    event, at = cost.event, cost.epsilon
    if bug == 'half the steps':
      patch.setattr(cost, 'event', lambda plan, steps, *args, **kwargs: event(
          plan, steps // 2, *args, **kwargs))
    if bug == '1e4 delta':
      patch.setattr(cost, 'epsilon', lambda event, delta, *args, **kwargs: at(
          event, 1e4 * delta, *args, **kwargs))
    report = tfdp.audit.white_box(white_box.make(
        'DPSGD', (), 4.0, 1e-7, 64, 8, 8, 5) if bug is None else tfdp.DPSGD(
            plan=tfdp.PrivacyPlan(
                population_size=64, batch_size=8, steps=8, l2_norm_clip=1.0, noise_multiplier=1.0,
                target_delta=1e-7), seed=5), canaries=64, seed=1)
  assert [one.name for one in report.findings if one.violated] == (
      [] if bug is None else ['accounting']), str(report)


@pytest.mark.thorough
def test_what_follows_may_be_set_by_the_command_line(capsys):
  for wrong in ('quantile_clip=1.5', 'beta_1=2'):
    assert main.main([*COMMAND, '--set', wrong]) == 2
    assert wrong.partition('_')[0] in capsys.readouterr().err
  assert main.main([*COMMAND, '--set', 'quantile_clip=0.5', '--confidence', '.999999']) == 0
  assert 'Not refuted' in capsys.readouterr().out
