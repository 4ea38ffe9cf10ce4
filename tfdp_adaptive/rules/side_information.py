# SPDX-License-Identifier: Apache-2.0
"""Side information: Adam whose second moment comes from public data."""

from typing import NamedTuple, Tuple

import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import contract
from tfdp_adaptive import trees
from tfdp_adaptive.rules import arithmetic
from tfdp_adaptive.rules import moments


class State(NamedTuple):
  step: tf.Tensor  # [] int64, releases consumed.
  first: trees.Tree  # First moment of the released means.
  second: trees.Tree  # Second moment of public gradients, >= 0.


def side_information_adam(
    beta_1: float = 0.9, beta_2: float = 0.999, epsilon: float = 1e-8,
    second_moment: trees.Tree = None) -> contract.Rule:
  """Adam whose second moment comes from public data (side information).

  Ganesh et al. (2025), arXiv:2507.01129, Algorithm 9:

      direction = mu_hat / (sqrt(nu_hat) + epsilon)

  with `mu` from the private releases and `nu` from public data only: given
  beforehand, or averaged online over the public gradient at every iterate. The
  data must be public; a part held out of the private set is not.

  Args:
    beta_1: Decay of the first moment, in [0, 1).
    beta_2: Decay of the online second moment, in [0, 1).
    epsilon: In gradient units, >= 0; the paper has none (0/0 := 0).
    second_moment: None for online, or `nu_hat`: a number or one array per
      variable, in squared gradient units, >= 0.

  Returns:
    A `contract.Rule` whose direction has no unit; `public='mean'` if online.
  """
  checks.not_negative(epsilon=epsilon)
  first, second = moments.adam(beta_1, beta_2)
  online = second_moment is None

  def init(specs: trees.Tree) -> State:
    nu = second.init(specs) if online else trees.constant_like(
        second_moment, specs, 'second_moment')
    return State(arithmetic.first_step(), first.init(specs), nu)

  def update(
      state: State, releases: contract.Releases,
      public: trees.Tree = ()) -> Tuple[trees.Tree, State]:
    (release,) = releases
    step = state.step + 1
    mean, moment = first.update(state.first, release.mean, step)
    nu = estimate = state.second
    if online:
      contract.check_public(public, 'side_information_adam')
      nu = second.add(nu, moments.squared(public))
      estimate = second.estimate(nu, step)
    root = trees.map(lambda v: tf.sqrt(v) + epsilon, estimate)
    return moments.divide(mean, root), State(step, moment, nu)

  return contract.Rule(init, contract.isotropic, update, public='mean' if online else None,
                   name='side_information_adam')
