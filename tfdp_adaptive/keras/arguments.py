# SPDX-License-Identifier: Apache-2.0
"""Arguments of private optimizers: what is required, what is refused, how they are saved."""

import dataclasses
import inspect
from typing import Any, Callable, Dict, FrozenSet, Optional, Tuple, Union

import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import contract
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import engines
from tfdp_adaptive.privacy import plan as plan_lib

# Arguments of Keras that would break sensitivity or do something else than they say.
_REFUSED = {
    'clipnorm': 'Use `l2_norm_clip`.', 'clipvalue': 'Use `l2_norm_clip`.',
    'global_clipnorm': 'Use `l2_norm_clip`.',
    'gradient_accumulation_steps': 'Use `performance=tfdp.Performance(accumulation_steps=...)`: '
                                   'one noise draw per batch.',
    'loss_scale_factor': 'Losses of single examples are not divided by the batch size, so they '
                         'need no scaling.',
    'lr': 'Use `learning_rate`.',
    'num_microbatches': 'Leave it out: every example is clipped by itself.',
    'decay': 'Use a schedule, such as `keras.optimizers.schedules.InverseTimeDecay`, as '
             '`learning_rate`; or `weight_decay`.',
}


@dataclasses.dataclass(frozen=True)
class Performance:
  """Settings of speed and memory. They do not change the steps, except for rounding.

  Attributes:
    engine: How gradients are clipped: 'bookkeeping', 'layered' (every record's gradient, for
      projections that need it), 'materialized' (by vectorizing the whole model), 'loop' (one
      example after the other), or 'auto', the fastest one that works for the model.
      `tfdp.explain_clipping` says which one that is, and why.
    memory_budget: Bytes that the work on one chunk of a batch may take. This is an estimate from
      the traced computation. Weights, optimizer state and the batch itself need more. The largest
      chunks that fit are used. None means the whole batch at once.
    accumulation_steps: Instead of a budget, a number of equal chunks; noise is drawn once per
      batch.
  """

  engine: str = 'auto'
  memory_budget: Optional[float] = None
  accumulation_steps: int = 1

  def __post_init__(self) -> None:
    checks.whole(accumulation_steps=self.accumulation_steps)
    if self.memory_budget is not None:
      checks.positive(memory_budget=self.memory_budget)  # Bytes.
      if self.accumulation_steps != 1:
        raise ValueError(
            '`memory_budget` chooses the number of chunks, which `accumulation_steps` fixes. '
            f'Choose one. Received: accumulation_steps={self.accumulation_steps}, '
            f'memory_budget={self.memory_budget}.')
    checks.one_of(engines.ENGINES, engine=self.engine)


def performance(value: Union[Performance, Dict[str, Any], None]) -> Performance:
  """Returns the value of the argument `performance`: a `Performance`, its config or None."""
  if isinstance(value, dict):
    value = Performance(**value)
  checks.instance((Performance, type(None)), 'a `tfdp.Performance`, which says all of engine, '
                  'memory and chunks, or None', performance=value)
  return value or Performance()


def check_moving_average(rule: contract.Rule, kwargs: Dict[str, Any]) -> None:
  """Raises for a moving average of iterates that a rule projects."""
  if kwargs.get('use_ema') and rule.project is not None:
    raise ValueError('`use_ema` cannot be combined with a rule that projects onto a constraint '
                     f'set. Received: use_ema=True, rule={rule.name}.')


def check_own_sampler(plan: Optional[plan_lib.PrivacyPlan], own_sampler: Optional[str]) -> None:
  """Checks that `own_sampler` is a sentence, and that there is a plan."""
  if own_sampler is None:
    return
  if plan is None:
    raise ValueError('`own_sampler` is about the batches of a plan. Received: '
                     f'own_sampler={own_sampler!r} without a plan. Leave it out.')
  if not isinstance(own_sampler, str) or not own_sampler.strip():
    raise ValueError('`own_sampler` must say in words how records are chosen; the statement '
                     f'repeats it. Received: own_sampler={own_sampler!r}.')


def check_public(batch: trees.Tree) -> Any:
  """Returns the public batch, or raises ValueError if it has no record."""
  shapes = [t.shape for t in tf.nest.flatten(batch) if hasattr(t, 'shape')]
  if batch is None or any(len(shape) and shape[0] == 0 for shape in shapes):
    raise ValueError('`public_data` must have at least one record in every batch. '
                     f'Received: {"no batch" if batch is None else f"shapes {shapes}"}.')
  return batch


def refuse(kwargs: Dict[str, Any]) -> None:
  """Refuses Keras arguments that would break the sensitivity or have another effect."""
  for key, fix in _REFUSED.items():
    value = kwargs.pop(key, None)
    if value not in (None, False):
      raise ValueError(f'`{key}` cannot be used with a private optimizer. '
                       f'Received: {key}={value!r}. {fix}')


def fixed(optimizer_class: Any) -> FrozenSet[str]:
  """Returns the names of settings that an optimizer of this class keeps as they were made.

  Arguments of a user's subclass are its own, even if one of ours has the same name.
  """
  classes = optimizer_class.__mro__
  ours = next(i for i, one in enumerate(classes)
              if one.__module__.partition('.')[0] == __name__.partition('.')[0])
  names = {*_REFUSED, *parameters(optimizer_class), *parameters(classes[ours])}
  for one in classes[:ours]:
    names -= set(parameters(one.__init__) if '__init__' in vars(one) else ())
  return frozenset(names - {'args', 'kwargs', 'rule', 'learning_rate', 'name', 'public_data'})


def parameters(factory: Callable[..., contract.Rule]) -> Tuple[str, ...]:
  """Names of the arguments of a rule's factory or of a constructor."""
  return tuple(inspect.signature(factory).parameters)
