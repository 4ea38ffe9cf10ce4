# SPDX-License-Identifier: Apache-2.0
"""PDP-SGD: private gradients projected onto a subspace of public ones."""

from typing import Optional

import numpy.typing as npt
import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import contract
from tfdp_adaptive import gate
from tfdp_adaptive import trees
from tfdp_adaptive.rules import sgd
from tfdp_adaptive.rules import subspaces
from tfdp_adaptive.rules import wrapping


@gate.part
def pdp_sgd(
    dimension: Optional[int] = None, basis: Optional[npt.ArrayLike] = None,
    project_after: int = 0) -> contract.Rule:
  """Use PDP-SGD (experimental) to study subspaces of public gradients.

  Noisy gradients are projected onto a subspace of public ones. Zhou, Wu and Banerjee
  (ICLR 2021):

      direction = V V^T g

  where V holds the top eigenvectors of the second moment matrix of public gradients at the current
  parameters.

  Args:
    dimension: k >= 1, at most the number of public records. Their gradients are then computed in
      every step.
    basis: Instead of `dimension`, a fixed [m, k] V of orthonormal columns, over all variables
      flattened in order.
    project_after: Number of steps of plain DP-SGD before the projection starts.

  Returns:
    A `contract.Rule` whose direction is a gradient; `public='records'` unless the
    `basis` is given.
  """
  find = subspaces.finder(dimension, basis, 'pdp_sgd')
  checks.not_negative(project_after=project_after)

  def projected(direction: trees.Tree, state: sgd.State, public: trees.Tree) -> trees.Tree:
    gradient = trees.flatten(direction)
    v = find(public, gradient.dtype)
    within = tf.linalg.matvec(v, tf.linalg.matvec(v, gradient, transpose_a=True))
    return trees.unflatten(
        tf.where(state.step < project_after, gradient, within), direction)

  return wrapping.followed(
      sgd.dp_sgd(), projected, public='records' if basis is None else None, name='pdp_sgd',
      elementwise=False)
