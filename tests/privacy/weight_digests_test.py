# SPDX-License-Identifier: Apache-2.0
"""Digests of a file of weights are those of the model, whatever its layers are named."""

import h5py
import numpy as np

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.privacy import weight_digests


def test_an_export_has_the_weights_of_layers_of_one_name(tmp_path):
  layers = [compat.keras.layers.Dense(3, name='same') for _ in range(2)]

  class Model(compat.keras.Model):

    def __init__(self):
      super().__init__()
      self.layers_of_one_name = layers

    def call(self, x):
      return layers[1](layers[0](x))

  model = Model()
  model(np.ones([2, 3], np.float32))
  model.export(str(tmp_path / 'export'))
  exported = weight_digests.of_file(tmp_path / 'export').weights
  assert exported == weight_digests.of(model.get_weights())
  layers[0].bias.assign([0, 0, 1])
  assert exported != weight_digests.of(model.get_weights())


def test_a_file_of_private_weights_is_one_of_weights_alone(tmp_path):
  plan = tfdp.PrivacyPlan(population_size=60, batch_size=12, steps=2, l2_norm_clip=1.0,
                          noise_multiplier=1.0, target_delta=1e-3)
  model = tfdp.make_private(compat.keras.Sequential([
      compat.keras.layers.Input([2]), compat.keras.layers.Dense(1)]))
  model.compile(tfdp.DPSGD(0.1, plan=plan), loss='mse', metrics=['mae'], jit_compile=False)
  data = np.random.default_rng(0).normal(size=[60, 2]).astype(np.float32), np.arange(60.0)
  model.fit(plan.batches(data), steps_per_epoch=2, verbose=0)
  path = tmp_path / 'model.weights.h5'
  model.save_weights(path)
  file = weight_digests.of_file(path)
  assert file.ledger and not file.of_optimizer and not file.of_metrics
  with h5py.File(path, 'a') as content:
    content['metrics/own/vars/0'] = 3.5  # As a file of somebody else's may have.
  assert weight_digests.of_file(path).of_metrics == 1
