# SPDX-License-Identifier: Apache-2.0
"""Rules with ellipsoids, subspaces and constraints once more, in plain NumPy."""

import numpy as np
import oracle_parts as parts
from scipy import optimize


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
