# SPDX-License-Identifier: Apache-2.0
"""Working through the examples of a factor in blocks, to bound memory.

A factor is a dataclass of [n, ...] tensors and static fields; see `factors`.
"""

import dataclasses
from typing import Any, Callable, Iterable, Iterator, List, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat

# At most this many bytes of per-example gradients are formed at once.
BLOCK_BYTES = 4 * 2**20


def tensors(factor: Any) -> List[tf.Tensor]:
  """The [n, ...] tensors a factor is made of."""
  return _walk(factor, [])[1]


def rebuilt(factor: Any, values: Iterable[tf.Tensor]) -> Any:
  """`factor` with other tensors, in the order of `tensors(factor)`."""
  return _walk(factor, None, iter(values))[0]


def _walk(
    node: Any, seen: Optional[List[tf.Tensor]],
    values: Optional[Iterator[tf.Tensor]] = None) -> Tuple[Any, Any]:
  if tf.is_tensor(node):
    if values is not None:
      return next(values), seen
    if seen is not None:
      seen.append(node)
  elif isinstance(node, tuple):
    node = tuple(_walk(one, seen, values)[0] for one in node)
  elif dataclasses.is_dataclass(node) and not isinstance(node, type):
    node = dataclasses.replace(node, **{
        name: _walk(value, seen, values)[0] for name, value in vars(node).items()})
  return node, seen


def in_blocks(
    function: Callable[..., Any], factor: Any, count: int,
    numbers: Optional[int] = None) -> List[tf.Tensor]:
  """`function: factor -> [[n]] * count` over blocks of examples, results joined.

  `numbers` is how many `function` forms per example; that of the gradient if None.
  """
  n, parts = cut(tensors(factor), numbers or int(np.prod(factor.shape)))
  if parts[0].shape[0] == 1:
    return function(factor)
  stack = compat.unconverted(
      lambda i: tf.stack(function(rebuilt(factor, [x[i] for x in parts]))))
  norms = tf.map_fn(stack, tf.range(tf.shape(parts[0])[0]), parallel_iterations=1,
                    fn_output_signature=tf.float64)  # [blocks, scales, rows]
  return tf.unstack(tf.reshape(tf.transpose(norms, [1, 0, 2]), [count, -1])[:, :n])


def sum_blocks(
    function: Callable[..., Any], factor: Any, weights: Sequence[tf.Tensor]) -> List[tf.Tensor]:
  """`function: (factor, weights) -> sums` over blocks of examples, results added."""
  values = tensors(factor)
  _, parts = cut(values + list(weights), int(np.prod(factor.shape)))
  if parts[0].shape[0] == 1:
    return function(factor, weights)

  def step(sums: List[tf.Tensor], i: Any) -> List[tf.Tensor]:
    block = [x[i] for x in parts]
    return [a + b for a, b in zip(
        sums, function(rebuilt(factor, block[:len(values)]), block[len(values):]))]

  return tf.foldl(step, tf.range(tf.shape(parts[0])[0]), [
      tf.zeros(factor.shape, values[-1].dtype) for _ in weights], parallel_iterations=1)


def cut(
    values: Sequence[tf.Tensor], numbers: int,
    limit: Optional[int] = None) -> Tuple[tf.Tensor, List[tf.Tensor]]:
  """`(n, values)`: [n, ...] padded and cut to [blocks, rows, ...] of rows of `numbers` each.

  A single block where the batch is known to fit into `limit` bytes (`BLOCK_BYTES`).
  """
  most = max(1, (limit or BLOCK_BYTES) // (4 * numbers))
  n = values[0].shape[0]
  if n is None:
    n = tf.shape(values[0])[0]
    rows = 1 if most == 1 else tf.minimum(most, tf.maximum(n, 1))
  else:
    rows = -(-max(n, 1) // -(-max(n, 1) // most))  # As many blocks, of about one size.
  missing = -n % rows
  known = isinstance(missing, int)
  count = (n + missing) // rows if known else None

  def divided(x: tf.Tensor) -> tf.Tensor:
    if not known or missing:
      x = tf.pad(x, [[0, missing]] + [[0, 0]] * (x.shape.rank - 1))
    parts = tf.reshape(x, tf.concat([[-1, rows], tf.shape(x)[1:]], 0))
    parts.set_shape([count, rows if isinstance(rows, int) else None] + x.shape[1:].as_list())
    return parts

  return n, [divided(x) for x in values]
