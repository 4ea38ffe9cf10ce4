# SPDX-License-Identifier: Apache-2.0
"""What may be said of the weights that an optimizer moves."""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping, Optional, Sequence, TYPE_CHECKING

from tfdp_adaptive.keras import history
from tfdp_adaptive.privacy import card as card_lib
from tfdp_adaptive.privacy import ledger as ledger_lib
from tfdp_adaptive.privacy import statement as statement_lib
from tfdp_adaptive.privacy import weight_digests

if TYPE_CHECKING:  # It imports this.
  from tfdp_adaptive.keras import optimizer as optimizer_lib

_SEED = ('A FIXED SEED was used for the noise: whoever knows it can take the noise away, so this '
         'run is a test and the guarantee above does not hold against them.')
_BEFORE = 'THE WEIGHTS WERE TRAINED BEFORE, and what they lost then is counted above.'
_COUNTED = ('Counted are the runs that left their record on these weights. Values copied by hand, '
            'and training without this library, leave none.')


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


def card(
    optimizer: optimizer_lib.DPOptimizer, before: ledger_lib.Ledger, steps: Optional[int],
    **more: Any) -> card_lib.Card:
  """The privacy card of `steps` steps (default: all) after the runs `before`.

  Args:
    optimizer: With a plan, or without one: there is no epsilon then.
    before: Other runs on the same weights.
    steps: Of this one.
    **more: For `card.of`.
  """
  plan = optimizer.plan and dataclasses.replace(
      optimizer.plan, l2_norm_clip=optimizer.l2_norm_clip)
  run = before.begin(plan, optimizer.rule, optimizer.own_sampler or '').done(
      (optimizer.steps_done if plan is None else plan.steps) if steps is None else steps)
  last = dataclasses.replace(
      run.entries[-1], examples_per_user=getattr(optimizer.run, 'examples_per_user', 0))
  facts = [_SEED] * (optimizer.seed is not None) + [_BEFORE] * bool(before.entries) + [_COUNTED]
  return card_lib.of(
      ledger_lib.Ledger(run.entries[:-1] + (last,)),
      details=statement_lib.details(optimizer.rule), facts=[*facts, *more.pop('facts', ())], **more)


def of_model(
    model: Any, audits: Sequence[Any] = (), words: Optional[Mapping[str, str]] = None
    ) -> card_lib.Card:
  """The card of everything that a model's weights went through; see `DPModel.privacy_card`."""
  optimizer: Any = getattr(model, 'optimizer', None)
  more: Any = dict(
      audits=audits, weights=weight_digests.of(model.weights),
      words=[card_lib.Words(about, text) for about, text in (words or {}).items()])
  if not hasattr(optimizer, 'rule'):
    return card_lib.of(model.ledger, facts=[_COUNTED], **more)
  before = history.before(model.variables, optimizer.run)
  steps = optimizer.steps_done
  if optimizer.plan is not None:
    steps = min(steps, optimizer.plan.steps)
  if not steps and before.entries:  # Compiled anew, and not trained.
    return card_lib.of(before, facts=[_COUNTED], **more)
  return card(optimizer, before, steps, **more)


def statement(
    optimizer: optimizer_lib.DPOptimizer, before: ledger_lib.Ledger, steps: Optional[int]) -> str:
  """Plain text; runs `before` on the same weights included."""
  text = '' if optimizer.plan is not None else (
      f'{optimizer.name}: noise multiplier {optimizer.noise_multiplier:g}, clip norm '
      f'{optimizer.l2_norm_clip:g}, divisor {optimizer.batch_size:g}, '
      f'{optimizer.adjacency} adjacency. There is no epsilon to state: without a '
      'tfdp.PrivacyPlan neither sampling nor steps are known.\n\n')
  return text + statement_lib.of(card(optimizer, before, steps, plots=False))
