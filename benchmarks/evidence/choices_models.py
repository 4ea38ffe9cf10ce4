# SPDX-License-Identifier: Apache-2.0
"""Every method tuned over twelve settings, on models with more than one layer.

    PYTHONPATH=. python benchmarks/evidence/choices_models.py [--data FOLDER] [--packages FOLDER]
        [TASK ...]
    PYTHONPATH=. python benchmarks/evidence/choices_models.py --table

Settings are chosen by one run on validation records; losses are of three further runs, on test
records. Rates fall linearly to zero. FILE keeps what is done.
"""

import argparse
import os
import time
from typing import Any, Dict, Iterator, List

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import choices
import kept
import models_run
import models_tasks
import numpy as np
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive.advice import trial

PUBLIC = 300
EPSILONS = (1.0, 8.0)
BANDS = 16
GAIN = .9  # Banded noise is tuned where it has at most so much of the error.


def norm(task: models_tasks.Task) -> float:
  """The median norm of a gradient at the start, of public records."""
  x, y = (part[:PUBLIC] for part in task.parts[1])
  rules = dict(sgd=tfdp.rules.dp_sgd())
  made = trial.Trial(task.build(), task.loss, rules)
  return float(np.median(made.norms(tf.constant(x), y, made.start, 'sgd')))


def error(plan: tfdp.PrivacyPlan) -> float:
  return plan.noise_multiplier * plan.mechanism.rmse(plan.steps)


def tuned(task: models_tasks.Task, epsilon: float, method: str, bands: int, size: float
          ) -> Dict[str, Any]:
  plan, made = models_run.make_plan(task, epsilon, bands), models_run.METHODS[method]
  parameters = sum(int(np.prod(v.shape)) for v in task.build().trainable_variables)
  rule = made.make(plan.noise_multiplier / task.batch_size, size, parameters)
  runner = models_run.Runner(task, plan, rule, made.scaled)
  clips = made.clips(size, parameters, task.batch_size)
  return dict(models_run.tuned(runner, models_run.RATES * made.rate, clips), rmse=error(plan))


def rows(task: models_tasks.Task, done: List[Dict[str, Any]], epsilons: Any
         ) -> Iterator[Dict[str, Any]]:
  start, size = models_run.evaluate(task, task.build(), 2), norm(task)
  for epsilon in epsilons:
    wanted = [(method, 1) for method in models_run.METHODS]
    least = error(models_run.make_plan(task, epsilon))
    if error(models_run.make_plan(task, epsilon, BANDS)) < GAIN * least:
      wanted += [('DPSGD', BANDS), ('DPAdam', BANDS)]
    for method, bands in wanted:
      key = dict(task=task.name, epsilon=epsilon, method=method, bands=bands)
      if not any(key.items() <= one.items() for one in done):
        yield dict(key, start=start, **tuned(task, epsilon, method, bands, size))


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('tasks', nargs='*', metavar='TASK')
  parser.add_argument('--data', default='../shared/data', help='folder of the real data')
  parser.add_argument('--packages', default='build/data', help='folder of the packages')
  parser.add_argument('--out', default='benchmarks/results/choices_models.json')
  parser.add_argument('--epsilons', type=float, nargs='+', default=EPSILONS)
  parser.add_argument('--table', action='store_true', help='print what is in the file')
  options = parser.parse_args()
  done = kept.read(options.out)
  if options.table:
    print(choices.table(done))
    return
  tf.config.threading.set_intra_op_parallelism_threads(1)
  tf.config.threading.set_inter_op_parallelism_threads(1)
  tasks = models_tasks.all_tasks(options.data, options.packages)
  if set(options.tasks) - set(tasks):
    parser.error(f'tasks are {", ".join(tasks)}')
  for name in options.tasks or list(tasks):
    task = tasks[name]()
    for one in rows(task, done, options.epsilons):
      done.append(one)
      print('{task:32} {epsilon:g} {method:10} {bands:3} {loss:.4f} of {start:.4f} {clip:.3g} '
            '{rate:.3g}'.format(**one), f'{time.process_time():.0f} s', flush=True)
      kept.write(options.out, done)


if __name__ == '__main__':
  main()
