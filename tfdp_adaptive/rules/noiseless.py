# SPDX-License-Identifier: Apache-2.0
"""A diagnostic WITHOUT privacy: Adam with a preconditioner that sees no noise."""

from typing import Optional

from tfdp_adaptive import contract
from tfdp_adaptive.rules import moments
from tfdp_adaptive.rules import post_processing
from tfdp_adaptive.rules import scale_then_privatize
from tfdp_adaptive.rules import statistics


def non_private_noiseless_adam(
    beta_1: float = 0.9, beta_2: float = 0.999, epsilon: float = 1e-8,
    scale_epsilon: Optional[float] = None, allow_non_private: bool = False) -> contract.Rule:
  """Use this diagnostic, which is NOT private, to see what noise in the second moment costs.

  Adam with a preconditioner without noise, the diagnostic of Ganesh et al. (2025),
  arXiv:2507.01129, section 4.2. The first moment is computed from the noisy mean and the second
  from the clean mean. This shows the most that a better second moment could gain. All its results,
  including the parameters, reveal the records. Epsilon is infinite.

  Args:
    beta_1: Decay of the first moment, in [0, 1).
    beta_2: Decay of the second moment, in [0, 1).
    epsilon: Added to the root in the update, in gradient units, >= 0.
    scale_epsilon: None, or > 0 for clipping and noising in the scaled space, as
      `scale_then_privatize` does.
    allow_non_private: Must be True.

  Returns:
    A `contract.Rule` whose direction has no unit and whose statistic is not private.
  """
  if allow_non_private is not True:
    raise ValueError('`allow_non_private` must be True: this rule has no privacy guarantee '
                     f'whatsoever. Received: allow_non_private={allow_non_private}.')
  method = moments.adam(beta_1, beta_2)
  rule = post_processing.adaptive(
      method, post_processing.plus(epsilon), 'non_private_noiseless_adam',
      lambda release, public: moments.squared(release.second), elementwise=False,
      asks=(contract.Ask(second=statistics.clean_mean()),))
  return rule if scale_epsilon is None else scale_then_privatize.behind_own_scale(
      rule, method.second, scale_epsilon)
