# SPDX-License-Identifier: Apache-2.0
"""Token ids out of range: their examples count as no record, like gradients not finite.

On a CPU such an id aborts the program, so that one record could stop a training.
"""

from typing import Any, Tuple

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import bookkeeping
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.clipping import limits
from tfdp_adaptive.clipping.layers import registry


def guarded(engine: interface.Engine) -> interface.Engine:
  """The same engine, which it holds as `engine`, given ids that its embeddings have."""

  def run(
      model: compat.Model, loss: interface.Loss, batch: interface.Batch,
      request: interface.Request) -> interface.Clipped:
    x, inside = in_range(model, interface.joined(batch)[0].x)
    if inside is None:
      return engine(model, loss, batch, request)
    if not trees.absent(batch.examples):
      inside = tf.reduce_all(interface.divided(inside, batch), 1)
    clipped = engine(model, loss, batch._replace(
        x=interface.divided(x, batch), mask=batch.mask & inside), request)
    return clipped._replace(norms=tuple(
        tf.where(inside, norm, tf.constant(float('inf'), norm.dtype)) for norm in clipped.norms))

  run.engine = engine  # type: ignore[attr-defined]
  return run


def in_range(model: compat.Model, x: Any) -> Tuple[Any, Any]:
  """`(x, inside)`: ids out of range replaced by zero, and [n] which examples had none.

  `inside` is None where no input is known to go to an embedding as it is.
  """
  try:
    rows = bookkeeping.prove(model, x).limits
  except registry.Unsupported:
    rows = limits.traced(model, x)
  flat, inside = tf.nest.flatten(x), None
  for i, limit in rows.items():
    above = flat[i] >= 0 if flat[i].dtype.is_integer else flat[i] > -1  # Its whole part counts.
    good = above & (flat[i] < tf.cast(limit, flat[i].dtype))
    flat[i] = tf.where(good, flat[i], tf.zeros_like(flat[i]))
    good = tf.reduce_all(good, list(range(1, good.shape.rank)))
    inside = good if inside is None else inside & good
  return tf.nest.pack_sequence_as(x, flat), inside
