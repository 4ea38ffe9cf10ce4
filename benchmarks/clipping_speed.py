"""What clipping costs: every engine against the plain gradient of the same batch.

    python benchmarks/clipping_speed.py [--models mlp,cnn] [--jit] [--materialized]

Each row is one model; figures are ratios of times to the plain, non-private
gradient (`tape.gradient` of the mean loss), measured in turns in the same process,
so that a busy machine disturbs all alike. Both the best wall-clock and the best
processor time of a round are compared; the first is printed, the second in
brackets. Peak memory is measured by a process of its own per cell (--memory).
"""

import argparse
import os
import subprocess
import sys
import time

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive.clipping import base as clipping
from tfdp_adaptive.clipping import bookkeeping
from tfdp_adaptive.clipping import losses
from tfdp_adaptive.clipping import materialized
from tfdp_adaptive.rules import base

keras = compat.keras
layers = keras.layers
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def mlp(batch=256):
  """784-512-512-10, the model of tensorflow_privacy's tutorials' size."""
  model = keras.Sequential([
      keras.Input((784,)), layers.Dense(512, activation='relu'),
      layers.Dense(512, activation='relu'), layers.Dense(10)])
  return model, _floats(batch, 784), _ids(10, batch)


def cnn(batch=256):
  """The MNIST network of tensorflow_privacy's tutorials."""
  model = keras.Sequential([
      keras.Input((28, 28, 1)),
      layers.Conv2D(16, 8, strides=2, padding='same', activation='relu'), layers.MaxPooling2D(2, 1),
      layers.Conv2D(32, 4, strides=2, padding='valid', activation='relu'),
      layers.MaxPooling2D(2, 1), layers.Flatten(), layers.Dense(32, activation='relu'),
      layers.Dense(10)])
  return model, _floats(batch, 28, 28, 1), _ids(10, batch)


def lstm(batch=32, length=35, vocabulary=10000):
  """A next-word model of 2.16 M parameters, the size of PAGAN's WikiText-2 one."""
  model = keras.Sequential([
      keras.Input((length,), dtype='int32'), layers.Embedding(vocabulary, 100),
      layers.LSTM(100, return_sequences=True), layers.Dense(vocabulary)])
  return model, _ids(vocabulary, batch, length), _ids(vocabulary, batch, length)


def transformer(batch=32, length=64, vocabulary=2000, width=128, blocks=2):
  """A causal language model of pre-normalised blocks."""
  x = inputs = keras.Input((length,), dtype='int32')
  x = layers.Embedding(vocabulary, width)(x)
  for _ in range(blocks):
    y = layers.LayerNormalization()(x)
    y = layers.MultiHeadAttention(4, width // 4)(y, y, use_causal_mask=True)
    x = layers.Add()([x, y])
    y = layers.LayerNormalization()(x)
    y = layers.Dense(4 * width, activation='gelu')(y)
    x = layers.Add()([x, layers.Dense(width)(y)])
  outputs = layers.Dense(vocabulary)(layers.LayerNormalization()(x))
  return (keras.Model(inputs, outputs), _ids(vocabulary, batch, length),
          _ids(vocabulary, batch, length))


def deep_transformer():
  return transformer(blocks=6, batch=16)


def embedding(batch=256, length=20, vocabulary=50000, width=64):
  """A bag of words over a wide table."""
  model = keras.Sequential([
      keras.Input((length,), dtype='int32'), layers.Embedding(vocabulary, width),
      layers.GlobalAveragePooling1D(), layers.Dense(64, activation='relu'), layers.Dense(10)])
  return model, _ids(vocabulary, batch, length), _ids(10, batch)


MODELS = {f.__name__: f for f in (mlp, cnn, lstm, transformer, deep_transformer, embedding)}


def _floats(*shape):
  return tf.constant(np.random.default_rng(0).normal(size=shape), tf.float32)


def _ids(high, *shape):
  return tf.constant(np.random.default_rng(1).integers(0, high, size=shape), tf.int32)


def plain(model, x, y):
  variables = [compat.raw_variable(v) for v in model.trainable_variables]

  def step(x, y):
    with tf.GradientTape() as tape:
      loss = tf.reduce_mean(CROSS_ENTROPY(y, model(x, training=True)))
    # Dense, as an optimizer with moments needs them.
    return [tf.convert_to_tensor(g) for g in tape.gradient(loss, variables)]

  return step


def private(engine, scaled):
  def make(model, x, y):
    loss = losses.ExampleLoss(CROSS_ENTROPY)
    scale = [tf.ones(v.shape) + tf.random.uniform(v.shape) for v in model.trainable_variables]

    def step(x, y, scale):
      batch = clipping.Batch(x, y, (), tf.ones([x.shape[0]], tf.bool))
      queries = [base.Query(scale=list(scale) if scaled else ())]
      return engine(model, loss, batch, [base.Ask()], queries, [0.1]).sums[0].total

    return lambda x, y: step(x, y, scale)

  return make


ENGINES = {
    'plain': plain,
    'isotropic': private(bookkeeping.engine, False),
    'scaled': private(bookkeeping.engine, True),
    'materialized': private(materialized.vectorized, False),
    'materialized scaled': private(materialized.vectorized, True),
}


def compiled(name, engine, jit):
  model, x, y = MODELS[name]()
  step = tf.function(ENGINES[engine](model, x, y), jit_compile=jit or None, autograph=False)
  for _ in range(2):
    step(x, y)
  return lambda: step(x, y)[0].numpy()


def measure(steps, seconds):
  """{name: (best wall, best processor)} seconds of a step, taken in turns."""
  times = {name: [] for name in steps}
  end = time.time() + seconds * len(steps)
  rounds = 0
  while time.time() < end or rounds < 5:
    rounds += 1
    for name, step in steps.items():
      wall, processor = time.perf_counter(), time.process_time()
      step()
      times[name].append((time.perf_counter() - wall, time.process_time() - processor))
  return {name: tuple(np.min(found, axis=0)) for name, found in times.items()}


def peak(name, engine, jit):
  """Peak resident MiB of a process that takes a few steps, less the start-up's."""
  code = ('import resource, clipping_speed as c\n'
          'start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n'
          f'step = c.compiled({name!r}, {engine!r}, {jit!r})\n'
          'step(); step()\n'
          'print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start)')
  environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
  done = subprocess.run([sys.executable, '-c', code], env=environment, check=True,
                        capture_output=True, text=True, cwd=os.path.dirname(__file__) or '.')
  return int(done.stdout.split()[-1]) / 1024


def main():
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--models', default=','.join(MODELS))
  parser.add_argument('--engines', default='isotropic,scaled')
  parser.add_argument('--jit', action='store_true', help='compile with XLA')
  parser.add_argument('--memory', action='store_true', help='peak memory, too')
  parser.add_argument('--seconds', type=float, default=5.0, help='per cell')
  arguments = parser.parse_args()
  engines = ['plain'] + arguments.engines.split(',')
  print(f'TensorFlow {tf.__version__}, XLA: {arguments.jit}. Ratios to the plain gradient: '
        'wall clock (processor time)' + (', peak memory.' if arguments.memory else '.'))
  print(f"{'model':18}{'plain':>10}" + ''.join(f'{e:>22}' for e in engines[1:]), flush=True)
  for name in arguments.models.split(','):
    steps = {e: compiled(name, e, arguments.jit) for e in engines}
    found = measure(steps, arguments.seconds)
    memory = {e: peak(name, e, arguments.jit) for e in engines} if arguments.memory else {}
    base_wall, base_processor = found['plain']
    row = f'{name:18}{1000 * base_wall:7.1f} ms'
    for e in engines[1:]:
      cell = f'{found[e][0] / base_wall:.2f} ({found[e][1] / base_processor:.2f})'
      cell += f' {memory[e] / memory["plain"]:.2f}' if memory else ''
      row += f'{cell:>22}'
    print(row, flush=True)


if __name__ == '__main__':
  main()
