# SPDX-License-Identifier: Apache-2.0
"""A diagnostic WITHOUT privacy: Adam with a preconditioner that sees no noise."""

from typing import Optional, Tuple

import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import contract
from tfdp_adaptive import geometry
from tfdp_adaptive import trees
from tfdp_adaptive.rules import arithmetic
from tfdp_adaptive.rules import moments
from tfdp_adaptive.rules import post_processing
from tfdp_adaptive.rules import statistics


def non_private_noiseless_adam(
    beta_1: float = 0.9, beta_2: float = 0.999, epsilon: float = 1e-8,
    scale_epsilon: Optional[float] = None, allow_non_private: bool = False) -> contract.Rule:
  """NOT differentially private: Adam with a preconditioner that sees no noise.

  The diagnostic of Ganesh et al. (2025), arXiv:2507.01129, section 4.2. Its first
  moment is of the noised mean and its second moment of the clean one: the most a
  better second moment could bring. Everything it makes, parameters included,
  reveals the records: epsilon is infinite.

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
  checks.not_negative(epsilon=epsilon)
  if scale_epsilon is not None:
    checks.positive(scale_epsilon=scale_epsilon)
  first, second = moments.adam(beta_1, beta_2)

  def init(specs: trees.Tree) -> post_processing.State:
    return post_processing.State(arithmetic.first_step(), first.init(specs), second.init(specs))

  def query(state: post_processing.State, public: trees.Tree = ()) -> contract.Queries:
    if scale_epsilon is None:
      return contract.isotropic(state, public)
    return (contract.Query(trees.map(lambda v: 1 / (tf.sqrt(v) + scale_epsilon),
                                     second.estimate(state.second, state.step))),)

  def update(
      state: post_processing.State, releases: contract.Releases,
      public: trees.Tree = ()) -> Tuple[trees.Tree, post_processing.State]:
    del public
    (release,), (asked,) = releases, query(state)
    step = state.step + 1
    clean = geometry.unscale(release.second, asked.scale)
    mean, moment = first.update(state.first, geometry.unscale(release.mean, asked.scale), step)
    nu = second.add(state.second, moments.squared(clean))
    root = trees.map(lambda v: tf.sqrt(v) + epsilon, second.estimate(nu, step))
    return moments.divide(mean, root), post_processing.State(step, moment, nu)

  return contract.Rule(init, query, update, asks=(contract.Ask(second=statistics.clean_mean()),),
                   name='non_private_noiseless_adam')
