# SPDX-License-Identifier: Apache-2.0
"""Settings chosen privately, one epsilon for all runs, the best one saved."""

from __future__ import annotations

import math
import sys
from typing import Any, Dict, List

import numpy as np
import tensorflow as tf

import tfdp_adaptive as tfdp

from . import compare
from . import language_model
from . import next_word
from . import report as report_lib
from . import settings as settings_lib
from . import tasks
from . import train

_BATCH = 512


def run(
    report: report_lib.Report, text: tasks.Text, target: tasks.Target, name: str,
    settings: Dict[str, Any], grid: Dict[str, List[float]], search: tfdp.privacy.Search) -> None:
  """Searches the grid of the method of that name, other settings fixed, into the report."""
  method = settings_lib.CENTRALIZED[name]
  task = tasks.load(text)
  plan = compare.make_plan(task, target, search=search)
  report.begin({'plan': plan.to_json(), 'method': name, 'settings': settings, 'grid': grid,
                **task.identity()})
  print(f'Tuning {method.label} on {math.prod(map(len, grid.values()))} settings; how many runs '
        'it takes is secret.', file=sys.stderr)
  best = tfdp.tune(
      lambda tried, plan: compare.prepare(task, method, {**settings, **tried}, plan)[0],
      grid, task.train, plan, validation=task.validation, score=sentence_scores,
      directory=report.unfinished / 'search')
  train.publish(best.model, task, report)
  report.describe(task, _CHOSEN)
  measured = report_lib.Run(
      ((plan.steps, *language_model.Evaluator(best.model, task.test)()),), None)
  train.conclude(best.model, task, method, report, measured,
                 {**settings, **(best.settings or {})}, best.statement(),
                 epsilon=plan.epsilon(), delta=plan.target_delta, unit='sentence')


_CHOSEN = ('Settings were chosen by this command, from a grid that was fixed before, by runs that '
           'the guarantee below counts, on validation sentences that it covers, too.')


def sentence_scores(model: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray:
  """[n]: the share of each sentence's words that the model finds."""
  scores = []
  for start in range(0, len(y), _BATCH):
    logits = model(tf.convert_to_tensor(x[start:start + _BATCH]), training=False)
    targets = np.asarray(y[start:start + _BATCH])
    words = targets != next_word.PADDING
    right = words & (np.asarray(tf.argmax(logits, -1)) == targets)
    scores.append(right.sum(-1) / np.maximum(words.sum(-1), 1))
  return np.concatenate(scores)
