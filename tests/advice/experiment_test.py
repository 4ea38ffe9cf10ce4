# SPDX-License-Identifier: Apache-2.0
"""What is charged, what the last layer reads, and how a search keeps to its time."""

import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.advice import experiment as experiment_lib
from tfdp_adaptive.advice import parts
from tfdp_adaptive.advice import search as search_lib
from tfdp_adaptive.advice import settings as settings_lib

keras = compat.keras
layers = keras.layers
LAST, PUBLIC = settings_lib.LAST, settings_lib.PUBLIC


@pytest.fixture(scope='module')
def experiment():
  keras.utils.set_random_seed(0)
  model = keras.Sequential([
      layers.Input([3]), layers.Dense(4, activation='tanh'), layers.Dense(1)])
  rng = np.random.default_rng(0)
  x = rng.normal(size=[40, 3]).astype(np.float32)
  plan = tfdp.PrivacyPlan(
      population_size=1000, batch_size=100, steps=200, l2_norm_clip=1.0, noise_multiplier=2.0,
      target_delta=1e-5)
  made = experiment_lib.Experiment(
      model, parts.chain(model, x), 'mse', (), x, x[:, :1], [plan], 0, settings_lib.Clock(1e6, 0))
  made.kinds = ['as given']
  made.recipes['as given'] = 3.0, 32
  return made


def test_a_part_of_what_overfitting_adds_is_not_charged(experiment):
  setting = settings_lib.Setting()
  seen, unseen = experiment.rows(1, setting.start), experiment._parts[1]
  assert sorted([*seen, *unseen]) == list(range(40))
  losses = np.zeros(40)
  for known, wanted in ((1.0, 1.0), (.25, 1 - .75 / 2 * .5), (0.0, 1.0), (2.0, 1.5)):
    losses[seen], losses[unseen] = known, 1.0
    charged, _, outputs = experiment.charged(setting, 1, np.zeros([40, 1]), losses)
    np.testing.assert_allclose(charged, np.full(10, wanted))
    assert outputs.shape == (10, 1)


def test_a_public_start_has_examples_of_its_own(experiment):
  for fold in range(4):
    private, judged = experiment.rows(fold, PUBLIC), experiment._parts[fold]
    assert len(private) == 10 and not set(private) & set(judged)


def test_the_last_layer_reads_what_public_weights_make_of_the_inputs(experiment):
  assert experiment.starts == [('as given', PUBLIC), ('as given', LAST), ('as given', 'given')]
  kernel, bias, *last = experiment.weights('as given', PUBLIC, 0)
  features = experiment.inputs('as given', LAST, 0)
  np.testing.assert_allclose(features, np.tanh(experiment._x @ kernel + bias), atol=1e-5)
  for one, other in zip(experiment.weights('as given', LAST, 0), last):
    np.testing.assert_array_equal(one, other)
  setting = settings_lib.Setting('as given', LAST, rate=.3)
  outputs, losses = experiment.train(setting, 0, 1)
  assert outputs.shape == (40, 1) and losses.mean() < experiment.untrained.loss
  assert experiment.part(LAST).size == 5 and experiment.part(PUBLIC).size == 21


def test_one_step_of_a_slow_model_stands_for_several(experiment, monkeypatch):
  """The mean of c steps has 1 / sqrt(c) of the noise, and their rates add up."""
  stddevs, setting = [], settings_lib.Setting('as given')
  monkeypatch.setattr(experiment.trial, 'advance', lambda course, state, *of: (
      stddevs.append((course.stddev, len(course.rates))) or state))
  monkeypatch.setattr(experiment.trial, 'judge', lambda *of: (np.zeros([40, 1]), np.zeros(40)))
  fast = experiment.settled(setting)
  experiment.train(setting, 0, 0)
  clock = settings_lib.Clock(100.0, 0)
  clock.allow(1.0)
  # A hundred trainings take 200 seconds, at twice the time of a step without privacy.
  monkeypatch.setattr(experiment.trial, 'pace', {'Adam': .005})
  monkeypatch.setattr(experiment, 'coarse', 1)
  folds = search_lib.Search(experiment, clock)._set_fidelity()
  assert experiment.coarse == 4 and len(folds) == 1
  experiment.train(setting, 0, 0)
  assert stddevs == [(pytest.approx(.02), 200), (pytest.approx(.01), 50)]
  clip, rate = experiment.settled(setting)
  assert clip == fast[0] and rate == pytest.approx(fast[1] / 2, rel=.02)  # 1 / sqrt(4 steps), / 4.


def test_what_would_take_too_long_is_not_begun(capsys):
  clock = settings_lib.Clock(100.0, 1)
  clock.check('nothing is ruled out', 1e9)
  clock.allow(.5)
  assert 49 < clock.left <= 50
  clock.check('this fits', 40.0)
  with pytest.raises(settings_lib.OutOfTime):
    clock.check('this does not', 60.0)
  clock._printed -= 2
  clock.check('now', 0.0)
  assert '100 s left' in capsys.readouterr().err.replace(' 99 s', ' 100 s')


def test_a_graph_that_ends_in_a_dense_layer_is_a_model_in_front_of_it():
  entry = keras.Input([3])
  value = layers.Add()([entry, layers.Dense(3, activation='tanh')(entry)])
  model = keras.Model(entry, layers.Dense(2)(value))
  x = np.random.default_rng(0).normal(size=[8, 3]).astype(np.float32)
  front, last = parts.chain(model, x)
  np.testing.assert_allclose(last(front(x)), model(x), atol=1e-6)
  both = keras.Model([entry, keras.Input([3])], layers.Dense(1)(value))
  assert parts.chain(both, [x, x]) == []
  front.trainable = False
  head, features, count = parts.behind_frozen([front, last], model, x)
  assert count == 1 and head.trainable_variables[0] is last.kernel
  np.testing.assert_allclose(features, front(x), atol=1e-6)
  assert isinstance(tf.convert_to_tensor(head(features)), tf.Tensor)
