# SPDX-License-Identifier: Apache-2.0
"""What is charged, what the last layer reads, and how a search keeps to its time."""

import math

import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.advice import experiment as experiment_lib
from tfdp_adaptive.advice import inputs as inputs_lib
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
      model, inputs_lib.chain(model, x), 'mse', (), x, x[:, :1], [plan], 0,
      settings_lib.Clock(1e6, 0))
  made.kinds = ['as given']
  made.recipes['as given'] = 3.0, 32
  made.alone['as given'] = made.untrained
  return made


class Critic(keras.Model):
  """Scores whose norm of the gradient by the input is the output."""

  def __init__(self):
    super().__init__()
    self.hidden, self.score = layers.Dense(4, activation='tanh'), layers.Dense(1)

  def call(self, z, training=None):
    with tf.GradientTape() as tape:
      tape.watch(z)
      score = self.score(self.hidden(z))
    return score + tf.reduce_sum(tape.gradient(score, z)**2, -1, keepdims=True)


def made_of(model, loss, y_of=lambda x: x[:, :1]):
  rng = np.random.default_rng(0)
  x = rng.normal(size=[40, 3]).astype(np.float32)
  model(x[:2])
  plan = tfdp.PrivacyPlan(
      population_size=1000, batch_size=100, steps=200, l2_norm_clip=1.0, noise_multiplier=2.0,
      target_delta=1e-5)
  return x, experiment_lib.Experiment(
      model, [], loss, (), x, y_of(x), [plan], 0, settings_lib.Clock(1e6, 0))


@pytest.mark.both_stacks
def test_trials_of_a_gradient_inside_call_take_the_gradients_of_a_tape():
  model = Critic()
  x, made = made_of(model, 'mse')
  assert 'DPKFC' not in made.trial.rules
  norms = made.trial.norms(
      tf.constant(x), tf.constant(x[:, :1]), made.trial.start, 'DPSGD')
  for i in range(3):
    with tf.GradientTape() as tape:
      value = tf.reduce_mean((model(tf.constant(x[i:i + 1]), training=True) - x[i, 0])**2)
    gradients = tape.gradient(value, [compat.raw_variable(v) for v in model.trainable_variables])
    np.testing.assert_allclose(
        norms[i], np.linalg.norm(np.concatenate([np.ravel(g) for g in gradients if g is not None])),
        rtol=1e-4)


def test_trials_of_a_loss_that_a_private_step_would_refuse_warn_of_it():
  in_graphs = lambda y, output: tf.reduce_sum((output - y)**2, -1) * (
      1.0 if tf.executing_eagerly() else 2.0)
  with pytest.warns(tfdp.Caution, match='What `recommend` tries .* must compute what Keras'):
    made_of(keras.Sequential([layers.Input([3]), layers.Dense(1)]), in_graphs)


def test_a_part_of_what_overfitting_adds_is_not_charged(experiment):
  setting = settings_lib.Setting()
  seen, unseen = experiment.rows(1, setting.start), experiment._parts[1]
  assert sorted([*seen, *unseen]) == list(range(40))
  losses = np.zeros(40)
  for known, wanted in ((1.0, 1.0), (.25, 1 - .75 / 2 * .5), (0.0, 1.0), (2.0, 1.5)):
    losses[seen], losses[unseen] = known, 1.0
    charged, _, outputs = experiment.charged(setting, 1, np.zeros([40, 1]), losses)
    np.testing.assert_allclose(charged, np.full(8, wanted))
    assert outputs.shape == (8, 1)


def test_a_public_start_has_examples_of_its_own(experiment):
  for fold in range(5):
    private, judged = experiment.rows(fold, PUBLIC), experiment._parts[fold]
    assert len(private) == 12 and not set(private) & set(judged)


def test_the_last_layer_reads_what_public_weights_make_of_the_inputs(experiment):
  assert experiment.starts == [PUBLIC, LAST, 'given']
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
  monkeypatch.setitem(experiment.judged, setting, experiment.untrained)
  fast = experiment.settled(setting)
  experiment.train(setting, 0, 0)
  clock = settings_lib.Clock(100.0, 0)
  clock.allow(1.0)
  # Sixty trainings take 240 seconds, at twice the time of a step without privacy.
  monkeypatch.setattr(experiment.trial, 'pace', {'Adam': .01})
  monkeypatch.setattr(experiment, 'coarse', 1)
  folds = search_lib.Search(experiment, clock)._set_fidelity()
  assert experiment.coarse == 4 and len(folds) == 1
  experiment.train(setting, 0, 0)
  assert stddevs == [(pytest.approx(.02), 200), (pytest.approx(.01), 50)]
  clip, rate = experiment.settled(setting)
  assert clip == fast[0] and rate == pytest.approx(fast[1] / 2, rel=.02)  # 1 / sqrt(4 steps), / 4.


def test_settings_are_typical_of_examples_that_the_start_weights_have_not_seen(
    experiment, monkeypatch):
  """Those that it has learned have hardly any gradient, which no clip norm may follow."""
  setting = settings_lib.Setting('as given', PUBLIC)
  monkeypatch.setitem(experiment.judged, setting, experiment.untrained)
  monkeypatch.setattr(experiment, 'norm', lambda kind, start, fold, rule: 2.0**fold)
  monkeypatch.setattr(experiment, '_loss_of', lambda *_: 1.0)
  clip, rate = experiment.settled(setting)
  assert clip == pytest.approx(3 * 2.0**2)  # Folds 0 to 4.
  assert rate == pytest.approx(1 / (2.0**4 * 200**.5), rel=.01)


def test_private_examples_gain_what_more_public_ones_would(experiment, monkeypatch):
  """By L + a / n, and by what is charged; a small rate gains a part of it."""
  alone = settings_lib.Judged()
  alone.note((0, 0), np.full(8, .65), 0.0, ())
  monkeypatch.setattr(experiment, 'alone', {'as given': alone})
  monkeypatch.setattr(experiment, 'halves', {('as given', 0): np.full(8, .8)})
  search = search_lib.Search(experiment, settings_lib.Clock(1.0, 0))
  large, small, given = (settings_lib.Setting('as given', start, rate=rate)
                         for start, rate in ((PUBLIC, 1.0), (PUBLIC, .1), ('given', 2.0)))
  for one, noisy, clean in ((large, .75, .5), (small, .72, .7), (given, .7, .6)):
    judged = settings_lib.Judged()
    judged.note((0, 1), np.full(8, noisy), 0.0, ())
    monkeypatch.setitem(experiment.judged, one, judged)
    monkeypatch.setitem(search._clean, one, {0: np.full(8, clean)})
  found = {one.rate: (final.judged.loss, final.clean) for one, final in search.judged().items()}
  # 40 of 1,000 examples; L is .4, since half loses .8, four fifths .65 and all of them .6.
  gain = (.2 * (1 - 40 / 1000) + (.6 - .5)) / 2
  assert experiment.gained('as given') == pytest.approx(.15)
  assert found[1.0] == pytest.approx((.6 - gain + .25, .6 - gain))
  assert found[.1] == pytest.approx((.6 - gain / 3 + .02, .6 - gain / 3))
  assert found[2.0] == pytest.approx((.6 - gain + .1 + .1, .6 - gain + .1))
  assert list(found) == [.1, 2.0, 1.0]


def test_where_settings_were_lucky_on_one_fold_the_next_best_one_is_judged(
    experiment, monkeypatch):
  """Time ends when one setting has been judged by all folds."""
  losses = {settings_lib.Setting('as given', rate=rate): values for rate, values in (
      (1.0, [.1, .9, .9, .9, .9]), (2.0, [.2, .9, .9, .9, .9]), (3.0, [.3] * 5))}
  judged, asked = {one: settings_lib.Judged() for one in losses}, []
  alone = settings_lib.Judged()
  for fold in range(5):
    alone.note((fold, 0), np.full(8, .5), 0.0, ())

  def measure(one, folds, seed):
    if len(asked) == 9:
      raise settings_lib.OutOfTime()
    asked.append((one.rate, *folds))
    judged[one].note((*folds, seed), np.full(8, losses[one][folds[0]]), 0.0, ())

  for one, values in losses.items():
    judged[one].note((0, 0), np.full(8, values[0]), 0.0, ())
  monkeypatch.setattr(experiment, 'judged', judged)
  monkeypatch.setattr(experiment, 'alone', {'as given': alone})
  monkeypatch.setattr(experiment, 'measure', measure)
  monkeypatch.setattr(experiment, 'clean', lambda one, fold: np.zeros(8))
  search = search_lib.Search(experiment, settings_lib.Clock(100.0, 0))
  search.finals()
  assert asked == [*((rate, 0) for rate in (1.0, 2.0, 3.0)), (1.0, 1), (2.0, 1),
                   *((3.0, fold) for fold in range(1, 5))]
  best, final = next(iter(search.judged().items()))
  assert best.rate == 3.0 and final.judged.folds == set(range(5))


def regression(targets, losses=1.0):
  """Returns an experiment whose targets and losses are in these units."""
  return made_of(
      keras.Sequential([layers.Input([3]), layers.Dense(1, kernel_initializer='zeros')]),
      lambda y, z: losses * tf.square(y - z)[:, 0], lambda x: targets * (3 + x[:, :1]))[1]


def in_units_of(targets, losses):
  """Returns losses and learning rates of some trainings, free of the units."""
  made = regression(targets, losses)
  made.try_alone('as given', 3.0, [0])
  found = [made.alone['as given'].loss / losses / targets**2]
  for start in settings_lib.GIVEN, PUBLIC:
    sgd, adam = (settings_lib.Setting('as given', start, name) for name in ('DPSGD', 'DPAdam'))
    found += [made.measure(one, [0]).loss / losses / targets**2 for one in (sgd, adam)]
    found += [made.unit(sgd, 0) * losses, made.unit(adam, 0) / targets]
  return found


@pytest.mark.both_stacks
def test_units_of_targets_and_losses_do_not_matter():
  """Prices are learned in cents as in thousands of dollars; the variance of the targets is 1."""
  first, *others = [in_units_of(targets, losses) for targets, losses in (
      (2.0**16, 1.0), (2.0**-8, 1.0), (2.0**8, 2.0**-40))]
  assert first[0] < .1
  for other in others:
    np.testing.assert_allclose(other, first, rtol=.02)


@pytest.mark.parametrize('side', [.99, 1.01])
def test_all_folds_count_a_loss_as_usual_or_none_does(side):
  """The mean loss of all examples is close to the largest usual one: folds are on both sides."""
  mean = regression(1.0)._loss_of('as given', settings_lib.GIVEN, None)
  made = regression((side * 30 / mean)**.5)
  setting = settings_lib.Setting('as given', settings_lib.GIVEN, 'DPAdam')
  folds = range(experiment_lib.FOLDS)
  losses = [made._loss_of('as given', settings_lib.GIVEN, fold) for fold in folds]
  assert min(losses) < 30 < max(losses)
  units = [made.unit(setting, fold) for fold in folds]
  assert max(units) < 2 * min(units)


def test_of_rates_that_are_alike_the_smallest_trains_on_the_public_examples(
    experiment, monkeypatch):
  """The largest rate has the least mean, by luck on two examples; the least rate is worse."""
  rows = {3.0: ([.5, .1, .5, .1], 8), .5: ([.31] * 4, 16), .1: ([.9, .8, .9, .8], 32)}
  curves = {('as given', rate): {0: {
      steps: (np.array(losses), 0.0, ()), 2 * steps: (np.ones(4), 0.0, ())}}
            for rate, (losses, steps) in rows.items()}
  for name in ('alone', 'recipes'):
    monkeypatch.setattr(experiment, name, {})
  monkeypatch.setattr(experiment, '_curves', curves)
  experiment._choose_alone('as given')
  assert experiment.recipes == {'as given': (.5, 16)}
  assert experiment.alone['as given'].loss == pytest.approx(.31)


def test_later_folds_train_on_the_public_examples_as_long_as_the_first_ones(
    experiment, monkeypatch):
  """The first one falls for long, the second one rises at once: the sum falls."""
  falling, rising = ({step: 1 + slope * math.log(step) for step in (8, 11, 16, 23, 32, 45, 64)}
                     for slope in (-.2, .1))
  for name in ('alone', 'recipes', '_ahead'):
    monkeypatch.setattr(experiment, name, {})
  monkeypatch.setattr(experiment, '_curves', {('as given', .5): {
      0: {step: (np.full(8, loss), 0.0, ()) for step, loss in falling.items()}}})
  monkeypatch.setattr(experiment, 'plainly', lambda *_: iter(experiment_lib._ALONE_STEPS))
  monkeypatch.setattr(experiment, '_looked', lambda kind, fold, step: (
      np.full(8, rising[step]), 0.0, ()))
  experiment.try_alone('as given', .5, range(2))
  assert experiment.recipes == {'as given': (.5, 64)}


def test_the_first_training_on_the_public_examples_has_more_time_than_the_others(
    experiment, monkeypatch):
  """Each look takes 5 of 100 seconds, and more steps are always better."""
  time, clock = [0.0], None

  def plainly(*_):
    for step in experiment_lib._ALONE_STEPS:
      time[0] += 5
      clock.check('')
      yield step

  monkeypatch.setattr(settings_lib, 'now', lambda: time[0])
  clock = settings_lib.Clock(100.0, 0)
  for name, value in (('alone', {}), ('recipes', {}), ('_ahead', {}), ('_curves', {}),
                      ('_clock', clock), ('plainly', plainly)):
    monkeypatch.setattr(experiment, name, value)
  monkeypatch.setattr(experiment, '_looked', lambda kind, fold, step: (
      np.full(8, 1 / step), 0.0, ()))
  for began, ended in ((0.0, 65.0), (25.0, 40.0)):
    time[0] = began
    with pytest.raises(settings_lib.OutOfTime):
      experiment.try_alone('as given', began + 1, [0])
    assert time[0] == ended
  assert experiment.recipes == {'as given': (1.0, 362)}


def test_equal_examples_are_in_one_fold():
  x = np.repeat(np.arange(12.0), 5)[:, None]
  parts = experiment_lib._folds((x, 2 * x), np.random.default_rng(0))
  assert sorted(np.concatenate(parts)) == list(range(60))
  assert sorted(value for part in parts for value in set(x[part, 0])) == list(range(12))
  assert len(experiment_lib._folds((0 * x, x), np.random.default_rng(0))) == 5
  same = experiment_lib._folds((0 * x, 0 * x), np.random.default_rng(0))
  assert [len(part) for part in same] == [12] * 5


@pytest.mark.parametrize('loss, metric, errors, wanted', [
    (-.1, 0.0, 1.65, True), (-.1, -.3, 1.65, False), (.01, .3, 1.65, False), (-.01, .3, 1.65, True),
    (-.01, 0.0, 1.65, False), (-.01, 0.0, 0.0, True), (.01, .3, 0.0, True), (.1, .3, 0.0, False)])
def test_neither_loss_nor_metric_may_be_clearly_worse(loss, metric, errors, wanted):
  one, other = settings_lib.Judged(), settings_lib.Judged()
  for fold in range(4):
    noise = np.random.default_rng(fold).normal(size=100)
    noise = .2 * (noise - noise.mean()) / noise.std()  # Standard error .01.
    one.note((fold, 0), loss + noise, metric + .04 * (-1)**fold, ())
    other.note((fold, 0), np.zeros(100), 0.0, ())
  assert settings_lib.better(one, other, errors) == wanted


def test_examples_of_one_training_share_its_noise():
  one, other = settings_lib.Judged(), settings_lib.Judged()
  for fold, more in enumerate((-.3, .1, -.1)):
    one.note((fold, 0), np.full(100, more), 0.0, ())
    other.note((fold, 0), np.zeros(100), 0.0, ())
  assert one.above(other) == (pytest.approx(-.1), pytest.approx(.2 / 3**.5))
  assert settings_lib.better(one, other) and not settings_lib.better(one, other, 1.0)


def test_what_would_take_too_long_is_not_begun(capsys):
  clock = settings_lib.Clock(100.0, 1)
  clock.check('nothing is ruled out', 1e9)
  clock.allow(.5)
  assert 49 < clock.left <= 50
  clock.check('this fits', 40.0)
  with pytest.raises(settings_lib.OutOfTime):
    clock.check('this does not', 60.0)
  clock._bar.start_t -= 2
  clock._bar.last_print_t -= 2
  clock.check('now', 0.0)
  assert '100 s left' in capsys.readouterr().err.replace(' 99 s', ' 100 s')


def test_a_graph_that_ends_in_a_dense_layer_is_a_model_in_front_of_it():
  entry = keras.Input([3])
  value = layers.Add()([entry, layers.Dense(3, activation='tanh')(entry)])
  model = keras.Model(entry, layers.Dense(2)(value))
  x = np.random.default_rng(0).normal(size=[8, 3]).astype(np.float32)
  front, last = inputs_lib.chain(model, x)
  np.testing.assert_allclose(last(front(x)), model(x), atol=1e-6)
  both = keras.Model([entry, keras.Input([3])], layers.Dense(1)(value))
  assert inputs_lib.chain(both, [x, x]) == []
  front.trainable = False
  head, features, count = inputs_lib.behind_frozen([front, last], model, x)
  assert count == 1 and head.trainable_variables[0] is last.kernel
  np.testing.assert_allclose(features, front(x), atol=1e-6)
  assert isinstance(tf.convert_to_tensor(head(features)), tf.Tensor)
