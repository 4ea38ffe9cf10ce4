# SPDX-License-Identifier: Apache-2.0
"""Noise on several replicas: made once, or the same on each of them without a word between them."""

import os
import pathlib
import subprocess
import sys

import pytest

# Logical devices must be made before TensorFlow starts, hence a process of its own.
_PROGRAM = '''
import numpy as np
import tensorflow as tf
devices = tf.config.list_physical_devices('CPU')
tf.config.set_logical_device_configuration(devices[0], [tf.config.LogicalDeviceConfiguration()] * 2)
import noise_oracle as oracle
from tfdp_adaptive import noise
from tfdp_adaptive.noise import keys

STEPS, SPECS = 5, {'a': tf.TensorSpec([3, 2]), 'b': [tf.TensorSpec([5], tf.float64)]}
mirrored = tf.distribute.MirroredStrategy(['/cpu:0', '/cpu:1'])
assert mirrored.num_replicas_in_sync == 2


def advance(stream, variables):
  state = tf.nest.map_structure(lambda v: v.read_value(), variables)
  row, _, state = stream.next(state, SPECS)
  tf.nest.map_structure(lambda v, value: v.assign(value), variables, state)
  return row


for name in ('independent', 'toeplitz', 'column_normalized', 'banded_inverse', 'blt', 'tree'):
  stream = noise.stream(oracle.MECHANISMS[name], lambda: keys.from_seed(7))
  expected = oracle.rows(oracle.MECHANISMS[name], oracle.row_keys(7, STEPS), SPECS)

  # Made once, for all replicas together: what an optimizer does.
  with mirrored.scope():
    variables = tf.nest.map_structure(tf.Variable, stream.init(SPECS))
    target = tf.nest.map_structure(lambda s: tf.Variable(tf.zeros(s.shape, s.dtype)), SPECS)

  def merge(strategy):
    row = advance(stream, variables)
    for variable, value in zip(tf.nest.flatten(target), tf.nest.flatten(row)):
      strategy.extended.update(variable, lambda v, x: v.assign(x), args=(value,))

  @tf.function
  def once():
    mirrored.run(lambda: tf.distribute.get_replica_context().merge_call(merge))

  for t in range(STEPS):
    once()
    copies = [[mirrored.experimental_local_results(v)[r] for v in tf.nest.flatten(target)]
              for r in range(2)]
    for copy in copies:
      np.testing.assert_allclose(oracle.flat(copy), expected[t], atol=3e-6)
    np.testing.assert_array_equal(*map(oracle.flat, copies))

  # Made by every replica from the state it has: nothing is communicated, all agree.
  state = stream.init(SPECS)
  step = tf.function(lambda state: mirrored.run(lambda s: stream.next(s, SPECS), args=(state,)))
  for t in range(STEPS):
    row, _, state = step(state)
    rows = zip(*map(mirrored.experimental_local_results, tf.nest.flatten(row)))
    first, second = map(oracle.flat, rows)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first, expected[t], atol=3e-6)
    state = tf.nest.map_structure(lambda v: mirrored.experimental_local_results(v)[0], state)
print('equal')
'''


@pytest.mark.thorough
def test_replicas_have_the_noise_of_one_device():
  tests = pathlib.Path(__file__).resolve().parents[1]
  environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(tests.parent), str(tests)]))
  done = subprocess.run([sys.executable, '-c', _PROGRAM], env=environment, capture_output=True,
                        text=True, timeout=500, check=False)
  assert done.returncode == 0 and done.stdout.strip().endswith('equal'), done.stderr[-4000:]
