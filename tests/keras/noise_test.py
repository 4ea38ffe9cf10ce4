# SPDX-License-Identifier: Apache-2.0
"""The noise that reaches the weights: its law, and that it never comes twice."""

import random

import numpy as np
import pytest
from scipy import stats
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat

keras = compat.keras
SIZE, CLIP, SIGMA, B = 600, 0.5, 2.0, 4
X, Y = np.zeros((B, SIZE), 'float32'), np.zeros((B, 1), 'float32')  # All gradients are zero.


def _model(cls=tfdp.DPSGD, **kwargs):
  model = tfdp.DPSequential(
      [keras.layers.Input((SIZE,)), keras.layers.Dense(1, use_bias=False)])
  model.compile(
      optimizer=cls(**{**dict(learning_rate=1.0, l2_norm_clip=CLIP, noise_multiplier=SIGMA,
                              batch_size=B), **kwargs}),
      loss='mse')
  return model


def _steps(model, count):
  """[count, SIZE] moves of the weights, one row per call of the compiled step."""
  rows = []
  for _ in range(count):
    before = model.get_weights()[0].ravel()
    model.train_on_batch(X, Y)
    rows.append(before - model.get_weights()[0].ravel())
  return np.array(rows)


def _distinct(*rows):
  rows = np.concatenate([np.atleast_2d(r) for r in rows])
  correlation = np.corrcoef(rows)
  return np.abs(correlation - np.eye(len(rows))).max() < 6 / np.sqrt(SIZE)


@pytest.mark.parametrize('adjacency,factor', [('zero_out', 1), ('replace', 2)])
def test_noise_has_the_accounted_standard_deviation(adjacency, factor):
  noise = _steps(_model(adjacency=adjacency), 3).ravel()
  std = factor * SIGMA * CLIP / B
  assert stats.kstest(noise / std, 'norm').pvalue > 1e-6
  for wrong in (2 / 3, 3 / 2):
    assert stats.kstest(noise / (wrong * std), 'norm').pvalue < 1e-6


def test_noise_does_not_depend_on_chunks():
  one, four = _model(seed=3), _model(
      seed=3, performance=tfdp.Performance(accumulation_steps=4))
  for m in (one, four):
    m.set_weights([np.zeros((SIZE, 1))])
  np.testing.assert_allclose(_steps(one, 2), _steps(four, 2), atol=1e-6)


def test_steps_fits_and_optimizers_never_share_noise():
  model = _model()
  rows = [_steps(model, 2)]
  for _ in range(2):
    before = model.get_weights()[0].ravel()
    model.fit(X, Y, batch_size=B, verbose=0)
    rows.append(before - model.get_weights()[0].ravel())
  rows.append(_steps(_model(), 2))
  assert _distinct(*rows)


@pytest.mark.pitfall(
    '`set_random_seed` makes the noise known to anyone who knows the seed.',
    severity='critical', stops='keys come from the operating system, not from global seeds')
def test_no_global_seed_fixes_the_noise():
  rows = []
  for _ in range(2):
    random.seed(1)
    np.random.seed(1)
    keras.utils.set_random_seed(1)
    rows.append(_steps(_model(), 1))
  assert _distinct(*rows)


@pytest.mark.pitfall(
    'A restored run uses the same noise again for other gradients.',
    severity='critical', stops='every restored run draws a new key')
def test_restoring_never_repeats_noise(tmp_path):
  model = _model()
  _steps(model, 1)
  path = str(tmp_path / 'model.keras')
  model.save(path)
  saved = model.get_weights()
  checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
  saved_at = checkpoint.save(str(tmp_path / 'checkpoint'))
  original = _steps(model, 2)
  reloaded = keras.models.load_model(path)
  np.testing.assert_array_equal(reloaded.get_weights()[0], saved[0])
  assert reloaded.optimizer.steps_done == 1
  from_file = _steps(reloaded, 2)
  checkpoint.restore(saved_at)
  np.testing.assert_array_equal(model.get_weights()[0], saved[0])
  assert model.optimizer.steps_done == 1
  again = _steps(model, 2)
  assert _distinct(original, from_file, again)


@pytest.mark.pitfall(
    "The noise's key is in the saved model.",
    severity='critical', stops='the key is not saved')
def test_the_key_is_not_saved():
  model = _model()
  _steps(model, 1)
  names = [getattr(v, 'path', v.name) for v in model.optimizer.variables]
  assert not any('key' in name for name in names)
  key = np.asarray(model.optimizer.run.state[1].noise.key)
  for variable in model.optimizer.variables:
    assert not np.array_equal(np.asarray(variable), key)


@pytest.mark.thorough
@pytest.mark.parametrize('cls', [tfdp.DPAdam, tfdp.DPAdamIME, tfdp.DPAdamBC])
def test_a_seeded_resume_is_exact(cls, tmp_path):
  rng = np.random.default_rng(0)
  x, y = rng.normal(size=(B, SIZE)).astype('float32'), rng.normal(size=(B, 1)).astype('float32')

  def train(model, steps):
    for _ in range(steps):
      model.train_on_batch(x, y)

  model = _model(cls, seed=11, learning_rate=0.1)
  train(model, 3)
  path = str(tmp_path / 'm.keras')
  model.save(path)
  resumed = keras.models.load_model(path)
  assert type(resumed.optimizer) is cls and resumed.optimizer.steps_done == 3
  train(model, 2)
  train(resumed, 2)
  np.testing.assert_array_equal(model.get_weights()[0], resumed.get_weights()[0])
  # The state matters: a fresh optimizer goes elsewhere.
  fresh = keras.models.load_model(path)
  fresh.compile(optimizer=cls.from_config(resumed.optimizer.get_config()), loss='mse')
  train(fresh, 2)
  assert not np.allclose(fresh.get_weights()[0], resumed.get_weights()[0])


def test_an_empty_poisson_batch_is_a_step_of_pure_noise():
  model = _model(adjacency='add_remove')
  before = model.get_weights()[0].ravel()
  model.train_on_batch(np.ones((2, SIZE)), np.ones((2, 1)), sample_weight=np.zeros(2))
  moved = before - model.get_weights()[0].ravel()
  assert model.optimizer.steps_done == 1
  assert stats.kstest(moved / (SIGMA * CLIP / B), 'norm').pvalue > 1e-6
