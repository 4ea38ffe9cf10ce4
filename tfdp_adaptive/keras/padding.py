# SPDX-License-Identifier: Apache-2.0
"""The batches of a plan without their padding, for steps that are traced for any size."""

import functools
import math
from typing import Any

import tensorflow as tf

# Of an expected batch: rows are left out in multiples of a part. What convolutions prepare for
# every size of batch they then find again; the rows that stay are 1.6% on average.
_PARTS = 32


def cropped(model: Any, x: Any) -> Any:
  """`x` without most empty rows at the end of its batches; what is no plan's is left as it is.

  So is what XLA compiles for each size anew, eager steps examine for each, or replicas share.
  The rows that stay depend on the number of records drawn alone.
  """
  plan = getattr(x, 'tfdp_plan', None)
  if plan is None or model.jit_compile or model.run_eagerly or (
      model.distribute_strategy.num_replicas_in_sync > 1):
    return x
  rows = tf.nest.flatten(x.element_spec)[-1].shape[0]
  if rows is not None and rows <= plan.batch_size:
    return x
  return x.map(functools.partial(_crop, math.ceil(plan.batch_size / _PARTS)))


@tf.autograph.experimental.do_not_convert
def _crop(multiple: int, *batch: Any) -> Any:
  used = tf.zeros([], tf.bool)
  for weight in tf.nest.flatten(batch[-1]):
    used |= tf.reduce_any(tf.not_equal(weight, 0), list(range(1, weight.shape.rank)))
  rows = tf.range(1, tf.shape(used)[0] + 1)
  count = tf.maximum(1, tf.reduce_max(tf.where(used, rows, 0)))
  count = -(-count // multiple) * multiple  # Slices end where their tensor does.
  return tf.nest.map_structure(lambda t: None if t is None else t[:count], batch)
