# SPDX-License-Identifier: Apache-2.0
"""An optimizer's face: one value for clipping, one for speed; and what was written before."""

import json
import warnings

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
# As it was before 0.2, and as it is now.
SPELLINGS = {
    'nothing': ({}, {}),
    'hard': (dict(clipping='hard'), dict(clipping=C.Hard())),
    'a weight': (dict(clipping='psac'), dict(clipping=C.PSAC())),
    'its constant': (dict(clipping=('auto_s', 0.3)), dict(clipping=C.AutoS(0.3))),
    'quantile': (dict(quantile_clip=0.6), dict(clipping=C.Quantile(0.6))),
    'quantile, weighted': (dict(quantile_clip=dict(quantile=0.6, stddev=2.0), clipping='tanh'),
                           dict(clipping=C.Quantile(0.6, C.Tanh(), stddev=2.0))),
    'slack': (dict(slack_clip=dict(buckets=2, bounds=(0.1, 10.0))),
              dict(clipping=C.Slack(buckets=2, bounds=(0.1, 10.0)))),
    'layers': (dict(groups='layer', quantile_clip=0.5), dict(clipping=C.PerLayer(C.Quantile()))),
    'variables': (dict(groups=dict(groups='variable', split='equal', norms=[1.0, 2.0, 1.0, 3.0])),
                  dict(clipping=C.PerVariable(split='equal', norms=[1.0, 2.0, 1.0, 3.0]))),
    'groups': (dict(groups=[0, 0, 1, 1]), dict(clipping=C.Groups([0, 0, 1, 1]))),
    'chunks': (dict(accumulation_steps=2),
               dict(performance=tfdp.Performance(accumulation_steps=2))),
    'engine': (dict(engine='materialized'), dict(performance=tfdp.Performance('materialized'))),
}


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


@pytest.mark.parametrize('name', SPELLINGS)
def test_old_and_new_spellings_take_the_same_steps(name):
  before, now = SPELLINGS[name]
  if not before:
    made = optimizer()
  else:
    with pytest.warns(DeprecationWarning, match='Write `(clipping|performance)=') as told:
      made = optimizer(**before)
    assert told[0].filename == __file__  # Whoever wrote it is shown.
  new = optimizer(**now)
  assert made.get_config() == new.get_config()
  np.testing.assert_array_equal(weights_after(made), weights_after(new))
  if name not in ('nothing', 'hard', 'chunks', 'engine'):
    assert np.any(weights_after(optimizer()) != weights_after(optimizer(**now)))


@pytest.mark.parametrize('name', SPELLINGS)
def test_configurations_come_back(name):
  made = optimizer(**SPELLINGS[name][1])
  config = json.loads(json.dumps(made.get_config(), default=float))
  with warnings.catch_warnings():
    warnings.simplefilter('error', DeprecationWarning)
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


def test_the_warning_is_what_to_write():
  with pytest.warns(DeprecationWarning) as told:
    made = optimizer(groups='layer', slack_clip=0.3)
  written = str(told[0].message).partition('`clipping=')[2].rstrip('`.')
  assert eval(written, {'tfdp': tfdp}) == made.clipping  # pylint: disable=eval-used
  with pytest.warns(DeprecationWarning) as told:
    made = tfdp.DPAdamW(l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=8, memory_budget=2**20)
  written = str(told[0].message).partition('`performance=')[2].rstrip('`.')
  assert eval(written, {'tfdp': tfdp}) == made.performance  # pylint: disable=eval-used
  assert told[0].filename == __file__


@pytest.mark.parametrize('kwargs, match', [
    (dict(clipping=C.Hard(), quantile_clip=0.5), 'says all'),
    (dict(performance=tfdp.Performance(), engine='loop'), 'says all'),
    (dict(performance='loop'), 'tfdp.Performance'), (dict(clipping=3), 'clipping'),
    (dict(clipping={'kind': 'os'}), 'way of clipping'),
    (dict(clipping={'kind': 'Hard', 'gamma': 1}), 'way of clipping'),
    (dict(performance={'engine': 'x'}), 'engine')])
def test_what_is_neither_is_refused(kwargs, match):
  with pytest.raises(ValueError, match=match):
    optimizer(**kwargs)


@pytest.mark.parametrize('name', ['engine', 'memory_budget', 'groups', 'clipping', 'performance'])
def test_settings_stay(name):
  with pytest.raises(AttributeError, match='cannot be changed'):
    setattr(optimizer(), name, None)
