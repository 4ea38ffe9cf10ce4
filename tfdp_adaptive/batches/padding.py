# SPDX-License-Identifier: Apache-2.0
"""Padding of batches with empty rows, and the weights of the other rows.

The weight of an empty row is `EMPTY`, a zero with a sign: metrics count records of weight zero.
"""

from __future__ import annotations

import math
from typing import Any, Mapping, Optional, Tuple

import numpy as np

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
