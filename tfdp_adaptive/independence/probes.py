# SPDX-License-Identifier: Apache-2.0
"""Runs the forward and backward pass of training on made-up batches, leaving no trace.

The pass is traced once, as the engine runs it. It runs on copies of all
variables. Weights and rates are moved a little, since a zero could hide what is wrong. Random
draws are held fixed (see `draws`). The result is what the gradients of examples are formed from.
"""

from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive.clipping import bookkeeping
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.clipping import protocol
from tfdp_adaptive.independence import draws


class Trace(NamedTuple):
  """A forward and backward pass.

  Attributes:
    concrete: A concrete function of the data.
    inputs: The number of inputs that are data.
    found: The factors, whose tensors are symbolic; () where examples run alone.
  """

  concrete: Any
  inputs: int
  found: Tuple[Any, ...]


class Seen(NamedTuple):
  """The results of a run as lists of arrays, with examples along the first axis."""

  outputs: Any
  factors: Any


def trace(model: compat.Model, x: Any, check: Any) -> Trace:
  """Returns the `Trace` of training on a batch like `x`.

  Args:
    model: A built Keras model.
    x: Nest of specs.
    check: Called, while tracing, after the model.
  """
  together = bookkeeping.supports(model, x)[0]
  symbolic: List[Any] = []

  def run(x: Any, errors: tf.Tensor) -> Seen:
    batch = interface.Batch(x, errors, (), tf.ones(tf.shape(errors)[:1], tf.bool))
    if together:
      factors, outputs, losses = bookkeeping.factors_of(model, _loss, batch)
      symbolic[:] = factors
    else:
      with tf.GradientTape() as tape:
        outputs = model(x, training=True)
        losses = _loss(errors, outputs, ())
      factors = [g for g in tape.gradient(losses, [
          compat.raw_variable(v) for v in model.trainable_variables]) if g is not None]
    check()
    flat = tf.nest.flatten(outputs)
    masks = [tf.cast(t._keras_mask, tf.float32) for t in flat
             if getattr(t, '_keras_mask', None) is not None]
    tensors = protocol.tensors(tuple(symbolic)) if together else factors
    return Seen([tf.convert_to_tensor(t) for t in flat + masks],
                [tf.convert_to_tensor(t) for t in tensors])

  size = tf.nest.flatten(x)[0].shape[0]
  concrete = tf.function(run, autograph=False).get_concrete_function(
      x, tf.TensorSpec([size, 2], tf.float32))
  return Trace(concrete, len(tf.nest.flatten(x)) + 1, tuple(symbolic))


def python_state(model: compat.Model) -> Dict[Tuple[int, str], Any]:
  """Attributes of layers that are numbers, strings or booleans, by layer and name."""
  return {(id(layer), name): value for layer in model._flatten_layers()
          for name, value in vars(layer).items() if type(value) in (bool, int, float, str)}


def _loss(errors: tf.Tensor, outputs: Any, _: Any) -> tf.Tensor:
  """[n]: sums of outputs in proportions of each example's own: `errors` [n, 2], angle and size."""
  angle, size = tf.unstack(errors, axis=1)
  angle, total = angle[:, tf.newaxis], tf.zeros_like(size)
  for output in tf.nest.flatten(outputs):
    if not output.dtype.is_floating:
      continue
    rows, numbers = output.shape[0], output.shape[1:].num_elements()
    flat = tf.reshape(tf.cast(output, tf.float32), [
        tf.shape(output)[0] if rows is None else rows, -1])
    places = tf.range(tf.shape(flat)[1] if numbers is None else numbers)
    total += size * tf.reduce_sum(flat * tf.cos(angle + tf.cast(places, tf.float32)), 1)
  return total


class Runner:
  """Runs a trace on copies of all variables, the weights moved, draws held fixed."""

  def __init__(self, model: compat.Model, traced: Trace) -> None:
    self.salt = 0.0  # Another gives other draws.
    self.count: Optional[int] = None  # What counters of steps are to stand at.
    self.rate: Optional[float] = None  # What single numbers are to be.
    self._trace = traced
    self._run = draws.Held(traced.concrete)
    self._variables: List[Any] = []  # [copy, value or ()]; captures hold no references.
    weights = {compat.variable_key(v) for v in model.trainable_variables}
    self._captures = [self._copy(t, id(t) in weights) for t in traced.concrete.captured_inputs]

  def _copy(self, capture: Any, is_weight: bool) -> Any:
    """Returns the handle of a variable's copy; other values unchanged."""
    kinds = getattr(getattr(capture, '_handle_data', None), 'shape_and_type', None)
    if capture.dtype != tf.resource or not kinds:
      return capture
    value = tf.raw_ops.ReadVariableOp(resource=capture, dtype=tf.as_dtype(kinds[0].dtype))
    if is_weight and value.dtype.is_floating:
      moves = np.random.default_rng(len(self._variables)).normal(size=value.shape)
      size = 0.1 * (0.3 + float(tf.math.reduce_std(tf.cast(value, tf.float32))))
      value += tf.cast(size * moves, value.dtype)
    elif value.dtype.is_floating and not value.shape.rank:
      value += tf.cast(0.1, value.dtype)  # A rate that may be zero today.
    self._variables.append((tf.Variable(value), () if is_weight else value))
    return self._variables[-1][0].handle

  def computed(self, n: int) -> float:
    """Returns how many numbers a run of `n` examples computes, those in loops once."""
    return sum(float(np.prod([n if size is None else size for size in t.shape]))
               for operation in self._trace.concrete.graph.get_operations()
               for t in operation.outputs if t.shape.rank is not None)

  def __call__(self, batch: Any) -> Seen:
    """`Seen` for a list of arrays, the last of which are the errors."""
    for variable, value in self._variables:
      if tf.is_tensor(value):
        other = None if value.shape.rank else (
            self.count if value.dtype.is_integer else
            self.rate if value.dtype.is_floating else None)
        variable.assign(value if other is None else tf.cast(other, value.dtype))
    flat = self._run([tf.constant(t) for t in batch] + self._captures, self.salt)
    results = tf.nest.pack_sequence_as(self._trace.concrete.structured_outputs, flat)
    return tf.nest.map_structure(lambda t: t.numpy(), results)

  @property
  def settings(self) -> List[Any]:
    """The types of variables that hold one number and are no weights."""
    return [value.dtype for _, value in self._variables
            if tf.is_tensor(value) and not value.shape.rank]

  def gradient(self, seen: Seen, row: int) -> np.ndarray:
    """The gradient of one example, as one vector of float64."""
    factors = protocol.rebuilt(
        self._trace.found, [tf.constant(t[row:row + 1]) for t in seen.factors])
    parts = [factor.explicit().gradient() for factor in factors if factor is not None]
    return np.concatenate([np.zeros(0)] + [np.asarray(p, np.float64).ravel() for p in parts])
