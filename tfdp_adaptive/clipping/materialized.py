# SPDX-License-Identifier: Apache-2.0
"""The materialized engine: every record's gradient, then `project_record`.

Works for any model whose single examples TensorFlow can differentiate, at the
memory price of one gradient per example of a chunk. The oracle of the faster
engines, and the only one for projections that are not a rescaling.
"""

from typing import Any, Callable, List, Tuple

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import derivatives
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.clipping import mapping
from tfdp_adaptive.clipping import projection


def vectorized(
    model: compat.Model, loss: interface.Loss, batch: interface.Batch,
    request: interface.Request) -> interface.Clipped:
  """All examples at once, by `tf.vectorized_map` where that is safe."""
  return _engine(mapping.vectorized, model, loss, batch, request)


def looped(
    model: compat.Model, loss: interface.Loss, batch: interface.Batch,
    request: interface.Request) -> interface.Clipped:
  """One example after the other: for models that cannot be vectorized."""
  return _engine(mapping.looped, model, loss, batch, request)


def record_gradients(
    model: compat.Model, loss: interface.Loss, x: Any, y: Any,
    vectorize: bool = True) -> List[tf.Tensor]:
  """[n, ...] gradients of every example, a list like the trainable variables."""

  def gradient(record: Any) -> List[tf.Tensor]:
    batch = trees.map(lambda t: t[tf.newaxis], record)
    return _gradient(model, loss, batch[0], batch[1], ())[0]

  return (mapping.vectorized if vectorize else mapping.looped)(gradient, (x, y))


def sum_records(
    request: interface.Request, gradients: trees.Tree, mask: tf.Tensor) -> Tuple[Any, Any]:
  """`Sums` of every ask and norms [n], from a tree of [n, ...] gradients and an [n] mask."""
  sums, norms = tf.vectorized_map(
      lambda record: _project(request, *record), (gradients, mask))
  return trees.map(lambda t: tf.reduce_sum(t, 0), sums), norms


def _project(request: interface.Request, gradient: trees.Tree, keep: tf.Tensor) -> Tuple[Any, Any]:
  """`project_record` for every ask, nothing where not `keep`; and scaled norms."""
  sums = tuple(
      trees.map(lambda t: tf.where(keep, t, tf.zeros_like(t)),
                    projection.project_record(ask, query, clip, gradient))
      for ask, query, clip in zip(*request))
  return sums, tuple(
      projection.scaled_norm(ask, query, gradient)
      for ask, query in zip(request.asks, request.queries))


def _engine(
    map_examples: Callable[..., Any], model: compat.Model, loss: interface.Loss,
    batch: interface.Batch, request: interface.Request) -> interface.Clipped:
  """See `interface`. The loss of a record is that of a batch of its examples alone."""
  single = trees.absent(batch.examples)

  def record(inputs: Any) -> Tuple[Any, ...]:
    *examples, keep = inputs
    if single:
      examples = trees.map(lambda t: t[tf.newaxis], examples)
    gradient, outputs, value = _gradient(model, loss, *examples)
    sums, norms = _project(request, gradient, keep)
    if single:
      outputs = trees.map(lambda t: t[0], outputs)
    return sums, outputs, tf.reduce_sum(value), norms

  sums, outputs, losses, norms = map_examples(
      record, (batch.x, batch.y, batch.sample_weight, batch.mask))
  return interface.Clipped(
      trees.map(lambda t: tf.reduce_sum(t, 0), sums), outputs, losses, norms)


def _gradient(
    model: compat.Model, loss: interface.Loss, x: Any, y: Any,
    sample_weight: Any) -> Tuple[List[tf.Tensor], Any, tf.Tensor]:
  """Gradient, outputs and losses of a batch."""
  with tf.GradientTape() as tape:
    outputs = model(x, training=True)
    value = loss(y, outputs, sample_weight)
  return derivatives.dense(tape, value, model.trainable_variables), outputs, value
