# SPDX-License-Identifier: Apache-2.0
"""Rules with matrices in training: resumed from a file, compiled by XLA, in mixed precision."""

import functools

import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.clipping import engines
from tfdp_adaptive.independence import validation

keras = compat.keras
B, STEPS = 6, 5
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(B, 3)).astype('float32'), RNG.integers(0, 2, size=B)
PUBLIC = (X[:4] + 1, Y[:4])
RULES = {
    'DPShampoo': dict(refresh_every=2), 'DPSOAP': dict(refresh_every=2),
    'DPKFC': dict(refresh_every=2, public_data=PUBLIC), 'DPMuon': dict(edge=True)}
each = pytest.mark.parametrize('name', RULES)


@pytest.fixture(autouse=True)
def validated_before(monkeypatch):
  monkeypatch.setattr(validation, 'validate_model', lambda model, x=None: None)


def compiled(name, dtype='float32', **how):
  """Two layers between which there are matrices of two sides, and noise from a seed."""
  keras.utils.set_random_seed(1)
  model = tfdp.DPSequential([
      keras.layers.Input((3,)), keras.layers.Dense(4, activation='tanh', dtype=dtype),
      keras.layers.Dense(2, dtype=dtype), keras.layers.Activation('linear', dtype='float32')])
  model.compile(
      getattr(tfdp, name)(0.05, l2_norm_clip=1.0, noise_multiplier=0.3, batch_size=B, seed=7,
                          **RULES[name]),
      keras.losses.SparseCategoricalCrossentropy(from_logits=True), **how)
  return model


def trained(model, steps):
  for _ in range(steps):
    model.train_on_batch(X, Y)
  return [np.asarray(w, np.float64) for w in model.get_weights()]


@functools.lru_cache(maxsize=None)
def straight(name):
  return trained(compiled(name, run_eagerly=True), STEPS)


def assert_near(got, want, tolerance):
  for a, b in zip(got, want):
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.thorough(but=['DPSOAP', 'DPMuon'])
@each
def test_saved_in_the_middle_and_loaded_equals_training_at_a_stretch(name, tmp_path):
  """Saved between two refreshes, so that averages and sides of both come back."""
  model = compiled(name, run_eagerly=True)
  middle = trained(model, 3)
  assert max(np.abs(a - b).max() for a, b in zip(middle, straight(name))) > 1e-3
  model.save(tmp_path / 'model.keras')
  loaded = keras.models.load_model(tmp_path / 'model.keras')
  loaded.run_eagerly = True
  if 'public_data' in RULES[name]:
    loaded.optimizer.public_data = PUBLIC
  assert_near(trained(loaded, STEPS - 3), straight(name), 1e-4)
  assert loaded.optimizer.steps_done == STEPS


@pytest.mark.thorough
def test_compiled_by_xla_equals_eager_training():
  """Of the one whose public data are seen in some steps only; others: rules_contract_test.py."""
  assert_near(trained(compiled('DPKFC', jit_compile=True), STEPS), straight('DPKFC'), 5e-3)


@pytest.mark.thorough(but=['DPKFC-mixed_bfloat16', 'DPMuon-mixed_float16'])
@pytest.mark.parametrize('name, dtype', list(zip(RULES, 2 * ['mixed_bfloat16', 'mixed_float16'])))
def test_mixed_precision_is_near_single(name, dtype):
  model = compiled(name, dtype, run_eagerly=True)
  start = trained(model, 0)
  got = trained(model, STEPS)
  assert all(tf.as_dtype(v.dtype) == tf.float32 for v in model.trainable_variables)
  moved = max(np.abs(a - b).max() for a, b in zip(start, straight(name)))
  assert max(np.abs(a - b).max() for a, b in zip(got, straight(name))) < 0.3 * moved


def test_public_data_are_looked_at_when_sides_are_made_anew(monkeypatch):
  looks, second_moments = [], engines.public_second_moments
  monkeypatch.setattr(engines, 'public_second_moments', lambda *given: (
      looks.append(int(given[0].optimizer.steps_done)), second_moments(*given))[1])
  model = compiled('DPKFC', run_eagerly=True)
  trained(model, STEPS)
  assert looks == [0, 1, 3]


class Empty(keras.layers.Layer):

  def build(self, shape):
    self.none = self.add_weight(name='none', shape=(0, 4), initializer='ones')
    super().build(shape)

  def call(self, x):
    return x


@pytest.mark.parametrize('name', ['DPSOAP', 'DPKFC', 'DPSGD'])
def test_weights_without_numbers_are_refused_in_words(name):
  model = tfdp.DPSequential([keras.layers.Input((3,)), Empty(), keras.layers.Dense(2)])
  model.compile(getattr(tfdp, name)(
      0.05, l2_norm_clip=1.0, noise_multiplier=0.3, batch_size=B, **RULES.get(name, {})), 'mse')
  with pytest.raises(ValueError, match='at least one number each'):
    model.optimizer.build(model.trainable_variables)


@pytest.mark.thorough(but=['DPSOAP'])
@pytest.mark.parametrize('name', ['DPSOAP', 'DPKFC', 'DPMuon'])
def test_frozen_layers_and_scalars_beside_a_convolution(name):
  class Scalar(keras.layers.Layer):

    def build(self, shape):
      self.factor = self.add_weight(name='factor', shape=(), initializer='ones')
      super().build(shape)

    def call(self, x):
      return x * self.factor

  keras.utils.set_random_seed(1)
  model = tfdp.DPSequential([
      keras.layers.Input((3,)), keras.layers.Dense(4, trainable=False),
      keras.layers.Reshape((4, 1)), keras.layers.Conv1D(3, 2), Scalar(),
      keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(2)])
  model.compile(getattr(tfdp, name)(
      0.05, l2_norm_clip=1.0, noise_multiplier=0.3, batch_size=B,
      **({} if name == 'DPMuon' else RULES[name])),  # DP-Muon's edge drops mostly noise.
                keras.losses.SparseCategoricalCrossentropy(from_logits=True), run_eagerly=True)
  start = trained(model, 0)
  moved = [np.abs(a - b).max() for a, b in zip(start, trained(model, 2))]
  assert moved[:2] == [0, 0] and min(moved[2:]) > 1e-6 and np.all(np.isfinite(moved))
