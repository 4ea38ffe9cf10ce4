# SPDX-License-Identifier: Apache-2.0
"""Frozen features: what they hold, whose cost travels with them, what is refused, the cache."""

import stat

import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat

keras, layers = compat.keras, compat.keras.layers
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=[40, 6]).astype(np.float32), RNG.integers(0, 2, size=40)
PLAN = tfdp.PrivacyPlan(batch_size=10, steps=3, l2_norm_clip=1.0, noise_multiplier=1.0,
                        target_delta=1e-3, population_size=40)


def frozen(*more, private=False):
  base = keras.Sequential([layers.Input([6]), layers.Dense(5, 'relu'), *more])
  if private:
    base = tfdp.make_private(base)
    base.compile(tfdp.DPSGD(.1, plan=PLAN), 'mse')
    base.fit(PLAN.batches((X, np.zeros([40, 5], np.float32))), verbose=0)
  base.trainable = False
  return base


@pytest.mark.parametrize('batch_size', [7, 40, 64])
def test_features_are_those_of_the_base(batch_size):
  base = frozen(layers.BatchNormalization(), layers.Dropout(.5))  # Frozen, and not training.
  found = tfdp.features(base, (X, Y), batch_size=batch_size)
  np.testing.assert_allclose(found.x, base(X, training=False), rtol=1e-5)
  features, labels = found.take(np.array([3, 1, 3]))
  np.testing.assert_array_equal(features, found.x[[3, 1, 3]])
  np.testing.assert_array_equal(labels, Y[[3, 1, 3]])
  assert len(found) == 40 and found.views is None and not found.entries
  assert 'base' not in str([compat.describe(v) for v in frozen().variables])  # No scope is left.


@pytest.mark.parametrize('kinds', [
    [], [layers.ReLU], [layers.BatchNormalization, layers.ReLU]])
def test_a_base_stays_as_it_is_and_is_joined_with_its_head(kinds):
  """Layers without weights often stay trainable where others are frozen one by one."""
  base = keras.Sequential([layers.Input([6]), layers.Dense(5), *[kind() for kind in kinds]])
  for layer in base.layers:
    layer.trainable = not layer.weights
  before = [base.trainable, *(layer.trainable for layer in base.layers)]
  found = tfdp.features(base, (X, Y))
  assert before == [base.trainable, *(layer.trainable for layer in base.layers)]
  head = tfdp.make_private(keras.Sequential([layers.Input([5]), layers.Dense(2)]))
  head.compile(tfdp.DPSGD(.1, plan=PLAN), keras.losses.SparseCategoricalCrossentropy(True))
  head.fit(PLAN.batches(found), verbose=0)
  whole = tfdp.join(base, head)
  assert whole.ledger.epsilon() == pytest.approx(PLAN.epsilon())
  np.testing.assert_allclose(
      whole.predict(X, verbose=0), head.predict(found.x, verbose=0), rtol=1e-4, atol=1e-6)


def test_inputs_may_be_a_dict_or_alone():
  inputs = {'a': layers.Input([6], name='a'), 'b': layers.Input([6], name='b')}
  base = keras.Model(inputs, layers.Dense(2)(layers.Add()([inputs['a'], inputs['b']])))
  base.trainable = False
  found = tfdp.features(base, {'a': X, 'b': 2 * X})
  np.testing.assert_allclose(found.x, base({'a': X, 'b': 2 * X}), rtol=1e-5)
  assert isinstance(found.take(np.arange(2)), np.ndarray)


def test_a_head_on_features_and_the_whole_model_have_the_ledger_of_the_base(tmp_path):
  base = frozen(private=True)
  found = tfdp.features(base, (X, Y))
  assert found.ledger == base.ledger and len(base.ledger.entries) == 1
  head = tfdp.make_private(keras.Sequential([layers.Input([5]), layers.Dense(2)]))
  head.compile(tfdp.DPSGD(.1, plan=PLAN), keras.losses.SparseCategoricalCrossentropy(
      from_logits=True))
  head.fit(PLAN.batches(found), verbose=0)
  both = (base.ledger + PLAN).epsilon(1e-3)
  assert head.ledger.epsilon(1e-3) == pytest.approx(both)
  assert head.optimizer.epsilon() == pytest.approx(both)
  whole = tfdp.join(base, head)
  assert whole.ledger.epsilon(1e-3) == pytest.approx(both) and len(whole.ledger.entries) == 2
  np.testing.assert_allclose(whole.predict(X, verbose=0), head.predict(found.x, verbose=0),
                             rtol=1e-4, atol=1e-6)
  assert not base.trainable_variables and len(whole.trainable_variables) == 2
  for name, model in (('head.keras', head), ('whole.keras', whole)):
    model.save(str(tmp_path / name))
    again = keras.models.load_model(str(tmp_path / name))
    assert again.ledger.epsilon(1e-3) == pytest.approx(both)


class Hiding(keras.Model):
  """Calls a model that Keras does not see inside."""

  def __init__(self, inner):
    super().__init__()
    self.inner = lambda x: inner(x)

  def call(self, inputs):
    return self.inner(inputs)


def in_a_lambda(inner):
  return keras.Sequential(
      [layers.Input([6]), layers.Lambda(lambda x: inner(x), output_shape=(5,))])


@pytest.mark.parametrize('around', [
    in_a_lambda, Hiding, lambda inner: lambda x: inner.predict(x, verbose=0),
    lambda inner: inner.predict, lambda inner: tf.function(lambda x: inner(x))])
def test_features_have_the_ledger_of_a_base_inside_a_function(around):
  inner = frozen(private=True)
  base = around(inner)
  if compat.is_model(base):
    base(X)
    base.trainable = False
  assert tfdp.features(base, (X, Y), name='base 1').ledger == inner.ledger


@pytest.mark.parametrize('parts', [False, True])
def test_features_of_features_have_the_ledger_of_both_bases(parts):
  base = frozen(private=True)
  data = (tfdp.features(base, X), Y) if parts else tfdp.features(base, (X, Y))
  more = keras.Sequential([layers.Input([5]), layers.Dense(3)])
  more.trainable = False
  assert tfdp.features(more, data).ledger == base.ledger
  assert tfdp.features(np.tanh, data, name='tanh').ledger == base.ledger
  found = tfdp.estimates.second_moments(
      tfdp.features(base, (X, Y)), noise_multiplier=0.01, constant=0.5, classes=2)
  assert [entry.rule for entry in tfdp.features(found.whitening(), data).ledger.entries] == [
      'dp_sgd', 'dp_sgd', 'estimates.second_moments']  # One run, which a ledger counts once.


def test_parts_of_data_may_be_features():
  base = frozen(private=True)
  head = tfdp.make_private(keras.Sequential([layers.Input([5]), layers.Dense(1)]))
  head.compile(tfdp.DPSGD(.1, plan=PLAN), 'mse')
  head.fit(PLAN.batches((tfdp.features(base, X), Y.astype(np.float32))), verbose=0)
  assert len(head.ledger.entries) == 2


def test_a_solved_head_has_the_ledger_of_the_base():
  base = frozen(private=True)
  found = tfdp.features(base, (X, Y))
  head = tfdp.heads.least_squares(found, target_epsilon=1.0, target_delta=1e-3, classes=2)
  whole = tfdp.join(base, head)
  assert [entry.rule for entry in whole.ledger.entries] == ['dp_sgd', 'estimates.second_moments']
  np.testing.assert_allclose(whole(X), head(found.x), rtol=1e-4, atol=1e-5)


class Mixing(layers.Layer):

  def call(self, inputs):
    return inputs - tf.reduce_mean(inputs, 0, keepdims=True)


class Drawing(layers.Layer):

  def call(self, inputs):
    return inputs + tf.random.normal(tf.shape(inputs))


class Counting(layers.Layer):

  def build(self, shape):
    self.seen = self.add_weight(name='seen', shape=(), initializer='zeros', trainable=False)

  def call(self, inputs):
    self.seen.assign_add(tf.reduce_sum(inputs))
    return inputs


def two_outputs():
  inputs = layers.Input([6])
  return keras.Model(inputs, [inputs + 0., inputs * 2.])


@pytest.mark.parametrize('base, message', [
    (lambda: frozen(Mixing()), 'mixes examples'),
    (lambda: frozen(Drawing()), 'draws random numbers'),
    (lambda: frozen(Counting()), 'write statistics of the data'),
    (lambda: keras.Sequential([layers.Input([6]), layers.Dense(2)]), 'must be frozen'),
    (two_outputs, 'must have one output'),
    (lambda: keras.Sequential([layers.Dense(2)]), 'must be built'),
    (lambda: 3, 'must be a built Keras model or a function')])
def test_bases_that_are_refused(base, message):
  with pytest.raises((tfdp.PrivacyError, ValueError), match=message):
    tfdp.features(base(), X)


@pytest.mark.parametrize('function, message', [
    (lambda x: x - x.mean(0), 'map each record by itself'),
    (lambda x: x + np.cumsum(x, 0), 'map each record by itself'),
    (lambda x: x + RNG.normal(size=x.shape), 'does not'),
    (lambda x: x[:1], 'must return numbers')])
def test_functions_that_are_refused(function, message):
  with pytest.raises((tfdp.PrivacyError, ValueError), match=message):
    tfdp.features(function, X, name='mine')


def test_a_function_needs_a_name_and_cannot_be_joined():
  with pytest.raises(ValueError, match='`name` must tell the function'):
    tfdp.features(np.square, X)
  np.testing.assert_array_equal(tfdp.features(np.square, X, name='square').x, np.square(X))
  with pytest.raises(ValueError, match='must be a Keras model to be joined'):
    tfdp.join(np.square, layers.Dense(1))


def test_views_are_drawn_for_each_record():
  base = keras.Sequential([layers.Input([6]), layers.GaussianNoise(1.0)])
  found = tfdp.features(base, (X, Y), views=3)
  assert found.x.shape == (40, 3, 6) and found.views == 3
  assert .8 < np.std(found.x - X[:, None]) < 1.2
  assert len(np.unique(np.round(found.x[0, :, 0], 6))) == 3
  moments = tfdp.estimates.second_moments(found, noise_multiplier=1.0, target_delta=1e-3, classes=2)
  assert moments.covariance.shape == (6, 6) and moments.cross.shape == (6, 2)
  drawn = tfdp.features(lambda x: x + RNG.normal(size=x.shape), X, views=2, name='noise')
  assert drawn.x.shape == (40, 2, 6)
  with pytest.raises(ValueError, match='views would all be the same'):
    tfdp.features(frozen(), X, views=2)


class Counted:
  """A function that counts rows, and is interrupted after some of them."""

  def __init__(self, stop=10**9):
    self.rows, self.stop = 0, stop

  def __call__(self, x):
    if self.rows >= self.stop:
      raise KeyboardInterrupt
    self.rows += len(x)
    return np.square(x)


def test_a_cache_is_used_again_and_goes_on_where_it_was_stopped(tmp_path):
  folder = str(tmp_path / 'cache')
  call = lambda function, data=X, name='square': tfdp.features(
      function, data, batch_size=5, cache=folder, name=name).x
  tried = 10  # Rows of the checks before.
  with pytest.raises(KeyboardInterrupt):
    call(Counted(stop=tried + 20))
  assert stat.S_IMODE((tmp_path / 'cache').stat().st_mode) == 0o700
  again = Counted()
  np.testing.assert_array_equal(call(again), np.square(X))
  assert again.rows == tried + 5 + 20  # One batch tells the shape.
  third = Counted()
  np.testing.assert_array_equal(call(third), np.square(X))
  assert third.rows == tried + 5
  np.testing.assert_array_equal(call(Counted(), X[::-1]), np.square(X[::-1]))
  other = Counted()
  call(other, name='another')
  assert other.rows == tried + 40
  assert len(list((tmp_path / 'cache').glob('*.npy'))) == 3


def test_a_cache_knows_the_weights_of_its_base(tmp_path):
  base = frozen()
  first = np.array(tfdp.features(base, X, cache=str(tmp_path)).x)
  base.layers[0].set_weights([2 * w for w in base.layers[0].get_weights()])
  np.testing.assert_allclose(tfdp.features(base, X, cache=str(tmp_path)).x, 2 * first, rtol=1e-5)


def test_a_head_is_not_joined_with_another_base():
  base, other = frozen(), frozen()
  head = tfdp.make_private(keras.Sequential([layers.Input([5]), layers.Dense(1)]))
  head.compile(tfdp.DPSGD(.1, plan=PLAN), 'mse')
  head.fit(PLAN.batches(tfdp.features(base, (X, Y.astype(np.float32)))), verbose=0)
  assert tfdp.join(base, head).output_shape == (None, 1)
  with pytest.raises(ValueError, match='features of `base`'):
    tfdp.join(other, head)


def test_a_head_that_was_saved_is_not_joined_with_another_base(tmp_path):
  base, other = frozen(), frozen()
  found = tfdp.features(base, (X, Y))
  head = tfdp.make_private(keras.Sequential([layers.Input([5]), layers.Dense(2)]))
  head.compile(tfdp.DPSGD(.1, plan=PLAN), keras.losses.SparseCategoricalCrossentropy(True))
  head.fit(PLAN.batches(found), verbose=0)
  assert 'features of the frozen base' in head.ledger.statement()
  head.save(str(tmp_path / 'head.keras'))
  solved = tfdp.heads.least_squares(found, target_epsilon=1.0, target_delta=1e-3, classes=2)
  for one in (keras.models.load_model(str(tmp_path / 'head.keras')), solved):
    with pytest.raises(ValueError, match='features of `base`'):
      tfdp.join(other, one)
    assert tfdp.join(base, one).output_shape == (None, 2)


def test_a_base_is_known_by_what_it_computes(tmp_path):
  """Names, seeds and what trains change no features; words and weights do."""
  def make(rate=.5, words=('a', 'b')):
    lookup = layers.StringLookup(num_oov_indices=1)
    lookup.set_vocabulary(list(words))
    base = keras.Sequential([layers.Input([4], dtype='string'), lookup, layers.Embedding(9, 5),
                             layers.Flatten(), layers.GaussianNoise(rate)])
    base.layers[1].set_weights([np.ones([9, 5], np.float32)])
    base.trainable = False
    return base

  base = make()
  texts = np.array([['a', 'b', 'c', '']] * 40)
  found = tfdp.features(base, (texts, Y), views=2, cache=str(tmp_path))
  again = tfdp.features(make(), (texts, Y), views=2, cache=str(tmp_path))
  np.testing.assert_array_equal(again.x, found.x)
  head = tfdp.make_private(keras.Sequential([layers.Input([20]), layers.Dense(2)]))
  head.compile(tfdp.DPSGD(.1, plan=PLAN), keras.losses.SparseCategoricalCrossentropy(True))
  head.fit(PLAN.batches(found), verbose=0)
  base.trainable = True
  for one in (base, make()):
    assert tfdp.join(one, head).output_shape == (None, 2)
  for other in (make(rate=.4), make(words=('b', 'a'))):
    with pytest.raises(ValueError, match='features of `base`'):
      tfdp.join(other, head)


@pytest.mark.parametrize('way', ['train_on_batch', 'graph', 'strategy', 'own_sampler'])
def test_a_loop_of_ones_own_counts_the_base(way):
  base = frozen(private=True)
  steps = 2 + len(way)  # Runs of another plan do not count these data.
  plan = tfdp.PrivacyPlan(batch_size=10, steps=steps, l2_norm_clip=1.0, noise_multiplier=1.0,
                          target_delta=1e-3, population_size=40)
  head = tfdp.make_private(keras.Sequential([layers.Input([5]), layers.Dense(2)]))
  head.compile(tfdp.DPSGD(.1, plan=plan, own_sampler='mapped' if way == 'own_sampler' else None),
               keras.losses.SparseCategoricalCrossentropy(True))
  strategy = tf.distribute.get_strategy() if way == 'strategy' else None
  batches = plan.batches(tfdp.features(base, (X, Y)), strategy=strategy)

  @tf.function
  def loop():
    for batch in batches:
      head.train_step(batch)

  if way == 'graph':
    head.optimizer.build(head.trainable_variables)
    loop()
  elif way == 'own_sampler':
    head.fit(batches.map(lambda x, y, weight: (x, y, tf.cast(weight, tf.float32))), verbose=0)
  for batch in batches if way in ('strategy', 'train_on_batch') else ():
    if way == 'strategy':
      strategy.run(head.train_step, args=(batch,))
    else:
      head.train_on_batch(*batch[:2], sample_weight=batch[2])
  assert head.optimizer.steps_done == steps
  assert head.ledger.epsilon(1e-3) == pytest.approx((base.ledger + plan).epsilon(1e-3))
  assert 'features of the frozen base' in head.ledger.statement()
  assert tfdp.join(base, head).ledger == head.ledger
  with pytest.raises(ValueError, match='features of `base`'):
    tfdp.join(frozen(), head)


def test_a_run_counts_no_data_of_another_fit_with_its_plan():
  for base in (frozen(private=True), frozen(private=True)):
    head = tfdp.make_private(keras.Sequential([layers.Input([5]), layers.Dense(2)]))
    head.compile(tfdp.DPSGD(.1, plan=PLAN), keras.losses.SparseCategoricalCrossentropy(True))
    head.fit(PLAN.batches(tfdp.features(base, (X, Y))), verbose=0)
    assert len(head.ledger.entries) == 2
    head = tfdp.make_private(keras.Sequential([layers.Input([6]), layers.Dense(2)]))
    head.compile(tfdp.DPSGD(.1, plan=PLAN), keras.losses.SparseCategoricalCrossentropy(True))
    for x, y, weight in PLAN.batches((X, Y)):
      head.train_on_batch(x, y, sample_weight=weight)
    assert len(head.ledger.entries) == 1


def test_data_sets_have_features_and_no_data_have_none():
  base = frozen()
  data = tf.data.Dataset.from_tensor_slices((X, Y))
  np.testing.assert_array_equal(tfdp.features(base, data).x, tfdp.features(base, X).x)
  for one in (base, np.square):
    with pytest.raises(ValueError, match='no examples'):
      tfdp.features(one, X[:0], name='square')
