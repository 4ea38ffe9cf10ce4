# SPDX-License-Identifier: Apache-2.0
"""Keras 2: models that are not `DPModel`s, compiled with a loss of reduction 'none'.

Their `train_step` hands unreduced losses and the tape to `optimizer.minimize`, so
gradients can still be taken example by example, slowly. Neither model nor loss can be
inspected or run again for one example: that none looks at another is the caller's
promise (Keras' hinge losses break it; `make_private` keeps it by itself).
"""

import tensorflow as tf

from tfdp_adaptive import errors
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import materialized


def collector(optimizer, loss, variables, tape):
  """What `DPOptimizer.private_step` collects clipped sums with.

  Args:
    optimizer: The `DPOptimizer`.
    loss: [n, ...] unreduced losses of the batch.
    variables: Trainable variables.
    tape: The tape the losses were recorded on.

  Raises:
    PrivacyError: If the losses of single examples cannot be told apart.
  """
  if tape is None or callable(loss):
    raise errors.PrivacyError('`minimize` needs the tape on which unreduced losses were recorded. '
                              f'Received: tape={tape}, loss={loss!r}. {errors.FIX}')
  if loss.shape.rank == 0:
    raise errors.PrivacyError(
        '`loss` must hold one value per example, so that gradients can be clipped per example. '
        f"Received: a scalar. Compile with a loss of reduction='none', or better: {errors.FIX}")
  _refuse_batch_statistics(loss)
  with tape:
    losses = tf.reduce_mean(loss, list(range(1, loss.shape.rank)))

  def collect(request):
    n = tf.shape(losses)[0]
    with tf.control_dependencies(optimizer.check_batch(n, losses.shape[0])):
      mask = tf.ones([n], tf.bool)
    gradients = tape.jacobian(losses, variables,
                              unconnected_gradients=tf.UnconnectedGradients.ZERO)
    gradients = trees.map(trees.widen, gradients)
    return materialized.sum_records(request, gradients, mask)[0]

  return collect


def _refuse_batch_statistics(loss):
  """A plain model cannot be inspected, but batch statistics leave traces in its graph."""
  graph = getattr(loss, 'graph', None) if not tf.executing_eagerly() else None
  for op in graph.get_operations() if graph is not None else ():
    if 'FusedBatchNorm' in op.type or 'batch_normalization' in op.name:
      raise errors.PrivacyError(
          'The model normalises over the batch, so one example changes the gradients of others. '
          f'Received: operation {op.name}. Use LayerNormalization or GroupNormalization.')
