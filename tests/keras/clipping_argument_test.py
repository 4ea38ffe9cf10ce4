# SPDX-License-Identifier: Apache-2.0
"""The arguments `clipping` and `performance` of optimizers."""

import json

import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat

keras = compat.keras
C = tfdp.clipping
RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 3)).astype('float32')
Y = RNG.normal(size=(8, 1)).astype('float32')
CHOICES = {
    'nothing': {}, 'hard': dict(clipping=C.Hard()), 'a weight': dict(clipping=C.PSAC()),
    'its constant': dict(clipping=C.AutoS(0.3)), 'quantile': dict(clipping=C.Quantile(0.6)),
    'quantile, weighted': dict(clipping=C.Quantile(0.6, C.Tanh(), stddev=2.0)),
    'slack': dict(clipping=C.Slack(buckets=2, bounds=(0.1, 10.0))),
    'layers': dict(clipping=C.PerLayer(C.Quantile())),
    'variables': dict(clipping=C.PerVariable(split='equal', norms=[1.0, 2.0, 1.0, 3.0])),
    'groups': dict(clipping=C.Groups([0, 0, 1, 1])),
    'chunks': dict(performance=tfdp.Performance(accumulation_steps=2)),
    'engine': dict(performance=tfdp.Performance('materialized'))}


def optimizer(**kwargs):
  return tfdp.DPAdam(0.1, l2_norm_clip=0.5, noise_multiplier=0.7, batch_size=8, seed=3,
                     adjacency='add_remove', **kwargs)


def weights_after(made, steps=2):
  model = tfdp.DPSequential([
      keras.layers.Input([3]), keras.layers.Dense(2), keras.layers.Dense(1)])
  rng = np.random.default_rng(1)
  model.set_weights([rng.normal(size=w.shape) for w in model.get_weights()])
  model.compile(made, 'mse')
  for _ in range(steps):
    model.train_on_batch(X, Y)
  return np.concatenate([np.ravel(w) for w in model.get_weights()])


@pytest.mark.thorough(but=['hard', 'quantile', 'layers', 'slack'])
@pytest.mark.parametrize('name', CHOICES)
def test_a_choice_decides_the_steps_and_speed_does_not(name):
  plain, made = weights_after(optimizer()), weights_after(optimizer(**CHOICES[name]))
  if name in ('nothing', 'hard', 'chunks', 'engine'):
    np.testing.assert_allclose(made, plain, rtol=1e-5, atol=1e-6)
  else:
    assert np.any(made != plain)


@pytest.mark.parametrize('name', CHOICES)
def test_configurations_come_back(name):
  made = optimizer(**CHOICES[name])
  config = json.loads(json.dumps(made.get_config(), default=float))
  again = tfdp.DPAdam.from_config(config)
  assert (again.clipping, again.performance) == (made.clipping, made.performance)
  assert again.get_config() == made.get_config()


def test_a_saved_model_clips_as_before(tmp_path):
  made = optimizer(clipping=C.PerLayer(C.Quantile(0.4, C.AutoS(0.2))),
                   performance=tfdp.Performance(memory_budget=2**20))
  model = tfdp.DPSequential([keras.layers.Input([3]), keras.layers.Dense(1)])
  model.compile(made, 'mse')
  model.train_on_batch(X, Y)
  model.save(tmp_path / 'model.keras')
  loaded = keras.models.load_model(tmp_path / 'model.keras')
  assert loaded.optimizer.clipping == made.clipping
  assert loaded.optimizer.performance == made.performance
  tf.nest.map_structure(np.testing.assert_array_equal, loaded.optimizer.rule_state, made.rule_state)


@pytest.mark.parametrize('kwargs, match', [
    (dict(clipping='hard'), 'way of clipping'),
    (dict(performance='loop'), 'tfdp.Performance'), (dict(clipping=3), 'clipping'),
    (dict(clipping={'kind': 'os'}), 'way of clipping'),
    (dict(clipping={'kind': 'Hard', 'gamma': 1}), 'way of clipping'),
    (dict(performance={'engine': 'x'}), 'engine')])
def test_what_is_neither_is_refused(kwargs, match):
  with pytest.raises(ValueError, match=match):
    optimizer(**kwargs)


@pytest.mark.parametrize('name', ['clipping', 'performance'])
def test_settings_stay(name):
  with pytest.raises(AttributeError, match='cannot be changed'):
    setattr(optimizer(), name, None)
