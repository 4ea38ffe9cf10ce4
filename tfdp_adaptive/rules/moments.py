# SPDX-License-Identifier: Apache-2.0
"""Running moments, which all adaptive rules share.

A `Method` has a first moment, which the parameters follow, and a second moment, by which the step
is divided. Rules differ in the values that they add to them.
"""

import math
from typing import Any, Callable, NamedTuple, Tuple

import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import trees


class FirstMoment(NamedTuple):
  """A mean: `init: specs -> state`, `update: (state, gradient, step) -> (estimate, state)`."""

  init: Callable[[trees.Tree], trees.Tree]
  update: Callable[..., Any]


class SecondMoment(NamedTuple):
  """A running moment of squares.

  Attributes:
    init: `specs -> nu`.
    add: `(nu, square) -> nu`.
    estimate: `(nu, step) -> nu_hat`; `step` counts the squares added, and
      0/0 := 0 where there are none.
    linear: Whether `add` is linear, so that the same recursion over the noise
      variances is the bias of `nu`.
  """

  init: Callable[[trees.Tree], trees.Tree]
  add: Callable[[trees.Tree, trees.Tree], trees.Tree]
  estimate: Callable[[trees.Tree, tf.Tensor], trees.Tree]
  linear: bool = True


class Largest(NamedTuple):
  """State of `largest_average_of_squares`."""

  average: trees.Tree
  largest: trees.Tree  # The largest average so far, by coordinate.


class Centered(NamedTuple):
  """First and second power of a gradient, or the averages of both."""

  value: trees.Tree
  square: trees.Tree


class Method(NamedTuple):
  first: FirstMoment
  second: SecondMoment


def gradient_itself() -> FirstMoment:
  """Returns a first moment that is the gradient itself, without state."""
  return FirstMoment(lambda specs: (), lambda state, gradient, step: (gradient, state))


def average(beta: float, normalized: bool) -> FirstMoment:
  """Returns `m = beta * m + (1 - beta) * g`, divided by `1 - beta**step` if `normalized`."""

  def update(
      moment: trees.Tree, gradient: trees.Tree, step: tf.Tensor) -> Tuple[trees.Tree, trees.Tree]:
    moment = decayed(beta, moment, gradient)
    return (_normalize(beta, moment, step) if normalized else moment), moment

  return FirstMoment(trees.zeros, update)


def heavy_ball(momentum: float, nesterov: bool) -> FirstMoment:
  """Returns `m = momentum * m + g`, undamped; Nesterov follows `g + momentum * m`."""

  def update(
      moment: trees.Tree, gradient: trees.Tree, step: tf.Tensor) -> Tuple[trees.Tree, trees.Tree]:
    del step
    moment = trees.map(lambda m, g: momentum * m + g, moment, gradient)
    if not nesterov:
      return moment, moment
    return trees.map(lambda m, g: g + momentum * m, moment, gradient), moment

  return FirstMoment(trees.zeros, update)


def average_of_squares(beta: float, normalized: bool) -> SecondMoment:
  """Returns the moments of Adam if `normalized`, else of RMSProp."""

  def estimate(nu: trees.Tree, step: tf.Tensor) -> trees.Tree:
    return _normalize(beta, nu, step) if normalized else nu

  return SecondMoment(
      trees.zeros, lambda nu, square: decayed(beta, nu, square), estimate)


def largest_average_of_squares(beta: float) -> SecondMoment:
  """Returns the second moment of AMSGrad (Reddi et al. 2018), normalized as Adam's."""

  def add(nu: Largest, square: trees.Tree) -> Largest:
    average = decayed(beta, nu.average, square)
    return Largest(average, trees.map(tf.maximum, nu.largest, average))

  return SecondMoment(
      lambda specs: Largest(trees.zeros(specs), trees.zeros(specs)), add,
      lambda nu, step: _normalize(beta, nu.largest, step), linear=False)


def centered_squares(beta: float) -> SecondMoment:
  """Returns the running variance of a gradient, of which `Centered` powers are added."""

  def estimate(nu: Centered, step: tf.Tensor) -> trees.Tree:
    del step
    return trees.map(lambda m, v: tf.maximum(v - tf.square(m), 0), nu.value, nu.square)

  return SecondMoment(
      lambda specs: Centered(trees.zeros(specs), trees.zeros(specs)),
      lambda nu, powers: decayed(beta, nu, powers), estimate, linear=False)


def sum_of_squares(initial_value: float = 0.0) -> SecondMoment:
  return SecondMoment(
      _filled(initial_value), lambda nu, square: trees.map(tf.add, nu, square), _as_it_is)


def yogi_squares(beta: float, initial_value: float = 0.0) -> SecondMoment:
  """Returns `v - (1 - beta) * sign(v - g^2) * g^2` (Zaheer et al. 2018)."""

  def add(nu: trees.Tree, square: trees.Tree) -> trees.Tree:
    return trees.map(lambda v, q: v - (1 - beta) * tf.sign(v - q) * q, nu, square)

  return SecondMoment(_filled(initial_value), add, _as_it_is, linear=False)


def adam(beta_1: float, beta_2: float) -> Method:
  checks.decay(beta_1=beta_1, beta_2=beta_2)
  return Method(average(beta_1, normalized=True), average_of_squares(beta_2, normalized=True))


def adagrad(initial_accumulator_value: float = 0.0) -> Method:
  checks.not_negative(initial_accumulator_value=initial_accumulator_value)
  return Method(gradient_itself(), sum_of_squares(initial_accumulator_value))


def rmsprop(rho: float) -> Method:
  checks.decay(rho=rho)
  return Method(gradient_itself(), average_of_squares(rho, normalized=False))


def yogi(beta_1: float, beta_2: float, initial_accumulator_value: float) -> Method:
  checks.decay(beta_1=beta_1, beta_2=beta_2)
  checks.not_negative(initial_accumulator_value=initial_accumulator_value)
  return Method(average(beta_1, normalized=False), yogi_squares(beta_2, initial_accumulator_value))


def first_step() -> tf.Tensor:
  return tf.zeros([], tf.int64)


def decayed(beta: float, moment: trees.Tree, value: trees.Tree) -> trees.Tree:
  """Returns the exponential moving average `beta * moment + (1 - beta) * value`."""
  old, new = trees.scalar(beta, moment), trees.scalar(1 - beta, moment)
  return trees.map(lambda m, x: old[m.dtype] * m + new[m.dtype] * x, moment, value)


def normalizer(beta: float, step: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
  """Returns `1 - beta**step`, by which an average that started at zero is divided.

  It is computed as `-expm1(step * log(beta))`, because float32 powers lose half their digits near
  one.
  """
  if beta == 0:
    return tf.ones([], dtype)
  return -tf.math.expm1(tf.cast(step, dtype) * tf.constant(math.log(beta), dtype))


def squared(tree: trees.Tree) -> trees.Tree:
  return trees.map(tf.square, tree)


def divide(first: trees.Tree, root: trees.Tree) -> trees.Tree:
  """Returns `first / root` with 0/0 := 0, for roots that may be zero."""
  return trees.map(tf.math.divide_no_nan, first, root)




def negative_fraction(nu: trees.Tree, bias: trees.Scalar = 0.0) -> tf.Tensor:
  """Returns the fraction of coordinates with `nu < bias`, a diagnostic (0.5 is pure noise)."""
  leaves = tf.nest.flatten(nu)
  below = tf.add_n([
      tf.math.count_nonzero(leaf < tf.cast(bias, leaf.dtype)) for leaf in leaves])
  total = tf.add_n([tf.size(leaf, tf.int64) for leaf in leaves])
  return tf.cast(below, leaves[0].dtype) / tf.cast(total, leaves[0].dtype)


def _normalize(beta: float, moment: trees.Tree, step: tf.Tensor) -> trees.Tree:
  of = {dtype: normalizer(beta, step, dtype)
        for dtype in dict.fromkeys(m.dtype for m in tf.nest.flatten(moment))}
  return trees.map(lambda m: tf.math.divide_no_nan(m, of[m.dtype]), moment)


def _filled(value: float) -> Callable[[trees.Tree], trees.Tree]:
  return lambda specs: trees.map(lambda s: tf.fill(s.shape, tf.constant(value, s.dtype)), specs)


def _as_it_is(nu: trees.Tree, step: tf.Tensor) -> trees.Tree:
  del step
  return nu


def epsilon_cautions(value: float) -> Callable[[float, float, int], Tuple[str, ...]]:
  """Returns `Rule.cautions` of a rule that divides by at least `value` where noise may dominate."""

  def check(clip_norm: float, noise_std: float, size: int) -> Tuple[str, ...]:
    del clip_norm, size
    if not noise_std:
      return ()
    text = (f'epsilon={value:g}, and the noise per coordinate of the mean gradient is '
            f'{noise_std:.2g}')
    if value < noise_std / 20:
      return (f'{text}: where the second moment comes out negative, steps of pure noise are '
              f'{noise_std / value:.2g} learning rates long. Try epsilon near the noise.',)
    if value > 10 * noise_std:
      return (f'{text}: epsilon rather than the second moment scales most coordinates. '
              'Try epsilon near the noise.',)
    return ()

  return check
