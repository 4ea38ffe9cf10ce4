# SPDX-License-Identifier: Apache-2.0
"""Small numerics that rules share."""

import math

import tensorflow as tf

from tfdp_adaptive import trees


def first_step() -> tf.Tensor:
  return tf.zeros([], tf.int64)


def decayed(beta: float, moment: trees.Tree, value: trees.Tree) -> trees.Tree:
  """Returns the exponential moving average `beta * moment + (1 - beta) * value`."""
  return trees.map(lambda m, x: beta * m + (1 - beta) * x, moment, value)


def normalizer(beta: float, step: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
  """Returns `1 - beta**step`, by which an average that started at zero is divided.

  It is computed as `-expm1(step * log(beta))`, because float32 powers lose half their digits near
  one.
  """
  if beta == 0:
    return tf.ones([], dtype)
  return -tf.math.expm1(tf.cast(step, dtype) * tf.constant(math.log(beta), dtype))


def safe_divide(numerator: tf.Tensor, denominator: tf.Tensor) -> tf.Tensor:
  """Returns `numerator / denominator` with 0/0 := 0."""
  return tf.math.divide_no_nan(numerator, denominator)


def stored(state: trees.Tree, like: trees.Tree) -> trees.Tree:
  """Returns a public state, computed in float32, in the dtypes of another tree."""
  dtype = trees.dtype_of(like)
  return trees.map(lambda t: tf.cast(t, dtype) if t.dtype.is_floating else t, state)
