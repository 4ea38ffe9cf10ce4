# SPDX-License-Identifier: Apache-2.0
"""Advice computes the papers' formulas; fractions are checked by simulation."""

import json
import math

import numpy as np
import pytest

import tfdp_adaptive as tfdp
from tfdp_adaptive.advice import advice

PAPER = dict(batch_size=2048, noise_multiplier=1.0, l2_norm_clip=1.0)


def test_public_name():
  assert tfdp.advise is advice.advise


def test_equations_2_and_3_as_computed():
  result = advice.advise(parameters=10**6, **PAPER)
  assert result['parameters_if_examples_agree'] == pytest.approx(1.875e8, rel=1e-3)
  assert result['parameters_if_examples_are_orthogonal'] == pytest.approx(9.157e4, rel=1e-3)
  # B / sigma = .15 sqrt(m) and = .032 sqrt(m), as printed.
  assert 2048 / math.sqrt(result['parameters_if_examples_agree']) == pytest.approx(.15, abs=5e-4)
  assert 2048 / math.sqrt(result['parameters_if_noise_cancels']) == pytest.approx(.032, abs=5e-4)


@pytest.mark.parametrize('parameters, regime', [
    (91_000, 'low-dimensional'), (92_000, 'intermediate'), (187_000_000, 'intermediate'),
    (188_000_000, 'high-dimensional')])
def test_regimes(parameters, regime):
  assert advice.advise(parameters=parameters, **PAPER).regime == regime


def test_clip_norms_of_scaled_records():
  result = advice.advise(parameters=10**4, **PAPER)
  assert result['scaled_clip'] == 100
  assert result['largest_scaled_clip'] == pytest.approx(100 * math.sqrt(2048))


def test_replace_counts_the_noise_twice():
  doubled = advice.advise(parameters=1000, adjacency='replace', **PAPER)
  same = advice.advise(parameters=1000, **dict(PAPER, noise_multiplier=2.0))
  assert doubled.findings == same.findings


def test_check_value_of_the_noise_floor():
  result = advice.advise(batch_size=256, noise_multiplier=0.4, parameters=1000, l2_norm_clip=0.1)
  assert result['noise_floor']**2 == pytest.approx(2.4414e-8, rel=1e-4)


@pytest.mark.parametrize('steps, expected, within', [
    (1, 0.6827, 1e-4), (2, 0.632, 1e-3), (10, 0.555, 0.006), (100, 0.515, 0.005),
    (None, 0.504, 1e-3)])
def test_negative_fraction_without_a_gradient(steps, expected, within):
  assert advice.negative_fraction(0.0, 0.999, steps) == pytest.approx(expected, abs=within)


@pytest.mark.parametrize('signal', [0.0, 0.02, 0.3])
@pytest.mark.parametrize('steps', [3, 40])
def test_negative_fraction_by_simulation(signal, steps):
  rng = np.random.default_rng(11)
  weights = 0.9**np.arange(steps)
  weights /= weights.sum()
  noisy = math.sqrt(signal) + rng.standard_normal((100_000, steps))
  simulated = np.mean(noisy**2 @ weights < 1)
  got = advice.negative_fraction(signal, 0.9, steps)
  assert got == pytest.approx(simulated, abs=0.02)
  assert abs(advice.negative_fraction(signal + 0.3, 0.9, steps) - simulated) > 0.02


def test_at_the_limit_of_equation_2_about_a_quarter_is_negative():
  # "At most a quarter of the coordinates": the constant of Eq. 2.
  result = advice.advise(parameters=187_500_000, **PAPER)
  assert 0.2 < result['negative_if_examples_agree'] < 0.3
  result = advice.advise(parameters=91_570, **PAPER)
  assert 0.2 < result['negative_if_examples_are_orthogonal'] < 0.3


def test_a_known_gradient_norm_lies_between_the_extremes():
  result = advice.advise(parameters=10**8, gradient_norm=0.27, **PAPER)
  assert (result['negative_if_examples_agree'] < result['negative_at_this_gradient_norm']
          < result['negative_if_examples_are_orthogonal'])


@pytest.mark.parametrize('arguments, recommended', [
    (dict(PAPER, parameters=10**6), 'DPAdamSTP'),  # 2048 > 1000.
    (dict(PAPER, parameters=10**7), 'DPAdam'),  # 2048 < 3162, Eq. 3 fails.
    (dict(batch_size=4, noise_multiplier=1.0, parameters=25, l2_norm_clip=1.0), 'DPAdamBC'),
])
def test_recommendations(arguments, recommended):
  result = advice.advise(**arguments)
  assert result.recommended == recommended
  assert hasattr(tfdp, result.recommended)


@pytest.mark.parametrize('clip, warns', [(1.0, False), (1800.0, False), (1850.0, True)])
def test_warns_where_scale_then_privatize_is_unstable(clip, warns):
  result = advice.advise(parameters=10**6, **dict(PAPER, l2_norm_clip=clip))
  assert any('is unstable' in text for text in result.warnings) == warns


@pytest.mark.parametrize('epsilon, message', [
    (1e-6, 'below the noise floor'), (1e-3, None), (1e-1, 'far above the noise floor')])
def test_warns_about_epsilon_against_the_noise_floor(epsilon, message):
  result = advice.advise(parameters=10**6, epsilon=epsilon, **PAPER)
  assert result['epsilon_over_noise_floor'] == pytest.approx(epsilon * 2048)
  assert len(result.warnings) == (message is not None)
  assert message is None or message in result.warnings[0]


def test_text_and_json_name_every_number_and_its_formula():
  result = advice.advise(parameters=10**6, epsilon=1e-6, gradient_norm=0.3, **PAPER)
  text, content = str(result), json.loads(json.dumps(result.to_dict()))
  assert result.regime in text and result.recommended in text and 'WARNING' in text
  for finding in result.findings:
    assert finding.name in text and finding.formula in text and finding.formula
  assert len(content['findings']) == len(result.findings) > 8
  with pytest.raises(KeyError):
    result['nothing']


@pytest.mark.parametrize('changes, message', [
    (dict(batch_size=0), '`batch_size` must be'), (dict(noise_multiplier=0), '`noise_multiplier`'),
    (dict(parameters=0), '`parameters` must be'), (dict(parameters=1e6), '`parameters` must be'),
    (dict(l2_norm_clip=-1), '`l2_norm_clip`'), (dict(beta_2=1.0), '`beta_2` must be in'),
    (dict(epsilon=0.0), '`epsilon` must be'), (dict(gradient_norm=1.5), '`gradient_norm`'),
    (dict(adjacency='x'), '`adjacency` must be one of')])
def test_refusals(changes, message):
  with pytest.raises(ValueError, match=message):
    advice.advise(**dict(dict(PAPER, parameters=1000), **changes))
