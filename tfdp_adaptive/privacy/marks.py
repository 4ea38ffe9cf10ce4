# SPDX-License-Identifier: Apache-2.0
"""The mark by which a step knows a batch that its plan drew for it.

Every batch of `plan.batches` carries, in the digits of its sample weights that float32
does not hold, a number that belongs to one plan and one step. Rounded to float32, as
Keras does before it uses them, the weights are what they seem. The mark is public: it
guards against honest mistakes (a batch used twice, out of order, of another plan, of
one's own), not against forgery by the curator, who is trusted.
"""

import hashlib
from typing import Any, Tuple

import numpy as np

_PRIME = 2**28 - 57  # Marks fit into the 29 digits that float64 has more, without rounding up.
_DIGITS = 2**28 - 1
# What a plan says of batches; the noise may differ without making them others.
_FIELDS = ('batch_size', 'steps', 'population_size', 'unit', 'adjacency', 'sampling', 'seed')


def line(plan: Any) -> Tuple[int, int]:
  """`(slope, offset)` of a plan: its marks are `1 + (slope * step + offset) % prime`."""
  text = repr([(name, repr(getattr(plan, name, None))) for name in _FIELDS])
  digest = hashlib.sha256(text.encode()).digest()
  slope, offset = (int.from_bytes(digest[i:i + 8], 'big') for i in (0, 8))
  return 1 + slope % (_PRIME - 1), offset % _PRIME


def mark(plan: Any, step: Any) -> Any:
  """The mark of a step: a Python int, or an int64 tensor like `step`; never zero."""
  slope, offset = line(plan)
  return 1 + (slope * step + offset) % _PRIME


def write(weights: np.ndarray, plan: Any, step: int) -> np.ndarray:
  """Float32 weights as float64 that carry the mark of a step; zero stays zero."""
  wide = np.asarray(weights, np.float32).astype(np.float64)
  bits = wide.view(np.int64) | mark(plan, step)
  return np.where(wide == 0, 0.0, bits.view(np.float64))


def read(bits: Any) -> Any:
  """The marks in the bits (int64) of weights."""
  return bits & _DIGITS
