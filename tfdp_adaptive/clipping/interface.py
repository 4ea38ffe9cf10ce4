# SPDX-License-Identifier: Apache-2.0
"""The arguments and results of every clipping engine.

    engine(model, loss, batch, request) -> Clipped

An engine computes the sums for every ask of a step. With any engine, the sums change by at most one
clip norm (L2, scaled space) when a record is added or removed. `projection.project_record` is the
definition; engines compute the same numbers faster.
"""

from typing import Callable, MutableMapping, NamedTuple, Sequence, Set, Tuple
import warnings
import weakref

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import contract
from tfdp_adaptive import errors
from tfdp_adaptive import trees


class Batch(NamedTuple):
  """Records along the leading axis of every tensor.

  Attributes:
    x: Nest of model inputs.
    y: Nest of targets.
    sample_weight: [n] or [n, ...] weights of the losses, or `()`.
    mask: [n] bool; False for padding, which counts as no record at all.
    examples: () if a record is one example. If it is the sum of up to m examples of a user,
      [n, m] bool, which of them exist; x, y and the weights are then [n, m, ...], zero for
      missing examples.
  """

  x: trees.Tree
  y: trees.Tree
  sample_weight: trees.Tree
  mask: tf.Tensor
  examples: trees.Tree = ()


class Request(NamedTuple):
  """The request of one step. It is public, because it is computed from past releases.

  Attributes:
    asks: The rule's asks.
    queries: The geometry of each ask; scales like the trainable variables.
    clips: The absolute clip norm of each ask in that geometry, a scalar.
  """

  asks: Tuple[contract.Ask, ...]
  queries: Tuple[contract.Query, ...]
  clips: Tuple[trees.Scalar, ...]


class Clipped(NamedTuple):
  """The result of an engine. `sums`, outputs and losses are SECRET."""

  sums: Tuple[contract.Sums, ...]  # One per ask, trees like `model.trainable_variables`.
  outputs: trees.Tree  # Predictions for the whole batch, [n, ...] or [n, m, ...], for metrics.
  losses: tf.Tensor  # [n] loss of every record; 0 for padding.
  norms: Tuple[tf.Tensor, ...] = ()  # [n] scaled norms before clipping, per ask.
  masks: Tuple[trees.Tree, ...] = ()  # Mask of each flat output, or (); for metrics.


def masks(outputs: trees.Tree) -> Tuple[trees.Tree, ...]:
  """Returns the Keras mask of each flat output, or ()."""
  found = [getattr(t, '_keras_mask', None) for t in tf.nest.flatten(outputs)]
  return tuple(() if mask is None else mask for mask in found)


def joined(batch: Batch) -> Tuple[Batch, int]:
  """Returns `(batch, m)`, with the m examples of each record in a row: x is [n * m, ...]."""
  if trees.absent(batch.examples):
    return batch, 1
  times = batch.examples.shape[1]

  def join(tensor: tf.Tensor) -> tf.Tensor:
    n, _, *rest = tensor.shape
    flat = tf.reshape(tensor, tf.concat([[-1], tf.shape(tensor)[2:]], 0))
    return tf.ensure_shape(flat, [None if n is None else n * times, *rest])

  x, y, weights = (t if t is None else trees.map(join, t)
                   for t in (batch.x, batch.y, batch.sample_weight))
  return batch._replace(x=x, y=y, sample_weight=weights), times


def divided(tree: trees.Tree, batch: Batch) -> trees.Tree:
  """Undoes `joined`: reshapes a batch's tensors from [n * m, ...] to [n, m, ...]."""
  if trees.absent(batch.examples):
    return tree
  n, times = batch.examples.shape

  def divide(tensor: tf.Tensor) -> tf.Tensor:
    shape = tf.concat([[-1, times], tf.shape(tensor)[1:]], 0)
    result = tf.ensure_shape(tf.reshape(tensor, shape), [n, times] + tensor.shape[1:].as_list())
    if getattr(tensor, '_keras_mask', None) is not None:
      result._keras_mask = divide(tensor._keras_mask)
    return result

  return trees.map(divide, tree)


def of_records(losses: tf.Tensor, batch: Batch) -> tf.Tensor:
  """Returns the losses [n] of records, from the losses of their examples."""
  return losses if trees.absent(batch.examples) else tf.reduce_sum(divided(losses, batch), 1)


Loss = Callable[..., tf.Tensor]  # `(y, outputs, sample_weight) -> [n]`.
Engine = Callable[..., Clipped]  # `(model, loss, batch, request) -> Clipped`.


# Model -> keys of variables that a warning has named.
_SILENT: MutableMapping[compat.Model, Set[int]] = weakref.WeakKeyDictionary()


def name_silent(model: compat.Model, gradients: Sequence[object]) -> None:
  """Warns, once, of trainable variables whose gradient or factor is None."""
  named = _SILENT.setdefault(model, set())
  new = [v for v, gradient in zip(model.trainable_variables, gradients)
         if gradient is None and compat.variable_key(v) not in named]
  named.update(map(compat.variable_key, new))
  if new:
    warnings.warn(
        f'No gradient of the loss reaches {len(new)} of the weights that train, such as '
        f'{", ".join(map(compat.describe, new[:3]))}: they are behind `stop_gradient`, or unused. '
        'A private step adds noise to them nevertheless. Freeze them, by `trainable=False` or '
        '`tfdp.train_only`.', errors.Caution, stacklevel=2)


def add_sums(left: trees.Tree, right: trees.Tree) -> trees.Tree:
  return trees.map(tf.add, left, right)


def zero_sums(ask: contract.Ask, specs: trees.Tree) -> contract.Sums:
  """Returns the sums of an empty batch."""
  square = trees.zeros(specs) if ask.squares else ()
  side = () if ask.side_query is None else tf.zeros([ask.side_query.size], trees.dtype_of(specs))
  return contract.Sums(trees.zeros(specs), square, side)
