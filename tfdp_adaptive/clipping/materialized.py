# SPDX-License-Identifier: Apache-2.0
"""Engines that form every record's gradient, then call `project_record`.

`vectorized` and `looped` work for any model whose single examples TensorFlow can differentiate.
`layered` works for models whose layers `bookkeeping` can record, and takes less time and memory.
They allow projections other than a rescaling, and are oracles of the book-keeping engine.
"""

import functools
import math
from typing import Any, Callable, List, Optional, Sequence, Tuple

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import contract
from tfdp_adaptive import geometry
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import bookkeeping
from tfdp_adaptive.clipping import chunks
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.clipping import projection
from tfdp_adaptive.clipping import protocol


def record_gradients(
    model: compat.Model, loss: interface.Loss, x: trees.Tree, y: trees.Tree,
    vectorize: bool = True) -> List[tf.Tensor]:
  """Returns [n, ...] gradients of every example, a list like the trainable variables."""

  def gradient(record: trees.Tree) -> List[tf.Tensor]:
    x, y = trees.map(lambda t: t[tf.newaxis], record)
    return _gradient(model, loss, x, y, ())[0]

  return (compat.vectorized if vectorize else compat.looped)(gradient, (x, y))


def sum_records(
    request: interface.Request, gradients: trees.Tree,
    mask: tf.Tensor) -> Tuple[Tuple[contract.Sums, ...], Tuple[tf.Tensor, ...]]:
  """Returns sums and norms [n] of every ask, for a tree of [n, ...] gradients and an [n] mask."""
  sums, norms = tf.vectorized_map(
      lambda record: _project(request, *record), (gradients, mask))
  return trees.map(lambda t: tf.reduce_sum(t, 0), sums), norms


def _project(
    request: interface.Request, gradient: trees.Tree,
    present: tf.Tensor) -> Tuple[Tuple[contract.Sums, ...], Tuple[tf.Tensor, ...]]:
  """Returns `project_record` for every ask, zero if not `present`, and scaled norms."""
  sums = tuple(
      trees.map(lambda t: tf.where(present, t, tf.zeros_like(t)),
                projection.project_record(ask, query, clip, gradient))
      for ask, query, clip in zip(*request))
  return sums, tuple(
      projection.scaled_norm(ask, query, gradient)
      for ask, query in zip(request.asks, request.queries))


def _engine(
    map_examples: Callable[..., Any], model: compat.Model, loss: interface.Loss,
    batch: interface.Batch, request: interface.Request) -> interface.Clipped:
  """Clips each record, whose loss is that of a batch of its examples alone; see `interface`."""
  single = trees.absent(batch.examples)

  def record(inputs: trees.Tree) -> Tuple[Any, ...]:
    *examples, present = inputs
    if single:
      examples = trees.map(lambda t: t[tf.newaxis], examples)
    gradient, outputs, value = _gradient(model, loss, *examples)
    sums, norms = _project(request, gradient, present)
    masks = interface.masks(outputs)
    if single:
      outputs, masks = trees.map(lambda t: t[0], (outputs, masks))
    return sums, outputs, tf.reduce_sum(value), norms, masks

  sums, *rest = map_examples(record, (batch.x, batch.y, batch.sample_weight, batch.mask))
  return interface.Clipped(trees.map(lambda t: tf.reduce_sum(t, 0), sums), *rest)


vectorized = functools.partial(_engine, compat.vectorized)
looped = functools.partial(_engine, compat.looped)


def dense_gradients(
    tape: tf.GradientTape, target: tf.Tensor,
    variables: Sequence[compat.Variable]) -> List[tf.Tensor]:
  """Returns the gradients of a target as `dense` does.

  Keras 3 variables cannot be passed to TensorFlow's own `unconnected_gradients`.
  """
  return dense(tape.gradient(target, variables), variables)


def dense(
    gradients: Sequence[Optional[tf.Tensor]],
    variables: Sequence[compat.Variable]) -> List[tf.Tensor]:
  """Returns gradients as dense tensors of float32 at least; zeros in place of None."""
  return [
      tf.zeros(v.shape, trees.widen(tf.convert_to_tensor(v)).dtype) if g is None else trees.widen(g)
      for g, v in zip(gradients, variables)]


def _gradient(
    model: compat.Model, loss: interface.Loss, x: trees.Tree, y: trees.Tree,
    sample_weight: trees.Tree) -> Tuple[List[tf.Tensor], trees.Tree, tf.Tensor]:
  """Returns the gradient, the outputs and the losses of a batch."""
  with tf.GradientTape() as tape:
    outputs = model(x, training=True)
    value = loss(y, outputs, sample_weight)
  gradients = tape.gradient(value, model.trainable_variables)
  interface.name_silent(model, gradients)
  return dense(gradients, model.trainable_variables), outputs, value


# Largest number of bytes of gradients computed at once. One example is always computed.
RECORD_BYTES = 32 * 2**20


def layered(
    model: compat.Model, loss: interface.Loss, batch: interface.Batch,
    request: interface.Request) -> interface.Clipped:
  """Clips with any projection, for models that `bookkeeping.supports`; see `interface`.

  There is one forward and one backward pass for the whole batch, as in `bookkeeping`. The gradients
  of some examples at a time are then formed from the factors.
  """
  per_variable, outputs, losses = bookkeeping.factors_of(model, loss, batch)
  interface.name_silent(model, per_variable)
  specs = _specs(model)
  # The graph is smaller if a record is one vector, unless single variables are clipped or scaled.
  join = not any(ask.groups for ask in request.asks) and not any(
      geometry.is_kronecker(query.scale) for query in request.queries)
  if join:
    request = request._replace(queries=tuple(
        query if trees.absent(query.scale) else query._replace(
            scale=_joined([s[tf.newaxis] for s in tf.nest.flatten(query.scale)])[0])
        for query in request.queries))

  def block(
      model: compat.Model, loss: interface.Loss, part: interface.Batch,
      request: interface.Request) -> interface.Clipped:
    del model, loss
    gradients = _gradients(specs, protocol.rebuilt(tuple(per_variable), part.x), part.mask)
    sums, norms = sum_records(request, _joined(gradients) if join else gradients, part.mask)
    return interface.Clipped(sums, (), norms[0], norms)

  rows: protocol.Size = max(1, RECORD_BYTES // (4 * trees.size(specs)))
  if batch.mask.shape[0] is None and rows != 1:
    rows = tf.clip_by_value(tf.shape(batch.mask)[0], 1, rows)
  clipped = chunks.chunked(block, rows=rows)(model, loss, interface.Batch(
      protocol.tensors(tuple(per_variable)), (), (), batch.mask), request)
  clipped = clipped._replace(outputs=outputs, losses=losses, masks=interface.masks(outputs))
  if not join:
    return clipped
  return clipped._replace(sums=tuple(one._replace(
      total=trees.unflatten(one.total, specs), square=() if trees.absent(
          one.square) else trees.unflatten(one.square, specs)) for one in clipped.sums))


def layered_gradients(
    model: compat.Model, loss: interface.Loss, x: trees.Tree, y: trees.Tree) -> List[tf.Tensor]:
  """Returns [n, ...] gradients of every example, a list like the trainable variables."""
  mask = tf.ones(tf.shape(tf.nest.flatten(x)[0])[:1], tf.bool)
  per_variable, _, _ = bookkeeping.factors_of(model, loss, interface.Batch(x, y, (), mask))
  return _gradients(_specs(model), per_variable, mask)


def _specs(model: compat.Model) -> List[tf.TensorSpec]:
  return [tf.TensorSpec(v.shape, trees.widen(tf.convert_to_tensor(v)).dtype)
          for v in model.trainable_variables]


def _gradients(
    specs: Sequence[tf.TensorSpec], per_variable: Sequence[Optional[protocol.Factor]],
    mask: tf.Tensor) -> List[tf.Tensor]:
  return [
      tf.zeros(tf.concat([tf.shape(mask), spec.shape], 0), spec.dtype)
      if factor is None else factor.gradient()
      for spec, factor in zip(specs, per_variable)]


def _joined(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
  """Joins [n, ...] tensors to one [n, numbers]."""
  return tf.concat([tf.reshape(t, [-1, math.prod(t.shape[1:])]) for t in tensors], 1)
