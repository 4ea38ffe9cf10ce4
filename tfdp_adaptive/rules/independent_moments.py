# SPDX-License-Identifier: Apache-2.0
"""A second moment with noise of its own: a query beside the mean, or one block with it.

Independent moment estimation (DP-Adam-IME), and joint: (x, sqrt(lambda) x^2), noised together
(DP-Adam-JME).
"""

from typing import Any, Optional

import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import contract
from tfdp_adaptive import gate
from tfdp_adaptive import trees
from tfdp_adaptive.rules import moments
from tfdp_adaptive.rules import post_processing
from tfdp_adaptive.rules import statistics
from tfdp_adaptive.rules import wrapping


@gate.part
def dp_adam_ime(
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-4,
    floor: bool = False,
    share: float = 0.5,
    square_then_average: bool = False,
    printed_2B_plus_1: bool = False,
    update_clip: Optional[float] = None) -> contract.Rule:
  """Use DP-AdamIME (experimental) to study second moments that are released with their own noise.

  Adam whose second moment is a separate noisy query, and therefore unbiased. Ganesh et al. (2025),
  arXiv:2507.01129, Algorithm 6:

      mu from the mean x of the clipped records, nu from x^2, noised independently
      direction = mu_hat / (sqrt(max{nu_hat, 0}) + epsilon)

  Each of the two queries has half the budget, so its noise is sqrt(2) times larger.

  Args:
    beta_1: Decay of the first moment, in [0, 1).
    beta_2: Decay of the second moment, in [0, 1).
    epsilon: In gradient units, > 0. Tune it with the noise of nu, which is about 3 * l2_norm_clip^2
      * noise_multiplier / batch_size per step.
    floor: Whether to divide by max{sqrt(max{nu_hat, 0}), epsilon} instead of adding epsilon. With
      epsilon=1 this is the paper's one-dimensional experiment.
    share: The share of the step's budget that goes to the mean, in (0, 1).
    square_then_average: Whether to query the mean of squares instead of the squared mean.
    printed_2B_plus_1: Whether to add the noise of Algorithm 6 literally, which is more than needed.
    update_clip: None, or the largest L2 norm of the direction.

  Returns:
    A `contract.Rule` whose direction has no unit.
  """
  return _independent(moments.adam(beta_1, beta_2), epsilon, floor, share, square_then_average,
                      printed_2B_plus_1, update_clip, 'dp_adam_ime')


@gate.part
def dp_adagrad_ime(
    initial_accumulator_value: float = 0.0,
    epsilon: float = 1e-4,
    floor: bool = False,
    share: float = 0.5,
    square_then_average: bool = False,
    printed_2B_plus_1: bool = False,
    update_clip: Optional[float] = None) -> contract.Rule:
  """Use DP-AdaGradIME (experimental) to study sums of squares with their own noise.

  AdaGrad that gets the squared gradients from a separate noisy query, as in `dp_adam_ime`.

  Args:
    initial_accumulator_value: The initial value of `nu`, in squared gradient units, >= 0.
    epsilon: As in `dp_adam_ime`, but the noise of nu grows with the square root of the number of
      steps.
    floor: As in `dp_adam_ime`.
    share: As in `dp_adam_ime`.
    square_then_average: As in `dp_adam_ime`.
    printed_2B_plus_1: As in `dp_adam_ime`.
    update_clip: As in `dp_adam_ime`.

  Returns:
    A `contract.Rule` whose direction has no unit.
  """
  return _independent(moments.adagrad(initial_accumulator_value), epsilon, floor, share,
                      square_then_average, printed_2B_plus_1, update_clip, 'dp_adagrad_ime')


def _independent(
    method: moments.Method, epsilon: float, floor: bool, share: float, square_then_average: bool,
    printed_2B_plus_1: bool, update_clip: Optional[float], name: str) -> contract.Rule:
  if square_then_average and printed_2B_plus_1:
    raise ValueError('`printed_2B_plus_1` must be False with `square_then_average=True`, whose '
                     'sensitivity is one clip norm squared. Received: printed_2B_plus_1=True.')
  statistic = (statistics.mean_of_squares(share) if square_then_average
               else statistics.square_of_mean(share, printed_2B_plus_1))
  return two_moments(method, statistic, epsilon, floor, update_clip, name)


def two_moments(
    method: moments.Method, statistic: contract.Statistic, epsilon: float, floor: bool,
    update_clip: Optional[float], name: str) -> contract.Rule:
  """Returns a rule over two releases: the mean, and the `statistic` as its square."""
  checks.positive(epsilon=epsilon)
  if update_clip is not None:
    checks.positive(update_clip=update_clip)

  def root(v: tf.Tensor) -> tf.Tensor:
    clean = tf.sqrt(tf.maximum(v, 0))
    return tf.maximum(clean, epsilon) if floor else clean + epsilon

  rule = post_processing.adaptive(
      method, root, name, lambda release, public: release.second, elementwise=False,
      asks=(contract.Ask(second=statistic),), cautions=moments.epsilon_cautions(epsilon))
  if update_clip is None:
    return rule

  def clipped(direction: trees.Tree, *_: Any) -> trees.Tree:
    norm = tf.linalg.global_norm(tf.nest.flatten(direction))
    shrink = update_clip / tf.maximum(norm, update_clip)
    return trees.map(lambda d: tf.cast(shrink, d.dtype) * d, direction)

  return wrapping.followed(rule, clipped)


@gate.part
def dp_adam_jme(
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-4,
    floor: bool = False,
    square_then_average: bool = True,
    relative_lambda: float = 0.5,
    update_clip: Optional[float] = None) -> contract.Rule:
  """Use DP-AdamJME (experimental) with replace adjacency, where second moments cost nothing.

  Adam whose two moments get their noise jointly. Kalinin, Upadhyay and Lampert (2025), for
  mini-batches.

  The direction is that of `dp_adam_ime`; only the noise differs. It is meant for replace adjacency
  and squares of single records. Then the second moment costs nothing. All other combinations get
  noise for the joint sensitivity of both moments. Do not use it with Poisson sampling under
  replace.

  Args:
    beta_1: Decay of the first moment, in [0, 1).
    beta_2: Decay of the second moment, in [0, 1).
    epsilon: In gradient units, > 0.
    floor: Whether to divide by max{sqrt(max{nu_hat, 0}), epsilon} instead of adding epsilon.
    square_then_average: Whether each record is squared. If False, the mean is squared.
    relative_lambda: Weight of the squares times l2_norm_clip^2, > 0. A larger weight means less
      noise on the squares. Above 1/2, the squares cost privacy even under replace.
    update_clip: None, or the largest L2 norm of the direction.

  Returns:
    A `contract.Rule` whose direction has no unit.
  """
  checks.positive(relative_lambda=relative_lambda)
  statistic = (statistics.joint_mean_of_squares if square_then_average
               else statistics.joint_square_of_mean)(relative_lambda)
  return two_moments(
      moments.adam(beta_1, beta_2), statistic, epsilon, floor, update_clip, 'dp_adam_jme')
