# SPDX-License-Identifier: Apache-2.0
"""Without noise and clipping every class is the non-private optimizer it comes from."""

import numpy as np
import pytest

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat

keras = compat.keras
STEPS, N, RATE = 5, 8, 0.1
B1, B2 = 0.9, 0.999


def _data():
  rng = np.random.default_rng(3)
  return rng.normal(size=(N, 3)), rng.normal(size=(N, 1))


def _gradient(w, x, y):
  return 2 * x.T @ (x @ w - y) / len(x)


def _sgd(w, x, y, momentum=0.0, nesterov=False):
  m = 0
  for _ in range(STEPS):
    g = _gradient(w, x, y)
    m = momentum * m + g
    w = w - RATE * (g + momentum * m if nesterov else m)
  return w


def _adam(w, x, y, denominator, decay=0.0):
  m = v = 0
  for t in range(1, STEPS + 1):
    g = _gradient(w, x, y)
    m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g**2
    w = w - RATE * (m / (1 - B1**t) / denominator(v / (1 - B2**t)) + decay * w)
  return w


OPTIMIZERS = {
    'sgd': (tfdp.DPSGD, {}, _sgd),
    'momentum': (tfdp.DPSGD, dict(momentum=0.8), lambda *a: _sgd(*a, momentum=0.8)),
    'nesterov': (tfdp.DPSGD, dict(momentum=0.8, nesterov=True),
                 lambda *a: _sgd(*a, momentum=0.8, nesterov=True)),
    'adam': (tfdp.DPAdam, dict(epsilon=0.01), lambda *a: _adam(*a, lambda v: np.sqrt(v) + 0.01)),
    'adam_w': (tfdp.DPAdamW, dict(epsilon=0.01, weight_decay=0.5), lambda *a: _adam(
        *a, lambda v: np.sqrt(v) + 0.01, 0.5)),
    # The stability constant of bias correction floors the root: 0.5 is active here.
    'adam_bc': (tfdp.DPAdamBC, dict(epsilon=0.5), lambda *a: _adam(
        *a, lambda v: np.sqrt(np.maximum(v, 0.25)))),
    'adam_ime': (tfdp.DPAdamIME, dict(epsilon=0.01),
                 lambda *a: _adam(*a, lambda v: np.sqrt(v) + 0.01)),
    'adam_stp': (tfdp.DPAdamSTP, dict(epsilon=0.01, scale_epsilon=0.3),
                 lambda *a: _adam(*a, lambda v: np.sqrt(v) + 0.01)),
}


@pytest.mark.thorough(but=['*-graph', 'adam-eager'])
@pytest.mark.filterwarnings('ignore:.*noise_multiplier=0')
@pytest.mark.parametrize('mode', ['eager', 'graph', 'xla'])
@pytest.mark.parametrize('name', sorted(OPTIMIZERS))
def test_without_noise_it_is_the_formula(name, mode):
  cls, kwargs, formula = OPTIMIZERS[name]
  x, y = _data()
  start = np.full((3, 1), 0.5)
  model = tfdp.DPSequential([keras.layers.Input((3,)), keras.layers.Dense(1, use_bias=False)])
  model.set_weights([start])
  model.compile(
      optimizer=cls(RATE, l2_norm_clip=1e6, noise_multiplier=0.0, batch_size=N, **kwargs),
      loss='mse', run_eagerly=mode == 'eager', jit_compile=mode == 'xla')
  model.fit(x.astype('float32'), y.astype('float32'), batch_size=N, epochs=STEPS, verbose=0)
  expected = formula(start, x, y)
  assert np.abs(expected - start).max() > 0.05  # The reference moved.
  np.testing.assert_allclose(model.get_weights()[0], expected, rtol=2e-6, atol=1e-6)
