# SPDX-License-Identifier: Apache-2.0
"""What a rule says about its settings reaches the user, once, when the model is built."""

import warnings

import numpy as np
import pytest

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat

layers = compat.keras.layers


@pytest.mark.parametrize('noise_multiplier, expected', [(8.0, 1), (0.8, 0)])
def test_unstable_scaling_warns_once(noise_multiplier, expected):
  model = tfdp.DPSequential([layers.Input((5,)), layers.Dense(3)])
  model.compile(loss='mse', optimizer=tfdp.DPAdamSTP(
      l2_norm_clip=2.0, noise_multiplier=noise_multiplier, batch_size=4, scale_epsilon=1e-3))
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    for _ in range(2):
      model.fit(np.ones((8, 5)), np.ones((8, 3)), batch_size=4, verbose=0)
  messages = [str(w.message) for w in caught if 'in scaled units' in str(w.message)]
  assert len(messages) == expected
  assert all(m.startswith('DPAdamSTP: l2_norm_clip * noise_multiplier / batch_size is 4')
             for m in messages)
