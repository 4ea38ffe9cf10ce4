# SPDX-License-Identifier: Apache-2.0
"""Holds the random draws of a traced function fixed, so that its values can be compared.

Every operation that draws numbers is replaced, in the traced graph and all functions it
calls, by one that computes each number from its position alone: the same at every run,
for whatever else is in the batch and however large it is. Layers, seeds and variables are
left as they are, and no trace that anybody trains with ever holds a replacement.

The graph is changed, and not the functions of Python that draw: those of Keras, of TensorFlow and
of layers of one's own are many, and all of them end in the few operations of `_DRAWS`.
"""

import itertools
import re
from typing import Any, Callable, Dict, List, Sequence, Tuple

import tensorflow as tf

from tfdp_adaptive import errors

_UNHELD = re.compile('Stateful(?!PartitionedCall)|RandomPoisson$|RandomCrop|Parameterized'
                     '|SampleDistortedBoundingBox|.*CandidateSampler')


class Held:
  """`concrete` as a function of its inputs and captures, whose draws go by position.

  Args:
    concrete: A concrete function.

  Raises:
    PrivacyError: If an operation draws numbers that cannot be held fixed.
  """

  def __init__(self, concrete: Any) -> None:
    name = f'tfdp_adaptive_draws_{next(_COUNT)}'  # Of the variable that holds the salt.
    definition = concrete.graph.as_graph_def()
    functions: Dict[Any, Any] = {}
    for node in _nodes(definition):
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
    if functions:
      _rename(definition, name)
    self._salt, self._run = _handle(name), _imported(concrete, definition)

  def __call__(self, values: Sequence[Any], salt: Any) -> Any:
    """Returns the outputs. The salt fixes the draws; `LEAST` and `MOST` give extreme ones."""
    tf.raw_ops.AssignVariableOp(resource=self._salt, value=tf.constant(salt, tf.float64))
    return self._run(*values)


_COUNT = itertools.count()
LEAST, MOST = -1.0, -2.0  # Salts: everything drawn is as small or as large as it can be.
_ENDS = (1e-12, 1 - 6e-8)


def _handle(name: str) -> tf.Tensor:
  with tf.device('CPU:0'):
    return tf.raw_ops.VarHandleOp(dtype=tf.float64, shape=[], shared_name=name)


def _imported(concrete: Any, definition: Any) -> Any:
  """A graph, changed, as a function like the one it is of."""
  fed = {'^' + t.op.name for t in concrete.inputs}
  for node in definition.node:  # Nothing can wait for what is fed.
    node.input[:] = [name for name in node.input if name not in fed]
  used = {name.split(':')[0] for node in definition.node for name in node.input}
  outputs = [t.name for t in concrete.outputs]

  def run(*values: Any) -> Any:
    inputs = {t.name: v for t, v in zip(concrete.inputs, values) if t.op.name in used}
    return tf.graph_util.import_graph_def(definition, inputs, outputs, name='held')

  return tf.compat.v1.wrap_function(
      run, [tf.TensorSpec(t.shape, t.dtype) for t in concrete.inputs])


def _rename(definition: Any, suffix: str) -> None:
  """Renames functions, because the originals still exist."""
  names = {f.signature.name for f in definition.library.function}
  for function in definition.library.function:
    function.signature.name += suffix
  for node in _nodes(definition):
    for attribute in node.attr.values():
      for called in [attribute.func, *attribute.list.func]:
        if called.name in names:
          called.name += suffix


def _nodes(definition: Any) -> List[Any]:
  return list(definition.node) + [n for f in definition.library.function for n in f.node_def]


def has_draws(concrete: Any) -> bool:
  """Whether any operation of a concrete function, or of what it calls, draws numbers."""
  return any(node.op in _DRAWS or node.op.startswith('StatelessRandom') or _UNHELD.match(node.op)
             for node in _nodes(concrete.graph.as_graph_def()))


def _replace(node: Any, functions: Any, salt: Callable[[], tf.Tensor]) -> None:
  """Makes a node that draws call a function of its inputs that does not."""
  draw: Any
  draw, types = _DRAWS[node.op]
  *taken, result = [
      name if isinstance(name, tf.DType) else tf.as_dtype(node.attr[name].type) for name in types]
  key = (node.op, *taken, result)
  if key not in functions:
    @tf.function(autograph=False, input_signature=[tf.TensorSpec(None, one) for one in taken])
    def function(*inputs: Any) -> tf.Tensor:
      with tf.name_scope('held'):  # Once inlined, names must differ from those around.
        return draw(*inputs, dtype=result, salt=salt())
    functions[key] = function.get_concrete_function()
  node.ClearField('attr')
  node.op = 'StatefulPartitionedCall'
  node.attr['Tin'].list.type.extend([one.as_datatype_enum for one in taken])
  node.attr['Tout'].list.type.append(result.as_datatype_enum)
  node.attr['f'].func.name = functions[key].function_def.signature.name


def _include(definition: Any, function: Any) -> None:
  """Adds a function and all that it calls to a graph's library."""
  have = {f.signature.name for f in definition.library.function}
  inner = function.graph.as_graph_def().library.function
  for one in [function.function_def, *inner]:
    if one.signature.name not in have:
      definition.library.function.append(one)


def _uniform(shape: tf.Tensor, salt: Any, tag: Any = 0.0) -> tf.Tensor:
  """Float64 in (0, 1) that depends on each axis' index, not on any axis' length."""
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


def _tag(key: Any) -> tf.Tensor:
  """A number of a seed or a key."""
  low = tf.bitwise.bitwise_and(tf.reshape(key, [-1]), tf.constant(0xffff, key.dtype))
  return tf.reduce_sum(tf.cast(low, tf.float64)) * 0.618


def _uniforms(shape: tf.Tensor, *key: Any, dtype: tf.DType, salt: Any) -> tf.Tensor:
  uniform = _uniform(shape, salt, _tag(key[0]) if key else 0.0)
  return tf.cast(uniform if dtype.size > 2 else tf.minimum(uniform, 0.99), dtype)  # Below 1.


def _normals(shape: tf.Tensor, *key: Any, dtype: tf.DType, salt: Any) -> tf.Tensor:
  uniform = _uniform(shape, salt, _tag(key[0]) if key else 0.0)
  return tf.cast(tf.math.ndtri(0.04 + 0.92 * uniform), dtype)  # Truncated ones, too.


def _integers(shape: tf.Tensor, *rest: Any, dtype: tf.DType, salt: Any) -> tf.Tensor:
  *key, low, high = rest
  uniform = _uniform(shape, salt, _tag(key[0]) if key else 0.0)
  width = tf.cast(high, tf.float64) - tf.cast(low, tf.float64)
  return low + tf.cast(tf.floor(uniform * width), dtype)


def _full_integers(shape: tf.Tensor, key: Any, *_: Any, dtype: tf.DType, salt: Any) -> tf.Tensor:
  return tf.cast(_uniform(shape, salt, _tag(key)) * 2.0**31, dtype)


def _shuffled(value: tf.Tensor, *key: Any, dtype: tf.DType, salt: Any) -> tf.Tensor:
  del dtype
  order = _uniform(tf.shape(value)[:1], salt, _tag(key[0]) if key else 0.0)
  return tf.gather(value, tf.argsort(order))


def _categories(
    logits: tf.Tensor, samples: tf.Tensor, *_: Any, dtype: tf.DType, salt: Any) -> tf.Tensor:
  shape = tf.concat([tf.shape(logits)[:1], [samples], tf.shape(logits)[1:]], 0)
  gumbel = -tf.math.log(-tf.math.log(_uniform(shape, salt)))
  chosen = tf.argmax(tf.cast(logits, tf.float64)[:, tf.newaxis] + gumbel, -1)
  return tf.cast(chosen, dtype)


def _positive(shape: tf.Tensor, parameter: tf.Tensor, dtype: tf.DType, salt: Any) -> tf.Tensor:
  """Numbers of a gamma or Poisson distribution's support, about as large as they would be."""
  shape = tf.concat([tf.cast(shape, tf.int32), tf.shape(parameter)], 0)
  value = 2 * _uniform(shape, salt) * tf.cast(parameter, tf.float64)
  return tf.cast(value if dtype.is_floating else tf.floor(value), dtype)


def _poisson(shape: tf.Tensor, rate: tf.Tensor, dtype: tf.DType, salt: Any) -> tf.Tensor:
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
