# SPDX-License-Identifier: Apache-2.0
"""Finds arrays that a traced function holds and that are neither arguments nor weights.

A layer, penalty or constraint that captured an array may hold the training data, which then
reaches every gradient without clipping and noise.
"""

from typing import Any, List, NamedTuple, Tuple

import tensorflow as tf


class Held(NamedTuple):
  """What a function holds.

  Attributes:
    shapes: Of every array with at least two different floating-point numbers.
    variables: Every variable it reads or writes.
  """

  shapes: List[Tuple[int, ...]]
  variables: Tuple[Any, ...]


def find(concrete: Any) -> Held:
  """Returns what a concrete function holds.

  Args:
    concrete: Of `tf.function(...).get_concrete_function(...)`.

  Examples:
    >>> table = tf.constant([1.0, 2.0])
    >>> find(tf.function(lambda: tf.reduce_sum(table * 3.0)).get_concrete_function()).shapes
    [(2,)]
  """
  definition = concrete.graph.as_graph_def()
  values = [tf.make_ndarray(node.attr['value'].tensor)
            for nodes in [definition.node] + [f.node_def for f in definition.library.function]
            for node in nodes if node.op == 'Const' and (
                tf.as_dtype(node.attr['dtype'].type).is_floating)]
  values += [outer.numpy() for outer, _ in concrete.graph.captures
             if outer.dtype.is_floating and hasattr(outer, 'numpy')]
  shapes = [tuple(value.shape) for value in values
            if value.size > 1 and (value != value.ravel()[0]).any()]
  return Held(shapes, tuple(concrete.graph.variables))
