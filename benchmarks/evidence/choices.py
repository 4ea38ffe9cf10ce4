# SPDX-License-Identifier: Apache-2.0
"""Every method tuned, on tasks that packages bundle.

    PYTHONPATH=. python benchmarks/evidence/choices.py --packages FOLDER [--out FILE] [TASK ...]
    PYTHONPATH=. python benchmarks/evidence/choices.py --table [--out FILE]

`evidence_packages` says what FOLDER needs. Every method is tuned over 54 settings by one run on
validation records, and runs three times more, on test records. Rates fall linearly to zero. FILE
keeps what is done; start several with tasks and files of their own, and join these.
"""

import argparse
import os
from typing import Any, Dict, List

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import evidence
import evidence_models as models
import evidence_packages
import evidence_tasks
import kept
import numpy as np

import tfdp_adaptive as tfdp

SEEDS = 11, 12, 13
RATES = np.geomspace(1e-4, 1, 9)


def tuned(task: evidence_tasks.Task, epsilon: float, method: str, bands: int) -> Dict[str, Any]:
  """The method at the best settings of its grid."""
  plan = evidence.make_plan(task, epsilon, bands)
  facts = evidence.pilot(task)
  size = sum(w[0].size for w in models.start(task, 1))
  tried = evidence.grid(method, facts['norm'], plan.noise_multiplier / task.batch_size, size,
                        task.batch_size)
  tried = tried._replace(rates=RATES * (10 if method == 'DPSGD' else 1))
  found = evidence.search(task, tried, plan, bands, last=0.0, seeds=SEEDS)
  return dict(loss=found.loss, runs=found.runs, clip=found.clip, rate=found.rate, more=found.more,
              rmse=plan.noise_multiplier * plan.mechanism.rmse(task.steps))


def rows(task: evidence_tasks.Task, done: List[Dict[str, Any]]) -> Any:
  start = float(models.evaluate(task, models.start(task, 1), 2)[0])
  for epsilon in task.epsilons:
    least = np.inf
    for bands in (1, min(evidence.BANDS, len(task.parts[0][0]) // task.batch_size)):
      for method in evidence.METHODS:
        key = dict(task=task.name, epsilon=epsilon, method=method, bands=bands)
        old = [one for one in done if key.items() <= one.items()]
        if old:
          least = min(least, old[0]['rmse'])
          continue
        if bands > 1 and evidence.make_plan(task, epsilon, bands).noise_multiplier * (
            tfdp.mechanisms.BandedToeplitz(bands, task.steps).rmse(task.steps)) > least:
          continue
        one = dict(key, start=start, **tuned(task, epsilon, method, bands))
        least = min(least, one['rmse'])
        yield one


def table(done: List[Dict[str, Any]]) -> str:
  """A line per task and epsilon: the loss of every method, and the best one."""
  label = lambda one: one['method'] + (', banded' if one['bands'] > 1 else '')
  names = list(dict.fromkeys(map(label, done)))
  lines = [f'{"task":32} {"eps":>3} {"start":>6} ' + ''.join(f'{name:>18}' for name in names)]
  for task, epsilon in dict.fromkeys((one['task'], one['epsilon']) for one in done):
    group = {label(one): one for one in done if (one['task'], one['epsilon']) == (task, epsilon)}
    best = min(one['loss'] for one in group.values())
    lines.append(f'{task:32} {epsilon:3g} {next(iter(group.values()))["start"]:6.4f} ' + ''.join(
        f'{group[name]["loss"]:17.4f}{"*" if group[name]["loss"] == best else " "}'
        if name in group else ' ' * 18 for name in names).rstrip())
  return '\n'.join(lines)


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('tasks', nargs='*', metavar='TASK')
  parser.add_argument('--packages', default='build/data', help='folder of the packages')
  parser.add_argument('--out', default='benchmarks/results/choices.json')
  parser.add_argument('--table', action='store_true', help='print what is in the file')
  options = parser.parse_args()
  done = kept.read(options.out)
  if options.table:
    print(table(done))
    return
  tasks = evidence_packages.all_tasks(options.packages)
  if set(options.tasks) - set(tasks):
    parser.error(f'tasks are {", ".join(tasks)}')
  for name in options.tasks or list(tasks):
    for one in rows(tasks[name](), done):
      done.append(one)
      print('{task:24} {epsilon:g} {method:14} {bands:3} {loss:.4f} of {start:.4f} {clip:.3g} '
            '{rate:.3g}'.format(**one), flush=True)
      kept.write(options.out, done)


if __name__ == '__main__':
  main()
