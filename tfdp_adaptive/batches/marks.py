# SPDX-License-Identifier: Apache-2.0
"""The mark by which a step knows a batch that its plan drew for it.

Every batch of `plan.batches` carries, in the digits of its sample weights that float32
does not hold, numbers that belong to one plan, one step and one row of the batch. Rounded
to float32, as Keras does before it uses them, the weights are what they seem. The marks
are public: they guard against honest mistakes (a batch used twice, out of order, of another
plan, of one's own; rows repeated or moved), not against forgery by the curator, who is
trusted. They cannot tell what is in a row: a record may be changed by itself (augmented),
and whoever mixes records breaks the guarantee unseen.

The marks are in the weights because a batch of Keras has three parts and no more: a fourth would
be the class weights of `train_on_batch(*batch)`, and `evaluate` and Keras 2's generators refuse it.
"""

from __future__ import annotations  # The command line loads no TensorFlow for `tf.Tensor`.

import hashlib
from typing import Any, Tuple

import numpy as np
import tensorflow as tf

_PRIME = 2**28 - 57  # Marks fit into the 29 digits that float64 has more, without rounding up.
_DIGITS = 2**28 - 1
# Numbers of rows beyond the most that a batch may have tell of one draw for several workers.
MOST_ROWS, TAGS = 2**17, 2**11 - 1
# What a plan says of batches; the noise may differ without making them others.
_FIELDS = ('batch_size', 'steps', 'population_size', 'unit', 'adjacency', 'sampling', 'seed')


def line(plan: Any) -> Tuple[int, int, int]:
  """`(slope, pace, offset)`: marks are `1 + (slope * step + pace * row + offset) % prime`."""
  text = repr([(name, repr(getattr(plan, name, None))) for name in _FIELDS])
  digest = hashlib.sha256(text.encode()).digest()
  slope, offset, pace = (int.from_bytes(digest[i:i + 8], 'big') for i in (0, 8, 16))
  return 1 + slope % (_PRIME - 1), 1 + pace % (_PRIME - 1), offset % _PRIME


def mark(plan: Any, step: Any, row: Any = 0) -> Any:
  """The mark of a row in a step: an int, or an int64 array or tensor like them; never zero."""
  slope, pace, offset = line(plan)
  return 1 + (slope * step + pace * row + offset) % _PRIME


def row_of(marked: Any, plan: Any, step: Any) -> Any:
  """Returns the row of each mark. Marks of other steps and plans give rows far away."""
  slope, pace, offset = line(plan)
  return (marked - 1 - slope * step - offset) % _PRIME * pow(pace, -1, _PRIME) % _PRIME


def write(
    weights: np.ndarray, plan: Any, step: int, first: int = 0, tag: int = 0) -> np.ndarray:
  """Float32 weights as float64 that carry the marks of a step and their rows; zero stays zero.

  Args:
    weights: [n, ...].
    plan: The `PrivacyPlan`.
    step: The step.
    first: The row of the batch that the first of them is.
    tag: A tag of the coins that all workers share.
  """
  wide = np.asarray(weights, np.float32).astype(np.float64)
  rows = tag * MOST_ROWS + first + np.arange(len(wide)).reshape([-1] + [1] * (wide.ndim - 1))
  bits = wide.view(np.int64) | mark(plan, step, rows)
  return np.where(wide == 0, 0.0, bits.view(np.float64))


def read(bits: Any) -> Any:
  """The marks in the bits (int64) of weights."""
  return bits & _DIGITS


def in_place(counted: tf.Tensor, several: bool) -> tf.Tensor:
  """[] bool: whether all replicas have the rows of one batch that are theirs, and nobody else's.

  Args:
    counted: [replicas, 3] int64: rows, and the least and the largest number by which the marked
      rows of records come after their places; the largest is below the least where none is.
    several: Whether workers drew the batch. All workers must then share one draw of coins.
  """
  count, least, most = tf.unstack(counted, axis=1)
  used = least <= most
  begin = least - tf.cumsum(count, exclusive=True)
  low = tf.reduce_min(tf.where(used, begin, tf.int64.max))
  high = tf.reduce_max(tf.where(used, begin, tf.int64.min))
  whole = tf.reduce_all((least == most) | ~used)
  tagged = ((low > 0) & (low % MOST_ROWS == 0)) if several else (low == 0)
  return (low > high) | (whole & (low == high) & tagged)
