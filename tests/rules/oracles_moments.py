# SPDX-License-Identifier: Apache-2.0
"""Rules of first and second moments once more, in plain NumPy."""

import numpy as np
import oracle_parts as parts

from tfdp_adaptive import rules


def sgd(momentum=0.0, nesterov=False):
  def solve(p):
    gs = []

    def step(theta, t):
      gs.append(parts.private_mean(p, theta, t))
      # The closed form of momentum: weights momentum^(t - j).
      m = sum(momentum**(t - j) * g for j, g in enumerate(gs))
      return theta - p.rate * (gs[-1] + momentum * m if nesterov else m)

    return parts.iterate(p, step)
  return solve


def adam(b1, b2, eps, amsgrad=False):
  def solve(p):
    gs = []

    def step(theta, t):
      gs.append(parts.private_mean(p, theta, t))
      mu = parts.average(gs, b1) / (1 - b1**(t + 1))
      nu = parts.average(np.square(gs), b2)
      if amsgrad:
        nu = np.max([parts.average(np.square(gs[:k]), b2) for k in range(1, t + 2)], axis=0)
      nu = nu / (1 - b2**(t + 1))
      return theta - p.rate * mu / (np.sqrt(nu) + eps)

    return parts.iterate(p, step)
  return solve


def adagrad(initial, eps):
  def solve(p):
    gs = []

    def step(theta, t):
      gs.append(parts.private_mean(p, theta, t))
      return theta - p.rate * parts.ratio(gs[-1], np.sqrt(initial + np.sum(np.square(gs), 0)) + eps)

    return parts.iterate(p, step)
  return solve


def rmsprop(rho, eps, momentum=0.0, centered=False):
  def solve(p):
    gs, directions = [], []

    def step(theta, t):
      gs.append(parts.private_mean(p, theta, t))
      nu = parts.average(np.square(gs), rho)
      if centered:
        # The weights of an average that starts at zero sum to 1 - rho**t.
        mean = parts.average(gs, rho)
        nu = parts.average((np.array(gs) - mean)**2, rho) + rho**(t + 1) * mean**2
      directions.append(parts.ratio(gs[-1], np.sqrt(nu) + eps))
      return theta - p.rate * sum(
          momentum**(t - j) * direction for j, direction in enumerate(directions))

    return parts.iterate(p, step)
  return solve


def yogi(b1, b2, eps, initial):
  def solve(p):
    m, v = np.zeros_like(p.theta), np.full_like(p.theta, initial)

    def step(theta, t):
      nonlocal m, v
      g = parts.private_mean(p, theta, t)
      m = b1 * m + (1 - b1) * g
      v = np.where(v > g**2, v - (1 - b2) * g**2, v + (1 - b2) * g**2)
      return theta - p.rate * m / (np.sqrt(v) + eps)

    return parts.iterate(p, step)
  return solve


def adam_bc(b1, b2, eps):
  def solve(p):
    gs = []

    def step(theta, t):
      gs.append(parts.private_mean(p, theta, t))
      mu = parts.average(gs, b1) / (1 - b1**(t + 1))
      nu = parts.average(np.square(gs), b2) / (1 - b2**(t + 1))
      variances = [p.std**2 * p.row_variance(j) for j in range(t + 1)]
      bias = parts.average(variances, b2) / (1 - b2**(t + 1))
      return theta - p.rate * mu / np.sqrt(np.maximum(nu - bias, eps**2))

    return parts.iterate(p, step)
  return solve


def adagrad_bc(eps):
  def solve(p):
    gs = []

    def step(theta, t):
      gs.append(parts.private_mean(p, theta, t))
      nu = np.sum(np.square(gs), 0) - sum(p.std**2 * p.row_variance(j) for j in range(t + 1))
      return theta - p.rate * gs[-1] / np.sqrt(np.maximum(nu, eps**2))

    return parts.iterate(p, step)
  return solve


def rmsprop_bc(rho, eps):
  def solve(p):
    gs = []

    def step(theta, t):
      gs.append(parts.private_mean(p, theta, t))
      bias = parts.average([p.std**2 * p.row_variance(j) for j in range(t + 1)], rho)
      nu = parts.average(np.square(gs), rho) - bias
      return theta - p.rate * gs[-1] / np.sqrt(np.maximum(nu, eps**2))

    return parts.iterate(p, step)
  return solve


def two_moments(second, eps, std1, std2, per_record=False, floor=False, update_clip=None, b1=None):
  """IME and JME: `second(list of squares, t) -> nu_hat`, stds for zeta = 1 and sigma = 1."""
  def solve(p):
    xs, qs = [], []

    def step(theta, t):
      records = p.gradients(theta, t)
      x = parts.clipped_sum(records, p.clip) / p.divisor
      if per_record:
        q = sum((parts.clip(g, p.clip)**2 for g in records), np.zeros_like(theta)) / p.divisor
      else:
        q = parts.clip(x, p.clip)**2
      xs.append(x + std1 * p.clip * p.sigma * p.z[t])
      qs.append(q + std2 * p.clip**2 * p.sigma * p.z2[t])
      mu = xs[-1] if b1 is None else parts.average(xs, b1) / (1 - b1**(t + 1))
      root = np.sqrt(np.maximum(second(qs, t), 0))
      d = mu / (np.maximum(root, eps) if floor else root + eps)
      return theta - p.rate * (d if update_clip is None else parts.clip(d, update_clip))

    return parts.iterate(p, step)
  return solve


def adam_second(b2):
  return lambda qs, t: parts.average(qs, b2) / (1 - b2**(t + 1))


def adagrad_second(qs, t):
  del t
  return np.sum(qs, 0)


def scale_then_privatize(kind, eps, scale_eps, b1=0.9, beta=0.9):
  def solve(p):
    m = nu = np.zeros_like(p.theta)

    def estimate(count):
      return nu / (1 - beta**count) if kind == 'adam' and count else nu

    def step(theta, t):
      nonlocal m, nu
      s = 1 / (np.sqrt(estimate(t)) + scale_eps)
      noised = parts.clipped_sum(p.gradients(theta, t) * s, p.clip) + (
          p.factor * p.clip * p.sigma * p.z[t])
      g = noised / p.divisor / s
      nu = nu + g**2 if kind == 'adagrad' else beta * nu + (1 - beta) * g**2
      m = b1 * m + (1 - b1) * g
      numerator = m / (1 - b1**(t + 1)) if kind == 'adam' else g
      return theta - p.rate * numerator / (np.sqrt(estimate(t + 1)) + eps)

    return parts.iterate(p, step)
  return solve


def noiseless(b1, b2, eps, scale_eps=None):
  def solve(p):
    gs, cleans = [], []

    def step(theta, t):
      nu = parts.average(np.square(cleans), b2) / (1 - b2**t) if t else np.zeros_like(theta)
      s = np.ones_like(theta) if scale_eps is None else 1 / (np.sqrt(nu) + scale_eps)
      clean = parts.clipped_sum(p.gradients(theta, t) * s, p.clip) / p.divisor
      gs.append((clean + p.std * p.z[t]) / s)
      cleans.append(clean / s)
      nu = parts.average(np.square(cleans), b2) / (1 - b2**(t + 1))
      return theta - p.rate * parts.average(gs, b1) / (1 - b1**(t + 1)) / (np.sqrt(nu) + eps)

    return parts.iterate(p, step)
  return solve


ROOT2 = np.sqrt(2)
# IME at B = 4: sqrt(2) (2 B - 1) / B^2, or one clip norm squared over B per record.
_IME = dict(std1=ROOT2 / 4, std2=ROOT2 * 7 / 16)
Case = parts.Case
CASES = (
    Case('dp_sgd', rules.dp_sgd, sgd()),
    Case('dp_sgd-replace', rules.dp_sgd, sgd(), dict(adjacency='replace')),
    Case('dp_sgd-momentum', lambda: rules.dp_sgd(0.8), sgd(0.8)),
    Case('dp_sgd-nesterov', lambda: rules.dp_sgd(0.8, True), sgd(0.8, True)),
    Case('dp_adam', lambda: rules.dp_adam(0.8, 0.95, 1e-3), adam(0.8, 0.95, 1e-3)),
    Case('dp_adam-no_memory', lambda: rules.dp_adam(0.0, 0.0, 0.1), adam(0.0, 0.0, 0.1)),
    Case('dp_adagrad', lambda: rules.dp_adagrad(0.1, 0.0), adagrad(0.1, 0.0)),
    Case('dp_rmsprop', lambda: rules.dp_rmsprop(0.8), rmsprop(0.8, 1e-8)),
    Case('dp_adam-amsgrad', lambda: rules.dp_adam(0.8, 0.6, 0.05, amsgrad=True),
         adam(0.8, 0.6, 0.05, amsgrad=True)),
    Case('dp_rmsprop-momentum', lambda: rules.dp_rmsprop(0.8, 0.05, momentum=0.7),
         rmsprop(0.8, 0.05, 0.7)),
    Case('dp_rmsprop-centered', lambda: rules.dp_rmsprop(0.8, 0.05, centered=True),
         rmsprop(0.8, 0.05, centered=True)),
    Case('dp_rmsprop-centered_momentum', lambda: rules.dp_rmsprop(0.8, 0.05, 0.7, True),
         rmsprop(0.8, 0.05, 0.7, True)),
    Case('dp_yogi', lambda: rules.dp_yogi(0.8, 0.9), yogi(0.8, 0.9, 1e-3, 1e-6)),
    Case('dp_adam_bc', lambda: rules.dp_adam_bc(0.8, 0.9, 0.05), adam_bc(0.8, 0.9, 0.05)),
    Case('dp_adam_bc-rows', lambda: rules.dp_adam_bc(0.8, 0.9, 0.05),
         adam_bc(0.8, 0.9, 0.05), dict(row_norms=(1.0, 1.1, 1.3, 0.9, 1.2, 1.0, 1.4))),
    Case('dp_adagrad_bc', lambda: rules.dp_adagrad_bc(epsilon=0.05), adagrad_bc(0.05),
         dict(row_norms=(1.0, 1.1, 1.3, 0.9, 1.2, 1.0, 1.4))),
    Case('dp_rmsprop_bc', lambda: rules.dp_rmsprop_bc(0.8, 0.05), rmsprop_bc(0.8, 0.05),
         dict(row_norms=(1.0, 1.1, 1.3, 0.9, 1.2, 1.0, 1.4))),
    Case('dp_adam_ime', lambda: rules.dp_adam_ime(0.8, 0.9, 0.05),
         two_moments(adam_second(0.9), 0.05, b1=0.8, **_IME)),
    Case('dp_adam_ime-share', lambda: rules.dp_adam_ime(0.8, 0.9, 0.05, share=0.8),
         two_moments(adam_second(0.9), 0.05, std1=0.25 / np.sqrt(0.8),
                             std2=7 / 16 / np.sqrt(0.2), b1=0.8)),
    Case('dp_adam_ime-replace', lambda: rules.dp_adam_ime(0.8, 0.9, 0.05),
         two_moments(adam_second(0.9), 0.05, std1=ROOT2 / 2, std2=ROOT2 * 3 / 4,
                             b1=0.8), dict(adjacency='replace')),
    Case('dp_adam_ime-printed', lambda: rules.dp_adam_ime(0.8, 0.9, 0.05, printed_2B_plus_1=True),
         two_moments(adam_second(0.9), 0.05, std1=ROOT2 / 4, std2=ROOT2 * 9 / 16,
                             b1=0.8)),
    Case('dp_adam_ime-update_clip', lambda: rules.dp_adam_ime(0.8, 0.9, 0.05, update_clip=4.0),
         two_moments(adam_second(0.9), 0.05, b1=0.8, update_clip=4.0, **_IME)),
    Case('dp_adam_ime-per_record', lambda: rules.dp_adam_ime(
        0.8, 0.9, 0.05, floor=True, square_then_average=True),
         two_moments(adam_second(0.9), 0.05, std1=ROOT2 / 4, std2=ROOT2 / 4, b1=0.8,
                             per_record=True, floor=True), dict(clip=2.0)),
    Case('dp_adagrad_ime', lambda: rules.dp_adagrad_ime(epsilon=1.0, floor=True),
         two_moments(adagrad_second, 1.0, floor=True, **_IME)),
    Case('dp_adam_jme', lambda: rules.dp_adam_jme(0.8, 0.9, 0.05),
         two_moments(adam_second(0.9), 0.05, std1=0.5, std2=0.5 * ROOT2,
                             b1=0.8, per_record=True), dict(adjacency='replace', clip=2.0)),
    Case('dp_adam_jme-zero_out', lambda: rules.dp_adam_jme(0.8, 0.9, 0.05),
         two_moments(adam_second(0.9), 0.05, std1=np.sqrt(1.5) / 4,
                             std2=np.sqrt(3) / 4, b1=0.8, per_record=True)),
    Case('dp_adam_jme-of_mean', lambda: rules.dp_adam_jme(
        0.8, 0.9, 0.05, square_then_average=False, relative_lambda=0.25),
         two_moments(adam_second(0.9), 0.05, b1=0.8,
                             std1=0.5 * np.sqrt(1 + 0.25 * 1.5**2),
                             std2=np.sqrt(1 + 0.25 * 1.5**2)), dict(adjacency='replace')),
    Case('scale_then_privatize', lambda: rules.scale_then_privatize(
        0.8, 0.9, 1e-3, scale_epsilon=0.2),
         scale_then_privatize('adam', 1e-3, 0.2, b1=0.8), dict(clip=3.0)),
    Case('dp_adagrad_stp', lambda: rules.dp_adagrad_stp(scale_epsilon=0.2),
         scale_then_privatize('adagrad', 1e-8, 0.2), dict(clip=3.0)),
    Case('dp_rmsprop_stp', lambda: rules.dp_rmsprop_stp(0.9, scale_epsilon=0.2),
         scale_then_privatize('rmsprop', 1e-8, 0.2), dict(clip=3.0)),
    Case('non_private_noiseless_adam', lambda: rules.non_private_noiseless_adam(
        0.8, 0.9, 1e-3, allow_non_private=True), noiseless(0.8, 0.9, 1e-3)),
    Case('non_private_noiseless_adam-scaled', lambda: rules.non_private_noiseless_adam(
        0.8, 0.9, 1e-3, scale_epsilon=0.2, allow_non_private=True),
         noiseless(0.8, 0.9, 1e-3, 0.2), dict(clip=3.0)),
)
