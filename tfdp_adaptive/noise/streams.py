# SPDX-License-Identifier: Apache-2.0
"""Online noise: standard rows (C^-1 Z)_t of a mechanism, one per step.

A stream is a set of pure functions, so the same one runs in optimizer variables, in a DPQuery's
global state and inside TensorFlow Federated. A row is computed on flat vectors, one per dtype, and
split into the leaves of the tree at the end. The work per step does not depend on the number of
leaves.

Every row is drawn from a fresh key. `history` holds what a mechanism needs of past rows: outputs,
buffers, or the keys to draw them again. A restored state with a fresh `key` therefore continues the
mechanism with noise that was never used before.

Standard normal numbers are made of a key by a Box-Muller transform of full-range integers.
TensorFlow's `stateless_normal` draws other numbers under XLA than outside it. It clamps its
uniforms at 1e-7, so it has no noise beyond 5.68 standard deviations, also in float64. It is slower
on CPU. Here the integers are the same everywhere and the numbers agree up to rounding. The tails
end at 6.76 (float32) and 9.49 (float64) standard deviations. Sines are computed by a series. The
angle is reduced as an integer, because XLA would round it first.
"""

import functools
import math
from typing import Callable, Dict, Iterable, NamedTuple, Optional, Tuple, TypeVar, Union

import numpy as np
import tensorflow as tf

from tfdp_adaptive import mechanisms
from tfdp_adaptive import trees
from tfdp_adaptive.mechanisms import toeplitz
from tfdp_adaptive.noise import keys

_AnyMechanism = TypeVar('_AnyMechanism', bound=mechanisms.Mechanism)
Specs = Tuple[tf.TensorSpec, ...]  # One [n] per dtype.
Vectors = Tuple[tf.Tensor, ...]  # One vector per spec of `Specs`.
History = trees.Tree  # The values of past rows that a mechanism needs.
# `(slots, advance)`, see `recursion`.
Recursion = Tuple[Union[int, Callable[[], History]], Callable[..., Tuple[Vectors, History]]]

# dtype -> (unsigned, signed, bits, mantissa digits, terms of the sine series).
_BITS = {tf.float32: (tf.uint32, tf.int32, 32, 24, 7),
         tf.float64: (tf.uint64, tf.int64, 64, 53, 11)}
_LONG = trees.WORTH_COMPILING


class State(NamedTuple):
  """State of a stream. It is SECRET: with it, anyone can subtract the noise."""

  key: tf.Tensor  # [2] int64, of the next row; replaced at every draw.
  row: tf.Tensor  # [] int64, rows drawn so far.
  history: History = ()


class Noise(NamedTuple):
  """Pure functions that draw the noise of a mechanism row by row.

  Attributes:
    init: `(specs, key=None) -> State` before the first row. With the key of another state, it is
      another, independent run of the mechanism, and the chain of keys goes on.
    next: `(state, specs) -> (rows, variance, state)`: a tree like `specs` (nests
      of `tf.TensorSpec`, float32 or float64) and r_t, the variance of its elements.
    draw: The same with flat vectors instead of a tree: `unflatten(vectors, specs)` are the rows.
  """

  init: Callable[..., State]
  next: Callable[..., Tuple[trees.Tree, tf.Tensor, State]]
  draw: Callable[..., Tuple[Vectors, tf.Tensor, State]]


@functools.singledispatch
def recursion(mechanism: mechanisms.Mechanism) -> Recursion:
  """Returns `(slots, advance)`, the parts of a stream that differ between mechanisms.

  `slots` is the history before the first row: a number of vectors of zeros, or a function that
  returns other tensors. `advance` is `(key, row, history, flat) -> (vectors, history)`, with `flat`
  as `flat_specs`.
  """
  raise TypeError(f'No noise stream is registered for {type(mechanism).__name__}. '
                  f'Received: mechanism={mechanism!r}.')


@recursion.register(toeplitz.IndependentGaussian)
def independent_gaussian(mechanism: toeplitz.IndependentGaussian) -> Recursion:
  """Returns Z itself, without history; r_t = 1."""
  del mechanism
  return 0, lambda key, row, history, flat: (vectors(key, flat), history)


def require_streams(kinds: Iterable[type]) -> None:
  """Raises unless every mechanism of `kinds` has a stream of its own; called at import.

  Otherwise a run would fail at its first step. An inherited stream may not be the one of its C.
  """
  missing = sorted(kind.__name__ for kind in kinds if kind not in recursion.registry)
  if missing:
    raise ImportError(f'No noise stream is registered for {", ".join(missing)}. Write one in '
                      'tfdp_adaptive/noise/, decorated with `@streams.recursion.register(...)`, '
                      'and import its file in tfdp_adaptive/noise/__init__.py.')


def stream(mechanism: mechanisms.Mechanism, key_source: keys.Source = keys.from_system) -> Noise:
  """Returns the `Noise` of a mechanism.

  After `mechanism.steps` the rows are still fresh noise, but the accounting does not cover them.
  Callers ask `within` first.

  Args:
    mechanism: A `tfdp.mechanisms.Mechanism`.
    key_source: `() -> [2] int64` key, called in `init`.
  """
  mechanism = as_run(mechanism)
  slots, advance = recursion(mechanism)
  variances = np.square(mechanism.row_norms(mechanism.steps or 1)).astype(np.float32)

  def init(specs: trees.Tree, key: Optional[tf.Tensor] = None) -> State:
    key = key_source() if key is None else key
    history = slots() if callable(slots) else (zeros(flat_specs(specs)),) * slots
    return State(key, tf.zeros([], tf.int64), history)

  def draw(state: State, specs: trees.Tree) -> Tuple[Vectors, tf.Tensor, State]:
    row_key, key = keys.split(state.key)
    drawn, history = advance(row_key, state.row, state.history, flat_specs(specs))
    variance = tf.gather(variances, tf.minimum(state.row, len(variances) - 1))
    return drawn, variance, State(key, state.row + 1, history)

  def next_rows(state: State, specs: trees.Tree) -> Tuple[trees.Tree, tf.Tensor, State]:
    drawn, variance, state = draw(state, specs)
    return unflatten(drawn, specs), variance, state

  return Noise(init, next_rows, draw)


def as_run(mechanism: _AnyMechanism) -> _AnyMechanism:
  """Returns the mechanism with the float32 coefficients that its stream uses, if it has any."""
  designed = getattr(mechanism, 'dtype', '') == 'float64' and mechanism.shapes()
  return mechanism.rounded('float32') if designed else mechanism


def zeros(flat: Specs) -> Vectors:
  """Returns an empty slot of history: one zero vector per dtype."""
  return tuple(tf.zeros(spec.shape, spec.dtype) for spec in flat)


def within(row: tf.Tensor, steps: Optional[int]) -> tf.Tensor:
  """Returns a [] bool: whether the accounting covers the next row (`steps=None`: always).

  It raises if the row is not covered, but XLA removes assertions. Callers must therefore also
  withhold the data if the result is False, so that only noise is released.
  """
  if steps is None:
    return tf.constant(True)
  covered = row < steps
  with tf.control_dependencies([trees.insist(
      covered, f'The privacy plan and its mechanism cover {steps} steps, and they are used up. '
      'Make a plan with more `steps` (and account for it) to train on.')]):
    return tf.identity(covered)


def flat_specs(specs: trees.Tree) -> Specs:
  """Returns one [n] spec per dtype in `specs`; n is the number of elements, rounded up.

  It is a multiple of 4, for whole blocks of random words, and of 2048 in long vectors: XLA divides
  a loop among threads, and uses vector instructions only if all parts are equal.
  """
  sizes: Dict[tf.DType, int] = {}
  for spec in tf.nest.flatten(specs):
    if spec.dtype not in _BITS:
      raise ValueError('`specs` must be float32 or float64: noise is made in nothing coarser. '
                       f'Received: {spec}.')
    if not spec.shape.is_fully_defined():
      raise ValueError(f'`specs` must have fully defined shapes. Received: {spec}.')
    sizes[spec.dtype] = sizes.get(spec.dtype, 0) + spec.shape.num_elements()
  unit = lambda n: 4 if n < _LONG else 2048
  return tuple(tf.TensorSpec([n + -n % unit(n)], dtype) for dtype, n in sizes.items())


def unflatten(vectors: Vectors, specs: trees.Tree) -> trees.Tree:
  """Returns a tree like `specs` with the elements of vectors like `flat_specs(specs)`."""
  leaves = tf.nest.flatten(specs)
  parts = {}
  for vector in vectors:
    sizes = [spec.shape.num_elements() for spec in leaves if spec.dtype == vector.dtype]
    rest = vector.shape.num_elements() - sum(sizes)
    parts[vector.dtype] = iter(tf.split(vector, sizes + [rest] * (rest > 0)))
  return tf.nest.pack_sequence_as(
      specs, [tf.reshape(next(parts[spec.dtype]), spec.shape) for spec in leaves])


def vectors(key: tf.Tensor, flat: Specs) -> Vectors:
  """Returns standard normal vectors like `flat`; uses up the key."""
  own = [key] if len(flat) == 1 else tf.unstack(keys.children(key, len(flat)))
  return tuple(tf.reshape(_transform(*_halves(one, spec)), [-1]) for one, spec in zip(own, flat))


def _halves(key: tf.Tensor, spec: tf.TensorSpec) -> Tuple[tf.Tensor, tf.Tensor]:
  """Returns the halves of random blocks of 128 bits, as unsigned integers."""
  dtype = spec.dtype
  bits, blocks = _BITS[dtype][0], spec.shape.num_elements() * dtype.size // 16
  if trees.worth_compiling(blocks):
    return keys.halves(key, blocks, bits)
  words = keys.words(key, [blocks, 2, 8 // dtype.size], bits)
  return tf.reshape(words[:, 0], [-1]), tf.reshape(words[:, 1], [-1])


def box_muller(radius: tf.Tensor, angle: tf.Tensor) -> tf.Tensor:
  """Returns [2, n] standard normals of 2 [n] uniform unsigned integers.

  `u = (radius + 1/2) 2^-width` has full relative precision near zero, which gives the tail. Its
  factor is rounded down, so `u` stays below one.
  """
  dtype = tf.float32 if radius.dtype == tf.uint32 else tf.float64
  width, digits = _BITS[dtype][2:4]
  u = (tf.cast(radius, dtype) + 0.5) * (2.0**-width * (1 - 2.0**-digits))
  quarter = tf.constant([[0], [2**(width - 2)]], angle.dtype)
  return tf.sqrt(-2 * tf.math.log(u)) * sine(angle + quarter, dtype)


def sine(turn: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
  """Returns sin(2 pi turn 2^-width) in `dtype`, for unsigned integers; error below 2 eps."""
  _, signed, width, _, terms = _BITS[dtype]
  half = tf.constant(2**(width - 1), turn.dtype)
  far = tf.bitwise.right_shift(turn + half // 2, width - 1)  # 1: over a quarter turn from zero.
  turn += far * (half - 2 * turn)  # sin(x) = sin(pi - x), exact: integers wrap around.
  x = tf.cast(tf.bitcast(turn, signed), dtype) * (math.pi * 2.0**(1 - width))
  series = [(-1)**k / math.factorial(2 * k + 1) for k in reversed(range(1, terms))] + [0]
  return x + x * tf.math.polyval([tf.constant(c, dtype) for c in series], tf.square(x))


_transform = trees.one_pass(box_muller)
