# SPDX-License-Identifier: Apache-2.0
"""Rules that see variables as matrices once more, in plain NumPy."""

import numpy as np
import oracle_parts as parts
import oracles_wrapped as wrapped

from tfdp_adaptive import rules


def quintic(momentum, shape, nesterov=False, steps=5):
  """Muon by its singular values, each of which the iteration maps by itself."""
  def update(gs, variances):
    u, s, v = np.linalg.svd(
        parts.momentum_sum(gs, momentum, nesterov).reshape(shape), full_matrices=False)
    s = parts.ratio(s, np.full_like(s, np.linalg.norm(s)))
    for _ in range(steps):
      s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return 0.2 * np.sqrt(max(shape)) * ((u * s) @ v).ravel()
  return update


def without_edge(momentum, shape):
  """The variance is that of a sum of gradients."""
  def update(gs, variances):
    weights = momentum**np.arange(len(gs) - 1.0, -1, -1)
    u, s, v = np.linalg.svd(parts.momentum_sum(gs, momentum).reshape(shape), full_matrices=False)
    keep = s > np.sqrt(np.sum(weights**2 * variances)) * np.sum(np.sqrt(shape))
    return 0.2 * np.sqrt(max(shape)) * (u[:, keep] @ v[keep]).ravel()
  return update


def kronecker(rotated, b1, b2, floor, eps, every, shapes=((2,), (1, 3))):
  """In gradient coordinates, matrix by matrix: `A = (L d / tr L + eps)^-1/4`, noise taken off."""
  cuts = np.cumsum([np.prod(shape) for shape in shapes])[:-1]

  def leaves(vector):
    return [part.reshape(shape) for part, shape in zip(np.split(vector, cuts), shapes)]

  def join(parts):
    return np.concatenate([np.ravel(part) for part in parts])

  def power(values, exponent):
    positive = np.maximum(values, 0)
    return (positive / positive.mean() + eps)**exponent

  class Leaf:
    def __init__(self, shape):
      self.gs, self.squares, self.moments = [], [], [[], []]
      self.s = np.ones(shape)  # Scale of a vector.
      self.sides = [np.eye(size) for size in shape]  # A and G.
      self.bases = [np.eye(size) for size in shape]

    def scaled(self, g):
      return self.s * g if g.ndim == 1 else self.sides[0] @ g @ self.sides[1].T

    def take(self, r, v, t):
      if r.ndim == 1:
        g = r / self.s
        self.squares.append(g**2 - v / self.s**2)
      else:
        a, c = self.sides
        g = np.linalg.inv(a) @ r @ np.linalg.inv(c).T
        of_a, of_c = (np.linalg.inv(side.T @ side) for side in (a, c))
        self.moments[0].append(g @ g.T - v * np.trace(of_c) * of_a)
        self.moments[1].append(g.T @ g - v * np.trace(of_a) * of_c)
        turned = self.bases[0].T @ g @ self.bases[1]
        variances = np.outer(*[np.diag(q.T @ of @ q) for q, of in zip(self.bases, (of_a, of_c))])
        self.squares.append(turned**2 - v * variances)
      self.gs.append(g)
      m = parts.average(self.gs, b1) / (1 - b1**(t + 1))
      square = parts.average(self.squares, b2) / (1 - b2**(t + 1))
      root = np.sqrt(np.maximum(square if rotated else square.mean(), floor**2))
      if r.ndim == 1:
        direction = m / root if rotated else self.s * m / root
      elif rotated:
        qa, qc = self.bases
        direction = qa @ (qa.T @ m @ qc / root) @ qc.T
      else:
        direction = self.sides[0] @ m @ self.sides[1].T / root
      if (t + 1) % every == 0 and r.ndim == 1:
        self.s = 1 / power(parts.average(self.squares, b2), .5)
      elif (t + 1) % every == 0:
        for i in (0, 1):
          if r.shape[i] > 1:
            values, self.bases[i] = np.linalg.eigh(parts.average(self.moments[i], b2))
            self.sides[i] = self.bases[i] @ np.diag(power(values, -.25)) @ self.bases[i].T
      return direction

  def solve(p):
    own = [Leaf(shape) for shape in shapes]
    variance = (p.factor * p.clip * p.sigma / p.divisor)**2

    def step(theta, t):
      records = np.array([join([leaf.scaled(g) for leaf, g in zip(own, leaves(record))])
                          for record in p.gradients(theta, t)]).reshape(-1, len(theta))
      noised = parts.clipped_sum(records, p.clip) + p.factor * p.clip * p.sigma * p.z[t]
      return theta - p.rate * join([
          leaf.take(r, variance * p.row_variance(t), t)
          for leaf, r in zip(own, leaves(noised / p.divisor))])

    return parts.iterate(p, step)
  return solve


def kfc(momentum, power, eps, decay, every, raw=False):
  """The [1, 3] matrix has inputs that are one, and errors that are its gradients."""
  def solve(p):
    nus, rs, ms = [], [], []

    def root(values):
      return (values / values.mean() + eps)**power

    def average_of(values):
      return sum(decay**(len(values) - 1 - j) * v for j, v in enumerate(values))

    def geometry():
      values, vectors = np.linalg.eigh(average_of(rs))
      s, inverse = np.zeros((5, 5)), root(values)
      s[:2, :2] = np.diag(1 / root(average_of(nus)))
      s[2:, 2:] = vectors @ np.diag(1 / inverse) @ vectors.T / (1 + eps)**power
      return s

    scale = None

    def step(theta, t):
      nonlocal scale
      if t == 0 or (t + 1) % every == 0:
        records = p.public_records(theta)
        nus.append(np.mean(records[:, :2]**2, 0))
        rs.append(np.mean([np.outer(g[2:], g[2:]) for g in records], 0))
      scale = geometry() if t == 0 else scale
      noised = parts.clipped_sum(p.gradients(theta, t) @ scale.T, p.clip) + (
          p.factor * p.clip * p.sigma * p.z[t])
      mean = noised / p.divisor
      ms.append(np.linalg.solve(scale, mean) if raw else mean)
      if (t + 1) % every == 0:
        scale = geometry()
      return theta - p.rate * parts.momentum_sum(ms, momentum)

    return parts.iterate(p, step)
  return solve


Case = parts.Case
CASES = (
    Case('muon-edge', lambda: rules.partition([
        (lambda spec: len(spec.shape) == 2, rules.muon(0.8, nesterov=False, edge=True)),
        (lambda spec: True, rules.dp_sgd())]),
         wrapped.joined(2, wrapped.heavy_ball(0.0), without_edge(0.8, (1, 3))),
         dict(sigma=0.2)),
    Case('dp_muon', lambda: rules.dp_muon(
        0.8, beta_1=0.7, beta_2=0.9, epsilon=0.1, relative_adam_learning_rate=0.5),
         wrapped.joined(2, wrapped.plain_adam(0.7, 0.9, 0.1, 0.5), quintic(
             0.8, (1, 3), nesterov=True))),
    Case('dp_shampoo', lambda: rules.dp_shampoo(0.8, 0.9, 0.05, scale_epsilon=0.1, refresh_every=2),
         kronecker(False, 0.8, 0.9, 0.05, 0.1, 2)),
    Case('dp_soap', lambda: rules.dp_soap(0.8, 0.9, 0.05, scale_epsilon=0.1, refresh_every=2),
         kronecker(True, 0.8, 0.9, 0.05, 0.1, 2), dict(
             row_norms=(1.0, 1.1, 1.3, 0.9, 1.2, 1.0, 1.4))),
    Case('dp_kfc', lambda: rules.dp_kfc(
        0.5, scale_epsilon=0.1, decay=0.6, refresh_every=3), kfc(0.5, 0.5, 0.1, 0.6, 3),
         dict(clip=2.0)),
    Case('dp_kfc-raw', lambda: rules.dp_kfc(
        power=0.3, scale_epsilon=0.2, decay=0.0, refresh_every=1, frame='raw'),
         kfc(0.0, 0.3, 0.2, 0.0, 1, raw=True), dict(clip=2.0)),
)
