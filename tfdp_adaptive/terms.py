# SPDX-License-Identifier: Apache-2.0
"""The public constants that determine the privacy of a run, as one frozen record.

Accounting, batches, ledger and statement use `Terms`. `PrivacyPlan` is a `Terms` that also checks
its fields and computes the privacy cost.
"""

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

  @property
  def amplified(self) -> bool:
    """Whether amplification by sampling is claimed."""
    return self.sampling.claims(self)

  @property
  def whole_users(self) -> bool:
    """Whether the sampled and clipped record is a user with several examples."""
    return self.unit == 'user' and not self.sampling.by_example

  @property
  def noise_stddev(self) -> float:
    """Standard deviation of Z on a clipped sum: noise multiplier times sensitivity.

    It is in clip norms if there is none.
    """
    clip_norm = 1.0 if self.l2_norm_clip is None else self.l2_norm_clip
    return self.noise_multiplier * clip_norm * record_distance(self.adjacency)

  @property
  def fixed_order(self) -> bool:
    """Whether the accounting assumes that a record has one place in every epoch.

    It does not if `min_sep` is below the sampling's own.
    """
    return self.sampling.fixed_order and self.min_sep in (
        None, self.sampling.participation(self, self.steps)[0])

  def participation(self, steps: Optional[int] = None) -> Tuple[int, int]:
    """Returns `(min_sep, max_participations)`, which the first `steps` steps account for."""
    steps = self.steps if steps is None else steps
    min_sep, max_participations = self.sampling.participation(self, steps)
    if self.max_participations is not None:
      max_participations = min(self.max_participations, steps)
    return self.min_sep or min_sep, max_participations
