# SPDX-License-Identifier: Apache-2.0
"""Noisy AdaGrad: full-matrix or diagonal, with noise on the preconditioner itself.

The preconditioner is a function of all past CLEAN gradients, kept as a secret
by the privatizer. Each of its releases is a new query about all of them: it is
never amplified by sampling, and is paid for at every step (`running_root`).
"""

import math
from typing import Any, Callable, NamedTuple, Optional, Tuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import contract
from tfdp_adaptive import gate
from tfdp_adaptive import trees
from tfdp_adaptive.rules import constraints
from tfdp_adaptive.rules import moments
from tfdp_adaptive.rules import subspaces

MODES = ('truncate', 'floor', 'pinv')
LARGEST = 4096  # Parameters of the full matrix.


class State(NamedTuple):
  step: tf.Tensor  # [] int64, releases consumed.
  basis: trees.Tree  # [m, k] eigenvectors of the preconditioner, for `project`; or ().
  root: trees.Tree  # Its eigenvalues [k], or its diagonal like the parameters; or ().


@gate.part
def noisy_adagrad(
    participations: int,
    dimension: Optional[int] = None,
    basis: Optional[npt.ArrayLike] = None,
    diagonal: bool = False,
    mode: str = 'truncate',
    epsilon: float = 1e-8,
    relative_noise: float = 1.0,
    box: Optional[constraints.Box] = None,
    radius: Optional[float] = None) -> contract.Rule:
  """Use NoisyAdaGrad (experimental) for convex models of few parameters.

  AdaGrad with noise on its preconditioner, in a public subspace. Kairouz et al. (2021),
  Algorithm 1, with matrices of size k x k:

      S += x x^T,   H = V^T (S^(1/2) + noise) V,   direction = V H^+ V^T (x + noise)

  `x` is the clean mean of the clipped records, V a public basis. Diagonal:
  `h = V V^T (sqrt(sum x^2) + noise)`, `direction = (x + noise) / (max{h, 0} + epsilon)`.

  Example:

  ```python
  import keras
  import numpy as np
  import tfdp_adaptive as tfdp

  x = np.random.default_rng(0).normal(size=[1000, 8]).astype('float32')
  y = x.sum(axis=1, keepdims=True)
  plan = tfdp.PrivacyPlan.calibrate(
      target_epsilon=3.0, target_delta=1e-5, population_size=1000,
      batch_size=100, steps=24, l2_norm_clip=1.0,
      sampling=tfdp.sampling.FixedOrder(), extra_releases=(1.0,))
  model = tfdp.make_private(keras.Sequential([
      keras.layers.Input([8]), keras.layers.Dense(1)]))
  tfdp.experimental('noisy_adagrad')
  model.compile(
      tfdp.NoisyAdaGrad(0.1, participations=3, diagonal=True,
        plan=plan), loss='mse')
  model.fit(plan.batches((x, y)))
  ```

  Args:
    participations: K >= 1, the largest number of steps that one record takes part in. All
      steps with full batches. Batches must be fixed: no Poisson sampling.
    dimension: The dimension k of a subspace V that is computed from public gradients at the current
      parameters.
    basis: A fixed [m, k] V of orthonormal columns, instead of `dimension`. With
      `diagonal`, both may be left out.
    diagonal: Whether S is kept as its diagonal.
    mode: How to treat eigenvalues of H near zero. 'truncate' drops those below 2 sqrt(k) times the
      noise, and 'floor' raises them to this value. 'pinv' is the paper's choice, which moves uphill
      along negative eigenvalues.
    epsilon: Stability constant with `diagonal`, in gradient units, > 0.
    relative_noise: Noise multiplier of the preconditioner's releases divided
      by that of the mean's.
    box: None, or (low, high) for every parameter; diagonal only.
    radius: None, or the largest L2 norm of all parameters together.

  Returns:
    A `contract.Rule` whose direction has no unit. Its statistic is not amplifiable.
  """
  checks.whole(participations=participations)
  checks.positive(epsilon=epsilon, relative_noise=relative_noise)
  checks.one_of(MODES, mode=mode)
  constraints.check(box, radius)
  if not diagonal and box is not None:
    raise ValueError('`box` must be None unless `diagonal=True`: the projection in a full metric '
                     f'has no closed form. Received: box={box}. Use `radius`.')
  if not diagonal and mode == 'pinv' and radius is not None:
    raise ValueError("`mode` must be 'truncate' or 'floor' with a `radius`: 'pinv' is not a "
                     "metric. Received: mode='pinv'.")
  if diagonal and dimension is None and basis is None:
    update, project = _diagonal(None, epsilon, box, radius)
  else:
    find = subspaces.finder(dimension, basis, 'noisy_adagrad')
    update, project = (_diagonal(find, epsilon, box, radius) if diagonal
                       else _full(find, mode, radius))
  constrained = box is not None or radius is not None

  def init(specs: trees.Tree) -> State:
    size, dtype = trees.size(specs), trees.dtype_of(specs)
    if basis is not None and np.shape(basis)[0] != size:
      raise ValueError(f'`basis` must have one row per parameter, {size}. '
                       f'Received: shape {np.shape(basis)}.')
    if not constrained:
      return State(moments.first_step(), (), ())
    if diagonal:
      return State(moments.first_step(), (), trees.zeros(specs))
    k = dimension if basis is None else np.shape(basis)[1]
    return State(moments.first_step(), tf.zeros([size, k], dtype), tf.zeros([k], dtype))

  def update_(
      state: State, release: contract.Release, public: trees.Tree) -> Tuple[trees.Tree, State]:
    direction, metric, root = update(release, public)
    kept = (metric, root) if constrained else ((), ())
    return direction, State(state.step + 1, *kept)

  return contract.Rule(
      init, contract.isotropic, contract.of_release(update_),
      asks=(contract.Ask(second=running_root(participations, diagonal, relative_noise)),),
      public=None if dimension is None else 'records',
      project=project if constrained else None, name='noisy_adagrad', independent_noise=True)


def _full(
    find: subspaces.Finder, mode: str,
    radius: Optional[float]) -> Tuple[Callable[..., Any], Callable[..., Any]]:
  def update(release: contract.Release, public: trees.Tree) -> Tuple[trees.Tree, Any, Any]:
    gradient = trees.flatten(release.mean)
    v = find(public, gradient.dtype)
    noised = release.second  # Its noise is [m, m] independent: symmetrized, the GOE.
    h = tf.matmul(v, tf.matmul((noised + tf.transpose(noised)) / 2, v), transpose_a=True)
    eigenvalues, vectors = tf.linalg.eigh(h)
    goe = tf.sqrt(tf.cast(release.second_variance, h.dtype) / 2)
    threshold = 2 * math.sqrt(v.shape[1]) * goe
    smallest = v.shape[1] * np.finfo(h.dtype.as_numpy_dtype).eps * tf.reduce_max(
        tf.abs(eigenvalues))
    if mode == 'floor':
      eigenvalues = tf.maximum(eigenvalues, threshold)
    kept = tf.abs(eigenvalues) > smallest
    if mode == 'truncate':
      kept &= eigenvalues >= threshold
    root = tf.where(kept, eigenvalues, tf.zeros_like(eigenvalues))
    basis = tf.matmul(v, vectors)
    inverse = tf.math.divide_no_nan(tf.ones_like(root), root)
    direction = tf.linalg.matvec(
        basis, inverse * tf.linalg.matvec(basis, gradient, transpose_a=True))
    return trees.unflatten(direction, release.mean), basis, root

  def project(state: State, params: trees.Tree) -> trees.Tree:
    assert radius is not None
    y = trees.flatten(params)
    inner = tf.linalg.matvec(state.basis, y, transpose_a=True)
    kept = tf.where(state.root > 0, inner, tf.zeros_like(inner))
    rest = y - tf.linalg.matvec(state.basis, kept)
    # The rest of the space is one more coordinate, of weight zero.
    size = tf.norm(rest)
    point = constraints.into_ball_weighted(
        radius, tf.concat([state.root, [tf.zeros_like(size)]], 0), tf.concat([kept, [size]], 0))
    return trees.unflatten(
        tf.linalg.matvec(state.basis, point[:-1]) + rest * tf.math.divide_no_nan(point[-1], size),
        params)

  return update, project


def _diagonal(
    find: Optional[subspaces.Finder], epsilon: float, box: Optional[constraints.Box],
    radius: Optional[float]) -> Tuple[Callable[..., Any], Optional[Callable[..., Any]]]:
  def update(release: contract.Release, public: trees.Tree) -> Tuple[trees.Tree, Any, Any]:
    h = trees.flatten(release.second)
    if find is not None:
      v = find(public, h.dtype)
      h = tf.linalg.matvec(v, tf.linalg.matvec(v, h, transpose_a=True))
    root = trees.unflatten(tf.maximum(h, 0) + epsilon, release.mean)
    return moments.divide(release.mean, root), (), root

  return update, constraints.projection(box, radius, lambda state, params: state.root)


def running_root(
    participations: int, diagonal: bool = False, relative_noise: float = 1.0) -> contract.Statistic:
  """Returns the statistic of the root of the sum of `x x^T` over all steps, x the clean mean.

  If at most K rows of X change, by D1 each, `(X^T X)^(1/2)` changes by at most `sqrt(2 K) D1` in
  the Frobenius norm (Araki-Yamagami), and the diagonal root by `sqrt(K) D1`. The secret is kept in
  float64, because the root of rounding errors in float32 would be larger.
  """

  def specs_of_value(specs: trees.Tree) -> trees.Tree:
    if diagonal:
      return specs
    size = trees.size(specs)
    if size > LARGEST:
      raise ValueError(f'The full matrix allows at most {LARGEST} parameters. Received: {size}. '
                       'Use `diagonal=True`.')
    return tf.TensorSpec([size, size], trees.dtype_of(specs))

  def init(specs: trees.Tree) -> trees.Tree:
    if diagonal:
      return trees.map(lambda s: tf.zeros(s.shape, tf.float64), specs)
    return tf.zeros([trees.size(specs)] * 2, tf.float64)

  def measure(
      mean: trees.Tree, square: trees.Tree, clip_norm: trees.Scalar,
      secret: trees.Tree) -> Tuple[trees.Tree, trees.Tree]:
    del square, clip_norm
    if diagonal:
      secret = trees.map(lambda s, x: s + tf.square(tf.cast(x, s.dtype)), secret, mean)
      return trees.map(lambda s, x: tf.cast(tf.sqrt(s), x.dtype), secret, mean), secret
    x = tf.cast(trees.flatten(mean), tf.float64)
    secret += tf.tensordot(x, x, 0)
    eigenvalues, vectors = tf.linalg.eigh(secret)
    root = tf.matmul(vectors * tf.sqrt(tf.maximum(eigenvalues, 0)), vectors, transpose_b=True)
    return tf.cast(root, trees.dtype_of(mean)), secret

  def stddevs(clip_norm: trees.Scalar, batch_size: float, adjacency: str) -> contract.Stddevs:
    mean = contract.mean_sensitivity(clip_norm, batch_size, adjacency)
    return mean, relative_noise * math.sqrt((1 if diagonal else 2) * participations) * mean

  return contract.Statistic(
      False, measure, stddevs, specs_of_value, init, amplifiable=False,
      participations=participations, relative_noise=relative_noise)
