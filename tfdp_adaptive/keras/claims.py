# SPDX-License-Identifier: Apache-2.0
"""What may be said of the weights that an optimizer moves."""

from __future__ import annotations

import dataclasses
from typing import Any, Optional, TYPE_CHECKING

from tfdp_adaptive.privacy import ledger as ledger_lib
from tfdp_adaptive.privacy import statement as statement_lib

if TYPE_CHECKING:  # It imports this.
  from tfdp_adaptive.keras import optimizer as optimizer_lib


def epsilon(
    optimizer: optimizer_lib.DPOptimizer, before: ledger_lib.Ledger,
    steps: Optional[int]) -> float:
  """Of `steps` steps at the plan's delta, runs `before` on the same weights included."""
  if optimizer.plan is not None and not before.entries:
    return optimizer.plan.epsilon(steps, rule=optimizer.rule)
  now = ledger(optimizer, before, steps)
  plan: Any = optimizer.plan  # Without one, it has raised.
  return now.epsilon(plan.target_delta)


def ledger(
    optimizer: optimizer_lib.DPOptimizer, before: ledger_lib.Ledger,
    steps: Optional[int]) -> ledger_lib.Ledger:
  """Runs `before`, and `steps` steps (default: all) of the optimizer."""
  if optimizer.plan is None:
    raise ValueError('Without a plan there is no epsilon: sampling and number of steps are '
                     'unknown. Make a `tfdp.PrivacyPlan` and pass `plan=`.')
  return before.begin(optimizer.plan, optimizer.rule, optimizer.own_sampler or '').done(
      optimizer.plan.steps if steps is None else steps)


def statement(
    optimizer: optimizer_lib.DPOptimizer, before: ledger_lib.Ledger, steps: Optional[int]) -> str:
  """Plain text; runs `before` on the same weights included."""
  if optimizer.plan is None:
    text = (f'{optimizer.name}: noise multiplier {optimizer.noise_multiplier:g}, clip norm '
            f'{optimizer.l2_norm_clip:g}, divisor {optimizer.batch_size:g}, '
            f'{optimizer.adjacency} adjacency. There is no epsilon to state: without a '
            'tfdp.PrivacyPlan neither sampling nor steps are known.\n')
  else:
    text = dataclasses.replace(optimizer.plan, l2_norm_clip=optimizer.l2_norm_clip).statement(
        steps=steps, rule=optimizer.rule)
    text += statement_lib.of_users(getattr(optimizer.run, 'examples_per_user', 0))
    text += statement_lib.own_sampling(optimizer.own_sampler or '')
    if optimizer.seed is not None:
      text += ('\nA FIXED SEED was used for the noise: whoever knows it can take the noise '
               'away, so this run is a test and the guarantee above does not hold against '
               'them.\n')
  if before.entries:
    text += ('\nTHE WEIGHTS WERE TRAINED BEFORE, and what they lost then adds up with the '
             'above. ')
    try:
      if optimizer.plan is not None:
        together = statement_lib.rounded_up(epsilon(optimizer, before, steps))
        text += f'Together: epsilon {together} at delta {optimizer.plan.target_delta:g}.'
    except ValueError as error:  # Plans of different neighbours have no common epsilon.
      text += f'No epsilon of both together can be stated: {error}'
    text += '\n'
  return text + ('\nCounted are the runs that left their record on these weights. Values copied '
                 'by hand, and training without this library, leave none.\n')
