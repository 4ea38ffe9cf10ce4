# SPDX-License-Identifier: Apache-2.0
"""DP-SGD with momentum; with a correlated mechanism, DP-FTRL / DP-MF."""

from typing import NamedTuple, Tuple

import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import contract
from tfdp_adaptive import trees
from tfdp_adaptive.rules import moments


class State(NamedTuple):
  step: tf.Tensor  # [] int64, releases consumed.
  first: trees.Tree  # Momentum in gradient units, or ().


def dp_sgd(momentum: float = 0.0, nesterov: bool = False) -> contract.Rule:
  """Use DP-SGD if all inputs and layers have the same scale, or with correlated noise.

  SGD with momentum on the noisy gradient. With correlated noise it is DP-FTRL or DP-MF. Ganesh et
  al. (2025), arXiv:2507.01129, Algorithm 1 and section 4.5:

      m = momentum * m + g
      direction = m                  (Nesterov: g + momentum * m)

  Args:
    momentum: In [0, 1). The momentum is not damped, so the direction grows to g / (1 - momentum).
    nesterov: Whether to look ahead; needs `momentum > 0`.

  Returns:
    A `contract.Rule` whose direction has the units of a gradient.
  """
  checks.decay(momentum=momentum)
  checks.require(not nesterov or momentum, 'be positive with `nesterov=True`', momentum=momentum)
  first = moments.heavy_ball(momentum, nesterov) if momentum else moments.gradient_itself()

  def init(specs: trees.Tree) -> State:
    return State(moments.first_step(), first.init(specs))

  def update(state: State, release: contract.Release) -> Tuple[trees.Tree, State]:
    step = state.step + 1
    direction, moment = first.update(state.first, release.mean, step)
    return direction, State(step, moment)

  return contract.Rule(
      init, contract.isotropic, contract.of_mean(update), name='dp_sgd', elementwise=True)
