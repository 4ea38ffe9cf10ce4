# SPDX-License-Identifier: Apache-2.0
"""Whether a smallest clip norm helps rare classes, where the clip norm follows the records' norms.

    PYTHONPATH=. python benchmarks/evidence/clip_floors.py [--data FOLDER]

After arXiv:2506.01396. DP-SGD without momentum on digits of which 8 and 9 are rare (a tenth), at
epsilon 1. The clip norm starts at six times the median norm of a gradient, and stays there or
follows a quantile, down to a floor. Each is tuned over four learning rates by the loss of one run
on validation records; the table has three further runs on test records, with standard errors.
"""

import argparse
import os
from typing import Any, Dict, List

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import models_run
import models_tasks
import numpy as np
import tensorflow as tf

from tfdp_adaptive import rules

CLIP, RATES = 10.0, (2.7, 5.4, 10.8, 21.6)
FLOORS: Dict[str, Any] = {
    'fixed': None, 'median, no floor': (.5, 1e-4), 'median, floor .1': (.5, .1),
    'median, floor .3': (.5, .3), 'quantile .9, no floor': (.9, 1e-4),
    'quantile .9, floor .3': (.9, .3)}
RARE = 8, 9


def measured(runner: models_run.Runner) -> List[float]:
  """Loss, accuracy, accuracy of the rare classes and of the worst class, on test records."""
  x, y = runner.task.parts[2]
  found = np.argmax(runner.model(tf.constant(x), training=False), -1)
  of_class = [float(np.mean(found[y == one] == one)) for one in np.unique(y)]
  return [runner.loss(2), float(np.mean(found == y)),
          float(np.mean([of_class[one] for one in RARE])), min(of_class)]


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--data', default='../shared/data', help='folder of the real data')
  options = parser.parse_args()
  tf.config.threading.set_intra_op_parallelism_threads(1)
  tf.config.threading.set_inter_op_parallelism_threads(1)
  task = models_tasks.all_tasks(options.data, '')['skewed']()
  plan = models_run.make_plan(task, 1.0)
  print(f'{"clip norm":24}{"rate":>6}' + ''.join(
      f'{name:>18}' for name in ('loss', 'accuracy', 'rare classes', 'worst class')))
  for name, follows in FLOORS.items():
    rule = rules.dp_sgd()
    if follows is not None:
      rule = rules.quantile_clip(rule, follows[0], bounds=(follows[1], 1.0))
    runner = models_run.Runner(task, plan, rule)

    def score(rate: float) -> float:
      runner.run(rate, CLIP, models_run.TUNING_SEED)
      return runner.loss(1)

    rate = min(RATES, key=score)
    runs = []
    for seed in models_run.SEEDS:
      runner.run(rate, CLIP, seed)
      runs.append(measured(runner))
    print(f'{name:24}{rate:6g}' + ''.join(
        f'{mean:9.3f} +- {error:5.3f}' for mean, error in zip(
            np.mean(runs, 0), np.std(runs, 0, ddof=1) / len(runs)**.5)), flush=True)


if __name__ == '__main__':
  main()
