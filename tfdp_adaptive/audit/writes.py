# SPDX-License-Identifier: Apache-2.0
"""Tests whether all that a step leaves follows from its releases.

Weights, state and whatever else a step writes may depend on the batch through noised
releases only. So one step is run on different batches from the same state, and its
releases are replaced by fixed numbers: what then still differs was taken past the noise,
as by a training step of one's own that moves a weight itself, or keeps a mean. Exact, for
the batches that were tried. Metrics are left out: they are exact and not private, as said.
"""

from __future__ import annotations

from typing import NamedTuple, Optional, Tuple, TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
  from tfdp_adaptive.audit import interface

_HISTORY = (0, 2)  # Steps taken before the inspected one.


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


def check(subject: interface.Subject, seed: Optional[int] = None) -> Writes:
  """Compares the state after a step on ordinary, other and no records."""
  rng = np.random.default_rng(seed)
  found, pairs = set(), 0
  for _, state in subject.history(rng, seed, _HISTORY):
    batch, other = subject.ordinary(rng, share=1.0), subject.ordinary(rng, share=1.0)
    all_of_it, none = np.ones(len(batch)), np.zeros(len(batch))
    left = subject.written(state, batch, all_of_it)
    for right in (subject.written(state, other, all_of_it), subject.written(state, batch, none)):
      found |= {name for name in left if not np.array_equal(left[name], right[name])}
      pairs += 1
  return Writes(tuple(sorted(found)), len(left), pairs)
