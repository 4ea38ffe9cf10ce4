# SPDX-License-Identifier: Apache-2.0
"""The layered engine: projections that need every record, and which engine is taken when."""

import warnings

import bookkeeping_oracle as oracle
import numpy as np
import pytest
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import contract
from tfdp_adaptive import errors
from tfdp_adaptive.clipping import engines
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.clipping import materialized
from tfdp_adaptive.rules import statistics

keras = compat.keras
layers = keras.layers
EUCLIDEAN = contract.Ask('euclidean')


def text():
  model = keras.Sequential([
      keras.Input((3,), dtype='int32'), layers.Embedding(7, 3), layers.Flatten(),
      layers.LayerNormalization(), layers.Dense(2)])
  return oracle.randomized(model), tf.constant(np.random.default_rng(0).integers(0, 7, (5, 3)))


@pytest.mark.thorough(rows=['512'])
@pytest.mark.parametrize('size', [1, 2**9])  # One example at a time, or some.
def test_sums_are_those_of_single_records(size, monkeypatch):
  monkeypatch.setattr(materialized, 'RECORD_BYTES', size)
  model, x = text()
  batch = oracle.batch_of(x, model(x), mask=[True, True, False, True, True])
  scale = oracle.geometry(model)
  asks = (EUCLIDEAN, contract.Ask('euclidean', statistics.mean_of_squares()), contract.Ask())
  queries = (contract.Query(), contract.Query(scale=scale), contract.Query(scale=scale))
  records = oracle.gradients(model, oracle.squared_error, batch)
  request = interface.Request(
      asks, queries, (oracle.median_norm(records), oracle.median_norm(records, scale), 1e3))
  expected = oracle.by_definition(model, records, batch.mask, request)
  run = tf.function(
      lambda x, y, mask: materialized.layered(
          model, oracle.squared_error, interface.Batch(x, y, (), mask), request),
      autograph=False, input_signature=[
          tf.TensorSpec([None, 3], x.dtype), tf.TensorSpec([None, 2]),
          tf.TensorSpec([None], tf.bool)] if size > 1 else None)
  clipped = run(x, batch.y, batch.mask)
  oracle.assert_close(clipped.sums, expected, 1e-5)
  scaled = [float(tf.linalg.global_norm([a * s for a, s in zip(g, scale)])) for g in records]
  np.testing.assert_allclose(clipped.norms[1], scaled, rtol=1e-5)


@pytest.mark.thorough
def test_compiled():
  model, x = text()
  batch = oracle.batch_of(x, model(x))
  scale = oracle.geometry(model)
  arguments = (model, oracle.squared_error, batch, oracle.request(0.1, scale, EUCLIDEAN))
  compiled = tf.function(
      lambda: materialized.layered(*arguments).sums, jit_compile=True, autograph=False)()
  oracle.assert_close(compiled, materialized.layered(*arguments).sums, 1e-5)


def test_records_are_those_of_batches_of_one():
  model, x = text()
  batch = oracle.batch_of(x, model(x))
  gradients = engines.record_gradients(model, oracle.squared_error, x, batch.y)
  for variable, *records in zip(gradients, *oracle.gradients(model, oracle.squared_error, batch)):
    np.testing.assert_allclose(variable, np.stack(records), rtol=1e-4, atol=1e-5)


def test_a_variable_without_a_gradient():
  inputs = keras.Input((3,))
  used, unused = layers.Dense(2), layers.Dense(2)
  model = oracle.randomized(keras.Model(inputs, [used(inputs), unused(inputs)]))
  x = tf.constant(np.random.default_rng(0).normal(size=(4, 3)), tf.float32)
  batch = oracle.batch_of(x, model(x))
  loss = lambda y, outputs, _: oracle.squared_error(y[0], outputs[0])
  with pytest.warns(errors.Caution, match='No gradient of the loss reaches 2'):
    clipped = materialized.layered(model, loss, batch, oracle.request(0.5, ask=EUCLIDEAN))
  assert np.any(clipped.sums[0].total[0]) and not np.any(clipped.sums[0].total[2])
  assert clipped.sums[0].total[2].shape == (3, 2)


class Offset(keras.Model):
  """A weight of its own, out of the book-keeping engine's sight."""

  def build(self, shape):
    self.offset = self.add_weight(name='offset', shape=(shape[-1],), initializer='zeros')
    super().build(shape)

  def call(self, x):
    return x + self.offset


def test_what_auto_takes_and_says():
  model, x = text()
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    assert engines.decide('auto', model, (contract.Ask(),), x) == ('bookkeeping', '')
    engines.choose('auto', model, (contract.Ask(),), x)
    engines.choose('materialized', model, (EUCLIDEAN,), x)
  name, reason = engines.decide('auto', model, (EUCLIDEAN,), x)
  assert name == 'layered' and "projection='euclidean'" in reason
  with pytest.warns(UserWarning, match='layer by layer.*euclidean.*explain_clipping'):
    assert engines.choose('auto', model, (EUCLIDEAN,), x).name == 'layered'
  offset, x = Offset(), tf.ones([2, 3])
  offset(x)
  with pytest.warns(UserWarning, match="whole model.*variable 'off"):
    assert engines.choose('auto', offset, (contract.Ask(),), x).name == 'materialized'
  with pytest.raises(ValueError, match="Received: engine='fast'"):
    engines.decide('fast', model, (contract.Ask(),), x)
