# SPDX-License-Identifier: Apache-2.0
"""Digests of a file of weights are those of the model, whatever its layers are named."""

import numpy as np

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
