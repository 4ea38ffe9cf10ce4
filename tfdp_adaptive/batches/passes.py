# SPDX-License-Identifier: Apache-2.0
"""Python iterators as a `tf.data.Dataset`, without the operation behind `from_generator`.

TensorFlow 2.21 fixes glibc's settings for giving memory back once that operation is made, with
Python 3.11 and later and for the whole process. Large tensors are then taken from the system anew
in every step, and each of their pages faults: private steps of a perceptron took twice the time.
"""

import itertools
from typing import Any, Callable, Dict, Iterator, Tuple

import numpy as np
import tensorflow as tf

# Nothing tells when a pass is given up before its end. So many are kept.
OPEN = 8


def dataset(iterate: Callable[[], Iterator[Any]], signature: Any) -> tf.data.Dataset:
  """Returns a data set, each pass of which has the elements of another iterator.

  Args:
    iterate: Makes an iterator. Its elements are nests of arrays like `signature`.
    signature: Nest of `tf.TensorSpec`; the lengths of axes may be None.

  Returns:
    A data set of unknown cardinality. Of more than `OPEN` passes at once, the oldest fail.

  Examples:
    >>> numbers = dataset(lambda: iter([1, 2]), tf.TensorSpec([], tf.int32))
    >>> [int(number) for number in numbers]
    [1, 2]
  """
  flat = tf.nest.flatten(signature)
  types = [spec.dtype.as_numpy_dtype for spec in flat]
  nothing = [np.full([size or 0 for size in spec.shape], b'' if dtype is object else 0, dtype)
             for spec, dtype in zip(flat, types)]
  passes: Dict[int, Iterator[Any]] = {}
  numbers = itertools.count(1)

  def following(number: np.ndarray) -> Tuple[Any, ...]:
    """`(number of the pass, whether there is an element, its leaves)`; pass 0 is not begun."""
    begun = int(number) or next(numbers)
    if not number:
      passes[begun] = iterate()
      for oldest in sorted(passes)[:-OPEN]:
        del passes[oldest]
    if begun not in passes:
      raise RuntimeError(f'At most {OPEN} passes through a data set can be under way at once. '
                         'Received: one more since this one began. Finish a pass before the next.')
    try:
      leaves = tf.nest.flatten(next(passes[begun]))
    except StopIteration:
      del passes[begun]
      return np.int64(begun), False, *nothing
    return np.int64(begun), True, *map(np.asarray, leaves, types)

  def step(number: tf.Tensor, _: tf.Tensor) -> Tuple[tf.Tensor, Any]:
    begun, more, *leaves = tf.numpy_function(
        following, [number], [tf.int64, tf.bool, *(spec.dtype for spec in flat)])
    leaves = [tf.ensure_shape(leaf, spec.shape) for leaf, spec in zip(leaves, flat)]
    return tf.ensure_shape(begun, []), (
        tf.ensure_shape(more, []), tf.nest.pack_sequence_as(signature, leaves))

  endless = tf.data.Dataset.from_tensors(0).repeat()
  steps = endless.scan(tf.constant(0, tf.int64), step).take_while(lambda more, _: more)
  return steps.map(lambda _, element: element)
