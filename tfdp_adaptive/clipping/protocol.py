# SPDX-License-Identifier: Apache-2.0
"""The protocol of factors: how the engine uses the factored gradient of a variable.

A factor is a frozen dataclass of [n, ...] tensors, the examples along the first axis,
and static fields. The kinds are `factors.Explicit`, `factors.Outer`, `rows.Rows`,
`tied.Mixed` and `layers.convolution.Convolution`; whoever adds one writes down these
members, and nothing else in the engine has to know of it.

A `scale` is `()` or a tensor of the variable's shape; several scales or weights share
the work. Weights are [n] float64.
"""

import abc
from typing import Any, Callable, Sequence, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import contract
from tfdp_adaptive.clipping import blocks

_EPS_OF_TF32 = 2.0**-10
Tensors = Sequence[tf.Tensor]
Scales = Sequence[Any]  # Of each, `()` or a tensor.
Products = Tuple[Any, Callable[[Any], tf.Tensor]]  # See `Factor.products`.


class Factor(abc.ABC):
  """The gradients of n examples by one variable of shape `shape`."""

  shape: Tuple[int, ...]

  @abc.abstractmethod
  def route(self, scaled: bool) -> str:
    """Returns the route by which norms are computed, from static shapes."""

  @abc.abstractmethod
  def squared_norms(self, scales: Scales) -> Tensors:
    """Returns one [n] float64 tensor per scale, at least the true norm up to rounding.

    Squares that overflow give what is not finite, and so do those so large that what
    underflows beside them could count; see `overflow`.
    """

  def products(self) -> Products:
    """`(count, squares)` of the products that each number of a gradient adds up.

    `squares(scale)` is an [n] float64, at least the squared norm of the same gradient made
    of magnitudes. Only for factors whose norms take another order than their sums.
    """
    raise NotImplementedError(f'Received: {type(self).__name__}.')

  @abc.abstractmethod
  def weighted_sums(self, weights: Tensors) -> Tensors:
    """Returns `sum_n weights[n] * gradient[n]` for each of the weights."""

  @abc.abstractmethod
  def squared_sums(self, weights: Tensors, scales: Scales) -> Tensors:
    """Per pair: `sum_n (scale * weights[n] * gradient[n])**2`; no other square is formed."""

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
    return self

  def kin(self) -> Any:
    """Returns the key that factors of one variable must share to be `joined`; see `tied`."""
    return id(self)

  def joined(self, others: Sequence[Any]) -> 'Factor':
    """The sum of this and its kin: theirs are more steps."""
    columns = zip(*map(blocks.tensors, (self, *others)))
    return blocks.rebuilt(self, [tf.concat(column, 1) for column in columns])

  def unit(self) -> Tuple['Factor', tf.Tensor]:
    """`(factor, size)`: brought to a largest magnitude of about one; size is [n] float64.

    If one tensor of an example is zero, so is the gradient, and the result is zero: the other
    tensors then say nothing about its size.
    """
    tensors = blocks.tensors(self)
    peaks = [peak(t) if t.dtype.is_floating else None for t in tensors]
    size = tf.ones(tf.shape(tensors[0])[:1], tf.float64)
    for one in peaks:
      size = size if one is None else size * wide(one)
    return blocks.rebuilt(self, [
        t if one is None else divided(t, one) for t, one in zip(tensors, peaks)]), size

  def times(self, ratio: tf.Tensor) -> 'Factor':
    """The gradients of each example multiplied by `ratio` [n]."""
    tensors = blocks.tensors(self)
    last = max(i for i, t in enumerate(tensors) if t.dtype.is_floating)
    tensors[last] *= along(ratio, tensors[last])
    return blocks.rebuilt(self, tensors)


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
  """Largest magnitudes over all axes but the `first` ones."""
  return tf.reduce_max(tf.abs(x), list(range(first, x.shape.rank)))


def divided(x: tf.Tensor, peaks: tf.Tensor) -> tf.Tensor:
  """`x` by its peaks, zeros where these are zero."""
  peaks = tf.reshape(peaks, tf.concat([
      tf.shape(peaks), tf.ones([x.shape.rank - peaks.shape.rank], tf.int32)], 0))
  return x / tf.where(peaks > 0, peaks, tf.ones_like(peaks))


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
  dtype = min((t.dtype for t in blocks.tensors(factor) if t.dtype.is_floating),
              key=lambda one: one.size)
  lost = (wide(count) + 4) * eps(dtype)
  return [norm + lost**2 * squares(scale) for norm, scale in zip(norms, scales)]


def along(weights: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
  """[n] weights shaped to multiply x [n, ...]."""
  return tf.reshape(narrow(weights, x.dtype), [-1] + [1] * (x.shape.rank - 1))


def narrow(weights: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
  """float64 weights in `dtype`; zero where that would round them up by much."""
  return tf.cast(tf.where(weights < tiny(dtype), tf.zeros_like(weights), weights), dtype)
