# SPDX-License-Identifier: Apache-2.0
"""A function of one record, for all records: at once where that is safe, or in a loop."""

from typing import Any, Callable, List

import tensorflow as tf

from tfdp_adaptive import compat


def traced(function: Callable[..., Any], records: Any) -> Any:
  """`function` of one of the records [n, ...] as a concrete function."""
  spec = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape[1:], t.dtype), records)
  return tf.function(function, autograph=False).get_concrete_function(spec)


def operations(concrete: Any) -> List[str]:
  """The kinds of operations in a concrete function and all that it calls."""
  graph = concrete.graph.as_graph_def()
  nodes = list(graph.node) + [node for f in graph.library.function for node in f.node_def]
  return sorted({node.op for node in nodes})


def looped(function: Callable[..., Any], records: Any, concrete: Any = None) -> Any:
  """Maps over records one after another."""
  concrete = concrete or traced(function, records)
  signature = tf.nest.map_structure(
      lambda t: tf.TensorSpec(t.shape, t.dtype), concrete.structured_outputs)
  return tf.map_fn(compat.unconverted(function), records, fn_output_signature=signature)


def vectorized(function: Callable[..., Any], records: Any) -> Any:
  """Maps over all records at once, unless TensorFlow would then corrupt memory."""
  if compat.UNSAFE_WHEN_VECTORIZED:
    concrete = traced(function, records)
    if not compat.vectorizes_safely(operations(concrete)):
      return looped(function, records, concrete)
  # Single operations without a vectorized form (embedding lookups in TF 2.14) loop.
  return tf.vectorized_map(function, records, fallback_to_while_loop=True)
