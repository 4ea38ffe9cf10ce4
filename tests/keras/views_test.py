# SPDX-License-Identifier: Apache-2.0
"""Several views of an example: the mean of their gradients is clipped once, and is one record."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.batches import sources
from tfdp_adaptive.batches import tags
from tfdp_adaptive.clipping import chunks
from tfdp_adaptive.clipping import engines
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.keras import fixed_part
from tfdp_adaptive.report import card_json

keras = compat.keras
N, D, CLIP, RATE = 24, 3, 0.7, 0.5
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, D)).astype(np.float32)
Y = RNG.normal(size=(N, 1)).astype(np.float32)
IDS = np.arange(N) % 8
OF_USERS = dict(unit='user', population_size=8, batch_size=4)
ENGINES = ('bookkeeping', 'layered', 'materialized', 'loop')


def make_plan(**changes):
  return tfdp.PrivacyPlan(**{**dict(
      population_size=N, batch_size=8, steps=4, l2_norm_clip=CLIP, noise_multiplier=1e-7,
      target_delta=1e-3, seed=4), **changes})


def make_model(plan, layers=(), views=1, performance=None, **arguments):
  keras.utils.set_random_seed(1)
  model = tfdp.DPSequential([keras.Input([D]), *layers, keras.layers.Dense(1)])
  optimizer = tfdp.DPSGD(RATE, plan=plan, seed=2, performance=performance)
  model.compile(optimizer, loss='mse', views=views, **arguments)
  return model


def noisy(rng, scale=1.0):
  """An augmentation of NumPy."""

  def augment(x, y):
    return x + scale * rng.normal(size=x.shape), y + 0.1 * rng.normal()

  return augment


def gradients(weights, x, y):
  """[..., D + 1] gradients of (x w + b - y)^2."""
  error = x @ weights[0] + weights[1] - y
  return np.concatenate([2 * x * error, 2 * error], -1)


def step_of_oracle(weights, means, batch_size=8):
  """The weights after a step on records whose mean gradients are [n, D + 1]."""
  clipped = means * np.minimum(1, CLIP / np.linalg.norm(means, axis=-1, keepdims=True))
  moved = RATE * clipped.sum(0) / batch_size
  return [weights[0] - moved[:D, np.newaxis], weights[1] - moved[D:]]


def close(model, expected, tolerance=1e-6):
  for value, other in zip(model.get_weights(), expected):
    np.testing.assert_allclose(value, other, rtol=tolerance, atol=tolerance)


@pytest.mark.thorough(but=['bookkeeping'])
@pytest.mark.parametrize('engine', ENGINES)
def test_the_mean_of_the_views_is_clipped(engine):
  plan = make_plan()
  model = make_model(plan, performance=tfdp.Performance(engine=engine))
  batches = plan.batches((X, Y), augment=noisy(np.random.default_rng(1)), views=3)
  x, y, weight = next(iter(batches))
  assert x.shape[1:] == (3, D) and weight.tag.shape[1] == 3
  used = np.asarray(weight.weight)[:, 0] > 0
  weights = model.get_weights()
  model.train_on_batch(x, y, weight)
  means = gradients(weights, np.asarray(x, float), np.asarray(y, float)).mean(1)[used]
  assert len(means) > 3 and (np.linalg.norm(means, axis=-1) > CLIP).any()
  close(model, step_of_oracle(weights, means))


@pytest.mark.thorough(but=['mean'])
@pytest.mark.parametrize('record', ['mean', 'sum'])
def test_users_with_views(record):
  plan = make_plan(**OF_USERS)
  model = make_model(plan)
  batches = plan.batches((X, Y), users=IDS, examples_per_user=2, record=record,
                         augment=noisy(np.random.default_rng(1)), views=3)
  x, y, weight = next(iter(batches))
  assert x.shape[1:] == (6, D) and weight.tag.shape[1] == 3
  used = np.asarray(weight.weight)[:, 0] > 0
  weights = model.get_weights()
  model.train_on_batch(x, y, weight)
  every = gradients(weights, np.asarray(x, float), np.asarray(y, float))[used]
  close(model, step_of_oracle(weights, every.mean(1) * (2 if record == 'sum' else 1), 4))
  assert model.ledger.entries[0].examples_per_user == 2


WAYS = {
    'chunks': dict(performance=tfdp.Performance(accumulation_steps=3)),
    'budget': dict(performance=tfdp.Performance(memory_budget=20_000)),
    'XLA': dict(jit_compile=True), 'eager': dict(run_eagerly=True), 'plain': {}}


def trained(plan, data, views=1, augment=None, copies=1, users=None, **arguments):
  model = make_model(plan, views=views, metrics=['mae'], **arguments)
  history = model.fit(plan.batches(data, augment=augment, views=copies, **(users or {})),
                      verbose=0)
  return [*model.get_weights(), *history.history['loss'], *history.history['mae']]


@pytest.mark.thorough(but=['example-chunks'])
@pytest.mark.parametrize('way', WAYS)
@pytest.mark.parametrize('unit', ['example', pytest.param('user', marks=pytest.mark.slow)])
def test_equal_views_are_the_plain_step(way, unit):
  users = dict(users=IDS, examples_per_user=2) if unit == 'user' else {}
  plan = make_plan(**(OF_USERS if users else {}))
  plain = trained(plan, (X, Y), users=users)
  repeated = trained(plan, (X, Y), 3, users=users, **WAYS[way])
  drawn = trained(plan, (X, Y), 2, lambda x, y: (x, y), 3, users, **WAYS[way])
  for one, other in ((plain, repeated), (plain, drawn)):
    for left, right in zip(one, other):
      np.testing.assert_allclose(left, right, rtol=2e-5, atol=2e-6)


def test_layers_of_the_model_draw_anew_for_each_view():
  """The gradient of a weight counts the views in which dropout kept its input."""
  plan, views = make_plan(batch_size=N, steps=1, l2_norm_clip=1e6, noise_multiplier=1e-12,
                          sampling=tfdp.sampling.FixedOrder()), 8
  model = tfdp.DPSequential([
      keras.Input([50]), keras.layers.Dropout(0.5), keras.layers.Dense(1, use_bias=False)])
  model.compile(tfdp.DPSGD(1.0, plan=plan), loss=lambda y, out: out[:, 0], views=views)
  before = model.get_weights()[0]
  x = np.arange(N, dtype=np.float32)[:, None] * np.full(50, 1e-9, np.float32)
  x[0] = 1
  model.fit(plan.batches((x, Y)), verbose=0)
  kept = (before - model.get_weights()[0])[:, 0] * N * views / 2
  np.testing.assert_allclose(kept, kept.round(), atol=1e-3)
  # Binomial(8, 1/2) for each of 50 weights. The same draw for all views would give 0 or 8.
  assert 4 - 6 * np.sqrt(2 / 50) < kept.mean() < 4 + 6 * np.sqrt(2 / 50) and len(set(
      kept.round())) > 3


class Seen(keras.layers.Layer):
  """Notes the rows that it is called with in eager steps; draws in vain on demand."""

  def __init__(self, draws=False, **kwargs):
    super().__init__(**kwargs)
    self.draws, self.rows = draws, []

  def call(self, inputs):
    if tf.executing_eagerly() and not tf.is_symbolic_tensor(inputs):
      self.rows.append(inputs.shape[0])
    return inputs + 0 * tf.random.uniform(tf.shape(inputs)) if self.draws else inputs


FIXED = {
    'fixed': lambda x, seen, draw: draw(keras.layers.Dense(5, 'tanh', trainable=False)(seen(x))),
    'weights that train': lambda x, seen, draw: draw(seen(keras.layers.Dense(5, 'tanh')(x))),
    'draws': lambda x, seen, draw: keras.layers.Dense(5, trainable=False)(seen(draw(x))),
    'read again': lambda x, seen, draw: keras.layers.Concatenate()([draw(seen(x)), x])}


@pytest.mark.parametrize('kind', FIXED)
@pytest.mark.parametrize('users', [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_comes_before_the_random_layers_runs_once_for_all_views(kind, users):
  """Views that are all the same: the plain step, though layers see fewer rows."""
  found = {}
  plan = make_plan(steps=2, **(OF_USERS if users else {}))
  of_users = dict(users=IDS, examples_per_user=2) if users else {}
  for views in (1, 3):
    keras.utils.set_random_seed(1)
    seen, inputs = Seen(), keras.Input([D])
    hidden = FIXED[kind](inputs, seen, Seen(draws=True))
    model = tfdp.DPFunctional(inputs, keras.layers.Dense(1)(hidden))
    model.compile(tfdp.DPSGD(RATE, plan=plan, seed=2), loss='mse', views=views,
                  run_eagerly=True)
    model.fit(plan.batches((X, Y), **of_users), verbose=0)
    found[views] = max(seen.rows), model.get_weights()
  assert found[3][0] == found[1][0] * (1 if kind == 'fixed' else 3)
  close(model, found[1][1])


@pytest.mark.thorough(but=['chunks'])
@pytest.mark.parametrize('way', ['chunks', 'budget', 'XLA'])
def test_a_frozen_base_runs_once_in_a_sequential_model(way):
  plan, found = make_plan(steps=2), {}
  for views in (1, 3):
    keras.utils.set_random_seed(1)
    inputs = keras.Input([D])
    base = keras.Model(inputs, keras.layers.Dense(5, 'tanh')(inputs))
    base.trainable = False
    model = make_model(plan, [base, keras.layers.Flatten(), Seen(draws=True)], views, **WAYS[way])
    model.fit(plan.batches((X, Y)), verbose=0)
    found[views] = model.get_weights()
  parts = fixed_part.of(model)
  assert parts.fixed.output_shape == (None, 5) and not parts.fixed.trainable_weights
  np.testing.assert_array_equal(parts.rest(parts.fixed(X)), model(X))
  close(model, found[1])


@pytest.mark.parametrize('first,shape', [
    ([keras.layers.Masking()], None), ([keras.layers.Dropout(0.5)], None),
    ([keras.layers.Flatten(), keras.layers.Embedding(9, 4, trainable=False)], (None, 2 * D))],
                         ids=['mask', 'draws', 'looks up'])
def test_the_fixed_part_ends_before(first, shape):
  layers = [keras.Input([D, 2]), *first, keras.layers.Dropout(0.5), keras.layers.Dense(1)]
  for make in tfdp.DPSequential, lambda layers: tfdp.make_private(keras.Sequential(layers)):
    parts = fixed_part.of(make(layers))
    assert (parts and parts.fixed.output_shape) == shape


@pytest.mark.thorough
def test_one_example_moves_the_sum_by_one_clip_norm_whatever_its_views():
  plan = make_plan()
  model = make_model(plan)
  model.optimizer.build(model.trainable_variables)
  loss = model.prepare_step(tf.constant(X[:2]))
  request = model.optimizer.private.query(model.optimizer.read_state(), ())
  engine = chunks.over_views(engines.choose('bookkeeping', model, request.asks, X), 2)

  @tf.function
  def total(x, y, mask):
    examples = tf.repeat(mask[:, None], 3, axis=1)
    batch = interface.Batch(x, y, tf.cast(examples, tf.float32) / 3, mask, examples)
    return tf.concat([tf.reshape(t, [-1]) for t in engine(
        model, loss, batch, request).sums[0].total], 0)

  rng, largest = np.random.default_rng(3), 0
  x, y = rng.normal(size=(4, 3, D)), rng.normal(size=(4, 3, 1))
  for _ in range(60):
    x[0], y[0] = rng.normal(size=(3, D)) * 10**rng.uniform(-3, 4), rng.normal(size=(3, 1))
    both = [np.asarray(total(x.astype(np.float32), y.astype(np.float32), tf.constant(mask)))
            for mask in ([True] * 4, [False] + [True] * 3)]
    largest = max(largest, np.linalg.norm(both[0] - both[1]))
  assert 0.99 * CLIP < largest < CLIP * (1 + 1e-5)


class Records:
  """A source of one's own, read by number."""

  def __len__(self):
    return N

  def __getitem__(self, place):
    return X[place], Y[place]


class Batches(keras.utils.Sequence):

  def __len__(self):
    return N // 6

  def __getitem__(self, number):
    return X[6 * number:6 * number + 6], Y[6 * number:6 * number + 6]


KINDS = {'arrays': lambda: (X, Y), 'records': Records, 'Sequence': Batches,
         'tf.data': lambda: tf.data.Dataset.from_tensor_slices((X, Y)),
         'weights': lambda: (X, Y, np.full(N, 2, np.float32))}


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('function', ['NumPy', 'TensorFlow'])
def test_views_are_drawn_anew_at_every_reading_of_any_data(kind, function):
  plan = make_plan(sampling=tfdp.sampling.FixedOrder(shuffle_seed=None), steps=6)
  of_tf = lambda example: (example[0] + tf.random.uniform([D]), example[1])
  augment = of_tf if function == 'TensorFlow' else noisy(np.random.default_rng(1), 0.1)
  batches = plan.batches(KINDS[kind](), augment=augment, views=2)
  seen = []
  for step, (x, y, (weight, tag)) in enumerate(batches.as_numpy_iterator()):
    rows = np.arange(8) + 8 * (step % 3)
    assert x.shape == (8, 2, D) and y.shape == (8, 2, 1) and x.dtype == np.float32
    assert np.abs(x - X[rows][:, None]).max() < 1.1 and np.abs(y - Y[rows][:, None]).max() < 1
    np.testing.assert_array_equal(weight, (1 if kind == 'weights' else 0.5))
    np.testing.assert_array_equal(tag, tags.of_rows(plan, step, 8)[:, None].repeat(2, 1))
    seen += [tuple(view) for one in x for view in one]
  assert len(set(seen)) == len(seen) == 96


def test_inputs_alone_and_nests_of_them():
  plan = make_plan(sampling=tfdp.sampling.FixedOrder(shuffle_seed=None))
  x, y, weight = next(iter(plan.batches(X, augment=lambda x: x[::-1], views=1)))
  assert y is None and weight.tag.shape == (8, 1)
  np.testing.assert_array_equal(x[:, 0], X[:8, ::-1])
  words = np.array([f'word {i}' for i in range(N)])
  (nest, y, _), *_ = plan.batches(
      ({'a': words, 'b': X}, Y), augment=lambda x, y: ({**x, 'a': x['a'] + ' more'}, y), views=2)
  np.testing.assert_array_equal(nest['b'], X[:8][:, None].repeat(2, 1))
  assert nest['a'].numpy().tolist() == [[f'word {i} more'.encode()] * 2 for i in range(8)]


def test_a_function_may_work_in_place():
  def augment(x, y):
    x += 1
    return x, y

  plan = make_plan(sampling=tfdp.sampling.FixedOrder(shuffle_seed=None))
  x, *_ = next(iter(plan.batches((X, Y), augment=augment, views=3)))
  np.testing.assert_array_equal(x, X[:8, None].repeat(3, 1) + 1)


def test_a_loop_of_ones_own_says_who_drew_the_views():
  plan = make_plan(steps=3)
  model = make_model(plan)
  for x, y, weight in plan.batches((X, Y), augment=noisy(RNG), views=2):
    model.train_on_batch(x, y, sample_weight=weight)
  assert 'Views of an example are drawn by `augment`' in model.ledger.statement()


class Cached(sources.Source):
  """Features of two views of each record, as `tfdp.features` stores them."""

  views = 2

  def __init__(self):
    x = np.stack([X, -X], 1)
    super().__init__(N, (sources.spec(x), sources.spec(Y)), lambda i: (x[i], Y[i]), True)


def test_views_that_are_stored():
  plan = make_plan()
  model, same = make_model(plan), make_model(plan)
  batches = plan.batches(Cached())
  weights = model.get_weights()
  x, y, weight = next(iter(batches))
  used = np.asarray(weight.weight)[:, 0] > 0
  means = gradients(weights, np.asarray(x, float), np.asarray(y, float)).mean(1)[used]
  model.train_on_batch(x, y, weight)
  close(model, step_of_oracle(weights, means))
  same.fit(batches, steps_per_epoch=1, verbose=0)
  close(same, model.get_weights())
  for arguments in (dict(views=3), dict(augment=lambda x, y: (x, y), views=2)):
    with pytest.raises(ValueError, match='hold 2 views of each example'):
      plan.batches(Cached(), **arguments)


def test_views_of_frozen_features():
  rng = np.random.default_rng(0)
  found = tfdp.features(
      lambda x: x + rng.normal(size=x.shape).astype(np.float32), (X, Y), views=3, name='noise 1')
  assert found.x.shape == (N, 3, D)
  model = make_model(make_plan())
  model.fit(make_plan().batches(found), verbose=0)
  assert 'the mean over 3 views' in str(model.ledger.entries[0].notes)


KEPT = []


def keeps_the_last(x, y):
  KEPT.append(x)
  return 0.5 * x + 0.5 * KEPT[-2 if len(KEPT) > 1 else -1], y


@pytest.mark.pitfall(
    'A function that augments an example reads other examples (mixup, CutMix).',
    severity='critical',
    stops='PrivacyError if the function holds arrays, before or after its first call')
def test_what_mixes_examples_is_refused():
  mixed = lambda x, y: (0.5 * x + 0.5 * X[3], y)
  bank = keras.layers.Embedding(N, D)
  bank(np.arange(N))
  bank.set_weights([X])
  looked_up = lambda x, y: (0.5 * x + 0.5 * np.asarray(bank(np.array(3))), y)
  for augment in (mixed, keeps_the_last, looked_up):
    with pytest.raises(tfdp.PrivacyError, match=r'holds arrays of shapes \[\((24, )?3'):
      make_plan().batches((X, Y), augment=augment, views=2)
  flip = keras.layers.RandomFlip('horizontal')
  images = np.zeros([N, 4, 4, 1], np.float32) + np.arange(N)[:, None, None, None]
  make_plan().batches((images, Y), augment=lambda x, y: (flip(x, training=True), y), views=2)


@pytest.mark.parametrize('augment, views', [
    (lambda x, y: (x[:2], y), 2), (lambda x, y: x, 2), (lambda x, y: (x, y, 1.0), 2),
    (lambda x, y: (x[:1], y), 2), (lambda x, y: (x.mean(), y), 2),  # NumPy would spread these.
    (lambda x, y: ({'x': x}, y), 2), (lambda x, y: (x + 1j, y), 2),
    (lambda x, y: (None, y), 2)])
def test_a_view_that_is_no_example_like_its_own_is_refused(augment, views):
  with pytest.raises(ValueError, match='`augment` must return one view of the example') as error:
    make_plan().batches((X, Y), augment=augment, views=views)
  said = f'{error.value} {error.value.__cause__}'
  assert not any(f'{value:.3f}'[:5] in said for value in X[0])  # No record's value.


def test_a_view_that_differs_later_trains_nothing():
  plan = make_plan(steps=3)
  sizes = iter([D] * 9 + [D - 1] * 1000)
  model = make_model(plan)
  before = model.get_weights()
  with pytest.raises(Exception, match='one view of the example'):
    model.fit(plan.batches((X, Y), augment=lambda x, y: (x[:next(sizes)], y), views=2), verbose=0)
  close(model, before, 0)
  assert model.optimizer.steps_done == 0


@pytest.mark.parametrize('arguments, message', [
    (dict(views=2), 'needs a function that draws them'),
    (dict(augment=lambda x: x, views=0), '`views` must be a positive integer'),
    (dict(augment=lambda x: x, views=1.5), '`views` must be a positive integer'),
    (dict(augment='flip', views=2), '`augment` must be a function')])
def test_arguments(arguments, message):
  with pytest.raises(ValueError, match=message):
    make_plan().batches((X, Y), **arguments)


@pytest.mark.parametrize('views', [0, -1, 1.5, 'two', None])
def test_views_of_compile_are_a_positive_integer(views):
  with pytest.raises(ValueError, match='`views` must be a positive integer'):
    make_model(make_plan(), views=views)


@pytest.mark.pitfall(
    'Data that are read only once are declared to change between readings.',
    severity='high', stops='ValueError that names `augment=`')
@pytest.mark.parametrize('kind', ['tf.data', 'arrays'])
def test_data_that_are_read_once_do_not_change(kind):
  with pytest.raises(ValueError, match=r'read anew at every step.*augment=f\)'):
    make_plan().batches(KINDS[kind](), changing='random crops')
  make_plan().batches(Records(), changing='random crops')


@pytest.mark.pitfall(
    'Views of an example are called users, or count as several records.',
    severity='high', stops='the unit stays the example in ledger, statement and card')
def test_ledger_statement_and_card_say_example():
  plan = make_plan(noise_multiplier=1.0)
  model = make_model(plan, views=3)
  crop = noisy(np.random.default_rng(0))
  model.fit(plan.batches((X, Y), augment=crop, views=2), verbose=0)
  plain = make_model(plan)
  plain.fit(plan.batches((X, Y)), verbose=0)
  assert model.ledger.epsilon() == plain.ledger.epsilon()
  entry, other = model.ledger.entries[0], plain.ledger.entries[0]
  assert entry.plan.unit == 'example' and not entry.examples_per_user
  assert dataclasses.replace(entry, notes=(), run='') == dataclasses.replace(
      other, notes=(), run='')
  for text in (model.ledger.statement(), card_json.to_json(model.privacy_card())):
    assert 'the mean over 6 views' in text and 'drawn by `augment`' in text
  assert 'views' not in plain.ledger.statement()


@pytest.mark.thorough
def test_a_run_goes_on_with_its_views_after_it_was_saved(tmp_path):
  plan = make_plan()
  turned = lambda x, y: (x[::-1], y)
  whole, first = make_model(plan, views=2), make_model(plan, views=2)
  whole.fit(plan.batches((X, Y), augment=turned, views=2), verbose=0)
  first.fit(plan.batches((X, Y), augment=turned, views=2), steps_per_epoch=2, verbose=0)
  first.save(str(tmp_path / 'model.keras'))
  second = keras.models.load_model(str(tmp_path / 'model.keras'))
  assert second.example_views == 2 and second.optimizer.steps_done == 2
  second.fit(plan.batches((X, Y), augment=turned, views=2, start_step=2), verbose=0)
  close(second, whole.get_weights(), 1e-5)
  assert 'the mean over 4 views' in str(second.ledger.entries[0].notes)


_REPLICAS = '''
import numpy as np
import tensorflow as tf
devices = tf.config.list_physical_devices('CPU')
tf.config.set_logical_device_configuration(devices[0], [tf.config.LogicalDeviceConfiguration()] * 2)
import sys
sys.path[:0] = ['tests/keras']
import views_test as test
turned = lambda x, y: (2 * x, y)
weights = []
for strategy in (tf.distribute.get_strategy(),
                 tf.distribute.MirroredStrategy(['/cpu:0', '/cpu:1'])):
  for users in ({}, dict(users=test.IDS, examples_per_user=2)):
    plan = test.make_plan(**(test.OF_USERS if users else {}))
    with strategy.scope():
      model = test.make_model(plan, views=2)
    model.fit(plan.batches((test.X, test.Y), augment=turned, views=3, **users), verbose=0)
    assert 'the mean over 6 views' in str(model.ledger.entries[0].notes)
    weights.append(model.get_weights())
for one, two in zip(weights[:2], weights[2:]):
  for left, right in zip(one, two):
    np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)
'''


@pytest.mark.slow
def test_replicas_share_examples_not_views():
  done = subprocess.run([sys.executable, '-c', _REPLICAS], capture_output=True, text=True,
                        check=False)
  assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize('functional', [False, True])
def test_a_clone_has_the_views_and_the_frozen_weights(functional):
  """Keras 2 compiles no clone."""
  plan = make_plan()
  model = make_model(plan)
  if functional:
    model = tfdp.make_private(keras.Model(model.inputs, model.outputs))
  tfdp.train_only(model, 'bias')
  model.compile(tfdp.DPSGD(RATE, plan=plan), 'mse', views=2)
  copy = keras.models.clone_model(model)
  assert isinstance(copy, type(model)) and len(copy.weights) == 2
  if compat.KERAS_3:
    assert copy.example_views == 2 and [v.shape for v in copy.trainable_variables] == [(1,)]
