# SPDX-License-Identifier: Apache-2.0
"""Rules with ellipsoids, subspaces and constraints once more, in plain NumPy."""

import numpy as np
import oracle_parts as parts
from scipy import optimize

from tfdp_adaptive import rules


def euclidean(a, x, bound):
  """The nearest point to x with sum a y^2 <= bound^2, its multiplier by bisection."""
  if np.sum(a * x**2) <= bound**2:
    return x
  high = 1.0
  while np.sum(a * (x / (1 + high * a))**2) > bound**2:
    high *= 2
  lam = optimize.brentq(
      lambda lam: np.sum(a * (x / (1 + lam * a))**2) - bound**2, 0, high, xtol=1e-15, rtol=1e-14)
  return x / (1 + lam * a)


def rescale(a, x, bound):
  norm = np.sqrt(np.sum(a * x**2))
  return x if norm <= bound else x * bound / norm


def metric_ball(weights, y, radius):
  """argmin of sum h (x - y)^2 over the ball, h > 0."""
  return y if np.linalg.norm(y) <= radius else weights**-0.5 * euclidean(
      1 / weights, weights**0.5 * y, radius)


def ellipsoidal(scalar, a, projection, project=None):
  """PASAN (`scalar`) and PAGAN; `project(h, y)`."""
  def solve(p):
    acc = 0.0 if scalar else np.zeros_like(p.theta)

    def step(theta, t):
      nonlocal acc
      total = sum((projection(a, g, p.clip) for g in p.gradients(theta, t)), np.zeros_like(theta))
      g = (total + p.factor * p.clip * p.sigma * p.z[t] / np.sqrt(a)) / p.divisor
      acc = acc + (np.sum(g**2) if scalar else g**2)
      h = np.sqrt(acc) / p.rate
      y = theta - g / h
      return y if project is None else project(np.broadcast_to(h, y.shape), y)

    return parts.iterate(p, step)
  return solve


def noisy_adagrad(participations, basis, mode, project=None, relative=1.0):
  def solve(p):
    s = np.zeros((p.theta.size,) * 2)
    delta = p.factor * p.clip / p.divisor
    k = basis.shape[1]

    def step(theta, t):
      nonlocal s
      x = parts.clipped_sum(p.gradients(theta, t), p.clip) / p.divisor
      s = s + np.outer(x, x)
      values, vectors = np.linalg.eigh(s)
      root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
      sigma_b = relative * p.sigma * np.sqrt(participations) * delta
      goe = (p.z_matrix[t] + p.z_matrix[t].T) / np.sqrt(2)
      h, u = np.linalg.eigh(basis.T @ (root + sigma_b * goe) @ basis)
      u = basis @ u
      threshold = 2 * np.sqrt(k) * sigma_b
      if mode == 'floor':
        h = np.maximum(h, threshold)
      if mode == 'truncate':
        u, h = u[:, h >= threshold], h[h >= threshold]
      y = theta - p.rate * (u / h) @ u.T @ (x + p.std * p.z[t])
      return y if project is None else project(u, h, y)

    return parts.iterate(p, step)
  return solve


def ball_in_range(radius):
  """The constraint of noisy AdaGrad: H = u diag(h) u^T is singular elsewhere."""
  def project(u, h, y):
    inner = u.T @ y
    rest = y - u @ inner
    if np.linalg.norm(inner) > radius:
      return u @ metric_ball(h, inner, radius)
    return u @ inner + parts.clip(rest, np.sqrt(radius**2 - inner @ inner))

  return project


def noisy_adagrad_diagonal(participations, eps, basis=None, project=None):
  def solve(p):
    v = np.zeros_like(p.theta)
    delta = p.factor * p.clip / p.divisor

    def step(theta, t):
      nonlocal v
      x = parts.clipped_sum(p.gradients(theta, t), p.clip) / p.divisor
      v = v + x**2
      h = np.sqrt(v) + p.sigma * np.sqrt(participations) * delta * p.z2[t]
      h = h if basis is None else basis @ basis.T @ h
      h = np.maximum(h, 0) + eps
      y = theta - p.rate * (x + p.std * p.z[t]) / h
      return y if project is None else project(h, y)

    return parts.iterate(p, step)
  return solve


BOX = (-0.4, 0.5)
EYE = np.eye(5)
ELLIPSOID = np.array([4.0, 1.0, 0.25, 9.0, 0.5])
ELLIPSOID_TREE = [ELLIPSOID[:2], ELLIPSOID[2:].reshape(1, 3)]


def into_box(h, y):
  del h
  return np.clip(y, *BOX)


def into_ball(h, y):
  return metric_ball(h, y, 0.6)


Case = parts.Case
CASES = (
    Case('pasan', lambda: rules.pasan(ELLIPSOID_TREE, radius=0.6), ellipsoidal(
        True, ELLIPSOID, euclidean, lambda h, y: parts.clip(y, 0.6))),
    Case('pasan-rescale', lambda: rules.pasan(2.0, 'rescale', box=BOX),
         ellipsoidal(True, np.full(5, 2.0), rescale, into_box)),
    Case('pagan', lambda: rules.pagan(ELLIPSOID_TREE), ellipsoidal(
        False, ELLIPSOID, euclidean)),
    Case('pagan-rescale', lambda: rules.pagan(ELLIPSOID_TREE, 'rescale'), ellipsoidal(
        False, ELLIPSOID, rescale)),
    Case('pagan-box', lambda: rules.pagan(box=BOX), ellipsoidal(
        False, np.ones(5), euclidean, into_box)),
    Case('pagan-ball', lambda: rules.pagan(ELLIPSOID_TREE, radius=0.6), ellipsoidal(
        False, ELLIPSOID, euclidean, into_ball)),
    Case('noisy_adagrad', lambda: rules.noisy_adagrad(2, basis=parts.BASIS),
         noisy_adagrad(2, parts.BASIS, 'truncate'), dict(sigma=0.2)),
    Case('noisy_adagrad-ball', lambda: rules.noisy_adagrad(2, basis=parts.BASIS, radius=0.6),
         noisy_adagrad(2, parts.BASIS, 'truncate', ball_in_range(0.6)),
         dict(sigma=0.05)),
    Case('noisy_adagrad-floor', lambda: rules.noisy_adagrad(
        2, basis=parts.BASIS, mode='floor', relative_noise=2.0, radius=1.5),
         noisy_adagrad(2, parts.BASIS, 'floor', ball_in_range(1.5), relative=2.0)),
    Case('noisy_adagrad-pinv', lambda: rules.noisy_adagrad(2, basis=EYE, mode='pinv'),
         noisy_adagrad(2, EYE, 'pinv'), dict(rate=0.01), 1e-5),
    Case('noisy_adagrad-diagonal', lambda: rules.noisy_adagrad(
        2, diagonal=True, epsilon=0.1, box=BOX),
         noisy_adagrad_diagonal(2, 0.1, project=into_box), dict(adjacency='replace')),
    Case('noisy_adagrad-diagonal_basis', lambda: rules.noisy_adagrad(
        2, basis=parts.BASIS, diagonal=True, epsilon=0.1, radius=0.6),
         noisy_adagrad_diagonal(2, 0.1, parts.BASIS, into_ball)),
)
