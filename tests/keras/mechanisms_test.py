# SPDX-License-Identifier: Apache-2.0
"""Correlated noise in optimizer variables: C times what reached the weights is white."""

import numpy as np
import pytest
from scipy import stats

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive import mechanisms

keras = compat.keras
SIZE, STEPS, B = 800, 6, 4
X, Y = np.zeros((B, SIZE), 'float32'), np.zeros((B, 1), 'float32')
MECHANISMS = {
    'banded': lambda: mechanisms.BandedToeplitz(bands=3, steps=STEPS),
    'blt': lambda: mechanisms.BLT(buffers=2, steps=STEPS),
    'banded_inverse': lambda: mechanisms.BandedInverse(3, steps=STEPS),
    'square_root': lambda: mechanisms.SquareRoot(steps=STEPS),
}


def _model(cls=tfdp.DPSGD, **kwargs):
  model = tfdp.DPSequential(
      [keras.layers.Input((SIZE,)), keras.layers.Dense(1, use_bias=False)])
  model.compile(optimizer=cls(**{**dict(
      learning_rate=1.0, l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=B), **kwargs}),
                loss='mse')
  return model


def _steps(model, count):
  rows = []
  for _ in range(count):
    before = model.get_weights()[0].ravel().astype(np.float64)
    model.train_on_batch(X, Y)
    rows.append((before - model.get_weights()[0].ravel()) * B)
  return np.array(rows)


def _white(z):
  correlation = np.corrcoef(z) - np.eye(len(z))
  return (np.abs(correlation).max() < 5 / np.sqrt(SIZE)
          and stats.kstest(z.ravel(), 'norm').pvalue > 1e-6)


@pytest.mark.thorough(but=['blt', 'banded'])
@pytest.mark.parametrize('name', sorted(MECHANISMS))
def test_noise_is_correlated_as_designed_also_over_a_resume(name, tmp_path):
  mechanism = MECHANISMS[name]()
  model = _model(mechanism=mechanism)
  rows = [_steps(model, 4)]
  path = str(tmp_path / 'm.keras')
  model.save(path)
  resumed = keras.models.load_model(path)
  assert resumed.optimizer.mechanism == mechanism
  rows.append(_steps(resumed, 2))
  rows = np.concatenate(rows)
  assert _white(mechanism.materialize(STEPS) @ rows)
  assert not _white(rows)  # It is not independent noise.
  with pytest.raises(Exception, match='used up'):
    resumed.train_on_batch(X, Y)


def test_bias_correction_reads_the_row_norms():
  """With zero gradients and floor far below, b_t = beta_2 b + (1 - beta_2) phi r_t."""
  mechanism = MECHANISMS['banded']()
  model = _model(tfdp.DPAdamBC, mechanism=mechanism, beta_2=0.5)
  _steps(model, STEPS)
  r = mechanism.row_norms(STEPS)**2
  expected = 0.0
  for t in range(STEPS):
    expected = 0.5 * expected + 0.5 * r[t] / B**2
  scalars = [float(v) for v in map(np.asarray, model.optimizer.variables)
             if np.asarray(v).shape == () and np.asarray(v).dtype == np.float32]
  assert np.isclose(scalars, expected, rtol=1e-4).any(), (scalars, expected)
  assert not np.isclose(expected, 1 / B**2 * (1 - 0.5**STEPS), rtol=0.05)  # r_t matters.


def test_rules_that_need_independent_noise_refuse_others():
  with pytest.raises(ValueError, match='independent noise'):
    tfdp.DP2RMSprop(l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=B, sgd_steps=2,
                    adaptive_steps=2, subtract_bias=True, mechanism=MECHANISMS['banded']())
