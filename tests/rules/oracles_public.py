# SPDX-License-Identifier: Apache-2.0
"""Rules with preconditioners that are delayed, or come from public gradients, in plain NumPy."""

import numpy as np
import oracle_parts as parts


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
