# SPDX-License-Identifier: Apache-2.0
"""Which mechanism to take for a plan."""

from typing import Any, Dict

from tfdp_adaptive import mechanisms
from tfdp_adaptive.mechanisms import workload as workload_lib
from tfdp_adaptive.privacy import plan as plan_lib

_BUFFERS = 5
_WORTH = 0.99  # What needs more memory must have at most this much of the error to be preferred.
_ERRORS = {'mean': 'rmse', 'max': 'max_error', 'last': 'last_error'}


def choose(plan: plan_lib.PrivacyPlan, *, memory: int = 32, workload: workload_lib.Like = None,
           objective: str = 'mean') -> mechanisms.Mechanism:
  """The mechanism with the least error that the plan's sampling can account for.

  * Poisson sampling amplifies independent noise only.
  * Cyclic Poisson sampling amplifies banded noise with at most `cycle` bands,
    at the same cost for any number of them: as many as memory allows.
  * Without amplification noise may be correlated over all steps: a BLT with as
    many buffers as gain 1% each, unless a banded mechanism is better for the
    plan's participation by more than that.
  * With no memory, a banded inverse, whose rows are drawn again from their keys.

  Args:
    plan: A `PrivacyPlan` (its own mechanism is not looked at): `steps`,
      `sampling` and `participation()` are read.
    memory: Rows of the model's size that the noise may keep between steps.
    workload: A `Workload`; None for prefix sums (SGD with a constant rate).
    objective: 'mean', 'max' or 'last', the error to minimize.

  Returns:
    A mechanism for `dataclasses.replace(plan, mechanism=...)`; its `reason`
    says why, in a sentence or two.
  """
  if isinstance(memory, bool) or int(memory) != memory or memory < 0:
    raise ValueError(f'`memory` must be an integer >= 0. Received: memory={memory!r}.')
  design: Dict[str, Any] = dict(workload=workload, objective=objective)
  if plan.steps == 1:
    return mechanisms.IndependentGaussian(workload=workload).because(
        'There is one step: nothing to correlate.')
  if plan.sampling.amplified:
    cycle = getattr(plan.sampling, 'cycle', 1)
    bands = min(cycle, plan.steps, memory + 1)
    if bands == 1:
      return mechanisms.IndependentGaussian(workload=workload).because(
          f'{type(plan.sampling).__name__} sampling amplifies independent noise only'
          + (f' at a cycle of {cycle} and memory for {memory} rows.' if cycle > 1 else
             '. CyclicPoisson with banded noise, or FixedOrder with a BLT, may be better for '
             'large epsilon or few epochs.'))
    return mechanisms.BandedToeplitz(bands, plan.steps, **design).because(
        f'Cyclic Poisson sampling of {cycle} groups amplifies banded noise, at the same cost for '
        f'any number of bands up to {cycle}; {bands} fit into {memory} rows of memory.')
  min_sep, k = plan.participation()
  participation: Dict[str, Any] = dict(min_sep=min_sep, max_participations=k)
  pattern = (f'a record that takes part at most {k} times, at least {min_sep} steps apart'
             if k > 1 else 'a record that takes part once')
  if memory == 0:
    inverse = mechanisms.BandedInverse(min(4, plan.steps), plan.steps, **participation, **design)
    return inverse.because(
        f'Nothing may be kept between steps: rows are drawn again from their keys, for {pattern}.')
  error = lambda mechanism: getattr(mechanism, _ERRORS[objective])(**participation)
  streaming = mechanisms.BLT(1, plan.steps, **participation, **design)
  for buffers in range(2, min(_BUFFERS, memory) + 1):
    more = mechanisms.BLT(buffers, plan.steps, **participation, **design)
    if error(more) > _WORTH * error(streaming):
      break
    streaming = more
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
