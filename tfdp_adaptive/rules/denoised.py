# SPDX-License-Identifier: Apache-2.0
"""Averages gradients at a point ahead into the gradient at the weights; post-processing."""

import functools
from typing import Any, Callable, NamedTuple, Tuple

import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import contract
from tfdp_adaptive import gate
from tfdp_adaptive import trees
from tfdp_adaptive.rules import moments
from tfdp_adaptive.rules import wrapping


class State(NamedTuple):
  step: tf.Tensor  # [] int64, releases consumed.
  rule: trees.Tree  # State of the rule behind it.
  estimate: trees.Tree  # g~, in gradient units.
  last: trees.Tree  # The rule's last direction.
  noise: Any  # What the variance of the averaged noise needs.


@gate.part
def denoised(rule: contract.Rule, kappa: float = 0.7) -> contract.Rule:
  """Returns a rule on averaged gradients that were taken at points ahead of the weights.

  DiSK (arXiv:2410.03883) at one point. With x the rule's iterates, d_t = x_t - x_{t-1}, and
  gamma = (1 - kappa) / kappa, which makes the weight of its second point zero:

      g_t = the release at x_t + gamma d_t
      g~_t = (1 - kappa) g~_{t-1} + kappa g_t,   g~_1 = g_1;   the rule is given g~_t

  For a linear gradient, g~_t is exactly the gradient at x_t, without the lag of an average. Its
  noise is averaged: independent noise has kappa / (2 - kappa) of the variance. The variance of
  correlated noise is computed exactly.

  The model holds x_t + gamma d_t. Nothing else changes, so a server can use the rule, too. The
  direction is `(1 + gamma) D_t - gamma D_{t-1}` for the rule's directions D. This is exact for a
  constant learning rate and no weight decay.

  Args:
    rule: Any rule with one mean per step, in raw gradients or one fixed scale, and without a
      projection.
    kappa: In (0, 1]; one is the rule itself.

  Returns:
    A `contract.Rule` whose direction has the unit of that of `rule`.
  """
  if not (checks.is_number(kappa) and 0 < kappa <= 1):
    raise ValueError(f'`kappa` must be in (0, 1]. Received: kappa={kappa!r}.')
  wrapping.require(rule, 'question', 'unit', 'mean', 'releases', 'filter')
  return wrapping.waiting(rule._replace(name=f'denoised({rule.name})', steady=True),
                        functools.partial(_denoised, rule, float(kappa)))


def _denoised(rule: contract.Rule, kappa: float,
              filtered_variance: Callable[..., Any]) -> contract.Rule:
  gamma = (1 - kappa) / kappa
  variance = filtered_variance((kappa,), (kappa - 1,))

  def init(specs: trees.Tree) -> State:
    return State(moments.first_step(), rule.init(specs), trees.zeros(specs), trees.zeros(specs),
                 variance.init(trees.dtype_of(specs)))

  def query(state: State, public: trees.Tree = ()) -> contract.Queries:
    return rule.query(state.rule, public)

  def update(
      state: State, release: contract.Release, public: trees.Tree) -> Tuple[trees.Tree, State]:
    first = tf.equal(state.step, 0)
    estimate = trees.map(
        lambda e, g: tf.where(first, g, (1 - kappa) * e + kappa * g), state.estimate, release.mean)
    # The first release enters whole, as if it were 1 / kappa times as large.
    given = tf.where(first, release.variance / kappa**2, release.variance)
    noise, after = variance.next(state.noise, given)
    ahead, inner = rule.update(
        state.rule, (release._replace(mean=estimate, variance=noise),), public)
    direction = trees.map(lambda d, last: (1 + gamma) * d - gamma * last, ahead, state.last)
    return direction, State(state.step + 1, inner, estimate, ahead, after)

  return rule._replace(init=init, query=query, update=contract.of_release(update))
