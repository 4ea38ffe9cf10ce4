# SPDX-License-Identifier: Apache-2.0
"""Layers of either Keras: calls, vectorization, recurrent masks, vocabularies."""

import contextlib
from typing import Any, Callable, Iterable, Iterator, List, Optional, Tuple

import tensorflow as tf

from tfdp_adaptive.compat import stack


def initializers(layer: stack.Layer) -> List[Any]:
  """Returns the objects from which a layer creates its weights."""
  return [value for name, value in vars(layer).items() if name.endswith('initializer')]


def is_layer(value: object) -> bool:
  return isinstance(value, stack.keras.layers.Layer)


def words_of(layer: stack.Layer, data: stack.Tree) -> List[List[str]]:
  """Returns the words of each record that a `TextVectorization` or `StringLookup` looks up."""
  texts = tf.convert_to_tensor(data, tf.string)
  words = layer._preprocess(texts) if hasattr(layer, '_lookup_layer') else texts
  rows = words.to_list() if isinstance(words, tf.RaggedTensor) else words.numpy().tolist()
  rows = [row if isinstance(row, list) else [row] for row in rows]
  flat = [tf.nest.flatten(row) for row in rows]
  return [[word.decode('utf-8', 'replace') for word in row if word] for row in flat]


@contextlib.contextmanager
def swapped(owner: object, **attributes: object) -> Iterator[None]:
  """Replaces attributes of an object in a `with` block, and restores them afterwards."""
  own = vars(owner)
  before = {name: own[name] for name in attributes if name in own}
  own.update(attributes)
  try:
    yield
  finally:
    for name in attributes:
      del own[name]
    own.update(before)


def autographed(layer: stack.Layer, function: Callable[..., Any]) -> Callable[..., Any]:
  """Returns `function`, the layer's `call`, as Keras would run it in a graph."""
  own = not type(layer).__module__.startswith('keras.')
  if stack.KERAS_3 or not own or tf.executing_eagerly():
    return function
  autograph = tf.__internal__.autograph
  return autograph.tf_convert(function, autograph.control_status_ctx())


def with_captures(concrete: stack.Function) -> Callable[..., List[tf.Tensor]]:
  """Returns a concrete function as a function of its inputs and captures, in this order."""
  count = len(concrete.inputs) - len(concrete.captured_inputs)
  return lambda *values: tf.nest.flatten(
      concrete._call_flat(list(values[:count]), list(values[count:])))


def unconverted(function: Callable[..., Any]) -> Callable[..., Any]:
  """Keeps AutoGraph from rewriting `function`, but not the layers that it calls."""
  function.autograph_info__ = None  # type: ignore[attr-defined]
  return function


def graph_nodes(definition: Any) -> List[Any]:
  """Returns all nodes of a graph's definition and of its functions."""
  return [*definition.node, *(node for f in definition.library.function for node in f.node_def)]


def operations(concrete: stack.Function) -> List[str]:
  """Returns the types of operations in a concrete function and in all that it calls."""
  return sorted({node.op for node in graph_nodes(concrete.graph.as_graph_def())})


def traced(function: Callable[..., stack.Tree], records: stack.Tree) -> stack.Function:
  """Traces `function` for one of the records [n, ...]."""
  spec = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape[1:], t.dtype), records)
  return tf.function(function, autograph=False).get_concrete_function(spec)


def vectorizes_safely(operations: Iterable[str]) -> bool:
  """Returns whether a function of these types of operations may go through `tf.vectorized_map`.

  TF 2.21's products of batches of matrices (oneDNN) write beyond their memory if they broadcast an
  axis of size one, as for batches of one example: wrong numbers, a crash (tensorflow issue 117700).
  """
  return not (stack.KERAS_3 and any('BatchMatMul' in name for name in operations))


def looped(
    function: Callable[..., stack.Tree], records: stack.Tree,
    concrete: Optional[stack.Function] = None) -> stack.Tree:
  """Maps a function of one record over all records, one after another."""
  concrete = concrete or traced(function, records)
  signature = tf.nest.map_structure(
      lambda t: tf.TensorSpec(t.shape, t.dtype), concrete.structured_outputs)
  return tf.map_fn(unconverted(function), records, fn_output_signature=signature)


def vectorized(function: Callable[..., stack.Tree], records: stack.Tree) -> stack.Tree:
  """Maps over all records at once, unless TensorFlow would then corrupt memory."""
  if stack.KERAS_3:
    concrete = traced(function, records)
    if not vectorizes_safely(operations(concrete)):
      return looped(function, records, concrete)
  # Single operations without a vectorized form (embedding lookups in TF 2.14) loop.
  return tf.vectorized_map(function, records, fallback_to_while_loop=True)


def vectorizes_wrongly(layer: stack.Layer) -> bool:
  """Returns whether `tf.vectorized_map` over examples fails in a layer.

  On Keras 3 attention crashes the process (TF 2.21), and dropout would draw one mask
  for all examples.
  """
  return stack.KERAS_3 and bool(
      'Attention' in type(layer).__name__ or getattr(layer, '_seed_generators', None))


def depthwise_kernel(layer: stack.Layer) -> stack.Variable:
  """Returns the kernel of a depthwise convolution."""
  return layer.kernel if stack.KERAS_3 else layer.depthwise_kernel


# Arguments of the `call` of recurrent layers after the inputs, in order.
RECURRENT_ARGUMENTS = (('initial_state', 'mask', 'training') if stack.KERAS_3 else
                       ('mask', 'training', 'initial_state'))
# Whether TimeDistributed joins the time axis with the batch, or calls its layer at each step.
TIME_DISTRIBUTED_FOLDS = not stack.KERAS_3


def recurrent_dropout_mask(
    cell: stack.Layer, like: tf.Tensor, rate: float, training: bool) -> tf.Tensor:
  """Draws a mask of inverted dropout from a recurrent cell's own generator, shaped as `like`."""
  ones = tf.ones_like(like)
  if stack.KERAS_3:
    return stack.keras.random.dropout(ones, rate, seed=cell.seed_generator)
  del training
  return cell._random_generator.dropout(ones, rate)


def recurrent_mask_getter(
    kind: str, masks: List[tf.Tensor], sequence: bool) -> Tuple[str, Callable[..., Any]]:
  """Returns name and body of the method by which recurrent layers get their masks.

  Args:
    kind: 'dropout' or 'recurrent_dropout'.
    masks: [n, width] masks, one for all gates or one for each.
    sequence: Whether they will multiply a sequence [n, T, width].
  """
  masks = [mask[:, tf.newaxis] if sequence else mask for mask in masks]
  if stack.KERAS_3:
    return f'get_{kind}_mask', lambda *_, **__: masks[0] if len(masks) == 1 else masks

  def getter(inputs: tf.Tensor, training: bool, count: int = 1) -> Any:
    del inputs, training
    return masks[0] if count == 1 else (masks * count)[:count]

  return f'get_{kind}_mask_for_cell', getter
