# SPDX-License-Identifier: Apache-2.0
"""Whatever way a number is brought along in Python, it is found."""

import collections
import fractions
import functools
import math
import sys
import types

import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.independence import constants
from tfdp_adaptive.independence import disclosures
from tfdp_adaptive.independence import validation

keras = compat.keras
GLOBAL = np.arange(3.0)
ELSEWHERE = types.ModuleType('elsewhere')
ELSEWHERE.table = np.arange(4.0)
sys.modules['elsewhere'] = ELSEWHERE


class Loss(keras.losses.Loss):

  def __init__(self, held):
    super().__init__()
    self.held, self.unused = held, np.arange(9.0)

  def call(self, y, output):
    return self.value() * tf.reduce_mean((y - output) ** 2, -1)

  def value(self):
    return self.held


class Holder:
  __slots__ = ('held', 'unused')

  def __init__(self, held):
    self.held, self.unused = held, np.arange(9.0)

  def __call__(self, w):
    return w * self.held

  def method(self, w):
    return w * self.held


class Rows:
  rows, unused = GLOBAL, np.arange(9.0)

  def __getitem__(self, i):
    return self.rows[i]

  def __iter__(self):
    return iter(self.rows)


def imports(w):
  from elsewhere import table  # pylint: disable=import-outside-toplevel
  return w * table


def closed(held):
  return lambda w: w * held


def deep(held):
  inner = closed(held)
  return lambda w: (lambda: inner(w))()


def default(w, held=GLOBAL):
  return w * held


def reads_global(w):
  return w * GLOBAL


def reads_module(w):
  return w * ELSEWHERE.table


WAYS = {
    'closure': closed(GLOBAL), 'closure of a closure': deep(GLOBAL), 'default': default,
    'global': reads_global, 'module': reads_module, 'partial': functools.partial(closed, GLOBAL),
    'object': Holder(GLOBAL), 'method': Holder(GLOBAL).method, 'loss': Loss(GLOBAL),
    'attribute of an object': (lambda one: lambda w: one.held * w)(Holder(GLOBAL)),
    'many numbers': closed([i / 7 for i in range(40)]),
    'list': closed([{'a': GLOBAL}]), 'losses': {'out': [closed(GLOBAL)]},
    'attribute of a class': lambda w: w * Rows.rows, 'a cache': functools.lru_cache(closed(GLOBAL)),
    'name in a text': lambda w: w * ELSEWHERE.table, 'import': imports,
    'rows': (lambda one: lambda w: w * one[1])(Rows()),
    'iteration': (lambda one: lambda w: w * list(one)[1])(Rows()),
    'many integers': closed([[i, 2 * i] for i in range(20)]),
    'many booleans': closed([i % 3 == 0 for i in range(40)]), 'bytes': closed(bytes(range(9, 12))),
    'keys': closed({i / 7: 'a' for i in range(40)}),
    'a deque': closed(collections.deque(range(40))),
    'a data set': closed(tf.data.Dataset.from_tensor_slices([1.0, 2.0, 3.0])),
    'integer of NumPy': closed(np.int64(3)), 'boolean of NumPy': closed(np.bool_(True)),
    'argument that Keras hands on': keras.metrics.MeanMetricWrapper(default, held=GLOBAL),
    'tensor': closed(tf.constant([1.0, 2.0])), 'scalar': closed(np.float64(0.1)),
    'scalar tensor': closed(tf.constant(0.1)), 'integers': closed(np.arange(3)),
    "Keras' own around it": (
        keras.losses.MeanSquaredError(), keras.optimizers.schedules.ExponentialDecay(1, 1, 1),
        keras.callbacks.LambdaCallback(on_epoch_end=closed(GLOBAL))),
}


@pytest.mark.parametrize('way', list(WAYS))
def test_arrays(way):
  found = disclosures.find(WAYS[way])
  assert len(found.arrays) == 1 and np.size(found.arrays[0]) != 9


def test_numbers_of_layers():
  """Integers count from the size on that no axis, slice or padding needs; positions never."""
  held = lambda value: constants.held(tf.function(
      lambda: tf.identity(tf.constant(value))).get_concrete_function())
  table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1, 2], [0.5, 0.7]), 0.0)
  rng = np.random.default_rng(0)
  for dtype in ('int32', 'int64', 'uint8', 'int8', 'float32'):
    assert held(rng.integers(0, 9, [5, 4]).astype(dtype)).shapes == [(5, 4)]
    assert held(np.full([5, 4], 3, dtype)).shapes == []
  assert held('a text').shapes == held(['two', 'texts']).shapes == []
  assert held(['one', 'two'] * 20).shapes == [(40,)]
  assert held(np.arange(40)).shapes == held([[0, 0], [1, 1], [1, 1], [0, 0]]).shapes == []
  reads = tf.function(lambda: table.lookup(tf.constant(1))).get_concrete_function()
  assert constants.held(reads).tables == 1 and held([0.5, 0.7]).tables == 0


def test_what_python_code_and_files_bring_is_named():
  calls = lambda function: constants.held(
      tf.function(function, autograph=False).get_concrete_function()).unseen
  assert calls(lambda: tf.numpy_function(lambda: np.ones(3), [], tf.float64)) == ('PyFunc',)
  assert calls(lambda: tf.py_function(lambda: tf.ones(3), [], tf.float32)) == ('EagerPyFunc',)
  assert calls(lambda: tf.io.read_file('a file')) == ('ReadFile',)
  assert calls(lambda: tf.io.decode_raw(b'as numbers', tf.uint8)) == ('DecodeRaw',)
  assert calls(lambda: tf.ones(3)) == ()


@pytest.mark.parametrize('read', [
    lambda: tf.numpy_function(lambda: np.float32(0.3), [], tf.float32),
    lambda: tf.io.decode_raw(tf.io.read_file('a file'), tf.float32)])
def test_what_no_graph_shows_is_in_the_statement_or_refused(read):
  model = keras.Sequential([keras.Input([2]), keras.layers.Lambda(
      lambda x: x * tf.reshape(read(), [])),
                            keras.layers.Dense(1)])
  validation.remember(model)
  assert 'cannot be seen' in ' '.join(disclosures.sentences(model, validation.seen(model)))
  model = keras.Sequential([keras.Input([2]), keras.layers.Dense(
      1, kernel_regularizer=lambda w: tf.reduce_sum(w) * tf.reshape(read(), []))])
  with pytest.raises(tfdp.PrivacyError, match='PyFunc|ReadFile'):
    validation.check_held(model, [])


LETTERS = {'a': 'abbab' * 8, 'few': 'abbab'}
MADE = {
    'letters': lambda path: [ord(letter) for letter in LETTERS['a']],
    'file': np.load,
    'words': lambda path: [letter.upper() for letter in LETTERS['a']],
    'generator': lambda path: [next(one) for one in [iter('abbab' * 8)] for _ in range(40)],
}


@pytest.mark.parametrize('where', ['loss', 'schedule'])
@pytest.mark.parametrize('way', list(MADE))
def test_numbers_that_a_graph_holds_are_found_however_python_made_them(tmp_path, way, where):
  np.save(tmp_path / 'numbers.npy', np.arange(40) % 3)

  def made(numbers):
    numbers = tf.constant(numbers)
    numbers = tf.strings.length(numbers) if numbers.dtype == tf.string else numbers
    return tf.cast(tf.reduce_sum(numbers), tf.float32)

  class Rate(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
      return 0.1 / made(MADE[way](tmp_path / 'numbers.npy'))

    def get_config(self):
      return {}

  def loss(y, output):
    return tf.reduce_mean((output - y) ** 2, -1) / made(MADE[way](tmp_path / 'numbers.npy'))

  def train(loss, rate=0.1, **more):
    model = tfdp.make_private(keras.Sequential([keras.Input([2]), keras.layers.Dense(1)]))
    model.compile(tfdp.DPSGD(rate, l2_norm_clip=1.0, noise_multiplier=0.0, batch_size=4), loss,
                  **more)
    model.train_on_batch(np.ones([4, 2], 'float32'), np.ones([4, 1], 'float32'))
    return model

  arguments = dict(loss=loss) if where == 'loss' else dict(loss='mse', rate=Rate())
  with pytest.raises(tfdp.PrivacyError, match=r'arrays of shapes \[\(40,\)'):
    train(**arguments)
  assert 'a survey' in train(**arguments, public_penalty='a survey').optimizer.statement()
  train(lambda y, output: tf.reduce_mean((output - y) ** 2, -1) * made(
      [ord(letter) for letter in LETTERS['few']]))


class Centred(keras.layers.Layer):
  """Subtracts a number that it holds, and holds another one that nothing uses."""

  def __init__(self, held):
    super().__init__()
    self.held, self.unused = held, 0.125

  def build(self, shape):
    self.built = True

  def call(self, x):
    return self.moved(x)

  def moved(self, x, training=False):
    return x - self.held


class CentredInAGraph(Centred):

  @tf.function
  def call(self, x):
    return x - self.held


@pytest.mark.both_stacks
@pytest.mark.pitfall(
    'A layer of your own holds a number that was computed from private data, such as their mean.',
    severity='high', stops='the statement lists the numbers that layers of your own use')
def test_numbers_that_a_layer_of_ones_own_uses_are_named():
  rng = np.random.default_rng(0)
  x, y = rng.normal(size=[8, 2]).astype('float32'), np.ones([8, 1], 'float32')

  def said(*layers):
    model = tfdp.make_private(keras.Sequential([keras.Input([2]), *layers, keras.layers.Dense(1)]))
    model.compile(tfdp.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=0.0, batch_size=8), 'mse')
    model.train_on_batch(x, y)
    return model.optimizer.statement()

  mean = float(x.mean())
  for held in (mean, x.mean(), tf.constant(mean)):
    assert f'Layers that are not of Keras hold the numbers [{mean}]. If' in said(Centred(held))
  assert f'hold the numbers [{mean}, 2]' in said(CentredInAGraph(mean), Centred(2))
  assert 'hold the numbers' not in said(
      keras.layers.Dropout(0.5), keras.layers.LeakyReLU(), keras.layers.Rescaling(0.25))


def test_many_numbers_of_layers_are_counted():
  said = lambda held: ' '.join(disclosures.sentences(keras.Sequential(
      [Centred(held)]), constants.Held([], ())))
  assert '[0, 1, 2, 3, 4, 5, 6, 7] and 32 more. If' in said(list(range(40)))
  assert '[0, 1, 2, 3, 4, 5, 6, 7]. If' in said(list(range(8)))
  assert 'refer to more than 10000 objects. If' in said({str(i): [i] for i in range(20_000)})


def test_a_number_with_which_weights_begin_is_named():
  said = lambda value: ' '.join(disclosures.sentences(keras.Sequential([
      keras.Input([2]), keras.layers.Dense(
          1, bias_initializer=keras.initializers.Constant(value))]), constants.Held([], ())))
  assert 'begin with the numbers [-0.25]' in said(-0.25)
  assert said(0.0) == said(1.0) == '' and '(1,)' in said(np.array([0.25], 'float32'))


def test_variables_and_numbers():
  assert disclosures.find(closed(tf.Variable(1.0))).variables
  for number in (0.25, 3, True, fractions.Fraction(1, 3)):
    assert disclosures.find(closed(number)).numbers == [number]
  assert disclosures.find(Loss(0.25)).numbers == [0.25]
  layer = keras.layers.Dense(1)
  assert disclosures.find(closed([layer])).layers == [layer]


def test_numbers_written_as_a_text_are_data_and_words_are_not():
  labels = '0110' * 10
  for words in ('a setting', 'The targets must have one column for each of the 10 outputs.'):
    assert disclosures.find(closed(words)).arrays == []
  assert disclosures.find(closed(', '.join(labels))).arrays
  assert disclosures.find(closed(labels)).arrays == [labels] and disclosures.shape(labels) == (40,)


def test_what_brings_nothing():
  for one in (
      None, 'mse', ['mse', None], keras.losses.Huber(delta=np.float32(2.0)), math.sqrt,
      keras.optimizers.schedules.PiecewiseConstantDecay([1, 2], [0.1, 0.2, 0.3]),
      keras.regularizers.L1L2(0.1, 0.2), keras.constraints.MaxNorm(2.0), tf.reduce_sum,
      lambda w: 0.01 * tf.reduce_sum(w**2), closed('text'), closed(range(50)),
      closed(keras.layers.Dense(1)),
      (lambda model: lambda y, output: model(y))(keras.Sequential([keras.layers.Dense(1)]))):
    assert disclosures.find(one)[:3] == ([], [], []), one


class Base:
  """Calls methods of itself and of its bases in every way that Python has."""

  def __init__(self, held):
    self.held, self.unused = held, np.arange(9.0)

  def __call__(self, w):
    return self.first(w)

  def first(self, w):
    return self.second(w) if w else self.again(w)

  def second(self, w):
    return self.first(w) * self.held

  def again(self, w):
    return self(w) + type(self).first(self, w)


class Derived(Base):

  def __call__(self, w):
    return 3 * super().__call__(w)

  def first(self, w):
    return super().first(w) + super(Derived, self).second(w)

  @property
  def second(self):
    return super().second


@pytest.mark.parametrize('kind', [Base, Derived])
def test_methods_that_call_one_another_end(kind):
  found = disclosures.find(kind(0.25))
  assert found.numbers and set(found.numbers) == {0.25} and not found.arrays
  assert len(disclosures.find(kind(GLOBAL)).arrays) == 1


def test_a_method_that_tf_function_wraps():
  holder = type('Holder', (), {'__call__': tf.function(lambda self, w: w * self.held)})()
  holder.held, holder.unused = GLOBAL, np.arange(9.0)
  assert len(disclosures.find(holder.__call__).arrays) == 1
  assert len(disclosures.find(holder).arrays) == 1


def test_a_method_that_only_super_finds():
  class Inner(keras.losses.Loss):
    def call(self, y, output):
      return output * self.held

  class Outer(Inner):
    held, unused = GLOBAL, np.arange(9.0)

    def call(self, y, output):
      return 3 * super().call(y, output)

  assert len(disclosures.find(Outer()).arrays) == 1


def test_a_search_without_end_is_refused():
  class Endless(Base):
    def __call__(self, w):
      return self.more(w)

    @property
    def more(self):
      return Endless(self.held)

  with pytest.raises(tfdp.PrivacyError, match='few objects'):
    disclosures.find(Endless(1.0))


def test_lookup_tables_are_data():
  table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1, 2], [0.5, 0.7]), 0.0)
  assert len(disclosures.find(closed(table)).arrays) == 1


def test_what_is_of_ones_own():
  for one in ('accuracy', None, tf.reduce_sum, keras.metrics.AUC(), keras.callbacks.EarlyStopping(),
              keras.callbacks.ReduceLROnPlateau(), keras.callbacks.ModelCheckpoint('x.keras')):
    assert not disclosures.is_own(one), one
  for one in (closed(1), Holder(1), Loss(1), keras.callbacks.LambdaCallback(
      on_epoch_end=closed(1)), keras.metrics.MeanMetricWrapper(closed(1))):
    assert disclosures.is_own(one), one
