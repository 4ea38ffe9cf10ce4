# SPDX-License-Identifier: Apache-2.0
"""Independent moment estimation: the second moment gets a query of its own (DP-Adam-IME)."""

from typing import Optional, Tuple

import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import contract
from tfdp_adaptive import trees
from tfdp_adaptive.rules import arithmetic
from tfdp_adaptive.rules import cautions
from tfdp_adaptive.rules import moments
from tfdp_adaptive.rules import post_processing
from tfdp_adaptive.rules import statistics


def dp_adam_ime(
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-4,
    floor: bool = False,
    share: float = 0.5,
    square_then_average: bool = False,
    printed_2B_plus_1: bool = False,
    update_clip: Optional[float] = None) -> contract.Rule:
  """Adam whose second moment is queried by itself, and so is unbiased (DP-Adam-IME).

  Ganesh et al. (2025), arXiv:2507.01129, Algorithm 6:

      mu from the mean x of the clipped records, nu from x^2, noised independently
      direction = mu_hat / (sqrt(max{nu_hat, 0}) + epsilon)

  Each of the two has half the budget, so their noise is sqrt(2) times larger.

  Args:
    beta_1: Decay of the first moment, in [0, 1).
    beta_2: Decay of the second moment, in [0, 1).
    epsilon: In gradient units, > 0. To be tuned with the noise of `nu`, of
      about `3 * l2_norm_clip^2 * noise_multiplier / batch_size` per step.
    floor: Divide by `max{sqrt(max{nu_hat, 0}), epsilon}` instead of adding
      `epsilon`; with `epsilon=1` the paper's one-dimensional experiment.
    share: Of the step's budget that goes to the mean, in (0, 1).
    square_then_average: Query the mean of squares and not the squared mean.
    printed_2B_plus_1: The literal noise of Algorithm 6, more than needed.
    update_clip: None, or the largest L2 norm of the direction.

  Returns:
    A `contract.Rule` whose direction has no unit.
  """
  return _independent(moments.adam(beta_1, beta_2), epsilon, floor, share, square_then_average,
                      printed_2B_plus_1, update_clip, 'dp_adam_ime')


def dp_adagrad_ime(
    initial_accumulator_value: float = 0.0,
    epsilon: float = 1e-4,
    floor: bool = False,
    share: float = 0.5,
    square_then_average: bool = False,
    printed_2B_plus_1: bool = False,
    update_clip: Optional[float] = None) -> contract.Rule:
  """AdaGrad whose squares are queried by themselves, as in `dp_adam_ime`.

  Args:
    initial_accumulator_value: Of `nu`, in squared gradient units, >= 0.
    epsilon: As in `dp_adam_ime`, where the noise of `nu` grows with the square
      root of the number of steps.
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
  """A rule over two releases: the mean, and the `statistic` as its square."""
  checks.positive(epsilon=epsilon)
  if update_clip is not None:
    checks.positive(update_clip=update_clip)
  first, second = method

  def init(specs: trees.Tree) -> post_processing.State:
    return post_processing.State(arithmetic.first_step(), first.init(specs), second.init(specs))

  def root(v: tf.Tensor) -> tf.Tensor:
    clean = tf.sqrt(tf.maximum(v, 0))
    return tf.maximum(clean, epsilon) if floor else clean + epsilon

  def update(
      state: post_processing.State, releases: contract.Releases,
      public: trees.Tree = ()) -> Tuple[trees.Tree, post_processing.State]:
    del public
    (release,) = releases
    step = state.step + 1
    mean, moment = first.update(state.first, release.mean, step)
    nu = second.add(state.second, release.second)
    direction = moments.divide(mean, trees.map(root, second.estimate(nu, step)))
    if update_clip is not None:
      norm = tf.linalg.global_norm(tf.nest.flatten(direction))
      shrink = update_clip / tf.maximum(norm, update_clip)
      direction = trees.map(lambda d: tf.cast(shrink, d.dtype) * d, direction)
    return direction, post_processing.State(step, moment, nu)

  return contract.Rule(init, contract.isotropic, update, asks=(contract.Ask(second=statistic),),
                       name=name, cautions=cautions.epsilon(epsilon))
