# SPDX-License-Identifier: Apache-2.0
"""Per-example gradients of one variable, kept in factored form.

A layer's file says what the factors of its gradient are; here is what the
book-keeping engine does with them: norms in a diagonal geometry, sums weighted
per example, sums of squares; see `protocol`.

Norms are never below the truth by more than rounding: products of sums are formed
in float64, squares that underflow are charged at the smallest normal number, and the
Gram route adds a bound of its own cancellation.
"""

import collections
import dataclasses
import math
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import contract
from tfdp_adaptive import geometry
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import protocol

# Per-example gradients are formed and kept when they take at most this many
# times the memory of their factors, and this many steps or more make up one of
# them: forming costs as much as multiplying by that many steps once more.
KEEP = 2.0
STEPS = 64

# Variables of at most `SMALL` numbers are clipped in bundles: copying larger ones takes longer than
# it saves. A bundle of `FULL` numbers takes no more, since its gradients are held twice at first.
SMALL, FULL = 2**12, 2**15
Bundle = Tuple[int, ...]  # Places of variables; most have one.


@dataclasses.dataclass(frozen=True)
class Explicit(protocol.Factor):
  """The gradients themselves.

  Attributes:
    parts: Tensors [n, ...]: the variable, with its axes in the order `axes`, cut along the first
      of them; mostly a single one.
    shape: The variable's shape.
    axes: A permutation, or () for none.
  """

  parts: Tuple[Any, ...]
  shape: Tuple[int, ...]
  axes: Tuple[int, ...] = ()

  def route(self, scaled: bool) -> str:
    del scaled
    return 'explicit'

  def formed(self, n: int, scaled: bool) -> int:
    return n * math.prod(self.shape)

  def squared_norms(self, scales: protocol.Scales) -> protocol.Tensors:
    norms = []
    for scale in scales:
      pieces = [()] * len(self.parts) if trees.absent(scale) else self._cut(scale)
      norms.append(tf.add_n([protocol.sum_squares(part, piece)
                             for part, piece in zip(self.parts, pieces)]))
    return norms

  def weighted_sums(self, weights: protocol.Tensors) -> protocol.Tensors:
    flat = [tf.reshape(p, [-1, int(np.prod(p.shape[1:].as_list()))]) for p in self.parts]
    weights = protocol.narrow(tf.stack(weights), flat[0].dtype)
    sums = tf.concat([tf.matmul(weights, part) for part in flat], 1)
    return [restored(one, self.shape, self.axes)
            for one in tf.unstack(sums, weights.shape[0])]

  def squared_sums(self, weights: protocol.Tensors, scales: protocol.Scales) -> protocol.Tensors:
    sums = []
    for weight, scale in zip(weights, scales):
      squares = []
      for part, piece in zip(self.parts, [()] * len(self.parts) if trees.absent(scale)
                             else self._cut(scale)):
        weighted = part * protocol.along(weight, part)
        weighted = weighted if trees.absent(scale) else weighted * piece
        squares.append(tf.reshape(tf.reduce_sum(tf.square(weighted), 0), [-1]))
      sums.append(restored(tf.concat(squares, 0), self.shape, self.axes))
    return sums

  def folded(self, times: int) -> 'Explicit':
    def fold(part: tf.Tensor) -> tf.Tensor:
      return tf.reduce_sum(tf.reshape(part, [-1, times] + part.shape[1:].as_list()), 1)
    return dataclasses.replace(self, parts=tuple(fold(part) for part in self.parts))

  def explicit(self) -> 'Explicit':
    return self

  def transformed(self, scale: contract.Kronecker) -> 'Explicit':
    gradient = self.gradient()
    _, d, p = geometry.matrices_of(scale, self.shape)
    matrices = tf.reshape(gradient, [-1, d, p])
    by_right = tf.linalg.matrix_transpose(geometry.on_last(matrices, scale.right))
    both = tf.linalg.matrix_transpose(geometry.on_last(by_right, scale.left))
    both = tf.ensure_shape(tf.reshape(both, tf.shape(gradient)), gradient.shape)
    return explicit(both)

  def second_moments(self, view: Tuple[int, int, int], most: int) -> Tuple[tf.Tensor, tf.Tensor]:
    """Uses the gradients themselves, since their factors are unknown."""
    matrices = tf.reshape(self.gradient(), (-1,) + view[1:])
    return (protocol.second_moment(tf.linalg.matrix_transpose(matrices), view[1], most),
            protocol.second_moment(matrices, view[2], most))

  def kin(self) -> Any:
    return Explicit

  def joined(self, others: Sequence[Any]) -> 'Explicit':
    return explicit(tf.add_n([part.gradient() for part in (self, *others)]))

  def unit(self) -> Tuple['Explicit', tf.Tensor]:
    size = tf.reduce_max(tf.stack([protocol.peak(part) for part in self.parts]), 0)
    parts = tuple(protocol.divided(part, size) for part in self.parts)
    return dataclasses.replace(self, parts=parts), tf.reshape(protocol.wide(size), [-1])

  def times(self, ratio: tf.Tensor) -> 'Explicit':
    return dataclasses.replace(self, parts=tuple(
        part * protocol.along(ratio, part) for part in self.parts))

  def gradient(self) -> tf.Tensor:
    """[n, *shape]."""
    part = self.parts[0] if len(self.parts) == 1 else tf.stack(self.parts, 1)
    if self.axes:
      part = tf.reshape(part, [-1] + [self.shape[i] for i in self.axes])
      part = tf.transpose(part, [0] + [1 + i for i in np.argsort(self.axes)])
    return tf.reshape(part, (-1,) + self.shape)

  def _cut(self, scale: trees.Tree) -> List[tf.Tensor]:
    if self.axes:
      scale = tf.transpose(scale, self.axes)
    pieces = tf.reshape(scale, [len(self.parts)] + self.parts[0].shape[1:].as_list())
    return tf.unstack(pieces)


def explicit(gradient: tf.Tensor) -> Explicit:
  """The `Explicit` of gradients [n, *variable shape]."""
  return Explicit((gradient,), tuple(gradient.shape[1:].as_list()))


def restored(flat: tf.Tensor, shape: Tuple[int, ...], axes: Tuple[int, ...]) -> tf.Tensor:
  """A flat variable whose axes lie in the order `axes`, in its own order."""
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
    axes: Order of the variable's axes in which it is a [d, p] matrix.
  """

  inputs: Any
  cotangents: Any
  shape: Tuple[int, ...]
  axes: Tuple[int, ...] = ()

  def route(self, scaled: bool) -> str:
    """'rank one', 'explicit', 'gram' or 'blocks', from static shapes."""
    length, d, p = self.inputs.shape[1], self.inputs.shape[2], self.cotangents.shape[2]
    if length == 1:
      return 'rank one'
    if length is None:
      return 'blocks'
    if d * p <= min(KEEP, length / STEPS) * length * (d + p):
      return 'explicit'
    return 'blocks' if scaled else 'gram'

  def formed(self, n: int, scaled: bool) -> int:
    length, d, p = self.inputs.shape[1], self.inputs.shape[2], self.cotangents.shape[2]
    route = self.route(scaled)
    if route == 'rank one':
      return n * (d + p)
    return 3 * n * length**2 if route == 'gram' else super().formed(n, scaled)

  def norms_by(self, route: str, scales: protocol.Scales) -> protocol.Tensors:
    if route == 'rank one':
      return self._rank_one(scales)
    if route == 'gram':
      return [self._gram()] * len(scales)
    return super().norms_by(route, scales)

  def products(self) -> protocol.Products:
    left, right = (tf.reduce_sum(tf.square(t), 1) for t in (self.inputs, self.cotangents))
    return tf.shape(self.inputs)[1], lambda scale: protocol.product_squares(
        left, right, scale if trees.absent(scale) else tf.square(self._matrix(scale)))

  def weighted_sums(self, weights: protocol.Tensors) -> protocol.Tensors:
    if self.inputs.shape[2] < self.cotangents.shape[2]:
      return [self._product(self.inputs * protocol.along(w, self.inputs), self.cotangents)
              for w in weights]
    return [self._product(self.inputs, self.cotangents * protocol.along(w, self.cotangents))
            for w in weights]

  def squared_sums(self, weights: protocol.Tensors, scales: protocol.Scales) -> protocol.Tensors:
    if self.route(True) == 'rank one':
      return self._rank_one_squares(weights, scales)
    return super().squared_sums(weights, scales)

  def folded(self, times: int) -> 'Outer':
    return dataclasses.replace(
        self, inputs=fold(self.inputs, times), cotangents=fold(self.cotangents, times))

  def transformed(self, scale: contract.Kronecker) -> protocol.Factor:
    _, _, p = geometry.matrices_of(scale, self.shape)
    ends = self._ends(p)
    if ends is None:
      return self.explicit().transformed(scale)
    first, last, turned = ends
    first, last = by_blocks(first, scale.left), geometry.on_last(last, scale.right)
    inputs, cotangents = (last, first) if turned else (first, last)
    return dataclasses.replace(self, inputs=inputs, cotangents=cotangents)

  def second_moments(self, view: Tuple[int, int, int], most: int) -> Tuple[tf.Tensor, tf.Tensor]:
    ends = self._ends(view[2])
    if ends is None:
      return self.explicit().second_moments(view, most)
    return (protocol.second_moment(ends[0], view[1], most),
            protocol.second_moment(ends[1], view[2], most))

  def _ends(self, p: int) -> Optional[Tuple[tf.Tensor, tf.Tensor, bool]]:
    """`(first, last, turned)`: what is of the variable's first axes, and of the last p numbers.

    `turned` if the first are the cotangents; None where the product is another one.
    """
    rows, order = self._rows(), tuple(range(len(self.shape)))
    axes = self.axes or order
    turned = axes != order
    first, last = (self.cotangents, self.inputs) if turned else (self.inputs, self.cotangents)
    if (axes[rows:] + axes[:rows] if turned else axes) != order or last.shape[2] != p:
      return None
    return first, last, turned

  def kin(self) -> Any:  # Steps of one sequence.
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

  def _rank_one(self, scales: protocol.Scales) -> List[tf.Tensor]:
    a, e = self.inputs[:, 0], self.cotangents[:, 0]
    norms = []
    for scale in scales:
      if trees.absent(scale):
        norms.append(protocol.sum_squares(a) * protocol.sum_squares(e))
      else:  # ||S * a e'||^2 = (a^2)' S^2 (e^2), and what each product may lose
        small, d, p = protocol.tiny(a.dtype), a.shape[1], e.shape[1]
        left, right = tf.square(a) + small, tf.square(e) + small
        curvature, sums = tf.square(self._matrix(scale)), tf.reduce_sum(left, 1)
        rows = tf.matmul(left, curvature) + small * (sums[:, tf.newaxis] + d)
        total = tf.reduce_sum(rows * right, 1) + p * small
        norms.append(protocol.wide(total))
    return norms

  def _rank_one_squares(
      self, weights: protocol.Tensors, scales: protocol.Scales) -> List[tf.Tensor]:
    """`sum_n (s w a e')^2 = (s top)^2 * sum_n (w / top)^2 (a^2)(e^2)'`, in units of examples."""
    unit, size = self.unit()
    squares = Outer(tf.square(unit.inputs), tf.square(unit.cotangents), self.shape, self.axes)
    sums = []
    for weight, scale in zip(weights, scales):
      weight *= size
      top = tf.maximum(tf.reduce_max(weight), 0)
      product, = squares.weighted_sums([tf.square(tf.math.divide_no_nan(weight, top))])
      root = top * protocol.wide(tf.sqrt(product))
      root = root if trees.absent(scale) else root * protocol.wide(scale)
      sums.append(tf.cast(tf.square(root), product.dtype))
    return sums

  def _gram(self) -> tf.Tensor:
    """||sum_t a_t e_t'||^2 = sum_{tu} (a_t'a_u)(e_t'e_u)."""
    inner = tf.matmul(self.inputs, self.inputs, transpose_b=True)
    outer = tf.matmul(self.cotangents, self.cotangents, transpose_b=True)
    a, e = tf.linalg.diag_part(inner), tf.linalg.diag_part(outer)
    lengths = tf.reduce_sum(tf.sqrt(a) * tf.sqrt(e), 1)
    size = self.inputs.shape[1] * (self.inputs.shape[2] + self.cotangents.shape[2])
    a, e = protocol.wide_sum(a), protocol.wide_sum(e)
    lost = size * protocol.tiny(inner.dtype) * (a + e + 1)
    norms = protocol.gram(inner, outer, tf.square(protocol.wide(lengths)))
    return norms + lost

  def _product(self, inputs: tf.Tensor, cotangents: tf.Tensor) -> tf.Tensor:
    d, p = inputs.shape[2], cotangents.shape[2]
    product = tf.matmul(
        tf.reshape(inputs, [-1, d]), tf.reshape(cotangents, [-1, p]), transpose_a=True)
    return restored(product, self.shape, self.axes)

  def _matrix(self, scale: trees.Tree) -> tf.Tensor:
    scale = tf.transpose(scale, self.axes) if self.axes else scale
    return tf.reshape(scale, [self.inputs.shape[2], self.cotangents.shape[2]])


def by_blocks(x: tf.Tensor, left: tf.Tensor) -> tf.Tensor:
  """The left side [d, d] of a `Kronecker` times every piece of d along the last axis of `x`."""
  if x.shape[-1] == left.shape[0]:
    return geometry.on_last(x, left)
  parts = tf.reshape(x, tf.concat([tf.shape(x)[:-1], [-1, left.shape[0]]], 0))
  parts = geometry.on_last(tf.ensure_shape(
      parts, x.shape[:-1].as_list() + [x.shape[-1] // left.shape[0], left.shape[0]]), left)
  return tf.ensure_shape(tf.reshape(parts, tf.shape(x)), x.shape)


def fold(x: tf.Tensor, times: int) -> tf.Tensor:
  """[n * times, T, ...] to [n, times * T, ...]."""
  length = x.shape[1] if x.shape[1] is not None else tf.shape(x)[1]
  return tf.reshape(x, [-1, times * length] + x.shape[2:].as_list())


def bundled(
    per_variable: Sequence[Optional[protocol.Factor]],
    kinds: Sequence[Any]) -> Tuple[List[Bundle], List[Optional[protocol.Factor]]]:
  """`(bundles, factors)`: small whole gradients of a dtype and a kind together, others alone.

  A model has a bias or a scale beside almost every matrix. Norms and sums take some fifty
  operations a variable, however small; a bundle takes them once.

  Args:
    per_variable: The factor of every variable, or None.
    kinds: What variables must share to be bundled.
  """
  places: Dict[Any, List[int]] = {}
  numbers: Dict[Any, int] = collections.Counter()
  for i, (factor, kind) in enumerate(zip(per_variable, kinds)):
    key: Any = i
    if isinstance(factor, Explicit) and math.prod(factor.shape) <= SMALL:
      alike = factor.parts[0].dtype, kind
      key = alike, numbers[alike] // FULL
      numbers[alike] += math.prod(factor.shape)
    places.setdefault(key, []).append(i)
  bundles = [tuple(some) for some in places.values()]
  return bundles, [_together([per_variable[i] for i in bundle]) for bundle in bundles]


def _together(several: Any) -> Optional[protocol.Factor]:
  if len(several) == 1:
    return several[0]
  return explicit(tf.concat([
      tf.reshape(factor.gradient(), [-1, math.prod(factor.shape)]) for factor in several], 1))


def flat(scale: Sequence[Any], bundles: Sequence[Bundle]) -> List[Any]:
  """A scale by variable as one by bundle; those of a bundle are all absent, or none is."""
  return [scale[first] if not others or trees.absent(scale[first]) else tf.concat([
      tf.reshape(scale[i], [-1]) for i in (first, *others)], 0) for first, *others in bundles]


def apart(
    totals: Sequence[Any], bundles: Sequence[Bundle],
    variables: Sequence[compat.Variable]) -> List[tf.Tensor]:
  """Totals by bundle as totals by variable; zeros where there is none."""
  result: Dict[int, tf.Tensor] = {}
  for total, bundle in zip(totals, bundles):
    shapes = [variables[i].shape for i in bundle]
    if total is None:
      total = tf.zeros(shapes[0], trees.wide(tf.as_dtype(variables[bundle[0]].dtype)))
    elif len(bundle) > 1:
      total = tf.split(total, [math.prod(shape) for shape in shapes])
    result.update(zip(bundle, [total] if len(bundle) == 1 else map(tf.reshape, total, shapes)))
  return [result[i] for i in range(len(variables))]
