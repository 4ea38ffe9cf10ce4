# SPDX-License-Identifier: Apache-2.0
"""Groups of variables in the engines, against the definition."""

import bookkeeping_oracle as oracle
import numpy as np
import pytest
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import contract
from tfdp_adaptive import rules
from tfdp_adaptive import weights
from tfdp_adaptive.clipping import bookkeeping
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.clipping import materialized

keras = compat.keras


@pytest.mark.parametrize('engine', [
    bookkeeping.engine, pytest.param(materialized.layered, marks=pytest.mark.slow)])
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
          contract.Ask(groups=groups, weight=weights.AutoS()),
          ime._replace(groups=(0, 0, 1, 1, 1)))
  two = contract.Groups(tf.constant([0.5, 2.0]), tf.sqrt(tf.constant([0.2, 0.8])))
  scaled = contract.Query(scale=oracle.geometry(model), groups=geometry)
  queries = scaled, contract.Query(), contract.Query(groups=geometry), contract.Query(groups=two)
  norm = oracle.median_norm(records)
  request = interface.Request(asks, queries, (2 * norm, norm, norm, norm))
  expected = oracle.by_definition(model, records, batch.mask, request)
  oracle.assert_close(engine(model, oracle.squared_error, batch, request).sums, expected, 2e-5)


def test_a_record_with_one_infinite_group_is_no_record():
  """A huge row of the table has a finite gradient, and makes that of the matrix infinite."""
  model = keras.Sequential([
      keras.layers.Input((1,), dtype='int32'), keras.layers.Embedding(7, 2),
      keras.layers.Dense(2, use_bias=False)])
  oracle.randomized(model)
  table = model.trainable_variables[0]
  value = table.numpy()
  value[0] = 1e25
  table.assign(value)
  groups = contract.Groups(tf.ones([2]), tf.fill([2], 0.7))

  def sums(x):
    x = tf.constant(x)
    batch = interface.Batch(x, tf.zeros([len(x), 1, 2]), (), tf.fill([len(x)], True))
    request = interface.Request(
        (contract.Ask(groups=(0, 1)),), (contract.Query(groups=groups),), (1.0,))
    return bookkeeping.engine(model, oracle.squared_error, batch, request).sums[0].total

  for with_it, without in zip(sums([[0], [5], [6]]), sums([[5], [6]])):
    assert np.any(without)
    np.testing.assert_allclose(with_it, without, rtol=1e-5)


def test_a_group_whose_norm_is_infinite_takes_the_others_with_it():
  """Each gradient fits its type, the norm of two of them does not."""
  word = keras.Input((1,), dtype='int32')
  tables = [keras.layers.Embedding(2, 1) for _ in range(3)]
  model = keras.Model(word, keras.layers.Concatenate()([table(word) for table in tables]))
  groups = contract.Groups(tf.ones([2]), tf.fill([2], 0.7))
  request = interface.Request(
      (contract.Ask(groups=(0, 0, 1)),), (contract.Query(groups=groups),), (1.0,))
  loss = lambda y, outputs, _: tf.reduce_sum(y * outputs, [1, 2])
  for size, counts in ((2e38, True), (3e38, False)):
    y = tf.constant([[[size, size, 1.0]]])
    batch = interface.Batch(tf.constant([[1]]), y, (), tf.constant([True]))
    total = bookkeeping.engine(model, loss, batch, request).sums[0].total
    assert [bool(np.any(one)) for one in total] == [counts] * 3
