# SPDX-License-Identifier: Apache-2.0
"""From drawn records to the rows of a batch: views, padding, and the weights of the other rows.

The weight of an empty row is `EMPTY`, a zero with a sign: metrics count records of weight zero.
"""

import copy
import dataclasses
import inspect
import math
from typing import Any, Callable, List, Mapping, Optional, Tuple

import numpy as np

from tfdp_adaptive import checks
from tfdp_adaptive import terms as terms_lib
from tfdp_adaptive.batches import sources

EMPTY = np.float32(-0.0)


def padded(array: np.ndarray, rows: int, empty: Any = 0) -> np.ndarray:
  """Returns an array [rows, ...] that begins with the given rows. The others are empty."""
  value = np.zeros((rows,) + array.shape[1:], array.dtype)
  if array.dtype == object:
    value[...] = b''
  elif array.dtype.kind == 'f':
    value[...] = empty
  value[:len(array)] = array
  return value


def weighted(batch: sources.Nest, used: np.ndarray,
             class_weight: Optional[Mapping[int, float]]) -> Tuple[Any, ...]:
  """Adds weights to a batch: `used` (`EMPTY` for padding) times those of data and classes."""
  if class_weight is not None:
    used = used * _of_class(batch, used, class_weight)
  if not is_pair(batch):
    return batch, used
  if len(batch) == 2:
    return (*batch, used)
  wide = lambda w: used.reshape(used.shape + (1,) * (w.ndim - used.ndim))
  return *batch[:2], sources.map_structure(
      lambda w: np.where(np.signbit(wide(w)), EMPTY, w.astype(np.float32) * wide(w)), batch[2])


def _of_class(batch: sources.Nest, used: np.ndarray,
              class_weight: Mapping[int, float]) -> np.ndarray:
  """Returns the weight of each example's class, as Keras does."""
  labels = batch[1] if is_pair(batch) else None
  if isinstance(labels, np.ndarray) and labels.ndim == used.ndim + 1:
    labels = labels.argmax(-1) if labels.shape[-1] > 1 else labels[..., 0]
  if not isinstance(labels, np.ndarray) or labels.shape != used.shape:
    raise ValueError('`class_weight` needs one class per example. Received: labels that are not. '
                     'Weight the examples instead: `plan.batches((x, y, weights))`.')
  weights = [class_weight.get(int(label), 1) for label in labels.ravel()]
  return np.array(weights, np.float32).reshape(used.shape)


def is_pair(data: sources.Nest) -> bool:
  """Whether a batch has labels."""
  return isinstance(data, tuple) and len(data) in (2, 3)


def rows_for(plan: terms_lib.Terms, count: int, pad_to: Optional[int]) -> int:
  """Returns the padded number of rows of a batch of `count` records, at least 1."""
  most, expected = plan.sampling.largest_batch(plan), math.ceil(plan.batch_size)
  if pad_to is not None:
    first = step = pad_to
  elif most is not None:
    first = step = most
  elif count <= expected:
    return expected
  else:
    # The best three sizes have 1% fewer rows, and show the largest for the first time later.
    deviation = math.sqrt(plan.batch_size)
    first, step = math.ceil(plan.batch_size + deviation), math.ceil(3 * deviation)
  return int(first + step * max(0, math.ceil((count - first) / step)))


@dataclasses.dataclass(frozen=True)
class Views:
  """The views of an example, over which its gradient is averaged before it is clipped.

  Attributes:
    count: K, the number of views.
    augment: A function that returns one view of one example; None if the inputs that are read hold
      the views of an example along their first axis.
  """

  count: int
  augment: Optional[Callable[..., Any]] = None

  def notes(self) -> List[str]:
    """Returns sentences for the statement."""
    if self.augment is None:
      return []
    name = getattr(self.augment, '__name__', type(self.augment).__name__)
    return [f'Views of an example are drawn by `{name}`. The guarantee holds if it reads nothing '
            'but this example.']

  def of(self, batch: Tuple[Any, ...], axes: int) -> Tuple[Any, ...]:
    """Returns a batch with all views, and weights that add up to those of the examples.

    Args:
      batch: `(x, y, sample_weight)` or `(x, sample_weight)`, nests of arrays [examples, ...] or
        [users, examples, ...].
      axes: Which of the two, 1 or 2.

    Returns:
      Nests of arrays [examples, views, ...] or [users, examples * views, ...].
    """
    data, weight = batch[:-1], batch[-1]
    drawn = self._drawn(data, axes) if self.augment is not None else (
        data[0], *self.repeated(data[1:], axes))
    weights = sources.map_structure(lambda w: w / np.float32(self.count), weight)
    views = (*drawn, self.repeated(weights, axes))
    if axes == 1:
      return views
    return sources.map_structure(
        lambda a: a.reshape((a.shape[0], a.shape[1] * self.count) + a.shape[3:]), views)

  def repeated(self, part: sources.Nest, axes: int) -> Any:
    """Returns arrays [examples, ...] as [examples, views, ...]."""
    return sources.map_structure(
        lambda a: np.repeat(np.expand_dims(a, axes), self.count, axis=axes), part)

  def _drawn(self, data: Tuple[Any, ...], axes: int) -> Tuple[Any, ...]:
    shape = sources.leaves(data)[0].shape[:axes]
    flat = sources.map_structure(lambda a: a.reshape((-1,) + a.shape[axes:]), data)
    drawn = sources.map_structure(
        lambda a: np.zeros(a.shape[:1] + (self.count,) + a.shape[1:], a.dtype), flat)
    for i in range(len(sources.leaves(flat)[0])):
      views = self._views(sources.map_structure(lambda a, i=i: a[i], flat))
      for place, values in zip(sources.leaves(drawn), sources.leaves(views)):
        place[i] = values
    return sources.map_structure(lambda a: a.reshape(shape + a.shape[1:]), drawn)

  def _views(self, example: Tuple[Any, ...]) -> Tuple[Any, ...]:
    """Returns the views of one example, arrays of shape [views, ...]."""
    assert self.augment is not None
    pair = len(example) > 1
    arguments = (example,) if pair and not _takes_two(self.augment) else example
    views = [self.augment(*copy.deepcopy(arguments)) for _ in range(self.count)]
    try:
      records = [sources.record(tuple(view) if pair and isinstance(view, list) else view)
                 for view in views]
      one = sources.map_structure(lambda a: sources.spec(np.asarray(a)[np.newaxis]), example)
      stacked = sources.stacked(records, one if pair else one[0])
    except (ValueError, TypeError) as error:
      raise ValueError(
          '`augment` must return one view of the example that it is given, of the same structure, '
          'shapes and types. Received: a view that differs. Change sizes and types of all examples '
          'before `plan.batches`.') from error
    return stacked if pair else (stacked,)


def views_of(source: sources.Source, augment: Optional[Callable[..., Any]],
       views: int) -> Optional[Views]:
  """Returns the views that `plan.batches(data, augment=..., views=...)` asks for, or None."""
  checks.whole(views=views)
  checks.require(augment is None or callable(augment),
                 'be a function that returns one view of one example', augment=augment)
  if source.views is not None:
    if augment is not None or views not in (1, source.views):
      raise ValueError(f'The features hold {source.views} views of each example. Received: '
                       f'augment={augment!r}, views={views}. Leave both out, or compute other '
                       'features.')
    return Views(source.views)
  if augment is None and views > 1:
    raise ValueError(
        f'`views` needs a function that draws them. Received: views={views}, augment=None. Use '
        '`plan.batches(data, augment=f, views=K)`; or, if layers of the model draw them, '
        '`model.compile(..., views=K)`.')
  return None if augment is None else Views(views, augment)


def _takes_two(function: Callable[..., Any]) -> bool:
  """Whether a function takes inputs and targets as two arguments, not as one tuple."""
  try:
    taken = inspect.signature(function).parameters.values()
  except (TypeError, ValueError):
    return False
  return 2 == sum(p.default is p.empty and p.kind in (
      p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in taken)
