# SPDX-License-Identifier: Apache-2.0
"""The protocol of factors: how the engine uses the factored gradient of a variable.

A factor is a frozen dataclass of [n, ...] tensors, the examples along the first axis, and static
fields. The kinds are `factors.Explicit`, `factors.Outer`, `rows.Rows`, `rows.Mixed` and
`layers.convolution.Convolution`. To add a kind, write the members of `Factor`; nothing else in the
engine depends on the kind.

A `scale` is `()` or a tensor of the variable's shape. Weights are [n] float64.
"""

import abc
import dataclasses
import math
from typing import Any, Callable, Hashable, Iterable, List, Optional, Sequence, Tuple, Union

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import contract
from tfdp_adaptive import trees

_EPS_OF_TF32 = 2.0**-10
Size = Union[int, tf.Tensor]
# Largest number of bytes of per-example gradients that are formed at once.
BLOCK_BYTES = 4 * 2**20
Products = Tuple[tf.Tensor, Callable[[trees.Tree], tf.Tensor]]  # See `Factor.products`.


class Factor(abc.ABC):
  """The gradients of n examples by one variable of shape `shape`."""

  shape: Tuple[int, ...]

  @abc.abstractmethod
  def route(self, scaled: bool) -> str:
    """Returns the route by which norms are computed, from static shapes."""

  def squared_norm(self, scale: trees.Tree = ()) -> tf.Tensor:
    """Returns [n] float64 squared norms, at least the true ones up to rounding.

    By default, it forms the gradients of some examples at a time. Numbers are so small that no
    square or product of them overflows; see `bookkeeping.norms_of`.
    """
    formed = in_blocks(lambda one: one.explicit().squared_norm(scale), self)
    return charged(formed, self, scale)

  def products(self) -> Products:
    """Returns `(count, squares)` of the products that each number of a gradient adds up.

    `squares(scale)` is an [n] float64, at least the squared norm of the same gradient made
    of magnitudes. Only for factors whose norms take another order than their sums.
    """
    raise NotImplementedError(f'Received: {type(self).__name__}.')

  @abc.abstractmethod
  def weighted_sum(self, weights: tf.Tensor) -> tf.Tensor:
    """Returns `sum_n weights[n] * gradient[n]`."""

  def squared_sum(self, weights: tf.Tensor, scale: trees.Tree = ()) -> tf.Tensor:
    """Returns `sum_n (scale * weights[n] * gradient[n])**2`; no other square is formed."""
    return sum_blocks(lambda one, w: one.explicit().squared_sum(w, scale), self, weights)

  def folded(self, times: int) -> 'Factor':
    """Returns the factor whose examples are sums of `times` consecutive examples of this.

    By default, their steps become the steps of one example.
    """
    return rebuilt(self, [fold(t, times) for t in tensors(self)])

  @abc.abstractmethod
  def explicit(self) -> 'Factor':
    """Returns the factor as a `factors.Explicit`."""

  def gradient(self) -> tf.Tensor:
    """Returns the gradients, [n, *shape]."""
    return self.explicit().gradient()

  def transformed(self, scale: contract.Kronecker) -> 'Factor':
    """Returns the factor of the gradients `left W right'`."""
    return self.explicit().transformed(scale)

  def second_moments(self, view: Tuple[int, int, int], most: int) -> Tuple[tf.Tensor, tf.Tensor]:
    """Averages `a a'` and `e e'` over all products `a e'` that the gradients add up.

    Args:
      view: `(count, d, p)`, the variable as matrices; see `rules.kronecker`.
      most: Longest side whose whole matrix is returned; longer sides have diagonals.
    """
    return self.explicit().second_moments(view, most)

  def simplified(self) -> 'Factor':
    """Returns the factor, as whole gradients if these are faster for everything that follows."""
    return self.explicit() if self.route(True) == 'explicit' else self

  def kin(self) -> Hashable:
    """Returns the key that factors of one variable must share to be `joined`; see `rows.add`."""
    return id(self)

  def joined(self, others: Sequence['Factor']) -> 'Factor':
    """Returns the sum of this factor and of others with the same `kin`, as more steps."""
    columns = zip(*map(tensors, (self, *others)))
    return rebuilt(self, [tf.concat(column, 1) for column in columns])

  def unit(self) -> Tuple['Factor', tf.Tensor]:
    """Returns `(factor, size)`, the factor divided by its largest magnitude `size`, [n] float64.

    If one tensor of an example is zero, so are its gradient and its size, whatever the other
    tensors are.
    """
    parts = tensors(self)
    peaks = [peak(t) if t.dtype.is_floating else None for t in parts]
    size = tf.ones([], tf.float64)
    for one in peaks:
      size = size if one is None else size * tf.reshape(wide(one), [-1])
    return rebuilt(self, [
        t if one is None else divided(t, one) for t, one in zip(parts, peaks)]), size

  def times(self, ratio: tf.Tensor) -> 'Factor':
    """Returns the factor of the gradients multiplied by `ratio` [n]."""
    parts = tensors(self)
    last = max(i for i, t in enumerate(parts) if t.dtype.is_floating)
    parts[last] *= along(ratio, parts[last])
    return rebuilt(self, parts)


# A factor, None, or tuples of them.
Parts = Union[Factor, None, Tuple[Any, ...]]


def wide(x: tf.Tensor) -> tf.Tensor:
  return tf.cast(x, tf.float64)


def second_moment(x: tf.Tensor, size: int, most: int) -> tf.Tensor:
  """Averages `v v'` over pieces v of the last axis of x: [size, size], or the diagonal."""
  pieces = tf.reshape(x, [-1, size])
  if size > most:
    return tf.reduce_mean(tf.square(pieces), 0)
  count = tf.cast(tf.shape(pieces)[0], pieces.dtype)
  return tf.matmul(pieces, pieces, transpose_a=True) / tf.maximum(count, 1)


def peak(x: tf.Tensor, first: int = 1) -> tf.Tensor:
  """Returns largest magnitudes over all but the `first` axes, which stay; infinite for NaN."""
  sizes = tf.where(tf.math.is_finite(x), tf.abs(x), float('inf'))
  return tf.reduce_max(sizes, list(range(first, x.shape.rank)), keepdims=True)


def divided(x: tf.Tensor, peaks: tf.Tensor) -> tf.Tensor:
  """Divides `x` by its peaks; zero where they are zero or not finite."""
  return tf.math.divide_no_nan(x, tf.where(tf.math.is_finite(peaks), peaks, 0))


def tiny(dtype: tf.DType) -> float:
  return float(np.finfo(dtype.as_numpy_dtype).tiny)


def eps(dtype: tf.DType) -> float:
  """Returns twice the relative rounding of products, as `np.finfo` defines it.

  On a GPU, TensorFlow may multiply float32 matrices in TF32, unless
  `tf.config.experimental.enable_tensor_float_32_execution(False)` was called.
  """
  if dtype == tf.float32 and tf.config.list_physical_devices('GPU') and (
      tf.config.experimental.tensor_float_32_execution_enabled()):
    return _EPS_OF_TF32
  return float(np.finfo(dtype.as_numpy_dtype).eps)


def charged(norm: tf.Tensor, factor: Factor, scale: trees.Tree) -> tf.Tensor:
  """Adds to a squared norm the rounding error of terms that cancel.

  Weighted sums add the same products in another order. A record whose terms cancel in its norm
  must not reappear in a sum, or absorb other records, by more than its clip norm.
  """
  count, squares = factor.products()
  lost = (wide(count) + 4) * rounding(factor)
  return norm + lost**2 * squares(scale)


def rounding(factor: Factor) -> float:
  """Returns the relative rounding of the coarsest tensor of a factor."""
  dtypes = [t.dtype for t in tensors(factor) if t.dtype.is_floating]
  return eps(min(dtypes, key=lambda one: one.size))


def along(weights: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
  """Reshapes [n] weights to multiply x [n, ...]."""
  return tf.reshape(narrow(weights, x.dtype), [-1] + [1] * (x.shape.rank - 1))


def narrow(weights: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
  """Casts float64 weights to `dtype`; weights that it would round up by much become zero."""
  return tf.cast(tf.where(weights < tiny(dtype), tf.zeros_like(weights), weights), dtype)


def tensors(factor: Parts) -> List[tf.Tensor]:
  """Returns the [n, ...] tensors of factors."""
  found: List[tf.Tensor] = []

  def note(tensor: tf.Tensor) -> tf.Tensor:
    found.append(tensor)
    return tensor

  _mapped(note, factor)
  return found


def rebuilt(factor: Parts, values: Iterable[tf.Tensor]) -> Any:
  """Returns factors with other tensors, in the order of `tensors(factor)`."""
  values = iter(values)
  return _mapped(lambda _: next(values), factor)


def _mapped(function: Callable[[tf.Tensor], tf.Tensor], node: Parts) -> Any:
  if tf.is_tensor(node):
    return function(node)
  if isinstance(node, tuple):
    return tuple(_mapped(function, one) for one in node)
  if dataclasses.is_dataclass(node) and not isinstance(node, type):
    return dataclasses.replace(node, **{
        name: _mapped(function, value) for name, value in vars(node).items()})
  return node


def fold(x: tf.Tensor, times: Size) -> tf.Tensor:
  """Reshapes [n * times, T, ...] to [n, times * T, ...]."""
  if isinstance(times, int) and times == 1:
    return x
  return tf.reshape(x, [-1, times * sizes(x)[1]] + x.shape[2:].as_list())


def in_blocks(
    function: Callable[..., tf.Tensor], factor: Factor,
    numbers: Optional[int] = None) -> tf.Tensor:
  """Joins the results of `function: factor -> [n]` over blocks of examples.

  `numbers` is how many `function` forms per example, by default those of the gradient.
  """
  n, parts = cut(tensors(factor), numbers or math.prod(factor.shape))
  if parts[0].shape[0] == 1:
    return function(factor)
  block = compat.unconverted(lambda i: function(rebuilt(factor, [x[i] for x in parts])))
  norms = tf.map_fn(block, tf.range(tf.shape(parts[0])[0]), parallel_iterations=1,
                    fn_output_signature=tf.float64)  # [blocks, rows]
  return tf.reshape(norms, [-1])[:n]


def sum_blocks(
    function: Callable[..., tf.Tensor], factor: Factor, weights: tf.Tensor) -> tf.Tensor:
  """Adds the results of `function: (factor, weights) -> sum` over blocks of examples."""
  values = tensors(factor)
  _, parts = cut([*values, weights], math.prod(factor.shape))
  if parts[0].shape[0] == 1:
    return function(factor, weights)

  def step(total: tf.Tensor, i: tf.Tensor) -> tf.Tensor:
    *block, own = [x[i] for x in parts]
    return total + function(rebuilt(factor, block), own)

  return tf.foldl(step, tf.range(tf.shape(parts[0])[0]),
                  tf.zeros(factor.shape, values[-1].dtype), parallel_iterations=1)


def cut(
    values: Sequence[tf.Tensor], numbers: int,
    limit: int = BLOCK_BYTES) -> Tuple[Size, List[tf.Tensor]]:
  """Returns `(n, values)`, values [n, ...] padded and cut to [blocks, rows, ...].

  A block of rows of `numbers` each takes at most `limit` bytes, or has one row.
  """
  most = max(1, limit // (4 * numbers))
  n = values[0].shape[0]
  if n is None:
    n = tf.shape(values[0])[0]
    rows = 1 if most == 1 else tf.minimum(most, tf.maximum(n, 1))
  else:
    rows = -(-max(n, 1) // -(-max(n, 1) // most))  # The same number of blocks, of about equal size.
  return n, [split(x, -(-n // rows), rows) for x in values]


def split(x: tf.Tensor, count: Size, rows: Size) -> tf.Tensor:
  """Splits [n, ...] to [count, rows, ...], padded by zeros (False in a mask)."""
  n, *rest = sizes(x)
  missing = count * rows - n
  if not isinstance(missing, int) or missing:
    x = tf.pad(x, [[0, missing]] + [[0, 0]] * (x.shape.rank - 1))
  return tf.reshape(x, [count, rows, *rest])


def sizes(x: tf.Tensor) -> List[Size]:
  """Returns the length of every axis, a tensor where it is not static."""
  return [tf.shape(x)[i] if size is None else size for i, size in enumerate(x.shape)]


def gram(inner: tf.Tensor, outer: tf.Tensor, magnitude: tf.Tensor) -> tf.Tensor:
  """Returns an upper bound of `sum_tu inner_tu outer_tu` >= 0, [n] float64.

  It adds some roundings of `magnitude` [n], the sum of the terms' sizes, since terms may cancel.
  """
  total = wide_sum(inner * outer, [1, 2])
  return tf.maximum(total, 0) + 4 * eps(inner.dtype) * magnitude


def product_squares(left: tf.Tensor, right: tf.Tensor, curvature: trees.Tree) -> tf.Tensor:
  """Returns `sum_ij left_i curvature_ij right_j`, [n] float64, for left [n, d], right [n, p]."""
  if trees.absent(curvature):
    return wide_sum(left) * wide_sum(right)
  return wide_sum(tf.matmul(left, curvature) * right)


def sum_squares(x: tf.Tensor, scale: trees.Tree = ()) -> tf.Tensor:
  """Returns an upper bound of the sum of squares of `scale * x[i]`, [n] float64.

  It adds the smallest normal number for every product, since products may underflow.
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


def wide_sum(x: tf.Tensor, axes: Union[int, List[int], None] = 1) -> tf.Tensor:
  return wide(tf.reduce_sum(x, axes))
