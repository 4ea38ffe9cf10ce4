# SPDX-License-Identifier: Apache-2.0
"""Gradients of public data at the current parameters: no clipping, no noise, no privacy."""

from typing import List, Tuple

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import contract
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import bookkeeping
from tfdp_adaptive.clipping import engines
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.clipping import materialized
from tfdp_adaptive.rules import kfc
from tfdp_adaptive.rules import kronecker


def gradients(
    kind: str, model: compat.Model, loss: interface.Loss, x: trees.Tree,
    y: trees.Tree) -> List[trees.Tree]:
  """Computes the public gradients that `rule.public` requests.

  Args:
    kind: 'mean' for the gradient of the mean loss, a list like the trainable
      variables; 'records' for [n, ...] gradients of every public record; 'factors' for
      second moments, see `second_moments`.
    model: A built Keras model.
    loss: `(y, outputs, sample_weight) -> [n]`.
    x: Nest of public inputs.
    y: Nest of public targets.
  """
  if kind == 'records':
    return engines.record_gradients(model, loss, x, y)
  if kind == 'factors':
    return second_moments(model, loss, x, y)
  with tf.GradientTape() as tape:
    value = tf.reduce_mean(loss(y, model(x, training=True), ()))
  return materialized.dense_gradients(tape, value, model.trainable_variables)


def when_due(
    rule: contract.Rule, model: compat.Model, loss: interface.Loss, x: trees.Tree, y: trees.Tree,
    state: trees.Tree) -> List[trees.Tree]:
  """Returns the public gradients for this state; zeros in a step that needs none."""
  assert rule.public is not None
  if rule.public_due is None:
    return gradients(rule.public, model, loss, x, y)
  assert rule.public == 'factors'
  specs = [tuple(tf.TensorSpec(shape, trees.wide(tf.as_dtype(variable.dtype)))
                 for shape in kfc.sides(variable.shape)) for variable in model.trainable_variables]

  def computed() -> List[trees.Tree]:
    return trees.map(lambda found, spec: tf.ensure_shape(tf.cast(found, spec.dtype), spec.shape),
                     second_moments(model, loss, x, y), specs)

  return tf.cond(rule.public_due(state), computed, lambda: trees.zeros(specs))


def second_moments(
    model: compat.Model, loss: interface.Loss, x: trees.Tree,
    y: trees.Tree) -> List[Tuple[tf.Tensor, ...]]:
  """Averages the factors of the trainable variables' gradients over public records.

  Returns:
    For variables that `rules.kronecker` treats as matrices, the averages of `a a'` and `e e'`
    over all products `a e'` that add up to a gradient, or their diagonals for sides of more
    than `rules.kfc.MAX_SIDE`. For other variables `(square,)`, the average of squared gradients.

  Raises:
    ValueError: If the book-keeping engine does not support the model.
  """
  seen, reason = bookkeeping.supports(model, x)
  if not seen:
    raise ValueError('The model must be one whose layers the book-keeping engine can see: the '
                     f'factors of its gradients are asked for. Received: {model.name!r}. {reason}')
  n = tf.shape(tf.nest.flatten(x)[0])[0]
  batch = interface.Batch(x, y, (), tf.ones([n], tf.bool))
  factors, _, _ = bookkeeping.factors_of(model, loss, batch, formed=False)
  found: List[Tuple[tf.Tensor, ...]] = []
  for variable, factor in zip(model.trainable_variables, factors):
    view = kronecker.matrices(variable.shape, kfc.MAX_SIDE)
    if factor is None:
      dtype = tf.as_dtype(variable.dtype)
      found.append(tuple(tf.zeros(shape, dtype) for shape in kfc.sides(variable.shape)))
    elif view is None:
      weights = tf.fill([n], tf.math.rsqrt(tf.cast(n, tf.float64)))
      found.append((factor.squared_sum(weights),))
    else:
      found.append(factor.second_moments(view, kfc.MAX_SIDE))
  return found
