"""Preconditioners from public data: side-information Adam and AdaDPS."""

from typing import NamedTuple

import tensorflow as tf

from tfdp_adaptive.rules import base
from tfdp_adaptive.rules import moments


class AdamState(NamedTuple):
  step: tf.Tensor  # [] int64, releases consumed.
  first: base.Tree  # First moment of the released means.
  second: base.Tree  # Second moment of public gradients, >= 0.


class AdaDPSState(NamedTuple):
  step: tf.Tensor  # [] int64, releases consumed.
  second: base.Tree  # Second moment of public gradients, >= 0.


def side_information_adam(beta_1=0.9, beta_2=0.999, epsilon=1e-8, second_moment=None):
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
    A `base.Rule` whose direction has no unit; `public='mean'` if online.
  """
  base.check_not_negative(epsilon=epsilon)
  first, second = moments.adam(beta_1, beta_2)
  online = second_moment is None

  def init(specs):
    nu = second.init(specs) if online else base.constant_like(
        second_moment, specs, 'second_moment')
    return AdamState(base.first_step(), first.init(specs), nu)

  def update(state, releases, public=()):
    (release,) = releases
    step = state.step + 1
    mean, moment = first.update(state.first, release.mean, step)
    nu = estimate = state.second
    if online:
      base.check_public(public, 'side_information_adam')
      nu = second.add(nu, moments.squared(public))
      estimate = second.estimate(nu, step)
    root = base.map_tree(lambda v: tf.sqrt(v) + epsilon, estimate)
    return moments.divide(mean, root), AdamState(step, moment, nu)

  return base.Rule(init, base.isotropic, update, public='mean' if online else None,
                   name='side_information_adam')


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
    A `base.Rule` with `public='mean'`, whose direction has no unit and a norm
    up to `l2_norm_clip`, which is in preconditioned units.
  """
  base.check_positive(epsilon=epsilon)
  base.check_one_of(('rmsprop', 'adagrad'), preconditioner=preconditioner)
  second = (moments.rmsprop(rho) if preconditioner == 'rmsprop' else moments.adagrad()).second

  def init(specs):
    return AdaDPSState(base.first_step(), second.init(specs))

  def updated(state, public):
    base.check_public(public, 'adadps')
    return second.add(state.second, moments.squared(public))

  def query(state, public=()):
    def scale(v):
      return 1 / (tf.sqrt(v + epsilon) if epsilon_inside else tf.sqrt(v) + epsilon)

    return (base.Query(base.map_tree(scale, updated(state, public))),)

  def update(state, releases, public=()):
    (release,) = releases
    return release.mean, AdaDPSState(state.step + 1, updated(state, public))

  return base.Rule(init, query, update, public='mean', name='adadps')
