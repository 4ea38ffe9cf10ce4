# SPDX-License-Identifier: Apache-2.0
"""Joint moment estimation: one block (x, sqrt(lambda) x^2), noised together (DP-Adam-JME)."""

from typing import Optional

from tfdp_adaptive import checks
from tfdp_adaptive import contract
from tfdp_adaptive.rules import independent_moments
from tfdp_adaptive.rules import moments
from tfdp_adaptive.rules import statistics


def dp_adam_jme(
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-4,
    floor: bool = False,
    square_then_average: bool = True,
    relative_lambda: float = 0.5,
    update_clip: Optional[float] = None) -> contract.Rule:
  """Adam whose two moments are noised jointly, the second at no cost (DP-Adam-JME).

  Kalinin, Upadhyay and Lampert (2025), for mini-batches.

  The direction is that of `dp_adam_ime`; only the noise differs. It is meant
  for replace adjacency and squares that are taken per record, where the second
  moment costs nothing. All other combinations get the noise of equation (5.1)
  of algorithms.md. Not to be used with Poisson sampling under replace.

  Args:
    beta_1: Decay of the first moment, in [0, 1).
    beta_2: Decay of the second moment, in [0, 1).
    epsilon: In gradient units, > 0.
    floor: Divide by `max{sqrt(max{nu_hat, 0}), epsilon}` instead of adding it.
    square_then_average: Whether the records are squared, or their mean.
    relative_lambda: Weight of the squares times `l2_norm_clip^2`, > 0; more
      means less noise on them. Above 1/2 they are not free even under replace.
    update_clip: None, or the largest L2 norm of the direction.

  Returns:
    A `contract.Rule` whose direction has no unit.
  """
  checks.positive(relative_lambda=relative_lambda)
  statistic = (statistics.joint_mean_of_squares if square_then_average
               else statistics.joint_square_of_mean)(relative_lambda)
  return independent_moments.two_moments(
      moments.adam(beta_1, beta_2), statistic, epsilon, floor, update_clip, 'dp_adam_jme')
