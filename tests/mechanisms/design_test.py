# SPDX-License-Identifier: Apache-2.0
"""The designs: gradients, optimality, certificates, workloads."""

# pylint: disable=protected-access

import numpy as np
import pytest
from scipy import optimize

from tfdp_adaptive import mechanisms
from tfdp_adaptive.mechanisms import banded_inverse
from tfdp_adaptive.mechanisms import blt_design
from tfdp_adaptive.mechanisms import dense_optimal
from tfdp_adaptive.mechanisms import matrices
from tfdp_adaptive.mechanisms import toeplitz

Workload = mechanisms.Workload
PREFIX, MOMENTUM = Workload(), Workload(.9)


def schedule(n):
  return Workload(.7, tuple(1 + np.cos(np.arange(n) / n)))


def check_gradient(function, x, rtol=1e-6):
  """Central differences of `x -> (value, gradient)`."""
  _, gradient = function(x)
  for i, step in enumerate(1e-5 * np.eye(len(x))):
    numeric = (function(x + step)[0] - function(x - step)[0]) / 2e-5
    assert gradient[i] == pytest.approx(numeric, rel=rtol, abs=rtol * np.abs(gradient).max())


@pytest.mark.parametrize('objective', ['mean', 'max', 'last'])
@pytest.mark.parametrize('steps', [6, 40, 5000, 10**7])
@pytest.mark.parametrize('momentum', [0., .9])
def test_toeplitz_gradient(objective, steps, momentum):
  c = np.array([1., .5, .3, .25, .1])
  check_gradient(lambda c: toeplitz.squared_error(c, steps, Workload(momentum), objective), c)


@pytest.mark.parametrize('objective', ['mean', 'last'])
@pytest.mark.parametrize('momentum', [0., .9])
@pytest.mark.parametrize('steps', [1, 5, 1000, 20_000])
def test_tail_of_the_toeplitz_error_in_closed_form(objective, momentum, steps):
  c = toeplitz.square_root(PREFIX, 4)[:steps]
  workload = Workload(momentum)
  squares = np.cumsum(workload.apply(toeplitz.reciprocal(c, steps))**2)
  expected = squares.mean() if objective == 'mean' else squares[-1]
  error, _ = toeplitz.squared_error(c, steps, workload, objective)
  assert error == pytest.approx(expected, rel=1e-9)


def test_an_unstable_inverse_has_no_error():
  assert toeplitz.squared_error(np.array([1., 1.5]), 10**6, PREFIX, 'mean')[0] == np.inf


@pytest.mark.parametrize('k', [1, 4])
@pytest.mark.parametrize('workload', [PREFIX, MOMENTUM, schedule(40)], ids=repr)
def test_banded_inverse_gradient(k, workload):
  mechanism = mechanisms.BandedInverse(
      4, 40, min_sep=7, max_participations=k, workload=workload)
  check_gradient(mechanism._loss, np.array([.55, .4, .37]))


@pytest.mark.parametrize('steps,min_sep,k', [(50, 50, 1), (50, 7, 5), (10**6, 1000, 30)])
@pytest.mark.parametrize('objective', ['mean', 'last'])
@pytest.mark.parametrize('momentum', [0., .9])
def test_blt_loss_and_gradient(steps, min_sep, k, objective, momentum):
  workload = Workload(momentum)
  p = np.array([2., .1, .3, .2])

  def loss(p):
    pair = blt_design._Pair(p + 1e-100j * np.eye(4))
    value = blt_design._log_loss(pair, steps, workload, objective, min_sep, k)
    return value[0].real, value.imag / 1e-100

  check_gradient(loss, p)
  if steps < 1000:
    pair = blt_design._Pair(p)
    mechanism = mechanisms.BLT(2, steps, weights=pair.weights, decays=pair.decays,
                               workload=workload)
    error = getattr(mechanism, {'mean': 'rmse', 'last': 'last_error'}[objective])
    scale = mechanism.sensitivity(min_sep=min_sep, max_participations=k)
    assert scale <= np.sqrt(k) * 3
    expected = 2 * np.log(error(min_sep=min_sep, max_participations=k))
    assert loss(p)[0] == pytest.approx(expected, rel=1e-10)


def test_blt_pair_is_an_inverse_pair():
  pair = blt_design._Pair(np.array([12., 1., -1., .5, 1., .3]))
  n = 200
  c = blt_design.coefficients(1, pair.weights, pair.decays, n)
  inverse = blt_design.coefficients(1, pair.inverse_weights, pair.inverse_decays, n)
  np.testing.assert_allclose(np.convolve(c, inverse)[:n], np.eye(n)[0], atol=1e-12)
  j = np.arange(n)
  b = pair.limit + sum(a * phi**j for a, phi in zip(pair.excess, pair.inverse_decays))
  np.testing.assert_allclose(b, np.cumsum(inverse), rtol=1e-9)
  weights, decays = blt_design.invert(pair.weights, pair.decays)
  np.testing.assert_allclose(weights, pair.inverse_weights, rtol=1e-6)
  np.testing.assert_allclose(decays, pair.inverse_decays, rtol=1e-9)


def test_convolved_powers_where_decays_meet():
  j = np.arange(20.)
  for a, b in [(.9, .9), (.9, .9 + 1e-13), (.5, .9), (.9, .5)]:
    powers = blt_design._convolved_powers(
        np.log([[a]]), np.log(b), j)[0]
    expected = [sum(a**r * b**(i - r) for r in range(i + 1)) for i in range(20)]
    np.testing.assert_allclose(powers, expected, rtol=1e-9)


@pytest.mark.parametrize('start,stop', [(0, 1), (0, 32), (1, 33), (0, 100), (7, 5000), (3, 3)])
@pytest.mark.parametrize('theta', [.01, .9, .999, 1 - 1e-7])
def test_quadrature(start, stop, theta):
  points, weights = blt_design.nodes(start, stop)
  for degree in (0, 1):
    terms = np.arange(start, stop, dtype=float)
    expected = np.sum(terms**degree * theta**terms)
    assert weights @ (points**degree * theta**points) == pytest.approx(expected, rel=1e-12)


def test_quadrature_of_a_long_range():
  points, weights = blt_design.nodes(0, 10**9)
  assert len(points) < 500
  for theta in (.5, .999, 1 - 1e-8):
    expected = -np.expm1(10**9 * np.log(theta)) / (1 - theta)
    assert weights @ theta**points == pytest.approx(expected, rel=1e-12)


def general_optimum(parametrize, x, n, workload, objective='rmse'):
  """Least error times sensitivity by a method without gradients of ours."""
  a = workload.materialize(n)

  def error(x):
    c = parametrize(x)
    b = a @ np.linalg.inv(c)
    squares = np.sum(b**2, axis=1)
    mean = {'rmse': squares.mean(), 'max': squares.max(), 'last': squares[-1]}[objective]
    return np.sqrt(mean) * np.linalg.norm(c, axis=0).max()

  best = min((optimize.minimize(error, x, method='Nelder-Mead', options={
      'xatol': 1e-10, 'fatol': 1e-13, 'maxiter': 10_000, 'maxfev': 10_000, 'adaptive': True})
              for x in (x, .7 * x)), key=lambda result: result.fun)
  return best.fun


@pytest.mark.parametrize('workload', [PREFIX, MOMENTUM, schedule(9)], ids=repr)
@pytest.mark.parametrize('objective', ['rmse', 'last'])
def test_toeplitz_is_optimal(workload, objective):
  n = 9
  lag = lambda x: matrices.toeplitz_matrix(np.concatenate([[1.], x]), n)
  expected = general_optimum(lag, np.array([.5, .4]), n, workload, objective)
  mechanism = mechanisms.BandedToeplitz(
      3, n, workload=workload, objective='mean' if objective == 'rmse' else 'last')
  error = {'rmse': mechanism.rmse, 'last': mechanism.last_error}[objective]
  assert error() == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize('workload', [PREFIX, schedule(4)], ids=repr)
def test_dense_is_optimal(workload):
  def strategy(x):
    c = np.eye(4)
    c[np.tril_indices(4, -1)] = x
    return c / np.linalg.norm(c, axis=0)
  expected = general_optimum(strategy, np.full(6, .4), 4, workload)
  assert mechanisms.Dense(4, workload=workload).rmse() == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize('objective', ['mean', 'max'])
@pytest.mark.parametrize('workload', [PREFIX, MOMENTUM, schedule(20)], ids=repr)
def test_dense_meets_its_certificate(objective, workload):
  tolerance = 1e-6 if objective == 'mean' else 1e-3
  c, bound = dense_optimal.optimal(workload, 20, objective, tolerance)
  a = workload.materialize(20)
  errors = np.linalg.norm(a @ np.linalg.inv(c), axis=1)
  value = errors.max() if objective == 'max' else np.sqrt(np.mean(errors**2))
  assert bound <= value <= bound * (1 + 1.1 * tolerance)
  # Weak duality, checked on its own: any weights of rows and columns bound any C.
  rng = np.random.default_rng(1)
  p, q = rng.dirichlet(np.ones(20)), rng.dirichlet(np.ones(20))
  p = p if objective == 'max' else np.full(20, 1 / 20)
  assert np.linalg.svd(np.sqrt(p)[:, None] * a * np.sqrt(q), compute_uv=False).sum() <= value


@pytest.mark.parametrize('kind,arguments', [
    ('BandedToeplitz', (4, 30)), ('BLT', (2, 30)), ('BandedInverse', (3, 30)), ('Dense', (30,)),
    ('Banded', (4, 30))])
def test_a_design_for_a_workload_is_best_for_it(kind, arguments):
  make = lambda **kw: getattr(mechanisms, kind)(*arguments, **kw)
  for workload in (Workload(.95), Workload(0., tuple(1 / (1 + np.arange(30))))):
    fitted, plain = make(workload=workload), make()
    answers = workload.materialize(30) @ plain.materialize_inverse()
    assert fitted.rmse() < .999 * np.sqrt(np.sum(answers**2, axis=1).mean())
  if kind != 'Banded':
    assert make(objective='max').max_error() < .9999 * make().max_error()
  assert make().rmse() < .9999 * make(objective='max').rmse()


def test_many_participations_are_designed_for():
  pattern = dict(min_sep=32, max_participations=8)
  for kind, size in ((mechanisms.BLT, 3), (mechanisms.BandedInverse, 4)):
    assert (kind(size, 256, **pattern).rmse(**pattern)
            < .97 * kind(size, 256).rmse(**pattern))


def test_sensitivity_of_the_banded_inverse_is_differentiated_as_reported():
  mechanism = mechanisms.BandedInverse(3, 40, coefficients=[1., -.2, -.5])
  c = toeplitz.reciprocal(np.array([1., -.2, -.5]), 40)
  c = c / np.linalg.norm(c)
  assert np.any(np.diff(c) > 0)  # Not monotone: the majorant counts.
  squared, _ = banded_inverse._squared_sensitivity(c, 40, 7, 5)
  assert mechanism.sensitivity(min_sep=7, max_participations=5) <= np.sqrt(squared) * (1 + 1e-12)


def test_cholesky_factor_has_the_columns_of_the_gram_matrix():
  gram = np.array([[1., .6, .1], [.6, 1., .5], [.1, .5, 1.]])
  c = matrices.factor_gram(gram)
  np.testing.assert_allclose(c.T @ c, gram, atol=1e-15)
  assert not np.any(np.triu(c, 1)) and np.all(np.diagonal(c) > 0)
  wrong = np.linalg.cholesky(gram)  # C C^T = gram: another sensitivity.
  assert np.linalg.norm(wrong, axis=0).max() > 1.1


@pytest.mark.parametrize('steps', [1, 2, 7, 16, 37])
def test_full_tree_is_the_least_squares_estimate(steps):
  """Of every prefix sum, from all noisy nodes."""
  tree = mechanisms.Tree(steps, 'full')
  nodes = np.array([[first <= i < first + 2**level for i in range(steps)]
                    for level in range(steps.bit_length())
                    for first in range(0, steps + 1 - 2**level, 2**level)], float)
  assert len(nodes) < 2 * steps and nodes.sum(axis=0).max() == tree.levels
  for t in range(steps):
    prefix = np.arange(steps) <= t
    estimate = np.linalg.pinv(nodes).T @ prefix
    np.testing.assert_allclose(estimate @ nodes, prefix, atol=1e-12)
    assert tree.squared_errors()[t] == pytest.approx(tree.levels * estimate @ estimate, rel=1e-9)


def test_online_tree_has_honakers_variance():
  tree = mechanisms.Tree(64)
  for level in range(7):
    variance = tree.levels / (2 - .5**level)
    assert tree.squared_errors()[2**level - 1] == pytest.approx(variance, rel=1e-12)


def test_momentum_workload_is_what_sgd_does():
  n, beta, rng = 30, .8, np.random.default_rng(0)
  gradients, rates = rng.normal(size=n), rng.uniform(size=n)
  velocity = theta = 0.
  iterates = []
  for g, rate in zip(gradients, rates):
    velocity = beta * velocity + g
    theta = theta + rate * velocity
    iterates.append(theta)
  workload = Workload(beta, tuple(rates))
  np.testing.assert_allclose(workload.materialize(n) @ gradients, iterates)
  np.testing.assert_allclose(workload.apply(gradients), iterates)
  np.testing.assert_allclose(
      Workload(beta).coefficients(n), Workload(beta).materialize(n)[:, 0], rtol=1e-12)
  constant = Workload(beta, (1.,) * n)
  np.testing.assert_allclose(constant.materialize(n), Workload(beta).materialize(n))


def test_a_million_steps():
  """Designs do not grow with T; errors agree with written-out coefficients."""
  for mechanism in (mechanisms.BandedToeplitz(8, 10**6), mechanisms.BLT(3, 10**6)):
    squares = mechanism.squared_errors()
    assert mechanism.rmse() == pytest.approx(np.sqrt(squares.mean()), rel=1e-9)
    assert mechanism.max_error() == pytest.approx(np.sqrt(squares[-1]), rel=1e-9)


def test_newtons_reciprocal():
  c = toeplitz.square_root(PREFIX, 70_000)
  long = toeplitz.reciprocal(c, 70_000)
  np.testing.assert_allclose(long[:3000], toeplitz.reciprocal(c[:3000], 3000), atol=1e-13)
