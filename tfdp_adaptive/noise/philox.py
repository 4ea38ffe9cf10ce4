# SPDX-License-Identifier: Apache-2.0
"""Random integers of a key: Philox4x32-10 (Salmon et al., 2011, "As easy as 1, 2, 3").

The words are those of TensorFlow's generator. That one computes block after block, and took more
time on a CPU than all else of the noise. Written in operations, XLA computes several blocks at a
time. It does so only in 64-bit arithmetic, and would compute all rounds again for every output.
Therefore a block leaves as one complex number of 128 bits.
"""

import functools
from typing import Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive.noise import keys

_FACTORS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = np.outer(range(10), (0x9E3779B9, 0xBB67AE85))  # Key increments by round.


def halves(key: tf.Tensor, blocks: int, dtype: tf.DType) -> Tuple[tf.Tensor, tf.Tensor]:
  """Returns the first and the second half of every block, as unsigned integers of `dtype` each.

  Together they are `keys.words(key, [blocks, 2, 8 // dtype.size], dtype)`.
  """
  block = _blocks(*keys.scrambled(key), blocks)
  first, second = (tf.reshape(tf.bitcast(half, dtype), [-1])
                   for half in (tf.math.real(block), tf.math.imag(block)))
  return first, second


@tf.function(jit_compile=True, autograph=False)
def _blocks(key: tf.Tensor, counter: tf.Tensor, count: int) -> tf.Tensor:
  """Returns [count] complex128: the bits of blocks, of uint64 `key` [1] and `counter` [2]."""
  width, mask = tf.constant(32, tf.uint64), tf.constant(2**32 - 1, tf.uint64)
  low_word = functools.partial(tf.bitwise.bitwise_and, mask)
  words = lambda number: (low_word(number), tf.bitwise.right_shift(number, width))
  factors = [tf.constant(factor, tf.uint64) for factor in _FACTORS]
  round_keys = tf.unstack(words(tf.stack(words(key[0])) + tf.constant(_KEY_STEPS, tf.uint64))[0])
  add = tf.cast(tf.range(count, dtype=tf.int64), tf.uint64)
  low = counter[0] + add
  x = (*words(low), *words(counter[1] + tf.cast(low < add, tf.uint64)))
  for round_key in round_keys:
    # With masks, compilers know that 32 bits are multiplied, which is three times as fast.
    (first_low, first_high), (second_low, second_high) = (
        words(low_word(word) * factor) for word, factor in zip(x[::2], factors))
    x = (second_high ^ x[1] ^ round_key[0], second_low,
         first_high ^ x[3] ^ round_key[1], first_low)
  return tf.complex(*(tf.bitcast(x[i] | tf.bitwise.left_shift(x[i + 1], width), tf.float64)
                      for i in (0, 2)))
