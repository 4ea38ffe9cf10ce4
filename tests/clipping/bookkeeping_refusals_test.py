# SPDX-License-Identifier: Apache-2.0
"""What the book-keeping engine refuses: all that it cannot see."""

import bookkeeping_oracle as oracle
import numpy as np
import pytest
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import contract
from tfdp_adaptive.clipping import bookkeeping
from tfdp_adaptive.clipping import engines

keras = compat.keras
layers = keras.layers
built, run = oracle.built, oracle.run


def ids(*shape):
  return tf.constant(np.random.default_rng(0).integers(0, 7, size=shape), tf.int32)


def by_hand(inputs):
  """A softmax over the table, written outside of its layer."""
  class Tied(keras.Model):

    def __init__(self):
      super().__init__()
      self.table = layers.Embedding(7, 3)
      self.hidden = layers.Dense(3)

    def call(self, inputs):
      hidden = self.hidden(self.table(inputs))
      return tf.matmul(hidden, tf.convert_to_tensor(self.table.embeddings), transpose_b=True)

  return built(Tied(), inputs)


def by_hand_at_first(inputs):
  """The same, with a layer called after it."""
  class Early(keras.Model):

    def __init__(self):
      super().__init__()
      self.table, self.last = layers.Embedding(7, 3), layers.Dense(3)

    def call(self, inputs):
      words = self.table(inputs)
      return self.last(words + tf.gather(tf.convert_to_tensor(self.table.embeddings), inputs))

  return built(Early(), inputs)


def with_weight(inputs):
  class Offset(keras.Model):

    def __init__(self):
      super().__init__()
      self.offset = self.add_weight(name='offset', shape=(3,), initializer='zeros')
      self.table = layers.Embedding(7, 3)

    def call(self, inputs):
      return self.table(inputs) + self.offset

  return built(Offset(), inputs)


def with_positions(inputs):
  """Positions are looked up once for all examples; here there are as many as examples."""
  class Positions(keras.Model):

    def __init__(self):
      super().__init__()
      self.table, self.positions = layers.Embedding(7, 3), layers.Embedding(9, 3)

    def call(self, inputs):
      return self.table(inputs) + self.positions(tf.range(inputs.shape[1]))

  return built(Positions(), inputs)


def in_a_loop(inputs):
  class Looped(keras.Model):

    def __init__(self):
      super().__init__()
      self.table, self.dense = layers.Embedding(7, 3), layers.Dense(3)

    def call(self, inputs):
      x = self.table(inputs)
      self.dense(x)
      return tf.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, self.dense(x)),
                           (tf.constant(0), x))[1]

  return built(Looped(), inputs)


def rematerialized(inputs):
  class Remat(keras.Model):

    def __init__(self):
      super().__init__()
      self.table, self.dense = layers.Embedding(7, 3), layers.Dense(3)

    def call(self, inputs):
      return tf.recompute_grad(lambda x: self.dense(x))(self.table(inputs))

  return built(Remat(), inputs)


def random_inside(inputs):
  class Noisy(layers.Dense):

    def call(self, x):
      return super().call(x) + tf.random.normal(tf.shape(x))

  return built(keras.Sequential([layers.Embedding(7, 3), Noisy(3)]), inputs)


def batch_normalized(inputs):
  return built(keras.Sequential([layers.Embedding(7, 3), layers.BatchNormalization()]), inputs)


def transposed(inputs):
  class Transposed(keras.Model):

    def __init__(self):
      super().__init__()
      self.table, self.dense = layers.Embedding(7, 3), layers.Dense(3)

    def call(self, inputs):
      x = tf.transpose(self.table(inputs), [1, 0, 2])
      return tf.transpose(self.dense(x), [1, 0, 2])

  return built(Transposed(), inputs)


@pytest.mark.parametrize('make, message', [
    (by_hand, 'read by the model'), (by_hand_at_first, 'read by the model'),
    (with_weight, 'must belong to a layer'),
    (with_positions, 'batch as first axis'), (in_a_loop, 'inside a loop'),
    (rematerialized, 'rematerialization'), (random_inside, 'deterministic'),
    (batch_normalized, 'BatchNormalization'), (transposed, 'batch as first axis')])
def test_refused(make, message):
  """Never silently missed: what the engine cannot see it does not clip."""
  x = ids(4, 4)
  model = make(x)
  supported, reason = bookkeeping.supports(model, x)
  assert not supported and message in reason
  with pytest.raises(bookkeeping.Unsupported, match=message):
    run(model, x)
  with pytest.raises(bookkeeping.Unsupported, match=message):
    tf.function(lambda: run(model, x), autograph=False)()


@pytest.mark.thorough(but=['a weight'])
@pytest.mark.parametrize('reads', ['a weight', 'a weight in a function', 'the model again'])
def test_a_loss_that_reads_weights(reads):
  """Its gradient by them would not be seen; the materialized engine sees all."""
  x = tf.constant(np.random.default_rng(1).normal(size=(5, 3)), tf.float32)
  model = built(keras.Sequential([layers.Dense(4, activation='tanh'), layers.Dense(2)]), x)
  kernel = compat.raw_variable(model.trainable_variables[0])
  weight = lambda: tf.reduce_sum(tf.square(kernel))
  extra = {'a weight': weight, 'a weight in a function': tf.function(weight),
           'the model again': lambda: tf.reduce_sum(model(tf.ones([1, 3])))}[reads]

  def loss(y, outputs, sample_weight=()):
    return oracle.squared_error(y, outputs, sample_weight) * (1 + extra())

  batch = oracle.batch_of(x, model(x))
  arguments = model, loss, batch, oracle.request(0.5)
  for name in ('bookkeeping', 'layered'):
    engine = engines.choose(name, model, [contract.Ask()], x)
    for step in (lambda: engine(*arguments), tf.function(lambda: engine(*arguments))):
      with pytest.raises(bookkeeping.Unsupported, match="reads .*or performance=tfdp.Performance"):
        step()
  expected = oracle.by_definition(
      model, oracle.gradients(model, loss, batch), batch.mask, arguments[-1])
  materialized = engines.choose('materialized', model, [contract.Ask()], x)
  oracle.assert_close(materialized(*arguments).sums, expected, 1e-5)


def test_a_model_that_calls_other_layers_than_when_it_was_checked():
  class Deeper(keras.Model):
    depth = 1

    def __init__(self):
      super().__init__()
      self.table, self.dense = layers.Embedding(7, 3), layers.Dense(3)

    def call(self, inputs):
      x = self.table(inputs)
      for _ in range(self.depth):
        x = self.dense(x)
      return x

  x = ids(4, 4)
  model = built(Deeper(), x)
  run(model, x)
  model.depth = 2
  with pytest.raises(bookkeeping.Unsupported, match='the same layers every time'):
    run(model, x)
