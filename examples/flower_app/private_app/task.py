# SPDX-License-Identifier: Apache-2.0
"""The model and the records of a node."""

import keras
import numpy as np

RECORDS = 200  # Public number of records of each silo.


def build_model():
  """Returns the model, the same on the server and on every node."""
  return keras.Sequential([keras.layers.Input([3]), keras.layers.Dense(1)])


def load(partition):
  """Returns the records of a node. Here they are made up."""
  rng = np.random.default_rng(partition)
  x = rng.normal(size=(RECORDS, 3)).astype(np.float32)
  return x, (x @ np.float32([[1.0], [-2.0], [0.5]])).astype(np.float32)
