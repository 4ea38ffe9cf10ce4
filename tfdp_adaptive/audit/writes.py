# SPDX-License-Identifier: Apache-2.0
"""Does all that a step leaves follow from its releases?

Weights, state and whatever else a step writes may depend on the batch through noised
releases only. So one step is run on different batches from the same state, and its
releases are replaced by fixed numbers: what then still differs was taken past the noise,
as by a training step of one's own that moves a weight itself, or keeps a mean. Exact, for
the batches that were tried. Metrics are left out: they are exact and not private, as said.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Optional, Tuple, TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
  from tfdp_adaptive.audit import subjects

_HISTORY = (0, 2)  # Steps taken before the one that is looked at.


class Writes(NamedTuple):
  """The result of the check.

  Attributes:
    past_noise: Names of what depends on the batch though the releases do not.
    looked_at: The number of tensors that a step writes.
    pairs: How many pairs of batches were tried.
  """

  past_noise: Tuple[str, ...]
  looked_at: int
  pairs: int


def check(subject: subjects.Subject, seed: Optional[int] = None) -> Writes:
  """Compares the state after a step on ordinary, other and no records."""
  rng = np.random.default_rng(seed)
  whole = max(1, math.ceil(subject.claims.batch_size))

  def ordinary() -> np.ndarray:
    if subject.count:
      return rng.integers(subject.count, size=(whole, 1)) * 1.0
    return rng.standard_normal((whole, subject.size))

  state, found, pairs = subject.fresh(seed), set(), 0
  last = subject.limit(max(_HISTORY) + 1) - 1
  for step in range(last + 1):
    if step in _HISTORY:
      batch, none = ordinary(), np.zeros(whole)
      left = subject.written(state, batch, 1 - none)
      for other, weights in ((ordinary(), 1 - none), (batch, none)):
        right = subject.written(state, other, weights)
        found |= {name for name in left if not np.array_equal(left[name], right[name])}
        pairs += 1
    _, state = subject.step(state, ordinary())
  return Writes(tuple(sorted(found)), len(left), pairs)
