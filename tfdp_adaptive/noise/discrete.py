# SPDX-License-Identifier: Apache-2.0
"""Exact discrete Gaussian noise on a public grid, from the operating system's generator.

Canonne, Kamath and Steinke, "The Discrete Gaussian for Differential Privacy"
(arXiv 2004.00010), algorithms 1 to 3 on arrays. Every coin is an integer below a bound. It is made
of bytes of the system's generator by rejection. A draw uses no floating point and no key.

The release is g (round(v / g) + N). N has an integer standard deviation S, so the grid is g = std /
S. Rounding changes the difference of neighbors by at most g in each of the D coordinates of a
step's releases. With

    S >= noise_multiplier sqrt(D) / rounding

this is at most `rounding` times the sensitivity of one record, so the total is 1 + rounding.

A standard normal takes about 25 coins of 4 or 8 bytes. A step with a million parameters takes about
two seconds of one core. The code runs in Python, outside of XLA and on one replica.
"""

import math
import os
from typing import Callable, List

import numpy as np
import tensorflow as tf

from tfdp_adaptive import trees
from tfdp_adaptive.mechanisms import independent
from tfdp_adaptive.noise import keys
from tfdp_adaptive.noise import streams

LARGEST = 2**24  # Standard deviation; its square, times what is needed, fits into 64 bits.
_MARGIN = 1 + 2.0**-20  # For the rounding of quotients.
_LARGEST_SUM = 2.0**52  # In units of the grid; clipping there is no further than it was.
_CHUNK = 1 << 17

Bytes = Callable[[int], bytes]


def below(bound: int, count: int, source: Bytes = os.urandom) -> np.ndarray:
  """Returns [count] uint64 integers, uniform in [0, bound); `bound` is at most 2**63."""
  bits = max(bound - 1, 1).bit_length()
  kind = next(k for k in (np.uint8, np.uint16, np.uint32, np.uint64)
              if 8 * np.dtype(k).itemsize >= bits)
  mask, found, missing = kind(2**bits - 1), [], count
  while missing > 0:
    more = missing if bound == 2**bits else math.ceil(1.05 * missing * 2**bits / bound) + 16
    drawn = np.frombuffer(source(more * np.dtype(kind).itemsize), kind) & mask
    drawn = drawn[drawn < bound][:missing]
    found.append(drawn.astype(np.uint64))
    missing -= len(drawn)
  return np.concatenate(found) if found else np.zeros(0, np.uint64)


def exp_minus(numerators: np.ndarray, denominator: int, source: Bytes = os.urandom) -> np.ndarray:
  """Returns [n] coins, True with probability exp(-numerator / denominator), for quotients <= 1."""
  result = np.zeros(len(numerators), bool)
  alive, k = np.arange(len(numerators)), 1
  while len(alive):
    again = below(denominator, len(alive), source) < numerators[alive]
    if k > 1:  # A coin of (n / d) / k: both of two.
      again &= below(k, len(alive), source) == 0
    result[alive[~again]] = k % 2 == 1
    alive, k = alive[again], k + 1
  return result


def _powers(count: int, source: Bytes) -> np.ndarray:
  """Returns [count] lengths of runs of True coins, each of probability 1/e."""
  result = np.zeros(count, np.uint64)
  alive = np.arange(count)
  while len(alive):
    alive = alive[exp_minus(np.ones(len(alive), np.uint64), 1, source)]
    result[alive] += np.uint64(1)
  return result


def _candidates(sigma: int, count: int, source: Bytes) -> np.ndarray:
  """Returns accepted draws of a discrete Laplace of scale sigma, by rejection."""
  u = below(sigma, count, source)
  u = u[exp_minus(u, sigma, source)]
  size = (u + np.uint64(sigma) * _powers(len(u), source)).astype(np.int64)
  negative = below(2, len(size), source).astype(bool)
  kept = ~(negative & (size == 0)) & (size < 64 * sigma)  # Beyond: less than exp(-1900) of all.
  value = np.where(negative, -size, size)[kept]
  # Keep with probability exp(-(|value| - sigma)^2 / (2 sigma^2)): whole part, then the rest.
  numerators = np.square(np.abs(value) - sigma).astype(np.uint64)
  whole, rest = np.divmod(numerators, np.uint64(2 * sigma**2))
  kept = (_powers(len(value), source) >= whole) & exp_minus(rest, 2 * sigma**2, source)
  return value[kept]


def discrete_gaussian(sigma: int, size: int, source: Bytes = os.urandom) -> np.ndarray:
  """Returns [size] int64 with probabilities exactly proportional to exp(-n^2 / (2 sigma^2))."""
  found: List[np.ndarray] = []
  missing = size
  while missing > 0:
    some = _candidates(sigma, min(_CHUNK, int(2.2 * missing) + 16), source)[:missing]
    found.append(some)
    missing -= len(some)
  return np.concatenate(found) if found else np.zeros(0, np.int64)


def integer_stddev(noise_multiplier: float, rounding: float, size: int) -> int:
  """Returns S for `size` numbers that are released together; see the module."""
  stddev = math.ceil(noise_multiplier * math.sqrt(size) / rounding * _MARGIN)
  if not 1 <= stddev <= LARGEST:
    raise ValueError(
        f'Discrete noise has from 1 to {LARGEST} steps of its grid per standard deviation. '
        f'Received: {stddev}, of noise_multiplier={noise_multiplier}, rounding={rounding:g} and '
        f'{size} numbers. Use a larger `rounding` (or a positive noise multiplier).')
  return stddev


def stream(mechanism: independent.IndependentGaussian, noise_multiplier: float) -> streams.Noise:
  """Rows of integers, int64, of standard deviation `stddev_of(specs)`: one `noise.Noise`.

  Args:
    mechanism: With `rounding`.
    noise_multiplier: The noise multiplier of the run.
  """
  rounding = float(mechanism.rounding or 0)

  def check_replicas() -> None:
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    if replicas > 1:
      raise ValueError('Noise from the operating system would be another on every replica. '
                       f'Received: rounding={rounding:g} on {replicas} replicas. Use one, or '
                       'IndependentGaussian() without `rounding`.')

  def init(specs: trees.Tree) -> streams.State:
    check_replicas()
    integer_stddev(noise_multiplier, rounding, trees.size(specs))
    return streams.State(keys.from_system(), tf.zeros([], tf.int64))

  def next_rows(state: streams.State, specs: trees.Tree) -> tuple:
    check_replicas()
    size = trees.size(specs)
    stddev = integer_stddev(noise_multiplier, rounding, size)
    row = tf.ensure_shape(
        tf.numpy_function(lambda: discrete_gaussian(stddev, size), [], tf.int64), [size])
    return trees.unflatten(row, specs), tf.ones([]), state._replace(row=state.row + 1)

  return streams.Noise(init, next_rows)


def add(value: tf.Tensor, row: tf.Tensor, std: tf.Tensor, stddev: int) -> tf.Tensor:
  """Returns `value` rounded to the grid std / stddev, plus `row` steps of the grid."""
  grid = tf.cast(std, tf.float64) / stddev
  steps = tf.round(tf.math.divide_no_nan(tf.cast(value, tf.float64), grid))
  steps = tf.clip_by_value(steps, -_LARGEST_SUM, _LARGEST_SUM)
  result = tf.cast(tf.cast(steps, tf.int64) + row, tf.float64) * grid
  return tf.where(grid > 0, tf.cast(result, value.dtype), value)
