# SPDX-License-Identifier: Apache-2.0
"""The plans that a recommendation tries."""

from __future__ import annotations

import math
from typing import Any, Dict, Iterator, Optional

from tfdp_adaptive import checks
from tfdp_adaptive import mechanisms
from tfdp_adaptive import privacy
from tfdp_adaptive.accounting import sampling as sampling_lib
from tfdp_adaptive.advice import choice

_BANDS = (2, 4, 8, 16, 32)
_STEPS, _EPOCHS = 300, 30  # Used where batch size and steps are not given.
_LEAST_BATCH = 256


def candidates(
    population_size: int, batch_size: Optional[float], steps: Optional[int],
    sampling: Optional[sampling_lib.Sampling], mechanism: Optional[mechanisms.Mechanism],
    **fields: Any) -> Iterator[privacy.PrivacyPlan]:
  """Yields the plans to try: independent noise, and the bands of least error if that is less.

  Where nothing is given, there are two with more or fewer steps over as many examples. Every plan
  takes seconds, so they are made when they are asked for.
  """
  given = dict(batch_size=batch_size, steps=steps)
  checks.positive(**{name: value for name, value in given.items() if value is not None})
  free = batch_size is None and steps is None and sampling is mechanism is None
  steps = steps or _STEPS
  batch_size = batch_size or min(population_size, max(
      _LEAST_BATCH, math.ceil(population_size * _EPOCHS / steps)))
  shared: Dict[str, Any] = dict(
      fields, population_size=population_size, batch_size=batch_size, steps=steps,
      l2_norm_clip=1.0)
  calibrate = privacy.PrivacyPlan.calibrate
  if sampling is not None or mechanism is not None:
    if sampling is not None:
      shared['sampling'] = sampling
    yield calibrate(**shared, mechanism=mechanism or choice.choose(calibrate(**shared)))
    return
  plain = calibrate(**shared)
  yield plain
  most = min(int(population_size // batch_size), steps)
  error = lambda plan: plan.noise_multiplier * plan.mechanism.rmse(plan.steps)
  banded = lambda bands: dict(shared, sampling=sampling_lib.CyclicPoisson(cycle=bands),
                              mechanism=mechanisms.BandedToeplitz(bands, steps))
  best = min((bands for bands in _BANDS if bands <= most), default=None, key=lambda bands: error(
      calibrate(**banded(bands), accountant='rdp'))) if plain.adjacency == 'zero_out' else None
  if best and error(plan := calibrate(**banded(best))) < error(plain):
    yield plan
  if free:
    for count in (steps // 3, 3 * steps):
      yield calibrate(**{**shared, 'steps': count,
                         'batch_size': min(population_size, batch_size * steps // count)})
