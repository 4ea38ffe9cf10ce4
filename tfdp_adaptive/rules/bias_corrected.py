# SPDX-License-Identifier: Apache-2.0
"""Adaptive optimizers that subtract the noise from their second moment (DP-AdamBC)."""

from typing import NamedTuple, Tuple

import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import contract
from tfdp_adaptive import trees
from tfdp_adaptive.rules import moments


class State(NamedTuple):
  step: tf.Tensor  # [] int64, releases consumed.
  first: trees.Tree  # First moment of the released means, or ().
  second: trees.Tree  # Second moment of the same, >= 0; noise included.
  bias: tf.Tensor  # [] the noise's part of it: public.


def dp_adam_bc(beta_1: float = 0.9, beta_2: float = 0.999, epsilon: float = 1e-4) -> contract.Rule:
  """Use DP-AdamBC for few parameters and noise over signal below 1.

  Adam that subtracts the noise from its second moment. Tang and Lecuyer, Algorithm 1; Ganesh et al.
  (2025), arXiv:2507.01129, Algorithm 7:

      mu, nu as Adam;   b = beta_2 * b + (1 - beta_2) * w
      direction = mu_hat / sqrt(max{(nu - b) / (1 - beta_2^t), epsilon^2})

  `w` is the variance of the noise in this step's mean. The correction therefore also holds for
  correlated noise, through the row norms of C^-1. The recursion in the paper's Appendix A does not.

  Args:
    beta_1: Decay of the first moment, in [0, 1).
    beta_2: Decay of the second moment, in [0, 1).
    epsilon: Lower bound of the root of the second moment, in gradient units, > 0. Tune it with the
      noise, near `l2_norm_clip * noise_multiplier / batch_size`. Its square is Tang and Lecuyer's
      gamma'.

  Returns:
    A `contract.Rule` whose direction has no unit.
  """
  return corrected(moments.adam(beta_1, beta_2), epsilon, 'dp_adam_bc')


def dp_adagrad_bc(initial_accumulator_value: float = 0.0, epsilon: float = 1e-4) -> contract.Rule:
  """Use DP-AdaGradBC for sparse features, if noise over signal is below 1.

  AdaGrad that subtracts the noise from its second moment, as `dp_adam_bc` does:
  `b += w; direction = g / sqrt(max{nu - b, epsilon^2})`.

  Args:
    initial_accumulator_value: The initial value of `nu`, in squared gradient units, >= 0.
    epsilon: Lower bound of the root of the second moment, in gradient units, > 0.

  Returns:
    A `contract.Rule` whose direction has no unit.
  """
  return corrected(moments.adagrad(initial_accumulator_value), epsilon, 'dp_adagrad_bc')


def dp_rmsprop_bc(rho: float = 0.9, epsilon: float = 1e-4) -> contract.Rule:
  """Use DP-RMSPropBC as DP-AdamBC, without a moving average of gradients.

  RMSProp that subtracts the noise from its second moment, as `dp_adam_bc` does:
  `b = rho * b + (1 - rho) * w; direction = g / sqrt(max{nu - b, epsilon^2})`.

  Args:
    rho: Decay of the second moment, in [0, 1).
    epsilon: Lower bound of the root of the second moment, in gradient units, > 0.

  Returns:
    A `contract.Rule` whose direction has no unit.
  """
  return corrected(moments.rmsprop(rho), epsilon, 'dp_rmsprop_bc')


def corrected(method: moments.Method, epsilon: float, name: str) -> contract.Rule:
  """Returns a `contract.Rule` for any `moments.Method` with a linear second moment."""
  checks.positive(epsilon=epsilon)
  first, second = method
  if not second.linear:
    raise ValueError('`method` must have a linear second moment: the noise in any other one '
                     f'(Yogi) has no known bias. Received: {name}.')

  def init(specs: trees.Tree) -> State:
    return State(moments.first_step(), first.init(specs), second.init(specs),
                 tf.zeros([], trees.dtype_of(specs)))

  def update(state: State, release: contract.Release) -> Tuple[trees.Tree, State]:
    step = state.step + 1
    mean, moment = first.update(state.first, release.mean, step)
    nu = second.add(state.second, moments.squared(release.mean))
    bias = second.add(state.bias, tf.cast(release.variance, state.bias.dtype))
    clean = trees.map(lambda v: v - tf.cast(bias, v.dtype), nu)
    root = trees.map(
        lambda v: tf.sqrt(tf.maximum(v, epsilon**2)), second.estimate(clean, step))
    return moments.divide(mean, root), State(step, moment, nu, bias)

  return contract.Rule(init, contract.isotropic, contract.of_mean(update), name=name,
                       cautions=moments.epsilon_cautions(epsilon), elementwise=True)
