# SPDX-License-Identifier: Apache-2.0
"""Gradients that a tape finds, as the layers above take them."""

import tensorflow as tf

from tfdp_adaptive import trees


def dense(tape, target, variables):
  """Dense gradients of float32 at least; zeros for variables the target does not reach.

  Keras 3 variables cannot be passed to TensorFlow's own `unconnected_gradients`.
  """
  return [
      tf.zeros(v.shape, trees.widen(tf.convert_to_tensor(v)).dtype) if g is None else trees.widen(g)
      for g, v in zip(tape.gradient(target, variables), variables)]
