# SPDX-License-Identifier: Apache-2.0
"""Chooses a mechanism for a plan, and the plans that a recommendation tries."""

import math
from typing import Any, Dict, Iterator, Optional

from tfdp_adaptive import checks
from tfdp_adaptive import mechanisms
from tfdp_adaptive import privacy
from tfdp_adaptive.accounting import sampling as sampling_lib
from tfdp_adaptive.mechanisms import workload as workload_lib

_BUFFERS = 5
_WORTH = 0.99  # More memory must lower the error to at most this fraction.
_BANDS = (2, 4, 8, 16, 32)
_STEPS, _EPOCHS = 300, 30  # Used where batch size and steps are not given.
_LEAST_BATCH = 256
ERRORS = {'mean': 'rmse', 'max': 'max_error', 'last': 'last_error'}


def default_delta(population_size: int) -> float:
  """Returns the largest power of ten below `1 / population_size`."""
  return float(f'1e-{len(str(population_size))}')


def check(plan: privacy.PrivacyPlan, memory: int, objective: str) -> None:
  checks.instance(privacy.PrivacyPlan, 'a `tfdp.PrivacyPlan`', plan=plan)
  checks.whole(0, memory=memory)
  checks.one_of(ERRORS, objective=objective)


def choose(plan: privacy.PrivacyPlan, *, memory: int = 32, workload: workload_lib.Like = None,
           objective: str = 'mean') -> mechanisms.Mechanism:
  """The mechanism with the least error that the plan's sampling can account for.

  * Poisson sampling amplifies independent noise only.
  * Cyclic Poisson sampling amplifies banded noise with at most `cycle` bands. All numbers of bands
    cost the same, so the choice is as many as memory allows. `MinSeparation` and `BallsInBins` with
    `draws` amplify it too, but more bands cost more.
  * Without amplification, noise may be correlated over all steps. The choice is then a `BLT`, to
    which buffers are added while each one gains 1%. A banded mechanism is chosen if it is more than
    1% better.
  * If memory allows no buffer, the choice is a banded inverse. It draws earlier rows again from
    their keys.

  Args:
    plan: A `PrivacyPlan`. Its steps, sampling and participations count; its own mechanism does not.
    memory: Number of copies of the weights that the noise may keep between steps.
    workload: A `Workload`; None for prefix sums (SGD with a constant rate).
    objective: 'mean', 'max' or 'last', the error to minimize.

  Returns:
    A mechanism for `dataclasses.replace(plan, mechanism=...)`. Its `reason` explains the choice.
  """
  check(plan, memory, objective)
  design: Dict[str, Any] = dict(workload=workload, objective=objective)
  if plan.steps == 1:
    return mechanisms.IndependentGaussian(workload=workload).because(
        'There is one step: nothing to correlate.')
  if plan.sampling.amplified:
    most, scheme = plan.sampling.most_bands, type(plan.sampling).__name__
    bands = min(most, plan.steps, memory + 1)
    if bands == 1:
      return mechanisms.IndependentGaussian(workload=workload).because(
          f'{scheme} sampling amplifies independent noise only'
          + (f' at {most} bands and memory for {memory} rows.' if most > 1 else
             '. CyclicPoisson with banded noise, or FixedOrder with a BLT, may be better for '
             'large epsilon or few epochs.'))
    return mechanisms.BandedToeplitz(bands, plan.steps, **design).because(
        f'{scheme} sampling amplifies banded noise of up to {most} bands; {bands} fit into '
        f'{memory} rows of memory.')
  min_sep, k = plan.participation()
  participation: Dict[str, Any] = dict(min_sep=min_sep, max_participations=k)
  pattern = (f'a record that takes part at most {k} times, at least {min_sep} steps apart'
             if k > 1 else 'a record that takes part once')
  if memory == 0:
    inverse = mechanisms.BandedInverse(min(4, plan.steps), plan.steps, **participation, **design)
    return inverse.because(
        f'Nothing may be kept between steps: rows are drawn again from their keys, for {pattern}.')
  error = lambda mechanism: getattr(mechanism, ERRORS[objective])(**participation)
  # How many buffers pay is asked at a constant rate: each design for a schedule takes seconds.
  given = workload_lib.get(workload)
  constant = dict(design, workload=workload_lib.Workload(given.momentum))
  streaming = mechanisms.BLT(1, plan.steps, **participation, **constant)
  for buffers in range(2, min(_BUFFERS, memory) + 1):
    more = mechanisms.BLT(buffers, plan.steps, **participation, **constant)
    if error(more) > _WORTH * error(streaming):
      break
    streaming = more
  if not given.is_toeplitz:
    streaming = mechanisms.BLT(streaming.buffers, plan.steps, **participation, **design)
  bands = min(min_sep, plan.steps, memory + 1)
  tight = mechanisms.BandedToeplitz(bands, plan.steps, **design)
  numbers = f'For {pattern}, its {objective} error is {{:.4g}}, against {{:.4g}} of {{}}.'
  if k > 1 and error(tight) < _WORTH * error(streaming):
    return tight.because(
        f'{bands} bands, as many as memory and participation allow, are best. '
        + numbers.format(error(tight), error(streaming), f'{streaming.buffers} BLT buffers'))
  return streaming.because(
      f'A BLT keeps {streaming.buffers} rows, whatever the number of steps. '
      + numbers.format(error(streaming), error(tight), f'{bands} bands'))


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
    yield calibrate(**shared, mechanism=mechanism or choose(calibrate(**shared)))
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
