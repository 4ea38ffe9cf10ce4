"""Online noise: unit rows (C^-1 Z)_t of a mechanism, one per step.

A stream is a pair of pure functions, so the same one runs in optimizer
variables, in a DPQuery's global state and inside TensorFlow Federated. Time and
memory do not grow with t.
"""

import functools
from typing import Any, Callable, NamedTuple

import tensorflow as tf

from tfdp_adaptive.mechanisms import independent
from tfdp_adaptive.noise import keys


class State(NamedTuple):
  """SECRET: whoever has it can subtract the noise."""

  key: tf.Tensor  # [2] int64, of the next row; replaced at every draw.
  row: tf.Tensor  # [] int64, rows drawn so far.
  history: Any = ()  # What the mechanism needs of past rows.


class Noise(NamedTuple):
  """Attributes:

    init: `specs -> State`.
    next: `(state, specs) -> (rows, variance, state)`: a tree like `specs` (nests
      of `tf.TensorSpec`, float32 or wider) and r_t, the variance of its elements.
  """

  init: Callable[..., State]
  next: Callable[..., Any]


@functools.singledispatch
def stream(mechanism, key_source=keys.from_system):
  """The `Noise` of a mechanism.

  Args:
    mechanism: A `tfdp.mechanisms.Mechanism`.
    key_source: `() -> [2] int64` key, called in `init`.
  """
  raise TypeError(f'No noise stream is registered for {type(mechanism).__name__}. '
                  f'Received: mechanism={mechanism!r}.')


@stream.register(independent.IndependentGaussian)
def independent_gaussian(mechanism, key_source=keys.from_system):
  """Z itself: no history, r_t = 1."""
  del mechanism

  def init(specs):
    del specs
    return State(key_source(), tf.zeros([], tf.int64))

  def next_rows(state, specs):
    row_key, key = keys.split(state.key)
    rows = keys.normal_rows(row_key, specs)
    return rows, tf.ones([]), State(key, state.row + 1)

  return Noise(init, next_rows)
