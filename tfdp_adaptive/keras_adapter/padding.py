# SPDX-License-Identifier: Apache-2.0
"""The batches of a plan without their padding, for steps that are traced for any size."""

from typing import Any

import tensorflow as tf


def cropped(model: Any, x: Any) -> Any:
  """`x` without the empty rows at the end of its batches; what is no plan's is left as it is.

  So is what XLA compiles for each size anew, or replicas share.
  """
  plan = getattr(x, 'tfdp_plan', None)
  if plan is None or model.jit_compile or model.distribute_strategy.num_replicas_in_sync > 1:
    return x
  rows = tf.nest.flatten(x.element_spec)[-1].shape[0]
  if rows is not None and rows <= plan.batch_size:
    return x
  return x.map(_crop)


@tf.autograph.experimental.do_not_convert
def _crop(*batch: Any) -> Any:
  used = tf.zeros([], tf.bool)
  for weight in tf.nest.flatten(batch[-1]):
    used |= tf.reduce_any(tf.not_equal(weight, 0), list(range(1, weight.shape.rank)))
  rows = tf.range(1, tf.shape(used)[0] + 1)
  count = tf.maximum(1, tf.reduce_max(tf.where(used, rows, 0)))
  return tf.nest.map_structure(lambda t: None if t is None else t[:count], batch)
