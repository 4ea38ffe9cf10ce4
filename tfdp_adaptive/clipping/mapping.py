# SPDX-License-Identifier: Apache-2.0
"""Maps a function of one record over all records: at once if that is safe, or in a loop."""

from typing import Callable, List, Optional

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import trees


def traced(function: Callable[..., trees.Tree], records: trees.Tree) -> compat.Function:
  """Traces `function` for one of the records [n, ...]."""
  spec = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape[1:], t.dtype), records)
  return tf.function(function, autograph=False).get_concrete_function(spec)


def operations(concrete: compat.Function) -> List[str]:
  """Returns the types of operations in a concrete function and in all that it calls."""
  graph = concrete.graph.as_graph_def()
  nodes = list(graph.node) + [node for f in graph.library.function for node in f.node_def]
  return sorted({node.op for node in nodes})


def looped(
    function: Callable[..., trees.Tree], records: trees.Tree,
    concrete: Optional[compat.Function] = None) -> trees.Tree:
  """Maps over records one after another."""
  concrete = concrete or traced(function, records)
  signature = tf.nest.map_structure(
      lambda t: tf.TensorSpec(t.shape, t.dtype), concrete.structured_outputs)
  return tf.map_fn(compat.unconverted(function), records, fn_output_signature=signature)


def vectorized(function: Callable[..., trees.Tree], records: trees.Tree) -> trees.Tree:
  """Maps over all records at once, unless TensorFlow would then corrupt memory."""
  if compat.UNSAFE_WHEN_VECTORIZED:
    concrete = traced(function, records)
    if not compat.vectorizes_safely(operations(concrete)):
      return looped(function, records, concrete)
  # Single operations without a vectorized form (embedding lookups in TF 2.14) loop.
  return tf.vectorized_map(function, records, fallback_to_while_loop=True)
