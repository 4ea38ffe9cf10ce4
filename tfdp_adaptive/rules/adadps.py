# SPDX-License-Identifier: Apache-2.0
"""AdaDPS: a preconditioner from public gradients, applied before clipping."""

from typing import NamedTuple

import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import contract
from tfdp_adaptive import trees
from tfdp_adaptive.rules import arithmetic
from tfdp_adaptive.rules import moments


class State(NamedTuple):
  step: tf.Tensor  # [] int64, releases consumed.
  second: trees.Tree  # Second moment of public gradients, >= 0.


def adadps(preconditioner='rmsprop', rho=0.9, epsilon=1e-3, epsilon_inside=False):
  """AdaDPS: private gradients preconditioned by public ones, before clipping.

  Li et al. (ICML 2022), with the public gradient at the current parameters:

      v = U(v, public^2);   D = sqrt(v) + epsilon
      direction = (sum_j clip(g_j / D; zeta) + noise) / batch_size

  Args:
    preconditioner: 'rmsprop', `U = rho v + (1 - rho) q`, or 'adagrad', `U = v + q`.
    rho: Decay, in [0, 1).
    epsilon: > 0, in gradient units (squared, if inside).
    epsilon_inside: Whether `D = sqrt(v + epsilon)`.

  Returns:
    A `contract.Rule` with `public='mean'`, whose direction has no unit and a norm
    up to `l2_norm_clip`, which is in preconditioned units.
  """
  checks.positive(epsilon=epsilon)
  checks.one_of(('rmsprop', 'adagrad'), preconditioner=preconditioner)
  second = (moments.rmsprop(rho) if preconditioner == 'rmsprop' else moments.adagrad()).second

  def init(specs):
    return State(arithmetic.first_step(), second.init(specs))

  def updated(state, public):
    contract.check_public(public, 'adadps')
    return second.add(state.second, moments.squared(public))

  def query(state, public=()):
    def scale(v):
      return 1 / (tf.sqrt(v + epsilon) if epsilon_inside else tf.sqrt(v) + epsilon)

    return (contract.Query(trees.map(scale, updated(state, public))),)

  def update(state, releases, public=()):
    (release,) = releases
    return release.mean, State(state.step + 1, updated(state, public))

  return contract.Rule(init, query, update, public='mean', name='adadps')
