# SPDX-License-Identifier: Apache-2.0
"""The plans that a recommendation tries."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Optional

import numpy as np

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
    **fields: Any) -> List[privacy.PrivacyPlan]:
  """Returns the plans to try: independent noise, and the bands of least error if that is less.

  Where nothing is given, there are two with more or fewer steps over as many examples.
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
    return [calibrate(**shared, mechanism=mechanism or choice.choose(calibrate(**shared)))]
  plans = [calibrate(**shared)]
  most = min(int(population_size // batch_size), steps)
  if plans[0].adjacency == 'zero_out':
    plans += [calibrate(**shared, sampling=sampling_lib.CyclicPoisson(cycle=bands),
                        mechanism=mechanisms.BandedToeplitz(bands, steps))
              for bands in _BANDS if bands <= most]
  errors = [plan.noise_multiplier * plan.mechanism.rmse(plan.steps) for plan in plans]
  best = int(np.argmin(errors))
  plans = plans[:1] + plans[best:best + 1] * (best > 0)
  if free:
    plans += [calibrate(**{
        **shared, 'steps': count, 'batch_size': min(population_size, batch_size * steps // count)})
              for count in (steps // 3, 3 * steps)]
  return plans
