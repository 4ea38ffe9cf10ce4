# SPDX-License-Identifier: Apache-2.0
"""Groups of variables in the engines, against the definition."""

import bookkeeping_oracle as oracle
import numpy as np
import pytest
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import contract
from tfdp_adaptive import rules
from tfdp_adaptive.clipping import bookkeeping
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.clipping import layered
from tfdp_adaptive.rules import record_weights

keras = compat.keras


@pytest.mark.parametrize('engine', [
    bookkeeping.engine, pytest.param(layered.engine, marks=pytest.mark.slow)])
def test_every_engine_is_the_definition(engine):
  model = keras.Sequential([
      keras.layers.Input((3,), dtype='int32'), keras.layers.Embedding(7, 5),
      keras.layers.Dense(4, activation='tanh'), keras.layers.Flatten(), keras.layers.Dense(2)])
  oracle.randomized(model)
  x = tf.constant(np.random.default_rng(0).integers(0, 7, size=(5, 3)), tf.int32)
  batch = oracle.batch_of(x, model(x), [True, False, True, True, True])
  records = oracle.gradients(model, oracle.squared_error, batch)
  groups = (1, 0, 0, 2, 2)
  geometry = contract.Groups(tf.constant([0.5, 2.0, 1.0]), tf.sqrt(tf.constant([0.2, 0.5, 0.3])))
  ime = rules.dp_adam_ime(square_then_average=True).asks[0]
  asks = (contract.Ask(groups=groups), contract.Ask(),
          contract.Ask(groups=groups, weight=record_weights.weight('auto_s')),
          ime._replace(groups=(0, 0, 1, 1, 1)))
  two = contract.Groups(tf.constant([0.5, 2.0]), tf.sqrt(tf.constant([0.2, 0.8])))
  scaled = contract.Query(scale=oracle.geometry(model), groups=geometry)
  queries = scaled, contract.Query(), contract.Query(groups=geometry), contract.Query(groups=two)
  norm = oracle.median_norm(records)
  request = interface.Request(asks, queries, (2 * norm, norm, norm, norm))
  expected = oracle.by_definition(model, records, batch.mask, request)
  oracle.assert_close(engine(model, oracle.squared_error, batch, request).sums, expected, 2e-5)
