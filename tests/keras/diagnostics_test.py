# SPDX-License-Identifier: Apache-2.0
"""The non-private numbers, against NumPy on batches of one."""

import numpy as np
import pytest

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.keras import diagnostics

keras = compat.keras
B, CLIP = 16, 2.0
RNG = np.random.default_rng(0)
X = (RNG.normal(size=(B, 3)) * RNG.uniform(0.1, 3, (B, 1))).astype('float32')
Y = RNG.normal(size=(B, 1)).astype('float32')


@pytest.mark.thorough(rows=['materialized-1'])
@pytest.mark.parametrize('engine,pieces', [('bookkeeping', 1), ('materialized', 1), ('auto', 4)])
def test_numbers_of_a_step(engine, pieces):
  model = tfdp.DPSequential([keras.layers.Input((3,)), keras.layers.Dense(1, use_bias=False)])
  w = np.array([[0.5], [-1.0], [2.0]])
  model.set_weights([w])
  model.compile(optimizer=tfdp.DPAdamBC(
      0.1, l2_norm_clip=CLIP, noise_multiplier=1.0, batch_size=B, adjacency='add_remove',
      performance=tfdp.Performance(engine, accumulation_steps=pieces), diagnostics=True),
                loss='mse')
  keep = np.ones(B)
  keep[5] = 0
  logs = model.train_on_batch(X, Y, sample_weight=keep, return_dict=True)
  gradients = (2 * X * (X @ w - Y))[keep > 0].astype(np.float64)
  norms = np.linalg.norm(gradients, axis=1)
  clipped = gradients * np.minimum(1, CLIP / norms)[:, None]
  np.testing.assert_allclose(logs['private/fraction_clipped'], np.mean(norms > CLIP), rtol=1e-6)
  assert 0 < np.mean(norms > CLIP) < 1
  np.testing.assert_allclose(logs['private/mean_norm_over_clip_norm'],
                             np.linalg.norm(clipped.sum(0)) / B / CLIP, rtol=1e-4)
  for q in (10, 50, 90):
    expected = np.sort(norms)[int(q / 100 * (len(norms) - 1))]
    np.testing.assert_allclose(logs[f'private/gradient_norm_{q}%'], expected, rtol=1e-4)
  state = model.optimizer.rule_state
  below = np.mean(state.second[0].numpy() < state.bias.numpy())
  np.testing.assert_allclose(logs['private/fraction_negative'], below)
  second, = diagnostics.second_moment(model.optimizer)
  np.testing.assert_allclose(second, state.second[0].numpy() - state.bias.numpy())


def test_they_are_off_by_default_and_absent_without_a_second_moment():
  model = tfdp.DPSequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
  model.compile(optimizer=tfdp.DPSGD(0.1, l2_norm_clip=CLIP, noise_multiplier=1.0, batch_size=B),
                loss='mse')
  logs = model.train_on_batch(X, Y, return_dict=True)
  assert not any(name.startswith('private/') for name in logs)
  assert diagnostics.second_moment(model.optimizer) is None
