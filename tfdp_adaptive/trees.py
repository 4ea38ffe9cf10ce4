# SPDX-License-Identifier: Apache-2.0
"""Trees: anything `tf.nest` maps over. `()` stands for "absent", since TFF rejects `None`."""

from typing import Any, Callable, Dict

import tensorflow as tf

Tree = Any  # A nest of tensors, or of their specs.
Scalar = Any  # A number, or a tensor of shape [].
# Elements of eight tensors, or of fewer. Each tensor takes some hundredths of a second to compile;
# with as many elements, a thousand steps bring that back.
WORTH_COMPILING = 2**16


def map(function: Callable[..., Any], *trees: Tree) -> Tree:  # pylint: disable=redefined-builtin
  """`function` of every leaf, or of the leaves that stand in one place of several trees."""
  return tf.nest.map_structure(function, *trees)


def absent(tree: Tree) -> bool:
  return isinstance(tree, tuple) and not tree


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
  """The inverse of `flatten`, in the shapes of `tree` (tensors or specs)."""
  leaves = tf.nest.flatten(tree)
  parts = tf.split(vector, [leaf.shape.num_elements() for leaf in leaves])
  return tf.nest.pack_sequence_as(
      tree, [tf.reshape(part, leaf.shape) for part, leaf in zip(parts, leaves)])


def dtype_of(specs: Tree) -> tf.DType:
  """The dtype of the scalars that go with a tree: that of its first leaf."""
  leaves = tf.nest.flatten(specs)
  return leaves[0].dtype if leaves else tf.float32


def wide(dtype: tf.DType) -> tf.DType:
  """Returns the dtype for computing with values of `dtype`: at least float32."""
  return tf.float64 if dtype == tf.float64 else tf.float32


def wide_spec(spec: tf.TensorSpec) -> tf.TensorSpec:
  """The spec of the sums and of the noise for a tensor like `spec`."""
  return tf.TensorSpec(spec.shape, wide(spec.dtype), getattr(spec, 'name', None))


def widen(tensor: Any) -> tf.Tensor:
  """A dense tensor of float32 at least: gradients of half precision are not summed as such."""
  tensor = tf.convert_to_tensor(tensor)
  return tf.cast(tensor, wide(tensor.dtype))


def check_specs(**values: Any) -> None:
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
  """`tree` as tensors, like `specs` in structure, shapes and dtypes.

  A number in the place of a vector would be clipped as one and then copied into every coordinate.

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
  except (TypeError, ValueError) as error:  # Another structure, or leaves that are no numbers.
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


def shaped(tensor: tf.Tensor, shape: Any) -> tf.Tensor:
  """`tf.ensure_shape`, which takes an operation only where the shape is not known.

  Under XLA that operation is dear even then: steps of a transformer with dropout took fifteen
  times as long (TensorFlow 2.21, CPU).
  """
  return tensor if tensor.shape == shape else tf.ensure_shape(tensor, shape)


def insist(condition: tf.Tensor, *said: Any) -> Any:
  """Returns an operation that fails where the condition does not hold, and says so; not under XLA.

  `tf.debugging.Assert` takes a branch and thirty operations in a graph, and reads better outside.
  """
  kind = tf.debugging.Assert if tf.executing_eagerly() else tf.raw_ops.Assert
  return kind(condition=condition, data=list(said))


def constant_like(value: Any, specs: Tree, name: str) -> Tree:
  """`value`, a number or a nest of arrays like `specs`, as a tree of tensors."""
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
  """Whether XLA is to compile a function of tensors with so many elements.

  Only large ones, and not on a GPU, because the compiler is often missing there and memory is fast.
  """
  large = sum(sizes) >= WORTH_COMPILING * max(1, len(sizes) / 8)
  return large and not tf.config.list_physical_devices('GPU')
