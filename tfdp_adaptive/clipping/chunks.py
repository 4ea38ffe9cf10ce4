# SPDX-License-Identifier: Apache-2.0
"""Engines that clip a batch in chunks, or several views of each example.

The gradient of an example is the mean over its views, which is clipped once. To an engine, an
example with K views is a record of K examples whose weights are 1/K. The random layers of a model
draw anew for each of them. The rows are repeated on the device, within a chunk.

The number of examples that fit into a memory budget is estimated:

The memory of a computation is read from its graph and static shapes. A tensor is in memory from the
operation that computes it to the last one that reads it, in the order in which they were traced.
This is an estimate: an executor may change the order, share buffers or fuse operations.
"""

import math
from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.clipping import protocol


def rows_within(
    budget: int, engine: interface.Engine, model: compat.Model, loss: interface.Loss,
    batch: interface.Batch, request: interface.Request, size: int) -> int:
  """Returns the number of examples that fit into a memory budget.

  Args:
    budget: Bytes for what the engine forms while it works on a chunk: activations,
      its own buffers and the sums. Weights, optimizer state and the batch come on top.
    engine, model, loss, batch, request: As the engine takes them.
    size: Examples of a batch (the expected number, if that varies).

  Returns:
    `size` if all fit. Otherwise a divisor of `size`, unless every one is much smaller than the
    largest number that fits.

  Raises:
    ValueError: If not even one example fits.
  """

  def needed(rows: int) -> int:
    specs = trees.map(lambda t: tf.TensorSpec([rows] + t.shape[1:].as_list(), t.dtype), batch)
    return peak(
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
  # Memory is nearly linear in the size, but engines may choose another route for another size.
  fits = max(1, int(1 + (size - 1) * (budget - one) / (whole - one)))
  while fits > 1 and needed(fits) > budget:
    fits = fits * 3 // 4
  divisor = max(d for d in range(1, fits + 1) if size % d == 0)
  return divisor if 2 * divisor > fits else -(-size // -(-size // fits))


def chunked(
    engine: interface.Engine, count: int = 1, rows: Optional[protocol.Size] = None,
    keep_outputs: bool = True) -> interface.Engine:
  """Returns an engine that processes a batch in chunks, to limit memory.

  All chunks belong to the same training step, so no clean sum is stored between steps, and noise is
  drawn once, after the last chunk.

  Args:
    engine: See `interface`.
    count: Number of chunks, unless `rows` is given.
    rows: Largest number of examples of a chunk; the last chunk is padded.
    keep_outputs: Whether to return the model's outputs for the whole batch, which may need much
      memory, or for no example.
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
    elif static is None:
      chunks, width = tf.maximum(-(-size // rows), 1), rows
    else:
      chunks = -(-static // rows)
      width = -(-static // chunks)
    parts = trees.map(lambda t: protocol.split(t, chunks, width), batch)

    def chunk(index: tf.Tensor) -> interface.Clipped:
      part = trees.map(lambda t: t[index], parts)
      return engine(model, loss, part, request)

    first = chunk(0)  # Outside the loop, because the loop needs the shapes of the outputs.
    per_example = lambda clipped: (
        clipped.losses, clipped.norms, *(
            (clipped.outputs, clipped.masks) if keep_outputs else ((), ())))
    flat = tf.nest.flatten(per_example(first))
    arrays = [tf.TensorArray(t.dtype, chunks, element_shape=t.shape).write(0, t) for t in flat]

    def body(
        index: tf.Tensor, sums: trees.Tree, arrays: List[tf.TensorArray]) -> Tuple[Any, ...]:
      clipped = chunk(index)
      values = tf.nest.flatten(per_example(clipped))
      return (index + 1, interface.add_sums(sums, clipped.sums),
              [array.write(index, value) for array, value in zip(arrays, values)])

    _, sums, arrays = tf.while_loop(
        lambda index, *_: index < chunks, body, (tf.constant(1), first.sums, arrays),
        parallel_iterations=1, maximum_iterations=chunks - 1)
    losses, norms, outputs, masks = tf.nest.pack_sequence_as(
        per_example(first), [array.concat()[:size] for array in arrays])
    if not keep_outputs:
      outputs = trees.map(lambda t: t[:0], first.outputs)
    return interface.Clipped(sums, outputs, losses, norms, masks)

  return run


# Operations whose results are views of their inputs, and others that need no memory of their own.
_VIEWS = {'Identity', 'IdentityN', 'Reshape', 'Squeeze', 'ExpandDims', 'StopGradient',
          'EnsureShape', 'PreventGradient', 'TensorListFromTensor', 'BroadcastGradientArgs'}
_FREE = {'Placeholder', 'PlaceholderWithDefault', 'Const', 'ReadVariableOp', 'VarHandleOp', 'NoOp',
         'Shape', 'TensorListReserve', 'EmptyTensorList'}
_APPENDS = {'TensorListPushBack': 1, 'TensorListSetItem': 2}  # Operation -> stored input.
_CALLS = {'PartitionedCall': 'f', 'StatefulPartitionedCall': 'f', 'While': 'body',
          'StatelessWhile': 'body'}


def peak(function: Callable[..., trees.Tree], specs: trees.Tree, unknown: int = 1) -> int:
  """Returns the peak memory of `function` in bytes, without its arguments and captures.

  Args:
    function: Function of one nest of tensors.
    specs: Nest of their specs.
    unknown: Value to assume for sizes that are not known while tracing.
  """
  graph = tf.function(function, autograph=False).get_concrete_function(specs).graph
  return _walk(graph, unknown)[0]


def _walk(graph: tf.Graph, unknown: int) -> Tuple[int, int]:
  """Returns `(peak, appended)`: peak bytes, and bytes of tensors appended to lists.

  The branches of conditions do not count, because they are for rare records.
  """
  operations = graph.get_operations()
  owner: Dict[int, int] = {}
  last: Dict[int, int] = {}  # Tensor -> buffer, buffer -> its last reader.
  sizes = {}
  for position, operation in enumerate(operations):
    for tensor in operation.inputs:
      last[owner.get(id(tensor), id(tensor))] = position
    for tensor in operation.outputs:
      if operation.type in _VIEWS and operation.inputs:
        source = operation.inputs[min(tensor.value_index, len(operation.inputs) - 1)]
        owner[id(tensor)] = owner.get(id(source), id(source))
      else:
        owner[id(tensor)] = id(tensor)
        sizes[id(tensor)] = 0 if operation.type in _FREE else _bytes(tensor, unknown)
      last[owner[id(tensor)]] = position
  for tensor in graph.outputs:
    last[owner.get(id(tensor), id(tensor))] = len(operations)

  ends: Dict[int, List[int]] = {}
  for buffer, position in last.items():
    ends.setdefault(position, []).append(buffer)
  live = most = appended = 0
  freed: Dict[int, int] = {}  # Position -> bytes of lists that are freed there.
  for position, operation in enumerate(operations):
    inside, lists = _inside(operation, unknown)
    if operation.type in _APPENDS:
      appended += _bytes(operation.inputs[_APPENDS[operation.type]], unknown)
    if lists:
      appended += lists
      readers = [last[owner[id(t)]] for t in operation.outputs if t.dtype == tf.variant]
      until = max(readers, default=position)
      freed[until] = freed.get(until, 0) + lists
    live += lists + sum(sizes.get(id(t), 0) for t in operation.outputs)
    most = max(most, live + inside)
    live -= freed.get(position, 0) + sum(sizes.get(buffer, 0) for buffer in ends.get(position, ()))
  return most, appended


def _inside(operation: tf.Operation, unknown: int) -> Tuple[int, int]:
  """Returns `_walk` of the function that an operation calls; loops append in all iterations."""
  attribute = _CALLS.get(operation.type)
  if attribute is None:
    return 0, 0
  called = operation.graph._get_function(operation.get_attr(attribute).name)
  most, appended = _walk(called.graph, unknown)
  if attribute == 'body' and appended:
    times = tf.get_static_value(operation.inputs[1])  # Inputs: counter, maximum, state.
    if times is None or times < 0:
      times = unknown
    appended *= int(times)
  return most, appended


def _bytes(tensor: tf.Tensor, unknown: int) -> int:
  if tensor.dtype in (tf.variant, tf.resource, tf.string) or tensor.shape.rank is None:
    return 0
  return tensor.dtype.size * math.prod(
      unknown if size is None else size for size in tensor.shape)


def over_views(
    engine: interface.Engine, views: int,
    parts: Optional[Tuple[compat.Model, compat.Model]] = None) -> interface.Engine:
  """Returns an engine for records of which each example has `views` views.

  The outputs that it returns, for metrics, are those of the first view of each example.

  Args:
    engine: See `interface`.
    views: The number of views.
    parts: A model that gives all views of an example the same, and runs once for each, and the rest
      of the model; or None.
  """
  if views == 1:
    return engine

  def run(
      model: compat.Model, loss: interface.Loss, batch: interface.Batch,
      request: interface.Request) -> interface.Clipped:
    if parts is not None:
      fixed, model = parts
      x = fixed(interface.joined(batch)[0].x, training=True)
      batch = batch._replace(x=interface.divided(x, batch))
    clipped = engine(model, loss, with_views(batch, views), request)
    single = trees.absent(batch.examples)
    outputs, masks = trees.map(
        lambda t: t[:, 0] if single else t[:, ::views], (clipped.outputs, clipped.masks))
    return clipped._replace(outputs=outputs, masks=masks)

  return run


def with_views(batch: interface.Batch, views: int) -> interface.Batch:
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
