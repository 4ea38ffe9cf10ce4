# SPDX-License-Identifier: Apache-2.0
"""Refuses models in which an example depends on others in training.

`honest_models_test.py` has models that must be accepted.
"""

import threading
import types

import numpy as np
import pytest
import small_models as small
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.independence import constants
from tfdp_adaptive.independence import independence

keras = compat.keras
layers = keras.layers


class Experts(layers.Layer):
  """Two experts of limited capacity: who comes late gets nothing."""

  def call(self, x, training=None):
    chosen = tf.one_hot(tf.argmax(x[:, :2], -1), 2)
    place = tf.reduce_sum(tf.cumsum(chosen, 0) * chosen, -1, keepdims=True)
    capacity = 0.75 * tf.cast(tf.shape(x)[0], tf.float32)
    return tf.where(place <= capacity, x, 0.0) if training else x


class Scheduled(layers.Layer):
  """Mixes later: after some steps, or once somebody raises the rate."""

  def __init__(self, start=100):
    super().__init__()
    self.start = start
    self.steps = tf.Variable(0, trainable=False)
    self.rate = tf.Variable(0.0 if start > 100 else 1.0, trainable=False)

  def call(self, x, training=None):
    if not training:
      return x
    self.steps.assign_add(1)
    on = tf.cast(self.steps > self.start % 1000, tf.float32)
    return x - on * self.rate * tf.reduce_mean(x, 0, keepdims=True)


@tf.custom_gradient
def _normalised_backward(x):
  return tf.identity(x), lambda dy: dy / (1e-6 + tf.norm(dy))


def _steps_until_all_are_small(x):
  return tf.while_loop(lambda x: tf.reduce_max(tf.abs(x)) > 0.5, lambda x: [0.7 * x], [x])[0]


def _mixup_at_times(x):
  mix = tf.cast(tf.random.uniform([]) < 0.5, tf.float32)
  return x + 0.1 * mix * x[::-1]


def _after_dropout(function):
  return lambda: small.sequential(function, dropout=True)


class AtCounts(layers.Layer):
  """Mixes when a count of steps says so."""

  def __init__(self, when):
    super().__init__()
    self.steps = tf.Variable(0, trainable=False)
    self.when = when

  def call(self, x, training=None):
    if not training:
      return x
    self.steps.assign_add(1)
    return tf.cond(self.when(self.steps), lambda: x - small.mean(x), lambda: x)


class AtCalls(layers.Layer):
  """Mixes once Python has called it often enough."""

  calls = 0

  def call(self, x, training=None):
    self.calls += 1
    return x - small.mean(x) if training and self.calls > 50 else x


def _if(condition):
  return lambda x: tf.cond(condition(x), lambda: x - small.mean(x), lambda: x)


def _words_if(condition):
  return lambda: small.words(
      lambda ids: tf.where(condition(ids), tf.roll(ids, 1, 0), ids), vocabulary=3000)


MIXING = {
    'centred, out of gradients\' sight': small.across(
        lambda x: x - tf.stop_gradient(small.mean(x))),
    'so after dropout': _after_dropout(lambda x: x - tf.stop_gradient(small.mean(x))),
    'ranks': small.across(lambda x: x + tf.cast(tf.argsort(tf.argsort(x, 0), 0), tf.float32)),
    'kept if above the median': small.across(
        lambda x: tf.where(x > tf.sort(x, 0)[tf.shape(x)[0] // 2], x, 0.0)),
    'the largest of the batch': small.across(
        lambda x: tf.where(x >= tf.math.top_k(tf.reshape(x, [-1]), 5)[0][-1], x, 0.0)),
    'centred by NumPy': small.across(lambda x: x - tf.ensure_shape(
        tf.numpy_function(lambda a: a.mean(0, keepdims=True), [x], tf.float32), [1, 6])),
    'divided by the number of examples': small.across(lambda x: x / small.size(x)),
    'a backward pass that normalises': small.across(_normalised_backward),
    'a backward pass that normalises after dropout': _after_dropout(_normalised_backward),
    'trimmed to the longest, averaged': lambda: small.words(lambda ids: ids, False),
    'words of a neighbour': lambda: small.words(lambda ids: tf.roll(ids, 1, 0)),
    'one word of the neighbour': lambda: small.words(
        lambda ids: tf.concat([tf.roll(ids[:, :1], 1, 0), ids[:, 1:]], 1)),
    'experts of limited capacity': lambda: keras.Sequential(
        [layers.Input((4,)), layers.Dense(6), Experts(), layers.Dense(2)]),
    'shuffled': small.across(tf.random.shuffle),
    'sorted by draws': small.across(
        lambda x: tf.gather(x, tf.argsort(tf.random.uniform(tf.shape(x)[:1])))),
    'mixed at times': small.across(_mixup_at_times),
    'scaled by the largest number': small.across(lambda x: x / (1e-3 + tf.reduce_max(tf.abs(x)))),
    'softmax along the wrong axis': small.across(lambda x: tf.nn.softmax(x, 0)),
    'normalised as one': small.across(tf.math.l2_normalize),
    'noise as large as the batch is wide': _after_dropout(
        lambda x: x + tf.stop_gradient(tf.math.reduce_std(x)) * tf.random.normal(tf.shape(x))),
    'a condition on the batch': small.across(
        lambda x: tf.cond(tf.reduce_mean(x) > 0, lambda: x, lambda: -x)),
    'steps until all are small': small.across(_steps_until_all_are_small),
    'reshaped in the wrong order': small.across(
        lambda x: tf.reshape(tf.transpose(x), tf.shape(x))),
    'attention to the batch': small.across(
        lambda x: tf.matmul(tf.nn.softmax(tf.matmul(x, x, transpose_b=True)), x)),
    'a gate that starts at zero': lambda: keras.Sequential(
        [layers.Input((4,)), layers.Dense(6, kernel_initializer='zeros'),
         small.Apply(lambda x: x - small.mean(x)), layers.Dense(2)]),
    'weighted by place': small.across(
        lambda x: x * tf.range(1.0, 1 + small.size(x))[:, tf.newaxis]),
    'summed along the default axis': _after_dropout(tf.cumsum),
    'scanned along the wrong axis': small.across(lambda x: tf.scan(lambda a, b: 0.5 * a + b, x)),
    'divided by 255 if any is large': lambda: small.first(
        lambda x: tf.cond(tf.reduce_max(x) > 1, lambda: x / 255, lambda: x)),
    'pixels divided by the largest': lambda: small.first(
        lambda x: tf.cast(x, tf.float32) / tf.cast(tf.reduce_max(x), tf.float32), 'uint8'),
    'zeros if any is not finite': small.across(lambda x: tf.where(
        tf.reduce_all(tf.math.is_finite(x)), x, tf.zeros_like(x))),
    'large batches halved': small.across(
        lambda x: tf.cond(tf.shape(x)[0] > 32, lambda: x / 2, lambda: x)),
    'from the hundredth step on': lambda: keras.Sequential(
        [layers.Input((4,)), layers.Dense(4), Scheduled(), layers.Dense(2)]),
    'at a rate that is zero at first': lambda: keras.Sequential(
        [layers.Input((4,)), layers.Dense(4), Scheduled(1000), layers.Dense(2)]),
    'rounded between extremes': small.across(lambda x: tf.quantization.fake_quant_with_min_max_vars(
        x, tf.reduce_min(x), tf.reduce_max(x))),
    'draws seeded by the data': small.across(lambda x: x * tf.random.stateless_uniform(
        tf.shape(x), [tf.cast(1000 * tf.reduce_sum(x), tf.int32), 0])),
    'draws seeded by a remainder of the data': small.across(
        lambda x: x * tf.random.stateless_uniform(tf.shape(x), tf.math.floormod(
            [tf.cast(1000 * tf.reduce_sum(x), tf.int32), 0], 2**31 - 2))),
    'numbered by first appearance': lambda: small.words(
        lambda ids: tf.reshape(tf.unique(tf.reshape(ids, [-1]))[1], tf.shape(ids)) % 9),
    'the nearest neighbour': small.across(lambda x: tf.gather(x, tf.argmin(tf.reduce_sum(
        (x[:, tf.newaxis] - x) ** 2, -1) + 1e9 * tf.eye(tf.shape(x)[0]), 1))),
    'a backward pass that centres': _after_dropout(tf.custom_gradient(
        lambda x: (tf.identity(x), lambda dy: dy - tf.reduce_mean(dy, 0)))),
    'counted from the end of the longest': lambda: small.words(lambda ids: (
        ids + tf.reduce_max(tf.math.count_nonzero(ids, 1, dtype=tf.int32))) % 9),
    'dropped as often as the batch is high': small.across(lambda x: tf.where(
        tf.random.uniform(tf.shape(x)) < tf.sigmoid(tf.reduce_mean(x)), x, 0.0)),
    'moments at times': small.across(lambda x: x + tf.nn.moments(x, [0])[1] * tf.cast(
        tf.random.uniform([]) < 0.1, tf.float32)),
}


# Rarely: where only what the graph compares with tells when.
RARELY = {
    'large batches centred': small.across(_if(lambda x: tf.shape(x)[0] > 1000)),
    'at multiples of a size': small.across(_if(lambda x: tf.shape(x)[0] % 16 == 0)),
    'every tenth step': lambda: small.around(AtCounts(lambda steps: steps % 10 == 0)),
    'at one step': lambda: small.around(AtCounts(lambda steps: tf.equal(steps, 500))),
    'after millions of steps': lambda: small.around(AtCounts(lambda steps: steps > 5_000_000)),
    'once in a million draws': small.across(_if(lambda x: tf.random.uniform([]) < 1e-6)),
    'at the largest draws': small.across(_if(lambda x: tf.random.uniform([]) > 0.9999)),
    'if any is huge': lambda: small.first(_if(lambda x: tf.reduce_max(x) > 1e9)),
    'if all are tiny': lambda: small.first(_if(lambda x: tf.reduce_max(tf.abs(x)) < 1e-3)),
    'if any is infinite': lambda: small.first(
        lambda x: tf.where(tf.reduce_any(tf.math.is_inf(x)), tf.zeros_like(x), x)),
    'missing numbers are means': lambda: small.first(lambda x: tf.where(
        tf.math.is_nan(x), tf.reduce_mean(tf.where(tf.math.is_nan(x), 0.0, x), 0), x)),
    'missing numbers become the mean of the batch': lambda: small.first(
        lambda x: tf.where(tf.equal(x, -999), small.mean(x), x)),
    'if a word is there': _words_if(lambda ids: tf.reduce_any(tf.equal(ids, 103))),
    'where a word is': _words_if(lambda ids: tf.equal(ids, 103)),
    'if a word is there often': _words_if(
        lambda ids: tf.math.count_nonzero(tf.equal(ids, 2999)) > 20),
}


@pytest.mark.pitfall(
    'A model mixes examples rarely: above some batch size, at some step, or when one word or '
    'a missing number occurs.',
    severity='critical',
    stops='PrivacyError before the first step; the check tries all constants of the graph as '
          'values, sizes and counts')
@pytest.mark.parametrize('name', RARELY)
def test_what_is_mixed_rarely_is_found(name):
  with pytest.raises(tfdp.PrivacyError, match='mixes examples: an example') as error:
    tfdp.validate_model(RARELY[name]())
  print(name, '|', error.value)


@pytest.mark.parametrize('own', [False, True])
def test_the_setting_that_speeds_up_a_check_is_put_back(own):
  """After a check, a failure, and checks of two threads, whoever set it before."""
  name, optimizer = 'disable_meta_optimizer', tf.config.optimizer
  setting = lambda: optimizer.get_experimental_options().get(name, False)
  before, seen = setting(), []
  optimizer.set_experimental_options({name: own})
  try:
    with pytest.raises(KeyError), independence._as_traced():
      seen.append(setting())
      raise KeyError
    seen.append(setting())
    first, second = threading.Event(), threading.Event()

    def check(entered, leave, patience):
      with independence._as_traced():
        entered.set()
        leave.wait(patience)

    threads = [threading.Thread(target=check, args=(first, second, 0.5)),
               threading.Thread(target=check, args=(second, threading.Event(), 0.2))]
    threads[0].start()
    first.wait()
    threads[1].start()
    for thread in threads:
      thread.join()
    seen.append(setting())
  finally:
    optimizer.set_experimental_options({name: before})
  assert seen == [True, own, own]


def test_python_that_counts_its_calls_is_refused():
  """Training would trace something else."""
  with pytest.raises(tfdp.PrivacyError, match=r"change with every call, \['calls'\]"):
    tfdp.validate_model(small.around(AtCalls()))


def test_python_that_asks_for_the_size_of_a_batch():
  """A size that is known when a step is traced, as under plans of fixed order."""
  model = small.sequential(lambda x: x - small.mean(x) if (x.shape[0] or 0) > 50 else x)
  for size in (None, 8):
    tfdp.validate_model(model, tf.TensorSpec([size, 4]))
  with pytest.raises(tfdp.PrivacyError, match='when the batch has 64 examples'):
    tfdp.validate_model(model, tf.TensorSpec([64, 4]))


@pytest.mark.pitfall(
    'A model mixes examples in ways that gradients do not show, such as centering behind '
    '`stop_gradient`, ranks, medians, or trimming to the longest text.',
    severity='critical',
    stops='PrivacyError before the first step; the check compares outputs of batches that '
          'differ in other rows')
@pytest.mark.parametrize('name', MIXING)
def test_mixing_is_found(name):
  with pytest.raises(tfdp.PrivacyError, match='mixes examples: an example') as error:
    tfdp.validate_model(MIXING[name]())
  print(name, '|', error.value)


@pytest.mark.parametrize('name', [
    'ranks', 'kept if above the median', 'trimmed to the longest, averaged', 'mixed at times',
    'experts of limited capacity', 'zeros if any is not finite'])
def test_mixing_is_found_in_large_models_by_fewer_runs(name, monkeypatch):
  monkeypatch.setattr(independence, '_HEAVY', 0)
  with pytest.raises(tfdp.PrivacyError, match='mixes examples: an example'):
    tfdp.validate_model(MIXING[name]())


def test_constants_are_those_that_data_are_compared_with():
  """No batch decides what dropout drops; a batch of each constant would be tried for nothing."""
  drop = layers.Dropout(0.375)

  def compares(x):
    drawn = tf.random.uniform([3, 2], 1.0, 3.0)
    with tf.GradientTape() as tape:
      tape.watch(x)
      mean = tf.reduce_mean(tf.square(x), axis=1)  # Its gradient divides sizes by sizes.
    return (drop(x, training=True), tf.nn.dropout(x, 0.25), drawn < 1.25, 2 < drawn + 1,
            x > 0.75, drawn * x > 0.625, tf.math.floormod(tf.constant([1]) + 2, 3),
            tape.gradient(mean, x), tf.random.categorical(x, 1) > 77,  # Draws that data decide.
            tf.random.uniform([2], 0, tf.shape(x)[0], tf.int32) < 55)

  function = tf.function(compares, autograph=False).get_concrete_function(tf.TensorSpec([3, 2]))
  found = constants.compared(function)
  assert found.reals == [0.75, 0.625]
  assert set(found.integers) == {77, 55}  # No remainders of Keras' seeds.


def test_sizes_are_compared_where_they_can_differ():
  """What every batch has decides nothing; how long it is, or how many words it has, may."""
  def compares(x, words):
    few = tf.boolean_mask(words, words > 3)
    return (tf.shape(x)[3] // 11, tf.shape(x)[-1] > 12, tf.shape(x)[0] > 13, tf.shape(x)[2] > 14,
            tf.shape(few)[0] > 15, tf.size(x) > 16, tf.shape(x)[1:][2] > 17, tf.rank(x) > 18)

  function = tf.function(compares, autograph=False).get_concrete_function(
      tf.TensorSpec([None, 24, None, 32]), tf.TensorSpec([5], tf.int32))
  assert set(constants.compared(function).integers) == {3, 13, 14, 15, 16, 17}


@pytest.mark.parametrize('shape, unknown', [
    ([None, 8], {13, 15, 16}), ([7, None], {13, 14, 15, 16}), ([7, 8], {13, 14, 15, 16})])
def test_the_size_of_the_batch_is_never_known(shape, unknown):
  """A check of batches of 7 must try those of 14, on whatever axis the examples lie."""
  def compares(x):
    turned = tf.transpose(x)
    return (tf.shape(x)[0] > 13, tf.shape(x)[1] > 14, tf.shape(turned)[1] > 15,
            tf.shape(turned)[..., 1] > 16)

  function = tf.function(compares, autograph=False).get_concrete_function(tf.TensorSpec(shape))
  found = set(constants.compared(function).integers)
  assert unknown <= found and (14 in unknown or 14 not in found)


@pytest.mark.parametrize('change, tolerance, same', [
    (1e-3, independence._ROUNDING_OF_SIZES, True), (1, independence._ROUNDING_OF_SIZES, False),
    (5e-6, independence._ROUNDING, False)])
def test_what_cancels_is_rounding_where_sizes_differ_and_nowhere_else(change, tolerance, same):
  """Outputs are typically 1,000, and one is near zero."""
  outputs = np.full([7, 1], 1e3, np.float32)
  outputs[0] = 1e-3
  seen = lambda moved: types.SimpleNamespace(outputs=[outputs + np.float32(moved)], factors=[])
  how = independence.difference(None, seen(0), seen(change), [0], [0], tolerance)
  assert how == '' if same else 'changes by' in how


def test_an_outlier_excuses_no_leak():
  """What is typical of the examples is rounding's measure, not the largest of all."""
  outputs = np.ones([7, 3])
  outputs[2] = 1e30
  assert independence.typical(outputs) == 1 and independence.typical(outputs > 1) == 0
  outputs[:, 1] = np.nan
  assert independence.typical(outputs) == independence.typical(outputs[:, 0]) == 1
  assert independence.typical(outputs[:, :0]) == 0


@pytest.mark.parametrize('leak', [0, 1e-3])
def test_what_cancels_in_an_output_is_rounding_and_what_leaks_is_not(leak):
  """A trained model may have large weights, and outputs that happen to be near zero."""

  class Sum(compat.keras.layers.Layer):
    """Products with large numbers, which cancel for the first two of seven examples."""

    def call(self, x):
      output = tf.matmul(x, tf.constant(weights, tf.float32))
      return output + leak * tf.reduce_mean(output, 0) if leak else output

  rng = np.random.default_rng(0)
  x, weights = rng.normal(size=(7, 600)).astype('float32'), 1e5 * rng.normal(size=(600, 1))
  weights -= np.linalg.pinv(x[:2]) @ (x[:2] @ weights)
  inputs = compat.keras.Input((600,))
  model = compat.keras.Model(inputs, Sum()(inputs))
  if leak:
    with pytest.raises(tfdp.PrivacyError, match='changes by'):
      tfdp.validate_model(model, x)
  else:
    tfdp.validate_model(model, x)
