"""Working through the examples of a factor in blocks, to bound memory.

A factor is a dataclass of [n, ...] tensors and static fields; see `factors`.
"""

import dataclasses

import numpy as np
import tensorflow as tf

# At most this many bytes of per-example gradients are formed at once.
BLOCK_BYTES = 4 * 2**20


def tensors(factor):
  """The [n, ...] tensors a factor is made of."""
  return _walk(factor, [])[1]


def rebuilt(factor, values):
  """`factor` with other tensors, in the order of `tensors(factor)`."""
  return _walk(factor, None, iter(values))[0]


def _walk(node, found, values=None):
  if tf.is_tensor(node):
    if values is not None:
      return next(values), found
    found.append(node)
  elif isinstance(node, tuple):
    node = tuple(_walk(one, found, values)[0] for one in node)
  elif dataclasses.is_dataclass(node):
    node = dataclasses.replace(node, **{
        name: _walk(value, found, values)[0] for name, value in vars(node).items()})
  return node, found


def in_blocks(function, factor, count, numbers=None):
  """`function: factor -> [[n]] * count` over blocks of examples, results joined.

  `numbers` is how many `function` forms per example; that of the gradient if None.
  """
  values = tensors(factor)
  n, cut = _blocks(factor, values, numbers)
  if cut is None:
    return function(factor)
  stack = lambda i: tf.stack(function(rebuilt(factor, [x[i] for x in cut])))
  norms = tf.map_fn(stack, tf.range(tf.shape(cut[0])[0]), parallel_iterations=1,
                    fn_output_signature=tf.float64)  # [blocks, scales, rows]
  return tf.unstack(tf.reshape(tf.transpose(norms, [1, 0, 2]), [count, -1])[:, :n])


def sum_blocks(function, factor, weights):
  """`function: (factor, weights) -> sums` over blocks of examples, results added."""
  values = tensors(factor)
  _, cut = _blocks(factor, values + list(weights))
  if cut is None:
    return function(factor, weights)

  def step(sums, i):
    block = [x[i] for x in cut]
    return [a + b for a, b in zip(
        sums, function(rebuilt(factor, block[:len(values)]), block[len(values):]))]

  return tf.foldl(step, tf.range(tf.shape(cut[0])[0]), [
      tf.zeros(factor.shape, values[-1].dtype) for _ in weights], parallel_iterations=1)


def _blocks(factor, values, numbers=None):
  """`(n, values)`: [n, ...] padded and cut to [blocks, rows, ...]; None for a single block."""
  most = max(1, BLOCK_BYTES // (4 * (numbers or int(np.prod(factor.shape)))))
  n = values[0].shape[0]
  if n is not None and n <= most:
    return n, None
  if n is None:
    n = tf.shape(values[0])[0]
    rows = 1 if most == 1 else tf.minimum(most, tf.maximum(n, 1))
  else:
    rows = -(-n // -(-n // most))  # As many blocks, of about one size.
  missing = -n % rows

  def cut(x):
    if not (isinstance(missing, int) and missing == 0):
      x = tf.pad(x, [[0, missing]] + [[0, 0]] * (x.shape.rank - 1))
    parts = tf.reshape(x, tf.concat([[-1, rows], tf.shape(x)[1:]], 0))
    parts.set_shape([None, rows if isinstance(rows, int) else None] + x.shape[1:].as_list())
    return parts

  return n, [cut(x) for x in values]
