# SPDX-License-Identifier: Apache-2.0
"""Gradients that a tape finds, as the layers above take them."""

from typing import Any, List, Sequence

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import trees


def dense(
    tape: tf.GradientTape, target: Any, variables: Sequence[compat.Variable]) -> List[tf.Tensor]:
  """Dense gradients of float32 at least; zeros for variables the target does not reach.

  Keras 3 variables cannot be passed to TensorFlow's own `unconnected_gradients`.
  """
  return [
      tf.zeros(v.shape, trees.widen(tf.convert_to_tensor(v)).dtype) if g is None else trees.widen(g)
      for g, v in zip(tape.gradient(target, variables), variables)]
