# SPDX-License-Identifier: Apache-2.0
"""Keys: 128 bits, fresh at every execution, and never used twice."""

import numpy as np
import pytest
import tensorflow as tf

from tfdp_adaptive import mechanisms
from tfdp_adaptive import noise
from tfdp_adaptive.noise import keys


def unique(rows):
  rows = [tuple(np.asarray(row)) for row in rows]
  return len(set(rows)) == len(rows)


def test_system_keys_are_fresh_in_eager_mode_and_at_every_run_of_a_graph():
  graph = tf.function(lambda: (keys.from_system(), keys.from_system()))
  drawn = [keys.from_system() for _ in range(4)] + [key for _ in range(4) for key in graph()]
  # In another graph that looks the same, too: nothing is a constant of the trace.
  drawn += list(tf.function(lambda: (keys.from_system(), keys.from_system()))())
  assert unique(drawn)
  assert unique([[word] for key in drawn for word in np.asarray(key)])
  assert all(key.dtype == tf.int64 and key.shape == [2] for key in drawn)
  assert graph.experimental_get_tracing_count() == 1


def test_system_keys_are_fresh_inside_control_flow():
  def step(i, seen):
    return i + 1, tf.tensor_scatter_nd_update(seen, [[i]], [keys.from_system()])

  @tf.function
  def loop():
    return tf.while_loop(lambda i, seen: i < 5, step, (0, tf.zeros([5, 2], tf.int64)))[1]

  assert unique(np.concatenate([loop(), loop()]))


@pytest.mark.parametrize('graph', [False, True])
def test_every_bit_of_a_system_key_is_used(graph):
  draw = tf.function(keys.from_system) if graph else keys.from_system
  drawn = np.stack([draw() for _ in range(64)]).view(np.uint64)
  bits = np.unpackbits(drawn.view(np.uint8), axis=1)
  # The graph's halves are reduced modulo 2^63 - 1: 63 bits each.
  constant = np.flatnonzero((bits == bits[0]).all(axis=0))
  assert len(constant) == (2 if graph else 0)


def test_graph_keys_fail_closed_without_the_kernels_uuids(monkeypatch):
  monkeypatch.setattr(keys, '_KERNEL_UUID', '/nowhere/uuid')
  with pytest.raises(RuntimeError, match='Cannot draw a key inside a graph'):
    tf.function(keys.from_system)()
  assert unique([keys.from_system(), keys.from_system()])


@pytest.mark.pitfall(
    'Under XLA a key is a constant of the compiled program.',
    severity='critical', stops='an error')
def test_xla_has_no_keys_rather_than_constant_ones():
  with pytest.raises(tf.errors.OpError):
    tf.function(keys.from_system, jit_compile=True)()


def test_init_draws_a_fresh_key_unless_a_seed_is_given():
  specs = [tf.TensorSpec([2])]
  stream = noise.stream(mechanisms.IndependentGaussian())
  init = tf.function(lambda: stream.init(specs))
  assert unique([stream.init(specs).key, stream.init(specs).key, init().key, init().key])
  seeded = noise.stream(mechanisms.IndependentGaussian(), lambda: keys.from_seed(1))
  np.testing.assert_array_equal(seeded.init(specs).key, seeded.init(specs).key)
  assert unique([keys.from_seed(seed) for seed in (0, 1, 2, -1, 2**62)])


def test_children_and_chain_never_meet():
  """Diagonal counters share values between neighbours; a chain of keys must not."""
  drawn = []
  for seed in range(4):  # Adjacent seeds.
    key = keys.from_seed(seed)
    for _ in range(20):
      row_key, key = keys.split(key)
      drawn.append(row_key)
      drawn.extend(keys.children(row_key, 5))
  assert unique(drawn)
  np.testing.assert_array_equal(keys.children(drawn[0], 3), keys.children(drawn[0], 3))


def test_children_are_the_same_under_xla():
  draw = lambda key: keys.children(key, 7)
  np.testing.assert_array_equal(
      tf.function(draw, jit_compile=True)(keys.from_seed(3)), draw(keys.from_seed(3)))
