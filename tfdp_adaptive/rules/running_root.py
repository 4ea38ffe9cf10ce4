# SPDX-License-Identifier: Apache-2.0
"""The statistic of noisy AdaGrad: the root of the sum of all past second moments without noise."""

import math
from typing import Tuple

import tensorflow as tf

from tfdp_adaptive import contract
from tfdp_adaptive import trees

LARGEST = 4096  # Parameters of the full matrix.


def running_root(
    participations: int, diagonal: bool = False, relative_noise: float = 1.0) -> contract.Statistic:
  """The root of the sum of `x x^T` over all steps so far, x the clean mean.

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
      False, specs_of_value, init, measure, stddevs, amplifiable=False,
      participations=participations, relative_noise=relative_noise)


def equivalent_noise_multiplier(
    noise_multiplier: float, steps: int, participations: int, relative_noise: float = 1.0) -> float:
  """Returns the noise multiplier of the single Gaussian mechanism with the cost of the run.

  GDP adds up: a record takes part in K releases of the mean and in all releases of the root.
  """
  return noise_multiplier / math.sqrt(participations + steps / relative_noise**2)
