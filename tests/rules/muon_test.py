# SPDX-License-Identifier: Apache-2.0
"""Muon: its iteration, what noise does to it, and which variables it is for."""

import importlib
import warnings

import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive import contract
from tfdp_adaptive import mechanisms
from tfdp_adaptive import privatizer
from tfdp_adaptive import rules

keras = compat.keras
lib = importlib.import_module('tfdp_adaptive.rules.muon')


def matrix(values, rows, columns):
  """[rows, columns] of these singular values."""
  rng = np.random.default_rng(0)
  u, _ = np.linalg.qr(rng.normal(size=(rows, len(values))))
  v, _ = np.linalg.qr(rng.normal(size=(columns, len(values))))
  return (u * values) @ v.T


@pytest.mark.parametrize('shape', [(40, 60), (60, 40)])
def test_the_iteration_brings_singular_values_near_one(shape):
  """[.01, 1] to [.682, 1.134] in five steps, whatever the unit of the matrix."""
  values = np.geomspace(0.01, 1, 40) / np.linalg.norm(np.geomspace(0.01, 1, 40))
  expected = values.copy()
  for _ in range(5):
    expected = 3.4445 * expected - 4.775 * expected**3 + 2.0315 * expected**5
  for unit, dtype in ((1.0, tf.float64), (1e-25, tf.float32), (1e25, tf.float32)):
    made = lib.orthogonalized(tf.constant(unit * matrix(values, *shape), dtype), 5).numpy()
    np.testing.assert_allclose(np.linalg.svd(made)[1], np.sort(expected)[::-1], rtol=1e-4)
  one = np.geomspace(0.01, 1, 2001)
  for _ in range(5):
    one = lib.A * one + lib.B * one**3 + lib.C * one**5
  assert one.min() == pytest.approx(0.682, abs=5e-4) and one.max() == pytest.approx(1.134, abs=5e-4)


def cosine(a, b):
  return np.sum(a * b) / np.linalg.norm(a) / np.linalg.norm(b)


@pytest.mark.parametrize('rank, before, after, without', [
    (1, 0.742, 0.207, 0.966), (4, 0.743, 0.398, 0.924), (32, 0.741, 0.747, 0.455)])
def test_what_noise_does_to_a_signal(rank, before, after, without):
  """The values of the design, and of the option: 32 x 64, noise .02 of the signal's norm."""
  rng, found = np.random.default_rng(0), []
  for _ in range(30):
    u, v = (np.linalg.qr(rng.normal(size=(n, rank)))[0] for n in (32, 64))
    signal = u @ v.T / np.sqrt(rank)
    noisy = tf.constant(signal + 0.02 * rng.normal(size=(32, 64)))
    found.append([cosine(m, signal) for m in (
        noisy, lib.orthogonalized(noisy, 5), lib.beyond_noise(noisy, tf.constant(4e-4)))])
  np.testing.assert_allclose(np.mean(found, 0), [before, after, without], atol=0.012)


def test_the_edge_is_that_of_the_noise_in_the_momentum():
  """Two singular values around it, after one step and after two."""
  release = lambda values: contract.Release(
      (tf.constant(matrix(values, 4, 9)),), tf.constant(0.01, tf.float64))
  edge = 0.1 * (2 + 3)
  rank = lambda d: np.linalg.matrix_rank(d[0].numpy(), 1e-9)
  for nesterov, gain in ((False, [1, np.sqrt(1 + 0.5**2)]),
                         (True, [1.5, np.sqrt(1.5**2 + 0.25**2)])):
    sums = [1, 1.5] if not nesterov else [1.5, 1.75]
    rule = rules.muon(0.5, nesterov, edge=True)
    for t in range(2):  # The same gradient twice.
      at = edge * gain[t] / sums[t]
      for values, kept in (([9.0, 1.01 * at], 2), ([9.0, 0.99 * at], 1), ([0.9 * at], 0)):
        fresh = rule.init((tf.TensorSpec([4, 9], tf.float64),))
        for _ in range(t + 1):
          direction, fresh = rule.update(fresh, (release(values),))
        assert rank(direction) == kept
  with pytest.raises(ValueError, match='with independent noise'):
    privatizer.settings(
        rules.dp_muon(edge=True), l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=4,
        mechanism=mechanisms.SquareRoot(20))


def test_zeros_and_numbers_out_of_range():
  for value in (0.0, 1e-37, 1e30):
    for made in (lib.orthogonalized(value * tf.ones([3, 2]), 5),
                 lib.beyond_noise(value * tf.ones([3, 2]), tf.constant(0.0))):
      assert np.all(np.isfinite(made)) and (not value or np.linalg.norm(made) > 0.5)
  assert not np.any(lib.beyond_noise(tf.ones([3, 2]), tf.constant(1e30)))


@pytest.mark.thorough
@pytest.mark.filterwarnings('ignore:.*noise_multiplier=0')
@pytest.mark.skipif(not hasattr(keras.optimizers, 'Muon'), reason='This Keras has none.')
def test_without_noise_it_is_the_muon_of_keras():
  rng = np.random.default_rng(0)
  x, y = rng.normal(size=(8, 3)).astype('float32'), rng.normal(size=(8, 2)).astype('float32')
  plain = keras.optimizers.Muon(
      0.1, weight_decay=None, adam_weight_decay=None, exclude_layers=['last'], epsilon=1e-8)
  ours = tfdp.DPMuon(0.1, exclude=['last'], l2_norm_clip=1e6, noise_multiplier=0.0, batch_size=8)
  weights = []
  for kind, optimizer in ((keras.Sequential, plain), (tfdp.DPSequential, ours)):
    keras.utils.set_random_seed(1)
    model = kind([keras.layers.Input((3,)), keras.layers.Dense(5),
                  keras.layers.Dense(2, name='last')])
    model.compile(optimizer=optimizer, loss='mse')
    for _ in range(4):
      model.train_on_batch(x, y)
    weights.append(model.get_weights())
  for a, b in zip(*weights):
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


def test_which_variables_are_matrices():
  specs = [tf.TensorSpec([4, 2], name=name) for name in (
      'hidden/kernel', 'token_embedding/table', 'last/kernel')] + [
          tf.TensorSpec([2], name='hidden/bias'), tf.TensorSpec([3, 3, 2, 2], name='conv/kernel'),
          tf.TensorSpec([2, 2], name='other')]
  rule = rules.dp_muon(exclude=['^last/'])
  state = rule.init(specs)
  assert [part.shape[1] for part in state.parts] == [0, 1, 1, 1, 1, 0]
  with pytest.raises(ValueError, match='regular expressions'):
    rules.dp_muon(exclude='last')
  unnamed = [tf.TensorSpec([2, 2]), tf.TensorSpec([2])]
  assert [part.shape[1] for part in rules.dp_muon().init(unnamed).parts] == [0, 1]
  with pytest.raises(ValueError, match='`exclude` must be looked for in names'):
    rule.init(unnamed)
  with pytest.raises(ValueError, match='is for matrices'):
    rules.muon().init(specs)


@pytest.mark.parametrize('kwargs, warned', [
    ({}, True), (dict(edge=True), False), (dict(noise_multiplier=0.0), False)])
def test_it_warns_of_what_noise_does(kwargs, warned):
  private = {**dict(l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=4), **kwargs}
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    optimizer = tfdp.DPMuon(0.1, **private)
    optimizer.build([tf.Variable(tf.ones([3, 2]))] if not compat.KERAS_3 else [
        keras.Variable(np.ones([3, 2]))])
  assert any('directions of pure noise' in str(one.message) for one in caught) == warned
