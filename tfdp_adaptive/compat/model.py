# SPDX-License-Identifier: Apache-2.0
"""Models and layers of either Keras.

Variables, frozen weights, losses, structure and clones of models; calls, vectorization, recurrent
masks and vocabularies of layers.
"""

import contextlib
import functools
import importlib
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional

import tensorflow as tf

from tfdp_adaptive.compat import stack


def losses_named(*names: str) -> List[Any]:
  """Returns the losses that the installed Keras has."""
  return [getattr(stack.keras.losses, name) for name in names if hasattr(stack.keras.losses, name)]


def weight_regularization(model: stack.Model) -> List[tf.Tensor]:
  """Returns the losses that depend on the weights alone, as a list of scalars."""
  if stack.KERAS_3:
    return [v.regularizer(v) for v in model.trainable_variables if v.regularizer is not None]
  return [tf.cast(tf.reduce_sum(loss()), tf.float32) for layer in model._flatten_layers()
          for loss in layer._callable_losses if layer.trainable]


def penalties(model: stack.Model) -> List[Callable[..., Any]]:
  """Returns the functions that `weight_regularization` calls."""
  if stack.KERAS_3:
    return [v.regularizer for v in model.trainable_variables if v.regularizer is not None]
  return [loss for layer in model._flatten_layers() for loss in layer._callable_losses]


def is_variable(value: object) -> bool:
  return isinstance(value, (tf.Variable, getattr(stack.keras, 'Variable', tf.Variable)))


def has_data_losses(model: stack.Model) -> bool:
  """Returns whether the last call of the model added losses that depend on the data."""
  if stack.KERAS_3:
    return any(layer._get_own_losses() for layer in model._flatten_layers())
  return any(layer._losses or layer._eager_losses or type(layer).__name__ == 'AddLoss'
             for layer in model._flatten_layers())


def copy_penalties(model: stack.Model, copy: stack.Model) -> None:
  """Adds the functions given to `model.add_loss` to a copy with the same layers (Keras 2)."""
  for penalty in getattr(model, '_callable_losses', ()):
    copy.add_loss(penalty)


def leaf_layers(model: stack.Model) -> List[stack.Layer]:
  """Returns every layer that has no layers inside, also those of nested models, once."""
  layers = {id(l): l for l in model._flatten_layers(include_self=False, recursive=True)}
  return [l for l in layers.values()
          if not list(l._flatten_layers(include_self=False, recursive=True))]


def loss_tracker(model: stack.Model, outputs: stack.Tree) -> stack.Metric:
  """Returns the metric that `fit` shows as `loss`."""
  if not stack.KERAS_3 and not model.compiled_loss.built:
    model.compiled_loss.build(outputs)
  return next(metric for metric in model.metrics if metric.name == 'loss')


def is_model(value: object) -> bool:
  return isinstance(value, stack.keras.Model)


def all_layers(model: stack.Layer) -> List[stack.Layer]:
  """Returns a model or layer, and every layer inside."""
  return list(model._flatten_layers(include_self=True, recursive=True))


def built_variables(model: stack.Layer) -> List[stack.Variable]:
  """Returns the existing variables of a model or layer, without vocabularies."""
  return list({id(v): v for layer in all_layers(model) if layer.built
               for v in layer.variables if hasattr(v, 'assign')}.values())


def saved_arrays(model: stack.Model) -> List[Any]:
  """Returns a model's arrays as Keras saves them, with LoRA merged into its kernels."""
  arrays = list(model.weights)
  merged: List[Any] = []
  for layer in leaf_layers(model):
    if getattr(layer, 'lora_enabled', False):
      store: Dict[str, Any] = {}
      layer.save_own_variables(store)
      merged += store.values()
      own = {id(v) for v in layer.weights}
      arrays = [v for v in arrays if id(v) not in own]
  return arrays + merged


def sequential_layers(model: stack.Model) -> List[Any]:
  """Returns the layers of a Sequential with its own input, which Keras 2 may hide."""
  return model.layers if stack.KERAS_3 or not model.inputs else list(model._self_tracked_trackables)


def called_on(layer: stack.Layer, tensor: Any) -> Any:
  """Returns the last symbolic output of a layer that takes `tensor` alone, or None.

  A private model shares inputs and layers with the model that it was made of, which called first.
  """
  for node in reversed(layer._inbound_nodes):
    inputs, outputs = map(tf.nest.flatten, (node.input_tensors, node.output_tensors))
    if inputs[0] is tensor and len(inputs) == len(outputs) == len(node.parent_nodes) == 1:
      return outputs[0]
  return None


def input_structure(model: stack.Model) -> Any:
  """Returns the nest of a functional model's symbolic inputs, or None."""
  return getattr(model, '_inputs_struct' if stack.KERAS_3 else '_nested_inputs', None)


def input_specs(model: stack.Model) -> Any:
  """Returns a nest of the specs of a model's inputs, or None if the model does not tell them."""
  inputs = getattr(model, 'inputs', None) if model.built else None
  if not inputs:
    return None
  specs = [tf.TensorSpec(t.shape, t.dtype) for t in inputs]
  structure = input_structure(model)
  if structure is not None and len(tf.nest.flatten(structure)) == len(specs):
    return tf.nest.pack_sequence_as(structure, specs)
  return specs[0] if len(specs) == 1 else specs


def with_optional(model: stack.Model, inputs: stack.Tree) -> Any:
  """Returns inputs with None for optional ones that a dictionary leaves out."""
  structure = input_structure(model)
  if not stack.KERAS_3 or not isinstance(inputs, dict) or not isinstance(structure, dict):
    return inputs
  history = {name: getattr(one, '_keras_history', None) for name, one in structure.items()}
  return {**{name: None for name, one in history.items()
             if one is not None and getattr(one.operation, 'optional', False)}, **inputs}


def output_structure(model: stack.Model) -> Any:
  """Returns the nest of a functional model's symbolic outputs, or None."""
  return getattr(model, '_outputs_struct' if stack.KERAS_3 else '_nested_outputs', None)


def clone_model(
    model: stack.Model, clone: Callable[[stack.Layer], stack.Layer],
    call: Callable[..., stack.Tree]) -> stack.Model:
  """Calls Keras' `clone_model`; functional models call copies by `call(layer, *args, **kwargs)`."""
  if stack.KERAS_3 and not isinstance(model, stack.keras.Sequential):
    return stack.keras.models.clone_model(model, clone_function=clone, call_function=call)
  return stack.keras.models.clone_model(model, clone_function=clone)


def on_clones(clone: Callable[..., stack.Model]) -> None:
  """Registers how to clone a Sequential, whose subclass `clone_model` drops.

  Args:
    clone: `(own, model, *args, **kwargs) -> copy`; `own` is Keras' function.
  """
  lib: Any = importlib.import_module(f'{stack.PRIVATE}.models.cloning')
  own = lib._clone_sequential_model
  lib._clone_sequential_model = functools.wraps(own)(functools.partial(clone, own))


def output_names(model: stack.Model) -> Any:
  """Returns the names of a functional model's outputs; None if they have keys or no names."""
  keyed = isinstance(output_structure(model), dict)
  return None if keyed else getattr(model, 'output_names', None)


def raw_variable(variable: stack.Variable) -> tf.Variable:
  """Returns the `tf.Variable` of a model's variable."""
  return variable._value if stack.KERAS_3 and hasattr(variable, '_value') else variable


def seeds(model: stack.Model) -> List[tf.Variable]:
  """Returns the seeds of a model's layers."""
  return [raw_variable(v) for v in model.variables if 'seed_generator_state' in v.name]


def variable_key(variable: stack.Variable) -> int:
  """Returns a key that a model's variable shares with the `tf.Variable` that a tape watches."""
  raw = raw_variable(variable)
  return id(getattr(raw, 'handle', raw))  # Tables of words are weights in Keras 2.


def by_key(variables: Iterable[stack.Variable]) -> Dict[int, stack.Variable]:
  """Returns the variables by their keys."""
  return {variable_key(v): v for v in variables}


def describe(variable: stack.Variable) -> str:
  name = getattr(variable, 'path', None) or variable.name
  return f'variable {name!r} of shape {tuple(variable.shape)}'


def overrides(model: stack.Model, method: str) -> bool:
  """Returns whether a model has another method than that of `keras.Model`."""
  bound = getattr(model, method)
  return getattr(bound, '__func__', bound) is not getattr(stack.keras.Model, method)


def trained_variables(layer: stack.Layer) -> List[stack.Variable]:
  """Returns the variables that are trained, also inside a frozen layer (Keras 3)."""
  return [v for v in layer.weights if v.trainable] if stack.KERAS_3 else unfrozen(
      layer.trainable_variables)


def called(layer: stack.Layer) -> str:
  """Returns the name of the method that a layer's `__call__` calls."""
  return 'quantized_call' if getattr(layer, 'quantization_mode', None) else 'call'


def freeze(variable: stack.Variable, frozen: bool = True) -> None:
  """Freezes one variable of a layer that trains, or unfreezes it again."""
  if frozen or is_frozen(variable):
    raw_variable(variable)._tfdp_frozen = frozen
    if stack.KERAS_3:
      variable.trainable = not frozen  # Keras 2 freezes layers only.


def is_frozen(variable: stack.Variable) -> bool:
  """Returns whether `freeze` froze a variable."""
  return getattr(raw_variable(variable), '_tfdp_frozen', False)


def unfrozen(variables: Iterable[stack.Variable]) -> List[stack.Variable]:
  """Returns the variables without those that `freeze` froze."""
  return [v for v in variables if not is_frozen(v)]


def leaf_name(variable: stack.Variable) -> str:
  """Returns the name of a variable in its layer, such as 'bias'."""
  return variable.name.split('/')[-1].split(':')[0]


def in_float64(layer: stack.Layer, *args: stack.Tree, **kwargs: stack.Tree) -> stack.Layer:
  """Returns a copy of a layer, with its weights, that computes in float64.

  Raises:
    Exception: Of any kind, if the layer cannot be created from its config.
  """
  copy = type(layer).from_config({**layer.get_config(), 'dtype': 'float64'})
  copy(*args, **kwargs)
  copy.set_weights(layer.get_weights())
  return copy


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
RECURRENT_RESULTS = tuple if stack.KERAS_3 else list  # The type of an output with its states.
# Whether TimeDistributed joins the time axis with the batch, or calls its layer at each step.
TIME_DISTRIBUTED_FOLDS = not stack.KERAS_3


def recurrent_dropout_mask(cell: stack.Layer, like: tf.Tensor, rate: float) -> tf.Tensor:
  """Draws a mask of inverted dropout from a recurrent cell's own generator, shaped as `like`."""
  ones = tf.ones_like(like)
  if stack.KERAS_3:
    return stack.keras.random.dropout(ones, rate, seed=cell.seed_generator)
  return cell._random_generator.dropout(ones, rate)
