# SPDX-License-Identifier: Apache-2.0
"""Scales gradients into the space in which records are clipped and noised, and back.

The scale of a variable is a tensor of its shape, by which it is multiplied, or a
`contract.Kronecker`. The scale of a tree is a tree of them, or `()` for no scale.
"""

import itertools
import operator
from typing import Sequence, Tuple

import tensorflow as tf

from tfdp_adaptive import contract
from tfdp_adaptive import trees


def rescale(tree: trees.Tree, scale: trees.Tree) -> trees.Tree:
  """Takes a gradient into the scaled space: `scale * tree`."""
  return tree if trees.absent(scale) else trees.map(times, scale, tree)


def unscale(tree: trees.Tree, scale: trees.Tree) -> trees.Tree:
  """Takes a release out of the scaled space: `tree / scale`."""
  return tree if trees.absent(scale) else trees.map(over, tree, scale)


def times(scale: trees.Leaf, x: tf.Tensor) -> tf.Tensor:
  """Returns a variable `x` in the scaled space."""
  if not isinstance(scale, contract.Kronecker):
    return tf.multiply(scale, x)
  return by_sides(scale, x, x.shape)


def by_sides(scale: contract.Kronecker, x: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
  """Returns `left W right'` of every variable W of a shape in `x`, which is one or [n, ...]."""
  matrices = tf.reshape(x, (-1,) + matrices_of(scale, shape)[1:])
  by_left = on_last(tf.linalg.matrix_transpose(matrices), scale.left)
  both = on_last(tf.linalg.matrix_transpose(by_left), scale.right)
  return tf.ensure_shape(tf.reshape(both, tf.shape(x)), x.shape)


def over(x: tf.Tensor, scale: trees.Leaf) -> tf.Tensor:
  """Returns a variable mapped back from the scaled space."""
  if not isinstance(scale, contract.Kronecker):
    return tf.divide(x, scale)
  return times(contract.Kronecker(_inverse(scale.left), _inverse(scale.right)), x)


def is_kronecker(scale: trees.Tree) -> bool:
  """Returns whether the scale of any variable is a `Kronecker`."""
  return any(isinstance(leaf, contract.Kronecker) for leaf in tf.nest.flatten(scale))


def packed(scale: trees.Tree) -> trees.Tree:
  """Returns a scale as tensors only, to send: one per variable, or two sides."""
  return () if trees.absent(scale) else tuple(
      (leaf.left, leaf.right) if isinstance(leaf, contract.Kronecker) else (leaf,)
      for leaf in tf.nest.flatten(scale))


def unpacked(scale: trees.Tree, like: trees.Tree) -> trees.Tree:
  """Returns the scale that was `packed`, with the structure of `like`."""
  return tf.nest.pack_sequence_as(like, [
      contract.Kronecker(*leaf) if len(leaf) == 2 else leaf[0] for leaf in scale]) if scale else ()


def matrices_of(scale: contract.Kronecker, shape: Sequence[int]) -> Tuple[int, int, int]:
  """Returns `(count, d, p)`: a variable of a shape as `count` matrices [d, p].

  Raises:
    ValueError: If the sides are not square, or do not fit the variable.
  """
  sizes = []
  for side in (scale.left, scale.right):
    axes = side.shape.as_list()
    if len(axes) not in (1, 2) or None in axes or axes[0] != axes[-1]:
      raise ValueError('A side of a `Kronecker` must be a square matrix, or a vector for a '
                       f'diagonal one. Received: shape={axes}.')
    sizes.append(axes[0])
  d, p = sizes
  shape = [int(size) for size in shape]
  ends = list(itertools.accumulate(shape[::-1], operator.mul, initial=1))
  if p not in ends or d * p not in ends[ends.index(p):]:
    raise ValueError(
        'The right side of a `Kronecker` must be of the size of the last axes of its variable, '
        'the left one of that of axes before them. '
        f'Received: left of size {d}, right of size {p}, for a variable of shape {shape}.')
  return ends[-1] // (d * p), d, p


def on_last(x: tf.Tensor, side: tf.Tensor) -> tf.Tensor:
  """Multiplies by a side [d, d] or [d] every piece of d numbers along the last axis of `x`."""
  side = tf.cast(side, x.dtype)
  pieces = tf.reshape(x, [-1, side.shape[0]])
  product = pieces * side if side.shape.rank == 1 else tf.matmul(pieces, side, transpose_b=True)
  return tf.ensure_shape(tf.reshape(product, tf.shape(x)), x.shape)


def _inverse(side: tf.Tensor) -> tf.Tensor:
  return 1 / side if side.shape.rank == 1 else tf.linalg.inv(side)
