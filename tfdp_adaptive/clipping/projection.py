# SPDX-License-Identifier: Apache-2.0
"""Defines clipping: maps one record's gradient to its clipped contribution.

`weights` has the functions that weight a record by its norm n. Computed norms are never below the
truth by more than rounding.

Variables may be clipped in groups. Group k of a record has at most the norm c_k, and the squares of
all c_k add up to at most zeta^2.
"""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Sequence, Tuple

import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import contract
from tfdp_adaptive import geometry
from tfdp_adaptive import trees
from tfdp_adaptive import weights
from tfdp_adaptive.rules import wrapping


def norm_and_peak(tree: trees.Tree) -> Tuple[tf.Tensor, tf.Tensor]:
  """Returns the global L2 norm of a tree as `(norm / peak, peak)`, `peak` its largest magnitude.

  The quotient lies in [1, sqrt(size)], so neither overflows for finite input.
  """
  leaves = tf.nest.flatten(tree)
  peak = tf.reduce_max(tf.stack([
      tf.reduce_max(tf.abs(leaf)) if leaf.shape.num_elements() != 0 else tf.zeros([], leaf.dtype)
      for leaf in leaves]))
  safe = tf.where(peak > 0, peak, tf.ones_like(peak))
  squares = tf.add_n([tf.reduce_sum(tf.square(leaf / safe)) for leaf in leaves])
  return tf.sqrt(squares), peak


def is_finite(tree: trees.Tree) -> tf.Tensor:
  """Returns a [] bool: whether every element of every leaf is finite."""
  return tf.reduce_all(tf.stack([
      tf.reduce_all(tf.math.is_finite(leaf)) for leaf in tf.nest.flatten(tree)]))


def clip(
    tree: trees.Tree, clip_norm: trees.Scalar,
    weight: weights.Weight = weights.Hard()) -> trees.Tree:
  """Returns `v * w(||v||)` of a record, by default `w = min(1, clip_norm / ||v||)`; see `weights`.

  It is zero if any element is not finite. The record is first divided by its largest magnitude, so
  no intermediate result overflows.
  """
  ratio, peak = norm_and_peak(tree)
  clip_norm = tf.cast(clip_norm, ratio.dtype)
  safe = tf.where(peak > 0, peak, tf.ones_like(peak))
  finite = is_finite(tree) & tf.math.is_finite(ratio)
  norm = ratio * safe  # It may overflow to infinity, which is above the clip norm.
  inside = norm <= clip_norm
  size = clip_norm if weight.passes else weight.norm(norm, clip_norm)

  def leaf(v: tf.Tensor) -> tf.Tensor:
    clipped = (v / safe) * (size / tf.maximum(ratio, 1))
    clipped = tf.where(inside, v, clipped) if weight.passes else clipped
    return tf.where(finite, clipped, tf.zeros_like(v))

  return trees.map(leaf, tree)


def project_record(
    ask: contract.Ask, query: contract.Query, clip_norm: trees.Scalar,
    gradient: trees.Tree) -> contract.Sums:
  """Returns one record's contribution to one ask.

  Args:
    ask: `contract.Ask`.
    query: `contract.Query`; only its `scale` is used here.
    clip_norm: [] absolute clip norm in scaled units.
    gradient: Tree of the record's gradients, float32 or float64.

  Returns:
    `contract.Sums` with `||total||_2 <= clip_norm` in scaled space.
  """
  checks.one_of(('rescale', 'euclidean'), projection=ask.projection)
  by_part = _by_part(ask, query, clip_norm, gradient)
  square: trees.Tree = ()
  if ask.projection == 'euclidean':
    total = euclidean(query.scale, clip_norm, gradient)
  else:
    leaves: Dict[int, tf.Tensor] = {}
    for part, scaled in by_part:
      leaves.update(zip(part.leaves, clip(scaled, part.clip, ask.weight)))
    total = tf.nest.pack_sequence_as(gradient, [leaves[i] for i in range(len(leaves))])
    if ask.groups:  # The whole record is zero if any group is not finite.
      finite = is_finite([scaled for _, scaled in by_part])
      total = trees.map(lambda t: tf.where(finite, t, tf.zeros_like(t)), total)
  if ask.squares:
    square = trees.map(tf.square, total)
  side: trees.Tree = ()
  if ask.side_query is not None:
    scaled = [leaves for _, leaves in by_part]
    values = side_values(ask.side_query, _norm(scaled), clip_norm, list(map(_norm, scaled)),
                         [part.clip for part, _ in by_part])
    side = tf.where(is_finite(scaled), values, tf.zeros_like(values))
  return contract.Sums(total, square, side)


def side_values(
    side: contract.SideQuery, norm: tf.Tensor, clip_norm: trees.Scalar,
    norms: Sequence[tf.Tensor], clips: Sequence[trees.Scalar]) -> tf.Tensor:
  """Returns a side query's values for norms [...], with `norms` and `clips` of the groups."""
  if not side.of_groups:
    return side.of_norm(norm, weights.like(clip_norm, norm))
  return side.of_norm(tf.stack(norms, -1), tf.stack([weights.like(one, norm) for one in clips]))


def scaled_norm(ask: contract.Ask, query: contract.Query, gradient: trees.Tree) -> tf.Tensor:
  """Returns the [] norm of a record in the geometry of a query; not finite if the record is not."""
  return _norm([leaves for _, leaves in _by_part(ask, query, 1.0, gradient)])


def _by_part(
    ask: contract.Ask, query: contract.Query, clip_norm: trees.Scalar,
    gradient: trees.Tree) -> List[Tuple[Part, List[tf.Tensor]]]:
  """Returns the parts of one record, each with its scaled leaves."""
  # TFF may pass an absent scale as another empty nest.
  scaled = geometry.rescale(gradient, query.scale) if tf.nest.flatten(query.scale) else gradient
  leaves = tf.nest.flatten(scaled)
  return [(part._replace(clip=weights.like(part.clip, leaves[part.leaves[0]])),
           [part.scaled(leaves[i]) for i in part.leaves])
          for part in parts(ask, query, clip_norm, len(leaves))]


def _norm(tree: trees.Tree) -> tf.Tensor:
  ratio, peak = norm_and_peak(tree)
  return ratio * peak


def euclidean(scale: trees.Tree, clip_norm: trees.Scalar, gradient: trees.Tree) -> trees.Tree:
  """Projects `gradient` on the ellipsoid, exactly in the Euclidean norm; in scaled space.

  The point y nearest to x with `||s * y|| <= clip_norm` is `y_j = x_j / (1 + lam a_j)`, where
  `a = (s / clip_norm)**2` and lam > 0 is the root of `sum a_j y_j**2 = 1`. Newton's method finds it
  from zero, monotonically (Asi et al. 2021, Algorithm 1). A last rescaling makes the bound hold
  whatever the rounding.
  """
  if trees.absent(scale):
    return clip(gradient, clip_norm)
  if geometry.is_kronecker(scale):
    raise ValueError("`projection` must be 'rescale' for scales that are `contract.Kronecker`: the "
                     "nearest point is known for diagonal ones only. Received: 'euclidean'.")
  x, s = trees.flatten(gradient), trees.flatten(scale)
  finite = is_finite(x) & is_finite(s * x)
  x = tf.where(finite, x, tf.zeros_like(x))
  # Unit peak in scaled space: no square overflows, and the root is scale free.
  peak = tf.reduce_max(tf.abs(s * x))
  safe = tf.where(peak > 0, peak, tf.ones_like(peak))
  u = s * x / safe  # scaled point, magnitudes <= 1
  radius = clip_norm / safe  # clip norm in the same units
  top = tf.reduce_max(s)
  a = tf.square(s / top)  # curvature relative to the largest, in (0, 1]

  def newton(step: tf.Tensor, lam: tf.Tensor) -> Tuple[tf.Tensor, tf.Tensor]:
    # Newton on 1/||.||, concave in lam: few steps, never beyond the root.
    shrink = 1 / (1 + lam * a)
    point = u * shrink
    top = tf.reduce_max(tf.abs(point))
    w = tf.square(tf.math.divide_no_nan(point, top))  # Neither overflows nor vanishes.
    square = tf.reduce_sum(w)
    excess = top * tf.sqrt(square) / radius - 1
    slope = tf.math.divide_no_nan(tf.reduce_sum(w * a * shrink), square)
    return step + 1, lam + tf.math.divide_no_nan(tf.maximum(excess, 0), slope)

  _, lam = tf.while_loop(
      lambda step, lam: step < 16, newton, (tf.constant(0), tf.zeros([], x.dtype)))
  return trees.unflatten(clip(u * safe / (1 + lam * a), clip_norm), gradient)


class Part(NamedTuple):
  """The variables that are clipped by one norm: a group of an ask, or all of them."""

  leaves: Tuple[int, ...]
  scale: trees.Scalar  # [] by which the group is multiplied, or () for one.
  clip: trees.Scalar  # [] clip norm.

  def scaled(self, x: tf.Tensor) -> tf.Tensor:
    return x if trees.absent(self.scale) else tf.cast(self.scale, x.dtype) * x


def bounds(query: contract.Query, clip_norm: trees.Scalar) -> Tuple[tf.Tensor, tf.Tensor]:
  """Returns `(scale, absolute clip norm)`, [K] each.

  Whatever a rule asks for, the squares of the clip norms add up to that of `clip_norm` at most.
  """
  relative = tf.convert_to_tensor(query.groups.clip)
  relative = tf.maximum(relative, tf.zeros_like(relative))
  whole = tf.maximum(tf.norm(relative), tf.ones([], relative.dtype))
  return tf.convert_to_tensor(query.groups.scale), tf.cast(clip_norm, relative.dtype) * (
      relative / whole)


def parts(
    ask: contract.Ask, query: contract.Query, clip_norm: trees.Scalar, count: int) -> List[Part]:
  """Returns the parts of records of `count` leaves. Raises unless each leaf has a group."""
  if not ask.groups:
    return [Part(tuple(range(count)), (), clip_norm)]
  if len(ask.groups) != count:
    raise ValueError('`groups` must name a group for every variable. '
                     f'Received: groups={ask.groups} for {count} variables.')
  scale, clips = bounds(query, clip_norm)
  members = wrapping.cut(list(range(count)), ask.groups, 1 + max(ask.groups))
  return [Part(tuple(leaves), scale[k], clips[k]) for k, leaves in enumerate(members)]
