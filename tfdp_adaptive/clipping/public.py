# SPDX-License-Identifier: Apache-2.0
"""Gradients of public data at the current parameters: no clipping, no noise, no privacy."""

from typing import Any, List

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive.clipping import derivatives
from tfdp_adaptive.clipping import engines
from tfdp_adaptive.clipping import interface


def gradients(
    kind: str, model: compat.Model, loss: interface.Loss, x: Any, y: Any) -> List[tf.Tensor]:
  """What `rule.public` asks for.

  Args:
    kind: 'mean' for the gradient of the mean loss, a list like the trainable
      variables, or 'records' for [n, ...] gradients of every public record.
    model: A built Keras model.
    loss: `(y, outputs, sample_weight) -> [n]`.
    x: Nest of public inputs.
    y: Nest of public targets.
  """
  if kind == 'records':
    return engines.record_gradients(model, loss, x, y)
  with tf.GradientTape() as tape:
    value = tf.reduce_mean(loss(y, model(x, training=True), ()))
  return derivatives.dense(tape, value, model.trainable_variables)
