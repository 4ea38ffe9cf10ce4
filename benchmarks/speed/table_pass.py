# SPDX-License-Identifier: Apache-2.0
"""A noised Adam step on a large embedding table: what one fused pass gains, and what is the limit.

    python benchmarks/speed/table_pass.py [--words 50000 200000] [--size 64] [--batch 2000]

Noise and moments are dense by definition: every row of the table is noised at
every step, seen or not. Each case is processor time (all threads) of one step,
the median of rounds in which all cases take turns:

    plain          scatter of the batch's rows, then Adam, operation by operation
    plain, fused   the same in one compiled function
    noised         with a row of normals of the table's size, operation by operation
    noised, fused  the same in one compiled function
    noise          the row of normals alone
    bytes          the floor: table and two moments read and written once, at the
                   bandwidth of a copy measured in the same run
"""

import argparse
import os
import pathlib
import time

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import numpy as np
import tensorflow as tf

from tfdp_adaptive.noise import keys
from tfdp_adaptive.noise import streams

ROUNDS, BATCH_SIZE, STDDEV = 31, 256., 1.
REMARKS = pathlib.Path(__file__).parents[1] / 'remarks' / 'table_pass.txt'


def adam(table, m, v, gradient):
  m = .9 * m + .1 * gradient
  v = .999 * v + .001 * gradient**2
  return table - 1e-3 * m / (tf.sqrt(v) + 1e-8), m, v


def cases(words, size, batch):
  """{name: () -> one step}."""
  count = words * size
  flat = streams.flat_specs((tf.TensorSpec([count]),))
  rows = tf.random.uniform([batch], 0, words, tf.int32)
  values = tf.random.normal([batch, size])
  state = [tf.Variable(tf.zeros([count])) for _ in range(3)]
  key = keys.from_seed(1)

  def draw():
    return streams.vectors(key, flat)[0][:count]

  def scattered():
    return tf.reshape(tf.scatter_nd(rows[:, None], values, [words, size]), [count])

  def step(noised):
    gradient = (scattered() + STDDEV * draw() if noised else scattered()) / BATCH_SIZE
    for variable, value in zip(state, adam(*state, gradient)):
      variable.assign(value)
    return state[0][0]

  source, target = np.zeros(count, np.float32), np.ones(count, np.float32)
  return {
      'plain': tf.function(lambda: step(False)),
      'plain, fused': tf.function(lambda: step(False), jit_compile=True),
      'noised': tf.function(lambda: step(True)),
      'noised, fused': tf.function(lambda: step(True), jit_compile=True),
      'noise': tf.function(lambda: state[0].assign(draw())[0], jit_compile=True),
      'copy': lambda: np.copyto(target, source)}


def milliseconds(steps):
  for step in steps.values():
    for _ in range(3):
      step()
  times = {name: [] for name in steps}
  for _ in range(ROUNDS):
    for name, step in steps.items():
      start = time.process_time()
      result = step()
      if result is not None:
        result.numpy()
      times[name].append(1e3 * (time.process_time() - start))
  return {name: float(np.median(values)) for name, values in times.items()}


def main():
  parser = argparse.ArgumentParser(description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--words', type=int, nargs='+', default=[50_000, 200_000])
  parser.add_argument('--size', type=int, default=64)
  parser.add_argument('--batch', type=int, default=2000)
  arguments = parser.parse_args()
  print(REMARKS.read_text(encoding='utf-8'))
  print(f'TensorFlow {tf.__version__}, {os.cpu_count()} CPUs')
  for words in arguments.words:
    costs = milliseconds(cases(words, arguments.size, arguments.batch))
    # A copy reads and writes once what the step does thrice.
    costs['bytes'] = 3 * costs.pop('copy')
    print(f'\n{words:,} x {arguments.size} table, {arguments.batch} rows touched\n')
    print(f'{"case":<15}{"CPU ms":>8}{"of plain":>10}', flush=True)
    for name, value in costs.items():
      print(f'{name:<15}{value:8.1f}{value / costs["plain"]:10.2f}', flush=True)


if __name__ == '__main__':
  main()
