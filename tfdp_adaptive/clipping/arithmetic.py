# SPDX-License-Identifier: Apache-2.0
"""Sums of squares of one example, never below the truth by more than rounding."""

from typing import Any, Tuple

import tensorflow as tf

from tfdp_adaptive import trees
from tfdp_adaptive.clipping import protocol

# Beyond this, what a square loses by underflow can count when another multiplies it.
LARGE = 2.0**80


def gram(inner: tf.Tensor, outer: tf.Tensor, magnitude: tf.Tensor) -> tf.Tensor:
  """[n] float64: `sum_tu inner_tu outer_tu` >= 0, from above, where terms cancel.

  A few roundings of `magnitude` [n], the sum of the terms' sizes, are charged.
  """
  total = wide_sum(inner * outer, [1, 2])
  rounding = 4 * protocol.eps(inner.dtype)
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
  size = tf.cast(tf.reduce_prod(tf.shape(x)[1:]), tf.float64)
  axes, small = list(range(1, x.shape.rank)), protocol.tiny(x.dtype)
  if trees.absent(scale):
    return wide_sum(tf.square(x), axes) + size * small
  if x.shape[0] == 1:  # A product with one row is slow.
    return wide_sum(tf.square(x * scale), axes) + size * small
  curvature = tf.reshape(tf.square(scale) + small, [1, -1])  # (x^2)' s^2
  squares = tf.reshape(tf.square(x), [-1, curvature.shape[1]])
  total = tf.matmul(curvature, squares, transpose_b=True)[0]
  return usable(protocol.wide(total) + (wide_sum(curvature, None) + size) * small, *ends(curvature))


def wide_sum(x: tf.Tensor, axes: Any = 1) -> tf.Tensor:
  return protocol.wide(tf.reduce_sum(x, axes))


def usable(norms: tf.Tensor, *sums: Any) -> tf.Tensor:
  """Squared norms [n], infinite where one of the sums they are made of is `LARGE`."""
  for one in sums:
    norms = tf.where(one < LARGE, norms, float('inf'))
  return norms


def ends(curvature: tf.Tensor) -> Tuple[tf.Tensor, tf.Tensor]:
  """Returns the largest square of a scale and its inverse, neither of which may be `LARGE`."""
  top = tf.reduce_max(curvature)
  return top, 1 / top
