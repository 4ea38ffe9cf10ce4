# SPDX-License-Identifier: Apache-2.0
"""Working through a logical batch in equal chunks, one after the other."""

from typing import Any, Tuple

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import footprint
from tfdp_adaptive.clipping import interface


def chunked(
    engine: interface.Engine, count: int = 1, rows: Any = None,
    keep_outputs: bool = True) -> interface.Engine:
  """The same engine in the memory of one chunk: sums of all chunks added up.

  All chunks see the same query within one training step, so no clean sum is ever
  stored between steps, and noise is drawn once, after the last chunk.

  Args:
    engine: See `interface`.
    count: Number of chunks, unless `rows` is given.
    rows: Examples of a chunk; the last one is padded.
    keep_outputs: Whether to return the model's outputs, which for the whole batch
      may need more memory than all else; otherwise, those of no example.
  """
  if count == 1 and rows is None:
    return engine

  def run(
      model: compat.Model, loss: interface.Loss, batch: interface.Batch,
      request: interface.Request) -> interface.Clipped:
    static = batch.mask.shape[0]
    size = tf.shape(batch.mask)[0] if static is None else static
    if rows is not None and static is not None and static <= rows:
      return engine(model, loss, batch, request)
    if rows is None:
      chunks, width = count, -(-size // count)
    else:
      chunks, width = tf.maximum(-(-size // rows), 1) if static is None else -(-size // rows), rows
    parts = trees.map(lambda t: _split(t, chunks, width), batch)

    def chunk(index: tf.Tensor) -> interface.Clipped:
      part = trees.map(lambda t: t[index], parts)
      return engine(model, loss, part, request)

    first = chunk(0)  # Outside the loop: it tells the shapes of the outputs.
    per_example = lambda clipped: (
        clipped.losses, clipped.norms, clipped.outputs if keep_outputs else ())
    none = trees.map(lambda t: t[:0], first.outputs)
    flat = tf.nest.flatten(per_example(first))
    arrays = [tf.TensorArray(t.dtype, chunks, element_shape=t.shape).write(0, t) for t in flat]

    def body(index: tf.Tensor, sums: Any, arrays: Any) -> Tuple[Any, ...]:
      clipped = chunk(index)
      values = tf.nest.flatten(per_example(clipped))
      return (index + 1, interface.add_sums(sums, clipped.sums),
              [array.write(index, value) for array, value in zip(arrays, values)])

    _, sums, arrays = tf.while_loop(
        lambda index, *_: index < chunks, body, (tf.constant(1), first.sums, arrays),
        parallel_iterations=1, maximum_iterations=chunks - 1)
    losses, norms, outputs = tf.nest.pack_sequence_as(
        per_example(first), [array.concat()[:size] for array in arrays])
    return interface.Clipped(sums, outputs if keep_outputs else none, losses, norms)

  return run


def rows_within(
    budget: int, engine: interface.Engine, model: compat.Model, loss: interface.Loss,
    batch: interface.Batch, request: interface.Request, size: int) -> int:
  """How many examples may be worked on at once within a budget of memory.

  Args:
    budget: Bytes for what the engine forms while it works on a chunk: activations,
      its own buffers and the sums. Weights, optimizer state and the batch come on top.
    engine, model, loss, batch, request: As the engine takes them.
    size: Examples of a batch (the expected number, if that varies).

  Returns:
    `size` if all fit; else a divisor of `size` where one is not much smaller than
    what fits, or equal chunks of which the last is padded.

  Raises:
    ValueError: If not even one example fits.
  """

  def needed(rows: int) -> int:
    specs = trees.map(lambda t: tf.TensorSpec([rows] + t.shape[1:].as_list(), t.dtype), batch)
    return footprint.peak(
        lambda part: engine(model, loss, part, request)[:3], specs, rows)

  whole = needed(size)
  if whole <= budget:
    return size
  one = needed(1)
  if one > budget:
    raise ValueError(
        '`memory_budget` must be enough for one example at a time. Received: memory_budget='
        f'{budget:,.0f} bytes; this model needs about {one:,.0f} for one example and {whole:,.0f} '
        f'for all {size}.')
  # Nearly linear; engines choose other ways for other sizes, so it is looked at again.
  fits = max(1, int(1 + (size - 1) * (budget - one) / (whole - one)))
  while fits > 1 and needed(fits) > budget:
    fits = fits * 3 // 4
  divisor = max(d for d in range(1, fits + 1) if size % d == 0)
  return divisor if 2 * divisor > fits else -(-size // -(-size // fits))


def _split(tensor: tf.Tensor, count: Any, rows: Any) -> tf.Tensor:
  """[n, ...] to [count, rows, ...], padded by zeros (False in the mask)."""
  missing = rows * count - tf.shape(tensor)[0]
  padded = tf.pad(tensor, [[0, missing]] + [[0, 0]] * (tensor.shape.rank - 1))
  static = [n if isinstance(n, int) else None for n in (count, rows)]
  return tf.ensure_shape(
      tf.reshape(padded, tf.concat([[count, rows], tf.shape(tensor)[1:]], 0)),
      static + tensor.shape[1:].as_list())
