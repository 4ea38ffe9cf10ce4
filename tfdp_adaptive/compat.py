# SPDX-License-Identifier: Apache-2.0
"""The only file that knows which Keras and which tensorflow_privacy is installed.

Two stacks: TF 2.14 with Keras 2.14 (and TFF), and TF >= 2.16 with Keras 3.
"""

import contextlib
import functools
import importlib
import os
import sys
import threading
from typing import Any, Callable, Dict, Iterable, Iterator, List, Sequence, Tuple

import tensorflow as tf

KERAS_3 = hasattr(tf.keras.optimizers.Optimizer, 'stateless_apply')
if KERAS_3:
  import keras as _keras  # pylint: disable=g-import-not-at-top
else:
  _keras = tf.keras
keras: Any = _keras
_KERAS = 'keras.src'  # Where Keras keeps what is private to it.

# Of Keras, which has no types that a checker could read.
Model = Any
Layer = Any
Optimizer = Any
Variable = Any

serializable = keras.saving.register_keras_serializable('tfdp_adaptive')

if KERAS_3 and keras.backend.backend() != 'tensorflow':
  raise ImportError('tfdp_adaptive needs the TensorFlow backend of Keras. '
                    f'Received: backend={keras.backend.backend()!r}. '
                    "Set KERAS_BACKEND='tensorflow' before Keras is imported.")


def init_optimizer(optimizer: Optimizer, learning_rate: Any, name: str, **kwargs: Any) -> None:
  """Calls the base class constructor; learning rate schedules work on both."""
  kwargs.setdefault('weight_decay', None)  # With Keras 2's own default every step subtracts zeros.
  if KERAS_3:
    keras.optimizers.Optimizer.__init__(
        optimizer, learning_rate=learning_rate, name=name, **kwargs)
  else:
    keras.optimizers.Optimizer.__init__(optimizer, name=name, jit_compile=False, **kwargs)
    optimizer._learning_rate = optimizer._build_learning_rate(learning_rate)


def base_config(optimizer: Optimizer) -> Dict[str, Any]:
  """Returns the base class's `get_config` without options that are refused or fixed."""
  config = keras.optimizers.Optimizer.get_config(optimizer)
  for key in ('jit_compile', 'is_legacy_optimizer', 'clipnorm', 'clipvalue', 'global_clipnorm',
              'gradient_accumulation_steps', 'loss_scale_factor'):
    config.pop(key, None)
  if not KERAS_3:
    config['learning_rate'] = optimizer._serialize_hyperparameter(optimizer._learning_rate)
  return config


def losses_named(*names: str) -> List[Any]:
  """Returns the losses that the installed Keras has."""
  return [getattr(keras.losses, name) for name in names if hasattr(keras.losses, name)]


def mark_built(optimizer: Optimizer) -> None:
  """Marks an optimizer as built if its base class does not."""
  if not KERAS_3:
    optimizer._built = True


def replicated_variable(value: Any, name: str) -> tf.Variable:
  """A variable that is the same on all replicas, which all assign the same value."""
  return tf.Variable(value, trainable=False, name=name,
                     aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)


def add_optimizer_variable(
    optimizer: Optimizer, value: Any, name: str = 'private_state') -> Variable:
  """A variable that is saved with the optimizer, from a NumPy value."""
  if KERAS_3:
    return optimizer.add_variable(
        shape=value.shape, dtype=value.dtype.name, name=name, aggregation='only_first_replica',
        initializer=lambda shape, dtype=None, **_: tf.constant(value))
  variable = replicated_variable(value, name)
  optimizer._variables.append(variable)
  return variable


def is_strategy(strategy: Any) -> bool:
  """Whether it is one that somebody chose, and not TensorFlow's for none."""
  return not type(strategy).__name__.startswith('_DefaultDistributionStrategy')


def has_replicas() -> bool:
  return tf.distribute.get_strategy().num_replicas_in_sync > 1


def has_workers(strategy: Any = None) -> bool:
  """Whether some replicas are in other processes."""
  strategy = strategy or tf.distribute.get_strategy()
  replicas = strategy.num_replicas_in_sync
  return replicas > 1 and replicas > len(strategy.extended.worker_devices)


# Whether Keras' own backups are written by one worker.
BACKUPS_KNOW_WORKERS = not KERAS_3


def keras_distribution() -> Any:
  """Returns the argument of `keras.distribution.set_distribution`, or None."""
  return keras.distribution.distribution() if hasattr(keras, 'distribution') else None


def logs_of_replica(logs: Dict[str, Any]) -> Dict[str, Any]:
  """Returns the result of a step on several workers. Keras 3 averages along the first axis."""
  if not (KERAS_3 and has_workers()):
    return logs
  return {name: tf.reshape(value, [1]) for name, value in logs.items()}


def build_symbolically(model: Model, iterator: Any, specs: Any = None) -> None:
  """Makes the weights and metrics of a Keras 3 model under a strategy, which reads no batch.

  Args:
    model: The model.
    iterator: The iterator that Keras would read.
    specs: Nest of the specs of a batch, if its data set does not tell them.
  """
  if model._distribute_strategy is None:
    return
  if specs is None:
    specs = iterator.data_adapter.get_tf_dataset().element_spec
  specs = tf.nest.map_structure(lambda s: s if isinstance(s, tf.TensorSpec) else None, specs)
  with model._distribute_strategy.scope():
    model._symbolic_build(data_batch=specs)


def read(variable: Variable) -> Any:
  """The value of a variable, which may be on several replicas, as a NumPy array."""
  return tf.convert_to_tensor(variable).numpy()


def gather_replicas(vector: tf.Tensor) -> tf.Tensor:
  """[replicas, n]: the vectors [n] of all replicas, on each of them."""
  context = tf.distribute.get_replica_context()
  if not has_replicas() or context is None:
    return vector[tf.newaxis]
  mine = tf.one_hot(context.replica_id_in_sync_group, context.num_replicas_in_sync,
                    dtype=vector.dtype)
  return sum_over_replicas(mine[:, tf.newaxis] * vector)


def sum_over_replicas(tree: Any) -> Any:
  """The sum over all replicas, on each of them."""
  context = tf.distribute.get_replica_context()
  if not has_replicas() or context is None:
    return tree
  flat = tf.nest.flatten(tree)
  return tf.nest.pack_sequence_as(tree, context.all_reduce(tf.distribute.ReduceOp.SUM, flat))


class GlobalOptimizer(keras.optimizers.Optimizer):
  """A Keras optimizer whose gradients are already summed over all replicas."""

  def _all_reduce_sum_gradients(self, grads_and_vars: Any) -> Any:
    return grads_and_vars  # Keras 3 sends all of them to all replicas otherwise.


def apply_direction(
    optimizer: Optimizer, grads_and_vars: Sequence[Tuple[tf.Tensor, Variable]]) -> None:
  """Base class update (learning rate, weight decay, EMA); gradients are already global."""
  kwargs = {} if KERAS_3 else {'skip_gradients_aggregation': True}
  keras.optimizers.Optimizer.apply_gradients(optimizer, grads_and_vars, **kwargs)


def weight_regularization(model: Model) -> List[tf.Tensor]:
  """Losses that depend on the weights alone, as a list of scalars."""
  if KERAS_3:
    return [v.regularizer(v) for v in model.trainable_variables if v.regularizer is not None]
  return [tf.cast(tf.reduce_sum(loss()), tf.float32) for layer in model._flatten_layers()
          for loss in layer._callable_losses if layer.trainable]


def penalties(model: Model) -> List[Callable[..., Any]]:
  """The functions that `weight_regularization` calls."""
  if KERAS_3:
    return [v.regularizer for v in model.trainable_variables if v.regularizer is not None]
  return [loss for layer in model._flatten_layers() for loss in layer._callable_losses]


def initializers(layer: Layer) -> List[Any]:
  """Returns the objects from which a layer creates its weights."""
  return [value for name, value in vars(layer).items() if name.endswith('initializer')]


def learning_rate_schedule(optimizer: Optimizer) -> Any:
  """The function of steps that gives the learning rate, or None if a variable does."""
  rate = optimizer._learning_rate
  return None if is_variable(rate) else rate


def is_variable(value: Any) -> bool:
  return isinstance(value, (tf.Variable, getattr(keras, 'Variable', tf.Variable)))


def is_layer(value: Any) -> bool:
  return isinstance(value, keras.layers.Layer)


def has_data_losses(model: Model) -> bool:
  """Whether the last call of the model added losses that depend on the data."""
  if KERAS_3:
    return any(layer._get_own_losses() for layer in model._flatten_layers())
  return any(layer._losses or layer._eager_losses for layer in model._flatten_layers())


def trained_variables(layer: Layer) -> List[Variable]:
  """Returns the variables that are trained, also inside a frozen layer (Keras 3)."""
  return [v for v in layer.weights if v.trainable] if KERAS_3 else layer.trainable_variables


def leaf_layers(model: Model) -> List[Layer]:
  """Every layer that has no layers inside, nested models included, once."""
  layers = {id(l): l for l in model._flatten_layers(include_self=False, recursive=True)}
  return [l for l in layers.values()
          if not list(l._flatten_layers(include_self=False, recursive=True))]


def loss_tracker(model: Model, outputs: Any) -> Any:
  """The metric that `fit` shows as `loss`."""
  if not KERAS_3 and not model.compiled_loss.built:
    model.compiled_loss.build(outputs)
  return next(metric for metric in model.metrics if metric.name == 'loss')


def unwrap_loss_scaling(optimizer: Optimizer) -> Optimizer:
  """The optimizer inside a `LossScaleOptimizer`; clipping needs unscaled gradients."""
  wrapper = getattr(keras.mixed_precision, 'LossScaleOptimizer', ())
  return optimizer.inner_optimizer if isinstance(optimizer, wrapper) else optimizer


# Whether Keras' own backups of a `fit` are files of weights.
BACKUPS_ARE_WEIGHTS = KERAS_3


def words_of(layer: Layer, data: Any) -> List[List[str]]:
  """The words that a `TextVectorization` or `StringLookup` looks up, of each record of `data`."""
  texts = tf.convert_to_tensor(data, tf.string)
  words = layer._preprocess(texts) if hasattr(layer, '_lookup_layer') else texts
  rows = words.to_list() if isinstance(words, tf.RaggedTensor) else words.numpy().tolist()
  rows = [row if isinstance(row, list) else [row] for row in rows]
  flat = [tf.nest.flatten(row) for row in rows]
  return [[word.decode('utf-8', 'replace') for word in row if word] for row in flat]


def is_model(value: Any) -> bool:
  return isinstance(value, keras.Model)


def all_layers(model: Any) -> List[Any]:
  """A model or layer, and every layer inside."""
  return list(model._flatten_layers(include_self=True, recursive=True))


def built_variables(model: Any) -> List[Variable]:
  """Returns the existing variables of a model or layer, without vocabularies."""
  return list({id(v): v for layer in all_layers(model) if layer.built
               for v in layer.variables if hasattr(v, 'assign')}.values())


def sequential_layers(model: Model) -> List[Any]:
  """The layers of a Sequential, with its input: before an `Embedding`, Keras 2 makes another."""
  return model.layers if KERAS_3 or not model.inputs else list(model._self_tracked_trackables)


@contextlib.contextmanager
def owner_only(path: str) -> Iterator[None]:
  """Creates the file with permissions for its owner only."""
  mask = os.umask(0o077)
  try:
    yield
  finally:
    os.umask(mask)
    if os.path.exists(path):
      os.chmod(path, 0o700 if os.path.isdir(path) else 0o600)


def on_files(
    writing: Callable[..., Any], read: Callable[..., Any], whole: Callable[..., Any],
    legacy: Callable[..., Any]) -> None:
  """Has every file of weights that Keras writes or reads, of whatever model, pass by a caller.

  Args:
    writing: `(saved, store) -> context` while weights are written to a store of Keras.
    read: `(saved, store, partly)`, after they were read.
    whole: `(model, path) -> context` while a `.keras` file is written.
    legacy: `(model, wanted suffix)`, before another format is written.
  """
  lib: Any = importlib.import_module(f'{_KERAS}.saving.saving_lib')
  copying = threading.local()

  def around(module: Any, name: str, wrap: Callable[..., Any]) -> None:
    own = getattr(module, name)
    setattr(module, name, functools.wraps(own)(functools.partial(wrap, own)))

  def save_state(own: Any, saved: Any, weights_store: Any, assets_store: Any, inner_path: str,
                 *args: Any, **kwargs: Any) -> Any:
    outermost = weights_store is not None and not inner_path
    with writing(saved, weights_store) if outermost else contextlib.nullcontext():
      return own(saved, weights_store, assets_store, inner_path, *args, **kwargs)

  def load_state(own: Any, saved: Any, weights_store: Any, assets_store: Any, inner_path: str,
                 skip_mismatch: bool = False, *args: Any, **kwargs: Any) -> Any:
    result = own(saved, weights_store, assets_store, inner_path, skip_mismatch, *args, **kwargs)
    if weights_store is not None and not inner_path:
      read(saved, weights_store, skip_mismatch)
    return result

  def save_model(own: Any, model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
    temporary = getattr(copying, 'now', False)
    with contextlib.nullcontext() if temporary else whole(model, os.fspath(filepath)):
      return own(model, filepath, *args, **kwargs)

  def save_legacy(wanted: str, own: Any, *args: Any, **kwargs: Any) -> Any:
    legacy(next(a for a in (*args, *kwargs.values()) if is_model(a)), wanted)
    return own(*args, **kwargs)

  def pickled(own: Any, model: Any) -> Any:
    copying.now = True
    try:
      return own(model)
    finally:
      copying.now = False

  around(lib, '_save_state', save_state)
  around(lib, '_load_state', load_state)
  around(lib, 'save_model', save_model)
  if KERAS_3:
    module: Any = importlib.import_module(f'{_KERAS}.legacy.saving.legacy_h5_format')
    around(module, 'save_model_to_hdf5', functools.partial(save_legacy, '.keras'))
    around(module, 'save_weights_to_hdf5_group', functools.partial(save_legacy, '.weights.h5'))
  else:
    module = importlib.import_module(f'{_KERAS}.saving.legacy.save')
    around(module, 'save_model', functools.partial(save_legacy, '.keras'))
    around(module, 'save_weights', functools.partial(save_legacy, '.weights.h5'))
    module = importlib.import_module(f'{_KERAS}.saving.pickle_utils')
    around(module, 'serialize_model_as_bytecode', pickled)


# Arguments of `compile` for losses to stay as they are.
NO_LOSS_SCALING = {'auto_scale_loss': False} if KERAS_3 else {}


def drop_loss_scaling(model: Model) -> None:
  """Takes off the `LossScaleOptimizer` that `compile` put around the optimizer, if it does."""
  if not KERAS_3:
    model.optimizer = unwrap_loss_scaling(model.optimizer)


def input_structure(model: Model) -> Any:
  """The nest of a functional model's symbolic inputs, or None."""
  return getattr(model, '_inputs_struct' if KERAS_3 else '_nested_inputs', None)


def input_specs(model: Model) -> Any:
  """Returns a nest of the specs of a model's inputs, or None if the model does not tell them."""
  inputs = getattr(model, 'inputs', None) if model.built else None
  if not inputs:
    return None
  specs = [tf.TensorSpec(t.shape, t.dtype) for t in inputs]
  structure = input_structure(model)
  if structure is not None and len(tf.nest.flatten(structure)) == len(specs):
    return tf.nest.pack_sequence_as(structure, specs)
  return specs[0] if len(specs) == 1 else specs


def output_structure(model: Model) -> Any:
  """The nest of a functional model's symbolic outputs, or None."""
  return getattr(model, '_outputs_struct' if KERAS_3 else '_nested_outputs', None)


def clone_model(model: Any, clone: Callable[[Any], Any], call: Callable[..., Any]) -> Any:
  """Keras' `clone_model`; functional ones call copies by `call(layer, *args, **kwargs)`."""
  if KERAS_3 and not isinstance(model, keras.Sequential):
    return keras.models.clone_model(model, clone_function=clone, call_function=call)
  return keras.models.clone_model(model, clone_function=clone)


def on_clones(made: Callable[[Model, Model], Model]) -> None:
  """Has every copy that Keras makes of a Sequential, whose class it forgets, pass by a caller.

  Args:
    made: `(model, copy) -> ` the copy that `keras.models.clone_model` returns.
  """
  lib: Any = importlib.import_module(f'{_KERAS}.models.cloning')
  own = lib._clone_sequential_model
  lib._clone_sequential_model = functools.wraps(own)(
      lambda model, *args, **kwargs: made(model, own(model, *args, **kwargs)))


def output_names(model: Model) -> Any:
  """Names of a functional model's outputs in order; None where they have keys, or none."""
  keyed = isinstance(output_structure(model), dict)
  return None if keyed else getattr(model, 'output_names', None)


def raw_variable(variable: Variable) -> tf.Variable:
  """The `tf.Variable` of a model's variable."""
  return variable._value if KERAS_3 and hasattr(variable, '_value') else variable


def seeds(model: Model) -> List[tf.Variable]:
  """Returns the seeds of a model's layers."""
  return [raw_variable(v) for v in model.variables if 'seed_generator_state' in v.name]


def variable_key(variable: Variable) -> int:
  """Equal for a model's variable and for the `tf.Variable` a tape saw being read."""
  raw = raw_variable(variable)
  return id(getattr(raw, 'handle', raw))  # Tables of words, among Keras 2's weights, have none.


def describe(variable: Variable) -> str:
  name = getattr(variable, 'path', None) or variable.name
  return f'variable {name!r} of shape {tuple(variable.shape)}'


def overrides(model: Model, method: str) -> bool:
  """Whether a model has a method of its own, wherever it comes from, in place of Keras'."""
  bound = getattr(model, method)
  return getattr(bound, '__func__', bound) is not getattr(keras.Model, method)


def autographed(layer: Layer, function: Callable[..., Any]) -> Callable[..., Any]:
  """`function`, the layer's `call`, as Keras would run it in a graph."""
  own = not type(layer).__module__.startswith('keras.')
  if KERAS_3 or not own or tf.executing_eagerly():
    return function
  autograph = tf.__internal__.autograph
  return autograph.tf_convert(function, autograph.control_status_ctx())


def with_captures(concrete: Any) -> Callable[..., List[tf.Tensor]]:
  """A concrete function of its inputs and captures, in this order."""
  count = len(concrete.inputs) - len(concrete.captured_inputs)
  return lambda *values: tf.nest.flatten(
      concrete._call_flat(list(values[:count]), list(values[count:])))


def unconverted(function: Callable[..., Any]) -> Callable[..., Any]:
  """Keeps AutoGraph from rewriting `function`, but not the layers that it calls."""
  function.autograph_info__ = None  # type: ignore[attr-defined]
  return function


# Part of the name of operations that must not go through `tf.vectorized_map`, or ''.
# TF 2.21's products of batches of matrices (oneDNN) write beyond their memory where an
# axis of size one is broadcast, which is what batches of one example become: wrong
# numbers or a crash (tensorflow issue 117700).
UNSAFE_WHEN_VECTORIZED = 'BatchMatMul' if KERAS_3 else ''


def vectorizes_safely(operations: Iterable[str]) -> bool:
  """Whether a function of these kinds of operations may go through `tf.vectorized_map`."""
  unsafe = UNSAFE_WHEN_VECTORIZED
  return not (unsafe and any(unsafe in name for name in operations))


def vectorizes_wrongly(layer: Layer) -> bool:
  """Whether `tf.vectorized_map` over examples goes wrong in a layer.

  On Keras 3 attention crashes the process (TF 2.21), and dropout would draw one mask
  for all examples.
  """
  return KERAS_3 and bool(
      'Attention' in type(layer).__name__ or getattr(layer, '_seed_generators', None))


def depthwise_kernel(layer: Layer) -> Variable:
  """The kernel of a depthwise convolution."""
  return layer.kernel if KERAS_3 else layer.depthwise_kernel


# What the `call` of recurrent layers takes after the inputs, in order.
RECURRENT_ARGUMENTS = (('initial_state', 'mask', 'training') if KERAS_3 else
                       ('mask', 'training', 'initial_state'))
# Whether TimeDistributed joins the time axis with the batch; else it calls its layer per step.
TIME_DISTRIBUTED_FOLDS = not KERAS_3


def recurrent_dropout_mask(cell: Layer, like: tf.Tensor, rate: float, training: Any) -> tf.Tensor:
  """A mask of inverted dropout from a recurrent cell's own generator, shaped as `like`."""
  ones = tf.ones_like(like)
  if KERAS_3:
    return keras.random.dropout(ones, rate, seed=cell.seed_generator)
  del training
  return cell._random_generator.dropout(ones, rate)


def recurrent_mask_getter(
    kind: str, masks: List[tf.Tensor], sequence: bool) -> Tuple[str, Callable[..., Any]]:
  """Name and body of the method by which recurrent layers get their masks.

  Args:
    kind: 'dropout' or 'recurrent_dropout'.
    masks: [n, width] masks, one for all gates or one for each.
    sequence: Whether they will multiply a sequence [n, T, width].
  """
  masks = [mask[:, tf.newaxis] if sequence else mask for mask in masks]
  if KERAS_3:
    return f'get_{kind}_mask', lambda *_, **__: masks[0] if len(masks) == 1 else masks

  def getter(inputs: Any, training: Any, count: int = 1) -> Any:
    del inputs, training
    return masks[0] if count == 1 else (masks * count)[:count]

  return f'get_{kind}_mask_for_cell', getter


def privacy_module(name: str) -> Any:
  """A module of tensorflow_privacy's `dp_query` package, or None where it is absent.

  On TF >= 2.16 tensorflow_privacy cannot be imported as a whole (it needs
  `tensorflow_estimator`), but its DPQuery modules can.
  """
  if KERAS_3:
    sys.skip_tf_privacy_import = True  # type: ignore[attr-defined]
  try:
    return importlib.import_module(f'tensorflow_privacy.privacy.dp_query.{name}')
  except ImportError:
    return None
