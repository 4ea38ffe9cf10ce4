# SPDX-License-Identifier: Apache-2.0
"""Noise of a buffered linear Toeplitz C (arXiv:2404.16706, 2408.08868): d rows of memory.

    x_t = z_t / c_0 - sum_i w_i s_i,    s_i <- theta_i s_i + x_t
"""

from typing import List, Sequence, Tuple

import tensorflow as tf

from tfdp_adaptive import trees
from tfdp_adaptive.mechanisms import blt
from tfdp_adaptive.noise import streams


@streams.recursion.register(blt.BLT)
def buffered(mechanism: blt.BLT) -> streams.Recursion:
  """Returns the noise of a BLT; its history has one row s_i per buffer."""
  output_scale = float(mechanism.output_scale)
  weights, decays = mechanism.weights.tolist(), mechanism.decays.tolist()

  def buffered_step(
      z: tf.Tensor, buffers: Sequence[tf.Tensor]) -> Tuple[tf.Tensor, List[tf.Tensor]]:
    x = z / output_scale - sum(w * s for w, s in zip(weights, buffers))
    return x, [theta * s + x for theta, s in zip(decays, buffers)]

  step = trees.one_pass(buffered_step)

  def advance(
      key: tf.Tensor, row: tf.Tensor, history: streams.History,
      flat: streams.Specs) -> Tuple[streams.Vectors, streams.History]:
    del row
    pairs = [step(z, [buffer[i] for buffer in history])
             for i, z in enumerate(streams.vectors(key, flat))]
    outputs, buffers = zip(*pairs)
    return outputs, tuple(zip(*buffers))

  return len(decays), advance
