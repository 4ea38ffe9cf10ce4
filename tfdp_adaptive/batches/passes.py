# SPDX-License-Identifier: Apache-2.0
"""Python iterators as a `tf.data.Dataset`, without the operation behind `from_generator`.

In TensorFlow 2.21 with Python 3.11 or later, creating that operation changes how glibc gives memory
back, for the whole process. From then on, every step allocates its large tensors anew and faults
each of their pages in. The private steps of a perceptron took twice as long.
"""

import atexit
import itertools
import math
import os
import time
from typing import Any, Callable, Dict, Iterator, List, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import trees
from tfdp_adaptive.batches import sources

# Number of open passes. Nothing tells when a pass is given up: the last used stay open.
OPEN = 8
_QUIET = 0.05  # Seconds without a call: TensorFlow asks for the next element within much less.


class _Calls:
  """Calls of Python by threads of TensorFlow, none of which may be under way when Python ends.

  Such a thread would never return. Python would wait for it where the traceback of an error holds
  the iterator, as after a `fit` that Ctrl-C stopped while records were read: it would hang.

  Attributes:
    over: Whether Python ends.
  """

  def __init__(self) -> None:
    self._under_way: List[int] = []  # Processes, since a fork of one brings them along.
    self._last, self.over = -math.inf, False

  def __enter__(self) -> None:
    self._under_way.append(os.getpid())

  def __exit__(self, *unused: object) -> None:
    self._under_way.pop()
    self._last = time.monotonic()

  def finish(self) -> None:
    """Waits for those under way. Passes end with them."""
    self.over = True
    while os.getpid() in self._under_way or time.monotonic() < self._last + _QUIET:
      time.sleep(_QUIET / 10)


_CALLS = _Calls()
atexit.register(_CALLS.finish)


class Lazy(tf.data.Dataset):
  """A data set that is made when TensorFlow first needs it; subclasses say how, in `make`.

  Making one traces functions for 40 ms, and `fit` often takes another than the one it was given.
  """

  def __init__(self) -> None:  # The constructor of TensorFlow's class runs later.
    pass

  def make(self) -> tf.data.Dataset:
    """Returns the data set that has the elements."""
    raise NotImplementedError

  def __getattr__(self, name: str) -> Any:
    if name.startswith('__') or '_made' in vars(self):
      raise AttributeError(f'{type(self).__name__!r} object has no attribute {name!r}')
    self._made = self.make()
    super().__init__(self._made._variant_tensor)
    return getattr(self, name)

  def _inputs(self) -> List[tf.data.Dataset]:
    return [self._made]

  @property
  def element_spec(self) -> Any:
    return self._made.element_spec


def dataset(iterate: Callable[[], Iterator[Any]], signature: sources.Nest) -> tf.data.Dataset:
  """Returns a data set, each pass of which has the elements of another iterator.

  Args:
    iterate: Makes an iterator. Its elements are nests of arrays like `signature`.
    signature: Nest of `tf.TensorSpec`; the lengths of axes may be None.

  Returns:
    A data set of unknown cardinality. Of more than `OPEN` passes, those used least recently fail.
    An error of an iterator ends its pass.

  Examples:
    >>> numbers = dataset(lambda: iter([1, 2]), tf.TensorSpec([], tf.int32))
    >>> [int(number) for number in numbers]
    [1, 2]
  """
  flat = tf.nest.flatten(signature)
  types = [spec.dtype.as_numpy_dtype for spec in flat]
  nothing = [np.zeros(0, dtype) for dtype in types]
  passes: Dict[int, Iterator[Any]] = {}
  numbers = itertools.count(1)

  def following(number: np.ndarray) -> Tuple[Any, ...]:
    """Returns `(number of the pass, whether there is an element, its leaves)`; 0 begins one."""
    with _CALLS:
      if _CALLS.over:  # TensorFlow does not print it; a late reader gets it as an error.
        raise StopIteration('Python is about to end: no more batches are read.')
      if not number:  # Without an element: after an error in one, a scan would come here again.
        begun = next(numbers)
        passes[begun] = iterate()
        for oldest in list(passes)[:-OPEN]:
          passes.pop(oldest, None)
        return np.int64(begun), True, *nothing
      iterator = passes.pop(int(number), None)
      if iterator is None:
        raise RuntimeError(f'At most {OPEN} passes through a data set can be under way at once. '
                           'Received: more since this one was used. Finish a pass before the next.')
      passes[int(number)] = iterator
      try:
        element = next(iterator)
      except StopIteration:
        passes.pop(int(number), None)
        return number, False, *nothing
      tf.nest.assert_same_structure(element, signature)
      return number, True, *map(np.asarray, tf.nest.flatten(element), types)

  def step(number: tf.Tensor, _: tf.Tensor) -> Tuple[tf.Tensor, Any]:
    number, more, *leaves = tf.numpy_function(
        following, [number], [tf.int64, tf.bool, *(spec.dtype for spec in flat)])
    return tf.ensure_shape(number, []), (tf.ensure_shape(more, []), *leaves)

  def shaped(state: tf.Tensor, element: trees.Tree) -> Tuple[tf.Tensor, Any]:
    leaves = [tf.ensure_shape(leaf, spec.shape) for leaf, spec in zip(element[1:], flat)]
    return state, tf.nest.pack_sequence_as(signature, leaves)

  steps = tf.data.Dataset.from_tensors(0).repeat().scan(tf.constant(0, tf.int64), step)
  # A `map` would run ahead: TensorFlow makes it parallel.
  return steps.skip(1).take_while(lambda more, *_: more).scan(0, shaped)
