# SPDX-License-Identifier: Apache-2.0
"""The public constants that determine the privacy of a run, as one frozen record.

Accounting, batches, ledger and statement use `Terms`. `PrivacyPlan` is a `Terms` that also checks
its fields and computes the privacy cost.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Optional, Tuple, Union

from tfdp_adaptive import checks

ADJACENCIES = ('add_remove', 'zero_out', 'replace')


def check_adjacency(adjacency: str) -> None:
  checks.one_of(ADJACENCIES, adjacency=adjacency)


def record_distance(adjacency: str) -> float:
  """Returns the largest distance of clipped sums of two neighbors, in clip norms.

  It is one if a record is added, removed or zeroed out, two if it is replaced. Noise and
  accounting both use this function.
  """
  check_adjacency(adjacency)
  return 2.0 if adjacency == 'replace' else 1.0


@dataclasses.dataclass(frozen=True)
class Terms:
  """The public constants of a run; `PrivacyPlan` describes each of them."""

  batch_size: Union[int, float]
  steps: int
  noise_multiplier: float
  target_delta: float
  l2_norm_clip: Optional[float] = None
  population_size: Optional[int] = None
  population_is_public: Optional[bool] = None
  unit: str = 'example'
  adjacency: str = 'zero_out'
  sampling: Any = None  # A scheme of `accounting.sampling`.
  min_sep: Optional[int] = None
  max_participations: Optional[int] = None
  mechanism: Any = None  # A mechanism of `mechanisms`.
  extra_releases: Tuple[float, ...] = ()
  seed: Optional[int] = None
  search: Any = None  # A `accounting.private_search.Search`.
