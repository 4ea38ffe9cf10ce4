# SPDX-License-Identifier: Apache-2.0
"""Every algorithm once more, in plain NumPy on one flat vector, from the formulas.

Each function returns `problem -> [T + 1, 5] iterates`. Nothing is shared with
the library, and little between the algorithms.
"""

import numpy as np
from scipy import optimize
from scipy import signal


def clip(v, bound):
  norm = np.linalg.norm(v)
  return v if norm <= bound else v * (bound / norm)


def clipped_sum(records, bound):
  return sum((clip(v, bound) for v in records), np.zeros(records.shape[1]))


def private_mean(p, theta, t, z=None):
  z = p.z if z is None else z
  return clipped_sum(p.gradients(theta, t), p.clip) / p.divisor + p.std * z[t]


def ratio(a, b):
  return np.divide(a, b, out=np.zeros_like(a), where=b != 0)


def iterate(p, step):
  """`step(theta, t) -> theta` from p.theta on."""
  thetas = [p.theta]
  for t in range(len(p.sizes)):
    thetas.append(step(thetas[-1], t))
  return np.array(thetas)


def sgd(momentum=0.0, nesterov=False):
  def solve(p):
    gs = []

    def step(theta, t):
      gs.append(private_mean(p, theta, t))
      # The closed form of momentum: weights momentum^(t - j).
      m = sum(momentum**(t - j) * g for j, g in enumerate(gs))
      return theta - p.rate * (gs[-1] + momentum * m if nesterov else m)

    return iterate(p, step)
  return solve


def average(values, beta):
  """(1 - beta) sum_j beta^(t - j) values_j, the exponential average started at zero."""
  t = len(values)
  return (1 - beta) * sum(beta**(t - 1 - j) * v for j, v in enumerate(values))


def adam(b1, b2, eps):
  def solve(p):
    gs = []

    def step(theta, t):
      gs.append(private_mean(p, theta, t))
      mu = average(gs, b1) / (1 - b1**(t + 1))
      nu = average(np.square(gs), b2) / (1 - b2**(t + 1))
      return theta - p.rate * mu / (np.sqrt(nu) + eps)

    return iterate(p, step)
  return solve


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
      gs.append(private_mean(p, theta, t))
      m, gain = filtered(*filters, gs)
      impulse = signal.lfilter(filters[0], np.concatenate([[1.0], filters[1]]), np.eye(t + 1)[0])
      ms.append(m)
      variances.append(p.std**2 * np.sum(impulse**2) / gain**2)
      mu = average(ms, b1) / (1 - b1**(t + 1))
      nu, bias = average(np.square(ms), b2), average(variances, b2)
      return theta - p.rate * mu / np.sqrt(
          np.maximum((nu - bias) / (1 - b2**(t + 1)), floor**2))

    return iterate(p, step)
  return solve


def denoised_adam_bc(kappa, b1, b2, floor):
  """In its own coordinates: x moves, gradients are taken at x + gamma d."""
  def solve(p):
    gamma = (1 - kappa) / kappa
    x, ahead, estimates, variances = p.theta, [p.theta], [], []
    for t in range(len(p.sizes)):
      g = private_mean(p, ahead[-1], t)
      estimates.append(g if t == 0 else (1 - kappa) * estimates[-1] + kappa * g)
      weights = np.array([(1 - kappa)**(t - j) * (kappa if j else 1) for j in range(t + 1)])
      variances.append(p.std**2 * np.sum(weights**2))
      mu = average(estimates, b1) / (1 - b1**(t + 1))
      clean = (average(np.square(estimates), b2) - average(variances, b2)) / (1 - b2**(t + 1))
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
          clipped_sum(records[:, :cut], raw[0]), clipped_sum(records[:, cut:], raw[1])])
      gs.append(total / p.divisor + std * p.z[t])
      normal = 1 - b2**(t + 1)
      clean = average(np.square(gs), b2) / normal - std**2
      mu = average(gs, b1) / (1 - b1**(t + 1))
      return theta - p.rate * mu / np.sqrt(np.maximum(clean, floor**2))

    return iterate(p, step)
  return solve


def low_pass_sgd(b, a):
  def solve(p):
    gs = []

    def step(theta, t):
      gs.append(private_mean(p, theta, t))
      return theta - p.rate * filtered(b, a, gs)[0]

    return iterate(p, step)
  return solve


def joined(cut, first, second):
  """Two updates of one release: `update(gs, variances) -> direction` of each part of it."""
  def solve(p):
    gs = []

    def step(theta, t):
      gs.append(private_mean(p, theta, t))
      variances = [p.std**2 * p.row_variance(j) for j in range(t + 1)]
      return theta - p.rate * np.concatenate([
          first([g[:cut] for g in gs], variances), second([g[cut:] for g in gs], variances)])

    return iterate(p, step)
  return solve


def momentum_sum(gs, momentum, nesterov=False):
  m = np.tensordot(momentum**np.arange(len(gs) - 1.0, -1, -1), np.array(gs), 1)
  return gs[-1] + momentum * m if nesterov else m


def heavy_ball(momentum):
  return lambda gs, variances: momentum_sum(gs, momentum)


def corrected_adam(b1, b2, floor):
  def update(gs, variances):
    t = len(gs)
    clean = (average(np.square(gs), b2) - average(variances, b2)) / (1 - b2**t)
    return average(gs, b1) / (1 - b1**t) / np.sqrt(np.maximum(clean, floor**2))
  return update


def plain_adam(b1, b2, eps, factor=1.0):
  def update(gs, variances):
    t = len(gs)
    root = np.sqrt(average(np.square(gs), b2) / (1 - b2**t)) + eps
    return factor * average(gs, b1) / (1 - b1**t) / root
  return update


def quintic(momentum, shape, nesterov=False, steps=5):
  """Muon by its singular values, each of which the iteration maps by itself."""
  def update(gs, variances):
    u, s, v = np.linalg.svd(
        momentum_sum(gs, momentum, nesterov).reshape(shape), full_matrices=False)
    s = ratio(s, np.full_like(s, np.linalg.norm(s)))
    for _ in range(steps):
      s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return 0.2 * np.sqrt(max(shape)) * ((u * s) @ v).ravel()
  return update


def without_edge(momentum, shape):
  """The variance is that of a sum of gradients."""
  def update(gs, variances):
    weights = momentum**np.arange(len(gs) - 1.0, -1, -1)
    u, s, v = np.linalg.svd(momentum_sum(gs, momentum).reshape(shape), full_matrices=False)
    keep = s > np.sqrt(np.sum(weights**2 * variances)) * np.sum(np.sqrt(shape))
    return 0.2 * np.sqrt(max(shape)) * (u[:, keep] @ v[keep]).ravel()
  return update


def adagrad(initial, eps):
  def solve(p):
    gs = []

    def step(theta, t):
      gs.append(private_mean(p, theta, t))
      return theta - p.rate * ratio(gs[-1], np.sqrt(initial + np.sum(np.square(gs), 0)) + eps)

    return iterate(p, step)
  return solve


def rmsprop(rho, eps):
  def solve(p):
    gs = []

    def step(theta, t):
      gs.append(private_mean(p, theta, t))
      return theta - p.rate * gs[-1] / (np.sqrt(average(np.square(gs), rho)) + eps)

    return iterate(p, step)
  return solve


def yogi(b1, b2, eps, initial):
  def solve(p):
    m, v = np.zeros_like(p.theta), np.full_like(p.theta, initial)

    def step(theta, t):
      nonlocal m, v
      g = private_mean(p, theta, t)
      m = b1 * m + (1 - b1) * g
      v = np.where(v > g**2, v - (1 - b2) * g**2, v + (1 - b2) * g**2)
      return theta - p.rate * m / (np.sqrt(v) + eps)

    return iterate(p, step)
  return solve


def adam_bc(b1, b2, eps):
  def solve(p):
    gs = []

    def step(theta, t):
      gs.append(private_mean(p, theta, t))
      mu = average(gs, b1) / (1 - b1**(t + 1))
      nu = average(np.square(gs), b2) / (1 - b2**(t + 1))
      variances = [p.std**2 * p.row_variance(j) for j in range(t + 1)]
      bias = average(variances, b2) / (1 - b2**(t + 1))
      return theta - p.rate * mu / np.sqrt(np.maximum(nu - bias, eps**2))

    return iterate(p, step)
  return solve


def adagrad_bc(eps):
  def solve(p):
    gs = []

    def step(theta, t):
      gs.append(private_mean(p, theta, t))
      nu = np.sum(np.square(gs), 0) - sum(p.std**2 * p.row_variance(j) for j in range(t + 1))
      return theta - p.rate * gs[-1] / np.sqrt(np.maximum(nu, eps**2))

    return iterate(p, step)
  return solve


def rmsprop_bc(rho, eps):
  def solve(p):
    gs = []

    def step(theta, t):
      gs.append(private_mean(p, theta, t))
      bias = average([p.std**2 * p.row_variance(j) for j in range(t + 1)], rho)
      nu = average(np.square(gs), rho) - bias
      return theta - p.rate * gs[-1] / np.sqrt(np.maximum(nu, eps**2))

    return iterate(p, step)
  return solve


def two_moments(second, eps, std1, std2, per_record=False, floor=False, update_clip=None, b1=None):
  """IME and JME: `second(list of squares, t) -> nu_hat`, stds for zeta = 1 and sigma = 1."""
  def solve(p):
    xs, qs = [], []

    def step(theta, t):
      records = p.gradients(theta, t)
      x = clipped_sum(records, p.clip) / p.divisor
      if per_record:
        q = sum((clip(g, p.clip)**2 for g in records), np.zeros_like(theta)) / p.divisor
      else:
        q = clip(x, p.clip)**2
      xs.append(x + std1 * p.clip * p.sigma * p.z[t])
      qs.append(q + std2 * p.clip**2 * p.sigma * p.z2[t])
      mu = xs[-1] if b1 is None else average(xs, b1) / (1 - b1**(t + 1))
      root = np.sqrt(np.maximum(second(qs, t), 0))
      d = mu / (np.maximum(root, eps) if floor else root + eps)
      return theta - p.rate * (d if update_clip is None else clip(d, update_clip))

    return iterate(p, step)
  return solve


def adam_second(b2):
  return lambda qs, t: average(qs, b2) / (1 - b2**(t + 1))


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
      noised = clipped_sum(p.gradients(theta, t) * s, p.clip) + (
          p.factor * p.clip * p.sigma * p.z[t])
      g = noised / p.divisor / s
      nu = nu + g**2 if kind == 'adagrad' else beta * nu + (1 - beta) * g**2
      m = b1 * m + (1 - b1) * g
      numerator = m / (1 - b1**(t + 1)) if kind == 'adam' else g
      return theta - p.rate * numerator / (np.sqrt(estimate(t + 1)) + eps)

    return iterate(p, step)
  return solve


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
      self.s = np.ones(shape)  # Of a vector.
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
      m = average(self.gs, b1) / (1 - b1**(t + 1))
      square = average(self.squares, b2) / (1 - b2**(t + 1))
      root = np.sqrt(np.maximum(square if rotated else square.mean(), floor**2))
      if r.ndim == 1:
        direction = m / root if rotated else self.s * m / root
      elif rotated:
        qa, qc = self.bases
        direction = qa @ (qa.T @ m @ qc / root) @ qc.T
      else:
        direction = self.sides[0] @ m @ self.sides[1].T / root
      if (t + 1) % every == 0 and r.ndim == 1:
        self.s = 1 / power(average(self.squares, b2), .5)
      elif (t + 1) % every == 0:
        for i in (0, 1):
          if r.shape[i] > 1:
            values, self.bases[i] = np.linalg.eigh(average(self.moments[i], b2))
            self.sides[i] = self.bases[i] @ np.diag(power(values, -.25)) @ self.bases[i].T
      return direction

  def solve(p):
    own = [Leaf(shape) for shape in shapes]
    variance = (p.factor * p.clip * p.sigma / p.divisor)**2

    def step(theta, t):
      records = np.array([join([leaf.scaled(g) for leaf, g in zip(own, leaves(record))])
                          for record in p.gradients(theta, t)]).reshape(-1, len(theta))
      noised = clipped_sum(records, p.clip) + p.factor * p.clip * p.sigma * p.z[t]
      return theta - p.rate * join([
          leaf.take(r, variance * p.row_variance(t), t)
          for leaf, r in zip(own, leaves(noised / p.divisor))])

    return iterate(p, step)
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
      records = p.public_records(theta)
      nus.append(np.mean(records[:, :2]**2, 0))
      rs.append(np.mean([np.outer(g[2:], g[2:]) for g in records], 0))
      scale = geometry() if t == 0 else scale
      noised = clipped_sum(p.gradients(theta, t) @ scale.T, p.clip) + (
          p.factor * p.clip * p.sigma * p.z[t])
      mean = noised / p.divisor
      ms.append(np.linalg.solve(scale, mean) if raw else mean)
      if (t + 1) % every == 0:
        scale = geometry()
      return theta - p.rate * momentum_sum(ms, momentum)

    return iterate(p, step)
  return solve


def update_second(kind, v, a2, beta):
  if kind == 'rmsprop':
    return beta * v + (1 - beta) * a2
  if kind == 'adagrad':
    return v + a2
  return v + (1 - beta) * np.sign(a2 - v) * a2


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
        v = update_second(kind, v, a2, beta)
        acc = np.zeros_like(theta)
      if phase < s1:
        d, rate = private_mean(p, theta, t), p.rate
      elif noise_first:
        d, rate = private_mean(p, theta, t) / (np.sqrt(v) + eps), rate2
      else:
        records = p.gradients(theta, t) / (np.sqrt(v) + eps)
        d = (clipped_sum(records, clip2) + p.factor * clip2 * p.sigma * p.z[t]) / p.divisor
        rate = rate2
      acc = acc + d
      return theta - rate * d

    if s2 == 0:
      raise ValueError('Not for this oracle.')
    return iterate(p, step)
  return solve


def dp2_extra_query(kind, s, clip2, rate2, eps, beta=0.9):
  def solve(p):
    v, acc, count = np.zeros_like(p.theta), np.zeros_like(p.theta), 0

    def step(theta, t):
      nonlocal v, acc, count
      boundary = t % s == 0
      spread = 1.0 if boundary else np.sqrt(2)  # Two queries of one batch, half the budget each.
      g = clipped_sum(p.gradients(theta, t), p.clip) / p.divisor + spread * p.std * p.z[t]
      acc, count = acc + g, count + 1
      if boundary:
        v = update_second(kind, v, (acc / count)**2, beta)
        acc, count = np.zeros_like(theta), 0
        return theta - p.rate * g
      records = p.gradients(theta, t) / (np.sqrt(v) + eps)
      noise = spread * p.factor * clip2 * p.sigma * p.z2[t]
      return theta - rate2 * (clipped_sum(records, clip2) + noise) / p.divisor

    return iterate(p, step)
  return solve


def side_information(b1, b2, eps, fixed=None):
  def solve(p):
    gs, publics = [], []

    def step(theta, t):
      gs.append(private_mean(p, theta, t))
      publics.append(p.public_mean(theta)**2)
      nu = fixed if fixed is not None else average(publics, b2) / (1 - b2**(t + 1))
      return theta - p.rate * average(gs, b1) / (1 - b1**(t + 1)) / (np.sqrt(nu) + eps)

    return iterate(p, step)
  return solve


def adadps(kind, eps, rho=0.9, inside=False):
  def solve(p):
    v = np.zeros_like(p.theta)

    def step(theta, t):
      nonlocal v
      v = update_second(kind, v, p.public_mean(theta)**2, rho)
      d = np.sqrt(v + eps) if inside else np.sqrt(v) + eps
      noised = clipped_sum(p.gradients(theta, t) / d, p.clip) + (
          p.factor * p.clip * p.sigma * p.z[t])
      return theta - p.rate * noised / p.divisor

    return iterate(p, step)
  return solve


def pda_dpmd(steps):
  def step_of(p):
    def step(theta, t):
      a = np.cos(np.pi * min(t, steps) / (2 * steps))
      return theta - p.rate * (a * private_mean(p, theta, t) + (1 - a) * p.public_mean(theta))

    return iterate(p, step)
  return step_of


def pdp_sgd(k=None, basis=None, after=0):
  def solve(p):
    def step(theta, t):
      g = private_mean(p, theta, t)
      v = basis
      if v is None:
        records = p.public_records(theta)
        values, vectors = np.linalg.eigh(records.T @ records / len(records))
        v = vectors[:, np.argsort(values)[::-1][:k]]
      return theta - p.rate * (g if t < after else v @ v.T @ g)

    return iterate(p, step)
  return solve


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

    return iterate(p, step)
  return solve


def noisy_adagrad(participations, basis, mode, project=None, relative=1.0):
  def solve(p):
    s = np.zeros((p.theta.size,) * 2)
    delta = p.factor * p.clip / p.divisor
    k = basis.shape[1]

    def step(theta, t):
      nonlocal s
      x = clipped_sum(p.gradients(theta, t), p.clip) / p.divisor
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

    return iterate(p, step)
  return solve


def ball_in_range(radius):
  """The constraint of noisy AdaGrad: H = u diag(h) u^T is singular elsewhere."""
  def project(u, h, y):
    inner = u.T @ y
    rest = y - u @ inner
    if np.linalg.norm(inner) > radius:
      return u @ metric_ball(h, inner, radius)
    return u @ inner + clip(rest, np.sqrt(radius**2 - inner @ inner))

  return project


def noisy_adagrad_diagonal(participations, eps, basis=None, project=None):
  def solve(p):
    v = np.zeros_like(p.theta)
    delta = p.factor * p.clip / p.divisor

    def step(theta, t):
      nonlocal v
      x = clipped_sum(p.gradients(theta, t), p.clip) / p.divisor
      v = v + x**2
      h = np.sqrt(v) + p.sigma * np.sqrt(participations) * delta * p.z2[t]
      h = h if basis is None else basis @ basis.T @ h
      h = np.maximum(h, 0) + eps
      y = theta - p.rate * (x + p.std * p.z[t]) / h
      return y if project is None else project(h, y)

    return iterate(p, step)
  return solve


def noiseless(b1, b2, eps, scale_eps=None):
  def solve(p):
    gs, cleans = [], []

    def step(theta, t):
      nu = average(np.square(cleans), b2) / (1 - b2**t) if t else np.zeros_like(theta)
      s = np.ones_like(theta) if scale_eps is None else 1 / (np.sqrt(nu) + scale_eps)
      clean = clipped_sum(p.gradients(theta, t) * s, p.clip) / p.divisor
      gs.append((clean + p.std * p.z[t]) / s)
      cleans.append(clean / s)
      nu = average(np.square(cleans), b2) / (1 - b2**(t + 1))
      return theta - p.rate * average(gs, b1) / (1 - b1**(t + 1)) / (np.sqrt(nu) + eps)

    return iterate(p, step)
  return solve
