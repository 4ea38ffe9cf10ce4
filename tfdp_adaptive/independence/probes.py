# SPDX-License-Identifier: Apache-2.0
"""Runs the forward and backward pass of training on made-up batches, leaving no trace.

The pass is traced once, as the engine runs it. It runs on copies of all
variables. Weights and rates are moved a little, since a zero could hide what is wrong. The result
is what the gradients of examples are formed from.

Random draws are held fixed: every operation that draws numbers is replaced, in the traced graph and
all functions it calls, by one that computes each number from its position alone: the same at every
run, for whatever else is in the batch and however large it is. Layers, seeds and variables are
left as they are, and no trace that anybody trains with ever holds a replacement. The graph is
changed, and not the functions of Python that draw: those of Keras, of TensorFlow and of layers of
one's own are many, and all of them end in the few operations of `_DRAWS`.
"""

import functools
import itertools
import re
from typing import Any, Callable, Dict, FrozenSet, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import errors
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import bookkeeping
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.clipping import protocol
from tfdp_adaptive.independence import constants


class Trace(NamedTuple):
  """A forward and backward pass.

  Attributes:
    concrete: A concrete function of the data.
    inputs: The number of inputs that are data.
    found: The factors, whose tensors are symbolic; () where examples run alone.
  """

  concrete: Any
  inputs: int
  found: Tuple[Any, ...]


class Seen(NamedTuple):
  """The results of a run as lists of arrays, with examples along the first axis."""

  outputs: Any
  factors: Any


def trace(model: compat.Model, x: trees.Tree, check: Callable[[], None]) -> Trace:
  """Returns the `Trace` of training on a batch like `x`.

  Args:
    model: A built Keras model.
    x: Nest of specs.
    check: Called, while tracing, after the model.
  """
  together = bookkeeping.supports(model, x)[0]
  symbolic: List[Any] = []

  def run(x: trees.Tree, errors: tf.Tensor) -> Seen:
    batch = interface.Batch(x, errors, (), tf.ones(tf.shape(errors)[:1], tf.bool))
    if together:
      factors, outputs, losses = bookkeeping.factors_of(model, _loss, batch)
      symbolic[:] = factors
    else:
      with tf.GradientTape() as tape:
        outputs = model(x, training=True)
        losses = _loss(errors, outputs, ())
      factors = [g for g in tape.gradient(losses, [
          compat.raw_variable(v) for v in model.trainable_variables]) if g is not None]
    check()
    flat = tf.nest.flatten(outputs)
    masks = [tf.cast(t._keras_mask, tf.float32) for t in flat
             if getattr(t, '_keras_mask', None) is not None]
    tensors = protocol.tensors(tuple(symbolic)) if together else factors
    return Seen([tf.convert_to_tensor(t) for t in flat + masks],
                [tf.convert_to_tensor(t) for t in tensors])

  size = tf.nest.flatten(x)[0].shape[0]
  concrete = tf.function(run, autograph=False).get_concrete_function(
      x, tf.TensorSpec([size, 2], tf.float32))
  return Trace(concrete, len(tf.nest.flatten(x)) + 1, tuple(symbolic))


def python_state(model: compat.Model) -> Dict[Tuple[int, str], Any]:
  """Attributes of layers that are numbers, strings or booleans, by layer and name."""
  return {(id(layer), name): value for layer in model._flatten_layers()
          for name, value in vars(layer).items()
          if type(value) in (bool, int, float, str) and name not in _of_keras()}


def _loss(errors: tf.Tensor, outputs: trees.Tree, _: object) -> tf.Tensor:
  """Returns [n] sums of outputs, weighted by each example's `errors` [n, 2]: angle and size."""
  angle, size = tf.unstack(errors, axis=1)
  angle, total = angle[:, tf.newaxis], tf.zeros_like(size)
  for output in tf.nest.flatten(outputs):
    if not output.dtype.is_floating:
      continue
    rows, numbers = output.shape[0], output.shape[1:].num_elements()
    flat = tf.reshape(tf.cast(output, tf.float32), [
        tf.shape(output)[0] if rows is None else rows, -1])
    places = tf.range(tf.shape(flat)[1] if numbers is None else numbers)
    total += size * tf.reduce_sum(flat * tf.cos(angle + tf.cast(places, tf.float32)), 1)
  return total


class Runner:
  """Runs a trace on copies of all variables, the weights moved, draws held fixed."""

  def __init__(self, model: compat.Model, traced: Trace) -> None:
    self.salt = 0.0  # Another gives other draws.
    self.count: Optional[int] = None  # Value to set counters of steps to.
    self.rate: Optional[float] = None  # Value to set single numbers to.
    self._trace = traced
    self._run = Held(traced.concrete)
    self._variables: List[Any] = []  # [copy, value or ()]; captures hold no references.
    weights = {compat.variable_key(v) for v in model.trainable_variables}
    self._captures = [self._copy(t, id(t) in weights) for t in traced.concrete.captured_inputs]

  def _copy(self, capture: tf.Tensor, is_weight: bool) -> Any:
    """Returns the handle of a variable's copy; other values unchanged."""
    kinds = getattr(getattr(capture, '_handle_data', None), 'shape_and_type', None)
    if capture.dtype != tf.resource or not kinds:
      return capture
    value = tf.raw_ops.ReadVariableOp(resource=capture, dtype=tf.as_dtype(kinds[0].dtype))
    if is_weight and value.dtype.is_floating:
      moves = np.random.default_rng(len(self._variables)).normal(size=value.shape)
      size = 0.1 * (0.3 + float(tf.math.reduce_std(tf.cast(value, tf.float32))))
      value += tf.cast(size * moves, value.dtype)
    elif value.dtype.is_floating and not value.shape.rank:
      value += tf.cast(0.1, value.dtype)  # A rate that may be zero today.
    self._variables.append((tf.Variable(value), () if is_weight else value))
    return self._variables[-1][0].handle

  def computed(self, n: int) -> float:
    """Returns how many numbers a run of `n` examples computes, those in loops once."""
    return sum(float(np.prod([n if size is None else size for size in t.shape]))
               for operation in self._trace.concrete.graph.get_operations()
               for t in operation.outputs if t.shape.rank is not None)

  def __call__(self, batch: Sequence[np.ndarray]) -> Seen:
    """Returns `Seen` for a list of arrays, the last of which are the errors."""
    for variable, value in self._variables:
      if tf.is_tensor(value):
        other = None if value.shape.rank else (
            self.count if value.dtype.is_integer else
            self.rate if value.dtype.is_floating else None)
        variable.assign(value if other is None else tf.cast(other, value.dtype))
    flat = self._run([tf.constant(t) for t in batch] + self._captures, self.salt)
    results = tf.nest.pack_sequence_as(self._trace.concrete.structured_outputs, flat)
    return tf.nest.map_structure(lambda t: t.numpy(), results)

  @property
  def settings(self) -> List[Any]:
    """Returns the types of variables that hold one number and are no weights."""
    return [value.dtype for _, value in self._variables
            if tf.is_tensor(value) and not value.shape.rank]

  def gradient(self, seen: Seen, row: int) -> np.ndarray:
    """Returns the gradient of one example, as one vector of float64."""
    factors = protocol.rebuilt(
        self._trace.found, [tf.constant(t[row:row + 1]) for t in seen.factors])
    parts = [factor.gradient() for factor in factors if factor is not None]
    return np.concatenate([np.zeros(0)] + [np.asarray(p, np.float64).ravel() for p in parts])


@functools.lru_cache(maxsize=None)
def _of_keras() -> FrozenSet[str]:
  """Returns the attributes of every model. Keras 2 makes variables for it, so imports must not."""
  return frozenset({*vars(compat.keras.Sequential(name='unused')), 'stop_training'})


_UNHELD = re.compile('Stateful(?!PartitionedCall)|RandomPoisson$|RandomCrop|Parameterized'
                     '|SampleDistortedBoundingBox|.*CandidateSampler')


class Held:
  """`concrete` as a function of its inputs and captures, whose draws go by position.

  Args:
    concrete: A concrete function.

  Raises:
    PrivacyError: If an operation draws numbers that cannot be held fixed.
  """

  def __init__(self, concrete: constants.Concrete) -> None:
    name = f'tfdp_adaptive_draws_{next(_COUNT)}'  # Name of the variable that holds the salt.
    definition = concrete.graph.as_graph_def()
    functions: Dict[Any, Any] = {}
    for node in compat.graph_nodes(definition):
      if node.op in _DRAWS:
        _replace(node, functions, lambda: tf.raw_ops.ReadVariableOp(
            resource=_handle(name), dtype=tf.float64))
      elif _UNHELD.match(node.op):
        raise errors.PrivacyError(
            'Random draws must be of a kind that can be held fixed, so that batches can be '
            f'compared. Received: operation {node.op}. Draw by tf.random.uniform, '
            'tf.random.normal or a layer of Keras.')
    for function in functions.values():
      _include(definition, function)
    self._salt = _handle(name)
    if functions:
      _rename(definition, name)
      self._run = _imported(concrete, definition)
    else:  # Nothing is drawn, so that no graph is to be made anew.
      self._run = compat.with_captures(concrete)

  def __call__(self, values: Sequence[Any], salt: float) -> Any:
    """Returns the outputs. The salt fixes the draws; `LEAST` and `MOST` give extreme ones."""
    tf.raw_ops.AssignVariableOp(resource=self._salt, value=tf.constant(salt, tf.float64))
    return self._run(*values)


_COUNT = itertools.count()
LEAST, MOST = -1.0, -2.0  # Salts: everything drawn is as small or as large as it can be.
_ENDS = (1e-12, 1 - 6e-8)


def _handle(name: str) -> tf.Tensor:
  with tf.device('CPU:0'):
    return tf.raw_ops.VarHandleOp(dtype=tf.float64, shape=[], shared_name=name)


def _imported(concrete: constants.Concrete, definition: constants.Graph) -> Any:
  """Returns a changed graph as a function with the inputs and outputs of `concrete`."""
  fed = {'^' + t.op.name for t in concrete.inputs}
  for node in definition.node:  # Nothing can wait for what is fed.
    node.input[:] = [name for name in node.input if name not in fed]
  used = {name.split(':')[0] for node in definition.node for name in node.input}
  outputs = [t.name for t in concrete.outputs]

  def run(*values: tf.Tensor) -> Any:
    inputs = {t.name: v for t, v in zip(concrete.inputs, values) if t.op.name in used}
    return tf.graph_util.import_graph_def(definition, inputs, outputs, name='held')

  return tf.compat.v1.wrap_function(
      run, [tf.TensorSpec(t.shape, t.dtype) for t in concrete.inputs])


def _rename(definition: constants.Graph, suffix: str) -> None:
  """Renames functions, because the originals still exist."""
  names = {f.signature.name for f in definition.library.function}
  for function in definition.library.function:
    function.signature.name += suffix
  for node in compat.graph_nodes(definition):
    for attribute in node.attr.values():
      for called in [attribute.func, *attribute.list.func]:
        if called.name in names:
          called.name += suffix


def has_draws(concrete: constants.Concrete) -> bool:
  """Whether any operation of a concrete function, or of what it calls, draws numbers."""
  return any(node.op in _DRAWS or node.op.startswith('StatelessRandom') or _UNHELD.match(node.op)
             for node in compat.graph_nodes(concrete.graph.as_graph_def()))


def _replace(node: constants.Node, functions: Dict[Any, constants.Concrete],
             salt: Callable[[], tf.Tensor]) -> None:
  """Makes a node that draws call a function of its inputs that does not."""
  draw: Any
  draw, types = _DRAWS[node.op]
  *taken, result = [
      name if isinstance(name, tf.DType) else tf.as_dtype(node.attr[name].type) for name in types]
  key = (node.op, *taken, result)
  if key not in functions:
    @tf.function(autograph=False, input_signature=[tf.TensorSpec(None, one) for one in taken])
    def function(*inputs: tf.Tensor) -> tf.Tensor:
      with tf.name_scope('held'):  # Keeps names unique after inlining.
        return draw(*inputs, dtype=result, salt=salt())
    functions[key] = function.get_concrete_function()
  node.ClearField('attr')
  node.op = 'StatefulPartitionedCall'
  node.attr['Tin'].list.type.extend([one.as_datatype_enum for one in taken])
  node.attr['Tout'].list.type.append(result.as_datatype_enum)
  node.attr['f'].func.name = functions[key].function_def.signature.name


def _include(definition: constants.Graph, function: constants.Concrete) -> None:
  """Adds a function and all that it calls to a graph's library."""
  have = {f.signature.name for f in definition.library.function}
  inner = function.graph.as_graph_def().library.function
  for one in [function.function_def, *inner]:
    if one.signature.name not in have:
      definition.library.function.append(one)


def _uniform(shape: tf.Tensor, salt: tf.Tensor, *key: tf.Tensor) -> tf.Tensor:
  """Returns float64 in (0, 1) that depend on key and position, not on the length of any axis."""
  tag = _tag(key[0]) if key else 0.0
  shape = tf.cast(tf.reshape(shape, [-1]), tf.int32)
  steps = 0.7548776662 * tf.cast(tf.range(2, tf.size(shape) + 2), tf.float64)**1.5

  def over(axis: tf.Tensor, phase: tf.Tensor) -> Tuple[tf.Tensor, tf.Tensor]:
    places = tf.cast(tf.range(shape[axis]), tf.float64)
    return axis + 1, tf.reshape(phase[:, tf.newaxis] + places * steps[axis], [-1])

  start = tf.constant(0), tf.reshape(salt + tag, [1])
  _, phase = tf.while_loop(lambda axis, _: axis < tf.size(shape), over, start, (
      tf.TensorShape([]), tf.TensorShape([None])))
  mixed = tf.sin(phase * 12.9898) * 43758.5453
  mixed -= tf.floor(mixed)
  end = tf.where(tf.equal(salt, LEAST), tf.constant(_ENDS[0], tf.float64), _ENDS[1])
  mixed = tf.where(salt < 0, end, tf.clip_by_value(mixed, 1e-6, 1 - 1e-6))
  return tf.reshape(mixed, shape)


def _tag(key: tf.Tensor) -> tf.Tensor:
  """Returns a number that depends on a seed or key."""
  low = tf.bitwise.bitwise_and(tf.reshape(key, [-1]), tf.constant(0xffff, key.dtype))
  return tf.reduce_sum(tf.cast(low, tf.float64)) * 0.618


def _uniforms(shape: tf.Tensor, *key: tf.Tensor, dtype: tf.DType, salt: tf.Tensor) -> tf.Tensor:
  uniform = _uniform(shape, salt, *key)
  return tf.cast(uniform if dtype.size > 2 else tf.minimum(uniform, 0.99), dtype)  # Below 1.


def _normals(shape: tf.Tensor, *key: tf.Tensor, dtype: tf.DType, salt: tf.Tensor) -> tf.Tensor:
  uniform = _uniform(shape, salt, *key)
  return tf.cast(tf.math.ndtri(0.04 + 0.92 * uniform), dtype)  # Truncated ones, too.


def _integers(shape: tf.Tensor, *rest: tf.Tensor, dtype: tf.DType, salt: tf.Tensor) -> tf.Tensor:
  *key, low, high = rest
  uniform = _uniform(shape, salt, *key)
  width = tf.cast(high, tf.float64) - tf.cast(low, tf.float64)
  return low + tf.cast(tf.floor(uniform * width), dtype)


def _full_integers(shape: tf.Tensor, key: tf.Tensor, *_: object, dtype: tf.DType,
                   salt: tf.Tensor) -> tf.Tensor:
  return tf.cast(_uniform(shape, salt, key) * 2.0**31, dtype)


def _shuffled(value: tf.Tensor, *key: tf.Tensor, dtype: tf.DType, salt: tf.Tensor) -> tf.Tensor:
  del dtype
  order = _uniform(tf.shape(value)[:1], salt, *key)
  return tf.gather(value, tf.argsort(order))


def _categories(logits: tf.Tensor, samples: tf.Tensor, *_: object, dtype: tf.DType,
                salt: tf.Tensor) -> tf.Tensor:
  shape = tf.concat([tf.shape(logits)[:1], [samples], tf.shape(logits)[1:]], 0)
  gumbel = -tf.math.log(-tf.math.log(_uniform(shape, salt)))
  chosen = tf.argmax(tf.cast(logits, tf.float64)[:, tf.newaxis] + gumbel, -1)
  return tf.cast(chosen, dtype)


def _positive(shape: tf.Tensor, parameter: tf.Tensor, dtype: tf.DType,
              salt: tf.Tensor) -> tf.Tensor:
  """Returns numbers in the support of a gamma or Poisson distribution, of the usual size."""
  shape = tf.concat([tf.cast(shape, tf.int32), tf.shape(parameter)], 0)
  value = 2 * _uniform(shape, salt) * tf.cast(parameter, tf.float64)
  return tf.cast(value if dtype.is_floating else tf.floor(value), dtype)


def _poisson(shape: tf.Tensor, rate: tf.Tensor, dtype: tf.DType, salt: tf.Tensor) -> tf.Tensor:
  return tf.cast(tf.floor(_positive(shape, rate, tf.float64, salt)), dtype)


# Operation -> (its replacement, the types of its inputs and of its output).
_KEYED = (tf.uint64, tf.uint64, tf.int32)
_DRAWS = {
    'RandomUniform': (_uniforms, ('T', 'dtype')),
    'RandomStandardNormal': (_normals, ('T', 'dtype')),
    'TruncatedNormal': (_normals, ('T', 'dtype')),
    'RandomUniformInt': (_integers, ('T', 'Tout', 'Tout', 'Tout')),
    'StatelessRandomUniform': (_uniforms, ('T', 'Tseed', 'dtype')),
    'StatelessRandomNormal': (_normals, ('T', 'Tseed', 'dtype')),
    'StatelessTruncatedNormal': (_normals, ('T', 'Tseed', 'dtype')),
    'StatelessRandomUniformInt': (_integers, ('T', 'Tseed', 'dtype', 'dtype', 'dtype')),
    'StatelessRandomUniformFullInt': (_full_integers, ('T', 'Tseed', 'dtype')),
    'StatelessRandomUniformV2': (_uniforms, ('Tshape', *_KEYED, 'dtype')),
    'StatelessRandomNormalV2': (_normals, ('Tshape', *_KEYED, 'dtype')),
    'StatelessTruncatedNormalV2': (_normals, ('Tshape', *_KEYED, 'dtype')),
    'StatelessRandomUniformIntV2': (
        _integers, ('Tshape', *_KEYED, 'dtype', 'dtype', 'dtype')),
    'StatelessRandomUniformFullIntV2': (_full_integers, ('Tshape', *_KEYED, 'dtype')),
    'RandomShuffle': (_shuffled, ('T', 'T')),
    'StatelessShuffle': (_shuffled, ('T', *_KEYED, 'T')),
    'Multinomial': (_categories, ('T', tf.int32, 'output_dtype')),
    'StatelessMultinomial': (_categories, ('T', tf.int32, 'Tseed', 'output_dtype')),
    'RandomGamma': (_positive, ('S', 'T', 'T')),
    'RandomPoissonV2': (_poisson, ('S', 'R', 'dtype')),
}
