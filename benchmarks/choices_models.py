# SPDX-License-Identifier: Apache-2.0
"""`tfdp.recommend` as given, beside every method tuned, on models with more than one layer.

    PYTHONPATH=. python benchmarks/choices_models.py [--data FOLDER] [--packages FOLDER] [TASK ...]
    PYTHONPATH=. python benchmarks/choices_models.py --table

Every method is tuned over twelve settings by one run on validation records, and runs three times
more, on test records. What is recommended is not tuned, and runs three times. Rates fall linearly
to zero. Public gradients are those of 300 validation records. FILE keeps what is done.
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

PUBLIC = 300
EPSILONS = (1.0, 8.0)
BANDS = 16
GAIN = .9  # Banded noise is tuned where it has at most so much of the error.


def known(task: models_tasks.Task) -> Dict[str, Any]:
  x, y = (part[:PUBLIC] for part in task.parts[1])
  return tfdp.public_gradients(task.build(), x, y, loss=task.loss)


def error(plan: tfdp.PrivacyPlan) -> float:
  return plan.noise_multiplier * plan.mechanism.rmse(plan.steps)


def tuned(task: models_tasks.Task, epsilon: float, method: str, bands: int, seen: Dict[str, Any]
          ) -> Dict[str, Any]:
  plan, made = models_run.make_plan(task, epsilon, bands), models_run.METHODS[method]
  parameters = seen['parameters']
  norm = float(np.median(np.linalg.norm(seen['gradients'], axis=1))) * (
      parameters / seen['gradients'].shape[1])**.5
  rule = made.make(plan.noise_multiplier / task.batch_size, norm, parameters)
  runner = models_run.Runner(task, plan, rule, made.scaled)
  clips = made.clips(norm, parameters, task.batch_size)
  return dict(models_run.tuned(runner, models_run.RATES * made.rate, clips), rmse=error(plan))


def recommended(task: models_tasks.Task, epsilon: float, seen: Dict[str, Any]) -> Dict[str, Any]:
  """What is recommended, as given."""
  began = time.process_time()
  found = tfdp.recommend(
      population_size=len(task.parts[0][0]), batch_size=task.batch_size, steps=task.steps,
      target_epsilon=epsilon, target_delta=models_run.DELTA, **seen)
  seconds = time.process_time() - began
  rule, scaled, clip, rate = choices.made(found)
  runner = models_run.Runner(task, found.plan, rule, scaled)
  runs = models_run.repeated(runner, rate, clip)
  return dict(chosen=found.method, bands=getattr(found.plan.mechanism, 'bands', 1),
              loss=float(np.mean(runs)), runs=runs, clip=clip, rate=rate,
              seconds=round(seconds, 1), simulated=found.tried[0].loss, simulated_start=found.start,
              helps=found.tried[0].loss < found.start)


def rows(task: models_tasks.Task, done: List[Dict[str, Any]], epsilons: Any
         ) -> Iterator[Dict[str, Any]]:
  start = models_run.evaluate(task, task.build(), 2)
  seen = known(task)
  have = lambda key: [one for one in done if key.items() <= one.items()]
  for epsilon in epsilons:
    key = dict(task=task.name, epsilon=epsilon, method='as given')
    if not have(key):
      yield dict(key, start=start, **recommended(task, epsilon, seen))
    given = have(key)[0]
    wanted = [(method, 1) for method in models_run.METHODS]
    least = error(models_run.make_plan(task, epsilon))
    if error(models_run.make_plan(task, epsilon, BANDS)) < GAIN * least:
      wanted += [('DPSGD', BANDS), ('DPAdam', BANDS)]
    if not any(method == given['chosen'] and (bands > 1) == (given['bands'] > 1)
               for method, bands in wanted):
      wanted.append((given['chosen'], given['bands']))
    for method, bands in wanted:
      key = dict(task=task.name, epsilon=epsilon, method=method, bands=bands)
      if not have(key):
        yield dict(key, start=start, **tuned(task, epsilon, method, bands, seen))


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('tasks', nargs='*', metavar='TASK')
  parser.add_argument('--data', default='../shared/data', help='folder of the real data')
  parser.add_argument('--packages', default='build/data', help='folder of the packages')
  parser.add_argument('--out', default='benchmarks/results/choices_models.json')
  parser.add_argument('--epsilons', type=float, nargs='+', default=EPSILONS)
  parser.add_argument('--given', action='store_true', help='print what is recommended, as given')
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
    if options.given:
      for epsilon in options.epsilons:
        print(name, epsilon, models_run.evaluate(task, task.build(), 2),
              recommended(task, epsilon, known(task)), flush=True)
      continue
    for one in rows(task, done, options.epsilons):
      done.append(one)
      print('{task:32} {epsilon:g} {method:10} {bands:3} {loss:.4f} of {start:.4f} {clip:.3g} '
            '{rate:.3g}'.format(**one), f'{time.process_time():.0f} s', flush=True)
      kept.write(options.out, done)


if __name__ == '__main__':
  main()
