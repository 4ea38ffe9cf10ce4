# SPDX-License-Identifier: Apache-2.0
"""What a row of noise costs, beside one Gaussian row and the bytes that must move.

    python benchmarks/speed/noise_rows.py [--sizes 1e5,1e6,1e7] [--gigabytes 12] [--only BLT]
        [--jit]
    <an environment with requirements/peers-jax.in>/bin/python benchmarks/speed/noise_rows.py --jax

A row is drawn by a compiled step that keeps its state in variables (jax: in
donated buffers). Every case takes turns with one Gaussian row of ours, so that
a busy machine disturbs both alike; the best round of each is compared. Columns:

    ms        one row
    x row     divided by one Gaussian row of ours (`--jax`: of jax)
    floor ms  the bytes that must move (4 bytes times the rows of noise read and
              written) at the bandwidth of a large copy measured in the same run
    state MB  what is kept between two rows; peak MB: state and temporaries
"""

import argparse
import functools
import os
import platform
import re
import time

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import numpy as np

STEPS, ROUNDS = 2000, 7
# Name -> (description for both libraries, rows read, rows written, rows of state).
CASES = {'one Gaussian row': (('independent',), 0, 1, 0)}
CASES.update({f'BLT d={d}': (('blt', d), d, d + 1, d) for d in (1, 2, 3, 4)})
CASES.update({f'banded b={b}': (('banded', b), b - 1, 1, b - 1)
              for b in (1, 2, 4, 8, 16, 32, 64, 128)})
CASES.update({f'banded inverse p={p}': (('inverse', p), 0, 1, 0) for p in (2, 4, 16)})
CASES['tree (Honaker)'] = (('tree',), 2, 2, STEPS.bit_length() - 1)


def tensorflow_cases(jit_compile):
  """{name: size -> step} of this library, and of what else there is in TensorFlow."""
  import tensorflow as tf  # pylint: disable=import-outside-toplevel

  from tfdp_adaptive import compat  # pylint: disable=import-outside-toplevel
  from tfdp_adaptive import mechanisms  # pylint: disable=import-outside-toplevel
  from tfdp_adaptive import noise  # pylint: disable=import-outside-toplevel
  make = {'independent': mechanisms.IndependentGaussian,
          'blt': lambda d: mechanisms.BLT(d, STEPS),
          'banded': lambda b: mechanisms.BandedToeplitz(b, STEPS),
          'inverse': lambda p: mechanisms.BandedInverse(p, STEPS),
          'tree': lambda: mechanisms.Tree(STEPS)}
  compiled = functools.partial(tf.function, jit_compile=jit_compile)

  def ours(description, size):
    stream, specs = noise.stream(make[description[0]](*description[1:])), tf.TensorSpec([size])
    # One by one, or the state would for a moment be there twice.
    state = tf.function(lambda: stream.init(specs)).get_concrete_function().structured_outputs
    variables = tf.nest.map_structure(lambda t: tf.Variable(tf.zeros(t.shape, t.dtype)), state)
    variables.row.assign(STEPS // 2)  # The middle of a run, where all bands have filled.

    @compiled
    def step():
      state = tf.nest.map_structure(lambda v: v.read_value(), variables)
      row, _, state = stream.next(state, specs)
      tf.nest.map_structure(lambda v, value: v.assign(value), variables, state)
      return row
    return lambda: step()[0].numpy()

  def tensorflow(size):
    key = tf.Variable([1, 2], dtype=tf.int64)

    @compiled
    def step():
      key.assign_add([1, 1])
      return tf.random.stateless_normal([size], key.read_value(), alg='philox')
    return lambda: step()[0].numpy()

  def numpy(size):
    rng, out = np.random.Generator(np.random.PCG64()), np.empty(size, np.float32)
    return lambda: rng.standard_normal(out=out, dtype=np.float32)

  def privacy_tree(size):
    module = compat.privacy_module('tree_aggregation')
    tree = module.EfficientTreeAggregator(
        module.GaussianNoiseGenerator(1.0, tf.TensorSpec([size]), 1))
    state = [tree.init_state()]

    def step():  # Its state changes shape, which rules out variables and XLA.
      row, state[0] = tree.get_cumsum_and_update(state[0])
      return row[0].numpy()
    return step

  cases = {name: functools.partial(ours, case[0]) for name, case in CASES.items()}
  return dict(cases, **{'tf.random.stateless_normal': tensorflow, 'NumPy, one core': numpy,
                        'tensorflow_privacy tree': privacy_tree}), tf.__version__


def jax_cases(jit_compile):
  del jit_compile  # Always.
  import jax  # pylint: disable=import-outside-toplevel
  jax.config.update('jax_enable_x64', True)  # Its BLT insists on it; rows are float32.
  import jax.numpy as jnp  # pylint: disable=import-outside-toplevel
  import jax_privacy  # pylint: disable=import-outside-toplevel
  from jax_privacy import noise_addition  # pylint: disable=import-outside-toplevel
  from jax_privacy.matrix_factorization import buffered_toeplitz  # pylint: disable=import-outside-toplevel
  from jax_privacy.matrix_factorization import streaming_matrix  # pylint: disable=import-outside-toplevel
  from jax_privacy.matrix_factorization import toeplitz  # pylint: disable=import-outside-toplevel

  def blt(d):  # Any numbers: rows cost the same.
    c = buffered_toeplitz.BufferedToeplitz.build(jnp.linspace(0.99, 0.5, d), jnp.full(d, 0.1))
    return c.inverse_as_streaming_matrix()

  make = {'independent': streaming_matrix.identity, 'blt': blt,
          'banded': lambda b: toeplitz.inverse_as_streaming_matrix(
              jnp.linspace(1, 0.1, b, dtype=jnp.float32))}

  def theirs(description, size):
    privatizer = noise_addition.matrix_factorization_privatizer(
        make[description[0]](*description[1:]), stddev=1.0, prng_key=1, dtype=jnp.float32)
    zeros = jnp.zeros(size, jnp.float32)
    step = jax.jit(privatizer.update, donate_argnums=1)
    state = [privatizer.init(zeros)]

    def run():
      row, state[0] = step(zeros, state[0])
      row.block_until_ready()
    return run

  return ({name: functools.partial(theirs, case[0]) for name, case in CASES.items()
           if case[0][0] in make}, f'{jax.__version__}, jax_privacy {jax_privacy.__version__}')


def best(steps, repeats=1):
  """Best seconds of each step, taking turns; the first calls, which compile, do not count."""
  times = [[] for _ in steps]
  for step in steps:
    for _ in range(2):
      step()
  while len(times[0]) < ROUNDS and sum(map(sum, times)) < 20 / repeats:
    for step, own in zip(steps, times):
      start = time.perf_counter()
      for _ in range(repeats):
        step()
      own.append((time.perf_counter() - start) / repeats)
  return [min(own) for own in times]


def bandwidth():
  """Bytes per second of a copy that no cache holds, read and written bytes together."""
  source = np.ones(30_000_000, np.float32)
  target = np.empty_like(source)
  return 2 * source.nbytes / best([lambda: np.copyto(target, source)])[0]


def memory(field):
  """A field of /proc/self/status in bytes; nan where there is none."""
  try:
    with open('/proc/self/status', encoding='utf-8') as file:
      return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))
  except OSError:
    return float('nan')


def reset_peak():
  try:
    with open('/proc/self/clear_refs', 'w', encoding='utf-8') as file:
      file.write('5')
  except OSError:
    pass


def main():
  parser = argparse.ArgumentParser(description=__doc__.split('\n', maxsplit=1)[0])
  parser.add_argument('--sizes', default='1e5,1e6,1e7')
  parser.add_argument('--gigabytes', type=float, default=12, help='largest state to try')
  parser.add_argument('--only', default='', help='regular expression for the rows to time')
  parser.add_argument('--jit', action='store_true', help='compile with XLA')
  parser.add_argument('--jax', action='store_true', help='time jax_privacy instead')
  arguments = parser.parse_args()
  cases, version = (jax_cases if arguments.jax else tensorflow_cases)(arguments.jit)
  speed = bandwidth()
  print(f'{"jax" if arguments.jax else "TensorFlow"} {version}{", XLA" if arguments.jit else ""}; '
        f'Python {platform.python_version()}, {os.cpu_count()} CPUs; copy {speed / 1e9:.1f} GB/s; '
        f'load average {os.getloadavg()[0]:.1f}')
  print(f'\n{"P":>7}  {"row of":<27}{"ms":>10}{"x row":>8}{"floor ms":>10}{"state MB":>10}'
        f'{"peak MB":>9}')
  for size in (int(float(s)) for s in arguments.sizes.split(',')):
    row = cases['one Gaussian row'](size)
    for name, make in cases.items():
      _, read, written, kept = CASES.get(name, ((), 0, 1, 0))
      if not re.search(arguments.only, name):
        continue
      if 4 * size * kept > arguments.gigabytes * 1e9:
        print(f'{size:7.0e}  {name:<27}{"does not fit":>18}{"":18}{4 * size * kept / 1e6:10.1f}')
        continue
      if name == 'tensorflow_privacy tree':
        read, written, kept = CASES['tree (Honaker)'][1:]
      before = memory('VmRSS')
      step = make(size)
      reset_peak()
      # The steps of a tree differ; so many of them have one node of every lower level.
      seconds, reference = best([step, row], 16 if 'tree' in name else 1)
      peak = memory('VmHWM') - before
      print(f'{size:7.0e}  {name:<27}{1e3 * seconds:10.3f}{seconds / reference:8.2f}'
            f'{1e3 * 4 * size * (read + written) / speed:10.3f}{4 * size * kept / 1e6:10.1f}'
            f'{peak / 1e6:9.0f}', flush=True)
      del step
    print()


if __name__ == '__main__':
  main()
