# SPDX-License-Identifier: Apache-2.0
"""Eq. 2 and 3 of arXiv:2507.01129: up to how many parameters few second moments are negative."""

import math

import numpy as np
import pytest
from scipy import stats

B, SIGMA, BETA_2 = 2048, 1.0, .999
C = ((1 - BETA_2) / (1 + BETA_2))**.25
AGREEING = (B / (C * SIGMA))**2  # Equation 2: B / sigma >= c sqrt(m).
ORTHOGONAL = AGREEING / B  # Equation 3: sqrt(B) / sigma >= c sqrt(m).


def negative_fraction(signal, beta_2):
  """The average of k squares of N(g, phi) is below phi; signal is g^2 / phi."""
  k = (1 + beta_2) / (1 - beta_2)
  return stats.ncx2.cdf(k, k, k * signal) if signal else stats.chi2.cdf(k, k)


def test_equations_2_and_3_as_computed_and_not_as_printed():
  assert AGREEING == pytest.approx(1.875e8, rel=1e-3)
  assert ORTHOGONAL == pytest.approx(9.157e4, rel=1e-3)
  assert B / math.sqrt(AGREEING) == pytest.approx(.15, abs=5e-4)  # B / sigma = .15 sqrt(m).


@pytest.mark.parametrize('parameters, norm', [(AGREEING, 1.0), (ORTHOGONAL, B**-.5)])
def test_at_the_limits_about_a_quarter_is_negative(parameters, norm):
  signal = (norm * B / (SIGMA * math.sqrt(parameters)))**2
  assert .2 < negative_fraction(signal, BETA_2) < .3


@pytest.mark.parametrize('signal', [0.0, .02, .3])
def test_the_fraction_by_simulation(signal):
  rng = np.random.default_rng(11)
  weights = .9**np.arange(80)
  noisy = math.sqrt(signal) + rng.standard_normal((50_000, 80))
  simulated = np.mean(noisy**2 @ (weights / weights.sum()) < 1)
  assert negative_fraction(signal, .9) == pytest.approx(simulated, abs=.02)
