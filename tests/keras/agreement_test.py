# SPDX-License-Identifier: Apache-2.0
"""The Keras optimizer and the DPQuery of a rule take the same steps, noise included."""

import classes_test
import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive import trees

keras = compat.keras
B, RATE = 4, 0.1
RNG = np.random.default_rng(1)
BATCHES = [(RNG.normal(size=(n, 3)).astype('float32'), RNG.normal(size=(n, 1)).astype('float32'))
           for n in (3, 4, 5)]  # Sizes around the divisor, as Poisson sampling makes them.
validated_once = classes_test.validated_once
NAMES = [name for name, kwargs in classes_test.CLASSES.items()
         if 'public_data' not in kwargs and not name.startswith(('NonPrivate', 'PASAN', 'PAGAN'))]


@pytest.mark.thorough(but=['DP2Yogi', 'DPAdamJME'])
@pytest.mark.parametrize('name', sorted(NAMES))
def test_keras_equals_the_query(name):
  queries = pytest.importorskip('tfdp_adaptive.queries')
  kwargs = {**classes_test.CLASSES[name], 'adjacency': 'add_remove'}
  start = [np.full((3, 1), 0.3, 'float32'), np.full(1, -0.2, 'float32')]
  private = dict(l2_norm_clip=1.0, noise_multiplier=0.5, batch_size=B, seed=9,
                 adjacency='add_remove')
  model = tfdp.DPSequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
  model.set_weights(start)
  optimizer = getattr(tfdp, name)(RATE, **{**private, **kwargs})
  model.compile(optimizer=optimizer, loss='mse')
  for x, y in BATCHES:
    model.train_on_batch(x, y)

  specs = [tf.TensorSpec(w.shape, tf.float32) for w in start]
  query = queries.RuleQuery(optimizer.rule, specs, **private)
  state = query.initial_global_state()
  w, b = start
  for x, y in BATCHES:
    params = query.derive_sample_params(state)
    total = query.initial_sample_state(specs)
    for one, target in zip(x, y):
      error = 2 * (one @ w + b - target)
      record = query.preprocess_record(params, [
          tf.constant(np.outer(one, error), tf.float32), tf.constant(error, tf.float32)])
      total = tf.nest.map_structure(tf.add, total, record)
    direction, state, _ = query.get_noised_result(total, state)
    kept = 1 - RATE * (optimizer.weight_decay or 0)
    w, b = kept * w - RATE * direction[0].numpy(), kept * b - RATE * direction[1].numpy()
  assert np.abs(w - start[0]).max() > 1e-3
  for got, expected in zip(model.get_weights(), (w, b)):
    np.testing.assert_allclose(got, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.thorough
@pytest.mark.parametrize('name', ['DPAdam', 'DPAdamBC', 'DPAdamSTP', 'DPAdamIME'])
def test_large_models_take_the_same_steps_in_one_pass(name, monkeypatch):
  results = []
  for large in (2**30, 0):
    monkeypatch.setattr(trees, 'WORTH_COMPILING', large)
    model = tfdp.DPSequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    model.set_weights([np.full((3, 1), 0.3, 'float32'), np.full(1, -0.2, 'float32')])
    optimizer = getattr(tfdp, name)(
        RATE, l2_norm_clip=1.0, noise_multiplier=0.5, batch_size=B, seed=9,
        adjacency='add_remove', **classes_test.CLASSES[name])
    model.compile(optimizer=optimizer, loss='mse')
    for x, y in BATCHES:
      model.train_on_batch(x, y)
    results.append(np.concatenate([np.ravel(w) for w in model.get_weights()]))
  np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-5)
