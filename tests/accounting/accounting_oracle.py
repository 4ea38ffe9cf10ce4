# SPDX-License-Identifier: Apache-2.0
"""An accountant that shares nothing with the library's: no grid of losses, no transform.

For theta > 0 and S the sum of the losses, the inverse Laplace transform says

    delta(epsilon) = 1 / (2 pi i)
        * integral over theta + i R of exp(K(s) - s epsilon) / (s (s + 1)) ds,

since `1 / (s (s + 1))` is the transform of `(1 - exp(-u))_+`. It is exact. K is
the log moment generating function, by trapezoids over z, which converge
exponentially; so does the integral, over panels of Gauss-Legendre nodes, at a
theta near the saddle point, where nothing cancels.
"""

import math

import numpy as np
from scipy import optimize
from scipy import special
from scipy import stats

from tfdp_adaptive.accounting import second_accountant

_AT, _WEIGHT = np.polynomial.legendre.leggauss(24)


def one_sided(z, q, sigma):
  """log of (1 - q) N(0) + q N(1) over N(0), noise sigma, at z sigma."""
  exponent = z / sigma - 0.5 / sigma**2
  return np.where(exponent > 30, np.logaddexp(np.log1p(-q), np.log(q) + exponent),
                  np.log1p(q * np.expm1(np.minimum(exponent, 31))))


class Oracle:
  """`count` steps of Poisson-sampled Gaussian noise; kind 'remove', 'add' or 'replace'."""

  def __init__(self, q, sigma, count, kind='remove', reach=30.0):
    self.q, self.sigma, self.count, self.kind, self.reach = q, sigma, count, kind, reach
    self.fineness = 1
    self._refine(1)

  most = 1  # The largest shift of the sum.

  def _refine(self, times):
    self.fineness *= times
    self.step = min(0.05, 0.05 * self.sigma) / self.fineness
    z = np.arange(-self.reach, self.reach + self.most / self.sigma + self.step, self.step)
    self.loss, log_mass = self._nodes(z)
    self.log_mass = log_mass - special.logsumexp(log_mass)

  def _nodes(self, z):
    """Losses at z, and the logarithms of the density there, up to a factor."""
    q, sigma = self.q, self.sigma
    log_present = np.logaddexp(
        np.log1p(-q) - z**2 / 2, math.log(q) - (z - 1 / sigma)**2 / 2)
    if self.kind == 'remove':
      return one_sided(z, q, sigma), log_present
    if self.kind == 'add':
      return -one_sided(-z, q, sigma), -z**2 / 2
    return one_sided(z, q, sigma) - one_sided(-z, q, sigma), log_present

  def moment(self, theta):
    return self.count * special.logsumexp(self.log_mass + theta * self.loss)

  def saddle(self, epsilon):
    objective = lambda u: self.moment(math.exp(u)) - math.exp(u) * epsilon - math.log(
        math.exp(u) * (1 + math.exp(u)))
    grid = np.linspace(-6, 15, 100)
    best = grid[int(np.argmin([objective(u) for u in grid]))]
    return math.exp(optimize.minimize_scalar(
        objective, bounds=(best - 0.3, best + 0.3), method='bounded').x)

  def log_delta(self, epsilon, accuracy=2e-7):
    theta = self.saddle(epsilon)
    for share in (1.0, 0.6):  # Any theta > 0 gives the same, where the integral is as exact.
      value = self._integral(epsilon, share * theta, accuracy)
      if value is not None:
        return value
    raise RuntimeError('The integral cancels.')

  def _integral(self, epsilon, theta, accuracy):
    """The logarithm of delta; None where rounding leaves nothing of it."""
    def prepare():
      tilted = self.log_mass + theta * self.loss
      top = special.logsumexp(tilted)
      weight = np.exp(tilted - top)
      kept = weight > 1e-20
      return top, weight[kept], self.loss[kept]

    top, weight, loss = prepare()
    mean = weight @ loss
    deviation = math.sqrt(self.count * (weight @ (loss - mean)**2))
    offset = self.count * mean - epsilon  # Around the mean, so that phases stay small.

    def panel(low, high):
      t = low + (high - low) / 2 * (1 + _AT)
      once = np.exp(1j * np.outer(t, loss - mean)) @ weight
      s = theta + 1j * t
      value = np.exp(self.count * np.log(once) + 1j * t * offset) / (s * (1 + s))
      return float((value.real @ _WEIGHT) * (high - low) / 2), float(np.abs(value).max())

    width = min(1 / deviation, theta, 1.5 / max(abs(offset), 1e-9))
    total, low = 0.0, 0.0
    for _ in range(5000):
      if (low + width) * self.step / self.sigma > 1:  # Else the phases of large losses alias.
        self._refine(4)
        top, weight, loss = prepare()
      part, size = panel(low, low + width)
      total, low = total + part, low + width
      # Bounds of the rest: its mass, or an integration by parts, as it turns with `offset`.
      if min(size * max(low, width), 4 * size / max(abs(offset), 1e-9)) < accuracy * abs(total):
        break
      width = min(width * 1.1, 20 / max(abs(offset), 1 / deviation))
    else:
      raise RuntimeError('The integral did not converge.')
    if total <= 0:
      return None
    return self.count * top - theta * epsilon + math.log(total / math.pi)


class Examples(Oracle):
  """`count` steps in each of which Binomial(most, q) examples of one user are taken."""

  def __init__(self, q, sigma, count, most):
    self.most = most
    super().__init__(q, sigma, count, reach=14.0)

  def _nodes(self, z):
    k = np.arange(self.most + 1)[:, None]
    chances = stats.binom.logpmf(k, self.most, self.q)
    loss = special.logsumexp(chances + k * z / self.sigma - (k / self.sigma)**2 / 2, axis=0)
    return loss, loss - z**2 / 2


class Allocation(Oracle):
  """`count` rounds of `bins` bins each; the law of a round by a Fourier transform."""

  CELLS = 4000

  def __init__(self, bins, sigma, count):
    self.bins = bins
    super().__init__(1.0, sigma, count)

  def _refine(self, times):
    if times > 1:
      raise RuntimeError('The integral asks for finer cells.')
    ratio, mass = second_accountant.SecretBins(((self.bins, 1 / self.sigma),)).ratios()
    present = ratio * mass
    loss = np.log(ratio)
    spread = math.sqrt(np.average((loss - np.average(loss, weights=present))**2, weights=present))
    self.step = self.sigma * 20 * spread / self.CELLS
    cell = np.round(loss / (self.step / self.sigma)).astype(int)
    absent, present = (np.bincount(cell - cell.min(), one) for one in (mass, present))
    kept = (absent > 0) & (present > 0)
    self.loss = np.log(present[kept] / absent[kept])
    self.log_mass = np.log(present[kept])
