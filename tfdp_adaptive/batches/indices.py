# SPDX-License-Identifier: Apache-2.0
"""Draws the record indices of the steps of a run."""

from typing import Any, Iterator, Optional

import numpy as np

from tfdp_adaptive import checks
from tfdp_adaptive import terms as terms_lib
from tfdp_adaptive.batches import coins as coins_lib


def drawn(terms: terms_lib.Terms, size: Optional[int] = None, start_step: int = 0,
          coins: Any = None) -> Iterator[np.ndarray]:
  """Returns the indices of the steps from `start_step` on; see `PrivacyPlan.index_batches`."""
  if start_step >= terms.steps:
    raise ValueError(f'All {terms.steps} steps of the plan are used up. '
                     f'Received: start_step={start_step}.')
  checks.whole(0, start_step=start_step)
  size = terms.population_size if size is None else size
  if size is None:
    raise ValueError('`size` must be given for a plan without a population size.')
  if terms.population_size not in (None, size):
    raise ValueError(
        f'The plan is for population_size={terms.population_size} records, and the data has '
        f'{size}. The sampling probability is a public constant of the plan: make the plan for '
        'this data, or pass the data it was made for (a tf.data set must be unbatched).')
  return terms.sampling.index_batches(terms, size, start_step, coins_lib.of(terms, coins))
