# SPDX-License-Identifier: Apache-2.0
"""How much memory a computation needs, read from its graph and static shapes.

Operations are walked through in the order they were traced in; a tensor lives from
the operation that makes it to the last one that reads it. That is an estimate: an
executor may run things in another order, share buffers or fuse operations.
"""

from typing import Any, Callable, Dict, List, Tuple

import tensorflow as tf

# Their results are (views of) what they are given, or none of the computation's doing.
_VIEWS = {'Identity', 'IdentityN', 'Reshape', 'Squeeze', 'ExpandDims', 'StopGradient',
          'EnsureShape', 'PreventGradient', 'TensorListFromTensor', 'BroadcastGradientArgs'}
_FREE = {'Placeholder', 'PlaceholderWithDefault', 'Const', 'ReadVariableOp', 'VarHandleOp', 'NoOp',
         'Shape', 'TensorListReserve', 'EmptyTensorList'}
_APPENDS = {'TensorListPushBack': 1, 'TensorListSetItem': 2}  # -> input that is kept.
_CALLS = {'PartitionedCall': 'f', 'StatefulPartitionedCall': 'f', 'While': 'body',
          'StatelessWhile': 'body'}


def peak(function: Callable[..., Any], specs: Any, unknown: int = 1) -> int:
  """Bytes that `function` needs at most at a time, arguments and captures left out.

  Args:
    function: Function of one nest of tensors.
    specs: Nest of their specs.
    unknown: What sizes count as that are not known while tracing.
  """
  graph = tf.function(function, autograph=False).get_concrete_function(specs).graph
  return _walk(graph, unknown)[0]


def _walk(graph: Any, unknown: int) -> Tuple[int, int]:
  """`(peak, kept)`: bytes needed at a time, and of what is appended to lists in it.

  Conditions count by their results: their branches are for rare records.
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
  live = most = kept = 0
  freed: Dict[int, int] = {}  # Position -> bytes of lists that are let go there.
  for position, operation in enumerate(operations):
    inside, lists = _inside(operation, unknown)
    if operation.type in _APPENDS:
      kept += _bytes(operation.inputs[_APPENDS[operation.type]], unknown)
    if lists:
      kept += lists
      readers = [last[owner[id(t)]] for t in operation.outputs if t.dtype == tf.variant]
      until = max(readers, default=position)
      freed[until] = freed.get(until, 0) + lists
    live += lists + sum(sizes.get(id(t), 0) for t in operation.outputs)
    most = max(most, live + inside)
    live -= freed.get(position, 0) + sum(sizes.get(buffer, 0) for buffer in ends.get(position, ()))
  return most, kept


def _inside(operation: tf.Operation, unknown: int) -> Tuple[int, int]:
  """`_walk` of the function an operation calls, lists of loops as long as they get."""
  attribute = _CALLS.get(operation.type)
  if attribute is None:
    return 0, 0
  called = operation.graph._get_function(operation.get_attr(attribute).name)
  most, kept = _walk(called.graph, unknown)
  if attribute == 'body' and kept:
    times = tf.get_static_value(operation.inputs[1])  # After the counter: the maximum.
    if times is None or times < 0:
      times = unknown
    kept *= int(times)
  return most, kept


def _bytes(tensor: tf.Tensor, unknown: int) -> int:
  if tensor.dtype in (tf.variant, tf.resource, tf.string) or tensor.shape.rank is None:
    return 0
  number = 1
  for size in tensor.shape:
    number *= unknown if size is None else size
  return number * tensor.dtype.size
