"""From one record's gradient to a clipped sum: the only layer that sees private data.

An engine answers every ask of a step at once:

    engine(model, loss, batch, asks, queries, clips) -> Clipped

`queries` fix the geometry (public functions of past releases), `clips` are the
absolute clip norms in that geometry. Whatever the engine, the sums it returns
change by at most one clip norm (L2, scaled space) when a record is added or
removed: `project_record` is the definition, other engines are faster ways to
the same numbers.
"""

from typing import Any, NamedTuple, Tuple

import tensorflow as tf

from tfdp_adaptive.rules import base


class Batch(NamedTuple):
  """Examples along the leading axis of every tensor.

  Attributes:
    x: Nest of model inputs.
    y: Nest of targets.
    sample_weight: [n] or [n, ...] weights of the losses, or `()`.
    mask: [n] bool; False for padding, which counts as no record at all.
  """

  x: Any
  y: Any
  sample_weight: Any
  mask: tf.Tensor


class Clipped(NamedTuple):
  """What an engine returns. `sums` is SECRET; so are outputs and losses."""

  sums: Tuple[base.Sums, ...]  # One per ask, trees like `model.trainable_variables`.
  outputs: Any  # Nest of predictions for the whole batch, for metrics.
  losses: tf.Tensor  # [n] loss of every example, before masking.
  norms: Any = ()  # One [n] per ask: scaled gradient norms before clipping, for diagnostics.


def norm_and_peak(tree):
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


def is_finite(tree):
  """[] bool: whether every element of every leaf is finite."""
  return tf.reduce_all(tf.stack([
      tf.reduce_all(tf.math.is_finite(leaf)) for leaf in tf.nest.flatten(tree)]))


def clip(tree, clip_norm):
  """`v * min(1, clip_norm / ||v||)` of one record; zero if any of it is not finite.

  NaN never takes the pass-through branch, and huge finite records are brought
  down through their peak, so no intermediate overflows (architecture, 5.4).
  """
  ratio, peak = norm_and_peak(tree)
  safe = tf.where(peak > 0, peak, tf.ones_like(peak))
  finite = is_finite(tree) & tf.math.is_finite(ratio)
  # ratio * safe may overflow to inf, which is rightly not below the clip norm.
  inside = ratio * safe <= clip_norm

  def leaf(v):
    clipped = tf.where(inside, v, (v / safe) * (clip_norm / tf.maximum(ratio, 1)))
    return tf.where(finite, clipped, tf.zeros_like(v))

  return base.map_tree(leaf, tree)


def project_record(ask, query, clip_norm, gradient):
  """The single per-record map: one record's contribution to one ask.

  Args:
    ask: `base.Ask`.
    query: `base.Query`; only its `scale` is used here.
    clip_norm: [] absolute clip norm in scaled units.
    gradient: Tree of the record's gradients, float32 or float64.

  Returns:
    `base.Sums` with `||total||_2 <= clip_norm` in scaled space.
  """
  if ask.projection == 'euclidean':
    total = euclidean(query.scale, clip_norm, gradient)
  elif ask.projection == 'rescale':
    total = clip(_scaled(query, gradient), clip_norm)
  else:
    raise ValueError("`projection` must be 'rescale' or 'euclidean'. "
                     f'Received: projection={ask.projection!r}.')
  square = ()
  if ask.second is not None and ask.second.per_record_square:
    square = base.map_tree(tf.square, total)
  return base.Sums(total, square)


def scaled_norm(query, gradient):
  """[] norm of a record in the geometry of a query; not finite for records that are not."""
  ratio, peak = norm_and_peak(_scaled(query, gradient))
  return ratio * peak


def _scaled(query, gradient):
  return gradient if _absent(query.scale) else base.map_tree(tf.multiply, query.scale, gradient)


def euclidean(scale, clip_norm, gradient):
  """Exact Euclidean projection of `gradient` on the ellipsoid, in scaled space.

  The point y nearest to x with `||s * y|| <= clip_norm`: `y_j = x_j / (1 + lam a_j)`
  with `a = (s / clip_norm)**2` and lam > 0 the root of `sum a_j y_j**2 = 1`, by
  Newton from zero, which is monotone here (Asi et al. 2021, Algorithm 1). A last
  rescaling makes the bound hold whatever the rounding.
  """
  if _absent(scale):
    return clip(gradient, clip_norm)
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

  def newton(step, lam):
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


def _absent(tree):
  return isinstance(tree, tuple) and not tree


def gradients(tape, target, variables):
  """Dense gradients of float32 at least; zeros for variables the target does not reach.

  Keras 3 variables cannot be passed to TensorFlow's own `unconnected_gradients`.
  """
  return [
      tf.zeros(v.shape, base.widen(tf.convert_to_tensor(v)).dtype) if g is None else base.widen(g)
      for g, v in zip(tape.gradient(target, variables), variables)]


def add_sums(left, right):
  return base.map_tree(tf.add, left, right)


def zero_sums(ask, specs):
  """The sums of an empty batch."""
  square = base.zeros(specs) if ask.second is not None and ask.second.per_record_square else ()
  return base.Sums(base.zeros(specs), square)
