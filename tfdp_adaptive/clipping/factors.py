"""Per-example gradients of one variable, kept in factored form.

A layer's file says what the factors of its gradient are; here is what the
book-keeping engine does with them: norms in a diagonal geometry, sums weighted
per example, sums of squares. A `scale` is `()` or a tensor of the variable's
shape; several scales or weights share the work.

Norms are returned squared, in float64, and are never below the truth by more
than rounding: products of sums are formed in float64, squares that underflow are
charged at the smallest normal number, and the Gram route adds a bound of its own
cancellation. Squares that overflow give a norm that is not finite; see `overflow`.
"""

import dataclasses
from typing import Any, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive.clipping import blocks

# Per-example gradients are formed and kept when they take at most this many
# times the memory of their factors, and this many steps or more make up one of
# them: forming is as dear as multiplying by that many steps once more.
KEEP = 2.0
STEPS = 64


def absent(scale):
  return isinstance(scale, tuple) and not scale


@dataclasses.dataclass(frozen=True)
class Explicit:
  """The gradients themselves.

  Attributes:
    parts: Tensors [n, ...]: the variable, reshaped to `view`, with its axes in the
      order `axes`, cut along the first of them; mostly a single one.
    shape: The variable's shape.
    axes: A permutation, or () for none.
    view: Another shape for the variable, or () for its own.
    terms: How many products each number sums up, for `costs`.
  """

  parts: Tuple[Any, ...]
  shape: Tuple[int, ...]
  axes: Tuple[int, ...] = ()
  view: Tuple[int, ...] = ()
  terms: int = 1

  def route(self, scaled):
    del scaled
    return 'explicit'

  def squared_norms(self, scales):
    norms = []
    for scale in scales:
      pieces = [()] * len(self.parts) if absent(scale) else self._cut(scale)
      norms.append(tf.add_n([sum_squares(part, piece)
                             for part, piece in zip(self.parts, pieces)]))
    return norms

  def weighted_sums(self, weights):
    flat = [tf.reshape(p, [-1, int(np.prod(p.shape[1:].as_list()))]) for p in self.parts]
    weights = narrow(tf.stack(weights), flat[0].dtype)
    sums = tf.concat([tf.matmul(weights, part) for part in flat], 1)
    return [tf.reshape(restored(one, self.view or self.shape, self.axes), self.shape)
            for one in tf.unstack(sums, weights.shape[0])]

  def weighted_squares(self, weights):
    squares = dataclasses.replace(self, parts=tuple(tf.square(part) for part in self.parts))
    return squares.weighted_sums(weights)

  def folded(self, times):
    def fold(part):
      return tf.reduce_sum(tf.reshape(part, [-1, times] + part.shape[1:].as_list()), 1)
    return dataclasses.replace(self, parts=tuple(fold(part) for part in self.parts))

  def simplified(self):
    return self

  def explicit(self):
    return self

  def gradient(self):
    """[n, *shape]."""
    part = self.parts[0] if len(self.parts) == 1 else tf.stack(self.parts, 1)
    if self.axes:
      view = self.view or self.shape
      part = tf.reshape(part, [-1] + [view[i] for i in self.axes])
      part = tf.transpose(part, [0] + [1 + i for i in np.argsort(self.axes)])
    return tf.reshape(part, (-1,) + self.shape)

  def _cut(self, scale):
    if self.axes:
      scale = tf.transpose(tf.reshape(scale, self.view or self.shape), self.axes)
    pieces = tf.reshape(scale, [len(self.parts)] + self.parts[0].shape[1:].as_list())
    return tf.unstack(pieces)


def explicit(gradient, terms=1):
  """The `Explicit` of gradients [n, *variable shape]."""
  return Explicit((gradient,), tuple(gradient.shape[1:].as_list()), terms=terms or 1)


def restored(flat, shape, axes):
  """A flat variable whose axes lie in the order `axes`, in its own order."""
  if not axes:
    return tf.reshape(flat, shape)
  return tf.transpose(tf.reshape(flat, [shape[i] for i in axes]), np.argsort(axes))


@dataclasses.dataclass(frozen=True)
class Outer:
  """`sum_t inputs[:, t] (x) errors[:, t]`: layers that multiply by a matrix.

  Attributes:
    inputs: [n, T, d].
    errors: [n, T, p], gradients of the loss by the product.
    shape: The variable's shape.
    axes: Order of the variable's axes in which it is a [d, p] matrix.
  """

  inputs: Any
  errors: Any
  shape: Tuple[int, ...]
  axes: Tuple[int, ...] = ()

  def route(self, scaled):
    """'rank one', 'explicit', 'gram' or 'blocks', from static shapes."""
    length, d, p = self.inputs.shape[1], self.inputs.shape[2], self.errors.shape[2]
    if length == 1:
      return 'rank one'
    if length is None:
      return 'blocks'
    if d * p <= min(KEEP, length / STEPS) * length * (d + p):
      return 'explicit'
    return 'blocks' if scaled else 'gram'

  def squared_norms(self, scales):
    if self.route(True) == 'rank one':
      return self._rank_one(scales)
    norms = {}
    for scaled in (False, True):
      chosen = [i for i, s in enumerate(scales) if absent(s) != scaled]
      if not chosen:
        continue
      if self.route(scaled) == 'gram':
        norms.update((i, self._gram()) for i in chosen)
      else:
        picked = [scales[i] for i in chosen]
        norms.update(zip(chosen, blocks.in_blocks(
            lambda factor: factor.explicit().squared_norms(picked), self,
            len(picked))))
    return [norms[i] for i in range(len(scales))]

  def weighted_sums(self, weights):
    if self.inputs.shape[2] < self.errors.shape[2]:
      return [self._product(self.inputs * along(w, self.inputs), self.errors) for w in weights]
    return [self._product(self.inputs, self.errors * along(w, self.errors)) for w in weights]

  def weighted_squares(self, weights):
    if self.route(True) == 'rank one':
      squares = Outer(tf.square(self.inputs), tf.square(self.errors), self.shape, self.axes)
      return squares.weighted_sums(weights)
    return blocks.sum_blocks(lambda factor, w: factor.explicit().weighted_squares(w),
                      self, weights)

  def folded(self, times):
    return dataclasses.replace(
        self, inputs=fold(self.inputs, times), errors=fold(self.errors, times))

  def simplified(self):
    return self.explicit() if self.route(True) == 'explicit' else self

  def explicit(self):
    axes = self.axes or tuple(range(len(self.shape)))
    if self.inputs.shape[2] <= self.errors.shape[2]:
      product = tf.matmul(self.inputs, self.errors, transpose_a=True)
    else:  # The product is faster with the short side first.
      product = tf.matmul(self.errors, self.inputs, transpose_a=True)
      axes = axes[self._rows():] + axes[:self._rows()]
    axes = () if axes == tuple(sorted(axes)) else axes
    return Explicit((product,), self.shape, axes, terms=self.inputs.shape[1] or 1)

  def _rows(self):
    """How many of the variable's permuted axes make up d."""
    sizes = [self.shape[i] for i in self.axes or range(len(self.shape))]
    return next(i for i in range(len(sizes) + 1)
                if int(np.prod(sizes[:i])) == self.inputs.shape[2]
                and int(np.prod(sizes[i:])) == self.errors.shape[2])

  def _rank_one(self, scales):
    a, e = self.inputs[:, 0], self.errors[:, 0]
    norms = []
    for scale in scales:
      if absent(scale):
        norms.append(sum_squares(a) * sum_squares(e))
      else:  # ||S * a e'||^2 = (a^2)' S^2 (e^2), and what each product may lose
        small, d, p = tiny(a.dtype), a.shape[1], e.shape[1]
        squares = tf.square(a) + small
        rows = tf.matmul(squares, tf.square(self._matrix(scale)))
        rows += small * (tf.reduce_sum(squares, 1, keepdims=True) + d)
        total = tf.reduce_sum(rows * (tf.square(e) + small), 1) + p * small
        norms.append(tf.cast(total, tf.float64))
    return norms

  def _gram(self):
    """||sum_t a_t e_t'||^2 = sum_{tu} (a_t'a_u)(e_t'e_u)."""
    inner = tf.matmul(self.inputs, self.inputs, transpose_b=True)
    outer = tf.matmul(self.errors, self.errors, transpose_b=True)
    a, e = tf.linalg.diag_part(inner), tf.linalg.diag_part(outer)
    lengths = tf.reduce_sum(tf.sqrt(a) * tf.sqrt(e), 1)
    size = self.inputs.shape[1] * (self.inputs.shape[2] + self.errors.shape[2])
    lost = size * tiny(inner.dtype) * (wide_sum(a) + wide_sum(e) + 1)
    return gram(inner, outer, tf.square(tf.cast(lengths, tf.float64))) + lost

  def _product(self, inputs, errors):
    d, p = inputs.shape[2], errors.shape[2]
    product = tf.matmul(tf.reshape(inputs, [-1, d]), tf.reshape(errors, [-1, p]), transpose_a=True)
    return restored(product, self.shape, self.axes)

  def _matrix(self, scale):
    scale = tf.transpose(scale, self.axes) if self.axes else scale
    return tf.reshape(scale, [self.inputs.shape[2], self.errors.shape[2]])


def gram(inner, outer, magnitude):
  """[n] float64: `sum_tu inner_tu outer_tu` >= 0, from above, where terms cancel.

  A few roundings of `magnitude` [n], the sum of the terms' sizes, are charged.
  """
  total = wide_sum(inner * outer, [1, 2])
  rounding = 4 * float(np.finfo(inner.dtype.as_numpy_dtype).eps)
  return tf.maximum(total, 0) + rounding * magnitude


def sum_squares(x, scale=()):
  """[n] float64: sum of squares of `scale * x[i]`, from above.

  What underflows is charged: at most the smallest normal number for every product.
  """
  size = tf.cast(tf.reduce_prod(tf.shape(x)[1:]), tf.float64)
  axes = list(range(1, x.shape.rank))
  if absent(scale):
    return wide_sum(tf.square(x), axes) + size * tiny(x.dtype)
  if x.shape[0] == 1:  # A product with one row is slow.
    return wide_sum(tf.square(x * scale), axes) + size * tiny(x.dtype)
  curvature = tf.reshape(tf.square(scale) + tiny(x.dtype), [1, -1])  # (x^2)' s^2
  squares = tf.reshape(tf.square(x), [-1, curvature.shape[1]])
  total = tf.matmul(curvature, squares, transpose_b=True)[0]
  return tf.cast(total, tf.float64) + (wide_sum(curvature, None) + size) * tiny(x.dtype)


def wide_sum(x, axes=1):
  return tf.cast(tf.reduce_sum(x, axes), tf.float64)


def tiny(dtype):
  return float(np.finfo(dtype.as_numpy_dtype).tiny)


def along(weights, x):
  """[n] weights shaped to multiply x [n, ...]."""
  return tf.reshape(narrow(weights, x.dtype), [-1] + [1] * (x.shape.rank - 1))


def narrow(weights, dtype):
  """float64 weights in `dtype`; zero where that would round them up by much."""
  return tf.cast(tf.where(weights < tiny(dtype), tf.zeros_like(weights), weights), dtype)


def fold(x, times):
  """[n * times, T, ...] to [n, times * T, ...]."""
  length = x.shape[1] if x.shape[1] is not None else tf.shape(x)[1]
  return tf.reshape(x, [-1, times * length] + x.shape[2:].as_list())
