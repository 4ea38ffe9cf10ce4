# SPDX-License-Identifier: Apache-2.0
"""Standard normals from integers: exact to rounding, tails included, the same under XLA."""

import math

import numpy as np
import pytest
from scipy import stats
import tensorflow as tf

from tfdp_adaptive import trees
from tfdp_adaptive.noise import keys
from tfdp_adaptive.noise import streams

TYPES = pytest.mark.parametrize('dtype', [tf.float32, tf.float64])


def draw(seed, count, dtype=tf.float32, jit_compile=None):
  vectors = lambda key: streams.vectors(key, (tf.TensorSpec([count], dtype),))[0]
  if jit_compile is not None:
    vectors = tf.function(vectors, jit_compile=jit_compile, autograph=False)
  return vectors(keys.from_seed(seed)).numpy().astype(np.float64)


@TYPES
def test_box_muller_of_chosen_integers(dtype):
  width, integer = {tf.float32: (32, np.uint32), tf.float64: (64, np.uint64)}[dtype]
  radii = [0, 1, 2, 1000, 2**(width // 2) + 1, 2**(width - 1), 3 * 2**(width - 2)]
  angles = [0, 2**(width - 3), 2**(width - 2), 5 * 2**(width - 3), 2**width - 1]
  bits = np.array([(r, a) for r in radii for a in angles], integer).T
  actual = streams.box_muller(*tf.constant(bits)).numpy()
  u = (bits[0].astype(np.longdouble) + 0.5) * np.longdouble(2)**-width
  radius = np.sqrt(-2 * np.log(u)).astype(np.float64)
  angle = 2 * math.pi * bits[1].astype(np.float64) * 2.0**-width
  precision = np.finfo(dtype.as_numpy_dtype).eps
  np.testing.assert_allclose(
      actual, radius * np.stack([np.sin(angle), np.cos(angle)]), atol=20 * precision)
  # The rarest integer is the furthest out, and the commonest mistake would be NaN or infinity.
  largest = math.sqrt(2 * (width + 1) * math.log(2))
  np.testing.assert_allclose(np.abs(actual).max(), largest, rtol=10 * precision)
  assert largest > (6.7 if dtype == tf.float32 else 9.4)
  shortest = streams.box_muller(*tf.constant([[2**width - 1], [0]], bits.dtype))
  assert 0 < np.abs(shortest).max() < 2 * math.sqrt(precision)  # Finite: u stays below one.


@TYPES
def test_sine_of_integers_is_exact_to_rounding(dtype):
  width, integer = {tf.float32: (32, np.uint32), tf.float64: (64, np.uint64)}[dtype]
  corners = [(eighth * 2**(width - 3) + off) % 2**width
             for eighth in range(8) for off in (-1, 0, 1)]
  random = np.random.default_rng(3).integers(0, 2**width, 10_000, integer)
  turn = np.concatenate([np.array(corners, integer), random])
  signed = turn.astype(np.int64 if width == 64 else np.int32).astype(np.longdouble)
  exact = np.sin(signed * np.longdouble(2)**(1 - width) * np.longdouble('3.14159265358979323846'))
  actual = streams.sine(tf.constant(turn), dtype).numpy()
  assert np.abs(actual - exact).max() < 2 * np.finfo(dtype.as_numpy_dtype).eps
  # Zeros and extremes are where they belong, whatever the rounding.
  zeros = streams.sine(tf.constant([0, 2**(width - 1)], turn.dtype), dtype)
  np.testing.assert_array_equal(zeros, [0, 0])


@TYPES
def test_distribution_is_standard_normal_and_no_other(dtype):
  z = draw(5, 200_000, dtype)
  assert stats.kstest(z, 'norm').pvalue > 0.01
  for wrong in (2 / 3, 3 / 2, 0.98, 1.02):
    assert stats.kstest(z / wrong, 'norm').pvalue < 1e-3
  # Tails: counts beyond 3, 3.5 and 4 standard deviations, each within 4 of its own.
  for limit in (3, 3.5, 4):
    expected = 2 * stats.norm.sf(limit) * len(z)
    assert abs(np.sum(np.abs(z) > limit) - expected) < 4 * math.sqrt(expected)


def test_the_two_halves_of_a_pair_are_independent():
  sine, cosine = np.split(draw(6, 100_000), 2)
  for f, g in ((np.abs, np.abs), (np.square, np.square), (np.array, np.array), (np.array, np.abs)):
    assert stats.pearsonr(f(sine), g(cosine)).pvalue > 1e-3


@pytest.mark.parametrize('count', [20_000, 4 * trees.WORTH_COMPILING])  # Compiled by itself or not.
@TYPES
def test_xla_draws_the_same_numbers(dtype, count):
  eager = draw(7, count, dtype)
  tolerance = 50 * np.finfo(dtype.as_numpy_dtype).eps
  np.testing.assert_allclose(draw(7, count, dtype, True), eager, atol=tolerance)
  np.testing.assert_array_equal(draw(7, count, dtype, False), eager)
  bits = tf.random.stateless_uniform(  # Blocks of 128 bits: half for radii, half for angles.
      [count * dtype.size // 16, 2, 8 // dtype.size], keys.from_seed(7), minval=None, maxval=None,
      alg='philox', dtype={tf.float32: tf.uint32, tf.float64: tf.uint64}[dtype])
  radii, angles = np.moveaxis(bits, 1, 0).reshape(2, count // 2)
  plain = tf.reshape(streams.box_muller(*map(tf.constant, (radii, angles))), [-1])
  np.testing.assert_allclose(eager, plain, atol=tolerance)


def test_tensorflows_own_normals_would_not_do():
  """Why ours: if this fails one day, look again."""
  own = lambda key: tf.random.stateless_normal([1000], key, alg='philox')
  eager = own(keys.from_seed(1)).numpy()
  assert np.abs(tf.function(own, jit_compile=True)(keys.from_seed(1)).numpy() - eager).max() > 0.1


def test_flat_vectors_become_the_tree():
  specs = {'b': tf.TensorSpec([2, 2]), 'a': [tf.TensorSpec([], tf.float64), tf.TensorSpec([3])]}
  flat = streams.flat_specs(specs)
  assert {(s.dtype, tuple(s.shape)) for s in flat} == {(tf.float64, (4,)), (tf.float32, (8,))}
  tree = streams.unflatten(tuple(tf.range(s.shape[0], dtype=s.dtype) for s in flat), specs)
  np.testing.assert_array_equal(tree['a'][0], 0.0)
  np.testing.assert_array_equal(tree['a'][1], [0, 1, 2])
  np.testing.assert_array_equal(tree['b'], [[3, 4], [5, 6]])
  (long,) = streams.flat_specs([tf.TensorSpec([99_991]), tf.TensorSpec([3, 7])])
  assert long.shape[0] >= 99_991 + 21 and long.shape[0] % 2048 == 0
  assert [t.shape for t in streams.unflatten((tf.zeros(long.shape),), [
      tf.TensorSpec([99_991]), tf.TensorSpec([3, 7])])] == [(99_991,), (3, 7)]


def test_types_have_streams_of_their_own():
  flat = streams.flat_specs([tf.TensorSpec([1000]), tf.TensorSpec([1000], tf.float64)])
  radius = lambda vector: np.hypot(*np.split(vector.numpy().astype(np.float64), 2))
  single, double = map(radius, streams.vectors(keys.from_seed(2), flat))
  shared = radius(streams.vectors(keys.from_seed(2), flat[:1])[0])
  doubled = radius(streams.vectors(keys.from_seed(2), flat[1:])[0])
  # With one key, float64 would read in pairs the words that float32 reads one by one.
  np.testing.assert_allclose(doubled[:250], shared[1::2], atol=1e-3)
  for words in (single[1::2], single[::2], single[:250], single[250:]):
    assert stats.pearsonr(words, double[:250]).pvalue > 1e-3


def test_noise_of_half_precision_parameters_is_float32():
  assert trees.wide_spec(tf.TensorSpec([2], tf.bfloat16)) == tf.TensorSpec([2], tf.float32)
  assert trees.wide_spec(tf.TensorSpec([2], tf.float64)) == tf.TensorSpec([2], tf.float64)
