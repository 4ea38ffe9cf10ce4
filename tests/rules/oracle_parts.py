# SPDX-License-Identifier: Apache-2.0
"""Parts shared by the oracles: clipping, noised means and the loop over steps, on one flat vector.

The files `oracles_...` implement every algorithm a second time, each as a function
`problem -> [T + 1, 5] iterates`. They share nothing with the library, and little with each
other.
"""

from typing import Any, Callable, NamedTuple

import numpy as np

BASIS = np.linalg.qr(np.random.default_rng(7).normal(size=(5, 3)))[0]


class Case(NamedTuple):
  name: str
  rule: Callable[[], Any]
  oracle: Callable[..., Any]  # problem -> iterates
  setting: dict = {}  # Arguments of the problem.
  tolerance: float = 1e-8
  noticed: float = 0.01  # Relative change of the noise that changes iterates; signs need more.


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


def average(values, beta):
  """(1 - beta) sum_j beta^(t - j) values_j, the exponential average started at zero."""
  t = len(values)
  return (1 - beta) * sum(beta**(t - 1 - j) * v for j, v in enumerate(values))


def momentum_sum(gs, momentum, nesterov=False):
  m = np.tensordot(momentum**np.arange(len(gs) - 1.0, -1, -1), np.array(gs), 1)
  return gs[-1] + momentum * m if nesterov else m


def update_second(kind, v, a2, beta):
  if kind == 'rmsprop':
    return beta * v + (1 - beta) * a2
  if kind == 'adagrad':
    return v + a2
  return v + (1 - beta) * np.sign(a2 - v) * a2
