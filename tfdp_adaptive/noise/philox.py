# SPDX-License-Identifier: Apache-2.0
"""Random integers of a key: Philox4x32-10 (Salmon et al., 2011, "As easy as 1, 2, 3").

The words are those of TensorFlow's generator. That one computes block after block, and took more
time on a CPU than all else of the noise. Written in operations, XLA computes several blocks at a
time. It does so only in 64-bit arithmetic, and would compute all rounds again for every output.
Therefore a block leaves as one complex number of 128 bits.
"""

from typing import Sequence, Tuple

import numpy as np
import tensorflow as tf

_FACTORS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = np.outer(range(10), (0x9E3779B9, 0xBB67AE85))  # By round.


def words(key: tf.Tensor, shape: Sequence[int], dtype: tf.DType) -> tf.Tensor:
  """Returns unsigned or signed integers of all their bits, equal inside and outside XLA.

  They are `tf.random.stateless_uniform(shape, key, minval=None, maxval=None, dtype=dtype,
  alg='philox')` for a `key` of [2] int64, by a quarter of the operations.
  """
  state, counter = _scrambled(key)
  return tf.raw_ops.StatelessRandomUniformFullIntV2(
      shape=shape, key=state, counter=counter, dtype=dtype, alg=1)


def halves(key: tf.Tensor, blocks: int, dtype: tf.DType) -> Tuple[tf.Tensor, tf.Tensor]:
  """Returns the first and the second half of every block, as unsigned integers of `dtype` each.

  Together they are `words(key, [blocks, 2, 8 // dtype.size], dtype)`.
  """
  block = _blocks(*_scrambled(key), blocks)
  first, second = (tf.reshape(tf.bitcast(half, dtype), [-1])
                   for half in (tf.math.real(block), tf.math.imag(block)))
  return first, second


def _scrambled(key: tf.Tensor) -> Tuple[tf.Tensor, tf.Tensor]:
  """Returns uint64 `(key [1], counter [2])` of the generator, as TensorFlow makes them."""
  # Its `StatelessRandomGetKeyCounter` gives others under XLA for long seeds.
  mixed = tf.raw_ops.StatelessRandomUniformFullIntV2(
      shape=[2], key=[0x02461E293EC8F720], counter=tf.cast(key, tf.uint64), dtype=tf.uint64, alg=1)
  return mixed[:1], mixed * tf.constant([0, 1], tf.uint64)


@tf.function(jit_compile=True, autograph=False)
def _blocks(key: tf.Tensor, counter: tf.Tensor, count: int) -> tf.Tensor:
  """Returns [count] complex128: the bits of blocks, of uint64 `key` [1] and `counter` [2]."""
  width, mask = tf.constant(32, tf.uint64), tf.constant(2**32 - 1, tf.uint64)
  words = lambda number: (tf.bitwise.bitwise_and(number, mask),
                          tf.bitwise.right_shift(number, width))
  factors = [tf.constant(factor, tf.uint64) for factor in _FACTORS]
  round_keys = tf.unstack(words(tf.stack(words(key[0])) + tf.constant(_KEY_STEPS, tf.uint64))[0])
  add = tf.cast(tf.range(count, dtype=tf.int64), tf.uint64)
  low = counter[0] + add
  x = (*words(low), *words(counter[1] + tf.cast(low < add, tf.uint64)))
  for round_key in round_keys:
    (first_low, first_high), (second_low, second_high) = (
        words(word * factor) for word, factor in zip(x[::2], factors))
    x = (second_high ^ x[1] ^ round_key[0], second_low,
         first_high ^ x[3] ^ round_key[1], first_low)
  return tf.complex(*(tf.bitcast(x[i] | tf.bitwise.left_shift(x[i + 1], width), tf.float64)
                      for i in (0, 2)))
