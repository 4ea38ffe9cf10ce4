# SPDX-License-Identifier: Apache-2.0
"""Adaptive optimizers that see only the noisy mean gradient."""

from typing import Any, Callable, NamedTuple, Tuple

import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import contract
from tfdp_adaptive import trees
from tfdp_adaptive.rules import moments


class State(NamedTuple):
  step: tf.Tensor  # [] int64, releases consumed.
  first: trees.Tree  # First moment of the released means, or of the directions, or ().
  second: trees.Tree  # Second moment of the same, >= 0; noise included.


def dp_adam(beta_1: float = 0.9, beta_2: float = 0.999, epsilon: float = 1e-8,
            amsgrad: bool = False) -> contract.Rule:
  """Use DP-Adam by default, and `DPAdamW` if weights should stay small.

  DP-Adam is robust for large models, small batches and small epsilons. It is Adam on the noisy
  gradient (post-processing). Ganesh et al. (2025), arXiv:2507.01129, Algorithm 5:

      mu = beta_1 * mu + (1 - beta_1) * g;   nu = beta_2 * nu + (1 - beta_2) * g^2
      direction = mu / (1 - beta_1^t) / (sqrt(nu / (1 - beta_2^t)) + epsilon)

  `epsilon` is added to the root of the bias-corrected second moment. Keras adds it before the bias
  correction. The noise adds (l2_norm_clip * noise_multiplier / batch_size)^2 to nu. `dp_adam_bc`,
  `dp_adam_ime` and `scale_then_privatize` avoid this.

  Args:
    beta_1: Decay of the first moment, in [0, 1).
    beta_2: Decay of the second moment, in [0, 1).
    epsilon: In gradient units, >= 0.
    amsgrad: Whether to divide by the largest `nu` so far (Reddi et al. 2018). The noise of a single
      step then stays in the largest nu forever.

  Returns:
    A `contract.Rule` whose direction has no unit, of order one per coordinate.
  """
  method = moments.adam(beta_1, beta_2)
  if amsgrad:
    method = method._replace(second=moments.largest_average_of_squares(beta_2))
  return adaptive(method, plus(epsilon), 'dp_adam')


def dp_adagrad(initial_accumulator_value: float = 0.0, epsilon: float = 1e-8) -> contract.Rule:
  """Use DP-AdaGrad for convex models with sparse features.

  DP-AdaGrad by post-processing: AdaGrad on the noisy gradient. Ganesh et al. (2025),
  arXiv:2507.01129, Algorithm 3:

      nu += g^2;   direction = g / (sqrt(nu) + epsilon)

  Args:
    initial_accumulator_value: The initial value of `nu`, in squared gradient units, >= 0.
    epsilon: In gradient units, >= 0. The paper uses zero (0/0 := 0).

  Returns:
    A `contract.Rule` whose direction has no unit.
  """
  return adaptive(moments.adagrad(initial_accumulator_value), plus(epsilon), 'dp_adagrad')


def dp_rmsprop(rho: float = 0.9, epsilon: float = 1e-8, momentum: float = 0.0,
               centered: bool = False) -> contract.Rule:
  """Use DP-RMSProp to adapt as DP-Adam does, without a moving average of gradients.

  DP-RMSProp by post-processing: RMSProp on the noisy gradient. Li et al. (ICLR 2023), section 2,
  `nu` not normalized:

      nu = rho * nu + (1 - rho) * g^2;   direction = g / (sqrt(nu) + epsilon)

  Args:
    rho: Decay of the second moment, in [0, 1).
    epsilon: In gradient units, >= 0.
    momentum: In [0, 1). If positive, the parameters follow a decaying sum of these directions, with
      this decay.
    centered: Whether to divide by the root of the running variance, `nu` less the square of the
      running mean, in place of the running second moment.

  Returns:
    A `contract.Rule` whose direction has no unit.
  """
  checks.decay(momentum=momentum)
  method, square = moments.rmsprop(rho), mean_squared
  if centered:
    method, square = method._replace(second=moments.centered_squares(rho)), both_powers
  if momentum:
    method = method._replace(first=moments.heavy_ball(momentum, nesterov=False))
  return adaptive(method, plus(epsilon), 'dp_rmsprop', square, divide_first=True)


def dp_yogi(
    beta_1: float = 0.9, beta_2: float = 0.999, epsilon: float = 1e-3,
    initial_accumulator_value: float = 1e-6) -> contract.Rule:
  """Use DP-Yogi as DP-Adam, if second moments should not drop quickly.

  DP-Yogi by post-processing: Yogi on the noisy gradient. Zaheer et al. (NeurIPS 2018),
  Algorithm 2:

      m = beta_1 * m + (1 - beta_1) * g;   v = v - (1 - beta_2) * sign(v - g^2) * g^2
      direction = m / (sqrt(v) + epsilon)

  Args:
    beta_1: Decay of the first moment, in [0, 1).
    beta_2: One minus the largest relative change of `v`, in [0, 1).
    epsilon: In gradient units, >= 0.
    initial_accumulator_value: The initial value of `v`, in squared gradient units, >= 0.

  Returns:
    A `contract.Rule` whose direction has no unit.
  """
  return adaptive(
      moments.yogi(beta_1, beta_2, initial_accumulator_value), plus(epsilon), 'dp_yogi')


def plus(epsilon: float) -> Callable[[tf.Tensor], tf.Tensor]:
  """Returns `sqrt(nu) + epsilon`."""
  checks.not_negative(epsilon=epsilon)
  return lambda v: tf.sqrt(v) + epsilon


def mean_squared(release: contract.Release, public: trees.Tree) -> trees.Tree:
  """Returns the square of the noisy mean, which most second moments average."""
  del public
  return moments.squared(release.mean)


def both_powers(release: contract.Release, public: trees.Tree) -> moments.Centered:
  """Returns the noisy mean and its square."""
  return moments.Centered(release.mean, mean_squared(release, public))


def adaptive(
    method: moments.Method, root: Callable[[tf.Tensor], tf.Tensor], name: str,
    square: Callable[[contract.Release, trees.Tree], trees.Tree] = mean_squared,
    divide_first: bool = False, elementwise: bool = True, **fields: Any) -> contract.Rule:
  """Returns a rule for any `moments.Method`: its first moment over the root of its second moment.

  Args:
    method: A `moments.Method`.
    root: `nu_hat -> divisor` of a coordinate.
    name: Name of the rule.
    square: `(release, public) -> square`, which the second moment averages.
    divide_first: Whether the first moment is that of the divided gradients.
    elementwise: See `contract.Rule`.
    **fields: More of it.
  """
  first, second = method

  def init(specs: trees.Tree) -> State:
    return State(moments.first_step(), first.init(specs), second.init(specs))

  def update(
      state: State, release: contract.Release, public: trees.Tree) -> Tuple[trees.Tree, State]:
    step = state.step + 1
    nu = second.add(state.second, square(release, public))
    roots = trees.map(root, second.estimate(nu, step))
    if divide_first:
      direction, moment = first.update(state.first, moments.divide(release.mean, roots), step)
    else:
      mean, moment = first.update(state.first, release.mean, step)
      direction = moments.divide(mean, roots)
    return direction, State(step, moment, nu)

  return contract.Rule(
      init, contract.isotropic, contract.of_release(update), name=name,
      elementwise=elementwise, **fields)
