# SPDX-License-Identifier: Apache-2.0
"""What the less common methods are for: each tuned, beside DP-SGD and DP-Adam, on Keras models.

    PYTHONPATH=. python benchmarks/evidence/choices_newer.py [--data FOLDER] [--packages FOLDER]
        [TASK ...]
    PYTHONPATH=. python benchmarks/evidence/choices_newer.py --table

As in `choices_models.py`: twelve settings by one run on validation records, and three further runs
on test records, with independent noise at epsilon 1. Methods that need public records get the 300
validation records that are public. FILE keeps what is done.
"""

import argparse
import os
import time
from typing import Any, Callable, Dict, List, NamedTuple

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import choices_models
import kept
import models_run
import models_tasks
import numpy as np
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import rules
from tfdp_adaptive import weights

EPSILON = 1.0
TASKS = 'diamonds', 'fine_tuned', 'skewed'
COMMON = ('DPSGD', 'DPAdam', 'DPAdamSTP')


class About(NamedTuple):
  """What methods are made of: the noise per coordinate and its unit, and the task."""

  floor: float  # Noise of a coordinate of the mean, in clip norms.
  norm: float  # The median norm of a record's gradient.
  task: models_tasks.Task
  plan: tfdp.PrivacyPlan
  variables: int


class Newer(NamedTuple):
  """`rate` is times the rates of the grid: 10 for directions that are gradients."""

  make: Callable[[About], Any]
  rate: float
  public: bool = False


def sgd(about: About) -> Any:
  del about
  return rules.dp_sgd(.9)


METHODS: Dict[str, Newer] = {
    'quantile, DP-SGD': Newer(lambda a: rules.quantile_clip(sgd(a)), 10),
    'slack, DP-SGD': Newer(lambda a: rules.slack_clip(sgd(a), rules.slack_buckets(
        a.task.batch_size, a.plan.noise_multiplier)), 10),
    'per layer, DP-SGD': Newer(lambda a: rules.grouped(sgd(a), list(range(a.variables))), 10),
    'AUTO-S, DP-SGD': Newer(lambda a: rules.with_clipping(sgd(a), weights.AutoS()), 10),
    'DP-Shampoo': Newer(lambda a: rules.dp_shampoo(epsilon=a.floor), 1),
    'DP-SOAP': Newer(lambda a: rules.dp_soap(epsilon=a.floor), 1),
    'DP-Muon': Newer(lambda a: rules.dp_muon(epsilon=a.floor), 1),
    'DP-Adam-JME': Newer(lambda a: rules.dp_adam_jme(epsilon=a.floor), 1),
    'DP-KFC': Newer(lambda a: rules.dp_kfc(.9), 10, True),
    'DP2-RMSprop': Newer(lambda a: rules.dp2_rmsprop(
        a.task.steps // 10, a.task.steps // 10, epsilon=a.floor), 10),
    'AdaDPS': Newer(lambda a: rules.adadps(epsilon=.1), 1, True),
    'SideInformationAdam': Newer(lambda a: rules.side_information_adam(epsilon=a.floor), 1, True),
    'PDA-DPMD': Newer(lambda a: rules.pda_dpmd(a.task.steps), 10, True),
    'PDP-SGD': Newer(lambda a: rules.pdp_sgd(50), 10, True)}


def tuned(task: models_tasks.Task, method: str, norm: float) -> Dict[str, Any]:
  made, plan = METHODS[method], models_run.make_plan(task, EPSILON)
  about = About(plan.noise_multiplier / task.batch_size, norm, task, plan,
                len(task.build().trainable_variables))
  public = None
  if made.public:
    public = tuple(part[:choices_models.PUBLIC] for part in task.parts[1])
  runner = models_run.Runner(task, plan, made.make(about), public=public)
  return models_run.tuned(runner, models_run.RATES * made.rate, norm * np.array(models_run.CLIPS))


def table(done: List[Dict[str, Any]], common: List[Dict[str, Any]]) -> str:
  """A line per method: mean test losses and standard errors."""
  tasks = list(dict.fromkeys(one['task'] for one in done))
  rows = [one for one in common if one['epsilon'] == EPSILON and one['bands'] == 1
          and one['method'] in COMMON] + done
  lines = [f'{"":22}' + ''.join(f'{task:>34}' for task in tasks)]
  for method in dict.fromkeys(one['method'] for one in rows):
    line = f'{method:22}'
    for task in tasks:
      found = [one for one in rows if (one['task'], one['method']) == (task, method)]
      error = np.std(found[0]['runs'], ddof=1) / len(found[0]['runs'])**.5 if found else 0
      line += f'{found[0]["loss"]:22.4f} +- {error:.4f}   ' if found else ' ' * 34
    lines.append(line.rstrip())
  start = {one['task']: one['start'] for one in done}
  return '\n'.join([*lines, f'{"untrained":22}' + ''.join(
      f'{start[task]:22.4f}{"":12}' for task in tasks).rstrip()])


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('tasks', nargs='*', metavar='TASK', default=TASKS)
  parser.add_argument('--data', default='../shared/data', help='folder of the real data')
  parser.add_argument('--packages', default='build/data', help='folder of the packages')
  parser.add_argument('--out', default='benchmarks/results/choices_newer.json')
  parser.add_argument('--table', action='store_true', help='print what is in the file')
  options = parser.parse_args()
  done = kept.read(options.out)
  if options.table:
    print(table(done, kept.read('benchmarks/results/choices_models.json')))
    return
  tf.config.threading.set_intra_op_parallelism_threads(1)
  tf.config.threading.set_inter_op_parallelism_threads(1)
  tfdp.experimental('dp_adam_jme', 'dp_muon', 'dp_shampoo', 'pdp_sgd')
  tasks = models_tasks.all_tasks(options.data, options.packages)
  for name in options.tasks:
    task = tasks[name]()
    start = models_run.evaluate(task, task.build(), 2)
    norm = choices_models.norm(task)
    for method in METHODS:
      key = dict(task=task.name, epsilon=EPSILON, method=method)
      if any(key.items() <= one.items() for one in done):
        continue
      done.append(dict(key, start=start, **tuned(task, method, norm)))
      print('{task:32} {method:22} {loss:.4f} of {start:.4f} {clip:.3g} {rate:.3g}'.format(
          **done[-1]), f'{time.process_time():.0f} s', flush=True)
      kept.write(options.out, done)


if __name__ == '__main__':
  main()
