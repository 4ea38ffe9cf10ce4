# SPDX-License-Identifier: Apache-2.0
"""Computes epsilon if a released result decides when a run stops.

`(epsilon(t), delta)` holds for a step t that was fixed beforehand. If the noisy weights, or
anything else that was released, decide t, then the true delta of that claim is up to K times
larger for K looks. What holds instead:

  * the planned total, epsilon of all planned steps at delta: it covers every earlier step, and
    needs nothing;
  * at K looks that were fixed beforehand, fractions of delta (a union bound over the looks): each
    look has epsilon at delta / K. Looks whose claim is the total share one claim, with the
    sum of their fractions.

The smaller of two claims must not be taken afterwards: their deltas would add up.
"""

import dataclasses
from typing import Tuple

from tfdp_adaptive import checks
from tfdp_adaptive import terms as terms_lib
from tfdp_adaptive.accounting import cost


@dataclasses.dataclass(frozen=True)
class Looks:
  """The steps after which a run may stop, fixed before it begins.

  Attributes:
    steps: Ascending numbers of steps, such as the ends of epochs.
    total: The steps among them at which the planned total is stated, usually the late ones.

  Examples:
    >>> import tfdp_adaptive as tfdp
    >>> plan = tfdp.PrivacyPlan(
    ...     batch_size=100, steps=200, l2_norm_clip=1.0, noise_multiplier=20 / 200**.5,
    ...     target_delta=1e-5, population_size=20_000, sampling=tfdp.sampling.FixedOrder())
    >>> Looks((100, 200), total=(200,)).epsilon(plan, 200) < plan.epsilon() * 1.1
    True
  """

  steps: Tuple[int, ...]
  total: Tuple[int, ...] = ()

  def __post_init__(self) -> None:
    steps, total = tuple(self.steps), tuple(self.total)
    for step in steps + total:
      checks.whole(steps=step)
    checks.require(steps and list(steps) == sorted(set(steps)),
                   'be ascending numbers of steps, at least one', steps=self.steps)
    checks.require(set(total) <= set(steps), 'be among the looks',
                   total=self.total, steps=self.steps)
    object.__setattr__(self, 'steps', steps)
    object.__setattr__(self, 'total', total)

  @classmethod
  def every(cls, interval: int, plan: terms_lib.Terms, total_from: float = 0.5) -> 'Looks':
    """Returns looks after every `interval` steps of a plan, and after the last step.

    Args:
      interval: Steps between looks, such as `steps_per_epoch`.
      plan: A `PrivacyPlan`.
      total_from: The fraction of the plan's steps after which the planned total is stated.
    """
    checks.whole(interval=interval)
    steps = sorted({*range(interval, plan.steps, interval), plan.steps})
    return cls(tuple(steps), tuple(t for t in steps if t >= total_from * plan.steps))

  def epsilon(self, plan: terms_lib.Terms, stopped: int, accountant: str = 'pld') -> float:
    """Returns epsilon at the plan's `target_delta`, of a run that stopped after a look.

    It holds for any decision to stop that was based on releases up to then.

    Args:
      plan: A `PrivacyPlan`.
      stopped: Steps done; one of `steps`.
      accountant: 'pld' or 'rdp'.
    """
    fraction, counted = self.claim(plan, stopped)
    return cost.epsilon(
        cost.event(plan, counted), fraction * plan.target_delta, accountant, cost.relation(plan))

  def next(self, done: int) -> int:
    """Returns the first look at or after a number of steps."""
    later = [step for step in self.steps if step >= done]
    if not later:
      raise ValueError('A run with looks must stop at the last of them, after '
                       f'{self.steps[-1]} steps. Received: {done} steps done.')
    return later[0]

  def claim(self, plan: terms_lib.Terms, stopped: int) -> Tuple[float, int]:
    """Returns `(fraction of delta, steps)`: the claim of a run that stopped after a look."""
    if stopped not in self.steps:
      raise ValueError('A run may stop after the looks that were fixed beforehand, at steps '
                       f'{self.steps}. Received: stopped={stopped}.')
    if self.steps[-1] > plan.steps:
      raise ValueError(f'`steps` of the looks must be at most those of the plan, {plan.steps}. '
                       f'Received: {self.steps[-1]}.')
    if stopped in self.total:
      return len(self.total) / len(self.steps), plan.steps
    return 1 / len(self.steps), stopped

  def describe(self, plan: terms_lib.Terms, stopped: int) -> str:
    """Returns the sentences about such a run, without its epsilon."""
    _, counted = self.claim(plan, stopped)
    said = 'the cost of all planned steps' if counted > stopped or stopped in self.total else (
        'the cost of the steps done')
    return (
        f'The last run stopped after {stopped} of {plan.steps} planned steps. What was released '
        f'may have decided that: {len(self.steps)} looks were fixed before it began, each has a '
        f'share of delta (a union bound), and at this one {said} is stated.')
