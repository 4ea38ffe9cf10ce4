# SPDX-License-Identifier: Apache-2.0
"""Side information: Adam whose second moment comes from public data."""

from tfdp_adaptive import contract
from tfdp_adaptive import trees
from tfdp_adaptive.rules import moments
from tfdp_adaptive.rules import post_processing


def side_information_adam(
    beta_1: float = 0.9, beta_2: float = 0.999, epsilon: float = 1e-8,
    second_moment: trees.Tree = None) -> contract.Rule:
  """Use this optimizer with labeled public data of the same kind as the private examples.

  Adam whose second moment comes from public data (side information). Ganesh et al. (2025),
  arXiv:2507.01129, Algorithm 9:

      direction = mu_hat / (sqrt(nu_hat) + epsilon)

  mu comes from noisy gradients, and nu from public data only. nu is either given, or averaged over
  the public gradients of all steps. The data must be public. A held-out part of the private data is
  not public.

  Args:
    beta_1: Decay of the first moment, in [0, 1).
    beta_2: Decay of the online second moment, in [0, 1).
    epsilon: In gradient units, >= 0. The paper uses zero (0/0 := 0).
    second_moment: `nu_hat`, a number or one array per variable, in squared gradient units, >= 0;
      or None to average public gradients.

  Returns:
    A `contract.Rule` whose direction has no unit, with `public='mean'` without `second_moment`.
  """
  method, name = moments.adam(beta_1, beta_2), 'side_information_adam'
  if second_moment is not None:
    known = moments.SecondMoment(
        lambda specs: trees.constant_like(second_moment, specs, 'second_moment'),
        lambda nu, square: nu, lambda nu, step: nu)
    return post_processing.adaptive(
        method._replace(second=known), post_processing.plus(epsilon), name, elementwise=False)

  def square(release: contract.Release, public: trees.Tree) -> trees.Tree:
    del release
    contract.check_public(public, name)
    return moments.squared(public)

  return post_processing.adaptive(
      method, post_processing.plus(epsilon), name, square, elementwise=False, public='mean')
