# SPDX-License-Identifier: Apache-2.0
"""Runs a model once and records the inputs of its layers, without changing them.

While a model is traced, the `call` of every layer that owns trainable variables
is wrapped: its arguments are kept and the tensor its kind taps is watched by a
gradient tape. Nothing is added to the computation. What cannot be seen this way
is refused, never missed: trainable variables read outside of the wrapped calls,
layers called where the batch is not the first axis or inside another graph.
"""

import contextlib
import functools
import threading
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import protocol
from tfdp_adaptive.clipping.layers import generic
from tfdp_adaptive.clipping.layers import registry

# A batch size that no layer's width or sequence length is likely to equal.
_PROBE = 1009


class Unit(NamedTuple):
  """A layer the engine taps."""

  layer: Any
  kind: registry.Kind
  variables: Tuple[Any, ...]  # The trainable ones `kind.gradients` answers for.


class Record(NamedTuple):
  """A recorded call of a unit, with the tensors that its gradients need."""

  unit: Unit
  call: registry.Call
  taps: Any  # Nest of tensors, watched by the tape.


class Proof(NamedTuple):
  """The result of `probe` for a model and a kind of input.

  Attributes:
    calls: For each call of a unit, in order: the layer's id, and which tensors of its
      arguments have the batch as first axis.
    limits: {position of a flat input: number of rows} of inputs that embeddings take.
  """

  calls: Tuple[Any, ...]
  limits: Any


def units(model: compat.Model) -> List[Unit]:
  """The units that together own the model's trainable variables.

  A layer may be frozen while layers inside it train (LoRA), so what counts is which
  variables the model trains, not which a layer says it does.

  Raises:
    Unsupported: If a trainable variable belongs to no unit.
  """
  trainable = {compat.variable_key(v) for v in model.trainable_variables}
  model_units, seen = [], set()

  for layer in model._flatten_layers():
    if isinstance(layer, compat.keras.layers.BatchNormalization) and layer.trainable:
      raise registry.Unsupported(
          f'Layer {layer.name!r} is a BatchNormalization, which mixes the examples of a batch. Use '
          '`tfdp.fix_model(model)`, or freeze it.')

  def visit(layer: compat.Layer) -> None:
    trained = {compat.variable_key(v): v for v in layer.weights
               if compat.variable_key(v) in trainable}
    if id(layer) in seen or not trained:
      return
    seen.add(id(layer))
    inside = list(layer._flatten_layers(include_self=False, recursive=False))
    nested = {compat.variable_key(v) for one in inside for v in one.weights}
    own = {key: v for key, v in trained.items() if key not in nested}
    kind = registry.find(layer)
    if kind is None and layer is not model and (own or generic.is_opaque(layer)):
      kind = generic.KIND
    if kind is not None and kind.whole:
      model_units.append(Unit(layer, kind, tuple(trained.values())))
      return
    if kind is not None:
      model_units.append(Unit(layer, kind, tuple(own.values())))
    for one in inside:
      visit(one)

  visit(model)
  owned = {compat.variable_key(v) for unit in model_units for v in unit.variables}
  for variable in model.trainable_variables:
    if compat.variable_key(variable) not in owned:
      raise registry.Unsupported(
          'Every trainable variable must belong to a layer inside the model. Received: '
          f'{compat.describe(variable)}, which does not. Give it a layer of its own, or use '
          f'{registry.WHOLE}.')
  return model_units


def factors_of(
    record: Record, batched: Any,
    cotangents: Any) -> Iterator[Tuple[Any, Optional[protocol.Factor]]]:
  """Yields `(variable key, factor)` for every variable of a call; None where nothing reaches."""
  owned = {compat.variable_key(v) for v in record.unit.variables}
  call = record.call._replace(batched=batched)
  for variable, factor in record.unit.kind.gradients(record.unit.layer, call, cotangents):
    key = compat.variable_key(variable)
    if key in owned:
      yield key, factor if call.times == 1 or factor is None else factor.folded(call.times)


def probe(model: compat.Model, x: Any) -> Proof:
  """Proves, on a batch of a size like no other, that all can be seen.

  Args:
    model: A built Keras model.
    x: Nest of inputs or of their specs; the values are not used.

  Returns:
    A `Proof`.

  Raises:
    Unsupported: See the module's docstring.
  """
  tape = tf.GradientTape(watch_accessed_variables=False)
  recorder = Recorder(units(model), tape)
  flags: List[Any] = []
  rows_of: Dict[int, int] = {}

  def run(inputs: Any) -> tf.Tensor:
    with tape, listening(model) as heard:
      outputs = recorder.run(model, inputs)
    rows_of.update(limits_of(heard, tf.nest.flatten(inputs)))
    for record in recorder.records:
      for output in registry.tensors(record.call.outputs):
        if output.shape.rank is None or output.shape[0] != _PROBE * record.call.times:
          raise registry.Unsupported(
              f'Layer {record.unit.layer.name!r} must be called with the batch as first axis. '
              f'Received: a result of shape {output.shape} for a trial batch of {_PROBE}. '
              f'Broadcast its input to the batch first, or use {registry.WHOLE}.')
    for output in tf.nest.flatten(outputs):
      if output.shape.rank is None or output.shape[0] != _PROBE:
        raise registry.Unsupported(
            'Every output of the model must have the batch as first axis. Received: '
            f'shape {output.shape} for a trial batch of {_PROBE}.')
    answered: Dict[Any, Any] = {}
    for record in recorder.records:
      rows, layer = _PROBE * record.call.times, id(record.unit.layer)
      batched = tuple(bool(tf.is_tensor(t) and t.shape.rank and t.shape[0] == rows)
                      for t in tf.nest.flatten((record.call.args, record.call.kwargs)))
      flags.append((layer, batched))
      zeros = tf.nest.map_structure(tf.zeros_like, record.taps)
      answered.setdefault(layer, (record.unit, set()))[1].update(
          key for key, _ in factors_of(record, batched, zeros))
    for unit, keys in answered.values():
      for variable in unit.variables:
        if compat.variable_key(variable) not in keys:
          raise registry.Unsupported(
              f'The `gradients` registered for {type(unit.layer).__name__} must yield every '
              f'trainable variable. Received: nothing for {compat.describe(variable)}.')
    return tf.zeros([])

  specs = tf.nest.map_structure(
      lambda t: tf.TensorSpec([_PROBE] + t.shape[1:].as_list(), t.dtype), x)
  try:
    tf.function(run, autograph=False).get_concrete_function(specs)
  except tf.errors.OperatorNotAllowedInGraphError as error:
    raise registry.Unsupported(
        "Layers must do without Python conditions and loops on tensors. Received one's refusal: "
        f'{str(error).splitlines()[0]} Use tf.cond, or {registry.WHOLE}.') from error
  return Proof(tuple(flags), rows_of)


def batched_as_proven(records: Any, proven: Any) -> List[Any]:
  """Per record, what `probe` found of that call.

  Raises:
    Unsupported: If the model has not called the same layers as then.
  """
  if [id(record.unit.layer) for record in records] != [layer for layer, _ in proven.calls]:
    raise registry.Unsupported(
        'The model must call the same layers every time. Received: '
        f"{[record.unit.layer.name for record in records]}, which are not those of the model's "
        'check. Let no Python variable decide what is called, or make the model again.')
  return [batched for _, batched in proven.calls]


@contextlib.contextmanager
def no_reads(model: compat.Model) -> Iterator[None]:
  """Refuses code inside that reads trainable variables: the loss."""
  with tf.GradientTape() as tape:
    yield
  read = {compat.variable_key(v) for v in tape.watched_variables()}
  for variable in model.trainable_variables:
    if compat.variable_key(variable) in read:
      raise registry.Unsupported(
          "The loss must depend on the weights through the model's outputs alone. Received: a loss "
          f'that reads {compat.describe(variable)}. Use a regularizer of the weights (such as '
          f'`kernel_regularizer`), or {registry.WHOLE}.')


class Recorder:
  """Collects the records of the units that are called while it is active.

  Args:
    model_units: The `units` of a model.
    tape: The tape that watches their taps.
    times: Rows of the batch per record.
  """

  def __init__(self, model_units: List[Unit], tape: tf.GradientTape, times: int = 1) -> None:
    self.records: List[Record] = []
    self._units = {id(unit.layer): unit for unit in model_units}
    self._tape = tape
    self._owners: List[Optional[Unit]] = [None]  # Units being called, innermost last.
    self._segment: Any = None  # A tape that sees which variables are read.
    self._reads: List[Tuple[Any, Optional[Unit]]] = []  # (variable key, unit reading it or None).
    self._times = times  # Rows per record where layers are called just now.

  def run(self, model: compat.Model, x: Any) -> Any:
    """`model(x, training=True)`, recorded."""
    self._graph = tf.compat.v1.get_default_graph() if not tf.executing_eagerly() else None
    words = [layer for layer in model._flatten_layers()
             if isinstance(layer, compat.keras.layers.TextVectorization)]
    with _tapped([unit.layer for unit in self._units.values()] + words, self):
      self._listen()
      try:
        outputs = model(x, training=True)
      finally:
        self._pause()
    trainable = {compat.variable_key(v): v for v in model.trainable_variables}
    for key, unit in self._reads:
      allowed = () if unit is None else [compat.variable_key(v) for v in unit.variables]
      if key in trainable and key not in allowed:
        raise registry.Unsupported(
            'A trainable variable must be used by calling the layer that owns it. Received: '
            f'{compat.describe(trainable[key])}, read '
            + (f'by layer {unit.layer.name!r}' if unit else "by the model's own code")
            + '. Move the computation into the owner (as a tied softmax into a reversible '
            f'embedding), or use {registry.WHOLE}.')
    return outputs

  def called(
      self, layer: compat.Layer, function: Callable[..., Any], args: Tuple[Any, ...],
      kwargs: Dict[str, Any]) -> Any:
    """Stands in for `function`, the `call` of a unit's layer."""
    if id(layer) not in self._units:
      return _same_batch(function(*args, **kwargs), args)
    unit = self._units[id(layer)]
    if any(owner is not None and owner.kind.whole for owner in self._owners):
      return function(*args, **kwargs)
    graph = tf.compat.v1.get_default_graph() if not tf.executing_eagerly() else None
    if graph is not self._graph or not _recording():
      raise registry.Unsupported(
          f'Layer {layer.name!r} is called inside a loop, a condition, a tf.function or a '
          f'rematerialization, where its gradients cannot be seen. Use {registry.WHOLE}.')
    self._pause()
    self._owners.append(unit)
    self._listen()
    times = self._times
    if unit.kind.folds:
      self._times *= args[0].shape[1] or tf.shape(args[0])[1]
    try:
      outputs, taps, saved = unit.kind.tap(layer, function, self._tape, args, kwargs)
    finally:
      self._pause()
      self._owners.pop()
      self._listen()
      self._times = times
    call = registry.Call(args, kwargs, outputs, saved, times=times)
    self.records.append(Record(unit, call, taps))
    return outputs

  def _listen(self) -> None:
    self._segment = tf.GradientTape()
    self._segment.__enter__()

  def _pause(self) -> None:
    self._segment.__exit__(None, None, None)
    self._reads += [(compat.variable_key(v), self._owners[-1])
                    for v in self._segment.watched_variables()]


def _same_batch(outputs: Any, args: Tuple[Any, ...]) -> Any:
  """Words split in a graph are no longer known to be as many rows as there were sentences."""
  rows = args[0].shape[0] if args and hasattr(args[0], 'shape') and args[0].shape.rank else None
  if rows is None or not tf.is_tensor(outputs) or isinstance(outputs, tf.RaggedTensor):
    return outputs
  return tf.ensure_shape(outputs, [rows, *outputs.shape[1:]])


def _recording() -> bool:
  """Whether tapes record here: not inside `stop_recording` or `recompute_grad`."""
  with tf.GradientTape() as tape:
    one = tf.constant(1.0)
    tape.watch(one)
    two = one + one
  return tape.gradient(two, one) is not None


# Layers wrapped at present, by id: [number of recorders, whether the instance
# had a `call` (`quantized_call`) of its own, that call]. Replicas of a strategy trace in threads
# that take turns, so wrappers are shared and ask their thread for its recorder:
# between calls of layers any other thread may call the model or record it, too.
# Inside of them it may not: some kinds change attributes of a layer for its call.
_WRAPPED: Dict[Any, Any] = {}
_LOCAL = threading.local()


@contextlib.contextmanager
def _tapped(layers: Sequence[compat.Layer], recorder: Recorder) -> Iterator[None]:
  """Wraps the layers' `call` for `recorder`, and restores them afterwards."""
  previous, wrapped = getattr(_LOCAL, 'recorder', None), []
  try:
    for layer in layers:
      name = compat.called(layer)
      entry = _WRAPPED.setdefault(
          id(layer), [0, name in layer.__dict__, layer.__dict__.get(name)])
      if not entry[0]:
        layer.__dict__[name] = _wrapper(layer, getattr(layer, name))
      entry[0] += 1
      wrapped.append(layer)
    _LOCAL.recorder = recorder
    yield
  finally:
    _LOCAL.recorder = previous
    for layer in wrapped:
      entry = _WRAPPED[id(layer)]
      entry[0] -= 1
      if not entry[0]:
        del _WRAPPED[id(layer)]
        if entry[1]:
          layer.__dict__[compat.called(layer)] = entry[2]
        else:
          del layer.__dict__[compat.called(layer)]


def _wrapper(layer: compat.Layer, function: Callable[..., Any]) -> Callable[..., Any]:
  def call(*args: Any, **kwargs: Any) -> Any:
    converted = compat.autographed(layer, function)
    recorder = getattr(_LOCAL, 'recorder', None)
    if recorder is None:
      return converted(*args, **kwargs)
    return recorder.called(layer, converted, args, kwargs)

  return compat.unconverted(call)


_SAME_VALUES = {'Cast', 'Identity', 'Reshape', 'ExpandDims', 'Squeeze', 'EnsureShape'}
_EMBEDDING = compat.keras.layers.Embedding


@contextlib.contextmanager
def listening(model: Any) -> Iterator[List[Tuple[Any, Any]]]:
  """Collects `(embedding, ids)` of all calls inside, whether its table is trained or not."""
  heard: List[Tuple[Any, Any]] = []
  layers = {id(layer): layer for layer in model._flatten_layers() if isinstance(layer, _EMBEDDING)}
  with contextlib.ExitStack() as stack:
    for layer in layers.values():
      stack.enter_context(registry.swapped(layer, call=_hearing(layer, layer.call, heard)))
    yield heard


def _hearing(layer: Any, call: Any, heard: List[Tuple[Any, Any]]) -> Any:
  @functools.wraps(call)
  def wrapper(*args: Any, **kwargs: Any) -> Any:
    backwards = kwargs.get('reverse') or len(args) > 1 and args[1]  # Reversible layers.
    if args and not backwards:
      heard.append((layer, args[0]))
    return call(*args, **kwargs)
  return wrapper


def limits_of(heard: List[Tuple[Any, Any]], inputs: List[Any]) -> Dict[int, int]:
  """{position of a flat input: number of rows} of inputs whose values embeddings take."""
  positions = {id(t): i for i, t in enumerate(inputs)}
  limits: Dict[int, int] = {}
  for layer, ids in heard:
    while (tf.is_tensor(ids) and tf.is_symbolic_tensor(ids) and id(ids) not in positions
           and ids.op.type in _SAME_VALUES):
      ids = ids.op.inputs[0]
    if id(ids) in positions:
      i = positions[id(ids)]
      limits[i] = min(limits.get(i, layer.input_dim), layer.input_dim)
  return limits


def traced_limits(model: Any, x: trees.Tree) -> Dict[int, int]:
  """Returns `limits_of` a model called on inputs like `x`; {} if it cannot be traced."""
  limits: Dict[int, int] = {}

  def run(inputs: trees.Tree) -> tf.Tensor:
    with listening(model) as heard:
      model(inputs, training=True)
    limits.update(limits_of(heard, tf.nest.flatten(inputs)))
    return tf.zeros([])

  try:
    tf.function(run, autograph=False).get_concrete_function(
        tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), x))
  except (TypeError, ValueError, tf.errors.OpError):
    return {}  # Whoever trains it will say why.
  return limits
