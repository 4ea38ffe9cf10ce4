"""Variables used more than once: their gradients add up before any norm."""

import dataclasses
from typing import Any, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive.clipping import blocks
from tfdp_adaptive.clipping import factors
from tfdp_adaptive.clipping import rows


def add(parts):
  """The factor of a sum of gradients of one variable (tied weights)."""
  alike = {}
  for part in parts:
    key = id(part)
    if isinstance(part, factors.Outer):  # Steps of one sequence.
      key = (part.axes, part.inputs.shape[2])
    elif isinstance(part, (rows.Rows, factors.Explicit)):
      key = type(part)
    alike.setdefault(key, []).append(part)
  merged = [_merged(same) for same in alike.values()]
  if len(merged) == 1:
    return merged[0]
  if any(isinstance(part, factors.Explicit) for part in merged):
    return _merged([part.explicit() for part in merged])
  return Mixed(tuple(sorted(merged, key=lambda part: not isinstance(part, rows.Rows))))


def _merged(same):
  if len(same) == 1:
    return same[0]
  if isinstance(same[0], factors.Explicit):
    return factors.explicit(tf.add_n([part.gradient() for part in same]))
  columns = zip(*map(blocks.tensors, same))
  return blocks.rebuilt(same[0], [tf.concat(column, 1) for column in columns])


@dataclasses.dataclass(frozen=True)
class Mixed:
  """A sum of factors of different kinds, as of an embedding tied to a softmax."""

  parts: Tuple[Any, ...]

  @property
  def shape(self):
    return self.parts[0].shape

  def route(self, scaled):
    """'tied' or 'blocks'."""
    del scaled
    kinds = [type(part) for part in self.parts]
    return 'tied' if kinds == [rows.Rows, factors.Outer] and not self.parts[1].axes else 'blocks'

  def squared_norms(self, scales):
    if self.route(True) == 'tied':
      return self._tied(scales)
    return blocks.in_blocks(
        lambda factor: factor.explicit().squared_norms(scales), self, len(scales))

  def weighted_sums(self, weights):
    return [tf.add_n(list(sums))
            for sums in zip(*[part.weighted_sums(weights) for part in self.parts])]

  def weighted_squares(self, weights):
    return blocks.sum_blocks(lambda factor, w: factor.explicit().weighted_squares(w), self, weights)

  def folded(self, times):
    return Mixed(tuple(part.folded(times) for part in self.parts))

  def simplified(self):
    return self

  def explicit(self):
    return _merged([part.explicit() for part in self.parts])

  def _tied(self, scales):
    """||R + O||^2 = ||R||^2 + ||O||^2 + 2 <R, O>, with R in rows and O an outer product."""
    table, outer = self.parts
    reached = tf.gather(outer.inputs, table.ids, axis=2, batch_dims=1)  # [n, T of outer, T of rows]
    norms = []
    for scale, a, b in zip(scales, table.squared_norms(scales), outer.squared_norms(scales)):
      errors = table.errors
      if not factors.absent(scale):
        errors = errors * tf.square(tf.gather(scale, table.ids))
      inner = tf.matmul(outer.errors, errors, transpose_b=True)
      cross = 2 * tf.cast(tf.reduce_sum(reached * inner, [1, 2]), tf.float64)
      rounding = 4 * float(np.finfo(inner.dtype.as_numpy_dtype).eps) * (a + b)
      norms.append(tf.maximum(a + b + cross, 0) + rounding)
    return norms
