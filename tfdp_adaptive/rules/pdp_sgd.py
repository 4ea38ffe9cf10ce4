# SPDX-License-Identifier: Apache-2.0
"""PDP-SGD: private gradients projected onto a subspace of public ones."""

from typing import NamedTuple, Optional, Tuple

import numpy.typing as npt
import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import contract
from tfdp_adaptive import trees
from tfdp_adaptive.rules import arithmetic
from tfdp_adaptive.rules import subspaces


class State(NamedTuple):
  step: tf.Tensor  # [] int64, releases consumed.


def pdp_sgd(
    dimension: Optional[int] = None, basis: Optional[npt.ArrayLike] = None, method: str = 'exact',
    project_after: int = 0) -> contract.Rule:
  """PDP-SGD: private gradients projected onto a subspace of public ones.

  Zhou, Wu and Banerjee (ICLR 2021):

      direction = V V^T g

  with V the top eigenvectors of the second moment matrix of public gradients
  at the current parameters.

  Args:
    dimension: k >= 1, at most the number of public records, whose gradients are
      then asked for at every step.
    basis: Or a fixed [m, k] V of orthonormal columns, over all variables
      flattened in order.
    method: 'exact', or 'randomized' for many public records.
    project_after: Number of first steps that are plain DP-SGD.

  Returns:
    A `contract.Rule` whose direction is a gradient; `public='records'` unless the
    `basis` is given.
  """
  find = subspaces.finder(dimension, basis, method, 'pdp_sgd')
  checks.not_negative(project_after=project_after)

  def update(
      state: State, releases: contract.Releases,
      public: trees.Tree = ()) -> Tuple[trees.Tree, State]:
    (release,) = releases
    gradient = subspaces.flatten(release.mean)
    v = find(public, gradient.dtype)
    projected = tf.linalg.matvec(v, tf.linalg.matvec(v, gradient, transpose_a=True))
    direction = tf.where(state.step < project_after, gradient, projected)
    return subspaces.unflatten(direction, release.mean), State(state.step + 1)

  return contract.Rule(_init, contract.isotropic, update,
                   public='records' if basis is None else None, name='pdp_sgd')


def _init(specs: trees.Tree) -> State:
  del specs
  return State(arithmetic.first_step())
