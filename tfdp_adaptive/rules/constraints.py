# SPDX-License-Identifier: Apache-2.0
"""Projections of parameters onto boxes and balls, in the metric of a preconditioner."""

from typing import Any, Callable, Optional, Tuple

import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import trees

Box = Tuple[float, float]  # Lowest and highest value of every parameter.


def check(box: Optional[Box], radius: Optional[float]) -> None:
  """Raises if both constraints are given, or one is not valid."""
  if box is not None and radius is not None:
    raise ValueError('At most one of `box` and `radius` may be given. '
                     f'Received: box={box}, radius={radius}.')
  if radius is not None:
    checks.positive(radius=radius)
  checks.require(
      box is None or (isinstance(box, (tuple, list)) and len(box) == 2
                      and all(map(checks.is_number, box)) and box[0] < box[1]),
      'be a pair (low, high) with low < high', box=box)


def projection(
    box: Optional[Box], radius: Optional[float],
    weights: Callable[[Any, trees.Tree], trees.Tree]) -> Optional[Callable[..., trees.Tree]]:
  """Returns `Rule.project` into a box or a ball, in a metric `(state, params) -> weights`."""
  if box is not None:
    # It is the nearest point in any diagonal metric.
    return lambda state, params: trees.map(lambda y: tf.clip_by_value(y, *box), params)
  if radius is None:
    return None
  return lambda state, params: trees.unflatten(into_ball_weighted(
      radius, trees.flatten(weights(state, params)), trees.flatten(params)), params)


def into_ball_weighted(radius: float, weights: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
  """Returns [m], argmin of `sum h_j (x_j - y_j)^2` over `||x|| <= radius`, for h >= 0.

  Coordinates with h = 0 are treated as the limit of h + eps. They share the part of the ball that
  the others leave. The others are `x = h y / (h + lam)`, with lam > 0 by Newton's method on `1 /
  ||x||`. This function is concave in lam, so the iteration increases to the root from zero.
  """
  weighted = weights > 0
  inner, rest = tf.where(weighted, y, 0), tf.where(weighted, tf.zeros_like(y), y)
  inner_norm, rest_norm = tf.norm(inner), tf.norm(rest)
  left = tf.sqrt(tf.maximum(radius**2 - tf.square(inner_norm), 0))
  rest *= tf.math.divide_no_nan(tf.minimum(rest_norm, left), rest_norm)
  h = tf.math.divide_no_nan(weights, tf.reduce_max(weights))

  def shrunk(lam: tf.Tensor) -> tf.Tensor:
    return tf.math.divide_no_nan(h * inner, h + lam)

  def newton(step: tf.Tensor, lam: tf.Tensor) -> Tuple[tf.Tensor, tf.Tensor]:
    x = shrunk(lam)
    norm = tf.norm(x)
    slope = tf.math.divide_no_nan(
        tf.reduce_sum(tf.math.divide_no_nan(tf.square(x), h + lam)), tf.square(norm))
    return step + 1, lam + tf.math.divide_no_nan(tf.maximum(norm / radius - 1, 0), slope)

  _, lam = tf.while_loop(
      lambda step, lam: step < 16, newton, (tf.constant(0), tf.zeros([], y.dtype)))
  return tf.clip_by_norm(shrunk(lam) + rest, radius)
