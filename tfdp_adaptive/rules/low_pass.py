# SPDX-License-Identifier: Apache-2.0
"""A linear filter of noisy gradients in front of any rule; post-processing."""

import functools
from typing import Any, Callable, NamedTuple, Sequence, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import contract
from tfdp_adaptive import gate
from tfdp_adaptive import trees
from tfdp_adaptive.rules import moments
from tfdp_adaptive.rules import wrapping

_CHECKED = 10_000  # Steps for which the gain is computed beforehand.


class State(NamedTuple):
  step: tf.Tensor  # [] int64, releases consumed.
  rule: trees.Tree  # State of the filtered rule.
  past: Any  # Last filtered releases, newest first, then last releases.
  gain: tf.Tensor  # [taps] the same recursion driven by ones.
  noise: Any  # What the variance of the filtered noise needs, for mean and second.


@gate.part
def low_pass(rule: contract.Rule, b: Sequence[float] = (0.1, 0.1),
             a: Sequence[float] = (-0.8,)) -> contract.Rule:
  """Returns a rule that sees filtered noisy gradients instead of the noisy gradients.

  The recursion of DOPPLER (Zhang et al., arXiv:2408.13460), as arXiv:2511.08841 prints
  it, with the gain of its first steps divided out exactly:

      m_t = -sum_{i>=1} a_i m_{t-i} + sum_{i>=0} b_i g_{t-i}
      c_t = the same recursion driven by 1 from the first step on
      the rule is given m_t / c_t and the variance of its noise

  The variance is exact for any mechanism, so bias correction also works with correlated noise. A
  statistic that the rule releases beside the mean is filtered in the same way. If the rule has a
  fixed scale, the scaled releases are filtered. A scale that changes is refused.

  One pole (`b=(1 - k,), a=(-k,)`) gives the normalized first moment of Adam. DP-SGD behind it is
  DP-SGD with damped momentum, so compare a filter with tuned momentum.

  Args:
    rule: Any rule with one query per step whose releases are in one unit.
    b: b_0, b_1, ...; at least one.
    a: a_1, a_2, ... (a_0 is one), with `sum(b) - sum(a) = 1`, so a constant is not changed. The
      default, two taps and one pole at .8, is this library's own.

  Returns:
    A `contract.Rule` whose direction has the unit of that of `rule`.
  """
  b, a = _coefficients(b, a)
  wrapping.require(rule, 'question', 'unit', 'filter', 'step')
  outer = rule._replace(
      name=f'low_pass({rule.name})', project=wrapping.of_inner(rule), public_due=None, steady=True)
  return wrapping.waiting(outer, functools.partial(_filtered, rule, b, a))


def _filtered(rule: contract.Rule, b: np.ndarray, a: np.ndarray,
              filtered_variance: Callable[..., Any]) -> contract.Rule:
  """The rule behind the filter, its noise being known."""
  outputs, inputs = len(a), len(b) - 1
  second = rule.asks[0].second
  variance = filtered_variance(b, a)

  def init(specs: trees.Tree) -> State:
    values = specs, second.specs(specs) if second is not None else ()
    return State(
        moments.first_step(), rule.init(specs),
        tuple(trees.zeros(values) for _ in range(outputs + inputs)),
        tf.zeros([outputs + inputs], trees.dtype_of(specs)),
        tuple(variance.init(trees.dtype_of(specs)) for _ in range(1 if second is None else 2)))

  def query(state: State, public: trees.Tree = ()) -> contract.Queries:
    return rule.query(state.rule, public)

  def update(
      state: State, release: contract.Release, public: trees.Tree) -> Tuple[trees.Tree, State]:
    values, past = _advance(b, a, (release.mean, release.second), state.past)
    gain, gains = _advance(
        b, a, tf.ones([], state.gain.dtype), tuple(tf.unstack(state.gain, outputs + inputs)))
    mean, other = trees.map(lambda m: m / tf.cast(gain, m.dtype), values)
    variances, noise = [], []
    for before, now in zip(state.noise, (release.variance, release.second_variance)):
      value, after = variance.next(before, now)
      variances.append(tf.cast(value, gain.dtype) / gain**2)
      noise.append(after)
    filtered = release._replace(mean=mean, variance=variances[0])
    if second is not None:
      filtered = filtered._replace(second=other, second_variance=variances[1])
    direction, inner = rule.update(state.rule, (filtered,), public)
    gains = tf.stack(gains) if gains else state.gain
    return direction, State(state.step + 1, inner, past, gains, tuple(noise))

  return rule._replace(init=init, query=query, update=contract.of_release(update))


def _advance(b: np.ndarray, a: np.ndarray, new: trees.Tree,
             past: Tuple) -> Tuple[trees.Tree, Tuple]:
  """`(m_t, what the next step needs)` of trees; `past` is newest first."""
  before, given = past[:len(a)], past[len(a):]

  def one(*values: tf.Tensor) -> tf.Tensor:
    coefficients = [float(c) for c in (*b, *-a)]
    return tf.add_n([tf.constant(c, v.dtype) * v for c, v in zip(coefficients, values)])

  value = trees.map(one, new, *given, *before)
  return value, (value, *before)[:len(a)] + (new, *given)[:len(b) - 1]


def _coefficients(
    b: Sequence[float], a: Sequence[float]) -> Tuple[np.ndarray, np.ndarray]:
  """Checked float64 arrays of a stable filter of gain one, whose first gains are positive."""
  b, a = np.asarray(b, np.float64), np.asarray(a, np.float64)
  if b.ndim != 1 or not b.size or a.ndim != 1 or not (
      np.all(np.isfinite(b)) and np.all(np.isfinite(a))):
    raise ValueError('`b` must be one or more finite numbers, and `a` any number of them. '
                     f'Received: b={b}, a={a}.')
  if abs(b.sum() - a.sum() - 1) > 1e-6:
    raise ValueError('`b` and `a` must let a constant through as it is: sum(b) - sum(a) = 1. '
                     f'Received: b={b}, a={a}, of {b.sum() - a.sum():g}.')
  poles = np.roots(np.concatenate([[1.0], a]))
  if poles.size and np.abs(poles).max() >= 1:
    raise ValueError('`a` must make a stable filter: all roots of 1 + a_1 / z + ... within the '
                     f'unit circle. Received: a={a}, with roots of size {np.abs(poles)}.')
  gains, given = [0.0] * len(a), [0.0] * len(b)
  for _ in range(_CHECKED):
    given = [1.0, *given[:-1]]
    gain = float(np.dot(b, given) - np.dot(a, gains[:len(a)]))
    if gain <= 1e-6:
      raise ValueError('`b` and `a` must have a positive gain at every step, by which the filtered '
                       f'release is divided. Received: b={b}, a={a}, of gain {gain:g}.')
    done = bool(gains) and abs(gain - 1) < 1e-12 and abs(gains[0] - 1) < 1e-12
    gains = [gain, *gains[:max(len(a), 1) - 1]]
    if done:
      break
  return b, a
