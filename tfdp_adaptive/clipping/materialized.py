"""The materialized engine: every record's gradient, then `project_record`.

Works for any model whose single examples TensorFlow can differentiate, at the
memory price of one gradient per example of a chunk. The oracle of the faster
engines, and the only one for projections that are not a rescaling.
"""

import tensorflow as tf

from tfdp_adaptive.clipping import base as clipping
from tfdp_adaptive.rules import base


def per_record(function, records, vectorize):
  """Maps `function` over the leading axis, vectorized or one after the other."""
  if vectorize:
    return tf.vectorized_map(function, records, fallback_to_while_loop=False)
  first = tf.nest.map_structure(lambda t: t[0], records)
  signature = tf.nest.map_structure(
      lambda t: tf.TensorSpec(t.shape, t.dtype),
      tf.function(function).get_concrete_function(
          tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), first)
      ).structured_outputs)
  return tf.map_fn(function, records, fn_output_signature=signature)


def sum_records(asks, queries, clips, gradients, mask):
  """`Sums` of every ask from a tree of [n, ...] gradients and an [n] mask."""

  def record(inputs):
    gradient, keep = inputs
    return tuple(
        base.map_tree(lambda t: tf.where(keep, t, tf.zeros_like(t)),
                      clipping.project_record(ask, query, clip, gradient))
        for ask, query, clip in zip(asks, queries, clips))

  stacked = tf.vectorized_map(record, (gradients, mask))
  return base.map_tree(lambda t: tf.reduce_sum(t, 0), stacked)
