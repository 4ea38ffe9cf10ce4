# SPDX-License-Identifier: Apache-2.0
"""Ids and labels that do not exist: such a record counts as none, and stops no training."""

import functools

import bookkeeping_oracle as oracle
import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.clipping import engines
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.clipping import losses

keras = compat.keras
layers = keras.layers
CLASSES, WORDS = 3, 7


def language_model():
  keras.utils.set_random_seed(0)
  return keras.Sequential([
      keras.Input((2,), dtype='int32'), layers.Embedding(WORDS, 4), layers.Dense(CLASSES)])


def step_of(engine, ignore_class=None):
  model = language_model()
  loss = losses.ExampleLoss(keras.losses.SparseCategoricalCrossentropy(
      from_logits=True, ignore_class=ignore_class))

  @tf.function(autograph=False)
  def step(batch):
    run = engines.choose(engine, model, oracle.request().asks, batch.x)
    return run(model, loss, batch, oracle.request())

  return step


@pytest.fixture(scope='module')
def sums():
  """Of records; one trace for batches of a size."""
  steps = functools.lru_cache(maxsize=None)(step_of)

  def of(engine, x, y, keep=None, weight=(), **loss):
    keep = np.arange(len(x)) if keep is None else keep
    cut = lambda t: tf.constant(t[keep]) if len(t) else ()
    return steps(engine, **loss)(
        interface.Batch(cut(x), cut(y), cut(weight), tf.ones([len(keep)], tf.bool)))

  return of


def data():
  rng = np.random.default_rng(0)
  return (rng.integers(0, WORDS, (4, 2)).astype(np.int32),
          rng.integers(0, CLASSES, (4, 2)).astype(np.int32))


@pytest.mark.thorough(rows=['-1-id-materialized'])
@pytest.mark.pitfall(
    'A token id or label that does not exist stops the training: one record decides whether '
    'there is a model.',
    severity='high', stops='the example counts as empty, and the diagnostics count such examples')
@pytest.mark.parametrize('engine', ['bookkeeping', 'layered', 'materialized'])
@pytest.mark.parametrize('where', ['id', 'label'])
@pytest.mark.parametrize('value', [-1, WORDS, 2**31 - 1, -2**31])
def test_the_record_counts_as_none(sums, engine, where, value):
  x, y = data()
  (x if where == 'id' else y)[1, 1] = value
  clipped = sums(engine, x, y)
  without = sums(engine, x, y, keep=[0, 2, 3])
  for got, want in zip(clipped.sums[0].total, without.sums[0].total):
    assert np.any(want)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)
  np.testing.assert_array_equal(np.isfinite(clipped.norms[0]), [True, False, True, True])


def test_the_label_that_is_ignored_is_no_such_label(sums):
  x, y = data()
  y[1, 1] = -1
  assert np.all(np.isfinite(sums('bookkeeping', x, y, ignore_class=-1).norms[0]))
  y[1, 1] = -2
  assert not np.isfinite(sums('bookkeeping', x, y, ignore_class=-1).norms[0][1])


def test_a_label_of_weight_zero_is_not_looked_at(sums):
  x, y = data()
  y[1, 1] = -100
  weight = np.array([[1, 1], [1, 0], [1, 1], [1, 1]], np.float32)
  assert np.all(np.isfinite(sums('bookkeeping', x, y, weight=weight).norms[0]))


@pytest.mark.thorough
@pytest.mark.pitfall(
    'Records are left out silently because of bad ids.',
    severity='medium', stops='the diagnostics count them, and are marked as not private')
def test_training_goes_on_and_counts_them():
  x, y = data()
  x[0, 0], y[2, 1] = WORDS, CLASSES
  model = tfdp.make_private(language_model())
  model.compile(
      tfdp.DPAdam(0.1, l2_norm_clip=1.0, noise_multiplier=0.1, batch_size=4, diagnostics=True),
      keras.losses.SparseCategoricalCrossentropy(from_logits=True))
  history = model.fit(x, y, batch_size=4, verbose=0).history
  assert history['private/records_left_out'] == [2.0]
  assert all(np.all(np.isfinite(w)) for w in model.get_weights())


def _frozen():
  table = layers.Embedding(WORDS, 4)
  table.trainable = False
  return [table, layers.Dense(CLASSES)]


class Own(layers.Layer):
  """Reads its weight in a loop, so that examples are taken one by one."""

  def build(self, shape):
    self.matrix = self.add_weight(name='matrix', shape=(shape[-1], CLASSES))

  def call(self, x):
    return tf.while_loop(lambda i, _: i < 1, lambda i, _: [
        i + 1, tf.linalg.matmul(x, tf.convert_to_tensor(self.matrix))],
                         [0, tf.zeros(tf.concat([tf.shape(x)[:2], [CLASSES]], 0))])[1]


@pytest.mark.thorough(but=['_frozen-int32-7', '_frozen-float32-nan'])
@pytest.mark.parametrize('make, dtype, value', [
    (_frozen, 'int32', WORDS), (_frozen, 'float32', -3.0), (_frozen, 'float32', np.nan),
    (lambda: [layers.Embedding(WORDS, 4), layers.Dense(CLASSES)], 'float32', 1e20),
    (lambda: [layers.Embedding(WORDS, 4), Own()], 'int32', -1)])
def test_tables_that_are_not_trained_and_ids_of_other_types(make, dtype, value):
  model = keras.Sequential([keras.Input((2,), dtype=dtype), *make()])
  x, y = data()
  x = x.astype(dtype)
  x[1, 1] = value
  model = tfdp.make_private(model)
  model.compile(
      tfdp.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=0.1, batch_size=4, diagnostics=True),
      keras.losses.SparseCategoricalCrossentropy(from_logits=True))
  assert model.fit(x, y, batch_size=4, verbose=0).history['private/records_left_out'] == [1.0]
  assert all(np.all(np.isfinite(w)) for w in model.get_weights())


@pytest.mark.thorough
def test_a_table_may_be_asked_for_constants():
  """Positions that a layer made when it was built, as vision transformers do."""

  class Positions(keras.layers.Layer):

    def __init__(self):
      super().__init__()
      self.table = keras.layers.Embedding(3, 2)

    def build(self, shape):
      self.table.build([shape[1]])
      with tf.init_scope():
        self.ids = tf.range(3)

    def call(self, x):
      return x + self.table(self.ids)

  model = tfdp.make_private(keras.Sequential([
      keras.layers.Input([3, 2]), Positions(), keras.layers.Flatten(), keras.layers.Dense(1)]))
  model.compile(tfdp.DPSGD(
      0.1, l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=4), 'mse')
  before = model.get_weights()
  model.fit(np.ones([4, 3, 2], 'float32'), np.ones([4, 1], 'float32'), batch_size=4, verbose=0)
  assert not any(np.array_equal(a, b) for a, b in zip(before, model.get_weights()))
