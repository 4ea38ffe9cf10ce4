"""Working through a logical batch in equal chunks, one after the other."""

import tensorflow as tf

from tfdp_adaptive.clipping import base as clipping
from tfdp_adaptive.rules import base


def chunked(engine, count):
  """The same engine in the memory of one chunk: `count` chunks, sums added up.

  All chunks see the same query within one training step, so no clean sum is ever
  stored between steps, and noise is drawn once, after the last chunk.
  """
  if count == 1:
    return engine

  def run(model, loss, batch, asks, queries, clips):
    static = batch.mask.shape[0]
    size = tf.shape(batch.mask)[0] if static is None else static
    rows = -(-size // count)
    parts = base.map_tree(lambda t: _split(t, count, rows), batch)

    def chunk(index):
      part = base.map_tree(lambda t: t[index], parts)
      return engine(model, loss, part, asks, queries, clips)

    first = chunk(0)  # Outside the loop: it tells the shapes of the outputs.
    per_example = lambda clipped: (clipped.losses, clipped.norms, clipped.outputs)
    flat = tf.nest.flatten(per_example(first))
    arrays = [tf.TensorArray(t.dtype, count, element_shape=t.shape).write(0, t) for t in flat]

    def body(index, sums, arrays):
      clipped = chunk(index)
      values = tf.nest.flatten(per_example(clipped))
      return (index + 1, clipping.add_sums(sums, clipped.sums),
              [array.write(index, value) for array, value in zip(arrays, values)])

    _, sums, arrays = tf.while_loop(
        lambda index, *_: index < count, body, (tf.constant(1), first.sums, arrays),
        parallel_iterations=1, maximum_iterations=count - 1)
    losses, norms, outputs = tf.nest.pack_sequence_as(
        per_example(first), [array.concat()[:size] for array in arrays])
    return clipping.Clipped(sums, outputs, losses, norms)

  return run


def _split(tensor, count, rows):
  """[n, ...] to [count, rows, ...], padded by zeros (False in the mask)."""
  missing = rows * count - tf.shape(tensor)[0]
  padded = tf.pad(tensor, [[0, missing]] + [[0, 0]] * (tensor.shape.rank - 1))
  static = [count, rows if isinstance(rows, int) else None] + tensor.shape[1:].as_list()
  return tf.ensure_shape(
      tf.reshape(padded, tf.concat([[count, rows], tf.shape(tensor)[1:]], 0)), static)
