# SPDX-License-Identifier: Apache-2.0
"""AdaDPS: a preconditioner from public gradients, applied before clipping."""

from typing import NamedTuple, Tuple

import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import contract
from tfdp_adaptive import trees
from tfdp_adaptive.rules import moments


class State(NamedTuple):
  step: tf.Tensor  # [] int64, releases consumed.
  second: trees.Tree  # Second moment of public gradients, >= 0.


def adadps(
    preconditioner: str = 'rmsprop', rho: float = 0.9, epsilon: float = 1e-3,
    epsilon_inside: bool = False) -> contract.Rule:
  """Use AdaDPS with labeled public data of the same kind as the private examples.

  Private gradients are preconditioned by public ones before clipping. Li et al. (ICML 2022),
  with the public gradient at the current parameters:

      v = U(v, public^2);   D = sqrt(v) + epsilon
      direction = (sum_j clip(g_j / D; zeta) + noise) / batch_size

  Args:
    preconditioner: 'rmsprop', `U = rho v + (1 - rho) q`, or 'adagrad', `U = v + q`.
    rho: Decay, in [0, 1).
    epsilon: Positive, in gradient units (squared, if inside).
    epsilon_inside: Whether `D = sqrt(v + epsilon)`.

  Returns:
    A `contract.Rule` with `public='mean'`. Its direction has no unit. Its norm is at most
    `l2_norm_clip`, which is in preconditioned units.
  """
  checks.positive(epsilon=epsilon)
  checks.one_of(('rmsprop', 'adagrad'), preconditioner=preconditioner)
  second = (moments.rmsprop(rho) if preconditioner == 'rmsprop' else moments.adagrad()).second

  def init(specs: trees.Tree) -> State:
    return State(moments.first_step(), second.init(specs))

  def updated(state: State, public: trees.Tree) -> trees.Tree:
    contract.check_public(public, 'adadps')
    return second.add(state.second, moments.squared(public))

  def query(state: State, public: trees.Tree = ()) -> contract.Queries:
    def scale(v: tf.Tensor) -> tf.Tensor:
      return 1 / (tf.sqrt(v + epsilon) if epsilon_inside else tf.sqrt(v) + epsilon)

    return (contract.Query(trees.map(scale, updated(state, public))),)

  def update(
      state: State, release: contract.Release, public: trees.Tree) -> Tuple[trees.Tree, State]:
    return release.mean, State(state.step + 1, updated(state, public))

  return contract.Rule(
      init, query, contract.of_release(update), public='mean', name='adadps')
