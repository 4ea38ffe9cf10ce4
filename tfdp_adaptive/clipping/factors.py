# SPDX-License-Identifier: Apache-2.0
"""Per-example gradients of one variable, in factored form.

A layer's file defines the factors of its gradient. This file computes with them, for the
book-keeping engine: norms in a diagonal geometry, weighted sums, sums of squares; see `protocol`.

Norms are never below the truth by more than rounding. Products of sums are formed in float64. The
smallest normal number is added for squares that underflow. The Gram route adds a bound of its own
cancellation.
"""

import dataclasses
import math
from typing import Any, Hashable, Sequence, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import contract
from tfdp_adaptive import geometry
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import protocol

# Per-example gradients are formed at once if they take at most `KEEP` times the memory of their
# factors and have at least `STEPS` steps: forming costs as much as one more product of these steps.
KEEP = 2.0
STEPS = 64


@dataclasses.dataclass(frozen=True)
class Explicit(protocol.Factor):
  """Holds the materialized gradients of all examples.

  Attributes:
    parts: Tensors [n, ...], mostly one: the gradients with the variable's axes in the order `axes`,
      cut along the first of these axes.
    shape: The variable's shape.
    axes: A permutation, or () for none.
  """

  parts: Tuple[Any, ...]
  shape: Tuple[int, ...]
  axes: Tuple[int, ...] = ()

  def route(self, scaled: bool) -> str:
    del scaled
    return 'explicit'

  def squared_norm(self, scale: trees.Tree = ()) -> tf.Tensor:
    return tf.add_n([protocol.sum_squares(part, piece)
                     for part, piece in zip(self.parts, self._cut(scale))])

  def weighted_sum(self, weights: tf.Tensor) -> tf.Tensor:
    weights = protocol.narrow(weights[tf.newaxis], self.parts[0].dtype)
    sums = [tf.matmul(weights, tf.reshape(part, [-1, math.prod(part.shape[1:])]))
            for part in self.parts]
    return restored(tf.concat(sums, 1), self.shape, self.axes)

  def squared_sum(self, weights: tf.Tensor, scale: trees.Tree = ()) -> tf.Tensor:
    squares = []
    for part, piece in zip(self.parts, self._cut(scale)):
      weighted = part * protocol.along(weights, part)
      weighted = weighted if trees.absent(scale) else weighted * piece
      squares.append(tf.reshape(tf.reduce_sum(tf.square(weighted), 0), [-1]))
    return restored(tf.concat(squares, 0), self.shape, self.axes)

  def folded(self, times: int) -> 'Explicit':
    return dataclasses.replace(self, parts=tuple(
        tf.reduce_sum(tf.reshape(part, [-1, times] + part.shape[1:].as_list()), 1)
        for part in self.parts))

  def explicit(self) -> 'Explicit':
    return self

  def transformed(self, scale: contract.Kronecker) -> 'Explicit':
    return explicit(geometry.by_sides(scale, self.gradient(), self.shape))

  def second_moments(self, view: Tuple[int, int, int], most: int) -> Tuple[tf.Tensor, tf.Tensor]:
    """Returns moments of the gradients themselves, since their factors are unknown."""
    matrices = tf.reshape(self.gradient(), (-1,) + view[1:])
    return (protocol.second_moment(tf.linalg.matrix_transpose(matrices), view[1], most),
            protocol.second_moment(matrices, view[2], most))

  def kin(self) -> Hashable:
    return Explicit

  def joined(self, others: Sequence['Explicit']) -> 'Explicit':  # type: ignore[override]
    return explicit(tf.add_n([part.gradient() for part in (self, *others)]))

  def unit(self) -> Tuple['Explicit', tf.Tensor]:
    size = tf.reduce_max(tf.stack([protocol.peak(part) for part in self.parts]), 0)
    parts = tuple(protocol.divided(part, size) for part in self.parts)
    return dataclasses.replace(self, parts=parts), tf.reshape(protocol.wide(size), [-1])

  def times(self, ratio: tf.Tensor) -> 'Explicit':
    return dataclasses.replace(self, parts=tuple(
        part * protocol.along(ratio, part) for part in self.parts))

  def gradient(self) -> tf.Tensor:
    part = self.parts[0] if len(self.parts) == 1 else tf.stack(self.parts, 1)
    if self.axes:
      part = tf.reshape(part, [-1] + [self.shape[i] for i in self.axes])
      part = tf.transpose(part, [0] + [1 + i for i in np.argsort(self.axes)])
    return tf.reshape(part, (-1,) + self.shape)

  def _cut(self, scale: trees.Tree) -> Sequence[trees.Tree]:
    """Returns the piece of a scale that belongs to each part."""
    if trees.absent(scale):
      return [()] * len(self.parts)
    if self.axes:
      scale = tf.transpose(scale, self.axes)
    pieces = tf.reshape(scale, [len(self.parts)] + self.parts[0].shape[1:].as_list())
    return tf.unstack(pieces)


def explicit(gradient: tf.Tensor) -> Explicit:
  """Returns the `Explicit` of gradients [n, *variable shape]."""
  return Explicit((gradient,), tuple(gradient.shape[1:].as_list()))


def restored(flat: tf.Tensor, shape: Tuple[int, ...], axes: Tuple[int, ...]) -> tf.Tensor:
  """Reshapes a flat variable with axes in the order `axes` to its own order."""
  if not axes:
    return tf.reshape(flat, shape)
  return tf.transpose(tf.reshape(flat, [shape[i] for i in axes]), np.argsort(axes))


@dataclasses.dataclass(frozen=True)
class Outer(protocol.Factor):
  """`sum_t inputs[:, t] (x) cotangents[:, t]`: layers that multiply by a matrix.

  Attributes:
    inputs: [n, T, d].
    cotangents: [n, T, p], gradients of the loss by the product.
    shape: The variable's shape.
    axes: The order of the variable's axes that makes it a [d, p] matrix, or () for their own.
  """

  inputs: Any
  cotangents: Any
  shape: Tuple[int, ...]
  axes: Tuple[int, ...] = ()

  def route(self, scaled: bool) -> str:
    """Returns 'rank one', 'explicit', 'gram' or 'blocks', from static shapes."""
    length, d, p = self.inputs.shape[1], self.inputs.shape[2], self.cotangents.shape[2]
    if length == 1:
      return 'rank one'
    if length is None:
      return 'blocks'
    if d * p <= min(KEEP, length / STEPS) * length * (d + p):
      return 'explicit'
    return 'blocks' if scaled else 'gram'

  def squared_norm(self, scale: trees.Tree = ()) -> tf.Tensor:
    route = self.route(not trees.absent(scale))
    if route == 'rank one':
      return self._rank_one(scale)
    return self._gram() if route == 'gram' else super().squared_norm(scale)

  def products(self) -> protocol.Products:
    left, right = (tf.reduce_sum(tf.square(t), 1) for t in (self.inputs, self.cotangents))
    return tf.shape(self.inputs)[1], lambda scale: protocol.product_squares(
        left, right, scale if trees.absent(scale) else tf.square(self._matrix(scale)))

  def weighted_sum(self, weights: tf.Tensor) -> tf.Tensor:
    inputs, cotangents = self.inputs, self.cotangents
    d, p = inputs.shape[2], cotangents.shape[2]
    if d < p:
      inputs *= protocol.along(weights, inputs)
    else:
      cotangents *= protocol.along(weights, cotangents)
    product = tf.matmul(
        tf.reshape(inputs, [-1, d]), tf.reshape(cotangents, [-1, p]), transpose_a=True)
    return restored(product, self.shape, self.axes)

  def squared_sum(self, weights: tf.Tensor, scale: trees.Tree = ()) -> tf.Tensor:
    """Returns `(s top)^2 * sum_n (w / top)^2 (a^2)(e^2)'` for rank one, in units of examples."""
    if self.route(True) != 'rank one':
      return super().squared_sum(weights, scale)
    unit, size = self.unit()
    squares = Outer(tf.square(unit.inputs), tf.square(unit.cotangents), self.shape, self.axes)
    weights *= size
    top = tf.maximum(tf.reduce_max(weights), 0)
    product = squares.weighted_sum(tf.square(tf.math.divide_no_nan(weights, top)))
    root = top * protocol.wide(tf.sqrt(product))
    root = root if trees.absent(scale) else root * protocol.wide(scale)
    return tf.cast(tf.square(root), product.dtype)

  def transformed(self, scale: contract.Kronecker) -> protocol.Factor:
    _, _, p = geometry.matrices_of(scale, self.shape)
    if not self._ends_in(p):
      return self.explicit().transformed(scale)
    return dataclasses.replace(
        self, inputs=geometry.on_last(self.inputs, scale.left),
        cotangents=geometry.on_last(self.cotangents, scale.right))

  def second_moments(self, view: Tuple[int, int, int], most: int) -> Tuple[tf.Tensor, tf.Tensor]:
    if not self._ends_in(view[2]):
      return self.explicit().second_moments(view, most)
    return (protocol.second_moment(self.inputs, view[1], most),
            protocol.second_moment(self.cotangents, view[2], most))

  def _ends_in(self, p: int) -> bool:
    """Returns whether the cotangents are of the variable's last axes, of p numbers together."""
    return not self.axes and self.cotangents.shape[2] == p

  def kin(self) -> Hashable:
    return Outer, self.axes, self.inputs.shape[2]

  def unit(self) -> Tuple['Outer', tf.Tensor]:
    """Scales step by step, since the largest inputs need not meet the largest cotangents."""
    inputs, cotangents = protocol.peak(self.inputs, 2), protocol.peak(self.cotangents, 2)
    sizes = protocol.wide(inputs) * protocol.wide(cotangents)  # [n, T, 1]
    size = tf.reduce_max(sizes, 1, keepdims=True)
    ratios = tf.cast(protocol.divided(sizes, size), self.cotangents.dtype)
    return dataclasses.replace(
        self, inputs=protocol.divided(self.inputs, inputs),
        cotangents=protocol.divided(self.cotangents, cotangents) * ratios
        ), tf.reshape(size, [-1])

  def explicit(self) -> 'Explicit':
    axes = self.axes or tuple(range(len(self.shape)))
    if self.inputs.shape[2] <= self.cotangents.shape[2]:
      product = tf.matmul(self.inputs, self.cotangents, transpose_a=True)
    else:  # The product is faster with the short side first.
      product = tf.matmul(self.cotangents, self.inputs, transpose_a=True)
      axes = axes[self._rows():] + axes[:self._rows()]
    axes = () if axes == tuple(sorted(axes)) else axes
    return Explicit((product,), self.shape, axes)

  def _rows(self) -> int:
    """Returns the number of the variable's permuted axes that make up d."""
    sizes = [self.shape[i] for i in self.axes or range(len(self.shape))]
    return next(i for i in range(len(sizes) + 1)
                if int(np.prod(sizes[:i])) == self.inputs.shape[2]
                and int(np.prod(sizes[i:])) == self.cotangents.shape[2])

  def _rank_one(self, scale: trees.Tree) -> tf.Tensor:
    """Returns `||S * a e'||^2 = (a^2)' S^2 (e^2)`, with a bound of what products may lose."""
    a, e = self.inputs[:, 0], self.cotangents[:, 0]
    if trees.absent(scale):
      return protocol.sum_squares(a) * protocol.sum_squares(e)
    small, d, p = protocol.tiny(a.dtype), a.shape[1], e.shape[1]
    left, right = tf.square(a) + small, tf.square(e) + small
    curvature, sums = tf.square(self._matrix(scale)), tf.reduce_sum(left, 1)
    rows = tf.matmul(left, curvature) + small * (sums[:, tf.newaxis] + d)
    return protocol.wide(tf.reduce_sum(rows * right, 1) + p * small)

  def _gram(self) -> tf.Tensor:
    """Returns `||sum_t a_t e_t'||^2 = sum_{tu} (a_t'a_u)(e_t'e_u)`."""
    inner = tf.matmul(self.inputs, self.inputs, transpose_b=True)
    outer = tf.matmul(self.cotangents, self.cotangents, transpose_b=True)
    a, e = tf.linalg.diag_part(inner), tf.linalg.diag_part(outer)
    lengths = tf.reduce_sum(tf.sqrt(a) * tf.sqrt(e), 1)
    size = self.inputs.shape[1] * (self.inputs.shape[2] + self.cotangents.shape[2])
    a, e = protocol.wide_sum(a), protocol.wide_sum(e)
    lost = size * protocol.tiny(inner.dtype) * (a + e + 1)
    norms = protocol.gram(inner, outer, tf.square(protocol.wide(lengths)))
    return norms + lost

  def _matrix(self, scale: trees.Tree) -> tf.Tensor:
    scale = tf.transpose(scale, self.axes) if self.axes else scale
    return tf.reshape(scale, [self.inputs.shape[2], self.cotangents.shape[2]])
