# SPDX-License-Identifier: Apache-2.0
"""Finds model inputs that go unchanged to embeddings, and the number of their rows."""

import contextlib
import functools
from typing import Any, Dict, Iterator, List, Tuple

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import swaps

_SAME_VALUES = {'Cast', 'Identity', 'Reshape', 'ExpandDims', 'Squeeze', 'EnsureShape'}
_EMBEDDING = compat.keras.layers.Embedding


@contextlib.contextmanager
def listening(model: Any) -> Iterator[List[Tuple[Any, Any]]]:
  """Collects `(embedding, ids)` of all calls inside, whether its table is trained or not."""
  heard: List[Tuple[Any, Any]] = []
  layers = {id(layer): layer for layer in model._flatten_layers() if isinstance(layer, _EMBEDDING)}
  with contextlib.ExitStack() as stack:
    for layer in layers.values():
      stack.enter_context(swaps.swapped(layer, call=_hearing(layer, layer.call, heard)))
    yield heard


def _hearing(layer: Any, call: Any, heard: List[Tuple[Any, Any]]) -> Any:
  @functools.wraps(call)
  def wrapper(*args: Any, **kwargs: Any) -> Any:
    backwards = kwargs.get('reverse') or len(args) > 1 and args[1]  # Of a reversible one.
    if args and not backwards:
      heard.append((layer, args[0]))
    return call(*args, **kwargs)
  return wrapper


def of(heard: List[Tuple[Any, Any]], inputs: List[Any]) -> Dict[int, int]:
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


def traced(model: Any, x: trees.Tree) -> Dict[int, int]:
  """`of` a model that is called on inputs like `x`; {} if it cannot be traced."""
  limits: Dict[int, int] = {}

  def run(inputs: trees.Tree) -> tf.Tensor:
    with listening(model) as heard:
      model(inputs, training=True)
    limits.update(of(heard, tf.nest.flatten(inputs)))
    return tf.zeros([])

  try:
    tf.function(run, autograph=False).get_concrete_function(
        tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), x))
  except (TypeError, ValueError, tf.errors.OpError):
    return {}  # Whoever trains it will say why.
  return limits
