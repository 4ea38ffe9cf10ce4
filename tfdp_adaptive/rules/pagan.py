# SPDX-License-Identifier: Apache-2.0
"""PASAN and PAGAN: clip and noise in a fixed ellipsoid that fits the gradients."""

import math
from typing import Any, NamedTuple, Optional, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import contract
from tfdp_adaptive import gate
from tfdp_adaptive import geometry
from tfdp_adaptive import trees
from tfdp_adaptive.rules import constraints
from tfdp_adaptive.rules import moments


class State(NamedTuple):
  step: tf.Tensor  # [] int64, releases consumed.
  total: trees.Tree  # Sums of squares: [] of norms (PASAN), or like the parameters (PAGAN).
  scale: trees.Tree  # A^(1/2), public; or () for a ball.


@gate.part
def pasan(
    ellipsoid: trees.Tree = None, projection: str = 'euclidean',
    box: Optional[constraints.Box] = None, radius: Optional[float] = None) -> contract.Rule:
  """Use PASAN (experimental) for convex models with a public bound for each coordinate.

  Private SGD with an adaptive step size, in an ellipsoid that fits the gradients. Asi et al.
  (ICML 2021), Algorithm 1:

      g = (sum_j pi_A(g_j) + A^(-1/2) noise) / batch_size;   total += ||g||^2
      direction = g / sqrt(total),   parameters projected onto the constraint set

  Records are projected onto `sum_j a_j g_j^2 <= l2_norm_clip^2`: the clip norm
  is 1 where A holds the bound, as `tfdp.rules.pasan_ellipsoid` makes it. The paper's output is the
  average of the iterates. You can average weights that you save.

  Args:
    ellipsoid: None (a ball), or a > 0: a number or one array per variable, in
      inverse squared gradient units. Compute it from public data, or estimate it privately. Never
      compute it from the exact private gradients.
    projection: The projection pi_A: 'euclidean' (the paper's) or 'rescale' (cheaper).
    box: None, or (low, high) for every parameter.
    radius: None, or the largest L2 norm of all parameters together.

  Returns:
    A `contract.Rule` whose direction has no unit and a norm of at most one.
  """
  return _ellipsoidal(False, ellipsoid, projection, box, radius, 'pasan')


def pagan(
    ellipsoid: trees.Tree = None, projection: str = 'euclidean',
    box: Optional[constraints.Box] = None, radius: Optional[float] = None) -> contract.Rule:
  """Use PAGAN for convex models with a public bound for each coordinate of a gradient.

  Private AdaGrad in an ellipsoid that fits the gradients. Asi et al. (ICML 2021), Algorithm 2:

      total += g^2;   direction = g / sqrt(total)   (0/0 := 0)
      parameters projected onto the constraint set in the metric diag(sqrt(total))

  The arguments are those of `pasan`. A ball is private AdaGrad.
  """
  return _ellipsoidal(True, ellipsoid, projection, box, radius, 'pagan')


def _ellipsoidal(
    each: bool, ellipsoid: trees.Tree, projection: str, box: Optional[constraints.Box],
    radius: Optional[float], name: str) -> contract.Rule:
  """Returns the rule with a sum of squares for each coordinate, or one for all of them."""
  checks.one_of(('euclidean', 'rescale'), projection=projection)
  constraints.check(box, radius)
  for a in () if ellipsoid is None else tf.nest.flatten(ellipsoid):
    checks.require(np.all((np.asarray(a) > 0) & np.isfinite(a)),
                   'be positive and finite everywhere', ellipsoid=a)

  def init(specs: trees.Tree) -> State:
    scale = () if ellipsoid is None else trees.map(
        tf.sqrt, trees.constant_like(ellipsoid, specs, 'ellipsoid'))
    total = trees.map(lambda s: tf.zeros(s.shape if each else [], s.dtype), specs)
    return State(moments.first_step(), total, scale)

  def update(state: State, release: contract.Release) -> Tuple[trees.Tree, State]:
    mean = geometry.unscale(release.mean, state.scale)
    squares = moments.squared(mean)
    if not each:
      norm = tf.add_n([tf.reduce_sum(square) for square in tf.nest.flatten(squares)])
      squares = trees.map(lambda square: tf.cast(norm, square.dtype), squares)
    total = trees.map(tf.add, state.total, squares)
    return moments.divide(mean, trees.map(tf.sqrt, total)), State(
        state.step + 1, total, state.scale)

  def weights(state: State, params: trees.Tree) -> trees.Tree:
    return trees.map(lambda total, p: tf.broadcast_to(tf.sqrt(total), p.shape), state.total, params)

  return contract.Rule(init, contract.in_scale(lambda state: state.scale), contract.of_mean(update),
                       asks=(contract.Ask(projection),), name=name,
                       project=constraints.projection(box, radius, weights))


def pagan_ellipsoid(stddevs: trees.Tree, bound: Optional[float] = None) -> Any:
  """Returns the ellipsoid for `rules.pagan`: a = C / bound^2 with C = stddevs^(-4/3).

  Minimizes the error bound of Asi et al. (2021) for sub-Gaussian coordinates.

  Args:
    stddevs: [d] root mean squares of the gradient's coordinates, > 0, known or
      estimated from public data or by `tfdp.estimates.private_stddevs`; or a list of arrays,
      one per variable.
    bound: The bound of the gradient's norm in the metric C. With `l2_norm_clip=1`, records are
      clipped at this bound. Its root mean square by default.

  Returns:
    `ellipsoid`, in the structure of `stddevs`.
  """
  return _ellipsoid(stddevs, -4 / 3, bound)


def pasan_ellipsoid(stddevs: trees.Tree, bound: Optional[float] = None) -> Any:
  """Returns the ellipsoid for `rules.pasan`, as `pagan_ellipsoid` does: C = 1 / stddevs."""
  return _ellipsoid(stddevs, -1.0, bound)


def _ellipsoid(stddevs: trees.Tree, power: float, bound: Optional[float]) -> Any:
  arrays = [np.asarray(s, np.float64) for s in (
      stddevs if isinstance(stddevs, (list, tuple)) else [stddevs])]
  for s in arrays:
    if not np.all((s > 0) & np.isfinite(s)):
      raise ValueError(f'`stddevs` must be positive and finite. Received: {s}.')
  if bound is None:
    bound = math.sqrt(sum(np.sum(s**(2 + power)) for s in arrays))
  checks.positive(bound=bound)
  ellipsoid = [s**power / bound**2 for s in arrays]
  return ellipsoid if isinstance(stddevs, (list, tuple)) else ellipsoid[0]
