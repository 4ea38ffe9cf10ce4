# SPDX-License-Identifier: Apache-2.0
"""Batch size and number of steps for a budget of examples.

All numbers but one are formulas of public constants. At a fixed number of examples, larger batches
lower the noise of a step and of the sum of all steps, and leave fewer steps. Which is better
depends on the task. On three small tasks with DP-SGD, four times the batch in a quarter of the
steps won once, lost once, and once made no difference.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from tfdp_adaptive import checks
from tfdp_adaptive import terms
from tfdp_adaptive.privacy import plan as plan_lib

LEAST_STEPS = 100
_ROWS = 10  # Batch sizes, each twice the one before.


class Choice(NamedTuple):
  """One batch size.

  Attributes:
    batch_size: B.
    steps: The number of steps T that the budget allows.
    noise_multiplier: The smallest one for the target, with Poisson sampling and independent noise.
    step_noise: Noise of a step over its signal.
    sum_noise: Noise of the sum of all steps, per coordinate and unit of learning rate, in clip
      norms.
    epochs: The expected number of times that a record is used.
  """

  batch_size: int
  steps: int
  noise_multiplier: float
  step_noise: float
  sum_noise: float
  epochs: float


@dataclasses.dataclass(frozen=True)
class Choices:
  """The table of `batch_and_steps`; `str(choices)` prints it.

  Attributes:
    rows: `Choice`s, by batch size.
    best: The proposed choice.
    reason: The reason for it, in a sentence.
  """

  rows: Tuple[Choice, ...]
  best: Choice
  reason: str

  def to_dict(self) -> Dict[str, Any]:
    """JSON-serializable."""
    return checks.for_json(vars(self))

  def __str__(self) -> str:
    lines = ['   batch    steps   epochs    noise  step noise/signal  sum noise']
    for row in self.rows:
      marks = [mark for mark, there in (
          ('proposed', row == self.best), ('more noise than signal', row.step_noise >= 1),
          (f'fewer than {LEAST_STEPS} steps', row.steps < LEAST_STEPS)) if there]
      lines.append(f'{row.batch_size:8} {row.steps:8} {row.epochs:8.3g} {row.noise_multiplier:8.4g}'
                   f' {row.step_noise:18.3g} {row.sum_noise:10.3g}'
                   + ('  ' + ', '.join(marks) if marks else ''))
    return '\n'.join([*lines, '', self.reason])


def default_delta(population_size: int) -> float:
  """The largest power of ten below `1 / population_size`."""
  return float(f'1e-{len(str(population_size))}')


def batch_and_steps(
    *, population_size: int, target_epsilon: float, target_delta: Optional[float] = None,
    examples: Optional[float] = None, seconds: Optional[float] = None,
    step_seconds: Optional[Tuple[float, float]] = None, largest_batch: Optional[int] = None,
    parameters: int = 1, signal: float = 0.1, **fields: Any) -> Choices:
  """Proposes a batch size and a number of steps for a budget. It costs no privacy.

  Args:
    population_size: Number N of records (users), public.
    target_epsilon: Epsilon of each plan in the table.
    target_delta: None for the largest power of ten below 1 / N.
    examples: The budget: the total number of examples to process, B x T.
    seconds: The budget in seconds instead, with `step_seconds`.
    step_seconds: `(overhead, per example)`: measured seconds of a step.
    largest_batch: The largest batch that fits into memory.
    parameters: Number m of trainable parameters. The noise of all of them is added up.
    signal: Norm of the mean of clipped gradients over the clip norm, from 0 to 1 (all examples
      agree). The default is a guess; measure it on public data.
    **fields: Other fields of the plans, such as `adjacency` or `unit`.

  Returns:
    `Choices`. The best one is the smallest batch whose steps have more signal than noise and
    that leaves 100 steps. If there is none, it is the largest batch that leaves 100 steps.

  Examples:
    >>> choices = batch_and_steps(population_size=60_000, target_epsilon=2.0,
    ...                           examples=600_000, parameters=10_000)
    >>> choices.best.batch_size * choices.best.steps <= 600_000
    True
  """
  checks.whole(population_size=population_size, parameters=parameters)
  checks.positive(target_epsilon=target_epsilon, signal=signal)
  if (examples is None) == (seconds is None) or (seconds is None) != (step_seconds is None):
    raise ValueError('Give one budget: `examples`, or `seconds` with `step_seconds=(overhead, per '
                     f'example)`. Received: examples={examples}, seconds={seconds}, '
                     f'step_seconds={step_seconds}.')
  budget: Any = seconds if examples is None else examples
  checks.positive(budget=budget)
  overhead, of_example = step_seconds or (0.0, 1.0)  # A budget of examples: each costs one.
  if target_delta is None:
    target_delta = default_delta(population_size)

  def steps_of(batch_size: int) -> int:
    return int(budget / (overhead + of_example * batch_size))

  most = min(population_size, largest_batch or population_size)
  rows: List[Choice] = []
  batch_size = max(1, min(most, 2**int(math.log2(max(1.0, most / 2**(_ROWS - 1))))))
  while batch_size <= most and steps_of(batch_size) >= 1:
    steps = steps_of(batch_size)
    plan = plan_lib.PrivacyPlan.calibrate(
        population_size=population_size, batch_size=batch_size, steps=steps, l2_norm_clip=1.0,
        target_epsilon=target_epsilon, target_delta=target_delta, **fields)
    noise = plan.noise_multiplier * terms.record_distance(plan.adjacency) / batch_size
    rows.append(Choice(batch_size, steps, plan.noise_multiplier,
                       noise * math.sqrt(parameters) / signal, noise * math.sqrt(steps),
                       batch_size * steps / population_size))
    batch_size *= 2
  if not rows:
    raise ValueError('The budget must allow one step of some batch. Received: '
                     f'examples={examples}, seconds={seconds}, step_seconds={step_seconds}.')
  long_enough = [row for row in rows if row.steps >= LEAST_STEPS] or rows[:1]
  clear = [row for row in long_enough if row.step_noise < 1]
  best = clear[0] if clear else long_enough[-1]
  reason = ('The smallest batch whose steps have more signal than noise' if clear else
            f'No batch that leaves {LEAST_STEPS} steps has more signal than noise in a step: the '
            'largest of them')
  return Choices(tuple(rows), best, (
      f'Proposed: batch size {best.batch_size}, {best.steps} steps. {reason}, at a signal of '
      f'{signal:g} clip norms. Noise is computed; that {LEAST_STEPS} steps are enough, and that '
      'larger batches help no more, is experience: try half and twice the batch on public data.'))
