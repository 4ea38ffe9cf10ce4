# SPDX-License-Identifier: Apache-2.0
"""What Keras users do every day works as in Keras, or says in one sentence what to do."""

import inspect
import pickle
import subprocess
import sys
import warnings

import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.clipping import losses
from tfdp_adaptive.keras import fit as fit_lib

keras, layers = compat.keras, compat.keras.layers
N = 16
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 4)).astype('float32')
Y = RNG.integers(0, 2, size=N).astype('int32')
CROSSENTROPY = 'sparse_categorical_crossentropy'


def make_plan(**changes):
  return tfdp.PrivacyPlan(**{**dict(
      population_size=N, batch_size=8, steps=2, l2_norm_clip=1.0, noise_multiplier=1.0,
      target_delta=1e-3), **changes})


def make_optimizer(**changes):
  return tfdp.DPSGD(0.1, **{**dict(l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=8),
                            **changes})


def unbuilt():
  return keras.Sequential([layers.Dense(3), layers.Dense(2, activation='softmax')])


def built():
  return tfdp.make_private(keras.Sequential([
      layers.Input([4]), layers.Dense(3), layers.Dense(2, activation='softmax')]))


class TwoHeads(keras.Model):

  def __init__(self):
    super().__init__()
    self.a, self.b = layers.Dense(2, activation='softmax'), layers.Dense(1)

  def call(self, x):
    return {'kind': self.a(x), 'size': self.b(x)}


def test_subclassed_model_with_losses_for_some_outputs_by_position():
  """Unbuilt, wrapped, outputs and targets in dicts, arguments of `fit` and `compile` in place."""
  model = tfdp.make_private(TwoHeads())
  with pytest.raises(ValueError, match='not built. Call it once'):
    tfdp.explain_clipping(model)
  metrics = [{'kind': ['accuracy']}]
  if 'loss_weights' == list(inspect.signature(keras.Model.compile).parameters)[3]:
    metrics = [None, *metrics]  # In Keras 3.
  model.compile(make_optimizer(), {'kind': CROSSENTROPY}, *metrics)
  with pytest.warns(tfdp.Caution, match='No gradient of the loss reaches 2 of the weights'):
    history = model.fit(X, {'kind': Y}, 8, 1, 0)
  assert model.optimizer.steps_done == 2 and 'loss' in history.history
  model.optimizer.learning_rate = float('inf')
  with pytest.warns(UserWarning, match='Training has diverged and was stopped: the weights are'):
    model.fit(X, {'kind': Y}, 8, 5, 0)
  assert model.optimizer.steps_done == 4  # At the end of its first epoch.
  assert 'a' in str(tfdp.explain_clipping(model)) and tfdp.explain_clipping(model).batch_size == 8


def test_unbuilt_sequential_under_a_plan_with_class_weights_and_no_alarm():
  plan = make_plan()
  model = tfdp.make_private(unbuilt())
  model.compile(tfdp.DPSGD(0.1, plan=plan), CROSSENTROPY)
  with warnings.catch_warnings():
    warnings.filterwarnings('error', message='.*shuffle')
    model.fit(plan.batches((X, Y)), epochs=2, steps_per_epoch=1, class_weight={1: 3.0}, verbose=0)
  assert model.optimizer.steps_done == 2
  assert model.ledger.epsilon() == plan.epsilon()  # Spent, one call away.


@pytest.mark.thorough
def test_strings_are_split_into_words_in_the_model():
  words = layers.TextVectorization(20, output_sequence_length=3)
  tfdp.estimates.adapt(words, ['a b c', 'd e f'], public='the alphabet')
  model = tfdp.make_private(keras.Sequential([
      layers.Input([], dtype='string'), words, layers.Embedding(20, 2),
      layers.GlobalAveragePooling1D(), layers.Dense(2, activation='softmax')]))
  plan = make_plan(steps=1)
  model.compile(tfdp.DPSGD(0.1, plan=plan), CROSSENTROPY)
  model.fit(plan.batches((np.array(['a b', 'c d e'] * 8, object), Y)), verbose=0)
  assert model.optimizer.steps_done == 1
  assert tfdp.explain_clipping(model).engine == 'bookkeeping'


class Batches(keras.utils.Sequence):

  def __len__(self):
    return 2

  def __getitem__(self, index):
    rows = slice(8 * index, 8 * index + 8)
    return X[rows], Y[rows, np.newaxis]


@pytest.mark.parametrize('kind', ['generator', 'sequence'])
def test_batches_from_python(kind):
  batches = Batches() if kind == 'sequence' else (Batches()[i] for i in range(2))
  model = built()
  model.compile(make_optimizer(), CROSSENTROPY)
  model.fit(batches, steps_per_epoch=2, verbose=0)
  assert model.optimizer.steps_done == 2


@pytest.mark.parametrize('adjust, weights', [
    (lambda y: y, {1: 3.0}), (lambda y: np.eye(2)[y], {0: 0.5}), (lambda y: y[:, None], {0: 0.0})])
def test_class_weights_are_those_of_the_labels(adjust, weights):
  plan = make_plan(sampling=tfdp.sampling.FixedOrder(shuffle_seed=None))
  batches = plan.batches((X, adjust(Y)))
  optimizer = tfdp.DPSGD(0.1, plan=plan)
  arguments = {'class_weight': weights}
  weighted = fit_lib.check_fit(optimizer, batches, None, arguments)
  assert 'class_weight' not in arguments  # Keras would refuse it.
  result = np.concatenate([w.weight for *_, w in weighted])
  np.testing.assert_array_equal(result, [np.float32(weights.get(int(y), 1)) for y in Y])


def test_class_weights_need_classes():
  plan = make_plan()
  for labels in ({'a': Y}, np.zeros([N, 2, 2])):
    with pytest.raises(ValueError, match='one class per example'):
      plan.batches((X, labels)).resumed(0, {1: 2.0})


OUTPUTS = {'kind': tf.constant(np.full([3, 2], .5, 'float32')),
           'size': tf.constant([[1.0], [2.0], [3.0]])}
TARGETS = {'kind': tf.constant([0, 1, 1]), 'size': tf.zeros([3, 1])}


@pytest.mark.parametrize('loss, weights, names, expected', [
    ({'size': 'mse', 'kind': CROSSENTROPY}, None, None, [np.log(2) + s for s in (1, 4, 9)]),
    ({'size': 'mse'}, None, None, [1, 4, 9]),
    ({'size': 'mse', 'kind': CROSSENTROPY}, {'kind': 0.0}, None, [1, 4, 9]),
    ({'dense': CROSSENTROPY, 'dense_1': 'mse'}, {'dense_1': 2.0}, ['dense', 'dense_1'],
     [np.log(2) + 2 * s for s in (1, 4, 9)]),
    ([None, 'mse'], None, None, [1, 4, 9])])
def test_losses_by_name(loss, weights, names, expected):
  """By the keys of the outputs, or by the names of the layers that made them."""
  values = losses.ExampleLoss(loss, weights, names)(TARGETS, OUTPUTS)
  np.testing.assert_allclose(values, expected, rtol=1e-6)


def test_targets_are_needed_for_outputs_with_a_loss_only():
  one = losses.ExampleLoss({'size': 'mse'})
  np.testing.assert_allclose(one({'size': TARGETS['size']}, OUTPUTS), [1, 4, 9], rtol=1e-6)
  for y in ({'kind': TARGETS['kind']}, None):
    with pytest.raises(ValueError, match='needs a target|one entry per model output'):
      one(y, OUTPUTS)
  with pytest.raises(ValueError, match=r"must name model outputs \['kind', 'size'\]"):
    losses.ExampleLoss({'other': 'mse'})(TARGETS, OUTPUTS)
  with pytest.raises(ValueError, match='Every example needs a target'):  # plan.batches(x) alone.
    losses.ExampleLoss('mse')(None, OUTPUTS['size'])


@pytest.mark.parametrize('name, action, words', [
    ('lr', lambda: make_optimizer(lr=.1), 'Use `learning_rate`'),
    ('decay', lambda: make_optimizer(decay=.1), 'Use a schedule'),
    ('h5', lambda: built().save('model.h5'), r"ends in '.keras'"),
    ('weights', lambda: built().save_weights('model.h5'), r"end(s)? in ['`].weights.h5"),
    ('ragged', lambda: built().fit(tf.ragged.constant([[1], [2, 3]]), Y[:2]), 'to_tensor'),
    ('sparse', lambda: built().fit(tf.sparse.from_dense(X), Y), 'to_dense'),
    ('two', lambda: make_plan().batches(X, Y), r'must be one argument: a tuple `\(x, y\)`'),
    ('list', lambda: make_plan().batches([X, Y]), r'are a tuple `\(x, y\)`'),
    ('weights of strings', lambda: built().compile(
        make_optimizer(), CROSSENTROPY, loss_weights=['accuracy']), 'pass `metrics=` by name'),
    ('twice', lambda: built().fit(X, Y, 8, batch_size=8), 'multiple values for argument .batch_s'),
    ('too many', lambda: built().fit(*range(40)), 'too many positional arguments')])
def test_says_in_one_sentence_what_to_do(name, action, words):
  del name
  with pytest.raises((ValueError, TypeError), match=words):
    action()


def test_other_folders_of_keras_2_are_refused(tmp_path):
  if compat.KERAS_3:
    pytest.skip('Keras 3 writes .keras alone.')
  for name in ('folder', 'model.hdf5'):
    with pytest.raises(ValueError, match='lose the ledger'):
      built().save(tmp_path / name)
  with pytest.raises(ValueError, match='lose the ledger'):
    built().save(tmp_path / 'm.keras', save_format='tf')


class Hits(keras.metrics.Mean):
  """Written as many are: for one number per example, and weights alike."""

  def update_state(self, y, outputs, sample_weight=None):
    hits = tf.cast(tf.reshape(y, [-1]) == tf.argmax(outputs, -1, tf.int32), tf.float32)
    self.total.assign_add(tf.reduce_sum(hits if sample_weight is None else hits * sample_weight))
    self.count.assign_add(float(len(Y)) / 2)


def test_metrics_get_no_weights_where_nothing_is_left_out():
  model = built()
  model.compile(make_optimizer(), CROSSENTROPY, metrics=[Hits('hits'), 'accuracy'])
  logs = model.fit(X, Y, batch_size=8, verbose=0).history
  assert 0 < logs['hits'][0] <= 1
  np.testing.assert_allclose(logs['hits'], logs['accuracy'], rtol=1e-6)


@pytest.mark.thorough
def test_a_layer_frozen_after_compile_is_not_trained():
  trained = []
  for late in (False, True):
    keras.utils.set_random_seed(0)
    model = built()
    model.layers[0].trainable = late
    with pytest.warns(UserWarning, match='NOT private'):
      model.compile(make_optimizer(noise_multiplier=0.0), CROSSENTROPY)
    model.layers[0].trainable = False
    before = model.layers[0].get_weights()
    if late and not compat.KERAS_3:
      _refuses_what_was_thawed_or_frozen(model, 'layers were frozen')
      assert model.optimizer.steps_done == 0
      break
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    for value, old in zip(model.layers[0].get_weights(), before):
      np.testing.assert_array_equal(value, old)
    trained.append(model.layers[1].get_weights())
  for one, other in zip(trained[0], trained[-1]):  # It took no part in the norms.
    np.testing.assert_array_equal(one, other)
  if compat.KERAS_3:
    model.layers[0].trainable = True
    _refuses_what_was_thawed_or_frozen(model, '4 variables, built for 2')


def _refuses_what_was_thawed_or_frozen(model, words):
  with pytest.raises(tfdp.PrivacyError, match=words):
    model.fit(X, Y, batch_size=8, verbose=0)
  with pytest.raises(tfdp.PrivacyError, match=words):
    model.train_on_batch(X[:8], Y[:8])


@pytest.mark.parametrize('optimizer', [True, False])
def test_functions_of_keras_write_no_legacy_format_either(optimizer, tmp_path):
  """They do not call the model's own `save`."""
  class Functional(tfdp.DPModel, keras.Model):
    pass

  class Configured(Functional):
    def get_config(self):
      return super().get_config()

  wrapped = tfdp.DPWrapper(keras.Sequential(built().layers))
  whole = ['model.h5'] + ['folder'] * (not compat.KERAS_3)
  like = built()
  for model, names in ((built(), whole), (wrapped, ['model.h5']),
                       (Functional(like.inputs, like.outputs), whole),
                       (Configured(like.inputs, like.outputs), whole)):
    model.compile(make_optimizer(), CROSSENTROPY)
    for name in names:
      refused = "lose the ledger.*ends in '.keras'|does not work for subclassed models"
      with pytest.raises((ValueError, NotImplementedError), match=refused):
        keras.models.save_model(model, str(tmp_path / name), include_optimizer=optimizer)
  keras.models.save_model(built(), str(tmp_path / 'model.keras'))
  assert keras.models.load_model(tmp_path / 'model.keras').count_params()


def test_a_sequential_model_keeps_its_inputs():
  layers = keras.layers
  model = keras.Sequential([
      layers.Input([5, 3], dtype='int32'), layers.Embedding(7, 2), layers.Reshape([5, 6])])
  private = tfdp.make_private(model)
  assert private.input_shape == (None, 5, 3) and private.output_shape == (None, 5, 6)
  x = np.arange(30).reshape(2, 5, 3) % 7
  np.testing.assert_array_equal(private(x), model(x))


@pytest.mark.thorough
def test_a_functional_model_keeps_its_structure():
  """Of outputs, by keys that are not the layers' names, and of inputs."""
  a, b = keras.Input([4], name='left'), keras.Input([4], name='right')
  hidden = layers.Dense(3)(layers.add([a, b]))
  kind, size = layers.Dense(2, activation='softmax')(hidden), layers.Dense(1)(hidden)
  x = {'left': X, 'right': 2 * X}
  for outputs in ({'kind': kind, 'size': [size]}, [kind], [[size], (kind,)]):
    plain = keras.Model({'left': a, 'right': b}, outputs)
    model = tfdp.make_private(plain)
    tf.nest.assert_same_structure(model(x), plain(x))
    for one, other in zip(tf.nest.flatten(model(x)), tf.nest.flatten(plain(x))):
      np.testing.assert_array_equal(one, other)
  plan = make_plan()
  model = tfdp.make_private(keras.Model({'left': a, 'right': b}, {'kind': kind, 'size': size}))
  model.compile(tfdp.DPSGD(0.1, plan=plan), {'kind': CROSSENTROPY, 'size': 'mse'},
                metrics={'kind': ['accuracy']})
  logs = model.fit(plan.batches((x, {'kind': Y, 'size': X[:, :1]})), verbose=0).history
  assert any('accuracy' in name for name in logs)
  assert sorted(model.predict(x, verbose=0)) == ['kind', 'size']


def functional():
  x = keras.Input([4])
  return tfdp.make_private(keras.Model(x, layers.Dense(2)(x)))


@pytest.mark.parametrize('make', [built, functional])
def test_copies_are_private(make):
  model = make()
  for copy in (keras.models.model_from_json(model.to_json(indent=1)),
               type(model).from_config(model.get_config()), tfdp.fix_model(model),
               pickle.loads(pickle.dumps(model))):
    assert type(copy) is type(model)
    assert [v.shape for v in copy.weights] == [v.shape for v in model.weights]


@pytest.mark.pitfall(
    '`keras.models.clone_model` makes a plain Sequential of a private one, which trains '
    'without privacy.',
    severity='critical', stops='the copy is private, too')
@pytest.mark.parametrize('compiled', [True, False])
def test_clones_are_private(compiled):
  for model in (built(), functional()):
    if compiled:
      model.compile(make_optimizer(), CROSSENTROPY)
    for copy in (keras.models.clone_model(model),
                 keras.models.clone_model(model, clone_function=lambda layer: type(
                     layer).from_config(layer.get_config()))):
      assert isinstance(copy, type(model)) and copy is not model
      assert not {id(v) for v in copy.weights} & {id(v) for v in model.weights}
      with pytest.raises(ValueError, match='needs a private optimizer'):
        copy.compile('sgd', CROSSENTROPY)
  plain = keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])
  assert type(keras.models.clone_model(plain)) is keras.Sequential


class Ignores(keras.metrics.Metric):

  def __init__(self, name='ignores'):
    super().__init__(name=name)
    self.total = self.add_weight(name='total', initializer='zeros')

  def update_state(self, y, outputs, sample_weight=None):
    del sample_weight
    self.total.assign_add(tf.cast(tf.shape(y)[0], tf.float32))

  def result(self):
    return self.total


class Overrides(tfdp.DPSequential):

  def compute_metrics(self, x, y, y_pred, sample_weight=None):
    return {'half': 0.5}


@pytest.mark.pitfall(
    "A custom metric counts the padding in a plan's batches.",
    severity='medium', stops='a warning names the custom metrics')
def test_metrics_that_count_padding_are_warned_of():
  optimizer = lambda: tfdp.DPSGD(0.1, plan=make_plan())
  for metrics in ([Ignores()], {'dense': ['accuracy', Ignores()]}):
    with pytest.warns(UserWarning, match='Ignores: under a plan, batches are padded'):
      built().compile(optimizer(), CROSSENTROPY, metrics=metrics)
  with pytest.warns(UserWarning, match='compute_metrics: under a plan,'):
    Overrides([keras.Input([3]), keras.layers.Dense(2)]).compile(optimizer(), CROSSENTROPY)
  with warnings.catch_warnings():
    warnings.simplefilter('error', UserWarning)
    built().compile(make_optimizer(), CROSSENTROPY, metrics=[Ignores()])  # No padding.
    built().compile(optimizer(), CROSSENTROPY, metrics=[
        'accuracy', lambda y, outputs: outputs, keras.metrics.AUC(),
        keras.metrics.MeanIoU(2), keras.metrics.SparseTopKCategoricalAccuracy()])


def test_layers_frozen_or_thawed_after_the_first_step_want_a_new_optimizer():
  model = built()
  model.compile(make_optimizer(), CROSSENTROPY)
  model.optimizer.build(model.trainable_variables[:2])  # As when the others were frozen.
  with pytest.raises(tfdp.PrivacyError, match='Compile again with a new optimizer'):
    model.fit(X, Y, batch_size=8, verbose=0)
  with pytest.raises(tfdp.PrivacyError, match='4 variables, built for 2'):
    model.train_on_batch(X[:8], Y[:8])
  model.compile(make_optimizer(), CROSSENTROPY)
  model.make_train_function()


def test_epochs_that_are_too_many_are_told_their_steps():
  plan = make_plan(steps=7)
  with pytest.raises(tfdp.PrivacyError, match='such as steps_per_epoch=2, or plan more'):
    fit_lib.check_fit(tfdp.DPSGD(0.1, plan=plan), plan.batches((X, Y)), None, {'epochs': 3})


@pytest.mark.parametrize('fields, steps', [
    (dict(), 5), (dict(batch_size=7), 5), (dict(batch_size=16), 3),
    (dict(population_size=10_000, batch_size=256, steps=tfdp.sampling.Epochs(10)), 390),
    (dict(population_size=10_000, batch_size=240, steps=tfdp.sampling.Epochs(10)), 420),
    (dict(batch_size=7, sampling=tfdp.sampling.FixedOrder()), 8),
    (dict(population_size=None, adjacency='add_remove', batch_size=8,
          sampling=tfdp.sampling.Poisson(sampling_probability=.25)), 10)])
def test_steps_in_epochs(fields, steps):
  plan = make_plan(**{**dict(steps=tfdp.sampling.Epochs(2.5)), **fields})
  assert plan.steps == steps and type(plan.steps) is int
  assert tfdp.PrivacyPlan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize('fields, size', [
    (dict(target_delta=.1), 'N = 16'),
    (dict(target_delta=.03, population_size=None, adjacency='add_remove',
          sampling=tfdp.sampling.Poisson(sampling_probability=.1)), 'about N = 80')])
def test_a_delta_far_above_one_over_the_records_is_warned_of(fields, size):
  with pytest.warns(UserWarning, match=f'well below 1/N.*{size} records'):
    make_plan(**fields)


@pytest.mark.thorough
def test_a_delta_is_warned_of_once():
  code = ('import tfdp_adaptive as tfdp\n'
          'for size in (100, 100, 100):\n'
          '  plan = tfdp.PrivacyPlan.calibrate(\n'
          '      target_epsilon=2, target_delta=.05, population_size=size, batch_size=10,\n'
          '      steps=3, l2_norm_clip=1.0)\n'
          'tfdp.PrivacyPlan.from_json(plan.to_json())')
  done = subprocess.run([sys.executable, '-c', code], check=True, stdin=subprocess.DEVNULL,
                        capture_output=True, text=True)
  assert done.stderr.count('should be well below 1/N') == 1
