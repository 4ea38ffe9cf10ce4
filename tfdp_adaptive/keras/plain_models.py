# SPDX-License-Identifier: Apache-2.0
"""Keras 2: models that are not `DPModel`s, compiled with a loss of reduction 'none'.

Their `train_step` hands unreduced losses and the tape to `optimizer.minimize`, so
gradients can still be taken example by example, slowly. Neither model nor loss can be
inspected or run again for one example: that none looks at another is the caller's
promise (Keras' hinge losses break it; `make_private` keeps it by itself).
"""

from __future__ import annotations

from typing import Any, Sequence, Tuple, TYPE_CHECKING

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import contract
from tfdp_adaptive import errors
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.clipping import materialized
from tfdp_adaptive.keras import admission
from tfdp_adaptive.keras import step

if TYPE_CHECKING:  # It imports this.
  from tfdp_adaptive.keras import optimizer as optimizer_lib


def train_step(
    optimizer: optimizer_lib.DPOptimizer, loss: Any, variables: Sequence[compat.Variable],
    tape: Any) -> None:
  """The same line as `step.train_step`, with other sums.

  Args:
    optimizer: The `DPOptimizer`.
    loss: [n, ...] unreduced losses of the batch.
    variables: Trainable variables.
    tape: The tape the losses were recorded on.

  Raises:
    PrivacyError: If the losses of single examples cannot be separated, or under a plan,
      whose batches cannot be recognized here.
  """
  admission.refuse_unseen(optimizer)
  losses = _per_example(loss, tape)
  opened = step.query(optimizer, variables, losses)
  sums = _clip(optimizer, losses, variables, tape, opened.request)
  releases, private_state = step.release(optimizer, opened, sums)
  direction, rule_state = optimizer.update_rule(opened.rule_state, releases)
  step.apply(optimizer, variables, direction, rule_state, private_state)


def _clip(
    optimizer: optimizer_lib.DPOptimizer, losses: tf.Tensor, variables: Sequence[compat.Variable],
    tape: Any, request: interface.Request) -> Tuple[contract.Sums, ...]:
  n = tf.shape(losses)[0]
  with tf.control_dependencies(admission.check_size(optimizer, n, losses.shape[0])):
    mask = tf.ones([n], tf.bool)
  gradients = tape.jacobian(losses, variables,
                            unconnected_gradients=tf.UnconnectedGradients.ZERO)
  return materialized.sum_records(request, trees.map(trees.widen, gradients), mask)[0]


def _per_example(loss: tf.Tensor, tape: Any) -> tf.Tensor:
  """[n] losses, on the tape."""
  if tape is None or callable(loss):
    raise errors.PrivacyError('`minimize` needs the tape on which unreduced losses were recorded. '
                              f'Received: tape={tape}, loss={loss!r}. {errors.FIX}')
  if loss.shape.rank == 0:
    raise errors.PrivacyError(
        '`loss` must hold one value per example, so that gradients can be clipped per example. '
        f"Received: a scalar. Compile with a loss of reduction='none', or better: {errors.FIX}")
  _refuse_batch_statistics(loss)
  with tape:
    return tf.reduce_mean(loss, list(range(1, loss.shape.rank)))


def _refuse_batch_statistics(loss: tf.Tensor) -> None:
  """A plain model cannot be inspected, but batch statistics leave traces in its graph."""
  graph = getattr(loss, 'graph', None) if not tf.executing_eagerly() else None
  for op in graph.get_operations() if graph is not None else ():
    if 'FusedBatchNorm' in op.type or 'batch_normalization' in op.name:
      raise errors.PrivacyError(
          'The model normalises over the batch, so one example changes the gradients of others. '
          f'Received: operation {op.name}. Use LayerNormalization or GroupNormalization.')
