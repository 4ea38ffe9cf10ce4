# SPDX-License-Identifier: Apache-2.0
"""Oracles in plain NumPy of wrappers of rules, and of two rules that share one release."""

import numpy as np
import oracle_parts as parts

from tfdp_adaptive import rules


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


Case = parts.Case
CASES = (
    Case('grouped-dp_adam_bc', lambda: rules.grouped(
        rules.dp_adam_bc(0.8, 0.9, 0.05), (0, 1), norms=(1.0, 3.0)),
         grouped_adam_bc(2, (1.0, 3.0), 0.8, 0.9, 0.05), dict(adjacency='replace')),
    Case('partition-dp_sgd-dp_adam_bc', lambda: rules.partition([
        (lambda spec: spec.shape == [2], rules.dp_sgd(0.8)),
        (lambda spec: True, rules.dp_adam_bc(0.8, 0.9, 0.05))]),
         joined(2, heavy_ball(0.8), corrected_adam(0.8, 0.9, 0.05)),
         dict(row_norms=(1.0, 1.1, 1.3, 0.9, 1.2, 1.0, 1.4))),
)
