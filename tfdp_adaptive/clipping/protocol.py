# SPDX-License-Identifier: Apache-2.0
"""The protocol of factors: how the engine uses the factored gradient of a variable.

A factor is a frozen dataclass of [n, ...] tensors, the examples along the first axis,
and static fields. The kinds are `factors.Explicit`, `factors.Outer`, `rows.Rows`,
`rows.Mixed` and `layers.convolution.Convolution`; whoever adds one writes down these
members, and nothing else in the engine has to know of it.

A `scale` is `()` or a tensor of the variable's shape; several scales or weights share
the work. Weights are [n] float64.
"""

import abc
import dataclasses
import math
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import contract
from tfdp_adaptive import trees

_EPS_OF_TF32 = 2.0**-10
# At most this many bytes of per-example gradients are formed at once.
BLOCK_BYTES = 4 * 2**20
Tensors = Sequence[tf.Tensor]
Scales = Sequence[Any]  # One entry per variable: `()` or a tensor.
Products = Tuple[Any, Callable[[Any], tf.Tensor]]  # See `Factor.products`.


class Factor(abc.ABC):
  """The gradients of n examples by one variable of shape `shape`."""

  shape: Tuple[int, ...]

  @abc.abstractmethod
  def route(self, scaled: bool) -> str:
    """Returns the route by which norms are computed, from static shapes."""

  def squared_norms(self, scales: Scales) -> Tensors:
    """Returns one [n] float64 tensor per scale, at least the true norm up to rounding.

    Numbers are so small that no square or product of them overflows; see `bookkeeping.norms_of`.
    """
    norms: Dict[int, tf.Tensor] = {}
    for scaled in (False, True):
      chosen = [i for i, scale in enumerate(scales) if trees.absent(scale) != scaled]
      if chosen:
        norms.update(zip(chosen, self.norms_by(
            self.route(scaled), [scales[i] for i in chosen])))
    return [norms[i] for i in range(len(scales))]

  def norms_by(self, route: str, scales: Scales) -> Tensors:
    """`squared_norms` by a route; by default from whole gradients, some examples at a time."""
    del route
    formed = in_blocks(lambda one: one.explicit().squared_norms(scales), self, len(scales))
    return charged(formed, self, scales)

  def formed(self, n: int, scaled: bool) -> int:
    """Numbers that the norms of n examples form at once; by default whole gradients in blocks."""
    del scaled
    numbers = math.prod(self.shape)
    return 2 * numbers * together(n, numbers)  # And their squares.

  def products(self) -> Products:
    """`(count, squares)` of the products that each number of a gradient adds up.

    `squares(scale)` is an [n] float64, at least the squared norm of the same gradient made
    of magnitudes. Only for factors whose norms take another order than their sums.
    """
    raise NotImplementedError(f'Received: {type(self).__name__}.')

  @abc.abstractmethod
  def weighted_sums(self, weights: Tensors) -> Tensors:
    """Returns `sum_n weights[n] * gradient[n]` for each of the weights."""

  def squared_sums(self, weights: Tensors, scales: Scales) -> Tensors:
    """Per pair: `sum_n (scale * weights[n] * gradient[n])**2`; no other square is formed."""
    return sum_blocks(lambda one, w: one.explicit().squared_sums(w, scales), self, weights)

  @abc.abstractmethod
  def folded(self, times: int) -> 'Factor':
    """The factor whose examples are `times` consecutive ones of this, added up."""

  @abc.abstractmethod
  def explicit(self) -> 'Factor':
    """Returns the factor as a `factors.Explicit`."""

  def transformed(self, scale: contract.Kronecker) -> 'Factor':
    """The factor of the gradients `left W right'`."""
    return self.explicit().transformed(scale)

  def second_moments(self, view: Tuple[int, int, int], most: int) -> Tuple[tf.Tensor, tf.Tensor]:
    """Averages of `a a'` and `e e'` over all products `a e'` that the gradients add up.

    Args:
      view: `(count, d, p)` as which the variable is seen; see `rules.kronecker`.
      most: Of longer sides, the diagonals alone.
    """
    return self.explicit().second_moments(view, most)

  def simplified(self) -> 'Factor':
    """Returns the factor, as whole gradients if these are faster for everything that follows."""
    return self.explicit() if self.route(True) == 'explicit' else self

  def kin(self) -> Any:
    """Returns the key that factors of one variable must share to be `joined`; see `rows.add`."""
    return id(self)

  def joined(self, others: Sequence[Any]) -> 'Factor':
    """The sum of this and its kin: theirs are more steps."""
    columns = zip(*map(tensors, (self, *others)))
    return rebuilt(self, [tf.concat(column, 1) for column in columns])

  def unit(self) -> Tuple['Factor', tf.Tensor]:
    """`(factor, size)`: brought to a largest magnitude of about one; size is [n] float64.

    If one tensor of an example is zero, so is the gradient, and the result is zero: the other
    tensors then say nothing about its size.
    """
    parts = tensors(self)
    peaks = [peak(t) if t.dtype.is_floating else None for t in parts]
    size = tf.ones([], tf.float64)
    for one in peaks:
      size = size if one is None else size * tf.reshape(wide(one), [-1])
    return rebuilt(self, [
        t if one is None else divided(t, one) for t, one in zip(parts, peaks)]), size

  def times(self, ratio: tf.Tensor) -> 'Factor':
    """The gradients of each example multiplied by `ratio` [n]."""
    parts = tensors(self)
    last = max(i for i, t in enumerate(parts) if t.dtype.is_floating)
    parts[last] *= along(ratio, parts[last])
    return rebuilt(self, parts)


def wide(x: tf.Tensor) -> tf.Tensor:
  return tf.cast(x, tf.float64)


def second_moment(x: tf.Tensor, size: int, most: int) -> tf.Tensor:
  """[size, size] average of `v v'` over pieces v of the last axis of x, or its diagonal."""
  pieces = tf.reshape(x, [-1, size])
  if size > most:
    return tf.reduce_mean(tf.square(pieces), 0)
  count = tf.cast(tf.shape(pieces)[0], pieces.dtype)
  return tf.matmul(pieces, pieces, transpose_a=True) / tf.maximum(count, 1)


def peak(x: tf.Tensor, first: int = 1) -> tf.Tensor:
  """Largest magnitudes over all axes but the `first` ones, which are kept; infinite for NaN."""
  sizes = tf.where(tf.math.is_finite(x), tf.abs(x), float('inf'))
  return tf.reduce_max(sizes, list(range(first, x.shape.rank)), keepdims=True)


def divided(x: tf.Tensor, peaks: tf.Tensor) -> tf.Tensor:
  """`x` by its peaks, zeros where these are zero or not finite."""
  return tf.math.divide_no_nan(x, tf.where(tf.math.is_finite(peaks), peaks, 0))


def tiny(dtype: tf.DType) -> float:
  return float(np.finfo(dtype.as_numpy_dtype).tiny)


def eps(dtype: tf.DType) -> float:
  """Twice the relative rounding of products, as `np.finfo` has it.

  TensorFlow multiplies float32 matrices in TF32 on GPUs that have it, unless
  `tf.config.experimental.enable_tensor_float_32_execution(False)`: wherever there is a
  GPU, that is assumed.
  """
  if dtype == tf.float32 and tf.config.list_physical_devices('GPU') and (
      tf.config.experimental.tensor_float_32_execution_enabled()):
    return _EPS_OF_TF32
  return float(np.finfo(dtype.as_numpy_dtype).eps)


def charged(norms: Tensors, factor: Factor, scales: Scales) -> Tensors:
  """Squared norms, and what the terms of a factor lose where they cancel.

  Weighted sums add the same products in another order: a record whose terms cancel in its
  norm must not come back there, nor swallow others, by more than its clip norm.
  """
  count, squares = factor.products()
  lost = (wide(count) + 4) * rounding(factor)
  return [norm + lost**2 * squares(scale) for norm, scale in zip(norms, scales)]


def rounding(factor: Factor) -> float:
  """Relative, of the coarsest of its tensors."""
  dtypes = [t.dtype for t in tensors(factor) if t.dtype.is_floating]
  return eps(min(dtypes, key=lambda one: one.size))


def along(weights: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
  """[n] weights shaped to multiply x [n, ...]."""
  return tf.reshape(narrow(weights, x.dtype), [-1] + [1] * (x.shape.rank - 1))


def narrow(weights: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
  """float64 weights in `dtype`; zero where that would round them up by much."""
  return tf.cast(tf.where(weights < tiny(dtype), tf.zeros_like(weights), weights), dtype)


def tensors(factor: Any) -> List[tf.Tensor]:
  """The [n, ...] tensors a factor is made of."""
  return _walk(factor, [])[1]


def rebuilt(factor: Any, values: Iterable[tf.Tensor]) -> Any:
  """`factor` with other tensors, in the order of `tensors(factor)`."""
  return _walk(factor, None, iter(values))[0]


def _walk(
    node: Any, seen: Optional[List[tf.Tensor]],
    values: Optional[Iterator[tf.Tensor]] = None) -> Tuple[Any, Any]:
  if tf.is_tensor(node):
    if values is not None:
      return next(values), seen
    if seen is not None:
      seen.append(node)
  elif isinstance(node, tuple):
    node = tuple(_walk(one, seen, values)[0] for one in node)
  elif dataclasses.is_dataclass(node) and not isinstance(node, type):
    node = dataclasses.replace(node, **{
        name: _walk(value, seen, values)[0] for name, value in vars(node).items()})
  return node, seen


def in_blocks(
    function: Callable[..., Any], factor: Any, count: int,
    numbers: Optional[int] = None) -> List[tf.Tensor]:
  """`function: factor -> [[n]] * count` over blocks of examples, results joined.

  `numbers` is how many `function` forms per example; that of the gradient if None.
  """
  n, parts = cut(tensors(factor), numbers or int(np.prod(factor.shape)))
  if parts[0].shape[0] == 1:
    return function(factor)
  stack = compat.unconverted(
      lambda i: tf.stack(function(rebuilt(factor, [x[i] for x in parts]))))
  norms = tf.map_fn(stack, tf.range(tf.shape(parts[0])[0]), parallel_iterations=1,
                    fn_output_signature=tf.float64)  # [blocks, scales, rows]
  return tf.unstack(tf.reshape(tf.transpose(norms, [1, 0, 2]), [count, -1])[:, :n])


def sum_blocks(
    function: Callable[..., Any], factor: Any, weights: Sequence[tf.Tensor]) -> List[tf.Tensor]:
  """`function: (factor, weights) -> sums` over blocks of examples, results added."""
  values = tensors(factor)
  _, parts = cut(values + list(weights), int(np.prod(factor.shape)))
  if parts[0].shape[0] == 1:
    return function(factor, weights)

  def step(sums: List[tf.Tensor], i: Any) -> List[tf.Tensor]:
    block = [x[i] for x in parts]
    return [a + b for a, b in zip(
        sums, function(rebuilt(factor, block[:len(values)]), block[len(values):]))]

  return tf.foldl(step, tf.range(tf.shape(parts[0])[0]), [
      tf.zeros(factor.shape, values[-1].dtype) for _ in weights], parallel_iterations=1)


def together(n: int, numbers: int) -> int:
  """How many of n examples are formed at once, which take `numbers` each."""
  return min(n, max(1, BLOCK_BYTES // (4 * numbers)))


def cut(
    values: Sequence[tf.Tensor], numbers: int,
    limit: Optional[int] = None) -> Tuple[tf.Tensor, List[tf.Tensor]]:
  """`(n, values)`: [n, ...] padded and cut to [blocks, rows, ...] of rows of `numbers` each.

  A single block where the batch is known to fit into `limit` bytes (`BLOCK_BYTES`).
  """
  most = max(1, (limit or BLOCK_BYTES) // (4 * numbers))
  n = values[0].shape[0]
  if n is None:
    n = tf.shape(values[0])[0]
    rows = 1 if most == 1 else tf.minimum(most, tf.maximum(n, 1))
  else:
    rows = -(-max(n, 1) // -(-max(n, 1) // most))  # As many blocks, of about one size.
  return n, [split(x, -(-n // rows), rows) for x in values]


def split(x: tf.Tensor, count: Any, rows: Any) -> tf.Tensor:
  """[n, ...] to [count, rows, ...], padded by zeros (False in a mask)."""
  missing = count * rows - (tf.shape(x)[0] if x.shape[0] is None else x.shape[0])
  if not isinstance(missing, int) or missing:
    x = tf.pad(x, [[0, missing]] + [[0, 0]] * (x.shape.rank - 1))
  sizes = [tf.shape(x)[i] if size is None else size for i, size in enumerate(x.shape)]
  return tf.reshape(x, [count, rows, *sizes[1:]])


def gram(inner: tf.Tensor, outer: tf.Tensor, magnitude: tf.Tensor) -> tf.Tensor:
  """[n] float64: `sum_tu inner_tu outer_tu` >= 0, from above, where terms cancel.

  A few roundings of `magnitude` [n], the sum of the terms' sizes, are charged.
  """
  total = wide_sum(inner * outer, [1, 2])
  rounding = 4 * eps(inner.dtype)
  return tf.maximum(total, 0) + rounding * magnitude


def product_squares(left: tf.Tensor, right: tf.Tensor, curvature: trees.Tree) -> tf.Tensor:
  """[n] float64: `sum_ij left_i curvature_ij right_j`, with left [n, d] and right [n, p]."""
  if trees.absent(curvature):
    return wide_sum(left) * wide_sum(right)
  return wide_sum(tf.matmul(left, curvature) * right)


def sum_squares(x: tf.Tensor, scale: trees.Tree = ()) -> tf.Tensor:
  """[n] float64: sum of squares of `scale * x[i]`, from above.

  What underflows is charged: at most the smallest normal number for every product.
  """
  size: Any = x.shape[1:].num_elements()
  if size is None:
    size = wide(tf.reduce_prod(tf.shape(x)[1:]))
  axes, small = list(range(1, x.shape.rank)), tiny(x.dtype)
  if trees.absent(scale):
    return wide_sum(tf.square(x), axes) + size * small
  if x.shape[0] == 1:  # A product with one row is slow.
    return wide_sum(tf.square(x * scale), axes) + size * small
  curvature = tf.reshape(tf.square(scale) + small, [1, -1])  # (x^2)' s^2
  squares = tf.reshape(tf.square(x), [-1, curvature.shape[1]])
  total = tf.matmul(curvature, squares, transpose_b=True)[0]
  return wide(total) + (wide_sum(curvature, None) + size) * small


def wide_sum(x: tf.Tensor, axes: Any = 1) -> tf.Tensor:
  return wide(tf.reduce_sum(x, axes))
