"""Any other layer: its own gradients, one example at a time.

The layer is run again for each example alone, so it must be a deterministic
function of its inputs and variables.
"""

import re

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive.clipping import factors
from tfdp_adaptive.clipping.layers import dense
from tfdp_adaptive.clipping.layers import registry

# Operations that draw numbers, or change something that outlives the call.
_UNREPEATABLE = re.compile(
    'Random|Multinomial|PyFunc|^Rng|^Assign|^Stateful(?!PartitionedCall)|ResourceScatter')


def is_opaque(layer):
  """Whether the layers inside are called in a loop, out of sight."""
  return isinstance(layer, compat.keras.layers.RNN)


def gradients(layer, call, errors):
  """Yields an `Explicit` for each trainable variable of the layer."""
  variables = [compat.raw_variable(v) for v in layer.trainable_variables]
  arguments = (call.args, call.kwargs)
  flat = tf.nest.flatten(arguments)
  batched = [t for t, each in zip(flat, call.batched) if each]

  def example(inputs):
    own, error = inputs
    own = iter(own)
    args, kwargs = tf.nest.pack_sequence_as(arguments, [
        next(own)[tf.newaxis] if each else t for t, each in zip(flat, call.batched)])
    with tf.GradientTape(watch_accessed_variables=False) as tape:
      for variable in variables:
        tape.watch(variable)
      outputs = layer(*args, **kwargs)
    found = tape.gradient(outputs, variables, unconnected_gradients='zero',
                          output_gradients=tf.nest.map_structure(
                              lambda e, o: tf.cast(e[tf.newaxis], o.dtype), error, outputs))
    return [tf.cast(tf.convert_to_tensor(g), dense.wide(g.dtype)) for g in found]

  for variable, gradient in zip(
      layer.trainable_variables, _each(example, (batched, errors), layer)):
    yield variable, factors.explicit(tf.ensure_shape(gradient, [None] + list(variable.shape)))


KIND = registry.Kind(gradients, registry.at_output, whole=True)


def _each(function, records, layer):
  one = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape[1:], t.dtype), records)
  concrete = tf.function(function, autograph=False).get_concrete_function(one)
  for operation in _operations(concrete.graph.as_graph_def()):
    if _UNREPEATABLE.search(operation):
      raise registry.Unsupported(
          f'Layer {layer.name!r} ({type(layer).__name__}) must be deterministic to be clipped '
          f"by itself. Received: operation {operation}. Register the layer, or use "
          "engine='materialized'.")
  try:
    return tf.vectorized_map(function, records, fallback_to_while_loop=False)
  except (ValueError, NotImplementedError):
    signature = tf.nest.map_structure(
        lambda t: tf.TensorSpec(t.shape, t.dtype), concrete.structured_outputs)
    return tf.map_fn(function, records, fn_output_signature=signature)


def _operations(graph):
  nodes = list(graph.node) + [node for f in graph.library.function for node in f.node_def]
  return sorted({node.op for node in nodes})
