# SPDX-License-Identifier: Apache-2.0
"""PDA-DPMD: descent along a mixture of the private and the public gradient."""

import math

import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import contract
from tfdp_adaptive import trees
from tfdp_adaptive.rules import sgd
from tfdp_adaptive.rules import wrapping


def pda_dpmd(steps: int) -> contract.Rule:
  """Use PDA-DPMD after pretraining on labeled public data of the same kind.

  A mixture of the private and the public gradient, the first-order form of Amid et al.
  (ICML 2022):

      a_t = cos(pi t / (2 steps)),  t = 0, 1, ...
      direction = a_t * g + (1 - a_t) * public

  After `steps` steps it follows the public gradient alone. The method assumes a model that was
  pretrained on the public data.

  Args:
    steps: K >= 1, the length of the run.

  Returns:
    A `contract.Rule` with `public='mean'`, whose direction is a gradient.
  """
  checks.whole(steps=steps)

  def mixed(direction: trees.Tree, state: sgd.State, public: trees.Tree) -> trees.Tree:
    contract.check_public(public, 'pda_dpmd')
    fraction = tf.cast(tf.minimum(state.step, steps), tf.float64) / steps
    weight = tf.cos(math.pi / 2 * fraction)

    def mix(private: tf.Tensor, public: tf.Tensor) -> tf.Tensor:
      a = tf.cast(weight, private.dtype)
      return a * private + (1 - a) * public

    return trees.map(mix, direction, public)

  return wrapping.followed(sgd.dp_sgd(), mixed, public='mean', name='pda_dpmd', elementwise=False)
