# SPDX-License-Identifier: Apache-2.0
"""The training of a group's clients, one after another, in a loop inside TensorFlow.

The same steps as `tff.learning`'s client work, which stays the definition. A group's answer
is the sum of its clients' clipped answers, so memory is that of one client.

No client may see another. So all variables of the model are set back to their first values before
every client, and a model that keeps data outside its variables is refused.
"""

from __future__ import annotations

import re
from typing import Any, Callable, Dict, List, Mapping, Sequence, Tuple

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import private_rule
from tfdp_adaptive import trees

from . import groups
from . import server as server_lib

Metrics = Mapping[str, trees.Tree]  # {metric: its sums}
Finalizer = Callable[[Any], tf.Tensor]
ModelFn = Any  # A function that makes a model of Keras or of TFF, or a functional model of TFF.
Model = Any  # A `keras_model.KerasModel`, or a `tff.learning.models.VariableModel`.
# Resources besides variables in which an operation can remember a client.
_MEMORY = re.compile('MutableHash|MutableDense|Queue|Barrier|ConditionalAccumulator|Stage|PyFunc|'
                     'OrderedMap|UnorderedMap|VarHandleOp|VariableV2|StackV2|AnonymousIterator')


class FunctionalOptimizer:
  """A `tff.learning.optimizers.Optimizer` as the loop uses it."""

  def __init__(self, optimizer: Any) -> None:
    self._optimizer = optimizer

  def start(self, variables: Sequence[tf.Variable]) -> trees.Tree:
    """Returns the state before a client's first step."""
    return tf.nest.map_structure(tf.convert_to_tensor, self._optimizer.initialize(
        tuple(tf.TensorSpec(v.shape, v.dtype) for v in variables)))

  def apply(self, state: trees.Tree, gradients: Sequence[tf.Tensor],
            variables: Sequence[tf.Variable]) -> trees.Tree:
    """Moves the variables; returns the next state."""
    state, values = self._optimizer.next(state, tuple(variables), tuple(gradients))
    trees.assign(zip(variables, values))
    return state


def loop(
    model: Model, input_spec: trees.Tree, optimizer: FunctionalOptimizer,
    server: server_lib.Server, finalizers: Mapping[str, Finalizer],
    others: Sequence[Tuple[tf.Variable, tf.Tensor]]
) -> tf.types.experimental.PolymorphicFunction:
  """Returns `(weights, broadcast, group) -> Answer`, the sum over a group's clients.

  Args:
    model: The model.
    input_spec: Nest of `tf.TensorSpec` of a batch.
    optimizer: The clients' optimizer: a `FunctionalOptimizer`, or an object with its methods.
    server: The `Server`, which clips the answer of a client.
    finalizers: The metric finalizers of the model.
    others: The variables besides the model's weights, and the first values to which they are set
      back before every client.
  """
  trainable = tf.nest.flatten(model.trainable_variables)
  non_trainable = tf.nest.flatten(model.non_trainable_variables)

  def batch_of(group: groups.Group, start: tf.Tensor, end: tf.Tensor) -> trees.Tree:
    leaves = [tf.ensure_shape(rows[start:end], spec.shape)
              for rows, spec in zip(group.rows, tf.nest.flatten(input_spec))]
    return tf.nest.pack_sequence_as(input_spec, leaves)

  def step(group: groups.Group, batch: tf.Tensor, optimizer_state: trees.Tree
           ) -> Tuple[tf.Tensor, trees.Tree]:
    start, end = _bounds(group.batch_ends, batch)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
      tape.watch(trainable)
      output = model.forward_pass(batch_of(group, start, end), training=True)
    optimizer_state = optimizer.apply(
        optimizer_state, tape.gradient(output.loss, trainable), trainable)
    return batch + 1, optimizer_state

  def client(weights: server_lib.ModelWeights, broadcast: private_rule.Broadcast,
             group: groups.Group, index: tf.Tensor) -> server_lib.Answer:
    trees.assign(zip([*trainable, *non_trainable], tf.nest.flatten(weights)))
    trees.assign(others)
    _draw_seeds(getattr(model, 'seeds', ()))
    start, end = _bounds(group.client_ends, index)
    tf.while_loop(
        lambda batch, _: batch < end, lambda batch, state: step(group, batch, state),
        (start, optimizer.start(trainable)), parallel_iterations=1)
    update = [before - after for before, after in zip(
        tf.nest.flatten(weights.trainable), trainable)]
    # As in `tff.learning`: an update that is not finite counts as none at all.
    update = tf.cond(_is_finite(update), lambda: update, lambda: _nothing(model, update))
    bounded: trees.Tree = ()
    if server.private_metrics is not None:
      bounded = server.bounded_metrics(
          finalized(finalizers, model.report_local_unfinalized_metrics()))
    return server.record(broadcast, tf.nest.pack_sequence_as(server.specs, update), bounded)

  @tf.function(autograph=False)
  def train_all(weights: server_lib.ModelWeights, broadcast: private_rule.Broadcast,
                group: groups.Group) -> server_lib.Answer:

    def body(index: tf.Tensor, total: trees.Tree) -> Tuple[tf.Tensor, trees.Tree]:
      one = client(weights, broadcast, group, index)
      return index + 1, tf.nest.map_structure(tf.add, total, one)

    _, total = tf.while_loop(
        lambda index, _: index < tf.shape(group.client_ends, tf.int64)[0], body,
        (tf.zeros([], tf.int64), server.zero()), parallel_iterations=1)
    return total

  return train_all


def finalized(finalizers: Mapping[str, Finalizer], values: Metrics) -> Dict[str, tf.Tensor]:
  """Returns {metric: value} of sums that are not finalized."""
  return {name: finalize(values[name]) for name, finalize in finalizers.items()}


def reusable(model: Model) -> Dict[str, Finalizer]:
  """Returns the finalizers of a model's metrics, which create their variables here, once.

  Those of TFF create them in every call.
  """

  def of(finalize: Finalizer, example: trees.Tree) -> Finalizer:
    made: List[tf.Variable] = []

    def record(next_creator: Callable[..., tf.Variable], **kwargs: object) -> tf.Variable:
      made.append(next_creator(**kwargs))
      return made[-1]

    def again(values: trees.Tree) -> tf.Tensor:
      variables = iter(made)
      with tf.variable_creator_scope(lambda next_creator, **kwargs: next(variables)):
        return finalize(values)

    with tf.variable_creator_scope(record):
      finalize(example)
    return again

  values = model.report_local_unfinalized_metrics()
  return {name: of(getattr(finalize, 'python_function', finalize), values[name])
          for name, finalize in model.metric_finalizers().items()}


def check_memory(graph: tf.Graph, variables: Sequence[tf.Variable]) -> None:
  """Raises unless all that the graph remembers is in variables that are known.

  Raises:
    NotInGroupsError: It names the operations that remember.
  """
  found = {node.op for node in compat.graph_nodes(graph.as_graph_def()) if _MEMORY.search(node.op)}
  known = {id(variable.handle) for variable in variables}
  if any(outer.dtype == tf.resource and id(outer) not in known for outer, _ in graph.captures):
    found.add('a resource')
  if found:
    raise groups.NotInGroupsError(
        f'The model may keep one client\'s data for the next: {sorted(found)}.')


def _bounds(ends: tf.Tensor, index: tf.Tensor) -> Tuple[tf.Tensor, tf.Tensor]:
  """Returns start and end of part `index`."""
  return tf.where(index > 0, ends[tf.maximum(index - 1, 0)], 0), ends[index]


def _draw_seeds(seeds: Sequence[tf.Variable]) -> None:
  """Draws seeds, so that the dropout of a client does not depend on the client before it."""
  for seed in seeds:
    seed.assign(tf.cast(tf.random.uniform(seed.shape, 0, tf.int32.max, tf.int64), seed.dtype))


def _is_finite(update: Sequence[tf.Tensor]) -> tf.Tensor:
  return tf.reduce_all([tf.reduce_all(tf.math.is_finite(u)) for u in update])


def _nothing(model: Model, update: Sequence[tf.Tensor]) -> List[tf.Tensor]:
  model.reset_metrics()
  return [tf.zeros_like(u) for u in update]
