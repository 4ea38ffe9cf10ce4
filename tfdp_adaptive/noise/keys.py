# SPDX-License-Identifier: Apache-2.0
"""128-bit keys from the operating system, chains of them, and the random words of a key.

A key is used once, for children or for numbers. Every draw uses up a row key and returns the next
key of the chain, so no two draws share noise, whatever the step counters are. TensorFlow's
`NonDeterministicInts` has a seed of 32 bits per process, and tensorflow_privacy takes its seed from
the clock. Neither is enough for private noise.

Random words are those of Philox4x32-10 (Salmon et al., 2011, "As easy as 1, 2, 3"), as TensorFlow's
generator has them. That one computes block after block, and took more time on a CPU than all else
of the noise. Written in operations (`halves`), XLA computes several blocks at a time. It does so
only in 64-bit arithmetic, and would compute all rounds again for every output. Therefore a block
leaves as one complex number of 128 bits.
"""

import functools
import numbers
import os
from typing import Callable, Sequence, Tuple

import numpy as np
import tensorflow as tf

Source = Callable[[], tf.Tensor]  # Returns the first key of a stream.

_KERNEL_UUID = '/proc/sys/kernel/random/uuid'  # A fresh random UUID at every read.


@tf.autograph.experimental.do_not_convert
def from_system() -> tf.Tensor:
  """Returns a fresh [2] int64 SECRET key at every execution, in eager mode and in graphs.

  In a graph, such as a TFF `initialize`, the key must be drawn when the graph runs, and there may
  be no Python then. It is hashed from UUIDs that the kernel generates. A key drawn while tracing
  would be a constant that all runs share.
  """
  if tf.executing_eagerly():
    return tf.constant(np.frombuffer(os.urandom(16), np.int64))
  if not os.path.exists(_KERNEL_UUID):
    raise RuntimeError(
        f'Cannot draw a key inside a graph: {_KERNEL_UUID} is missing on this system. '
        'Call `init` eagerly, or run the computation on Linux.')
  uuids = tf.data.TextLineDataset([_KERNEL_UUID] * 2).batch(2).get_single_element()
  text = tf.strings.reduce_join(uuids)
  return tf.stack([
      tf.strings.to_hash_bucket_strong(text, 2**63 - 1, key=[half, 2 * half + 1])
      for half in (1, 2)])


def from_seed(seed: int) -> tf.Tensor:
  """Returns a [2] int64 key for tests; noise from it protects nobody."""
  if not isinstance(seed, numbers.Integral) or not -2**63 <= seed < 2**63:
    raise ValueError(f'`seed` must be an integer of 64 bits, or None. Received: seed={seed!r}.')
  return tf.constant([int(seed), 0x7e57], tf.int64)


def children(key: tf.Tensor, count: int) -> tf.Tensor:
  """Returns [count, 2] keys of full-range integers, equal inside and outside XLA."""
  return words(key, [count, 2], tf.int64)


def split(key: tf.Tensor) -> Tuple[tf.Tensor, tf.Tensor]:
  """Returns `(key of this row, key of the rest of the chain)`."""
  pair = children(key, 2)
  return pair[0], pair[1]


def words(key: tf.Tensor, shape: Sequence[int], dtype: tf.DType) -> tf.Tensor:
  """Returns unsigned or signed integers of all their bits, equal inside and outside XLA.

  They are `tf.random.stateless_uniform(shape, key, minval=None, maxval=None, dtype=dtype,
  alg='philox')` for a `key` of [2] int64, by a quarter of the operations.
  """
  state, counter = scrambled(key)
  return tf.raw_ops.StatelessRandomUniformFullIntV2(
      shape=shape, key=state, counter=counter, dtype=dtype, alg=1)


def scrambled(key: tf.Tensor) -> Tuple[tf.Tensor, tf.Tensor]:
  """Returns uint64 `(key [1], counter [2])` of the generator, as TensorFlow makes them."""
  # TensorFlow's `StatelessRandomGetKeyCounter` differs under XLA for long seeds.
  mixed = tf.raw_ops.StatelessRandomUniformFullIntV2(
      shape=[2], key=[0x02461E293EC8F720], counter=tf.cast(key, tf.uint64), dtype=tf.uint64, alg=1)
  return mixed[:1], mixed * tf.constant([0, 1], tf.uint64)


_FACTORS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = np.outer(range(10), (0x9E3779B9, 0xBB67AE85))  # Key increments by round.


def halves(key: tf.Tensor, blocks: int, dtype: tf.DType) -> Tuple[tf.Tensor, tf.Tensor]:
  """Returns the first and the second half of every block, as unsigned integers of `dtype` each.

  Together they are `words(key, [blocks, 2, 8 // dtype.size], dtype)`.
  """
  block = _blocks(*scrambled(key), blocks)
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
