# SPDX-License-Identifier: Apache-2.0
"""Checks the limits in which one algorithm equals another."""

import dataclasses

import loop
import numpy as np
import oracle_parts as parts
import oracles_convex as convex
import pytest
import table
import tensorflow as tf

from tfdp_adaptive import contract
from tfdp_adaptive import geometry
from tfdp_adaptive import mechanisms
from tfdp_adaptive import privatizer
from tfdp_adaptive import rules
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.clipping import projection

CASES = pytest.mark.parametrize('case', table.RULES, ids=lambda case: case.name)


def iterates(rule, problem):
  return loop.run(rule, problem)[0]


def assert_equal(left, right, tolerance=1e-9):
  np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance)


def differ(left, right):
  return np.abs(left - right).max() > 1e-3


# 1. Bias correction subtracts phi at every step.


@pytest.mark.parametrize('steps', [1, 2, 7])
def test_bias_is_phi(steps):
  problem = loop.Problem(sizes=(3, 4, 5, 0, 4, 5, 3)[:steps])
  phi = (problem.clip * problem.sigma / problem.divisor)**2
  _, state = loop.run(rules.dp_adam_bc(beta_2=0.9), problem)
  assert_equal(state.bias / (1 - 0.9**steps), phi)
  _, state = loop.run(rules.dp_adagrad_bc(), problem)
  assert_equal(state.bias, steps * phi)
  _, state = loop.run(rules.dp_rmsprop_bc(0.8), problem)
  assert_equal(state.bias, (1 - 0.8**steps) * phi)


def test_bias_with_correlated_noise_is_the_trace():
  """phi Tr(C^-T D C^-1), the corrected recursion: row norms, weights beta^(t - i)."""
  n, beta = 7, 0.9
  inverse = np.tril(np.random.default_rng(0).normal(size=(n, n)))
  problem = loop.Problem(row_norms=tuple(np.linalg.norm(inverse, axis=1)))
  phi = (problem.clip * problem.sigma / problem.divisor)**2
  _, state = loop.run(rules.dp_adam_bc(beta_2=beta), problem)
  d = (1 - beta) / (1 - beta**n) * np.diag(beta**np.arange(n - 1, -1.0, -1))
  trace = phi * np.trace(inverse.T @ d @ inverse)
  assert_equal(state.bias / (1 - beta**n), trace)
  # The printed recursion: an extra beta_2, and columns for rows.
  printed = 0.0
  for t in range(1, n + 1):
    printed = (beta - beta**t) / (1 - beta**t) * printed + beta * (1 - beta) / (
        1 - beta**t) * phi * np.sum(inverse[:, t - 1]**2)
  assert abs(printed / trace - 1) > 0.02


# 2. DP-MF with C = I is DP-SGD.


def test_identity_mechanism_is_independent_noise():
  sums = (contract.Sums(loop.split(np.ones(5), tf.float32)),)

  def releases(mechanism):
    specs = tuple(tf.TensorSpec(s.shape, tf.float32) for s in loop.SPECS)
    private = privatizer.Privatizer(
        rules.dp_sgd().asks, specs, l2_norm_clip=1.0, noise_multiplier=0.5, batch_size=4,
        mechanism=mechanism, seed=11)
    state, answers = private.init(), []
    for _ in range(3):
      (release,), state = private.release(state, (contract.Query(),), sums)
      answers.append(np.append(loop.join(release.mean), release.variance))
    return np.array(answers)

  independent = releases(mechanisms.IndependentGaussian())
  assert_equal(independent, releases(mechanisms.BandedToeplitz(bands=1, steps=3)), 1e-6)
  assert differ(independent, releases(mechanisms.BandedToeplitz(bands=2, steps=3)))


# 3. The first scaled step privatizes raw gradients at zeta * scale_epsilon.


@pytest.mark.parametrize('factory', [
    rules.scale_then_privatize, rules.dp_adagrad_stp, rules.dp_rmsprop_stp])
def test_first_scaled_step(factory):
  problem = loop.Problem(clip=3.0, sizes=(5,))
  raw = dataclasses.replace(problem, clip=3.0 * 0.05)
  post = {rules.scale_then_privatize: rules.dp_adam, rules.dp_adagrad_stp: rules.dp_adagrad,
          rules.dp_rmsprop_stp: rules.dp_rmsprop}[factory]
  _, state = loop.run(factory(scale_epsilon=0.05), problem)
  _, expected = loop.run(post(), raw)
  assert_equal(loop.join(state.second), loop.join(expected.second))
  assert_equal(iterates(factory(scale_epsilon=0.05), problem), iterates(post(), raw))


def test_large_scale_epsilon_is_post_processing():
  problem = loop.Problem()
  scaled = dataclasses.replace(problem, clip=problem.clip / 1e9)
  assert_equal(iterates(rules.scale_then_privatize(scale_epsilon=1e9), scaled),
               iterates(rules.dp_adam(), problem), 1e-6)


# 4. Scaled clipping is the radial rescaling onto the ellipsoid s^2 / zeta^2.


def test_scaled_privatization_is_an_ellipsoid():
  problem = loop.Problem(clip=3.0)
  rule = rules.scale_then_privatize(scale_epsilon=0.1)
  _, state = loop.run(rule, problem)
  (query,) = rule.query(state)
  scale = loop.join(query.scale)
  assert scale.max() > 1.5 * scale.min()
  ellipsoid = [t.numpy() for t in loop.split(scale**2 / 3.0**2)]
  other = rules.pagan(ellipsoid, projection='rescale')
  for t in range(len(problem.sizes)):
    gradients = [loop.split(g) for g in problem.gradients(problem.theta, t)]
    unscaled = []
    for p, r, q in ((problem, rule, query),
                    (dataclasses.replace(problem, clip=1.0), other,
                     other.query(other.init(loop.SPECS))[0])):
      release, _ = loop.answer(p, t, 0, r.asks[0], q, gradients, ())
      unscaled.append(loop.join(geometry.unscale(release.mean, q.scale)))
    assert_equal(*unscaled)


# 5. PAGAN with a ball for an ellipsoid is DP-AdaGrad.


@pytest.mark.parametrize('projection', ['euclidean', 'rescale'])
def test_pagan_over_a_ball_is_adagrad(projection):
  problem = loop.Problem(clip=0.7)
  expected = iterates(rules.dp_adagrad(epsilon=0.0), problem)
  unit = dataclasses.replace(problem, clip=1.0)
  assert_equal(iterates(rules.pagan(1 / 0.7**2, projection), unit), expected)
  assert_equal(iterates(rules.pagan(None, projection), problem), expected)


# 6. For batches of at most B records, Poisson-safe IME is that of fixed batches.


def test_projection_of_the_mean_is_idle_up_to_b_records():
  statistic = rules.dp_adam_ime().asks[0].second
  rng = np.random.default_rng(0)
  for size, same in ((1, True), (3, True), (4, True), (5, False), (9, False)):
    record = rng.normal(size=5)
    mean = size / 4.0 * record / np.linalg.norm(record)  # Equal records of norm one, B = 4.
    value, _ = statistic.measure(loop.split(mean), (), tf.constant(1.0, tf.float64), ())
    assert np.allclose(loop.join(value), mean**2, rtol=1e-12) == same
    if not same:
      assert_equal(loop.join(value), (4 * mean / size)**2)


# 7. Without noise and clipping, every method is its non-private optimizer.


def non_private(problem, step):
  theta, thetas, gs = problem.theta, [problem.theta], []
  for t in range(len(problem.sizes)):
    gs.append(problem.gradients(theta, t).mean(axis=0))
    theta = theta - problem.rate * step(np.array(gs))
    thetas.append(theta)
  return np.array(thetas)


def average(values, beta):
  weights = (1 - beta) * beta**np.arange(len(values) - 1, -1.0, -1)
  return np.tensordot(weights, values, 1)


def adam(gs, b1=0.9, b2=0.999, eps=1e-8):
  t = len(gs)
  return average(gs, b1) / (1 - b1**t) / (np.sqrt(average(gs**2, b2) / (1 - b2**t)) + eps)


def yogi(gs):
  v = 1e-6
  for g in gs:
    v = v - 0.001 * np.sign(v - g**2) * g**2
  return average(gs, 0.9) / (np.sqrt(v) + 1e-3)


def matrix_adagrad(gs):
  values, vectors = np.linalg.eigh(gs.T @ gs)
  kept = values > 1e-12 * values.max()
  return (vectors[:, kept] / np.sqrt(values[kept])) @ vectors[:, kept].T @ gs[-1]


OPTIMIZERS = {
    'sgd': lambda gs: gs[-1],
    'momentum': lambda gs: sum(0.9**(len(gs) - 1 - j) * g for j, g in enumerate(gs)),
    'adam': adam,
    'adagrad': lambda gs: gs[-1] / np.sqrt(np.sum(gs**2, 0)),
    'rmsprop': lambda gs: gs[-1] / np.sqrt(average(gs**2, 0.9)),
    'yogi': yogi,
    'adagrad_norm': lambda gs: gs[-1] / np.sqrt(np.sum(gs**2)),
    'matrix_adagrad': matrix_adagrad,
}
TINY = 1e-12


@pytest.mark.parametrize('rule, optimizer', [
    (rules.dp_sgd(), 'sgd'),
    (rules.dp_sgd(0.9), 'momentum'),
    (rules.dp_adam(), 'adam'),
    (rules.dp_adagrad(), 'adagrad'),
    (rules.dp_rmsprop(), 'rmsprop'),
    (rules.dp_yogi(), 'yogi'),
    (rules.dp_adam_bc(epsilon=TINY), 'adam'),
    (rules.dp_adagrad_bc(epsilon=TINY), 'adagrad'),
    (rules.dp_rmsprop_bc(epsilon=TINY), 'rmsprop'),
    (rules.dp_adam_ime(epsilon=TINY), 'adam'),
    (rules.dp_adagrad_ime(epsilon=TINY, floor=True), 'adagrad'),
    (rules.dp_adam_jme(epsilon=TINY, square_then_average=False), 'adam'),
    (rules.scale_then_privatize(scale_epsilon=0.1), 'adam'),
    (rules.dp_adagrad_stp(scale_epsilon=0.1), 'adagrad'),
    (rules.dp_rmsprop_stp(scale_epsilon=0.1), 'rmsprop'),
    (rules.pasan(), 'adagrad_norm'),
    (rules.pagan(), 'adagrad'),
    (rules.pagan(convex.ELLIPSOID_TREE), 'adagrad'),
    (rules.noisy_adagrad(1, basis=convex.EYE, mode='pinv'), 'matrix_adagrad'),
    (rules.noisy_adagrad(1, diagonal=True, epsilon=TINY), 'adagrad'),
    (rules.non_private_noiseless_adam(allow_non_private=True), 'adam'),
    (rules.non_private_noiseless_adam(scale_epsilon=0.1, allow_non_private=True), 'adam'),
], ids=lambda value: getattr(value, 'name', value))
def test_without_noise_and_clipping(rule, optimizer):
  problem = loop.Problem(sizes=(4, 4, 4, 4), sigma=0.0, clip=1e9)
  expected = non_private(problem, OPTIMIZERS[optimizer])
  assert differ(expected[1:], expected[:-1])
  assert_equal(iterates(rule, problem), expected, 1e-5 if 'matrix' in optimizer else 1e-6)


FREE = loop.Problem(sizes=(4,) * 6, sigma=0.0, clip=1e9)


@pytest.mark.parametrize('case', [case for case in table.RULES if case.name.startswith((
    'dp_adam_ime-per', 'dp_adam_jme', 'side', 'adadps', 'pda', 'pdp'))],
                         ids=lambda case: case.name)
def test_without_noise_and_clipping_the_others_follow_their_formulas(case):
  """Squares of records and public data: they have no name without privacy."""
  assert_equal(iterates(case.rule(), FREE), case.oracle(FREE), 1e-7)


@pytest.mark.parametrize('kind, factory', [
    ('rmsprop', rules.dp2_rmsprop), ('adagrad', rules.dp2_adagrad), ('yogi', rules.dp2_yogi)])
@pytest.mark.parametrize('subtract', [False, True])
def test_without_noise_and_clipping_dp2_delays(kind, factory, subtract):
  rule = factory(2, 3, 1.0, 0.1, epsilon=0.01, subtract_bias=subtract)
  theta, v, gs = FREE.theta, 0.0, []
  for t in range(len(FREE.sizes)):
    gs.append(FREE.gradients(theta, t).mean(axis=0))
    if t == 2:
      v = parts.update_second(kind, v, np.mean(gs[:2], axis=0)**2, 0.9)
    adaptive = t % 5 >= 2
    theta = theta - FREE.rate * (0.1 * gs[-1] / (np.sqrt(v) + 0.01) if adaptive else gs[-1])
  assert_equal(iterates(rule, FREE)[-1], theta)


# 8. to 10. DP2, PDP-SGD and PDA-DPMD where they are DP-SGD.


@pytest.mark.parametrize('factory', [rules.dp2_rmsprop, rules.dp2_adagrad, rules.dp2_yogi])
def test_dp2_without_adaptive_steps_is_sgd(factory):
  problem = loop.Problem()
  assert_equal(iterates(factory(2, 0, 5.0, 0.1), problem), iterates(rules.dp_sgd(), problem))
  assert differ(iterates(factory(2, 1, 5.0, 0.1), problem), iterates(rules.dp_sgd(), problem))


def test_projection_onto_everything_is_sgd():
  problem = loop.Problem()
  expected = iterates(rules.dp_sgd(), problem)
  assert_equal(iterates(rules.pdp_sgd(5), problem), expected, 1e-7)
  assert differ(iterates(rules.pdp_sgd(4), problem), expected)


def test_mirror_descent_starts_as_sgd_and_ends_public():
  problem = loop.Problem()
  sgd, pda = iterates(rules.dp_sgd(), problem), iterates(rules.pda_dpmd(3), problem)
  assert_equal(pda[1], sgd[1])
  assert differ(pda[2], sgd[2])
  for t in range(3, 7):
    assert_equal(pda[t + 1], pda[t] - problem.rate * problem.public_mean(pda[t]))


# 11. is in 7 (matrix_adagrad). 12. DP2's ablation differs in the adaptive phase only.


def test_noise_first_has_the_same_sgd_phase():
  problem = loop.Problem()
  dp2 = iterates(rules.dp2_rmsprop(3, 2, 5.0, 0.4), problem)
  ablation = iterates(rules.dp2_rmsprop(3, 2, 5.0, 0.4, ablation='noise_first'), problem)
  assert_equal(ablation[:4], dp2[:4])
  assert differ(ablation[4], dp2[4])


# 13. An empty batch is a step of noise alone.


@CASES
def test_empty_batch_is_a_batch_of_zero_gradients(case):
  empty = loop.Problem(**{**case.setting, 'sizes': (3, 0, 0)})
  zeros = loop.Problem(**{**case.setting, 'sizes': (3, 4, 2)})
  zeros.batches = [empty.batches[0], *((0 * a, b) for a, b in zeros.batches[1:])]
  zeros.z, zeros.z2, zeros.z_matrix = empty.z, empty.z2, empty.z_matrix
  zeros.theta, zeros.public_batch = empty.theta, empty.public_batch
  moved = iterates(case.rule(), empty)
  assert_equal(moved, iterates(case.rule(), zeros))
  assert np.abs(moved[3] - moved[1]).max() > 0


def test_empty_batch_of_sgd_is_the_noise():
  problem = loop.Problem(sizes=(0,))
  after = iterates(rules.dp_sgd(), problem)[1]
  assert_equal(after, problem.theta - problem.rate * problem.std * problem.z[0])


# 14. Neither the order of records nor microbatches matter.


@pytest.mark.thorough(rows=['pasan*', 'pagan', 'noisy_adagrad-*'])
@CASES
def test_order_of_records_does_not_matter(case):
  problem = loop.Problem(**case.setting)
  shuffled = loop.Problem(**case.setting)
  shuffled.batches = [(a[::-1], b[::-1]) for a, b in problem.batches]
  assert_equal(iterates(case.rule(), problem), iterates(case.rule(), shuffled),
               max(1e-7, case.tolerance))


@CASES
def test_sums_add_up_over_microbatches(case):
  """Clipped sums are additive, and what is not linear is applied to the whole mean."""
  rule, problem = case.rule(), loop.Problem(**case.setting)
  state = rule.init(loop.SPECS)
  public = loop.public_of(rule, problem, problem.theta)
  gradients = [loop.split(g) for g in problem.gradients(problem.theta, 2)]
  for ask, query in zip(rule.asks, rule.query(state, public)):
    clip = tf.constant(problem.clip, tf.float64)
    sums = [projection.project_record(ask, query, clip, g) for g in gradients]
    whole = interface.zero_sums(ask, loop.SPECS)
    for one in sums:
      whole = interface.add_sums(whole, one)
    parts = [interface.add_sums(interface.add_sums(sums[0], sums[1]), sums[2]),
             interface.add_sums(sums[3], sums[4])]
    tf.nest.map_structure(assert_equal, whole, interface.add_sums(*parts))
    if ask.second is not None and not ask.second.per_record_square and ask.second.private:
      secret = ask.second.init(loop.SPECS)

      def value(total):
        mean = trees.map(lambda t: t / problem.divisor, total)
        return np.concatenate([np.ravel(v) for v in tf.nest.flatten(
            ask.second.measure(mean, (), clip, secret)[0])])

      assert differ(value(whole.total), value(parts[0].total) + value(parts[1].total))
