"""Public gradients in the descent itself: PDA-DPMD and PDP-SGD."""

import math
from typing import NamedTuple

import tensorflow as tf

from tfdp_adaptive.rules import base
from tfdp_adaptive.rules import subspaces


class State(NamedTuple):
  step: tf.Tensor  # [] int64, releases consumed.


def pda_dpmd(steps):
  """PDA-DPMD: a mixture of the private and the public gradient.

  The first-order form of Amid et al. (ICML 2022):

      a_t = cos(pi t / (2 steps)),  t = 0, 1, ...
      direction = a_t * g + (1 - a_t) * public

  After `steps` steps it follows the public gradient alone. The method assumes a
  model that was trained on the public data before.

  Args:
    steps: K >= 1, the length of the run.

  Returns:
    A `base.Rule` with `public='mean'`, whose direction is a gradient.
  """
  base.check_steps(steps=steps)

  def update(state, releases, public=()):
    base.check_public(public, 'pda_dpmd')
    (release,) = releases
    fraction = tf.cast(tf.minimum(state.step, steps), tf.float64) / steps
    weight = tf.cos(math.pi / 2 * fraction)

    def mix(private, public):
      a = tf.cast(weight, private.dtype)
      return a * private + (1 - a) * public

    return base.map_tree(mix, release.mean, public), State(state.step + 1)

  return base.Rule(_init, base.isotropic, update, public='mean', name='pda_dpmd')


def pdp_sgd(dimension=None, basis=None, method='exact', project_after=0):
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
    A `base.Rule` whose direction is a gradient; `public='records'` unless the
    `basis` is given.
  """
  find = subspaces.finder(dimension, basis, method, 'pdp_sgd')
  base.check_not_negative(project_after=project_after)

  def update(state, releases, public=()):
    (release,) = releases
    gradient = subspaces.flatten(release.mean)
    v = find(public, gradient.dtype)
    projected = tf.linalg.matvec(v, tf.linalg.matvec(v, gradient, transpose_a=True))
    direction = tf.where(state.step < project_after, gradient, projected)
    return subspaces.unflatten(direction, release.mean), State(state.step + 1)

  return base.Rule(_init, base.isotropic, update,
                   public='records' if basis is None else None, name='pdp_sgd')


def _init(specs):
  del specs
  return State(base.first_step())
