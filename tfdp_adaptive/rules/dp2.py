# SPDX-License-Identifier: Apache-2.0
"""DP2: a preconditioner from averages over many steps, applied with a delay."""

import functools
from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple

import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import contract
from tfdp_adaptive import trees
from tfdp_adaptive.rules import moments

ABLATIONS = (None, 'extra_query', 'noise_first')


class State(NamedTuple):
  step: tf.Tensor  # [] int64, releases consumed.
  second: trees.Tree  # v, of averaged gradients; zero before the first phase ends.
  total: trees.Tree  # Sum of the gradients released in this phase.
  variance: tf.Tensor  # [] of the noise in `total`.


def dp2_rmsprop(
    sgd_steps: int,
    adaptive_steps: int,
    relative_adaptive_clip: float = 1.0,
    relative_adaptive_learning_rate: float = 1.0,
    rho: float = 0.9,
    epsilon: float = 1e-7,
    ablation: Optional[str] = None,
    subtract_bias: bool = False) -> contract.Rule:
  """Use DP2 if the sizes of gradients change slowly over many steps.

  DP2 over RMSProp: a preconditioner of averaged gradients, applied with a delay. Li et al.
  (ICLR 2023), Algorithm 1, with `v = rho v + (1 - rho) a^2`.

  A phase of `sgd_steps` steps of DP-SGD, whose mean gradient is `a`, alternates with a phase of
  `adaptive_steps` steps. The adaptive steps clip g_j / D with D = sqrt(v) + epsilon, add noise, and
  take the result as direction. The result is not multiplied by D again.

  Args:
    sgd_steps: s1 >= 1.
    adaptive_steps: s2 >= 0. With zero, the rule is DP-SGD.
    relative_adaptive_clip: Clip norm of `g_j / D` divided by that of `g_j`.
    relative_adaptive_learning_rate: The learning rate of the adaptive phase divided by that of the
      DP-SGD phase. The paper uses the same for both.
    rho: Decay of `v`, in [0, 1).
    epsilon: In gradient units, > 0.
    ablation: None, 'noise_first' or 'extra_query'. 'noise_first' privatizes the raw gradient and
      divides afterwards. 'extra_query' (Algorithm 2) releases the raw and the preconditioned
      gradient in every step, with half the budget each. It updates `v` every `sgd_steps` steps
      and needs `adaptive_steps == sgd_steps`.
    subtract_bias: Whether to subtract the noise's variance from `a^2`. For independent noise only.

  Returns:
    A `contract.Rule`. Its direction is a gradient in the first phase and has no unit in the other.
  """
  checks.decay(rho=rho)
  return _dp2(moments.average_of_squares(rho, normalized=False), 'dp2_rmsprop', sgd_steps,
              adaptive_steps, relative_adaptive_clip, relative_adaptive_learning_rate, epsilon,
              ablation, subtract_bias)


def dp2_adagrad(
    sgd_steps: int,
    adaptive_steps: int,
    relative_adaptive_clip: float = 1.0,
    relative_adaptive_learning_rate: float = 1.0,
    epsilon: float = 1e-7,
    ablation: Optional[str] = None,
    subtract_bias: bool = False) -> contract.Rule:
  """Use DP2 over AdaGrad as `dp2_rmsprop`, if features are sparse.

  The preconditioner is `v = v + a^2`.

  The arguments are those of `dp2_rmsprop`.
  """
  return _dp2(moments.sum_of_squares(), 'dp2_adagrad', sgd_steps, adaptive_steps,
              relative_adaptive_clip, relative_adaptive_learning_rate, epsilon, ablation,
              subtract_bias)


def dp2_yogi(
    sgd_steps: int,
    adaptive_steps: int,
    relative_adaptive_clip: float = 1.0,
    relative_adaptive_learning_rate: float = 1.0,
    rho: float = 0.9,
    epsilon: float = 1e-7,
    ablation: Optional[str] = None,
    subtract_bias: bool = False) -> contract.Rule:
  """Use DP2 over Yogi as `dp2_rmsprop`, if second moments should not drop quickly.

  The preconditioner is `v = v + (1 - rho) sign(a^2 - v) a^2`. The paper's appendix misplaces a
  square in it. The arguments are those of `dp2_rmsprop`.
  """
  checks.decay(rho=rho)
  return _dp2(moments.yogi_squares(rho), 'dp2_yogi', sgd_steps, adaptive_steps,
              relative_adaptive_clip, relative_adaptive_learning_rate, epsilon, ablation,
              subtract_bias)


def dp2(preconditioner: str = 'rmsprop', **arguments: Any) -> contract.Rule:
  """Returns the rule of the `dp2_*` factory of that name: 'rmsprop', 'adagrad' or 'yogi'."""
  factories: Dict[str, Callable[..., contract.Rule]] = {
      'rmsprop': dp2_rmsprop, 'adagrad': dp2_adagrad, 'yogi': dp2_yogi}
  checks.one_of(tuple(factories), preconditioner=preconditioner)
  return factories[preconditioner](**arguments)


def _dp2(
    second: moments.SecondMoment, name: str, sgd_steps: int, adaptive_steps: int, clip: float,
    rate: float, epsilon: float, ablation: Optional[str], subtract_bias: bool) -> contract.Rule:
  checks.whole(sgd_steps=sgd_steps)
  if adaptive_steps:
    checks.whole(adaptive_steps=adaptive_steps)
  checks.positive(relative_adaptive_clip=clip, relative_adaptive_learning_rate=rate,
                      epsilon=epsilon)
  checks.one_of(ABLATIONS, ablation=ablation)
  if ablation == 'extra_query' and adaptive_steps != sgd_steps:
    raise ValueError("`adaptive_steps` must equal `sgd_steps` with `ablation='extra_query'`, which "
                     f'has one delay. Received: {sgd_steps} and {adaptive_steps}.')

  def init(specs: trees.Tree) -> State:
    return State(moments.first_step(), second.init(specs), trees.zeros(specs),
                 tf.zeros([], trees.dtype_of(specs)))

  collect = functools.partial(_collect, second, subtract_bias)

  def roots(state: State) -> trees.Tree:
    return trees.map(lambda v: tf.sqrt(v) + epsilon, state.second)

  def phase(state: State) -> tf.Tensor:
    return state.step % (sgd_steps + adaptive_steps)

  def query(state: State) -> contract.Queries:
    adaptive = phase(state) >= sgd_steps
    scale = trees.map(lambda d: tf.where(adaptive, 1 / d, tf.ones_like(d)), roots(state))
    relative_clip = tf.where(adaptive, tf.constant(clip, state.variance.dtype), 1)
    return (contract.Query(scale, relative_clip),)

  def update(state: State, release: contract.Release) -> Tuple[trees.Tree, State]:
    adaptive = phase(state) >= sgd_steps
    follow = release.mean
    if ablation == 'noise_first':
      follow = trees.map(tf.divide, follow, roots(state))
    direction = trees.map(
        lambda g, d: tf.where(adaptive, rate * d, g), release.mean, follow)
    return direction, collect(
        state, release, ~adaptive, tf.equal(phase(state), sgd_steps - 1), sgd_steps)

  def query_twice(state: State) -> contract.Queries:
    due = tf.equal(state.step % sgd_steps, 0)
    scale = trees.map(lambda d: 1 / d, roots(state))
    return (contract.Query(share=tf.where(due, 1.0, 0.5)),
            contract.Query(scale, clip, tf.where(due, 0.0, 0.5)))

  def update_twice(
      state: State, releases: contract.Releases,
      public: trees.Tree = ()) -> Tuple[trees.Tree, State]:
    del public
    raw, preconditioned = releases
    due = tf.equal(state.step % sgd_steps, 0)
    direction = trees.map(
        lambda g, d: tf.where(due, g, rate * d), raw.mean, preconditioned.mean)
    count = tf.where(tf.equal(state.step, 0), 1, sgd_steps)  # One gradient at the first step.
    return direction, collect(state, raw, tf.constant(True), due, count)

  if ablation == 'extra_query':
    return contract.Rule(init, contract.in_state(query_twice), update_twice, name=name,
                         asks=(contract.Ask(), contract.Ask()), independent_noise=subtract_bias)
  return contract.Rule(
      init, contract.isotropic if ablation else contract.in_state(query), contract.of_mean(update),
      name=name, independent_noise=subtract_bias, own_clip=not ablation)


def _collect(
    second: moments.SecondMoment, subtract_bias: bool, state: State, release: contract.Release,
    active: tf.Tensor, due: tf.Tensor, count: int) -> State:
  """Adds a release to `total` if `active`; if `due`, turns it into `v`."""
  count = tf.cast(count, state.variance.dtype)
  total = trees.map(lambda a, d: a + _where(active, d), state.total, release.mean)
  variance = state.variance + _where(active, tf.cast(release.variance, state.variance.dtype))
  bias = variance / count**2 if subtract_bias else tf.zeros_like(variance)
  squares = trees.map(
      lambda a: tf.maximum(tf.square(a / tf.cast(count, a.dtype)) - tf.cast(bias, a.dtype), 0),
      total)
  updated = second.add(state.second, squares)
  return State(
      state.step + 1,
      trees.map(lambda new, old: tf.where(due, new, old), updated, state.second),
      trees.map(lambda a: _where(~due, a), total),
      _where(~due, variance))


def _where(condition: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
  return tf.where(condition, tensor, tf.zeros_like(tensor))
