# SPDX-License-Identifier: Apache-2.0
"""Statistics that a rule can request besides the mean gradient, and their noise.

`zeta` is the clip norm, `B` the batch size, `D1` the sensitivity of the mean. Sensitivities hold
for batches of ANY size (Poisson sampling). Values that are not linear in the records are computed
from a mean that is projected onto the ball of radius zeta.
"""

import math
from typing import Tuple

import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import contract
from tfdp_adaptive import terms
from tfdp_adaptive import trees


def square_of_mean(share: float = 0.5, printed_2B_plus_1: bool = False) -> contract.Statistic:
  """Returns the statistic `clip(S / B; zeta)^2`, the squared mean: independent moment estimation.

  The sensitivity is `(2 B - 1) * zeta^2 / B^2` for B >= 2 under zero_out and
  add_remove (otherwise `square_sensitivity`), attained by equal one-sparse records.

  Args:
    share: The fraction of the step's budget that goes to the mean, in (0, 1).
    printed_2B_plus_1: Use `(2 B + 1)`, the constant printed in Algorithm 6 of
      Ganesh et al. (2025): safe, but larger than needed. Not for replace.

  Returns:
    A `contract.Statistic`; both releases together cost what the mean alone costs.
  """
  checks.probability(share=share)

  def stddevs(clip_norm: trees.Scalar, batch_size: float, adjacency: str) -> contract.Stddevs:
    relative = contract.mean_sensitivity(1.0, batch_size, adjacency)
    if not printed_2B_plus_1:
      second = square_sensitivity(relative)
    elif adjacency == 'replace':
      raise ValueError("`adjacency` must be 'zero_out' or 'add_remove' with "
                       "`printed_2B_plus_1=True`. Received: adjacency='replace'.")
    else:
      second = max((2 * batch_size + 1) / batch_size**2, square_sensitivity(relative))
    return _split(share, relative, second, clip_norm)

  return contract.Statistic(False, _measure_square_of_mean, stddevs)


def mean_of_squares(share: float = 0.5) -> contract.Statistic:
  """Returns the statistic of the mean of squared clipped records: square, then average.

  Every record adds at most `zeta^2 / B`. Under replace, two records differ by at most sqrt(2) times
  that. The statistic estimates E[g^2] of one record and not the square of the mean, so it is larger
  by a factor of up to B.

  Args:
    share: The fraction of the step's budget that goes to the mean, in (0, 1).

  Returns:
    A `contract.Statistic`; both releases together cost what the mean alone costs.
  """
  checks.probability(share=share)

  def stddevs(clip_norm: trees.Scalar, batch_size: float, adjacency: str) -> contract.Stddevs:
    relative = contract.mean_sensitivity(1.0, batch_size, adjacency)
    second = (math.sqrt(2.0) if adjacency == 'replace' else 1.0) / batch_size
    return _split(share, relative, second, clip_norm)

  return contract.Statistic(
      True, lambda mean, square, clip_norm, secret: (square, secret), stddevs)


def joint_mean_of_squares(relative_lambda: float = 0.5) -> contract.Statistic:
  """Returns `mean_of_squares`, noised jointly with the mean (Kalinin et al. 2025).

  One record moves `(mean, sqrt(lambda) * mean of squares)` by at most S, with
  `lambda = relative_lambda / zeta^2`; the noise has std S on the mean and
  S / sqrt(lambda) on the squares. Under replace, and up to `relative_lambda =
  1/2`, S is `2 zeta / B`: the second moment is free. Under zero_out and
  add_remove S is `zeta * sqrt(1 + relative_lambda) / B`.
  """
  checks.positive(relative_lambda=relative_lambda)

  def stddevs(clip_norm: trees.Scalar, batch_size: float, adjacency: str) -> contract.Stddevs:
    terms.check_adjacency(adjacency)
    joint = (joint_sensitivity(2.0, relative_lambda) if adjacency == 'replace'
             else math.sqrt(1 + relative_lambda)) / batch_size
    return joint * clip_norm, joint / math.sqrt(relative_lambda) * clip_norm**2

  return contract.Statistic(
      True, lambda mean, square, clip_norm, secret: (square, secret), stddevs)


def joint_square_of_mean(relative_lambda: float = 0.5) -> contract.Statistic:
  """Returns `square_of_mean`, noised jointly with the mean. The square is never free if B >= 2."""
  checks.positive(relative_lambda=relative_lambda)

  def stddevs(clip_norm: trees.Scalar, batch_size: float, adjacency: str) -> contract.Stddevs:
    distance = contract.mean_sensitivity(1.0, batch_size, adjacency)
    joint = joint_sensitivity(distance, relative_lambda)
    if distance > math.sqrt(2):
      # Batches may have any size, and only the square is projected: means may be further
      # apart than the ball is wide.
      joint = math.sqrt(distance**2 + 2 * relative_lambda)
    return joint * clip_norm, joint / math.sqrt(relative_lambda) * clip_norm**2

  return contract.Statistic(False, _measure_square_of_mean, stddevs)


def clean_mean() -> contract.Statistic:
  """Returns the mean itself, WITHOUT noise and without any privacy."""

  def stddevs(clip_norm: trees.Scalar, batch_size: float, adjacency: str) -> contract.Stddevs:
    return contract.mean_sensitivity(clip_norm, batch_size, adjacency), 0.0

  return contract.Statistic(
      False, lambda mean, square, clip_norm, secret: (mean, secret), stddevs, amplifiable=False,
      private=False)


def joint_sensitivity(distance: float, relative_lambda: float) -> float:
  """Returns sup sqrt(||x - y||^2 + lambda ||x^2 - y^2||^2) for zeta = 1."""
  d, lam = distance, relative_lambda
  if d <= 2 / 3:
    return d * math.sqrt(1 + lam * (2 - d)**2)
  if d**2 <= 2 + 1 / lam:
    return d * math.sqrt(1 + 2 * lam * (1 - d**2 / 4))
  return math.sqrt(2 + 2 * lam + 1 / (2 * lam))


def square_sensitivity(distance: float) -> float:
  """Returns sup ||x^2 - y^2|| over ||x - y|| <= distance, ||x||, ||y|| <= 1."""
  if distance <= 2 / 3:
    return distance * (2 - distance)
  if distance <= math.sqrt(2):
    return distance * math.sqrt(2 - distance**2 / 2)
  return math.sqrt(2)


def _measure_square_of_mean(
    mean: trees.Tree, square: trees.Tree, clip_norm: trees.Scalar,
    secret: trees.Tree) -> Tuple[trees.Tree, trees.Tree]:
  del square
  norm = tf.linalg.global_norm(tf.nest.flatten(mean))
  # Projection onto the ball; the identity for batches of at most B records.
  shrink = tf.minimum(
      tf.ones_like(norm), tf.math.divide_no_nan(tf.cast(clip_norm, norm.dtype), norm))
  shrink = tf.where(norm > 0, shrink, tf.ones_like(shrink))
  return trees.map(lambda x: tf.square(tf.cast(shrink, x.dtype) * x), mean), secret


def _split(
    share: float, relative: float, second: float, clip_norm: trees.Scalar) -> contract.Stddevs:
  """Returns both stds, given the sensitivities for a clip norm of one."""
  return (relative / math.sqrt(share) * clip_norm,
          second / math.sqrt(1 - share) * clip_norm**2)
