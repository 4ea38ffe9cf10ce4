# SPDX-License-Identifier: Apache-2.0
"""Preconditions every gradient by a matrix on either side, learnt from noisy gradients.

For a variable seen as a [d, p] matrix, with g the noisy gradients taken out of the scaled space
and v the variance of their noise in that space,

    L = average of g g' - v tr((G'G)^-1) (A'A)^-1       R = average of g'g - v tr((A'A)^-1) (G'G)^-1
    A = (L d / tr L + scale_epsilon)^-1/4               G = (R p / tr R + scale_epsilon)^-1/4

where negative eigenvalues, which are noise, count as zero. Records are clipped and noised as
`A g G'`, with A and G of the last refresh. The state is in the coordinates in which A and G are
diagonal, because the noise is independent there, coordinate by coordinate.
"""

from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import contract
from tfdp_adaptive import gate
from tfdp_adaptive import trees
from tfdp_adaptive.rules import moments


class Side(NamedTuple):
  """One side of a matrix, with k rows or columns."""

  moment: tf.Tensor  # [k, k] average of g g' without its noise, in the basis.
  basis: tf.Tensor  # [k, k] orthonormal columns.
  root: tf.Tensor  # [k] what the scale divides by along them.
  scale: tf.Tensor  # [k, k] symmetric, `basis diag(1 / root) basis'`.


class State(NamedTuple):
  step: tf.Tensor  # [] int64, releases consumed.
  first: trees.Tree  # First moment, in the basis.
  second: Any  # Per variable: what the direction is divided by the root of; noise taken off.
  left: Any  # Per variable: a `Side`, or () for none.
  right: Any
  root: Any  # Per variable that is no matrix: what its scale divides by; else ().


def matrices(shape: Sequence[int], max_size: int) -> Optional[Tuple[int, int, int]]:
  """Returns `(count, d, p)`, the matrices of a variable; None if it is scaled by coordinate."""
  shape = [int(size) for size in shape]
  if len(shape) < 2 or (len(shape) > 3 and shape[-1] == 1):
    return None
  cut = len(shape) - 1
  if len(shape) == 3:  # Kernels of heads have the square split, whichever side these are on.
    cut = min((2, 1), key=lambda k: max(np.prod(shape[:k]), np.prod(shape[k:])))
  d, p = int(np.prod(shape[:cut])), int(np.prod(shape[cut:]))
  if len(shape) > 3 and d > max_size:  # A filter's channels alone.
    return d // shape[-2], shape[-2], p
  return 1, d, p


def rule(
    name: str, beta_1: float, beta_2: float, epsilon: float, scale_epsilon: float,
    refresh_every: int, max_size: int, rotated: bool) -> contract.Rule:
  """Returns Shampoo, or Adam in its basis if `rotated`; see `dp_shampoo` and `dp_soap`."""
  checks.decay(beta_1=beta_1, beta_2=beta_2)
  checks.positive(epsilon=epsilon, scale_epsilon=scale_epsilon)
  checks.whole(refresh_every=refresh_every, max_size=max_size)

  def init(specs: trees.Tree) -> State:
    flat = tf.nest.flatten(specs)
    views = [matrices(spec.shape, max_size) for spec in flat]
    side = lambda spec, size: _side(size, spec.dtype) if 1 < size <= max_size else ()
    return State(
        moments.first_step(), trees.zeros(specs),
        tuple(tf.zeros(spec.shape if rotated or view is None else [], spec.dtype)
              for spec, view in zip(flat, views)),
        tuple(() if view is None else side(spec, view[1]) for spec, view in zip(flat, views)),
        tuple(() if view is None else side(spec, view[2]) for spec, view in zip(flat, views)),
        tuple(tf.ones(spec.shape, spec.dtype) if view is None else ()
              for spec, view in zip(flat, views)))

  def update(state: State, release: contract.Release) -> Tuple[trees.Tree, State]:
    step = state.step + 1
    directions, following = [], []
    for mean, first, *others in zip(
        tf.nest.flatten(release.mean), tf.nest.flatten(state.first), *state[2:]):
      direction, *after = _variable(mean, release.variance, step, first, *others)
      directions.append(direction)
      following.append(tuple(after))
    refresh = tf.equal(step % refresh_every, 0)
    columns = list(zip(*tf.cond(
        refresh, lambda: tuple(_refreshed(one, max_size, scale_epsilon) for one in following),
        lambda: tuple(following))))
    pack = lambda leaves: tf.nest.pack_sequence_as(state.first, list(leaves))
    return pack(directions), State(step, pack(columns[0]), *columns[1:])

  def _variable(
      mean: tf.Tensor, variance: tf.Tensor, step: tf.Tensor, first: tf.Tensor, second: tf.Tensor,
      left: Any, right: Any, root: Any) -> Tuple[Any, ...]:
    """Returns `(direction, first, second, left, right, root)` of one variable."""
    view, variance = matrices(mean.shape, max_size), tf.cast(variance, mean.dtype)
    average = lambda beta, before, now: beta * before + (1 - beta) * now
    if view is None:
      g, noise = mean * root, variance * tf.square(root)
    else:
      rows, columns = (tf.square(side.root) if side else tf.ones([size], mean.dtype)
                       for side, size in zip((left, right), view[1:]))
      matrix = _turned(tf.reshape(mean, view), left, right, power=1)
      g, noise = tf.reshape(matrix, mean.shape), (variance * rows)[:, tf.newaxis] * columns
      if left:
        of_left = tf.linalg.diag(variance * view[0] * tf.reduce_sum(columns) * rows)
        left = left._replace(moment=average(
            beta_2, left.moment, tf.einsum('nij,nkj->ik', matrix, matrix) - of_left))
      if right:
        of_right = tf.linalg.diag(variance * view[0] * tf.reduce_sum(rows) * columns)
        right = right._replace(moment=average(
            beta_2, right.moment, tf.einsum('nij,nik->jk', matrix, matrix) - of_right))
    first = average(beta_1, first, g)
    square = tf.square(g)
    if second.shape != g.shape:  # One number for all of a matrix.
      square, noise = tf.reduce_mean(square), tf.reduce_mean(noise)
    elif view is not None:
      square, noise = tf.reshape(square, view), noise[tf.newaxis]
    second = average(beta_2, second, tf.reshape(square - noise, second.shape))
    size = second if rotated else tf.reduce_mean(second)
    normal_1, normal_2 = (
        1 / moments.normalizer(beta, step, mean.dtype) for beta in (beta_1, beta_2))
    direction = first * normal_1 * tf.math.rsqrt(tf.maximum(size * normal_2, epsilon**2))
    if view is None:
      direction = direction if rotated else direction / root
    else:
      direction = _turned(
          tf.reshape(direction, view), left, right, back=True, power=0 if rotated else -1)
    return tf.reshape(direction, mean.shape), first, second, left, right, root

  return contract.Rule(
      init, contract.in_scale(lambda state: _scale(state, max_size)),
      contract.of_mean(update), name=name,
      cautions=moments.epsilon_cautions(epsilon), own_clip=True)


def _scale(state: State, max_size: int) -> trees.Tree:
  scales: List[Any] = []
  for first, left, right, root in zip(
      tf.nest.flatten(state.first), state.left, state.right, state.root):
    view = matrices(first.shape, max_size)
    scales.append(1 / root if view is None else contract.Kronecker(*[
        side.scale if side else tf.ones([size], first.dtype)
        for side, size in zip((left, right), view[1:])]))
  return tf.nest.pack_sequence_as(state.first, scales)


def _side(size: int, dtype: tf.DType) -> Side:
  eye = tf.eye(size, dtype=dtype)
  return Side(tf.zeros_like(eye), eye, tf.ones([size], dtype), eye)


def _turned(
    x: tf.Tensor, left: Any, right: Any, back: bool = False, power: int = 0) -> tf.Tensor:
  """Returns matrices [count, d, p] in the coordinates of both bases, or back from them.

  There they are multiplied by the power of both roots, without a pass over them.
  """
  bases = [side and side.basis * side.root**power if power else side and side.basis
           for side in (left, right)]
  if left:
    basis = bases[0][tf.newaxis]
    x = tf.matmul(basis if x.shape[0] == 1 else tf.tile(basis, [x.shape[0], 1, 1]), x,
                  transpose_a=not back)
  if right:
    size = right.root.shape[0]
    x = tf.reshape(tf.matmul(tf.reshape(x, [-1, size]), bases[1], transpose_b=back), x.shape)
  return x


def _refreshed(
    variable: Tuple[Any, ...], max_size: int, scale_epsilon: float) -> Tuple[Any, ...]:
  """Returns a variable in the coordinates and with the scale of its current moments."""
  first, second, left, right, root = variable
  view = matrices(first.shape, max_size)
  if view is None:
    finite = tf.reduce_all(tf.math.is_finite(second))
    return first, second, left, right, tf.where(
        finite, relative_root(second, scale_epsilon, 0.5), root)
  new_left, new_right = (
      _decomposed(side, scale_epsilon) if side else () for side in (left, right))
  turned = _turned(tf.reshape(first, view), left, right, back=True)
  turned = tf.reshape(_turned(turned, new_left, new_right), first.shape)
  return turned, second, new_left, new_right, root


def _decomposed(side: Side, scale_epsilon: float) -> Side:
  """Returns the eigenpairs of its moment, in float64; as it was where that is not finite."""
  dtype = side.moment.dtype
  basis = tf.cast(side.basis, tf.float64)
  moment = basis @ tf.matmul(tf.cast(side.moment, tf.float64), basis, transpose_b=True)
  finite = tf.reduce_all(tf.math.is_finite(moment))
  values, vectors = tf.linalg.eigh(tf.where(
      finite, (moment + tf.linalg.matrix_transpose(moment)) / 2, tf.eye(
          moment.shape[0], dtype=tf.float64)))
  roots = relative_root(values, scale_epsilon, 0.25)
  scale = tf.matmul(vectors / roots, vectors, transpose_b=True)
  after = Side(tf.linalg.diag(values), vectors, roots, scale)
  return Side(*[tf.where(finite, tf.cast(new, dtype), old) for new, old in zip(after, side)])


def relative_root(moment: tf.Tensor, scale_epsilon: float, power: float) -> tf.Tensor:
  """Returns (moment / mean moment + scale_epsilon)^power; about ones if all moments are equal."""
  positive = tf.maximum(moment, 0)
  mean = tf.reduce_mean(positive)
  relative = tf.where(mean > 0, positive / tf.where(mean > 0, mean, 1), tf.ones_like(positive))
  return tf.pow(relative + scale_epsilon, power)


@gate.part
def dp_shampoo(
    beta_1: float = 0.9, beta_2: float = 0.999, epsilon: float = 1e-4, *,
    scale_epsilon: float = 1e-2, refresh_every: int = 50, max_size: int = 512) -> contract.Rule:
  """Use DP-Shampoo (experimental) as an alternative to DP-SOAP, if inputs are correlated.

  Shampoo (Gupta et al., arXiv:1802.09568) with scale-then-privatize between its matrices.
  The private form is ours. A record's gradient W of a matrix is clipped and noised as `A W G`,
  and with g the release taken back to gradient units, v the variance of its noise there:

      L = average of g g' less its noise;   A = (L d / tr L + scale_epsilon)^-1/4
      R = average of g'g less its noise;    G = (R p / tr R + scale_epsilon)^-1/4
      direction = A m G / max(sqrt(average of g^2 less its noise), epsilon)

  with m the normalized first moment: This is Shampoo's direction times (d p)^(1/4), so learning
  rates are the same as for Adam. Eigenvalues that come out negative are noise and count as zero.
  Vectors have a scale per coordinate, `(nu / mean(nu) + scale_epsilon)^-1/2`.

  A and G are about one, so `l2_norm_clip` is in gradient units. A gradient in directions where
  gradients are large becomes shorter, by at most the factor (d p)^(1/4). A and G stay fixed for
  `refresh_every` steps. During these steps, correlated noise cancels as in DP-SGD. With a large
  `scale_epsilon`, the geometry is that of DP-SGD.

  Args:
    beta_1: Decay of the first moment, in [0, 1).
    beta_2: Decay of the second moments, in [0, 1).
    epsilon: Floor of the root mean square, in gradient units, > 0.
    scale_epsilon: Added to eigenvalues relative to their mean, > 0.
    refresh_every: Steps between two decompositions, in float64. On a CPU, XLA is slow at
      decompositions: it takes about eight seconds for a side of 512, and TensorFlow a tenth of a
      second. On a CPU, compile the model with `jit_compile=False`, because Keras 3 uses XLA by
      default.
    max_size: Longer sides are not scaled. Most embedding tables have such a side.

  Returns:
    A `contract.Rule` whose direction has no unit.
  """
  return rule('dp_shampoo', beta_1, beta_2, epsilon, scale_epsilon, refresh_every, max_size,
              rotated=False)


def dp_soap(
    beta_1: float = 0.9, beta_2: float = 0.999, epsilon: float = 1e-4, *,
    scale_epsilon: float = 1e-2, refresh_every: int = 50, max_size: int = 512) -> contract.Rule:
  """Use DP-SOAP for weight matrices whose inputs are correlated or in raw units.

  SOAP (Vyas et al., arXiv:2409.11321) with scale-then-privatize between its matrices.
  The private form is ours. Records are clipped and noised as in `dp_shampoo`, between A and G;
  with Q_A, Q_G the eigenvectors of these, and h = Q_A' g Q_G the release in their coordinates:

      nu = average of h^2 less its noise, which there is v / (a_i c_j)^2 at row i, column j
      direction = Q_A (normalized average of h / sqrt(max(nu, epsilon^2))) Q_G'

  with a, c the eigenvalues of A and G. At a refresh, the first moment is transformed to the new
  coordinates, and nu stays the same, as in SOAP. Vectors are trained as with Adam, in their own
  coordinates.

  Args:
    beta_1: Decay of the first moment, in [0, 1).
    beta_2: Decay of the second moments, in [0, 1).
    epsilon: Floor of the root of nu, in gradient units, > 0.
    scale_epsilon: Added to eigenvalues relative to their mean, > 0.
    refresh_every: Steps between two decompositions, see `dp_shampoo`.
    max_size: Longer sides are not scaled.

  Returns:
    A `contract.Rule` whose direction has no unit.
  """
  return rule('dp_soap', beta_1, beta_2, epsilon, scale_epsilon, refresh_every, max_size,
              rotated=True)
