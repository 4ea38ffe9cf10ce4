# SPDX-License-Identifier: Apache-2.0
"""Variables used more than once: their gradients add up before any norm."""

import dataclasses
from typing import Any, Dict, List, Sequence, Tuple

import tensorflow as tf

from tfdp_adaptive import contract
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import blocks
from tfdp_adaptive.clipping import factors
from tfdp_adaptive.clipping import protocol
from tfdp_adaptive.clipping import rows


def add(parts: Sequence[protocol.Factor]) -> protocol.Factor:
  """The factor of a sum of gradients of one variable (tied weights)."""
  alike: Dict[Any, List[protocol.Factor]] = {}
  for part in parts:
    alike.setdefault(part.kin(), []).append(part)
  merged = [_joined(same) for same in alike.values()]
  if len(merged) == 1:
    return merged[0]
  if any(isinstance(part, factors.Explicit) for part in merged):
    return _joined([part.explicit() for part in merged])
  return Mixed(tuple(sorted(merged, key=lambda part: not isinstance(part, rows.Rows))))


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
    """'tied' or 'blocks'."""
    del scaled
    kinds = [type(part) for part in self.parts]
    return 'tied' if kinds == [rows.Rows, factors.Outer] and not self.parts[1].axes else 'blocks'

  def squared_norms(self, scales: protocol.Scales) -> protocol.Tensors:
    if self.route(True) == 'tied':
      return self._tied(scales)
    formed = blocks.in_blocks(
        lambda factor: factor.explicit().squared_norms(scales), self, len(scales))
    return protocol.charged(formed, self, scales)

  def products(self) -> protocol.Products:
    counts, squares = zip(*[part.products() for part in self.parts])
    return tf.add_n(list(counts)), lambda scale: len(squares) * tf.add_n(
        [one(scale) for one in squares])

  def weighted_sums(self, weights: protocol.Tensors) -> protocol.Tensors:
    return [tf.add_n(list(sums))
            for sums in zip(*[part.weighted_sums(weights) for part in self.parts])]

  def squared_sums(self, weights: protocol.Tensors, scales: protocol.Scales) -> protocol.Tensors:
    return blocks.sum_blocks(
        lambda factor, w: factor.explicit().squared_sums(w, scales), self, weights)

  def folded(self, times: int) -> 'Mixed':
    return Mixed(tuple(part.folded(times) for part in self.parts))

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

  def _tied(self, scales: protocol.Scales) -> List[tf.Tensor]:
    """||R + O||^2 = ||R||^2 + ||O||^2 + 2 <R, O>, with R in rows and O an outer product."""
    table, outer = self.parts
    reached = tf.gather(outer.inputs, table.ids, axis=2, batch_dims=1)  # [n, T of outer, T of rows]
    norms = []
    for scale, a, b in zip(scales, table.squared_norms(scales), outer.squared_norms(scales)):
      cotangents = table.cotangents
      if not trees.absent(scale):
        cotangents = cotangents * tf.square(tf.gather(scale, table.ids))
      inner = tf.matmul(outer.cotangents, cotangents, transpose_b=True)
      cross = 2 * tf.cast(tf.reduce_sum(reached * inner, [1, 2]), tf.float64)
      rounding = 4 * protocol.eps(inner.dtype) * (a + b)
      norms.append(tf.maximum(a + b + cross, 0) + rounding)
    return norms
