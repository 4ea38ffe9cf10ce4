# SPDX-License-Identifier: Apache-2.0
"""Several views of an example: its rows are repeated on the device, within a chunk of a batch.

The gradient of an example is the mean over its views, which is clipped once. To an engine, an
example with K views is a record of K examples whose weights are 1/K. The random layers of a model
draw anew for each of them.
"""

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import interface


def repeated(engine: interface.Engine, views: int) -> interface.Engine:
  """Returns an engine for records of which each example has `views` views.

  The outputs that it returns, for metrics, are those of the first view of each example.
  """
  if views == 1:
    return engine

  def run(
      model: compat.Model, loss: interface.Loss, batch: interface.Batch,
      request: interface.Request) -> interface.Clipped:
    clipped = engine(model, loss, of(batch, views), request)
    single = trees.absent(batch.examples)
    outputs, masks = trees.map(
        lambda t: t[:, 0] if single else t[:, ::views], (clipped.outputs, clipped.masks))
    return clipped._replace(outputs=outputs, masks=masks)

  return run


def of(batch: interface.Batch, views: int) -> interface.Batch:
  """Returns a batch [n, examples * views, ...] that holds every example `views` times in a row."""
  if views == 1:
    return batch
  single = trees.absent(batch.examples)

  places = np.repeat(np.arange(1 if single else batch.examples.shape[1]), views)

  def repeat(tensor: trees.Leaf) -> trees.Leaf:
    return tensor if tensor is None else tf.gather(
        tensor[:, tf.newaxis] if single else tensor, places, axis=1)

  x, y, examples = trees.map(
      repeat, (batch.x, batch.y, batch.mask if single else batch.examples))
  weights = tf.ones_like(batch.mask, tf.float32) if trees.absent(
      batch.sample_weight) else batch.sample_weight
  return batch._replace(
      x=x, y=y, examples=examples,
      sample_weight=trees.map(lambda w: repeat(w) / views, weights))
