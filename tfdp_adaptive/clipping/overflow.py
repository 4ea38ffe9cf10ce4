# SPDX-License-Identifier: Apache-2.0
"""Records whose gradients are finite while the squares of their norms are not.

Their factors are brought to the size of one, example by example, and their norms
are made of factors and sizes apart. That takes the norms once more, so it is done
only for batches that need it.
"""

import math
from typing import Any, Iterable, List, Sequence, Tuple

import tensorflow as tf

from tfdp_adaptive import contract
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import blocks
from tfdp_adaptive.clipping import protocol

# Norms below leave room for the squares and products they are made of.
MODERATE = 2.0**56


def checked(norms: Any, per_variable: Sequence[Any], scales: Any) -> Tuple[Any, Any, Any]:
  """The same records, whatever their size.

  Args:
    norms: One [n] per ask, from the factors.
    per_variable: The factor of every variable, or None.
    scales: For every norm, the scale of every variable; None for one that it is not of.

  Returns:
    `(norms, per_variable, sizes)`: norms that are not finite where a record counts as none;
    factors that are finite; and for each an [n] float64 by which it is to be multiplied.
  """
  present = [i for i, factor in enumerate(per_variable) if factor is not None]
  before = [per_variable[i] for i in present]
  ones = tf.ones_like(norms[0])
  if not present:
    return norms, per_variable, [ones] * len(per_variable)

  moderate = tf.reduce_all(tf.stack(norms) < MODERATE)  # False where NaN.

  def measured() -> tf.Tensor:
    units, sizes = zip(*[factor.unit() for factor in before])
    return tf.stack([_parts(units, sizes, [of_ask[i] for i in present]) for of_ask in scales])

  # In a condition of its own: XLA would form each part again for all that is made of it.
  parts = tf.cond(
      moderate, lambda: tf.zeros([len(scales), len(present), tf.shape(ones)[0]], ones.dtype),
      measured)

  def carefully() -> Tuple[Any, Any, Any]:
    units, sizes = zip(*[factor.unit() for factor in before])
    values = _tensors(units)
    largest = tf.cast(min(t.dtype.max for t in values if t.dtype.is_floating), tf.float64)
    # Beyond the largest number the gradient itself overflows: no record.
    fits = tf.reduce_all(tf.stack(sizes) <= largest, 0)
    again = _norms(parts)
    again = tf.where(fits & (again <= largest), again, float('inf'))
    # 0 * inf is not 0: what is finite for no ask leaves the products, too.
    finite = tf.reduce_any(tf.math.is_finite(again), 0)
    kept = lambda t: tf.where(_like(finite, t), t, tf.zeros_like(t))
    return tf.unstack(again), [kept(size) for size in sizes], [kept(t) for t in values]

  norms, sizes, values = tf.cond(
      moderate, lambda: (norms, [ones] * len(present), _tensors(before)), carefully)
  per_variable, all_sizes, values = list(per_variable), [ones] * len(per_variable), iter(values)
  for i, factor, size in zip(present, before, sizes):
    per_variable[i] = blocks.rebuilt(factor, [next(values) for _ in blocks.tensors(factor)])
    all_sizes[i] = size
  return norms, per_variable, all_sizes


def charged(
    asks: Tuple[contract.Ask, ...], norms: Any, per_variable: Sequence[Any], sizes: Any,
    scales: Any) -> Any:
  """The norms of weights that may exceed one: not below what rounding leaves where steps cancel.

  Such a weight brings a short record up, and the sum adds its steps up again in another
  order. Norms of records whose steps do not cancel are what they were.
  """
  growing = [ask.weight.may_grow for ask in asks]
  if not any(growing):
    return norms
  present = [i for i, factor in enumerate(per_variable) if factor is not None]
  peaks = {i: per_variable[i].unit()[1] * sizes[i] for i in present}
  result = []
  for norm, of_ask, grows in zip(norms, scales, growing):
    for i in [i for i in present if of_ask[i] is not None] if grows else ():
      rounding = _rounding(per_variable[i]) * math.prod(per_variable[i].shape)**0.5
      smallest = 1.0 if trees.absent(of_ask[i]) else protocol.wide(tf.reduce_min(of_ask[i]))
      norm = tf.maximum(norm, rounding * smallest * peaks[i])
    result.append(norm)
  return result


def _rounding(factor: protocol.Factor) -> float:
  """Relative, of the coarsest of its tensors."""
  dtype = min((t.dtype for t in blocks.tensors(factor) if t.dtype.is_floating),
              key=lambda one: one.size)
  return protocol.eps(dtype)


def _tensors(some: Iterable[protocol.Factor]) -> List[tf.Tensor]:
  return [t for factor in some for t in blocks.tensors(factor)]


def _like(x: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
  return tf.reshape(x, [-1] + [1] * (tensor.shape.rank - 1))


def _parts(units: Any, sizes: Any, scales: Any) -> tf.Tensor:
  """[factors, n] norms of factors times sizes in a geometry.

  Steps may cancel, and what rounding leaves of them is not less than rounding: a
  weight must not bring back up what the sum adds up again, in another order.
  """
  parts = []
  for factor, size, scale in zip(units, sizes, scales):
    if scale is None:
      parts.append(tf.zeros_like(size))
      continue
    rounding = 1.0
    if not trees.absent(scale):
      top = tf.reduce_max(scale)
      top = tf.where(top > 0, top, tf.ones_like(top))
      scale, size = scale / top, size * protocol.wide(top)
      rounding = protocol.wide(tf.reduce_min(scale))
    square, = factor.squared_norms([scale])
    rounding *= _rounding(factor)
    parts.append(size * tf.maximum(tf.sqrt(square), rounding))
  return tf.stack(parts)


def _norms(parts: tf.Tensor) -> tf.Tensor:
  """[asks, n] norms of records, from those [asks, factors, n] of their parts."""
  top = tf.reduce_max(parts, 1, keepdims=True)
  top = tf.where(top > 0, top, tf.ones_like(top))
  return top[:, 0] * tf.sqrt(tf.reduce_sum(tf.square(parts / top), 1))
