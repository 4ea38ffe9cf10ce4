# SPDX-License-Identifier: Apache-2.0
"""The layered engine: every record's gradient, layer by layer, then `project_record`.

For projections that need the records themselves, as that on an ellipsoid: they
move each coordinate by an amount of its own, and no weight per example does that.
One forward and one backward pass serve the whole batch, as in `bookkeeping`; the
layers then give the gradients of some examples at a time.
"""

from typing import Any, List, Sequence, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import geometry
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import blocks
from tfdp_adaptive.clipping import bookkeeping
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.clipping import materialized

# At most this many bytes of gradients, of one example at least, are formed at once.
RECORD_BYTES = 32 * 2**20


def engine(
    model: compat.Model, loss: interface.Loss, batch: interface.Batch,
    request: interface.Request) -> interface.Clipped:
  """See `interface`: any projection, for models that `bookkeeping.supports`."""
  per_variable, outputs, losses = bookkeeping.factors_of(model, loss, batch)
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
  n, parts = blocks.cut(
      blocks.tensors(tuple(per_variable)) + [batch.mask], size, RECORD_BYTES)
  count = tf.shape(parts[-1])[0]

  def body(i: tf.Tensor, sums: Any, arrays: Any) -> Tuple[Any, ...]:
    *values, mask = [t[i] for t in parts]
    gradients = _gradients(specs, blocks.rebuilt(tuple(per_variable), values), mask)
    gradients = _joined(gradients) if join else gradients
    more, norms = materialized.sum_records(request, gradients, mask)
    return (i + 1, interface.add_sums(sums, more),
            [array.write(i, norm) for array, norm in zip(arrays, norms)])

  sums = tuple(interface.zero_sums(ask, whole) for ask in request.asks)
  arrays = [tf.TensorArray(specs[0].dtype, count, element_shape=[parts[-1].shape[1]])
            for _ in request.asks]
  _, sums, arrays = tf.while_loop(
      lambda i, *_: i < count, body, (tf.constant(0), sums, arrays), parallel_iterations=1,
      maximum_iterations=count)
  norms = tuple(tf.reshape(array.stack(), [-1])[:n] for array in arrays)
  if not join:
    return interface.Clipped(sums, outputs, losses, norms)
  sums = tuple(each._replace(total=_divided(each.total, specs),
                             square=_divided(each.square, specs)) for each in sums)
  return interface.Clipped(sums, outputs, losses, norms)


def record_gradients(model: compat.Model, loss: interface.Loss, x: Any, y: Any) -> List[tf.Tensor]:
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


def _divided(vector: Any, specs: Sequence[tf.TensorSpec]) -> Any:
  """A flat vector as a list like `specs`; what is absent stays so."""
  if trees.absent(vector):
    return ()
  parts = tf.split(vector, [spec.shape.num_elements() for spec in specs])
  return [tf.reshape(part, spec.shape) for part, spec in zip(parts, specs)]
