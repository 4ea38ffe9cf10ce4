# SPDX-License-Identifier: Apache-2.0
"""Trees: anything `tf.nest` maps over. `()` stands for "absent", since TFF rejects `None`."""

from typing import Any, Callable, Dict, Iterable, Iterator, Tuple

import numpy as np
import tensorflow as tf

Tree = Any  # A nest of tensors, or of their specs.
Leaf = Any  # A tensor, or another leaf of a tree.
Scalar = Any  # A number, or a tensor of shape [].
# Number of elements of up to eight tensors. Each tensor takes some hundredths of a second to
# compile; with this number of elements, a thousand steps save as much.
WORTH_COMPILING = 2**16


def map(function: Callable[..., Any], *trees: Tree) -> Tree:  # pylint: disable=redefined-builtin
  """Calls `function` for every leaf, or for corresponding leaves of several trees."""
  return tf.nest.map_structure(function, *trees)


def absent(tree: Tree) -> bool:
  return isinstance(tree, tuple) and not tree


def given(tree: Tree) -> Tree:
  """Returns a tree without the values of dictionaries that are None, as of optional inputs."""
  if isinstance(tree, dict):
    return {name: given(value) for name, value in tree.items() if value is not None}
  return tuple(given(value) for value in tree) if type(tree) is tuple else tree


def content(array: np.ndarray) -> bytes:
  """Returns the values of an array, or its texts, as bytes for a digest."""
  return repr(array.tolist()).encode() if array.dtype.kind in 'OSU' else array.tobytes()


def contents(arrays: Tree) -> Iterator[Tuple[bytes, ...]]:
  """Yields the bytes of each example. Equal numbers of two widths have equal bytes."""
  widths = {'f': np.float32, 'b': np.int64, 'i': np.int64, 'u': np.int64}
  parts = [part.astype(widths.get(part.dtype.kind, part.dtype))
           for part in tf.nest.flatten(arrays)]
  return (tuple(content(np.asarray(row)) for row in rows) for rows in zip(*parts))


def assign(pairs: Iterable[Tuple[Any, Any]]) -> None:
  """Assigns values to variables, given as `(variable, value)`."""
  for variable, value in pairs:
    variable.assign(value)


def zeros(specs: Tree) -> Tree:
  return map(lambda s: tf.zeros(s.shape, s.dtype), specs)


def scalar(value: float, tree: Tree) -> Dict[tf.DType, tf.Tensor]:
  """Returns a number as one tensor for each dtype of the leaves, so that graphs stay small."""
  return {dtype: tf.constant(value, dtype)
          for dtype in dict.fromkeys(leaf.dtype for leaf in tf.nest.flatten(tree))}


def size(specs: Tree) -> int:
  """Returns the number of elements of all leaves."""
  return sum(leaf.shape.num_elements() for leaf in tf.nest.flatten(specs))


def flatten(tree: Tree) -> tf.Tensor:
  """Returns all leaves in order, [m]."""
  return tf.concat([tf.reshape(leaf, [-1]) for leaf in tf.nest.flatten(tree)], 0)


def unflatten(vector: tf.Tensor, tree: Tree) -> Tree:
  """Inverts `flatten`, with the shapes of `tree` (tensors or specs)."""
  leaves = tf.nest.flatten(tree)
  parts = tf.split(vector, [leaf.shape.num_elements() for leaf in leaves])
  return tf.nest.pack_sequence_as(
      tree, [tf.reshape(part, leaf.shape) for part, leaf in zip(parts, leaves)])


def scaled(weights: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
  """Multiplies weights [n, ...] by a factor that may have more axes behind those of the weights."""
  more = [1] * (factor.shape.rank - weights.shape.rank)
  return tf.reshape(weights, tf.concat([tf.shape(weights), more], 0)) * factor


def dtype_of(specs: Tree) -> tf.DType:
  """Returns the dtype of the first leaf, for scalars that are used with a tree."""
  leaves = tf.nest.flatten(specs)
  return leaves[0].dtype if leaves else tf.float32


def wide(dtype: tf.DType) -> tf.DType:
  """Returns the dtype for computing with values of `dtype`: at least float32."""
  return tf.float64 if dtype == tf.float64 else tf.float32


def wide_spec(spec: tf.TensorSpec) -> tf.TensorSpec:
  """Returns the spec of the sums and of the noise for a tensor like `spec`."""
  return tf.TensorSpec(spec.shape, wide(spec.dtype), getattr(spec, 'name', None))


def widen(tensor: tf.types.experimental.TensorLike) -> tf.Tensor:
  """Returns a dense tensor of float32 at least, because sums of half precision lose digits."""
  tensor = tf.convert_to_tensor(tensor)
  return tf.cast(tensor, wide(tensor.dtype))


def check_specs(**values: Tree) -> None:
  """Raises unless each is a tree of `tf.TensorSpec`, of floating point and known shape."""
  for name, specs in values.items():
    try:
      leaves = tf.nest.flatten(specs)
    except (TypeError, ValueError):
      leaves = []
    if not leaves or not all(
        isinstance(leaf, tf.TensorSpec) and leaf.dtype.is_floating
        and leaf.shape.is_fully_defined() for leaf in leaves):
      raise ValueError(
          f'`{name}` must be a `tf.TensorSpec`, or a nest of them, of floating point and fully '
          f'defined shape, such as `[tf.TensorSpec([3], tf.float32)]`. Received: {name}={specs!r}.')


def like(tree: Tree, specs: Tree, name: str) -> Tree:
  """Returns `tree` as tensors, like `specs` in structure, shapes and dtypes.

  A number in place of a vector would be clipped as one number and then copied to every coordinate.

  Raises:
    ValueError, TypeError: If anything differs, as of `tf.nest.assert_same_structure`; where a
      shape is not known yet, the step itself fails.
  """
  received: Any = type(tree).__name__
  kind = ValueError
  try:
    tf.nest.assert_same_structure(tree, specs)
    tensors = [tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(tree)]
    received = [(leaf.shape.as_list() if leaf.shape.rank is not None else None, leaf.dtype.name)
                for leaf in tensors]
  except (TypeError, ValueError) as error:  # The structure differs, or leaves are not numbers.
    tensors, kind = [], type(error)
  leaves = tf.nest.flatten(specs)
  if len(tensors) != len(leaves) or not all(
      leaf.dtype == spec.dtype and leaf.shape.is_compatible_with(spec.shape)
      for leaf, spec in zip(tensors, leaves)):
    raise kind(
        f'`{name}` must have the structure, shapes and dtypes of its specs, which decide what '
        f'noise it gets. Expected: {specs}. Received: {received}.')
  return tf.nest.pack_sequence_as(specs, [
      shaped(leaf, spec.shape) for leaf, spec in zip(tensors, leaves)])


def shaped(tensor: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
  """Calls `tf.ensure_shape` unless the shape is known.

  The operation is slow under XLA: steps of a transformer with dropout took fifteen times as long
  (TensorFlow 2.21, CPU).
  """
  return tensor if tensor.shape == shape else tf.ensure_shape(tensor, shape)


def insist(condition: tf.Tensor, *message: object) -> Any:
  """Returns an operation that raises if the condition does not hold; not under XLA.

  `tf.debugging.Assert` takes a branch and thirty operations in a graph, and reads better outside.
  """
  kind = tf.debugging.Assert if tf.executing_eagerly() else tf.raw_ops.Assert
  return kind(condition=condition, data=list(message))


def constant_like(value: Tree, specs: Tree, name: str) -> Tree:
  """Returns `value`, a number or a nest of arrays like `specs`, as a tree of tensors."""
  leaves = tf.nest.flatten(specs)
  values = tf.nest.flatten(value)
  if len(values) == 1 and not getattr(values[0], 'shape', ()):
    return map(lambda s: tf.fill(s.shape, tf.constant(values[0], s.dtype)), specs)
  if [tuple(getattr(v, 'shape', ())) for v in values] != [tuple(s.shape) for s in leaves]:
    raise ValueError(
        f'`{name}` must be a number or one array per variable, of shapes '
        f'{[tuple(s.shape) for s in leaves]}. '
        f"Received: shapes {[tuple(getattr(v, 'shape', ())) for v in values]}.")
  return tf.nest.pack_sequence_as(
      specs, [tf.cast(tf.convert_to_tensor(v), s.dtype) for v, s in zip(values, leaves)])


def one_pass(function: Callable[..., Tree]) -> Callable[..., Tree]:
  """Returns an element-wise `function` of trees that reads and writes each tensor once.

  Without it, TensorFlow reads and writes memory for every product. The function is compiled by XLA
  where that is `worth_compiling`, also within graphs that are not compiled. (A product of matrices
  would also be one pass, but GPUs round its factors to TF32.)
  """
  compiled = tf.function(function, jit_compile=True, autograph=False)

  def call(*arguments: Tree) -> Tree:
    sizes = [t.shape.num_elements() or 0 for t in tf.nest.flatten(arguments) if hasattr(t, 'shape')]
    return (compiled if worth_compiling(*sizes) else function)(*arguments)

  return call


def worth_compiling(*sizes: int) -> bool:
  """Returns whether XLA should compile a function of tensors with so many elements.

  It should for large tensors, but not on a GPU, where memory is fast and compilers may be missing,
  or on a TPU, whose compiler has no complex numbers of 128 bits (`noise.keys`).
  """
  large = sum(sizes) >= WORTH_COMPILING * max(1, len(sizes) / 8)
  return large and not any(map(tf.config.list_physical_devices, ('GPU', 'TPU')))
