# SPDX-License-Identifier: Apache-2.0
"""The engines that form every record's gradient, then call `project_record`.

`vectorized` and `looped` work for any model whose single examples TensorFlow can differentiate.
`layered` works for models whose layers `bookkeeping` can see, and takes less time and memory. They
are for projections other than a rescaling, and the oracles of the book-keeping engine.
"""

from typing import Any, Callable, List, Sequence, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import geometry
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import bookkeeping
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.clipping import mapping
from tfdp_adaptive.clipping import projection
from tfdp_adaptive.clipping import protocol


def vectorized(
    model: compat.Model, loss: interface.Loss, batch: interface.Batch,
    request: interface.Request) -> interface.Clipped:
  """Clips all examples at once, by `tf.vectorized_map` where that is safe."""
  return _engine(mapping.vectorized, model, loss, batch, request)


def looped(
    model: compat.Model, loss: interface.Loss, batch: interface.Batch,
    request: interface.Request) -> interface.Clipped:
  """Clips one example after another, for models that cannot be vectorized."""
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
    masks = interface.masks(outputs)
    if single:
      outputs, masks = trees.map(lambda t: t[0], (outputs, masks))
    return sums, outputs, tf.reduce_sum(value), norms, masks

  sums, *rest = map_examples(record, (batch.x, batch.y, batch.sample_weight, batch.mask))
  return interface.Clipped(trees.map(lambda t: tf.reduce_sum(t, 0), sums), *rest)


def dense_gradients(
    tape: tf.GradientTape, target: Any, variables: Sequence[compat.Variable]) -> List[tf.Tensor]:
  """Dense gradients of float32 at least; zeros for variables the target does not reach.

  Keras 3 variables cannot be passed to TensorFlow's own `unconnected_gradients`.
  """
  return dense(tape.gradient(target, variables), variables)


def dense(gradients: Sequence[Any], variables: Sequence[compat.Variable]) -> List[tf.Tensor]:
  """Returns gradients as dense tensors of float32 at least; zeros in place of None."""
  return [
      tf.zeros(v.shape, trees.widen(tf.convert_to_tensor(v)).dtype) if g is None else trees.widen(g)
      for g, v in zip(gradients, variables)]


def _gradient(
    model: compat.Model, loss: interface.Loss, x: Any, y: Any,
    sample_weight: Any) -> Tuple[List[tf.Tensor], Any, tf.Tensor]:
  """Gradient, outputs and losses of a batch."""
  with tf.GradientTape() as tape:
    outputs = model(x, training=True)
    value = loss(y, outputs, sample_weight)
  gradients = tape.gradient(value, model.trainable_variables)
  interface.name_silent(model, gradients)
  return dense(gradients, model.trainable_variables), outputs, value


# At most this many bytes of gradients, of one example at least, are formed at once.
RECORD_BYTES = 32 * 2**20


def layered(
    model: compat.Model, loss: interface.Loss, batch: interface.Batch,
    request: interface.Request) -> interface.Clipped:
  """Any projection, for models that `bookkeeping.supports`; see `interface`.

  One forward and one backward pass serve the whole batch, as in `bookkeeping`. The layers then give
  the gradients of some examples at a time.
  """
  per_variable, outputs, losses = bookkeeping.factors_of(model, loss, batch)
  interface.name_silent(model, per_variable)
  specs = _specs(model)
  # One vector per record: what is done to records is then traced once, not per variable.
  # Groups are of variables, though, and so are matrices on either side of one.
  size = sum(spec.shape.num_elements() for spec in specs)
  join = not any(ask.groups for ask in request.asks) and not any(
      geometry.is_kronecker(query.scale) for query in request.queries)
  whole = tf.TensorSpec([size], specs[0].dtype) if join else specs
  if join:
    request = request._replace(queries=tuple(
        query if trees.absent(query.scale) else query._replace(
            scale=_joined([s[tf.newaxis] for s in tf.nest.flatten(query.scale)])[0])
        for query in request.queries))
  n, parts = protocol.cut(
      protocol.tensors(tuple(per_variable)) + [batch.mask], size, RECORD_BYTES)
  count = tf.shape(parts[-1])[0]

  def body(i: tf.Tensor, sums: Any, arrays: Any) -> Tuple[Any, ...]:
    *values, mask = [t[i] for t in parts]
    gradients = _gradients(specs, protocol.rebuilt(tuple(per_variable), values), mask)
    gradients = _joined(gradients) if join else gradients
    more, norms = sum_records(request, gradients, mask)
    return (i + 1, interface.add_sums(sums, more),
            [array.write(i, norm) for array, norm in zip(arrays, norms)])

  sums = tuple(interface.zero_sums(ask, whole) for ask in request.asks)
  arrays = [tf.TensorArray(specs[0].dtype, count, element_shape=[parts[-1].shape[1]])
            for _ in request.asks]
  _, sums, arrays = tf.while_loop(
      lambda i, *_: i < count, body, (tf.constant(0), sums, arrays), parallel_iterations=1,
      maximum_iterations=count)
  norms = tuple(tf.reshape(array.stack(), [-1])[:n] for array in arrays)
  masks = interface.masks(outputs)
  if not join:
    return interface.Clipped(sums, outputs, losses, norms, masks)
  sums = tuple(one._replace(total=trees.unflatten(one.total, specs), square=() if trees.absent(
      one.square) else trees.unflatten(one.square, specs)) for one in sums)
  return interface.Clipped(sums, outputs, losses, norms, masks)


def layered_gradients(
    model: compat.Model, loss: interface.Loss, x: Any, y: Any) -> List[tf.Tensor]:
  """[n, ...] gradients of every example, a list like the trainable variables."""
  mask = tf.ones(tf.shape(tf.nest.flatten(x)[0])[:1], tf.bool)
  per_variable, _, _ = bookkeeping.factors_of(model, loss, interface.Batch(x, y, (), mask))
  specs = _specs(model)
  return _gradients(specs, per_variable, mask)


def _specs(model: compat.Model) -> List[tf.TensorSpec]:
  return [tf.TensorSpec(v.shape, trees.widen(tf.convert_to_tensor(v)).dtype)
          for v in model.trainable_variables]


def _gradients(
    specs: Sequence[tf.TensorSpec], per_variable: Sequence[Any],
    mask: tf.Tensor) -> List[tf.Tensor]:
  return [
      tf.zeros(tf.concat([tf.shape(mask), spec.shape], 0), spec.dtype)
      if factor is None else factor.explicit().gradient()
      for spec, factor in zip(specs, per_variable)]


def _joined(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
  """[n, ...] tensors as one [n, numbers]."""
  return tf.concat([tf.reshape(t, [-1, int(np.prod(t.shape[1:]))]) for t in tensors], 1)
