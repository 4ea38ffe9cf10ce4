# SPDX-License-Identifier: Apache-2.0
"""Scale-then-privatize: clip and noise in the geometry the optimizer divides by."""

import math
from typing import Tuple

import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import contract
from tfdp_adaptive import geometry
from tfdp_adaptive import trees
from tfdp_adaptive.rules import moments
from tfdp_adaptive.rules import post_processing


def scale_then_privatize(
    beta_1: float = 0.9, beta_2: float = 0.999, epsilon: float = 1e-8, *,
    scale_epsilon: float = 1e-2) -> contract.Rule:
  """Use DP-AdamSTP if batches are large for the model: noise over signal below 1.

  Scale-then-privatize over Adam: clipping and noise use the geometry of Adam. Ganesh et al.
  (2025), arXiv:2507.01129, Algorithm 8:

      s_t = 1 / (sqrt(nu_hat_{t-1}) + scale_epsilon)
      g = (sum_j clip(s_t * g_j; zeta) + noise) / batch_size / s_t;   then Adam on g

  `l2_norm_clip` (zeta) is in scaled units. A gradient that is preconditioned well has a norm of
  about the square root of the number of parameters. The first step clips the raw gradients at
  `l2_norm_clip * scale_epsilon`. If `l2_norm_clip * noise_multiplier / batch_size >= 1`, the scale
  amplifies the noise, and the second moment grows without bound.

  Args:
    beta_1: Decay of the first moment, in [0, 1).
    beta_2: Decay of the second moment, in [0, 1).
    epsilon: Added to the root in the update, in gradient units, >= 0.
    scale_epsilon: Added to the root in the scale, in gradient units, > 0. A large value gives
      DP-Adam with the clip norm `l2_norm_clip * scale_epsilon`. A small value adds less noise to
      coordinates with small gradients. The default is meant for gradients of norm 0.1 to 10 and an
      adaptive clip norm (`tfdp.clipping.Automatic`). With the default, three of four tasks were
      within 2% of the best of twelve choices. With a constant clip norm, take about 0.03 times the
      size of a gradient's coordinate.

  Returns:
    A `contract.Rule` whose direction has no unit.
  """
  return scaled(moments.adam(beta_1, beta_2), epsilon, scale_epsilon, 'scale_then_privatize')


def dp_adagrad_stp(
    initial_accumulator_value: float = 0.0, epsilon: float = 1e-8, *,
    scale_epsilon: float = 1e-2) -> contract.Rule:
  """Use DP-AdaGradSTP for sparse features, if noise over signal is below 1.

  Scale-then-privatize over AdaGrad, see `scale_then_privatize`:
  `s_t = 1 / (sqrt(nu_{t-1}) + scale_epsilon)`.

  Args:
    initial_accumulator_value: The initial value of `nu`, in squared gradient units, >= 0.
    epsilon: Added to the root in the update, in gradient units, >= 0.
    scale_epsilon: Added to the root in the scale, in gradient units, > 0.

  Returns:
    A `contract.Rule` whose direction has no unit.
  """
  return scaled(
      moments.adagrad(initial_accumulator_value), epsilon, scale_epsilon, 'dp_adagrad_stp')


def dp_rmsprop_stp(
    rho: float = 0.9, epsilon: float = 1e-8, *,
    scale_epsilon: float = 1e-2) -> contract.Rule:
  """Use DP-RMSPropSTP as DP-AdamSTP, without a moving average of gradients.

  Scale-then-privatize over RMSProp, see `scale_then_privatize`:
  `s_t = 1 / (sqrt(v_{t-1}) + scale_epsilon)`, `v` not normalized.

  Args:
    rho: Decay of the second moment, in [0, 1).
    epsilon: Added to the root in the update, in gradient units, >= 0.
    scale_epsilon: Added to the root in the scale, in gradient units, > 0.

  Returns:
    A `contract.Rule` whose direction has no unit.
  """
  return scaled(moments.rmsprop(rho), epsilon, scale_epsilon, 'dp_rmsprop_stp')


def scaled(
    method: moments.Method, epsilon: float, scale_epsilon: float, name: str) -> contract.Rule:
  """Returns a `contract.Rule` for any `moments.Method` in its own scale."""
  return behind_own_scale(
      post_processing.adaptive(method, post_processing.plus(epsilon), name), method.second,
      scale_epsilon)._replace(cautions=_cautions)


def behind_own_scale(
    rule: contract.Rule, second: moments.SecondMoment, scale_epsilon: float) -> contract.Rule:
  """Returns a rule whose records are clipped in the scale `1 / (root + scale_epsilon)`."""
  checks.positive(scale_epsilon=scale_epsilon)

  @trees.one_pass
  def scale(state: post_processing.State) -> trees.Tree:
    estimate = second.estimate(state.second, state.step)
    return trees.map(lambda v: 1 / (tf.sqrt(v) + scale_epsilon), estimate)

  def update(
      state: post_processing.State, release: contract.Release,
      public: trees.Tree) -> Tuple[trees.Tree, post_processing.State]:
    used = scale(state)
    raw = release._replace(mean=geometry.unscale(release.mean, used))
    if not trees.absent(release.second):
      raw = raw._replace(second=geometry.unscale(release.second, used))
    return rule.update(state, (raw,), public)

  return rule._replace(query=contract.in_scale(scale), update=contract.of_release(update))


def _cautions(clip_norm: float, noise_std: float, size: int) -> Tuple[str, ...]:
  """Returns `Rule.cautions`: warnings about settings with which the rule is known to fail."""
  cautions = []
  if noise_std >= 0.9:
    cautions.append(
        f'l2_norm_clip * noise_multiplier / batch_size is {noise_std:.2g} in scaled units: from 1 '
        'on the noise feeds itself through the scale, and the second moment grows without bound. '
        'Use larger batches, less noise or a smaller clip norm.')
  wanted = math.sqrt(size)
  if not wanted / 10 <= clip_norm <= 30 * wanted:  # The norm is up to sqrt(size * batch).
    cautions.append(
        f'l2_norm_clip={clip_norm:g} is in scaled units, where a well preconditioned gradient of '
        f'{size} parameters has norm {wanted:.2g}. Far below, this is DP-Adam with the clip norm '
        'l2_norm_clip * scale_epsilon; far above, nothing is clipped and all is noise.')
  return tuple(cautions)
