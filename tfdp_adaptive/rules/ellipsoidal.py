"""PASAN and PAGAN: clip and noise in a fixed ellipsoid that fits the gradients."""

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive.rules import base
from tfdp_adaptive.rules import constraints
from tfdp_adaptive.rules import subspaces


class State(NamedTuple):
  step: tf.Tensor  # [] int64, releases consumed.
  total: base.Tree  # Sum of squares: [] of norms (PASAN), or like the parameters (PAGAN).
  scale: base.Tree  # A^(1/2), public; or () for a ball.


def pasan(ellipsoid=None, projection='euclidean', box=None, radius=None):
  """PASAN: private SGD with an adaptive step size, in an ellipsoid that fits the gradients.

  Asi et al. (ICML 2021), Algorithm 1:

      g = (sum_j pi_A(g_j) + A^(-1/2) noise) / batch_size;   total += ||g||^2
      direction = g / sqrt(total),   parameters projected onto the constraint set

  Records are projected onto `sum_j a_j g_j^2 <= l2_norm_clip^2`: the clip norm
  is 1 where A holds the bound, as `tfdp.rules.ellipsoids` makes it. The paper's
  output is the average of the iterates (`average_iterates`).

  Args:
    ellipsoid: None (a ball), or a > 0: a number or one array per variable, in
      inverse squared gradient units. From public data, or privately estimated;
      never from private gradients as they are.
    projection: pi_A: 'euclidean' (the paper's) or 'rescale' (cheaper).
    box: None, or (low, high) for every parameter.
    radius: None, or the largest L2 norm of all parameters together.

  Returns:
    A `base.Rule` whose direction has no unit and a norm of at most one.
  """

  def add(total, mean):
    return total + tf.add_n([tf.reduce_sum(tf.square(g)) for g in tf.nest.flatten(mean)])

  def direction(mean, total):
    return base.map_tree(lambda g: base.safe_divide(g, tf.cast(tf.sqrt(total), g.dtype)), mean)

  def project(state, params):
    del state
    return constraints.into_ball(radius, params)

  return _ellipsoidal(lambda specs: tf.zeros([], base.dtype_of(specs)), add, direction, project,
                      ellipsoid, projection, box, radius, 'pasan')


def pagan(ellipsoid=None, projection='euclidean', box=None, radius=None):
  """PAGAN: private AdaGrad in an ellipsoid that fits the gradients.

  Asi et al. (ICML 2021), Algorithm 2:

      total += g^2;   direction = g / sqrt(total)   (0/0 := 0)
      parameters projected onto the constraint set in the metric diag(sqrt(total))

  The arguments are those of `pasan`. A ball is private AdaGrad.
  """

  def add(total, mean):
    return base.map_tree(lambda s, g: s + tf.square(g), total, mean)

  def direction(mean, total):
    return base.map_tree(lambda g, s: base.safe_divide(g, tf.sqrt(s)), mean, total)

  def project(state, params):
    return constraints.into_ball_weighted(
        radius, tf.sqrt(subspaces.flatten(state.total)), params)

  return _ellipsoidal(base.zeros, add, direction, project, ellipsoid, projection, box, radius,
                      'pagan')


def _ellipsoidal(zero, add, direction, into_ball, ellipsoid, projection, box, radius, name):
  base.check_one_of(('euclidean', 'rescale'), projection=projection)
  constraints.check(box, radius)
  for a in () if ellipsoid is None else tf.nest.flatten(ellipsoid):
    if not np.all((np.asarray(a) > 0) & np.isfinite(a)):
      raise ValueError('`ellipsoid` must be positive and finite everywhere. '
                       f'Received: ellipsoid={a}.')

  def init(specs):
    scale = () if ellipsoid is None else base.map_tree(
        tf.sqrt, base.constant_like(ellipsoid, specs, 'ellipsoid'))
    return State(base.first_step(), zero(specs), scale)

  def query(state, public=()):
    del public
    return (base.Query(state.scale),)

  def update(state, releases, public=()):
    del public
    (release,) = releases
    mean = base.unscale(release.mean, state.scale)
    total = add(state.total, mean)
    return direction(mean, total), State(state.step + 1, total, state.scale)

  def project(state, params):
    if box is not None:
      return constraints.into_box(box, params)
    return subspaces.unflatten(into_ball(state, subspaces.flatten(params)), params)

  return base.Rule(init, query, update, asks=(base.Ask(projection),),
                   project=None if box is None and radius is None else project, name=name)
