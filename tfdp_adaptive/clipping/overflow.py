"""Records whose gradients are finite while the squares of their norms are not.

Their factors are brought to the size of one, example by example, and their norms
are made of factors and sizes apart. That takes the norms once more, so it is done
only for batches that need it. A factor is linear in each of its float tensors.
"""

import tensorflow as tf

from tfdp_adaptive.clipping import blocks
from tfdp_adaptive.clipping import factors
from tfdp_adaptive.clipping import tied

# Norms below leave room for the squares and products they are made of.
MODERATE = 2.0**56


def checked(norms, found, scales):
  """The same records, whatever their size.

  Args:
    norms: One [n] per ask, from the factors.
    found: The factor of every variable, or None.
    scales: For every ask, the scale of every variable.

  Returns:
    `(norms, found, sizes)`: norms that are not finite where a record counts as none;
    factors that are finite; and for each an [n] float64 by which it is to be multiplied.
  """
  present = [i for i, factor in enumerate(found) if factor is not None]
  before = [found[i] for i in present]
  ones = tf.ones_like(norms[0])
  if not present:
    return norms, found, [ones] * len(found)

  moderate = tf.reduce_all(tf.stack(norms) < MODERATE)  # False where NaN.

  def measured():
    units, sizes = zip(*map(_unit, before))
    return tf.stack([_parts(units, sizes, [of_ask[i] for i in present]) for of_ask in scales])

  # In a condition of its own: XLA would form each part anew for all that is made of it.
  parts = tf.cond(
      moderate, lambda: tf.zeros([len(scales), len(present), tf.shape(ones)[0]], ones.dtype),
      measured)

  def carefully():
    units, sizes = zip(*map(_unit, before))
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
  found, all_sizes, values = list(found), [ones] * len(found), iter(values)
  for i, factor, size in zip(present, before, sizes):
    found[i] = blocks.rebuilt(factor, [next(values) for _ in blocks.tensors(factor)])
    all_sizes[i] = size
  return norms, found, all_sizes


def _tensors(some):
  return [t for factor in some for t in blocks.tensors(factor)]


def _like(x, tensor):
  return tf.reshape(x, [-1] + [1] * (tensor.shape.rank - 1))


def _unit(factor):
  """`(factor / size, size)`, the size [n] such that no square overflows."""
  if isinstance(factor, tied.Mixed):
    parts, sizes = zip(*[_unit(part) for part in factor.parts])
    top = tf.reduce_max(tf.stack(sizes), 0)
    return tied.Mixed(tuple(
        _times(part, size / top) for part, size in zip(parts, sizes))), top
  peaks = [_peak(t) for t in _floats(factor)]
  if isinstance(factor, factors.Explicit):  # Pieces of one tensor.
    size = tf.reduce_max(tf.stack(peaks), 0)
    return _divided(factor, [size] * len(peaks)), _wide(size)
  size = tf.ones_like(_wide(peaks[0]))
  for peak in peaks:
    size *= _wide(peak)
  return _divided(factor, peaks), size


def _floats(factor):
  return [t for t in blocks.tensors(factor) if t.dtype.is_floating]


def _divided(factor, peaks):
  peaks = iter(peaks)
  return blocks.rebuilt(factor, [
      t / _like(next(peaks), t) if t.dtype.is_floating else t for t in blocks.tensors(factor)])


def _times(factor, ratio):
  """`ratio * factor`, for a factor that is not `Mixed`."""
  linear = _floats(factor) if isinstance(factor, factors.Explicit) else _floats(factor)[-1:]
  return blocks.rebuilt(factor, [
      t * _like(tf.cast(ratio, t.dtype), t) if any(t is one for one in linear) else t
      for t in blocks.tensors(factor)])


def _peak(x):
  """[n] largest magnitudes; one for zeros."""
  peak = tf.reduce_max(tf.abs(x), list(range(1, x.shape.rank)))
  return tf.where(peak > 0, peak, tf.ones_like(peak))


def _parts(units, sizes, scales):
  """[factors, n] norms of factors times sizes in a geometry."""
  parts = []
  for factor, size, scale in zip(units, sizes, scales):
    if not factors.absent(scale):
      top = _peak(tf.reshape(scale, [1, -1]))[0]
      scale, size = scale / top, size * _wide(top)
    square, = factor.squared_norms([scale])
    parts.append(size * tf.sqrt(square))
  return tf.stack(parts)


def _norms(parts):
  """[asks, n] norms of records, from those [asks, factors, n] of their parts."""
  top = tf.reduce_max(parts, 1, keepdims=True)
  top = tf.where(top > 0, top, tf.ones_like(top))
  return top[:, 0] * tf.sqrt(tf.reduce_sum(tf.square(parts / top), 1))


def _wide(x):
  return tf.cast(x, tf.float64)
