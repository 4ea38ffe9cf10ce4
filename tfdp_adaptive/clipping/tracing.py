# SPDX-License-Identifier: Apache-2.0
"""Runs a model once and records the calls of its layers, without changing them.

While a model is traced, the `call` of every layer that owns trainable variables is wrapped. The
wrapper records its arguments, and a gradient tape watches the tensors that the layer's kind taps.
Nothing is added to the computation. What cannot be recorded this way raises an error: trainable
variables that are read outside of the wrapped calls, and layers that are called inside another
graph or where the batch is not the first axis.
"""

import collections
import contextlib
import threading
from typing import Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import protocol
from tfdp_adaptive.clipping.layers import generic
from tfdp_adaptive.clipping.layers import registry

# A batch size that no layer's width or sequence length is likely to equal.
_PROBE = 1009
_EMBEDDING, _TEXT = compat.keras.layers.Embedding, compat.keras.layers.TextVectorization
# Operations whose result has the values of their first input.
_SAME_VALUES = {'Cast', 'Identity', 'Reshape', 'ExpandDims', 'Squeeze', 'EnsureShape'}


class Proof(NamedTuple):
  """The result of `probe` for a model and a kind of input.

  Attributes:
    calls: For each call of an owner, in order: the layer's id, and which tensors of its
      arguments have the batch as first axis.
    limits: See `Recorder.limits`.
  """

  calls: Tuple[Tuple[int, Tuple[bool, ...]], ...]
  limits: Dict[int, int]


def owners(model: compat.Model) -> List[registry.Owner]:
  """Returns the layers that together own the model's trainable variables.

  A layer may be frozen while layers inside it train (LoRA), so what counts is which
  variables the model trains, not which a layer says it does.

  Raises:
    Unsupported: If a trainable variable belongs to no layer.
  """
  trainable = compat.by_key(model.trainable_variables)
  found: List[registry.Owner] = []
  seen: Set[int] = set()

  for layer in model._flatten_layers():
    if isinstance(layer, compat.keras.layers.BatchNormalization) and layer.trainable:
      raise registry.Unsupported(
          f'Layer {layer.name!r} is a BatchNormalization, which mixes the examples of a batch. Use '
          '`tfdp.fix_model(model)`, or freeze it.')

  def visit(layer: compat.Layer) -> None:
    trained = {key: v for key, v in compat.by_key(layer.weights).items() if key in trainable}
    if id(layer) in seen or not trained:
      return
    seen.add(id(layer))
    inside = list(layer._flatten_layers(include_self=False, recursive=False))
    nested = {key for one in inside for key in compat.by_key(one.weights)}
    own = {key: v for key, v in trained.items() if key not in nested}
    kind = registry.find(layer)
    # A recurrent layer calls its cell in a loop, where it cannot be recorded.
    if kind is None and layer is not model and (
        own or isinstance(layer, compat.keras.layers.RNN)):
      kind = generic.KIND
    if kind is not None:
      covered = trained if kind.whole else own
      found.append(registry.Owner(layer, kind, tuple(covered.values())))
    if kind is None or not kind.whole:
      for one in inside:
        visit(one)

  visit(model)
  owned = {key for owner in found for key in compat.by_key(owner.variables)}
  for key, variable in trainable.items():
    if key not in owned:
      raise registry.Unsupported(
          'Every trainable variable must belong to a layer inside the model. Received: '
          f'{compat.describe(variable)}, which does not. Give it a layer of its own, or use '
          f'{registry.WHOLE}.')
  return found


def factors_of(
    call: registry.Call,
    cotangents: trees.Tree) -> Iterator[Tuple[int, Optional[protocol.Factor]]]:
  """Yields `(variable key, factor)` for every variable of a call; None where nothing reaches."""
  owned = compat.by_key(call.owner.variables)
  for variable, factor in call.owner.kind.gradients(call.owner.layer, call, cotangents):
    key = compat.variable_key(variable)
    if key in owned:
      yield key, factor if call.times == 1 or factor is None else factor.folded(call.times)


def probe(model: compat.Model, x: trees.Tree) -> Proof:
  """Proves, on a batch whose size equals no other size, that all gradients can be computed.

  Args:
    model: A built Keras model.
    x: Nest of inputs or of their specs; the values are not used.

  Returns:
    A `Proof`.

  Raises:
    Unsupported: See the module's docstring.
  """
  proven: List[Tuple[int, Tuple[bool, ...]]] = []
  limits: Dict[int, int] = {}

  def run(inputs: trees.Tree) -> tf.Tensor:
    recorder = Recorder(owners(model))
    with recorder.tape:
      outputs = recorder.run(model, inputs)
    limits.update(recorder.limits(inputs))
    covered: Dict[int, Set[int]] = collections.defaultdict(set)
    for call in recorder.calls:
      layer, rows = call.owner.layer, _PROBE * call.times
      for output in registry.tensors(call.outputs):
        if output.shape.rank is None or output.shape[0] != rows:
          raise registry.Unsupported(
              f'Layer {layer.name!r} must be called with the batch as first axis. '
              f'Received: a result of shape {output.shape} for a trial batch of {_PROBE}. '
              f'Broadcast its input to the batch first, or use {registry.WHOLE}.')
      call = call.of_rows(rows)
      proven.append((id(layer), call.batched))
      zeros = tf.nest.map_structure(tf.zeros_like, call.taps)
      covered[id(layer)].update(key for key, _ in factors_of(call, zeros))
    for output in tf.nest.flatten(outputs):
      if output.shape.rank is None or output.shape[0] != _PROBE:
        raise registry.Unsupported(
            'Every output of the model must have the batch as first axis. Received: '
            f'shape {output.shape} for a trial batch of {_PROBE}.')
    for owner in recorder.owners:
      for key, variable in compat.by_key(owner.variables).items():
        if key not in covered.get(id(owner.layer), {key}):
          raise registry.Unsupported(
              f'The `gradients` registered for {type(owner.layer).__name__} must yield every '
              f'trainable variable. Received: nothing for {compat.describe(variable)}.')
    return tf.zeros([])

  specs = tf.nest.map_structure(
      lambda t: tf.TensorSpec([_PROBE] + t.shape[1:].as_list(), t.dtype), x)
  try:
    tf.function(run, autograph=False).get_concrete_function(specs)
  except tf.errors.OperatorNotAllowedInGraphError as error:
    raise registry.Unsupported(
        'Layers must do without Python conditions and loops on tensors. Received an error of one: '
        f'{str(error).splitlines()[0]} Use tf.cond, or {registry.WHOLE}.') from error
  return Proof(tuple(proven), limits)


def as_proven(calls: Sequence[registry.Call], proof: Proof) -> List[registry.Call]:
  """Returns the calls with `batched` as `probe` found it.

  Raises:
    Unsupported: If the model has not called the same layers as then.
  """
  layers = [call.owner.layer for call in calls]
  if [id(layer) for layer in layers] != [layer for layer, _ in proof.calls]:
    raise registry.Unsupported(
        'The model must call the same layers every time. Received: '
        f"{[layer.name for layer in layers]}, which are not those of the model's check. Let no "
        'Python variable decide what is called, or make the model again.')
  return [call._replace(batched=batched) for call, (_, batched) in zip(calls, proof.calls)]


@contextlib.contextmanager
def no_reads(model: compat.Model) -> Iterator[None]:
  """Raises if the loss, computed in this context, reads trainable variables."""
  with tf.GradientTape() as tape:
    yield
  read = compat.by_key(tape.watched_variables())
  for key, variable in compat.by_key(model.trainable_variables).items():
    if key in read:
      raise registry.Unsupported(
          "The loss must depend on the weights through the model's outputs alone. Received: a loss "
          f'that reads {compat.describe(variable)}. Use a regularizer of the weights (such as '
          f'`kernel_regularizer`), or {registry.WHOLE}.')


class Recorder:
  """Records the calls of layers while a model runs.

  Args:
    owners: The `owners` of a model; none, to find the `limits` of any model.
    times: Rows of the batch per record.

  Attributes:
    calls: The recorded calls of owners, in order.
    tape: The tape that watches their taps. Run the model inside of it.
  """

  def __init__(self, owners: Sequence[registry.Owner] = (), times: int = 1) -> None:
    self.owners = owners
    self.calls: List[registry.Call] = []
    self.tape = tf.GradientTape(watch_accessed_variables=False)
    self._by_layer = {id(owner.layer): owner for owner in owners}
    self._lookups: List[Tuple[compat.Layer, tf.Tensor]] = []  # (embedding, ids).
    self._inside: List[Optional[registry.Owner]] = [None]  # Owners being called, innermost last.
    self._segment = tf.GradientTape()  # A tape that shows which variables are read.
    self._reads: List[Tuple[int, Optional[registry.Owner]]] = []  # (variable key, its reader).
    self._times = times  # Rows per record where layers are called at present.

  def run(self, model: compat.Model, x: trees.Tree) -> trees.Tree:
    """Returns `model(x, training=True)` and records it."""
    self._graph = _graph()
    others = [layer for layer in model._flatten_layers()
              if isinstance(layer, (_EMBEDDING, _TEXT)) and id(layer) not in self._by_layer]
    with _wrapped([owner.layer for owner in self.owners] + others, self):
      self._start()
      try:
        outputs = model(x, training=True)
      finally:
        self._stop()
    trainable = compat.by_key(model.trainable_variables)
    for key, owner in self._reads if self.owners else ():
      if key in trainable and (owner is None or key not in compat.by_key(owner.variables)):
        raise registry.Unsupported(
            'A trainable variable must be used by calling the layer that owns it. Received: '
            f'{compat.describe(trainable[key])}, read '
            + (f'by layer {owner.layer.name!r}' if owner else "by the model's own code")
            + '. Move the computation into the owner (as a tied softmax into a reversible '
            f'embedding), or use {registry.WHOLE}.')
    return outputs

  def called(
      self, layer: compat.Layer, function: Callable[..., trees.Tree],
      call: registry.Call) -> trees.Tree:
    """Runs `function`, the `call` of a layer, and records what it does."""
    if isinstance(layer, _EMBEDDING) and call.args and not call.argument(1, 'reverse'):
      self._lookups.append((layer, call.inputs))
    owner = self._by_layer.get(id(layer))
    if owner is None:
      outputs = function(*call.args, **call.kwargs)
      return _same_batch(outputs, call) if isinstance(layer, _TEXT) else outputs
    if any(one is not None and one.kind.whole for one in self._inside):
      return function(*call.args, **call.kwargs)
    if _graph() is not self._graph or not _is_taped():
      raise registry.Unsupported(
          f'Layer {layer.name!r} is called inside a loop, a condition, a tf.function or a '
          f'rematerialization, where its gradients cannot be seen. Use {registry.WHOLE}.')
    self._stop()
    self._inside.append(owner)
    self._start()
    call = call._replace(owner=owner, times=self._times)
    if owner.kind.folds:
      self._times *= call.inputs.shape[1] or tf.shape(call.inputs)[1]
    try:
      call = owner.kind.tap(layer, function, call, self.tape)
    finally:
      self._stop()
      self._inside.pop()
      self._start()
      self._times = call.times
    self.calls.append(call)
    return call.outputs

  def limits(self, inputs: trees.Tree) -> Dict[int, int]:
    """Returns {position of a flat input: number of rows} of inputs that embeddings look up."""
    positions = {id(t): i for i, t in enumerate(tf.nest.flatten(inputs))}
    limits: Dict[int, int] = {}
    for layer, ids in self._lookups:
      while (tf.is_tensor(ids) and tf.is_symbolic_tensor(ids) and id(ids) not in positions
             and ids.op.type in _SAME_VALUES):
        ids = ids.op.inputs[0]
      if id(ids) in positions:
        i = positions[id(ids)]
        limits[i] = min(limits.get(i, layer.input_dim), layer.input_dim)
    return limits

  def _start(self) -> None:
    self._segment = tf.GradientTape()
    self._segment.__enter__()

  def _stop(self) -> None:
    self._segment.__exit__(None, None, None)
    self._reads += [(key, self._inside[-1])
                    for key in compat.by_key(self._segment.watched_variables())]


def traced_limits(model: compat.Model, x: trees.Tree) -> Dict[int, int]:
  """Returns `Recorder.limits` of a model called on inputs like `x`; {} if it cannot be traced."""
  limits: Dict[int, int] = {}

  def run(inputs: trees.Tree) -> tf.Tensor:
    recorder = Recorder()
    recorder.run(model, inputs)
    limits.update(recorder.limits(inputs))
    return tf.zeros([])

  with contextlib.suppress(TypeError, ValueError, tf.errors.OpError):  # Training will raise it.
    tf.function(run, autograph=False).get_concrete_function(
        tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), x))
  return limits


def _graph() -> Optional[tf.Graph]:
  return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _same_batch(outputs: trees.Tree, call: registry.Call) -> trees.Tree:
  """Restores the number of rows, which TextVectorization loses in a graph."""
  inputs = call.argument(0, 'inputs')
  if not tf.is_tensor(inputs) or not inputs.shape.rank or isinstance(outputs, tf.RaggedTensor):
    return outputs
  return tf.ensure_shape(outputs, [inputs.shape[0], *outputs.shape[1:]])


def _is_taped() -> bool:
  """Returns False inside `stop_recording` and `recompute_grad`, where tapes record nothing."""
  with tf.GradientTape() as tape:
    one = tf.constant(1.0)
    tape.watch(one)
    two = one + one
  return tape.gradient(two, one) is not None


class _Wrapped:
  """A layer whose call is wrapped at present.

  Replicas of a strategy trace in threads that take turns, so they share the wrappers, which ask
  their thread for its recorder. Between calls of layers any other thread may call the model or
  record it, too. Inside of calls it may not, because some kinds change attributes of a layer.
  """

  def __init__(self, layer: compat.Layer) -> None:
    self.users, name = 0, compat.called(layer)
    function = getattr(layer, name)

    def call(*args: trees.Tree, **kwargs: trees.Tree) -> trees.Tree:
      converted = compat.autographed(layer, function)
      recorder = getattr(_LOCAL, 'recorder', None)
      if recorder is None:
        return converted(*args, **kwargs)
      return recorder.called(layer, converted, registry.Call(args, kwargs))

    self._stack = contextlib.ExitStack()
    self._stack.enter_context(compat.swapped(layer, **{name: compat.unconverted(call)}))
    self.restore = self._stack.close


_WRAPPED: Dict[int, _Wrapped] = {}  # Keys are ids of layers.
_LOCAL = threading.local()


@contextlib.contextmanager
def _wrapped(layers: Sequence[compat.Layer], recorder: Recorder) -> Iterator[None]:
  """Wraps the layers' calls for `recorder`, and restores them afterwards."""
  previous = getattr(_LOCAL, 'recorder', None)
  keys: List[int] = []
  try:
    for layer in layers:
      if id(layer) not in _WRAPPED:
        _WRAPPED[id(layer)] = _Wrapped(layer)
      _WRAPPED[id(layer)].users += 1
      keys.append(id(layer))
    _LOCAL.recorder = recorder
    yield
  finally:
    _LOCAL.recorder = previous
    for key in keys:
      _WRAPPED[key].users -= 1
      if not _WRAPPED[key].users:
        _WRAPPED.pop(key).restore()
