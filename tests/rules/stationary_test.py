# SPDX-License-Identifier: Apache-2.0
"""Where second moments settle: the papers' one-coordinate analyses, statistically.

A constant gradient c and independent noise; 20,000 copies of each coordinate.
"""

import numpy as np
import pytest
import tensorflow as tf

from tfdp_adaptive import contract
from tfdp_adaptive import rules

COPIES, STEPS, BETA = 20000, 60, 0.8
GRADIENT = np.array([1.0, 0.01])


def mean_second_moment(rule, std, scaled=False):
  """Mean over the copies of the normalized second moment, per coordinate."""
  rng = np.random.default_rng(0)
  g = np.tile(GRADIENT, (COPIES, 1))
  state = rule.init((tf.TensorSpec(g.shape, tf.float64),))

  @tf.function(autograph=False)
  def step(state, z):
    (query,) = rule.query(state)
    mean = query.scale[0] * g + std * z if scaled else g + std * z
    return rule.update(state, (contract.Release((mean,), tf.constant(std**2, tf.float64)),))[1]

  for _ in range(STEPS):
    state = step(state, tf.constant(rng.normal(size=g.shape)))
  return state.second[0].numpy().mean(axis=0) / (1 - BETA**STEPS), state


def test_post_processing_settles_at_the_noise():
  """E nu = c^2 + phi: the small coordinate is all noise."""
  nu, _ = mean_second_moment(rules.dp_adam(beta_2=BETA), 0.1)
  np.testing.assert_allclose(nu, GRADIENT**2 + 0.01, rtol=0.01)
  assert nu[1] > 50 * GRADIENT[1]**2


def test_bias_correction_takes_the_noise_off():
  nu, state = mean_second_moment(rules.dp_adam_bc(beta_2=BETA), 0.1)
  corrected = nu - float(state.bias) / (1 - BETA**STEPS)
  # Standard error of the mean of nu: sqrt(2) phi sqrt((1 - beta) / (1 + beta) / copies).
  assert abs(corrected[1] - GRADIENT[1]**2) < 5 * np.sqrt(2 / 9 / COPIES) * 0.01


@pytest.mark.parametrize('q', [0.1, 0.5])
def test_scale_then_privatize_settles_in_proportion(q):
  """E nu = c^2 / (1 - q^2) for large and small coordinates alike."""
  rule = rules.scale_then_privatize(beta_2=BETA, scale_epsilon=1e-7)
  nu, _ = mean_second_moment(rule, q, scaled=True)
  np.testing.assert_allclose(nu / GRADIENT**2, 1 / (1 - q**2), rtol=0.03 if q > 0.3 else 0.005)
  assert q < 0.3 or np.all(nu / GRADIENT**2 > 1.25)


def test_scale_then_privatize_grows_without_bound_beyond_one():
  rule = rules.scale_then_privatize(beta_2=BETA, scale_epsilon=1e-7)
  nu, _ = mean_second_moment(rule, 1.3, scaled=True)
  # beta + (1 - beta) q^2 = 1.138 per step on average.
  assert np.all(nu / GRADIENT**2 > 50)
