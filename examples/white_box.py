# SPDX-License-Identifier: Apache-2.0
"""The white-box audit of each class of the library: with which settings, and by which plans."""

from __future__ import annotations

from typing import Any, Dict, Optional

import tfdp_adaptive as tfdp
from tfdp_adaptive import errors
from tfdp_adaptive import optimizers

from . import compare
from . import settings as settings_lib

CANARIES, BATCH_SIZE, STEPS, DELTA = 512, 64, 24, 1e-6
METHODS: Dict[str, Dict[str, Any]] = {
    name: dict(row.audit) for name, row in optimizers.OPTIMIZERS.items()}
# Settings by which the clip norm of every class may follow a quantile.
FOLLOWED = {'quantile_clip': 'Quantile', 'slack_clip': 'Slack'}
_FULL = ('DPAdamJME', 'NoisyAdaGrad')  # Not amplified by sampling: fixed batches.


def settings_of(method: str) -> Dict[str, Any]:
  """The settings of a class, or those of a method of `settings.CENTRALIZED`."""
  if method in METHODS:
    return {**METHODS[method], 'learning_rate': 0.1, 'l2_norm_clip': 1.0}
  return dict(settings_lib.CENTRALIZED[method].settings)


def report(
    method: str, *, changes: Any = (), epsilon: Optional[float] = None,
    delta: Optional[float] = None, canaries: int = CANARIES, confidence: float = .95,
    steps: int = STEPS, batch_size: int = BATCH_SIZE, seed: Optional[int] = None,
    unit: str = 'example') -> Any:
  """The audit of one method, by its class's name or one of `settings.CENTRALIZED`."""
  if batch_size > canaries:
    raise errors.UsageError('--batch-size must be at most the number of canaries, which are all '
                            f'records there are, {canaries}. Received: {batch_size}')
  if canaries < 16:
    raise errors.UsageError(f'--canaries must be at least 16. Received: {canaries}')
  optimizer = make(
      method, changes, epsilon or compare.EPSILON, delta or DELTA, canaries, steps, batch_size,
      seed, unit)
  with errors.usage():  # Settings that do not go together.
    return tfdp.audit.white_box(
        optimizer, epsilon=epsilon, canaries=canaries, confidence=confidence, seed=seed)


def make(
    method: str, changes: Any, epsilon: float, delta: float, population_size: int,
    steps: int, batch_size: int, seed: Optional[int] = None, unit: str = 'example') -> Any:
  """A fresh optimizer with a plan that claims `epsilon`."""
  name = method if method in METHODS else settings_lib.CENTRALIZED[method].optimizer
  settings = {**settings_of(method), **dict(changes)}
  with errors.usage():
    for follows in [name for name in FOLLOWED if name in settings]:
      settings['clipping'] = getattr(tfdp.clipping, FOLLOWED[follows])(settings.pop(follows))
  plan = dict(population_size=population_size, batch_size=batch_size, steps=steps,
              l2_norm_clip=settings.pop('l2_norm_clip'), seed=seed, unit=unit)
  if name in _FULL:
    plan.update(sampling=tfdp.sampling.FixedOrder())
  if name == 'DPAdamJME':
    plan.update(adjacency='replace')
  if name == 'NoisyAdaGrad':
    settings['participations'] = -(-steps // -(-population_size // batch_size))
    plan.update(extra_releases=(1.0,))
  with errors.usage():
    plan = tfdp.PrivacyPlan.calibrate(target_epsilon=epsilon, target_delta=delta, **plan)
    return getattr(tfdp, name)(plan=plan, seed=seed, **settings)
