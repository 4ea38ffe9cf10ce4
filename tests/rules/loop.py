# SPDX-License-Identifier: Apache-2.0
"""The whole of DP training in a few lines: record -> sum -> noise -> release -> update.

It stands in for engine, privatizer and optimizer, takes its noise from the
caller, and runs in float64.
"""

import dataclasses

import numpy as np
import tensorflow as tf

from tfdp_adaptive import contract
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import projection

SIZE = 5
SPECS = (tf.TensorSpec([2], tf.float64), tf.TensorSpec([1, 3], tf.float64))


def split(vector, dtype=tf.float64):
  """[..., 5] as a tree like SPECS."""
  vector = np.asarray(vector)
  lead = vector.shape[:-1]
  return (tf.constant(vector[..., :2], dtype),
          tf.constant(vector[..., 2:].reshape(lead + (1, 3)), dtype))


def split_factors(records, dtype=tf.float64):
  """Factors of gradients [n, 5]; the [1, 3] matrix has a left factor of one."""
  errors = records[:, 2:]
  return ((tf.constant(np.mean(records[:, :2]**2, 0), dtype),),
          (tf.ones([1, 1], dtype), tf.constant(errors.T @ errors / len(errors), dtype)))


def join(tree):
  return np.concatenate([np.reshape(leaf, [-1]) for leaf in tf.nest.flatten(tree)])


@dataclasses.dataclass
class Problem:
  """Least squares, per-example gradients `(a theta - b) a`, batches of any size."""

  clip: float = 1.0
  sigma: float = 0.6
  divisor: float = 4.0
  rate: float = 0.1
  adjacency: str = 'zero_out'
  sizes: tuple = (3, 4, 5, 0, 4, 5, 3)
  row_norms: tuple = ()  # Row norms of C^-1; the noise that is passed in has them already.
  seed: int = 0

  def __post_init__(self):
    rng = np.random.default_rng(self.seed)
    self.theta = rng.normal(size=SIZE)
    self.batches = [(2 * rng.normal(size=(n, SIZE)), rng.normal(size=n)) for n in self.sizes]
    self.z = rng.normal(size=(len(self.sizes), SIZE))
    self.z2 = rng.normal(size=(len(self.sizes), SIZE))
    self.z_matrix = rng.normal(size=(len(self.sizes), SIZE, SIZE))
    self.public_batch = (rng.normal(size=(6, SIZE)), rng.normal(size=6))

  @property
  def factor(self):
    return 2.0 if self.adjacency == 'replace' else 1.0

  @property
  def std(self):
    """Noise of the mean of raw gradients."""
    return self.factor * self.clip * self.sigma / self.divisor

  def row_variance(self, t):
    return self.row_norms[t]**2 if self.row_norms else 1.0

  def gradients(self, theta, t):
    return self._gradients(theta, self.batches[t])

  def public_records(self, theta):
    return self._gradients(theta, self.public_batch)

  def public_mean(self, theta):
    return self.public_records(theta).mean(axis=0)

  def _gradients(self, theta, batch):
    a, b = batch
    return (a @ theta - b)[:, np.newaxis] * a


def public_of(rule, problem, theta):
  """The public gradients that a rule needs."""
  return {None: (), 'mean': split(problem.public_mean(theta)),
          'records': split(problem.public_records(theta)),
          'factors': split_factors(problem.public_records(theta))}[rule.public]


def run(rule, problem):
  """[T + 1, 5] iterates of a rule, and its last state."""
  p = problem
  state = rule.init(SPECS)
  secrets = [ask.second.init(SPECS) if ask.second else () for ask in rule.asks]
  theta, iterates = p.theta, [p.theta]
  for t in range(len(p.sizes)):
    public = public_of(rule, p, theta)
    gradients = [split(g) for g in p.gradients(theta, t)]
    releases = []
    for i, (ask, query) in enumerate(zip(rule.asks, rule.query(state, public))):
      release, secrets[i] = answer(p, t, i, ask, query, gradients, secrets[i])
      releases.append(release)
    direction, state = rule.update(state, tuple(releases), public)
    theta = theta - p.rate * join(direction)
    if rule.project is not None:
      theta = join(rule.project(state, split(theta)))
    iterates.append(theta)
  return np.array(iterates), state


def answer(p, t, index, ask, query, gradients, secret):
  """One `contract.Release` and the next secret, with row t of the noise."""
  clip = tf.constant(p.clip, tf.float64) * tf.cast(query.relative_clip, tf.float64)
  share = float(query.share)
  zeros = trees.zeros(SPECS)
  if not share:
    return contract.Release(zeros, tf.constant(0.0, tf.float64)), secret
  sums = [projection.project_record(ask, query, clip, g) for g in gradients]
  mean = trees.map(lambda *v: tf.add_n(v) / p.divisor, zeros, *(s.total for s in sums))
  spread = p.sigma / np.sqrt(share)
  if ask.second is None:
    std = contract.mean_sensitivity(clip, p.divisor, p.adjacency)
    value, value_std = (), None
  else:
    square = ()
    if ask.second.per_record_square:
      square = trees.map(lambda *v: tf.add_n(v) / p.divisor, zeros, *(s.square for s in sums))
    std, value_std = ask.second.stddevs(clip, p.divisor, p.adjacency)
    value, secret = ask.second.measure(mean, square, clip, secret)
  row = (p.z, p.z2)[index][t]
  mean = trees.map(lambda x, z: x + std * spread * z, mean, split(row))
  variance = tf.square(tf.cast(std * spread, tf.float64)) * p.row_variance(t)
  if value_std is None:
    return contract.Release(mean, variance), secret
  if getattr(value, 'shape', None) == (SIZE, SIZE):
    noise = tf.constant(p.z_matrix[t])
  else:
    noise = split(p.z2[t])
  value = trees.map(lambda x, z: x + value_std * spread * z, value, noise)
  value_variance = tf.square(tf.cast(value_std * spread, tf.float64)) * p.row_variance(t)
  return contract.Release(mean, variance, value, value_variance), secret
