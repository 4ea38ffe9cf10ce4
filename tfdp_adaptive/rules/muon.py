# SPDX-License-Identifier: Apache-2.0
"""Muon on the noisy mean gradient: momentum whose singular values are made equal. Experimental."""

import math
import re
from typing import Any, NamedTuple, Sequence, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import contract
from tfdp_adaptive import gate
from tfdp_adaptive import trees
from tfdp_adaptive.rules import moments
from tfdp_adaptive.rules import partitions
from tfdp_adaptive.rules import post_processing
from tfdp_adaptive.rules import wrapping

A, B, C = 3.4445, -4.7750, 2.0315  # Jordan's quintic: [.01, 1] goes to [.682, 1.134] in 5 steps.
RATE = 0.2  # Size of the direction's entries, as in Adam (Moonlight, arXiv:2502.16982).


class State(NamedTuple):
  step: tf.Tensor  # [] int64, releases consumed.
  first: trees.Tree  # Momentum in gradient units.
  noise: Any  # [] variance of the noise in it, or ().


def muon(momentum: float = 0.95, nesterov: bool = True, steps: int = 5,
         edge: bool = False) -> contract.Rule:
  """Muon on the privatized mean gradients of matrices. Experimental.

  Jordan et al. (2024), and Keras' `Muon`, without its weight decay:

      m = momentum * m + g                         (Nesterov: u = g + momentum * m, else u = m)
      X = u / ||u||_F;   `steps` times  X <- a X + (b S + c S^2) X,  S = X X^T
      direction = .2 sqrt(max(rows, columns)) X

  All singular values of the direction are near one, including those of the noise. A signal of rank
  one with cosine 0.74 to u has cosine 0.21 afterwards (32 x 64, noise 0.02 times its norm). With
  `edge`, X is the exact polar factor of u without singular values up to sqrt(v) (sqrt(rows) +
  sqrt(columns)), which noise alone would produce. v is the variance of the noise in `u`, so `edge`
  needs independent noise. The cosine is then 0.97, and 0.92 at rank four. If the signal has all 32
  ranks, the cosine is 0.46 instead of 0.75. We do not know whether Muon helps at small epsilon. See
  `dp_muon` for models with other variables.

  Args:
    momentum: In [0, 1).
    nesterov: Whether to look ahead.
    steps: The number of steps of Newton and Schulz, >= 1; not used with `edge`.
    edge: See above.

  Returns:
    A `contract.Rule` whose direction has no unit.
  """
  checks.decay(momentum=momentum)
  checks.whole(steps=steps)
  return _muon(momentum, bool(nesterov and momentum), steps, edge)


def dp_muon(
    momentum: float = 0.95, nesterov: bool = True, steps: int = 5, edge: bool = False,
    exclude: Sequence[str] = (), beta_1: float = 0.9, beta_2: float = 0.999,
    epsilon: float = 1e-8, relative_adam_learning_rate: float = 1.0) -> contract.Rule:
  """Use DP-Muon (experimental) to try Muon on large hidden matrices.

  Muon (Jordan 2024) for matrices and Adam for the rest, with one clip norm. Matrices are variables
  with two axes, except for embeddings and variables that `exclude` names. See `muon` for the effect
  of noise on them. The rest follows `dp_adam`. Name the output layer in `exclude`, since Muon is
  for hidden layers.

  Args:
    momentum: The momentum of the matrices, in [0, 1).
    nesterov: Whether they look ahead.
    steps: The number of steps of Newton and Schulz, >= 1; not used with `edge`.
    edge: Whether to drop singular values that noise alone would have, see `muon`.
    exclude: Regular expressions. A matrix is trained by Adam if one of these patterns occurs in its
      path. In federated processes variables have no names. `exclude` is refused there, and
      embedding tables are treated as matrices; use `rules.partition` instead.
    beta_1: Adam's decay of the first moment, in [0, 1).
    beta_2: Adam's decay of the second moment, in [0, 1).
    epsilon: The stability constant of Adam, in gradient units, >= 0.
    relative_adam_learning_rate: The learning rate of Adam divided by that of Muon, > 0.

  Returns:
    A `contract.Rule` whose direction has no unit.
  """
  checks.positive(relative_adam_learning_rate=relative_adam_learning_rate)
  checks.require(
      isinstance(exclude, (list, tuple)) and all(isinstance(pattern, str) for pattern in exclude),
      'be a list of regular expressions', exclude=exclude)
  patterns = [re.compile(pattern).pattern for pattern in exclude]  # Kept as text: runs are saved.

  def is_matrix(spec: tf.TensorSpec) -> bool:
    name = spec.name or ''
    if patterns and len(spec.shape) == 2 and not name:
      raise ValueError(
          '`exclude` must be looked for in names, but variables of a DPQuery or of a federated '
          'process have none. Give specs with names, or choose variables by their shapes with '
          f'`rules.partition`. Received: exclude={list(exclude)}, for {spec}.')
    return (len(spec.shape) == 2 and 'embedding' not in name.lower()
            and not any(re.search(pattern, name) for pattern in patterns))

  def at_its_rate(direction: trees.Tree, *_: Any) -> trees.Tree:
    return trees.map(lambda d: relative_adam_learning_rate * d, direction)

  adam = wrapping.followed(post_processing.dp_adam(beta_1, beta_2, epsilon), at_its_rate)
  return partitions.partition([
      (is_matrix, muon(momentum, nesterov, steps, edge)),
      (lambda spec: True, adam)])._replace(name='dp_muon')


def orthogonalized(matrix: tf.Tensor, steps: int) -> tf.Tensor:
  """Returns a matrix with all singular values near one, by `steps` of Newton and Schulz."""
  wide = matrix.shape[0] <= matrix.shape[1]
  x = _unit(matrix if wide else tf.transpose(matrix))
  for _ in range(steps):
    square = tf.matmul(x, x, transpose_b=True)
    x = A * x + tf.matmul(B * square + C * tf.matmul(square, square), x)
  return x if wide else tf.transpose(x)


def beyond_noise(matrix: tf.Tensor, variance: tf.Tensor) -> tf.Tensor:
  """Returns the polar factor, restricted to singular values above those of the noise."""
  wide = matrix.shape[0] <= matrix.shape[1]
  top = tf.reduce_max(tf.abs(matrix))
  unit = _unit(matrix if wide else tf.transpose(matrix))
  size = tf.norm(_over(matrix, top)) * top
  values, vectors = tf.linalg.eigh(tf.matmul(unit, unit, transpose_b=True))
  edge = math.sqrt(matrix.shape[0]) + math.sqrt(matrix.shape[1])
  least = tf.square(tf.math.divide_no_nan(
      tf.sqrt(tf.cast(variance, matrix.dtype)) * tf.cast(edge, matrix.dtype), size))
  # Below this, squares of singular values are rounding.
  rounding = matrix.shape[0] * np.finfo(matrix.dtype.as_numpy_dtype).eps
  keep = values > tf.maximum(least, tf.cast(rounding, values.dtype))
  root = tf.where(keep, tf.math.rsqrt(tf.where(keep, values, tf.ones_like(values))),
                  tf.zeros_like(values))
  polar = tf.matmul(vectors * root, tf.matmul(vectors, unit, transpose_a=True))
  return polar if wide else tf.transpose(polar)


def _unit(matrix: tf.Tensor) -> tf.Tensor:
  """Scales to Frobenius norm one, without overflow or underflow; zero stays zero."""
  matrix = _over(matrix, tf.reduce_max(tf.abs(matrix)))
  return _over(matrix, tf.norm(matrix))


def _over(matrix: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
  return matrix / tf.where(size > 0, size, tf.ones_like(size))


def _muon(momentum: float, nesterov: bool, steps: int, edge: bool) -> contract.Rule:
  gate.check('dp_muon')
  first = moments.heavy_ball(momentum, nesterov)

  def init(specs: trees.Tree) -> State:
    for spec in tf.nest.flatten(specs):
      if len(spec.shape) != 2:
        raise ValueError('`muon` is for matrices. Use `dp_muon`, or `partition`, for models that '
                         f'have other variables. Received: {spec}.')
    noise = tf.zeros([], trees.dtype_of(specs)) if edge else ()
    return State(moments.first_step(), first.init(specs), noise)

  def update(state: State, release: contract.Release) -> Tuple[trees.Tree, State]:
    step = state.step + 1
    followed, moment = first.update(state.first, release.mean, step)
    noise: Any = ()
    if edge:
      new = tf.cast(release.variance, state.noise.dtype)
      noise = momentum**2 * state.noise + new  # u = (1 + momentum) g + momentum^2 m before.
      variance = (1 + momentum)**2 * new + momentum**4 * state.noise if nesterov else noise
      made = trees.map(lambda m: beyond_noise(m, variance), followed)
    else:
      made = trees.map(lambda m: orthogonalized(m, steps), followed)
    direction = trees.map(lambda x: RATE * math.sqrt(max(x.shape)) * x, made)
    return direction, State(step, moment, noise)

  return contract.Rule(
      init, contract.isotropic, contract.of_mean(update), name='muon', independent_noise=edge,
      cautions=contract.no_cautions if edge else _caution)


def _caution(clip_norm: float, noise_std: float, size: int) -> Tuple[str, ...]:
  del clip_norm, size
  if not noise_std:
    return ()
  return ('Muon gives directions of pure noise the length of the signal: of a signal of few '
          'directions little is left. It is experimental under differential privacy. Try '
          'edge=True, which drops the singular values of the noise, and compare with DPAdam.',)
