# SPDX-License-Identifier: Apache-2.0
"""Defines clipping: maps one record's gradient to its clipped contribution."""

from typing import Any, Tuple

import tensorflow as tf

from tfdp_adaptive import contract
from tfdp_adaptive import geometry
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import groups
from tfdp_adaptive.clipping import weights


def norm_and_peak(tree: trees.Tree) -> Tuple[tf.Tensor, tf.Tensor]:
  """Global L2 norm of a tree as `(norm / peak, peak)`, `peak` its largest magnitude.

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
  """[] bool: whether every element of every leaf is finite."""
  return tf.reduce_all(tf.stack([
      tf.reduce_all(tf.math.is_finite(leaf)) for leaf in tf.nest.flatten(tree)]))


def clip(
    tree: trees.Tree, clip_norm: trees.Scalar,
    weight: contract.Weight = contract.Weight()) -> trees.Tree:
  """`v * w(||v||)` of one record, by default `w = min(1, clip_norm / ||v||)`; see `weights`.

  Zero if any of it is not finite: NaN never takes the pass-through branch, and huge
  finite records are brought down through their peak, so no intermediate overflows
  (architecture, 5.4).
  """
  ratio, peak = norm_and_peak(tree)
  safe = tf.where(peak > 0, peak, tf.ones_like(peak))
  finite = is_finite(tree) & tf.math.is_finite(ratio)
  norm = ratio * safe  # May overflow to inf, which is rightly not below the clip norm.
  hard = weight.kind == 'hard'
  inside = norm <= clip_norm
  length = clip_norm if hard else weights.length(weight, norm, clip_norm)

  def leaf(v: tf.Tensor) -> tf.Tensor:
    clipped = (v / safe) * (length / tf.maximum(ratio, 1))
    clipped = tf.where(inside, v, clipped) if hard else clipped
    return tf.where(finite, clipped, tf.zeros_like(v))

  return trees.map(leaf, tree)


def clip_alone(
    tree: trees.Tree, clip_norm: trees.Scalar,
    weight: contract.Weight = contract.Weight()) -> Tuple[trees.Tree, tf.Tensor]:
  """`(clip(tree, clip_norm, weight), its norm)`, in two passes where the norm is ordinary.

  For a record by itself: inside `tf.vectorized_map` both ways would be gone.
  """
  # Not finite where an element is not, nor where a large one overflows.
  # `tf.nn.l2_loss` would save a pass, and become a loop inside `tf.vectorized_map`.
  norm = tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(leaf)) for leaf in tf.nest.flatten(tree)]))
  clip_norm = tf.cast(clip_norm, norm.dtype)

  def quickly() -> Tuple[trees.Tree, tf.Tensor]:
    factor = weights.factor(weight, norm, clip_norm)
    return trees.map(lambda v: factor * v, tree), norm

  def carefully() -> Tuple[trees.Tree, tf.Tensor]:
    ratio, peak = norm_and_peak(tree)
    return clip(tree, clip_norm, weight), ratio * peak

  # Squares that underflow add up to less than any such clip norm, or norm.
  ordinary = clip_norm > 1e-12
  if weight.kind != 'hard':
    ordinary &= norm > 1e-12
  return tf.cond(tf.math.is_finite(norm) & ordinary, quickly, carefully)


def project_record(
    ask: contract.Ask, query: contract.Query, clip_norm: trees.Scalar, gradient: trees.Tree,
    alone: bool = False) -> contract.Sums:
  """The single per-record map: one record's contribution to one ask.

  Args:
    ask: `contract.Ask`.
    query: `contract.Query`; only its `scale` is used here.
    clip_norm: [] absolute clip norm in scaled units.
    gradient: Tree of the record's gradients, float32 or float64.
    alone: Whether this is not inside `tf.vectorized_map`: it then takes fewer passes.

  Returns:
    `contract.Sums` with `||total||_2 <= clip_norm` in scaled space.
  """
  if ask.groups:
    total = groups.clipped(ask, query, clip_norm, _scaled(query, gradient),
                           lambda leaves, bound: clip(leaves, bound, ask.weight))
  elif ask.projection == 'euclidean':
    total = euclidean(query.scale, clip_norm, gradient)
  elif ask.projection != 'rescale':
    raise ValueError("`projection` must be 'rescale' or 'euclidean'. "
                     f'Received: projection={ask.projection!r}.')
  elif alone:
    total, _ = clip_alone(_scaled(query, gradient), clip_norm, ask.weight)
  else:
    total = clip(_scaled(query, gradient), clip_norm, ask.weight)
  square = ()
  if ask.second is not None and ask.second.per_record_square:
    square = trees.map(tf.square, total)
  return contract.Sums(total, square, _numbers(ask, query, clip_norm, gradient))


def _numbers(
    ask: contract.Ask, query: contract.Query, clip_norm: trees.Scalar, gradient: trees.Tree) -> Any:
  """Returns a record's contribution to the ask's rider; zero if it is not finite."""
  if ask.rider is None:
    return ()
  scaled = _scaled(query, gradient)
  if ask.groups:
    scaled = groups.scaled(ask, query, scaled)
  if ask.rider.of_groups:
    norms = tf.stack([_norm(group) for group in scaled])
    _, clips = groups.bounds(query, clip_norm)
    numbers = ask.rider.of_norm(norms, tf.cast(clips, norms.dtype))
  else:
    numbers = ask.rider.of_norm(scaled_norm(ask, query, gradient), clip_norm)
  return tf.where(is_finite(scaled), numbers, tf.zeros_like(numbers))


def scaled_norm(ask: contract.Ask, query: contract.Query, gradient: trees.Tree) -> tf.Tensor:
  """[] norm of a record in the geometry of a query; not finite for records that are not."""
  scaled = _scaled(query, gradient)
  return _norm(groups.scaled(ask, query, scaled) if ask.groups else scaled)


def _norm(tree: trees.Tree) -> tf.Tensor:
  ratio, peak = norm_and_peak(tree)
  return ratio * peak


def _scaled(query: contract.Query, gradient: trees.Tree) -> trees.Tree:
  scaled = tf.nest.flatten(query.scale)  # TFF may hand on what is absent as another empty nest.
  return geometry.rescale(gradient, query.scale) if scaled else gradient


def euclidean(scale: trees.Tree, clip_norm: trees.Scalar, gradient: trees.Tree) -> trees.Tree:
  """Exact Euclidean projection of `gradient` on the ellipsoid, in scaled space.

  The point y nearest to x with `||s * y|| <= clip_norm`: `y_j = x_j / (1 + lam a_j)`
  with `a = (s / clip_norm)**2` and lam > 0 the root of `sum a_j y_j**2 = 1`, by
  Newton from zero, which is monotone here (Asi et al. 2021, Algorithm 1). A last
  rescaling makes the bound hold whatever the rounding.
  """
  if trees.absent(scale):
    return clip(gradient, clip_norm)
  if geometry.is_kronecker(scale):
    raise ValueError("`projection` must be 'rescale' for scales that are `contract.Kronecker`: the "
                     "nearest point is known for diagonal ones only. Received: 'euclidean'.")
  leaves = tf.nest.flatten(gradient)
  x = tf.concat([tf.reshape(leaf, [-1]) for leaf in leaves], 0)
  s = tf.concat([tf.reshape(leaf, [-1]) for leaf in tf.nest.flatten(scale)], 0)
  finite = is_finite(x) & is_finite(s * x)
  x = tf.where(finite, x, tf.zeros_like(x))
  # Unit peak in scaled space: no square overflows, and the root is scale free.
  peak = tf.reduce_max(tf.abs(s * x))
  safe = tf.where(peak > 0, peak, tf.ones_like(peak))
  u = s * x / safe  # scaled point, magnitudes <= 1
  radius = clip_norm / safe  # of the ball around it, in the same units
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
  flat = clip(u * safe / (1 + lam * a), clip_norm)
  parts = tf.split(flat, [leaf.shape.num_elements() for leaf in leaves])
  return tf.nest.pack_sequence_as(
      gradient, [tf.reshape(p, leaf.shape) for p, leaf in zip(parts, leaves)])

