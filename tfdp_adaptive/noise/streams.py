# SPDX-License-Identifier: Apache-2.0
"""Online noise: unit rows (C^-1 Z)_t of a mechanism, one per step.

A stream is a set of pure functions, so the same one runs in optimizer variables, in a DPQuery's
global state and inside TensorFlow Federated. A row is computed on flat vectors, one per dtype, and
split into the leaves of the tree at the end. The work per step does not depend on the number of
leaves.

Every row is drawn from a fresh key. `history` holds what a mechanism needs of past rows: outputs,
buffers, or the keys to draw them again. A restored state with a fresh `key` therefore continues the
mechanism with noise that was never used before.
"""

import functools
from typing import Any, Callable, Iterable, NamedTuple, Optional, Tuple, TypeVar

import numpy as np
import tensorflow as tf

from tfdp_adaptive import mechanisms
from tfdp_adaptive import trees
from tfdp_adaptive.mechanisms import independent
from tfdp_adaptive.noise import gaussian
from tfdp_adaptive.noise import keys

_AnyMechanism = TypeVar('_AnyMechanism', bound=mechanisms.Mechanism)


class State(NamedTuple):
  """State of a stream. It is SECRET: with it, anyone can subtract the noise."""

  key: tf.Tensor  # [2] int64, of the next row; replaced at every draw.
  row: tf.Tensor  # [] int64, rows drawn so far.
  history: Any = ()  # What the mechanism needs of past rows.


class Noise(NamedTuple):
  """Pure functions that draw the noise of a mechanism row by row.

  Attributes:
    init: `specs -> State`.
    next: `(state, specs) -> (rows, variance, state)`: a tree like `specs` (nests
      of `tf.TensorSpec`, float32 or float64) and r_t, the variance of its elements.
    restart: `(state, specs) -> State` before the first row of another,
      independent run of the mechanism; the chain of keys goes on.
  """

  init: Callable[..., State]
  next: Callable[..., Any]
  restart: Callable[..., State]


@functools.singledispatch
def stream(mechanism: mechanisms.Mechanism, key_source: keys.Source = keys.from_system) -> Noise:
  """Returns the `Noise` of a mechanism.

  After `mechanism.steps` the rows are still fresh noise, but the accounting does not cover them.
  Callers ask `within` first.

  Args:
    mechanism: A `tfdp.mechanisms.Mechanism`.
    key_source: `() -> [2] int64` key, called in `init`.
  """
  raise TypeError(f'No noise stream is registered for {type(mechanism).__name__}. '
                  f'Received: mechanism={mechanism!r}.')


@stream.register(independent.IndependentGaussian)
def independent_gaussian(
    mechanism: independent.IndependentGaussian,
    key_source: keys.Source = keys.from_system) -> Noise:
  """Returns Z itself, without history; r_t = 1."""
  for_graphs(mechanism)
  return build(mechanism, key_source, lambda flat: (),
               lambda key, row, history, flat: (gaussian.vectors(key, flat), history))


def for_graphs(mechanism: mechanisms.Mechanism) -> None:
  """Refuses a mechanism that needs Python, and so the system's generator, in every step."""
  if not isinstance(mechanism, mechanisms.Mechanism):
    raise ValueError('`mechanism` must be a mechanism of `tfdp.mechanisms`, such as '
                     f'`IndependentGaussian()`. Received: mechanism={mechanism!r}.')
  if mechanism.rounding is not None:
    raise ValueError('Noise on a grid, from the operating system, is for Keras optimizers: queries '
                     'run where there is no Python. Received: '
                     f'mechanism={mechanism!r}. Leave out `rounding`.')


def require_streams(kinds: Iterable[type]) -> None:
  """Raises unless every mechanism of `kinds` has a stream of its own; called at import.

  Otherwise a run would fail at its first step. An inherited stream may not be the one of its C.
  """
  missing = sorted(kind.__name__ for kind in kinds if kind not in stream.registry)
  if missing:
    raise ImportError(f'No noise stream is registered for {", ".join(missing)}. Write one in '
                      'tfdp_adaptive/noise/, decorated with `@streams.stream.register(...)`, and '
                      'import its file in tfdp_adaptive/noise/__init__.py.')


def build(
    mechanism: mechanisms.Mechanism, key_source: keys.Source,
    empty: Callable[[gaussian.Specs], Any],
    advance: Callable[..., Tuple[gaussian.Vectors, Any]]) -> Noise:
  """Returns a `Noise` made of the parts that differ between mechanisms.

  Args:
    mechanism: For the variances of its rows.
    key_source: `() -> [2] int64` key.
    empty: `flat -> history` before the first row; `flat` as `gaussian.flat_specs`.
    advance: `(key, row, history, flat) -> (vectors, history)`.
  """
  variances = np.square(as_run(mechanism).row_norms(mechanism.steps or 1)).astype(np.float32)

  def init(specs: trees.Tree) -> State:
    return State(key_source(), tf.zeros([], tf.int64), empty(gaussian.flat_specs(specs)))

  def next_rows(state: State, specs: trees.Tree) -> Tuple[trees.Tree, tf.Tensor, State]:
    row_key, key = keys.split(state.key)
    vectors, history = advance(row_key, state.row, state.history, gaussian.flat_specs(specs))
    variance = tf.gather(variances, tf.minimum(state.row, len(variances) - 1))
    return gaussian.unflatten(vectors, specs), variance, State(key, state.row + 1, history)

  def restart(state: State, specs: trees.Tree) -> State:
    return State(state.key, tf.zeros_like(state.row), empty(gaussian.flat_specs(specs)))

  return Noise(init, next_rows, restart)


def as_run(mechanism: _AnyMechanism) -> _AnyMechanism:
  """Returns the mechanism with the float32 coefficients that its stream uses, if it has any."""
  designed = mechanism.dtype == 'float64' and mechanism.shapes()
  return mechanism.rounded('float32') if designed else mechanism


def zeros(flat: gaussian.Specs) -> gaussian.Vectors:
  """Returns an empty slot of history: one zero vector per dtype."""
  return tuple(tf.zeros(spec.shape, spec.dtype) for spec in flat)


def within(row: Any, steps: Optional[int]) -> tf.Tensor:
  """Returns a [] bool: whether the accounting covers the next row (`steps=None`: always).

  It raises if the row is not covered, but XLA removes assertions. Callers must therefore also
  withhold the data if the result is False, so that only noise is released.
  """
  if steps is None:
    return tf.constant(True)
  with tf.control_dependencies([tf.debugging.assert_less(
      row, tf.constant(steps, row.dtype),
      message=f'The privacy plan and its mechanism cover {steps} steps, and they are used up. '
      'Make a plan with more `steps` (and account for it) to train on.')]):
    return tf.identity(row) < steps
