# SPDX-License-Identifier: Apache-2.0
"""How much the trained language model tells of canaries, sentences that a coin left out."""

from __future__ import annotations

from typing import Any, Dict

import numpy as np

import tfdp_adaptive as tfdp
from tfdp_adaptive import errors

from . import compare
from . import settings as settings_lib
from . import tasks


def run(
    task: tasks.Task, target: tasks.Target, method: settings_lib.Method, settings: Dict[str, Any],
    canaries: int, confidence: float) -> Any:
  """The report of `tfdp.audit.run`."""
  population_size = len(task.train[0])
  if not 2 <= canaries <= population_size:
    raise errors.UsageError(f'--canaries must be from 2 to the number of training sentences, '
                            f'{population_size}. Received: {canaries}')
  model, _, optimizer = compare.prepare(task, method, settings, compare.make_plan(task, target))
  return tfdp.audit.run(
      lambda: model, task.train, optimizer.plan, confidence=confidence,
      indices=np.random.default_rng().permutation(population_size)[:canaries])
