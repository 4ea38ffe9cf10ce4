# SPDX-License-Identifier: Apache-2.0
"""Per-example gradients in some rows of a table: embeddings, also tied to a softmax."""

import dataclasses
from typing import Any, Dict, Hashable, List, Sequence, Tuple

import tensorflow as tf

from tfdp_adaptive import contract
from tfdp_adaptive import geometry
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import factors
from tfdp_adaptive.clipping import protocol

# Longest sequence whose equal rows are found in a Gram matrix; a scatter merges longer ones.
SHORT = 64


@dataclasses.dataclass(frozen=True)
class Rows(protocol.Factor):
  """Gradients that add `cotangents[:, t]` to row `ids[:, t]`: embeddings.

  Attributes:
    ids: [n, T] integers.
    cotangents: [n, T, d].
    shape: The variable's shape, [rows, d].
  """

  ids: Any
  cotangents: Any
  shape: Tuple[int, ...]

  def route(self, scaled: bool) -> str:
    """Returns 'once', 'gram' or 'merge', from static shapes."""
    del scaled
    length = self.ids.shape[1]
    if length == 1:
      return 'once'
    return 'gram' if length is not None and length <= SHORT else 'merge'

  def squared_norm(self, scale: trees.Tree = ()) -> tf.Tensor:
    if self.route(True) == 'gram':
      return self._gram(self._scaled(self.cotangents, scale))
    merged = self._merged()
    norm = protocol.sum_squares(merged._scaled(merged.cotangents, scale))
    return norm if self.route(True) == 'once' else protocol.charged(norm, self, scale)

  def products(self) -> protocol.Products:
    length = tf.shape(self.ids)[1]
    return length, lambda scale: protocol.wide(length) * protocol.sum_squares(
        self._scaled(self.cotangents, scale))

  def weighted_sum(self, weights: tf.Tensor) -> tf.Tensor:
    return self._scatter(self.cotangents * protocol.along(weights, self.cotangents))

  def squared_sum(self, weights: tf.Tensor, scale: trees.Tree = ()) -> tf.Tensor:
    merged = self._merged()
    weighted = merged.cotangents * protocol.along(weights, merged.cotangents)
    return merged._scatter(tf.square(merged._scaled(weighted, scale)))

  def transformed(self, scale: contract.Kronecker) -> protocol.Factor:
    count, d, p = geometry.matrices_of(scale, self.shape)
    if p != self.shape[1] or (count > 1 and scale.left.shape.rank > 1):
      return self.explicit().transformed(scale)
    cotangents = geometry.on_last(self.cotangents, scale.right)
    left = tf.cast(scale.left, cotangents.dtype)
    if scale.left.shape.rank > 1:  # A row of the table is a column of the side.
      columns = tf.gather(tf.transpose(left), self.ids)
      return factors.Outer(columns, cotangents, self.shape)
    place = self.ids % tf.constant(d, self.ids.dtype)
    return dataclasses.replace(
        self, cotangents=cotangents * tf.gather(left, place)[..., tf.newaxis])

  def second_moments(self, view: Tuple[int, int, int], most: int) -> Tuple[tf.Tensor, tf.Tensor]:
    """Returns how often every row is read, because the inputs are one-hot."""
    _, d, p = view
    if (d, p) != self.shape:
      return self.explicit().second_moments(view, most)
    ids = tf.reshape(self.ids, [-1])
    counts = tf.math.unsorted_segment_sum(tf.ones_like(ids, self.cotangents.dtype), ids, d)
    share = counts / tf.maximum(tf.cast(tf.size(ids), counts.dtype), 1)
    return (share if d > most else tf.linalg.diag(share),
            protocol.second_moment(self.cotangents, p, most))

  def kin(self) -> Hashable:
    return Rows

  def explicit(self) -> factors.Explicit:
    n = tf.shape(self.ids)[0]
    rows = self.ids + tf.cast(tf.range(n)[:, tf.newaxis] * self.shape[0], self.ids.dtype)
    flat = tf.math.unsorted_segment_sum(
        tf.reshape(self.cotangents, [-1, self.shape[1]]), tf.reshape(rows, [-1]), n * self.shape[0])
    return factors.explicit(tf.reshape(flat, (-1,) + self.shape))

  def _scatter(self, values: tf.Tensor) -> tf.Tensor:
    return tf.math.unsorted_segment_sum(
        tf.reshape(values, [-1, self.shape[1]]), tf.reshape(self.ids, [-1]), self.shape[0])

  def _scaled(self, cotangents: tf.Tensor, scale: trees.Tree) -> tf.Tensor:
    return cotangents if trees.absent(scale) else cotangents * tf.gather(scale, self.ids)

  def _gram(self, cotangents: tf.Tensor) -> tf.Tensor:
    """Returns `||sum_t 1_t e_t'||^2 = sum_{tu} [id_t = id_u] (e_t'e_u)`."""
    same = tf.equal(self.ids[:, :, tf.newaxis], self.ids[:, tf.newaxis])
    same = tf.cast(same, cotangents.dtype)
    outer = tf.matmul(cotangents, cotangents, transpose_b=True)
    lengths = tf.sqrt(tf.linalg.diag_part(outer))
    magnitude = protocol.wide_sum(lengths * tf.linalg.matvec(same, lengths))
    lost = self.ids.shape[1]**2 * self.shape[1] * protocol.tiny(cotangents.dtype)
    return protocol.gram(same, outer, magnitude) + lost

  def _merged(self) -> 'Rows':
    """Returns the same gradients with every id once; zeros of row 0 fill the other places."""
    if self.route(True) == 'once':
      return self
    n, length = tf.shape(self.ids)[0], tf.shape(self.ids)[1]
    order = tf.argsort(self.ids, stable=True)
    ids = tf.gather(self.ids, order, batch_dims=1)
    cotangents = tf.gather(self.cotangents, order, batch_dims=1)
    rank = tf.cumsum(tf.pad(tf.cast(ids[:, 1:] != ids[:, :-1], tf.int32), [[0, 0], [1, 0]]), 1)
    place = tf.reshape(rank + tf.range(n)[:, tf.newaxis] * length, [-1])
    flat = tf.math.unsorted_segment_sum(
        tf.reshape(cotangents, [-1, self.shape[1]]), place, n * length)
    of_places = tf.math.unsorted_segment_max(tf.reshape(ids, [-1]), place, n * length)
    of_places = tf.where(of_places == ids.dtype.min, tf.zeros_like(of_places), of_places)
    return dataclasses.replace(self, ids=tf.reshape(of_places, tf.shape(ids)),
                               cotangents=tf.reshape(flat, tf.shape(cotangents)))


def add(parts: Sequence[protocol.Factor]) -> protocol.Factor:
  """Returns the factor of a sum of gradients of one variable (tied weights)."""
  alike: Dict[Hashable, List[protocol.Factor]] = {}
  for part in parts:
    alike.setdefault(part.kin(), []).append(part)
  merged = [_joined(same) for same in alike.values()]
  if len(merged) == 1:
    return merged[0]
  if any(isinstance(part, factors.Explicit) for part in merged):
    return _joined([part.explicit() for part in merged])
  return Mixed(tuple(sorted(merged, key=lambda part: not isinstance(part, Rows))))


def _joined(same: Sequence[protocol.Factor]) -> protocol.Factor:
  return same[0] if len(same) == 1 else same[0].joined(same[1:])


@dataclasses.dataclass(frozen=True)
class Mixed(protocol.Factor):
  """A sum of factors of different kinds, as of an embedding tied to a softmax."""

  parts: Tuple[Any, ...]

  @property
  def shape(self) -> Tuple[int, ...]:  # type: ignore[override]
    return self.parts[0].shape

  def route(self, scaled: bool) -> str:
    """Returns 'tied' or 'blocks'."""
    del scaled
    kinds = [type(part) for part in self.parts]
    return 'tied' if kinds == [Rows, factors.Outer] and not self.parts[1].axes else 'blocks'

  def squared_norm(self, scale: trees.Tree = ()) -> tf.Tensor:
    """Returns `||R + O||^2 = ||R||^2 + ||O||^2 + 2 <R, O>`, R in rows, O an outer product."""
    if self.route(True) != 'tied':
      return super().squared_norm(scale)
    table, outer = self.parts
    reached = tf.gather(outer.inputs, table.ids, axis=2, batch_dims=1)  # [n, T of outer, T of rows]
    cotangents = table.cotangents
    if not trees.absent(scale):
      cotangents = cotangents * tf.square(tf.gather(scale, table.ids))
    inner = tf.matmul(outer.cotangents, cotangents, transpose_b=True)
    cross = 2 * tf.cast(tf.reduce_sum(reached * inner, [1, 2]), tf.float64)
    both = table.squared_norm(scale) + outer.squared_norm(scale)
    return tf.maximum(both + cross, 0) + 4 * protocol.eps(inner.dtype) * both

  def products(self) -> protocol.Products:
    counts, squares = zip(*[part.products() for part in self.parts])
    return tf.add_n(list(counts)), lambda scale: len(squares) * tf.add_n(
        [one(scale) for one in squares])

  def weighted_sum(self, weights: tf.Tensor) -> tf.Tensor:
    return tf.add_n([part.weighted_sum(weights) for part in self.parts])

  def transformed(self, scale: contract.Kronecker) -> protocol.Factor:
    return add([part.transformed(scale) for part in self.parts])

  def second_moments(self, view: Tuple[int, int, int], most: int) -> Tuple[tf.Tensor, tf.Tensor]:
    left, right = zip(*[part.second_moments(view, most) for part in self.parts])
    return tf.add_n(list(left)), tf.add_n(list(right))

  def unit(self) -> Tuple['Mixed', tf.Tensor]:
    parts, sizes = zip(*[part.unit() for part in self.parts])
    top = tf.reduce_max(tf.stack(sizes), 0)
    return Mixed(tuple(
        part.times(protocol.divided(size, top)) for part, size in zip(parts, sizes))), top

  def times(self, ratio: tf.Tensor) -> 'Mixed':
    return Mixed(tuple(part.times(ratio) for part in self.parts))

  def explicit(self) -> protocol.Factor:
    return _joined([part.explicit() for part in self.parts])
