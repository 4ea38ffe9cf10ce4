# SPDX-License-Identifier: Apache-2.0
"""Clips any other layer by its own gradients, one example at a time.

The layer is run again for each example alone, so it must be a deterministic function of its inputs
and variables. Dropout layers inside are allowed: their random factors are saved for the second run.
"""

import contextlib
import re
from typing import Callable, Iterator, List

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import factors
from tfdp_adaptive.clipping.layers import registry

# Operations that draw random numbers or have side effects.
_UNREPEATABLE = re.compile(
    'Random|Multinomial|PyFunc|^Rng|^Assign|^Stateful(?!PartitionedCall)|ResourceScatter')


# Random layers that multiply their inputs by something independent of them.
_DROPOUT = tuple(getattr(compat.keras.layers, name) for name in (
    'Dropout', 'SpatialDropout1D', 'SpatialDropout2D', 'SpatialDropout3D', 'GaussianDropout'))


def tap(
    layer: compat.Layer, function: Callable[..., trees.Tree], call: registry.Call,
    tape: tf.GradientTape) -> registry.Call:
  """Taps the outputs, and saves the random factors of dropout layers inside."""
  saved = []

  def draw(inputs: tf.Tensor, original: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    saved.append(original(tf.ones_like(inputs)))
    return _dropped(inputs, saved[-1])

  with _dropout(layer, draw):
    outputs = function(*call.args, **call.kwargs)
  taps = _floats(outputs)
  tape.watch(taps)
  return call._replace(outputs=outputs, taps=taps, saved=saved)


def gradients(layer: compat.Layer, call: registry.Call, cotangents: tf.Tensor) -> registry.Factors:
  """Yields the factor of each trainable variable of the layer, and of those inside."""
  trained = compat.trained_variables(layer)
  variables = [compat.raw_variable(v) for v in trained]
  arguments = (call.args, call.kwargs)
  flat = tf.nest.flatten(arguments)
  batched = [t for t, each in zip(flat, call.batched) if each]
  reached: List[bool] = []

  def example(inputs: trees.Tree) -> List[tf.Tensor]:
    own, drawn, cotangent = inputs
    own, drawn = iter(own), iter(drawn)
    args, kwargs = tf.nest.pack_sequence_as(arguments, [
        next(own)[tf.newaxis] if each else t for t, each in zip(flat, call.batched)])
    with _dropout(layer, lambda inputs, _: _dropped(inputs, next(drawn)[tf.newaxis])):
      with tf.GradientTape(watch_accessed_variables=False) as tape:
        for variable in variables:
          tape.watch(variable)
        outputs = _floats(layer(*args, **kwargs))
    cotangent = tf.nest.map_structure(
        lambda e, o: tf.cast(e[tf.newaxis], o.dtype), cotangent, outputs)
    by_variable = tape.gradient(outputs, variables, output_gradients=cotangent)
    reached[:] = [g is not None for g in by_variable]
    by_variable = [tf.zeros(v.shape, v.dtype) if g is None else tf.convert_to_tensor(g)
                   for g, v in zip(by_variable, variables)]
    return [tf.cast(g, trees.wide(g.dtype)) for g in by_variable]

  by_variable = _each(example, (batched, call.saved, cotangents), layer)
  for variable, gradient, is_reached in zip(trained, by_variable, reached):
    yield variable, factors.explicit(tf.ensure_shape(  # type: ignore[misc]
        gradient, [None] + list(variable.shape))) if is_reached else None


KIND = registry.Kind(gradients, tap, whole=True)


def _floats(outputs: trees.Tree) -> List[tf.Tensor]:
  return [t for t in registry.tensors(outputs) if t.dtype.is_floating]


def _dropped(inputs: tf.Tensor, drawn: tf.Tensor) -> tf.Tensor:
  """Drops values as dropout layers do; dropped values are zero, even if they were NaN."""
  return tf.where(drawn == 0, tf.zeros_like(inputs), inputs * drawn)


@contextlib.contextmanager
def _dropout(layer: compat.Layer, stand_in: Callable[..., tf.Tensor]) -> Iterator[None]:
  """Replaces the call of every dropout layer inside by `stand_in(inputs, original call)`."""
  inside = {id(one): one for one in layer._flatten_layers() if type(one) in _DROPOUT}

  def wrapper(original: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    def call(inputs: tf.Tensor, *args: object, **kwargs: object) -> tf.Tensor:
      return stand_in(inputs, lambda x: original(x, *args, **kwargs))
    return compat.unconverted(call)

  with contextlib.ExitStack() as stack:
    for one in inside.values():
      stack.enter_context(compat.swapped(one, call=wrapper(one.call)))
    yield


def _each(
    function: Callable[..., List[tf.Tensor]], records: trees.Tree,
    layer: compat.Layer) -> List[tf.Tensor]:
  concrete = compat.traced(function, records)
  operations = compat.operations(concrete)
  for operation in operations:
    if _UNREPEATABLE.search(operation):
      raise registry.Unsupported(
          f'Layer {layer.name!r} ({type(layer).__name__}) must be deterministic to be clipped '
          f'by itself. Received: operation {operation}. Register the layer, or use '
          f'{registry.WHOLE}.')
  # TensorFlow vectorizes gradients of filters by a loop. Nested loops take long to trace.
  nested = any('While' in name for name in operations) and any(
      'BackpropFilter' in name for name in operations)
  if compat.vectorizes_safely(operations) and not nested:
    try:
      return tf.vectorized_map(function, records, fallback_to_while_loop=False)
    except (ValueError, NotImplementedError):
      pass
  return compat.looped(function, records, concrete)
