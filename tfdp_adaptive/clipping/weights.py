# SPDX-License-Identifier: Apache-2.0
"""Weights of records: functions w of the norm n with n w(n) <= zeta.

    hard     min(1, zeta / n)                       clipping as everybody knows it
    auto_v   zeta / n, 0 where n <= 1e-12           AUTO-V, arXiv:2206.07136
    auto_s   zeta / (n + gamma), gamma .01          AUTO-S of the same; NSGD, arXiv:2206.13033
    psac     zeta / (n + r / (n + r)), r .1         PSAC, arXiv:2212.00328
    tanh     zeta tanh(n / zeta) / n                smooth clipping
    p_norm   zeta / (n^p + zeta^p)^(1/p), p 2       p = 1: auto_s at gamma = zeta; p = inf: hard

Records then have norm n w(n) <= zeta whatever w is, so the sum over records moves by at
most the clip norm zeta, and noise and accounting are those of hard clipping. Computed
norms are never below the truth by more than rounding, which is on the safe side of
every w, monotone or not. n, gamma and r are in units of the scaled gradient.

In auto_v, auto_s and psac zeta is a mere factor of the update: set it to one and let the
learning rate do its work. Short records are brought up, so that no clip norm is to be
tuned; gamma (r) is what remains.
"""

import tensorflow as tf

from tfdp_adaptive import contract
from tfdp_adaptive import trees

SHORTEST = 1e-12  # Of auto_v: below it, directions are rounding.


def length(weight: contract.Weight, norm: tf.Tensor, clip_norm: trees.Scalar) -> tf.Tensor:
  """n w(n), the norm of the weighted record, for n from 0 to infinity; never above `clip_norm`.

  Args:
    weight: `contract.Weight`.
    norm: n, [...] floating.
    clip_norm: zeta, [].
  """
  zeta = _like(clip_norm, norm)
  ones, constant = tf.ones_like(norm), tf.constant(weight.constant, norm.dtype)
  if weight.kind == 'hard':
    relative = tf.minimum(ones, norm / zeta)
  elif weight.kind == 'auto_v':
    relative = tf.where(norm > SHORTEST, ones, tf.zeros_like(norm))
  elif weight.kind == 'auto_s':
    relative = 1 / (1 + constant / norm)
  elif weight.kind == 'psac':
    relative = 1 / (1 + constant / norm / (norm + constant))
  elif weight.kind == 'tanh':
    relative = tf.tanh(norm / zeta)
  else:  # By ratios to the larger: powers of either may leave the range.
    top = tf.maximum(norm, zeta)
    powers = tf.pow(norm / top, constant) + tf.pow(zeta / top, constant)
    relative = tf.where(tf.math.is_finite(norm), norm / top / tf.pow(powers, 1 / constant), ones)
  # A clip norm of zero keeps nothing, whatever the quotients are.
  return tf.where(zeta > 0, zeta * tf.minimum(relative, ones), tf.zeros_like(norm))


def factor(weight: contract.Weight, norm: tf.Tensor, clip_norm: trees.Scalar) -> tf.Tensor:
  """w(n) of finite norms; at zero, of records that are nothing but zeros, one or zero."""
  positive = norm > 0
  safe = tf.where(positive, norm, tf.ones_like(norm))
  if weight.kind == 'hard':
    inside = tf.minimum(tf.ones_like(norm), _like(clip_norm, norm) / safe)
    return tf.where(positive, inside, tf.ones_like(norm))
  return tf.where(positive, length(weight, norm, clip_norm) / safe, tf.zeros_like(norm))


def _like(clip_norm: trees.Scalar, norm: tf.Tensor) -> tf.Tensor:
  """A number goes into float64 without a detour."""
  return tf.cast(clip_norm, norm.dtype) if tf.is_tensor(clip_norm) else tf.constant(
      clip_norm, norm.dtype)
