# SPDX-License-Identifier: Apache-2.0
"""What is recommended is handed over whole, and never worse than the public examples alone."""

import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.advice import experiment as experiment_lib
from tfdp_adaptive.advice import inputs as inputs_lib
from tfdp_adaptive.advice import recommend as recommend_lib
from tfdp_adaptive.advice import recommendation
from tfdp_adaptive.advice import search as search_lib
from tfdp_adaptive.advice import settings as settings_lib

keras = compat.keras
layers = keras.layers
UNITS = np.tile([1.0, 100.0, .01, 10.0], 3)
LOSS = 'binary_crossentropy'


def examples(count, seed):
  rng = np.random.default_rng(seed)
  x = rng.normal(size=[count, 12])
  y = rng.random(count) < 1 / (1 + np.exp(-2 * x.sum(1)))
  return (x * UNITS + UNITS).astype(np.float32), y.astype(np.float32)[:, None]


def logistic():
  keras.utils.set_random_seed(1)
  return keras.Sequential([layers.Input([12]), layers.Dense(1, activation='sigmoid')])


@pytest.fixture(scope='module', autouse=True)
def few_settings():
  """A search of few settings, as wide as the other one."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(search_lib, '_CLIPS', {'DPSGD': (3.0, 1.0), 'DPAdam': (1.0,)})
    patch.setattr(experiment_lib, '_ALONE_STEPS', (16, 128))
    patch.setattr(experiment_lib, 'ALONE_RATES', (3.0,))
    patch.setattr(search_lib, '_CLIMB', 3)
    patch.setattr(search_lib, '_KEPT', 1)
    made = experiment_lib.Experiment._trial_of

    def with_few_rules(self, *args):
      trial = made(self, *args)
      for name in set(trial.rules) - {'DPSGD', 'DPAdam', 'Adam'}:
        del trial.rules[name]
      return trial

    patch.setattr(experiment_lib.Experiment, '_trial_of', with_few_rules)
    yield


def recommend(model=None, public=None, seconds=600, **more):
  arguments = dict(loss=LOSS, metrics=['AUC'], population_size=4000, target_epsilon=8.0, steps=40,
                   batch_size=200, verbose=0, sampling=tfdp.sampling.Poisson())
  return tfdp.recommend(logistic() if model is None else model,
                        examples(100, 0) if public is None else public, seconds=seconds,
                        **{**arguments, **more})


@pytest.fixture(scope='module')
def found():
  return recommend()


def test_a_table_judges_what_was_tried(found):
  names = [row.name for row in found.rows]
  assert names[:2] == ['not trained', 'public examples alone, without privacy']
  assert any('inputs scaled' in name for name in names) and len(set(names)) == len(names)
  assert any('from public weights' in name for name in names)
  text = str(found)
  assert found.metric.lower() == 'auc' and found.metric in text and 'Proposed: ' in text
  assert 'Losses of private rows are extrapolated' in text
  assert any(row.more < 0 for row in found.rows) == ('judged by fewer examples' in text)
  losses = {row.name: row.loss for row in found.rows}
  proposed = found.reasons[0][len('Proposed: '):-1]
  row = next(row for row in found.rows if row.name == proposed)
  assert row.more == 0 and losses[proposed] < losses['not trained']


def test_what_is_handed_over_trains_and_says_what_was_public(found):
  assert found.plan is not None and 7.9 < found.plan.epsilon() <= 8.0
  x, y = examples(4000, 1)
  model = found.model
  assert found.model is model
  model.compile(found.optimizer(), LOSS, metrics=['AUC'])
  model.fit(found.plan.batches((x, y)), epochs=1, steps_per_epoch=40, verbose=0)
  logs = model.evaluate(*examples(2000, 2), verbose=0, return_dict=True)
  assert logs.pop('loss') < .45 and min(logs.values()) > .85
  statement = model.ledger.statement()
  assert '100 public examples of tfdp.recommend' in statement
  if 'scale' in found.reasons[0] or 'white' in found.reasons[0]:
    assert 'the scales of the inputs' in statement
    scaled = found._origin.inputs._replace(matrix=None)
    # The layers are part of the model, in its file as well.
    np.testing.assert_allclose(model.layers[0](x[:5]).numpy(), scaled(x[:5]), atol=1e-4)
  before = model.evaluate(*examples(100, 0), verbose=0, return_dict=True)['loss']
  found.calibrate(model)
  assert model.evaluate(*examples(100, 0), verbose=0, return_dict=True)['loss'] <= before + 1e-6


def test_the_public_examples_alone_are_tried_whatever_the_time():
  """Without them, too short a search would propose a model that is not trained."""
  found = recommend(seconds=1e-6)
  assert [row.name for row in found.rows] == [
      'not trained', 'public examples alone, without privacy']
  assert found.plan is None and found.rows[1].loss < found.rows[0].loss


@pytest.mark.thorough
def test_the_same_seed_gives_the_same_answer(found):
  again = recommend()
  assert again.rows == found.rows and again.settings == found.settings
  assert again.plan == found.plan


def test_the_model_stays_as_it_is_until_it_is_asked_for():
  model = logistic()
  before = model.get_weights()
  one = recommend(model, population_size=200, batch_size=50, target_epsilon=.01, steps=5)
  for value, wanted in zip(model.get_weights(), before):
    np.testing.assert_array_equal(value, wanted)
  # At this epsilon nothing private can be better than the public examples alone.
  assert one.plan is None and one.method is None
  assert one.reasons[0] == 'Proposed: public examples alone, without privacy.'
  assert 'Nothing private that was tried is better' in str(one)
  with pytest.raises(ValueError, match='There is no private optimizer'):
    one.optimizer()
  plain = one.model
  plain.compile(tfdp.DPSGD(.1, l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=10), LOSS)
  loss = plain.evaluate(*examples(2000, 2), verbose=0)
  assert loss < .45
  assert plain.ledger.epsilon() == 0


@pytest.mark.thorough
def test_an_interrupted_search_gives_the_best_so_far(monkeypatch):
  calls = []

  def check(self, text, cost=0.0):
    calls.append(text)
    if len(calls) == 60:
      raise KeyboardInterrupt

  monkeypatch.setattr(settings_lib.Clock, 'check', check)
  one = recommend()
  assert len(calls) >= 60 and one.rows and one.model is not None


@pytest.mark.thorough
def test_code_trains_what_is_proposed(found):
  text = found.code()
  names = dict(keras=keras, np=np, tfdp=tfdp, model=logistic(), loss=LOSS, public=examples(100, 0),
               data=examples(4000, 1))
  exec(text, names)  # pylint: disable=exec-used
  assert names['model'].evaluate(*examples(2000, 2), verbose=0) < .45
  assert names['plan'].noise_multiplier == pytest.approx(found.plan.noise_multiplier, rel=.01)
  assert f'tfdp.{found.method}(' in text and 'make_private' in text
  assert ('Normalization' in text) == (found._origin.inputs.kind != 'as given')


@pytest.mark.parametrize('whole', [False, True])
def test_code_scales_images_and_trains_them(whole):
  model = keras.Sequential([
      layers.Input([4, 4, 1]), layers.Conv2D(2, 3), layers.Flatten(), layers.Dense(1)])
  x = np.random.default_rng(0).normal(size=[40, 4, 4, 1]).astype(np.float32)
  y = x.sum((1, 2))
  scaled = inputs_lib.all_of(2 + 3 * x)['scaled']
  origin = recommendation.Origin(
      model, 'mse', x, y, () if whole else inputs_lib.chain(model, x), 0, scaled, ((),), (.01, 8))
  one = recommendation.Recommendation(None, None, {}, (), (), '', origin)
  names = dict(keras=keras, model=model, loss='mse', public=(x, y))
  exec(one.code(), names)  # pylint: disable=exec-used
  before = model(scaled(x)).numpy()
  np.testing.assert_allclose(names['model'](x), before, atol=1e-5)


@pytest.mark.parametrize('wrong, text', [
    (dict(public=(np.zeros([19, 4], 'f'), np.zeros([19, 1], 'f'))), '20 examples or more'),
    (dict(public=(np.zeros([30, 4], 'f'), np.zeros([29, 1], 'f'))), 'as many inputs as targets'),
    (dict(public=(np.zeros([30, 5], 'f'), np.zeros([30, 1], 'f'))), 'must take the inputs'),
    (dict(public=np.zeros([30, 4])), 'must be a pair'),
    (dict(public=(np.full([30, 4], np.nan), np.zeros([30, 1], 'f'))), 'must be finite'),
    (dict(public=([[0.0] * 12] * 30, [0.0] * 30)), 'must hold arrays'),
    (dict(public=(np.zeros([30, 12], 'f'), np.array(['a', 'b'] * 15))), 'targets that are numbers'),
    (dict(loss=lambda y, outputs: tf.reduce_mean(tf.sqrt(y) - outputs, -1), public=(
        np.ones([30, 12], 'f'), 28.5 - np.arange(30.0)[:, None])), r'NaN for the examples \[29\]'),
    (dict(loss=lambda y, outputs: tf.reduce_mean(y - outputs)), 'one value per example'),
    (dict(loss=None), '`loss` must be given'), (dict(gradient_norm=1.0), 'without either'),
    (dict(l2_norm_clip=1.0), 'recommended, not given'), (dict(seconds=0.0), 'seconds'),
    (dict(population_size=2.5), 'population_size')])
def test_wrong_arguments_are_refused_in_words(wrong, text):
  with pytest.raises(ValueError, match=text) as error:
    recommend(**wrong)
  assert 'Received' in str(error.value)


def test_a_model_that_mixes_examples_is_refused():
  model = keras.Sequential([
      layers.Input([12]), layers.BatchNormalization(), layers.Dense(1, activation='sigmoid')])
  with pytest.raises(tfdp.PrivacyError):
    recommend(model)


def test_public_examples_among_the_private_ones_are_named(found):
  x, y = examples(200, 1)
  x[7], x[9] = examples(100, 0)[0][[3, 55]]
  for data in ((x, y), (x.astype('float64'), y), (x.tolist(), y.tolist())):
    with pytest.raises(ValueError, match=r'2 public examples .* \[3, 55\]'):
      found.plan.batches(data)


@pytest.mark.parametrize('clean, text', [
    (.55, 'about 1.4e+03 examples'), (.65, 'do not show that more private examples would help')])
def test_what_is_needed_is_told_from_the_folds_that_both_have_judged(clean, text):
  """The private setting has judged the harder fold alone, where the other loss is .6."""
  winner, private = settings_lib.Judged(), settings_lib.Judged()
  for judged, fold, loss in ((winner, 0, .2), (winner, 1, .6), (private, 1, .65)):
    judged.note((fold, 0), np.full(5, loss), 0.0, ())
  plan = tfdp.PrivacyPlan(population_size=1000, batch_size=100, steps=20, l2_norm_clip=1.0,
                          noise_multiplier=2.0, target_delta=1e-5)
  assert text in recommend_lib._needed(plan, search_lib.Final(private, clean), winner)


def test_without_public_examples_it_is_a_guess_that_says_so():
  one = tfdp.recommend(logistic(), gradient_norm=2.0, population_size=4000, target_epsilon=2.0)
  assert one.method == 'DPAdam' and one.plan.l2_norm_clip == 2.0 and not one.rows
  assert 'this is a guess' in str(one)
  assert (one.plan.steps, one.plan.batch_size) == (300, 400)
  optimizer = one.optimizer()
  assert float(optimizer.learning_rate) == pytest.approx(.17 / 300**.5, rel=.01)
  assert isinstance(one.model, tfdp.DPModel)


@pytest.mark.thorough
def test_tokens_and_several_inputs_are_tried_as_given():
  a, b = keras.Input([3]), keras.Input([2], dtype='int32')
  tokens = layers.Flatten()(layers.Embedding(5, 2)(b))
  model = keras.Model([a, b], layers.Dense(1)(layers.Concatenate()([a, tokens])))
  rng = np.random.default_rng(0)
  x = [rng.normal(size=[40, 3]).astype('f'), rng.integers(5, size=[40, 2])]
  one = recommend(model, (x, x[0][:, :1] + x[1][:, :1]), loss='mse', metrics=(), steps=10)
  assert not any('inputs' in row.name for row in one.rows)
  assert tf.convert_to_tensor(one.model([x[0][:2], x[1][:2]])).shape == (2, 1)


@pytest.mark.thorough
def test_a_frozen_base_is_computed_once_and_its_features_are_scaled(monkeypatch):
  keras.utils.set_random_seed(2)
  base = keras.Sequential([layers.Input([12]), layers.Dense(3, activation='tanh')])
  base.trainable = False
  entry = keras.Input([12])
  head = layers.Dense(1, activation='sigmoid')
  model = keras.Model(entry, head(base(entry)))
  x, y = examples(100, 0)
  seen = []
  all_of = experiment_lib.inputs_lib.all_of
  monkeypatch.setattr(experiment_lib.inputs_lib, 'all_of',
                      lambda x: seen.append(x.shape[1:]) or all_of(x))
  one = recommend(model, (x / UNITS, y), steps=20)
  assert set(seen) == {(3,)}
  found = one.model
  assert {id(v) for v in found.trainable_variables} == {id(v) for v in head.trainable_variables}
  kinds = [type(layer).__name__ for layer in found.layers]
  assert 'scale' not in str(one.reasons[0]) or kinds.index('Normalization') > 0
  assert found(x[:3] / UNITS).shape == (3, 1)
