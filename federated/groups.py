# SPDX-License-Identifier: Apache-2.0
"""Many clients trained in one call: their examples as tensors, and a loop inside TensorFlow.

A data set per client is a graph of its own that is made, sent, parsed and run: for small
models that takes ten times what the training does. Here the batches of many clients lie
one behind the other in a few tensors, and a worker goes through them client by client,
in the same steps as `tff.learning`'s client work, which stays the definition. A group's
answer is the sum of its clients' clipped answers.

No client may see another. So whatever variables the model has are set back to their first
values before every client, and a model that keeps anything in a place that is no variable
is not trained in groups.
"""

from __future__ import annotations

import collections
import contextlib
import re
from typing import Any, Callable, Iterator, List, NamedTuple, Sequence, Tuple, TYPE_CHECKING

import numpy as np
import tensorflow as tf

from . import tff

if TYPE_CHECKING:
  pass

# What an operation can remember a client in, besides variables.
_MEMORY = re.compile('MutableHash|MutableDense|Queue|Barrier|ConditionalAccumulator|Stage|PyFunc|'
                     'OrderedMap|UnorderedMap|VarHandleOp|VariableV2|StackV2|AnonymousIterator')


class Group(NamedTuple):
  """Batches of clients, one behind the other.

  Attributes:
    rows: A tensor per leaf of a batch, all examples of all batches along its first axis.
    batch_ends: [batches] where each batch ends in the rows.
    client_ends: [clients] where each client ends in the batches.
  """

  rows: Any
  batch_ends: Any
  client_ends: Any


class NotInGroupsError(ValueError):
  """The clients of this model must be trained one at a time."""


def input_spec_of(model_fn: Any) -> Any:
  """Nest of `tf.TensorSpec` of a batch of the model."""
  if isinstance(model_fn, tff.FunctionalModel):
    return model_fn.input_spec
  with tf.Graph().as_default():
    return model_fn().input_spec


def specs(input_spec: Any) -> Group:
  """`tf.TensorSpec`s of a group.

  Raises:
    NotInGroupsError: Batches are not tensors that can lie one behind the other.
  """
  leaves = tf.nest.flatten(input_spec)
  for leaf in leaves:
    if not isinstance(leaf, tf.TensorSpec) or leaf.dtype == tf.string or not (
        leaf.shape.rank and leaf.shape[1:].is_fully_defined()):
      raise NotInGroupsError(f'Batches of {leaf} cannot lie one behind the other.')
  ends = tf.TensorSpec([None], tf.int64)
  return Group(
      tuple(tf.TensorSpec([None] + leaf.shape[1:], leaf.dtype) for leaf in leaves), ends, ends)


def batches_of(users: Any, client_id: Any, input_spec: Any, as_one: bool = False) -> List[Any]:
  """The batches of one client, as tuples of arrays in the order of the flat spec.

  Args:
    users: What has `create_tf_dataset_for_client`; and `batches`, where it can do without.
    client_id: Of the client.
    input_spec: Of a batch; any other one is refused.
    as_one: Whether all of the client's examples make one batch.
  """
  batches = (users.batches(client_id) if hasattr(users, 'batches') else
             users.create_tf_dataset_for_client(client_id).as_numpy_iterator())
  leaves = tf.nest.flatten(input_spec)
  flat = []
  for batch in batches:
    tf.nest.assert_same_structure(batch, input_spec, check_types=False)
    arrays = tuple(np.asarray(x) for x in tf.nest.flatten(batch))
    sizes = {array.shape[:1] for array in arrays}
    if len(sizes) > 1 or any(
        array.dtype != leaf.dtype.as_numpy_dtype or not leaf.shape.is_compatible_with(array.shape)
        for array, leaf in zip(arrays, leaves)):
      raise TypeError(f'A batch must be like {leaves}. '
                      f'Received: {[(a.shape, str(a.dtype)) for a in arrays]}.')
    flat.append(arrays)
  if as_one and flat:
    whole = tuple(np.concatenate(parts) for parts in zip(*flat))
    flat = [whole] if len(whole[0]) else []
  return flat


def pack(clients: Sequence[List[Any]], group_specs: Group) -> Group:
  """The `Group` of some clients' batches."""
  batches = [batch for client in clients for batch in client]
  rows = tuple(
      np.concatenate([np.zeros([0, *spec.shape[1:]], spec.dtype.as_numpy_dtype),
                      *(batch[i] for batch in batches)])
      for i, spec in enumerate(group_specs.rows))
  return Group(rows, np.cumsum([len(batch[0]) for batch in batches], dtype=np.int64),
               np.cumsum([len(client) for client in clients], dtype=np.int64))


def divide(clients: Sequence[List[Any]], count: int) -> List[List[List[Any]]]:
  """`count` lists of clients of about the same work, whatever the sizes; some may be empty."""
  parts: List[List[Any]] = [[] for _ in range(count)]
  work = [0] * count
  for client in sorted(clients, key=len, reverse=True):
    least = work.index(min(work))
    parts[least].append(client)
    work[least] += 1 + len(client)
  return parts


def computation(
    model_fn: Any, optimizer: Any, answer: Callable[..., Any], zero: Any, *, weights_type: Any,
    broadcast_type: Any) -> Any:
  """The TFF computation `(weights, broadcast, group) -> (sum of answers, sum of metrics)`.

  Args:
    model_fn: As for `build_private_fed_avg`.
    optimizer: The clients' `tff.learning.optimizers.Optimizer`.
    answer: `(broadcast, update, number of examples, metrics) -> the clipped answer of a
      client`; the update is a flat list, metrics are not finalized.
    zero: `() -> the sum of no answers`.
    weights_type: TFF type of the model's weights.
    broadcast_type: TFF type of what else is broadcast.

  Raises:
    NotInGroupsError: The model keeps something that cannot be set back.
  """
  # Of the model, and of the finalizers of metrics, which write theirs before they read them.
  variables: List[Any] = []
  passing: List[Any] = []
  unknown: List[Any] = []
  made_by = [unknown]

  def record(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
    made_by[-1].append(next_creator(**kwargs))
    return made_by[-1][-1]

  @contextlib.contextmanager
  def recorded(made: Any) -> Iterator[None]:
    made_by.append(made)
    yield
    made_by.pop()

  def one_answer(*arguments: Any) -> Any:
    with recorded(passing):
      return answer(*arguments)

  def make() -> Any:
    return (tff.model_from_functional(model_fn)
            if isinstance(model_fn, tff.FunctionalModel) else model_fn())

  input_spec = input_spec_of(model_fn)
  graphs = []

  def train(weights: Any, broadcast: Any, group: Any) -> Any:
    variables.clear()
    with tf.variable_creator_scope(record):  # Of this graph, into which all others lift theirs.
      with recorded(variables):
        model = make()
      train_all = _loop(model, list(variables), input_spec, optimizer, one_answer, zero)
      graphs.append(train_all.get_concrete_function(weights, broadcast, group).graph)
      return train_all(weights, broadcast, group)

  group_type = tff.tensorflow_to_type(collections.OrderedDict(specs(input_spec)._asdict()))
  result = tff.tf_computation(train, weights_type, broadcast_type, group_type)
  _check_memory(graphs[-1], variables + passing)
  return result


def _loop(
    model: Any, variables: Sequence[tf.Variable], input_spec: Any, optimizer: Any,
    answer: Callable[..., Any], zero: Any) -> Any:
  """`(weights, broadcast, group) -> (answers, metrics)` summed over the clients of a group."""
  mine = tff.ModelWeights.from_model(model)
  weight_refs = {v.ref() for v in tf.nest.flatten(mine)}
  others = [v for v in variables if v.ref() not in weight_refs]

  def batch_of(group: Any, start: tf.Tensor, end: tf.Tensor) -> Any:
    leaves = [tf.ensure_shape(rows[start:end], spec.shape)
              for rows, spec in zip(group['rows'], tf.nest.flatten(input_spec))]
    return tf.nest.pack_sequence_as(input_spec, leaves)

  def step(group: Any, batch: tf.Tensor, examples: tf.Tensor, optimizer_state: Any) -> Any:
    start, end = _bounds(group['batch_ends'], batch)
    with tf.GradientTape() as tape:
      output = model.forward_pass(batch_of(group, start, end), training=True)
    gradients = tape.gradient(output.loss, mine.trainable)
    optimizer_state, updated = optimizer.next(
        optimizer_state, tuple(tf.nest.flatten(mine.trainable)), tuple(tf.nest.flatten(gradients)))
    for variable, value in zip(tf.nest.flatten(mine.trainable), updated):
      variable.assign(value)
    count = tf.shape(output.predictions)[0] if output.num_examples is None else output.num_examples
    return batch + 1, examples + tf.cast(count, tf.int64), optimizer_state

  def client(
      weights: Any, broadcast: Any, group: Any, index: tf.Tensor, initial: Any) -> Tuple[Any, Any]:
    _assign(mine, weights)
    for variable, value in zip(others, initial):
      variable.assign(value)
    first, last = _bounds(group['client_ends'], index)
    optimizer_state = tf.nest.map_structure(tf.convert_to_tensor, optimizer.initialize(
        tuple(tf.TensorSpec(v.shape, v.dtype) for v in tf.nest.flatten(mine.trainable))))
    _, examples, _ = tf.while_loop(
        lambda batch, *_: batch < last,
        lambda batch, examples, state: step(group, batch, examples, state),
        (first, tf.zeros([], tf.int64), optimizer_state), parallel_iterations=1)
    update = [start - end for start, end in zip(
        tf.nest.flatten(weights.trainable), tf.nest.flatten(mine.trainable))]
    # As in `tff.learning`: an update that is not finite counts as none at all.
    finite = _is_finite(update)
    update = tf.cond(finite, lambda: update, lambda: _nothing(model, update))
    metrics = model.report_local_unfinalized_metrics()
    return answer(broadcast, update, tf.where(finite, examples, 0), metrics), metrics

  @tf.function
  def train_all(weights: Any, broadcast: Any, group: Any) -> Any:
    initial = [v.read_value() for v in others]
    _assign(mine, weights)
    no_metrics = tf.nest.map_structure(tf.zeros_like, model.report_local_unfinalized_metrics())

    def body(index: tf.Tensor, total: Any) -> Tuple[tf.Tensor, Any]:
      one = client(weights, broadcast, group, index, initial)
      return index + 1, tf.nest.map_structure(tf.add, total, one)

    _, total = tf.while_loop(
        lambda index, _: index < tf.shape(group['client_ends'], tf.int64)[0], body,
        (tf.zeros([], tf.int64), (zero(), no_metrics)), parallel_iterations=1)
    return total

  return train_all


def _bounds(ends: tf.Tensor, index: tf.Tensor) -> Tuple[tf.Tensor, tf.Tensor]:
  """Start and end of part `index`."""
  return tf.where(index > 0, ends[tf.maximum(index - 1, 0)], 0), ends[index]


def _assign(variables: Sequence[tf.Variable], values: Any) -> None:
  for variable, value in zip(tf.nest.flatten(variables), tf.nest.flatten(values)):
    variable.assign(value)


def _is_finite(update: Sequence[tf.Tensor]) -> tf.Tensor:
  """[] bool; every element is looked at only where the sum of squares overflows or is NaN."""
  squares = tf.add_n([tf.cast(tf.nn.l2_loss(u), tf.float64) for u in update])
  return tf.cond(
      tf.math.is_finite(squares), lambda: tf.constant(True),
      lambda: tf.reduce_all([tf.reduce_all(tf.math.is_finite(u)) for u in update]))


def _nothing(model: Any, update: Sequence[tf.Tensor]) -> List[tf.Tensor]:
  model.reset_metrics()
  return [tf.zeros_like(u) for u in update]


def _check_memory(graph: Any, variables: Sequence[tf.Variable]) -> None:
  """Raises unless all that the graph remembers is in variables that are known."""
  definition = graph.as_graph_def()
  operations = [node.op for node in definition.node] + [
      node.op for function in definition.library.function for node in function.node_def]
  kept = {op for op in operations if _MEMORY.search(op)}
  known = {id(variable.handle) for variable in variables}
  kept |= {outer.op.type for outer, _ in graph.captures
           if outer.dtype == tf.resource and id(outer) not in known}
  if kept:
    raise NotInGroupsError(f'The model may keep one client\'s data for the next: {sorted(kept)}.')
