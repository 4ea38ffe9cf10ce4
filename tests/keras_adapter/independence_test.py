# SPDX-License-Identifier: Apache-2.0
"""No example may depend on others in training, and no step may keep data (architecture, 5.14).

A table of models that break it, each to be refused, and one of models that keep it, each to
pass with no difference at all.
"""

import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.keras_adapter import independence

keras = compat.keras
layers = keras.layers


class Apply(layers.Layer):
  """A function of the data, in training only."""

  def __init__(self, function):
    super().__init__()
    self.function = function

  def call(self, x, training=None):
    return self.function(x) if training else x


class Average(layers.Layer):
  """The mean of a sequence's vectors, up to the length of the longest of the batch."""

  def __init__(self, masked=False):
    super().__init__()
    self.masked = masked

  def call(self, ids_and_vectors, training=None):
    ids, vectors = ids_and_vectors
    used = tf.cast(ids != 0, tf.float32)
    if training:
      longest = tf.reduce_max(tf.cast(ids != 0, tf.int32) * tf.range(1, 1 + tf.shape(ids)[1]))
      vectors, used = vectors[:, :longest], used[:, :longest]
    if not self.masked:
      return tf.reduce_mean(vectors, 1)
    total = tf.reduce_sum(vectors * used[..., tf.newaxis], 1)
    return total / (tf.reduce_sum(used, 1, keepdims=True) + 1)


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


def _sequential(*functions, dropout=False):
  """Functions between layers; they are all there is to training but, perhaps, dropout."""
  return keras.Sequential(
      [layers.Input((4,)), layers.Dense(6, 'tanh')] + [layers.Dropout(0.3)] * dropout
      + [Apply(function) for function in functions] + [layers.Dense(2)])


def _first(function, dtype='float32'):
  """A function of the inputs themselves."""
  inputs = keras.Input((4,), dtype=dtype)
  return keras.Model(inputs, layers.Dense(2)(Apply(function)(inputs)))


def _words(function, masked=None):
  ids = keras.Input((6,), dtype='int32')
  vectors = layers.Embedding(9, 4)(Apply(function)(ids))
  pooled = (layers.GlobalAveragePooling1D()(vectors) if masked is None
            else Average(masked)([ids, vectors]))
  return keras.Model(ids, layers.Dense(2)(pooled))


def _across(function):
  return lambda: _sequential(function)


def _after_dropout(function):
  return lambda: _sequential(function, dropout=True)


def _mean(x):
  return tf.reduce_mean(x, 0, keepdims=True)


def _size(x):
  return tf.cast(tf.shape(x)[0], x.dtype)


MIXING = {
    'centred, out of gradients\' sight': _across(lambda x: x - tf.stop_gradient(_mean(x))),
    'so after dropout': _after_dropout(lambda x: x - tf.stop_gradient(_mean(x))),
    'ranks': _across(lambda x: x + tf.cast(tf.argsort(tf.argsort(x, 0), 0), tf.float32)),
    'kept if above the median': _across(
        lambda x: tf.where(x > tf.sort(x, 0)[tf.shape(x)[0] // 2], x, 0.0)),
    'the largest of the batch': _across(
        lambda x: tf.where(x >= tf.math.top_k(tf.reshape(x, [-1]), 5)[0][-1], x, 0.0)),
    'centred by NumPy': _across(lambda x: x - tf.ensure_shape(
        tf.numpy_function(lambda a: a.mean(0, keepdims=True), [x], tf.float32), [1, 6])),
    'divided by the number of examples': _across(lambda x: x / _size(x)),
    'a backward pass that normalises': _across(_normalised_backward),
    'a backward pass that normalises after dropout': _after_dropout(_normalised_backward),
    'trimmed to the longest, averaged': lambda: _words(lambda ids: ids, False),
    'words of a neighbour': lambda: _words(lambda ids: tf.roll(ids, 1, 0)),
    'one word of the neighbour': lambda: _words(
        lambda ids: tf.concat([tf.roll(ids[:, :1], 1, 0), ids[:, 1:]], 1)),
    'experts of limited capacity': lambda: keras.Sequential(
        [layers.Input((4,)), layers.Dense(6), Experts(), layers.Dense(2)]),
    'shuffled': _across(tf.random.shuffle),
    'sorted by draws': _across(
        lambda x: tf.gather(x, tf.argsort(tf.random.uniform(tf.shape(x)[:1])))),
    'mixed at times': _across(_mixup_at_times),
    'scaled by the largest number': _across(lambda x: x / (1e-3 + tf.reduce_max(tf.abs(x)))),
    'softmax along the wrong axis': _across(lambda x: tf.nn.softmax(x, 0)),
    'normalised as one': _across(tf.math.l2_normalize),
    'noise as large as the batch is wide': _after_dropout(
        lambda x: x + tf.stop_gradient(tf.math.reduce_std(x)) * tf.random.normal(tf.shape(x))),
    'a condition on the batch': _across(
        lambda x: tf.cond(tf.reduce_mean(x) > 0, lambda: x, lambda: -x)),
    'steps until all are small': _across(_steps_until_all_are_small),
    'reshaped in the wrong order': _across(
        lambda x: tf.reshape(tf.transpose(x), tf.shape(x))),
    'attention to the batch': _across(
        lambda x: tf.matmul(tf.nn.softmax(tf.matmul(x, x, transpose_b=True)), x)),
    'a gate that starts at zero': lambda: keras.Sequential(
        [layers.Input((4,)), layers.Dense(6, kernel_initializer='zeros'),
         Apply(lambda x: x - _mean(x)), layers.Dense(2)]),
    'weighted by place': _across(
        lambda x: x * tf.range(1.0, 1 + _size(x))[:, tf.newaxis]),
    'summed along the default axis': _after_dropout(tf.cumsum),
    'scanned along the wrong axis': _across(lambda x: tf.scan(lambda a, b: 0.5 * a + b, x)),
    'divided by 255 if any is large': lambda: _first(
        lambda x: tf.cond(tf.reduce_max(x) > 1, lambda: x / 255, lambda: x)),
    'pixels divided by the largest': lambda: _first(
        lambda x: tf.cast(x, tf.float32) / tf.cast(tf.reduce_max(x), tf.float32), 'uint8'),
    'zeros if any is not finite': _across(lambda x: tf.where(
        tf.reduce_all(tf.math.is_finite(x)), x, tf.zeros_like(x))),
    'large batches halved': _across(
        lambda x: tf.cond(tf.shape(x)[0] > 32, lambda: x / 2, lambda: x)),
    'from the hundredth step on': lambda: keras.Sequential(
        [layers.Input((4,)), layers.Dense(4), Scheduled(), layers.Dense(2)]),
    'at a rate that is zero at first': lambda: keras.Sequential(
        [layers.Input((4,)), layers.Dense(4), Scheduled(1000), layers.Dense(2)]),
    'rounded between extremes': _across(lambda x: tf.quantization.fake_quant_with_min_max_vars(
        x, tf.reduce_min(x), tf.reduce_max(x))),
    'draws seeded by the data': _across(lambda x: x * tf.random.stateless_uniform(
        tf.shape(x), [tf.cast(1000 * tf.reduce_sum(x), tf.int32), 0])),
    'numbered by first appearance': lambda: _words(
        lambda ids: tf.reshape(tf.unique(tf.reshape(ids, [-1]))[1], tf.shape(ids)) % 9),
    'the nearest neighbour': _across(lambda x: tf.gather(x, tf.argmin(tf.reduce_sum(
        (x[:, tf.newaxis] - x) ** 2, -1) + 1e9 * tf.eye(tf.shape(x)[0]), 1))),
    'a backward pass that centres': _after_dropout(tf.custom_gradient(
        lambda x: (tf.identity(x), lambda dy: dy - tf.reduce_mean(dy, 0)))),
    'counted from the end of the longest': lambda: _words(lambda ids: (
        ids + tf.reduce_max(tf.math.count_nonzero(ids, 1, dtype=tf.int32))) % 9),
    'dropped as often as the batch is high': _across(lambda x: tf.where(
        tf.random.uniform(tf.shape(x)) < tf.sigmoid(tf.reduce_mean(x)), x, 0.0)),
    'moments at times': _across(lambda x: x + tf.nn.moments(x, [0])[1] * tf.cast(
        tf.random.uniform([]) < 0.1, tf.float32)),
}


@pytest.mark.pitfall(
    'Examples are mixed out of gradients\' sight: centring behind `stop_gradient`, ranks, '
    'medians, trimming to the longest, capacities of experts, a backward pass that '
    'normalises.',
    severity='critical', stops='PrivacyError before the first step: values are compared, in '
                               'training, on batches whose other rows change')
@pytest.mark.parametrize('name', MIXING)
def test_mixing_is_found(name):
  with pytest.raises(tfdp.PrivacyError, match='mixes examples: an example') as found:
    tfdp.validate_model(MIXING[name]())
  print(name, '|', found.value)


@pytest.mark.parametrize('name', [
    'ranks', 'kept if above the median', 'trimmed to the longest, averaged', 'mixed at times',
    'experts of limited capacity', 'zeros if any is not finite'])
def test_mixing_is_found_in_large_models_by_fewer_runs(name, monkeypatch):
  monkeypatch.setattr(independence, '_HEAVY', 0)
  with pytest.raises(tfdp.PrivacyError, match='mixes examples: an example'):
    tfdp.validate_model(MIXING[name]())


class Sampling(layers.Layer):
  """A latent variable, drawn."""

  def call(self, x, training=None):
    return x[:, :3] + tf.exp(x[:, 3:]) * tf.random.normal(tf.shape(x[:, 3:]))


class Loop(layers.Layer):
  """As many steps as the worst of the batch needs; who is done stays as they are."""

  def call(self, x):
    return tf.while_loop(
        lambda x: tf.reduce_any(tf.abs(x) > 0.5),
        lambda x: [tf.where(tf.abs(x) > 0.5, 0.7 * x, x)], [x])[0]


class Steps(layers.Layer):
  """Counts steps in a variable of its own."""

  def __init__(self):
    super().__init__()
    self.steps = tf.Variable(0, trainable=False)

  def call(self, x, training=None):
    if training:
      self.steps.assign_add(1)
    return x


class OwnGenerator(layers.Layer):
  """Draws from a generator of TensorFlow's."""

  def __init__(self):
    super().__init__()
    self.generator = tf.random.Generator.from_seed(1)

  def call(self, x, training=None):
    return x * self.generator.uniform(tf.shape(x)) + self.generator.normal(tf.shape(x))


def _images(*middle):
  return keras.Sequential(
      [layers.Input((8, 8, 3)), *middle, layers.Conv2D(4, 3, activation='relu'),
       layers.GlobalAveragePooling2D(), layers.Dense(2)])


def _sequences(*middle):
  return keras.Sequential(
      [layers.Input((6,), dtype='int32'), layers.Embedding(9, 4, mask_zero=True), *middle,
       layers.Dense(2)])


def _attention():
  ids = keras.Input((6,), dtype='int32')
  x = layers.Embedding(9, 4, mask_zero=True)(ids)
  x = layers.LayerNormalization()(
      x + layers.MultiHeadAttention(2, 2, dropout=0.2)(x, x, use_causal_mask=True))
  return keras.Model(ids, layers.Dense(9)(layers.Dropout(0.1)(x)))


def _lookup():
  words = keras.Input((3,), dtype='string')
  return keras.Model(words, layers.Dense(2)(layers.Flatten()(layers.Embedding(4, 3)(
      layers.StringLookup(vocabulary=['0', '1', 'b'])(words)))))


def _frozen():
  normalization = layers.BatchNormalization()
  normalization.trainable = False
  return keras.Sequential([layers.Input((4,)), layers.Dense(4), normalization, layers.Dense(2)])


HONEST = {
    'dropout': lambda: _sequential(dropout=True),
    'noise': lambda: keras.Sequential(
        [layers.Input((4,)), layers.GaussianNoise(0.3), layers.Dense(4, 'relu'),
         layers.GaussianDropout(0.2), layers.Dense(2)]),
    'an LSTM that drops': lambda: _sequences(layers.LSTM(3, dropout=0.3, recurrent_dropout=0.2)),
    'a GRU both ways': lambda: _sequences(layers.Bidirectional(layers.GRU(2))),
    'attention': _attention,
    'augmentation': lambda: _images(
        layers.RandomFlip(), layers.RandomRotation(0.1), layers.RandomTranslation(0.1, 0.1)),
    'contrast and cropping': lambda: _images(
        layers.RandomContrast(0.2), layers.RandomCrop(6, 6), layers.SpatialDropout2D(0.2)),
    'groups of channels': lambda: _images(layers.GroupNormalization(3)),
    'a latent variable': lambda: keras.Sequential(
        [layers.Input((4,)), layers.Dense(6), Sampling(), layers.Dense(2)]),
    'a loop with brakes': lambda: keras.Sequential(
        [layers.Input((4,)), layers.Dense(6), Loop(), layers.Dense(2)]),
    'depth drawn for each': _across(
        lambda x: x * tf.floor(0.5 + tf.random.uniform([tf.shape(x)[0], 1]))),
    'depth drawn for all': _across(lambda x: x * tf.floor(0.5 + tf.random.uniform([]))),
    'masked words': lambda: _words(lambda ids: tf.where(
        tf.random.uniform(tf.shape(ids)) < 0.2, tf.ones_like(ids), ids)),
    'words drawn': lambda: _words(lambda ids: tf.where(
        tf.random.uniform(tf.shape(ids)) < 0.2,
        tf.random.uniform(tf.shape(ids), maxval=9, dtype=tf.int32), ids)),
    'categories drawn': _across(lambda x: x + tf.cast(tf.random.categorical(x, 1), tf.float32)),
    'NumPy, example by example': _across(lambda x: x + tf.ensure_shape(
        tf.numpy_function(lambda a: a.mean(1, keepdims=True), [x], tf.float32), [None, 1])),
    'examples one by one': _across(lambda x: tf.map_fn(lambda row: row - tf.reduce_mean(row), x)),
    'ranks within': _across(
        lambda x: x + tf.cast(tf.argsort(tf.argsort(x, -1), -1), tf.float32)),
    'words that are looked up': _lookup,
    'frozen statistics': _frozen,
    'steps counted': lambda: keras.Sequential([layers.Input((4,)), Steps(), layers.Dense(2)]),
    'a generator of its own': lambda: keras.Sequential(
        [layers.Input((4,)), layers.Dense(4), OwnGenerator(), layers.Dense(2)]),
    'floats for words': lambda: keras.Sequential(
        [layers.Input((6,)), layers.Embedding(9, 4), layers.Flatten(), layers.Dense(2)]),
}


@pytest.mark.parametrize('name', HONEST)
def test_honest_models_pass_without_any_difference(name, monkeypatch):
  model = HONEST[name]()
  weights = [v for v in model.variables if tf.as_dtype(v.dtype).is_floating]
  before = [np.array(v) for v in weights]
  monkeypatch.setattr(independence, '_ROUNDING', 0.0)
  tfdp.validate_model(model)
  for old, variable in zip(before, weights):
    np.testing.assert_array_equal(old, variable)


def test_longer_padding_that_changes_nothing_but_shapes():
  tfdp.validate_model(_words(lambda ids: ids, True))


class Keeps(layers.Layer):
  """Keeps something of the data in what Keras may not know of."""

  def __init__(self, how):
    super().__init__()
    self.how = how
    self.mean = tf.Variable(tf.zeros([6]), trainable=False)
    self.count = tf.Variable(0, trainable=False)
    self.table = tf.lookup.experimental.MutableHashTable(tf.int32, tf.float32, 0.0)
    self.metric = keras.metrics.Mean()

  def call(self, x, training=None):
    if training:
      x = self.how(self, x)
    return x


def _assigned(self, x):
  self.mean.assign(tf.reduce_mean(x, 0))
  return x


def _moving(self, x):
  self.mean.assign_add(0.1 * (tf.reduce_max(x, 0) - self.mean))
  return x


def _in_a_condition(self, x):
  tf.cond(tf.reduce_mean(x) > 0, lambda: self.count.assign_add(1), lambda: self.count)
  return x


def _in_a_loop(self, x):
  def body(x):
    self.count.assign_add(1)
    return [0.5 * x]
  tf.while_loop(lambda x: tf.reduce_max(x) > 1, body, [x])
  return x


def _in_a_function(self, x):
  tf.function(lambda x: self.mean.assign(x[0]))(x)
  return x


def _backwards(self, x):
  @tf.custom_gradient
  def identity(x):
    def gradient(dy):
      with tf.control_dependencies([self.mean.assign(tf.reduce_mean(dy, 0))]):
        return tf.identity(dy)
    return tf.identity(x), gradient
  return identity(x)


def _tabulated(self, x):
  self.table.insert(1, tf.reduce_sum(x))
  return x


def _counted(self, x):
  self.count.assign_add(tf.shape(x)[0])
  return x


def _measured(self, x):
  self.metric.update_state(x)
  return x


def _on_disk(self, x):
  tf.io.write_file('unused', tf.strings.as_string(tf.reduce_sum(x)))
  return x


@pytest.mark.pitfall(
    'A layer writes data into a variable, table or file of its own, which outlives the '
    'step.',
    severity='critical', stops='PrivacyError before the first step: writes are followed '
                               'through the graph')
@pytest.mark.parametrize('how', [
    _assigned, _moving, _in_a_condition, _in_a_loop, _in_a_function, _backwards, _tabulated,
    _counted, _measured, _on_disk])
@pytest.mark.parametrize('sees_all', [True, False])
def test_data_that_a_step_would_keep(how, sees_all):
  """Also where a step takes one example at a time, as an own weight in a loop makes it."""
  hidden = [layers.Dense(6, 'tanh')] if sees_all else [Recurring()]
  model = keras.Sequential([layers.Input((6,)), *hidden, Keeps(how), layers.Dense(2)])
  with pytest.raises(tfdp.PrivacyError, match='write statistics of the data'):
    tfdp.validate_model(model)


class Recurring(layers.Layer):
  """Calls a layer in a loop, where the engine does not see it."""

  def __init__(self):
    super().__init__()
    self.dense = layers.Dense(6, 'tanh')

  def build(self, shape):
    self.dense.build(shape)

  def call(self, x):
    return tf.while_loop(lambda i, x: i < 2, lambda i, x: [i + 1, self.dense(x)],
                         [0, x])[1]


def test_layers_called_in_a_loop_take_one_example_at_a_time():
  """Mixing is then impossible: the batch of an example is that example."""
  model = keras.Sequential([layers.Input((6,)), Recurring(), layers.Dense(2)])
  assert not tfdp.clipping.bookkeeping.supports(model, tf.zeros([2, 6]))[0]
  tfdp.validate_model(model)


@pytest.mark.pitfall(
    'Python code inside the graph keeps something of earlier batches.',
    severity='critical', stops='PrivacyError before the first step: the same batch must '
                               'give the same twice')
def test_what_python_keeps_between_steps():
  """Where the graph calls Python no operation tells, but the same batch gives something else."""
  seen = []

  def centred(x):
    seen.append(x.mean(0, keepdims=True))
    return (x - np.mean(seen, 0)).astype(np.float32)

  for shape in ([None, 6], [7, 6]):
    model = _sequential(lambda x: tf.ensure_shape(
        tf.numpy_function(centred, [x], tf.float32), shape))
    with pytest.raises(tfdp.PrivacyError, match='gives something else for the same batch'):
      tfdp.validate_model(model, tf.random.stateless_normal([7, 4], [0, 1]))


@pytest.mark.pitfall(
    'A layer is changed after the model was validated.',
    severity='critical', stops='validated again after `compile`')
def test_a_model_compiled_anew_is_validated_anew():
  """A layer may have been told to do something else."""
  inputs = keras.Input((4,))
  apply = Apply(lambda x: x)
  model = tfdp.DPFunctional(inputs, layers.Dense(1)(apply(layers.Dense(4)(inputs))))

  def fit():
    model.compile(tfdp.DPSGD(l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=8), loss='mse')
    model.fit(tf.ones([8, 4]), tf.ones([8, 1]), batch_size=8, verbose=0)

  fit()
  apply.function = lambda x: x - _mean(x)
  with pytest.raises(tfdp.PrivacyError, match='mixes examples'):
    fit()
