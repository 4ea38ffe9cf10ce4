# SPDX-License-Identifier: Apache-2.0
"""Random integers of a key: Philox4x32-10 (Salmon et al., 2011, "As easy as 1, 2, 3").

The words are those of TensorFlow's generator, which computes one block at a time and, on a CPU, took
more time than all else of noise. Written in operations, XLA computes several blocks at a time. It
does so only in 64-bit arithmetic, and it computes all rounds again for every output: therefore a
block leaves as one complex number of 128 bits.
"""

from typing import Tuple

import tensorflow as tf

from tfdp_adaptive import trees

_FACTORS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85


def halves(key: tf.Tensor, count: int, dtype: tf.DType) -> Tuple[tf.Tensor, tf.Tensor]:
  """Returns the first and the second half of every block, [count] unsigned integers each.

  Args:
    key: [2] int64, used up.
    count: A multiple of 2 for uint32.
    dtype: uint32 or uint64.
  """
  words = 8 // dtype.size  # In half a block.
  blocks = count // words
  if not trees.worth_compiling(4 * blocks):
    block = tf.random.stateless_uniform(
        [blocks, 2, words], key, minval=None, maxval=None, dtype=dtype, alg='philox')
    return tf.reshape(block[:, 0], [count]), tf.reshape(block[:, 1], [count])
  # As TensorFlow does. (Its `StatelessRandomGetKeyCounter` gives others under XLA for long seeds.)
  mixed = tf.raw_ops.StatelessRandomUniformFullIntV2(
      shape=[2], key=[0x02461E293EC8F720], counter=tf.cast(key, tf.uint64), dtype=tf.uint64, alg=1)
  block = _blocks(mixed[:1], tf.stack([tf.zeros_like(mixed[1]), mixed[1]]), blocks)
  return tuple(tf.reshape(tf.bitcast(half, dtype), [count])
               for half in (tf.math.real(block), tf.math.imag(block)))


@tf.function(jit_compile=True, autograph=False)
def _blocks(key: tf.Tensor, counter: tf.Tensor, count: int) -> tf.Tensor:
  """Returns [count] complex128, the bits of blocks; `key` [1] and `counter` [2, low first] uint64."""
  add = tf.cast(tf.range(count, dtype=tf.int64), tf.uint64)
  low = counter[0] + add
  high = counter[1] + tf.cast(low < add, tf.uint64)
  x = [_low(low), _high(low), _low(high), _high(high)]  # Words of 32 bits, as uint64.
  keys = _low(key[0]), _high(key[0])
  for _ in range(10):
    first, second = (word * factor for word, factor in zip(x[::2], _FACTORS))
    x = [_high(second) ^ x[1] ^ keys[0], _low(second), _high(first) ^ x[3] ^ keys[1], _low(first)]
    keys = tuple(_low(word + step) for word, step in zip(keys, _KEY_STEPS))
  low, high = (tf.bitcast(x[i] | tf.bitwise.left_shift(x[i + 1], 32), tf.float64) for i in (0, 2))
  return tf.complex(low, high)


def _low(word: tf.Tensor) -> tf.Tensor:
  return tf.bitwise.bitwise_and(word, 2**32 - 1)


def _high(word: tf.Tensor) -> tf.Tensor:
  return tf.bitwise.right_shift(word, 32)
