# SPDX-License-Identifier: Apache-2.0
"""Rules with preconditioners that are delayed, or come from public gradients, in plain NumPy."""

import numpy as np
import oracle_parts as parts

from tfdp_adaptive import rules


def dp2(kind, s1, s2, clip2, rate2, eps, beta=0.9, noise_first=False, subtract=False):
  """Algorithm 1 as printed: v is updated at the first adaptive step, `acc` reset at phase 0."""
  def solve(p):
    v = acc = np.zeros_like(p.theta)

    def step(theta, t):
      nonlocal v, acc
      phase = t % (s1 + s2)
      if phase == 0:
        acc = np.zeros_like(theta)
      if phase == s1:
        a2 = (acc / s1)**2
        if subtract:
          a2 = np.maximum(a2 - p.std**2 / s1, 0)
        v = parts.update_second(kind, v, a2, beta)
        acc = np.zeros_like(theta)
      if phase < s1:
        d, rate = parts.private_mean(p, theta, t), p.rate
      elif noise_first:
        d, rate = parts.private_mean(p, theta, t) / (np.sqrt(v) + eps), rate2
      else:
        records = p.gradients(theta, t) / (np.sqrt(v) + eps)
        d = (parts.clipped_sum(records, clip2) + p.factor * clip2 * p.sigma * p.z[t]) / p.divisor
        rate = rate2
      acc = acc + d
      return theta - rate * d

    if s2 == 0:
      raise ValueError('Not for this oracle.')
    return parts.iterate(p, step)
  return solve


def dp2_extra_query(kind, s, clip2, rate2, eps, beta=0.9):
  def solve(p):
    v, acc, count = np.zeros_like(p.theta), np.zeros_like(p.theta), 0

    def step(theta, t):
      nonlocal v, acc, count
      boundary = t % s == 0
      spread = 1.0 if boundary else np.sqrt(2)  # Two queries of one batch, half the budget each.
      g = parts.clipped_sum(p.gradients(theta, t), p.clip) / p.divisor + spread * p.std * p.z[t]
      acc, count = acc + g, count + 1
      if boundary:
        v = parts.update_second(kind, v, (acc / count)**2, beta)
        acc, count = np.zeros_like(theta), 0
        return theta - p.rate * g
      records = p.gradients(theta, t) / (np.sqrt(v) + eps)
      noise = spread * p.factor * clip2 * p.sigma * p.z2[t]
      return theta - rate2 * (parts.clipped_sum(records, clip2) + noise) / p.divisor

    return parts.iterate(p, step)
  return solve


def side_information(b1, b2, eps, fixed=None):
  def solve(p):
    gs, publics = [], []

    def step(theta, t):
      gs.append(parts.private_mean(p, theta, t))
      publics.append(p.public_mean(theta)**2)
      nu = fixed if fixed is not None else parts.average(publics, b2) / (1 - b2**(t + 1))
      return theta - p.rate * parts.average(gs, b1) / (1 - b1**(t + 1)) / (np.sqrt(nu) + eps)

    return parts.iterate(p, step)
  return solve


def adadps(kind, eps, rho=0.9, inside=False):
  def solve(p):
    v = np.zeros_like(p.theta)

    def step(theta, t):
      nonlocal v
      v = parts.update_second(kind, v, p.public_mean(theta)**2, rho)
      d = np.sqrt(v + eps) if inside else np.sqrt(v) + eps
      noised = parts.clipped_sum(p.gradients(theta, t) / d, p.clip) + (
          p.factor * p.clip * p.sigma * p.z[t])
      return theta - p.rate * noised / p.divisor

    return parts.iterate(p, step)
  return solve


def pda_dpmd(steps):
  def step_of(p):
    def step(theta, t):
      a = np.cos(np.pi * min(t, steps) / (2 * steps))
      return theta - p.rate * (a * parts.private_mean(p, theta, t) + (1 - a) * p.public_mean(theta))

    return parts.iterate(p, step)
  return step_of


def pdp_sgd(k=None, basis=None, after=0):
  def solve(p):
    def step(theta, t):
      g = parts.private_mean(p, theta, t)
      v = basis
      if v is None:
        records = p.public_records(theta)
        values, vectors = np.linalg.eigh(records.T @ records / len(records))
        v = vectors[:, np.argsort(values)[::-1][:k]]
      return theta - p.rate * (g if t < after else v @ v.T @ g)

    return parts.iterate(p, step)
  return solve


MOMENT = np.array([1.0, 0.1, 2.0, 0.5, 0.3])
MOMENT_TREE = [MOMENT[:2], MOMENT[2:].reshape(1, 3)]
Case = parts.Case
CASES = (
    Case('dp2_rmsprop', lambda: rules.dp2_rmsprop(2, 3, 5.0, 0.4, epsilon=0.01),
         dp2('rmsprop', 2, 3, 5.0, 0.04, 0.01)),
    Case('dp2_adagrad', lambda: rules.dp2_adagrad(1, 2, 5.0, 0.4, epsilon=0.01),
         dp2('adagrad', 1, 2, 5.0, 0.04, 0.01)),
    Case('dp2_yogi', lambda: rules.dp2_yogi(2, 1, 5.0, 0.4, epsilon=0.01, rho=0.8),
         dp2('yogi', 2, 1, 5.0, 0.04, 0.01, beta=0.8)),
    Case('dp2_rmsprop-noise_first', lambda: rules.dp2(
        sgd_steps=2, adaptive_steps=1, relative_adaptive_learning_rate=0.4, epsilon=0.01,
        ablation='noise_first'),
         dp2('rmsprop', 2, 1, None, 0.04, 0.01, noise_first=True)),
    Case('dp2_rmsprop-subtract_bias', lambda: rules.dp2(
        sgd_steps=2, adaptive_steps=1, relative_adaptive_clip=5.0,
        relative_adaptive_learning_rate=0.4, epsilon=0.01, subtract_bias=True),
         dp2('rmsprop', 2, 1, 5.0, 0.04, 0.01, subtract=True)),
    Case('dp2_rmsprop-extra_query', lambda: rules.dp2_rmsprop(
        3, 3, 5.0, 0.4, epsilon=0.01, ablation='extra_query'),
         dp2_extra_query('rmsprop', 3, 5.0, 0.04, 0.01)),
    Case('side_information_adam', lambda: rules.side_information_adam(0.8, 0.9),
         side_information(0.8, 0.9, 1e-8)),
    Case('side_information_adam-offline', lambda: rules.side_information_adam(
        0.8, second_moment=MOMENT_TREE), side_information(0.8, None, 1e-8, MOMENT)),
    Case('adadps', rules.adadps, adadps('rmsprop', 1e-3), dict(clip=3.0)),
    Case('adadps-adagrad', lambda: rules.adadps('adagrad', epsilon=0.1, epsilon_inside=True),
         adadps('adagrad', 0.1, inside=True), dict(clip=3.0)),
    Case('pda_dpmd', lambda: rules.pda_dpmd(5), pda_dpmd(5)),
    Case('pdp_sgd', lambda: rules.pdp_sgd(2), pdp_sgd(2)),
    Case('pdp_sgd-later', lambda: rules.pdp_sgd(3, project_after=2), pdp_sgd(3, after=2)),
    Case('pdp_sgd-basis', lambda: rules.pdp_sgd(basis=parts.BASIS), pdp_sgd(basis=parts.BASIS)),
)
