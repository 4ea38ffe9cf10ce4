# SPDX-License-Identifier: Apache-2.0
"""Random integers: those of the published generator, whichever way they are computed."""

import numpy as np
import pytest
import tensorflow as tf

from tfdp_adaptive.noise import keys

# From the authors' own table of answers: counter, key, block.
ANSWERS = [
    ((0,) * 4, (0,) * 2, (0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd)),
    ((0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344), (0xa4093822, 0x299f31d0),
     (0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1))]


def by_hand(counter, key):
  """Returns a block in Python's integers."""
  x, k = list(counter), list(key)
  for _ in range(10):
    a, b = x[0] * 0xD2511F53, x[2] * 0xCD9E8D57
    x = [b >> 32 ^ x[1] ^ k[0], b % 2**32, a >> 32 ^ x[3] ^ k[1], a % 2**32]
    k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
  return tuple(x)


def words(number, count):
  return tuple(number >> 32 * i & 2**32 - 1 for i in range(count))


def number(words_):
  return sum(word << 32 * i for i, word in enumerate(words_))


def blocks(counter, key, count):
  of = lambda value, size: tf.constant(np.frombuffer(value.to_bytes(size, 'little'), np.uint64))
  drawn = keys._blocks(of(key, 8), of(counter, 16), count).numpy()
  return [tuple(map(int, block)) for block in drawn.view(np.uint32).reshape(-1, 4)]


def test_the_authors_answers():
  for counter, key, block in ANSWERS:
    assert by_hand(counter, key) == block
    assert blocks(number(counter), number(key), 1) == [block]


@pytest.mark.parametrize('start', [0, 2**32 - 3, 2**64 - 3, 2**96 - 3, 2**128 - 3, 5 * 2**77])
def test_blocks_are_counted_in_128_bits(start):
  key = 0x0123456789abcdef
  expected = [by_hand(words((start + i) % 2**128, 4), words(key, 2)) for i in range(9)]
  assert blocks(start, key, 9) == expected


@pytest.mark.thorough(but=['shape0-*', 'shape3-dtype0', 'shape1-dtype1'])
@pytest.mark.parametrize('dtype', [tf.uint32, tf.uint64, tf.int32, tf.int64])
@pytest.mark.parametrize('shape', [[0, 2], [1], [3, 2], [257]])
def test_few_words_are_those_of_tensorflow(dtype, shape):
  draws = lambda key: (keys.words(key, shape, dtype), tf.random.stateless_uniform(
      shape, key, minval=None, maxval=None, dtype=dtype, alg='philox'))
  for seed in (0, 7, -1, 2**63 - 1):
    for jit in (None, False, True):
      run = draws if jit is None else tf.function(draws, jit_compile=jit, autograph=False)
      found, expected = run(keys.from_seed(seed))
      np.testing.assert_array_equal(found, expected)
      assert found.dtype == dtype and found.shape == shape


@pytest.mark.thorough(but=['131072-dtype0', '7-dtype1', '1000-dtype0'])
@pytest.mark.parametrize('dtype', [tf.uint32, tf.uint64])
@pytest.mark.parametrize('count', [1, 7, 1000, 2**17])
def test_the_words_of_many_blocks_are_those_of_tensorflow(dtype, count):
  words = 8 // dtype.size
  draws = lambda key: (
      keys.halves(key, count, dtype),
      tf.random.stateless_uniform(
          [count, 2, words], key, minval=None, maxval=None, dtype=dtype, alg='philox'))
  for seed in (0, 7, -1, 2**63 - 1):
    for jit in (None, False, True):
      run = draws if jit is None else tf.function(draws, jit_compile=jit, autograph=False)
      halves, expected = run(keys.from_seed(seed))
      np.testing.assert_array_equal(
          np.stack([half.numpy().reshape(count, words) for half in halves], 1), expected)
