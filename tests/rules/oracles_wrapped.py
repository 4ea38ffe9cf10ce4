# SPDX-License-Identifier: Apache-2.0
"""What goes around a rule, or shares one release between two, once more in plain NumPy."""

import numpy as np
import oracle_parts as parts
from scipy import signal


def filtered(b, a, gs):
  """(last m / c, gain c) of the recursion, by SciPy."""
  taps = np.concatenate([[1.0], a])
  gain = signal.lfilter(b, taps, np.ones(len(gs)))[-1]
  return signal.lfilter(b, taps, np.array(gs), axis=0)[-1] / gain, gain


def low_pass_adam_bc(filters, b1, b2, floor):
  """Its noise being independent: the variance of a weighted sum."""
  def solve(p):
    gs, ms, variances = [], [], []

    def step(theta, t):
      gs.append(parts.private_mean(p, theta, t))
      m, gain = filtered(*filters, gs)
      impulse = signal.lfilter(filters[0], np.concatenate([[1.0], filters[1]]), np.eye(t + 1)[0])
      ms.append(m)
      variances.append(p.std**2 * np.sum(impulse**2) / gain**2)
      mu = parts.average(ms, b1) / (1 - b1**(t + 1))
      nu, bias = parts.average(np.square(ms), b2), parts.average(variances, b2)
      return theta - p.rate * mu / np.sqrt(
          np.maximum((nu - bias) / (1 - b2**(t + 1)), floor**2))

    return parts.iterate(p, step)
  return solve


def denoised_adam_bc(kappa, b1, b2, floor):
  """In its own coordinates: x moves, gradients are taken at x + gamma d."""
  def solve(p):
    gamma = (1 - kappa) / kappa
    x, ahead, estimates, variances = p.theta, [p.theta], [], []
    for t in range(len(p.sizes)):
      g = parts.private_mean(p, ahead[-1], t)
      estimates.append(g if t == 0 else (1 - kappa) * estimates[-1] + kappa * g)
      weights = np.array([(1 - kappa)**(t - j) * (kappa if j else 1) for j in range(t + 1)])
      variances.append(p.std**2 * np.sum(weights**2))
      mu = parts.average(estimates, b1) / (1 - b1**(t + 1))
      clean = parts.average(np.square(estimates), b2) - parts.average(variances, b2)
      clean = clean / (1 - b2**(t + 1))
      before, x = x, x - p.rate * mu / np.sqrt(np.maximum(clean, floor**2))
      ahead.append(x + gamma * (x - before))
    return np.array(ahead)
  return solve


def grouped_adam_bc(cut, norms, b1, b2, floor):
  """Two groups, each with its clip norm in raw units and its noise, optimally split."""
  def solve(p):
    sizes = np.array([cut, len(p.theta) - cut])
    raw = p.clip * np.array(norms) / np.linalg.norm(norms)
    share = raw * np.sqrt(sizes) / np.sum(raw * np.sqrt(sizes))
    std = np.repeat(p.factor * p.sigma * raw / np.sqrt(share) / p.divisor, sizes)
    gs = []

    def step(theta, t):
      records = p.gradients(theta, t)
      total = np.concatenate([
          parts.clipped_sum(records[:, :cut], raw[0]),
          parts.clipped_sum(records[:, cut:], raw[1])])
      gs.append(total / p.divisor + std * p.z[t])
      normal = 1 - b2**(t + 1)
      clean = parts.average(np.square(gs), b2) / normal - std**2
      mu = parts.average(gs, b1) / (1 - b1**(t + 1))
      return theta - p.rate * mu / np.sqrt(np.maximum(clean, floor**2))

    return parts.iterate(p, step)
  return solve


def low_pass_sgd(b, a):
  def solve(p):
    gs = []

    def step(theta, t):
      gs.append(parts.private_mean(p, theta, t))
      return theta - p.rate * filtered(b, a, gs)[0]

    return parts.iterate(p, step)
  return solve


def joined(cut, first, second):
  """Two updates of one release: `update(gs, variances) -> direction` of each part of it."""
  def solve(p):
    gs = []

    def step(theta, t):
      gs.append(parts.private_mean(p, theta, t))
      variances = [p.std**2 * p.row_variance(j) for j in range(t + 1)]
      return theta - p.rate * np.concatenate([
          first([g[:cut] for g in gs], variances), second([g[cut:] for g in gs], variances)])

    return parts.iterate(p, step)
  return solve


def heavy_ball(momentum):
  return lambda gs, variances: parts.momentum_sum(gs, momentum)


def corrected_adam(b1, b2, floor):
  def update(gs, variances):
    t = len(gs)
    clean = (parts.average(np.square(gs), b2) - parts.average(variances, b2)) / (1 - b2**t)
    return parts.average(gs, b1) / (1 - b1**t) / np.sqrt(np.maximum(clean, floor**2))
  return update


def plain_adam(b1, b2, eps, factor=1.0):
  def update(gs, variances):
    t = len(gs)
    root = np.sqrt(parts.average(np.square(gs), b2) / (1 - b2**t)) + eps
    return factor * parts.average(gs, b1) / (1 - b1**t) / root
  return update
