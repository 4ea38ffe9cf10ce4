# SPDX-License-Identifier: Apache-2.0
"""`tfdp.recommend` as given: what it proposes, and what that comes to on test examples.

    PYTHONPATH=. python benchmarks/recommend.py [--out FILE] [--epsilons 1,8] [TASK ...]

Every row trains what is handed over, by `fit` on the private examples, and judges it on test
examples. Beside it: the model as it is; the model trained on the public examples alone; and the
best of a grid of up to 24 settings, chosen by the test examples themselves: inputs as given or
scaled; DP-Adam at clip norm 1 or DP-SGD at clip norm 3, in medians of public gradients; four
learning rates from the start as given, or two from public weights. The grid trains with the same
steps, batches of the expected size and the noise of the plan, and its rates fall to zero.

A row that is in FILE already is not made again, so that an interrupted run goes on. The text
beside FILE has the table.
"""

import argparse
import json
import os
import time
import traceback
from typing import Any, Dict, Iterator, List

import kept
import numpy as np
import recommend_tasks
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.advice import experiment as experiment_lib
from tfdp_adaptive.advice import parts
from tfdp_adaptive.advice import settings as settings_lib
from tfdp_adaptive.advice import trial as trial_lib

SECONDS = 60.0
RATES = (.1, .3, 1.0, 3.0)  # A tenth of these from public weights.
CLIPS = {'DPAdam': 1.0, 'DPSGD': 3.0}


def evaluate(outputs: Any, task: recommend_tasks.Task) -> Dict[str, float]:
  """Returns loss and metric on the test examples."""
  judge = compat.keras.Sequential([
      compat.keras.layers.Input(outputs.shape[1:]), compat.keras.layers.Activation('linear')])
  judge.compile(loss=task.loss, metrics=list(task.metrics))
  logs = judge.evaluate(outputs, task.test[1], batch_size=len(outputs), verbose=0, return_dict=True)
  return {name: round(float(value), 4) for name, value in logs.items()}


def peers(task: recommend_tasks.Task, plan: Any, seed: int) -> Dict[str, Any]:
  """Returns test results of the public examples alone, and of the best of the grid."""
  model, (x, y) = task.build(), task.public
  made = experiment_lib.Experiment(
      model, parts.chain(model, x), task.loss, task.metrics, x, y, [plan], seed,
      settings_lib.Clock(np.inf, 0))
  private = trial_lib.Trial(model, task.loss, made.trial.rules, int(plan.batch_size))
  found: List[Any] = []
  for kind in made.kinds[:2]:
    made.try_alone(kind, lambda rates, steps: None, (0, 2))
    data, held = (tf.convert_to_tensor(made.map(kind)(part[0]))
                  for part in (task.private, task.test))
    judge = lambda weights: made.trial.judge(held, task.test[1], weights)  # pylint: disable=cell-var-from-loop
    found += [(one, losses.mean(), outputs) for one in grid(kind)
              for outputs, losses in [judge(trained(made, private, one, data, task, plan))]]
  least = min(made.alone, key=lambda kind: made.alone[kind].loss)
  held = tf.convert_to_tensor(made.map(least)(task.test[0]))
  outputs, _ = made.trial.judge(held, task.test[1], made.weights(least, 'public', None))
  best = min(found, key=lambda row: np.nan_to_num(row[1], nan=np.inf))
  return dict(alone=evaluate(outputs, task), best=evaluate(best[2], task),
              setting=f'{best[0].optimizer} {best[0].rate:g}, {best[0].inputs}, {best[0].start}')


def grid(kind: str) -> Iterator[settings_lib.Setting]:
  for start in (settings_lib.GIVEN, settings_lib.PUBLIC):
    for optimizer, clip in CLIPS.items():
      for rate in RATES[::1 if start == settings_lib.GIVEN else 2]:
        yield settings_lib.Setting(
            kind, start, optimizer, 0.0, clip, rate * (1 if start == settings_lib.GIVEN else .1))


def trained(made: experiment_lib.Experiment, private: trial_lib.Trial, one: settings_lib.Setting,
            data: Any, task: recommend_tasks.Task, plan: Any) -> Any:
  """Returns the weights after training on the private examples."""
  rates = one.rate * made.unit(one, None) * (1 - np.arange(plan.steps) / plan.steps)
  course = trial_lib.Course(
      one.rule, one.clip * made.base(one, None), rates, experiment_lib.floor(plan), plan.mechanism,
      11)
  state = private.begin(course, made.weights(one.inputs, one.start, None))
  return private.advance(course, state, data, task.private[1], np.arange(len(data)), plan.steps,
                         .9).weights


def row(task: recommend_tasks.Task, epsilon: float, seed: int, seconds: float) -> Dict[str, Any]:
  model = task.build()
  start = evaluate(model.predict(task.test[0], batch_size=1000, verbose=0), task)
  plan = tfdp.PrivacyPlan.calibrate(
      population_size=len(task.private[0]), batch_size=task.batch_size, steps=task.steps,
      target_epsilon=epsilon, target_delta=tfdp.advice.default_delta(len(task.private[0])),
      l2_norm_clip=1.0)
  beside = peers(task, plan, seed)
  began = time.monotonic(), time.process_time()
  found = tfdp.recommend(
      model, task.public, loss=task.loss, metrics=task.metrics, seed=seed, verbose=0,
      population_size=len(task.private[0]), target_epsilon=epsilon, seconds=seconds,
      batch_size=task.batch_size, steps=task.steps)
  took = time.monotonic() - began[0], time.process_time() - began[1]
  print(found, flush=True)
  made = found.model
  if found.plan is not None:
    made.compile(found.optimizer(), task.loss)
    made.fit(found.plan.batches(task.private), epochs=1, steps_per_epoch=found.plan.steps,
             verbose=0)
    if 'calibrated' in found.reasons[0]:
      found.calibrate(made)
  end = evaluate(made.predict(task.test[0], batch_size=1000, verbose=0), task)
  estimates = {one.name: round(one.loss, 4) for one in found.rows}
  return dict(task=task.name, epsilon=epsilon, seed=seed, method=found.method, start=start,
              end=end, **beside, proposed=found.reasons[0], estimates=estimates,
              seconds=[round(one, 1) for one in took], settings=dict(found.settings),
              clip=found.plan and found.plan.l2_norm_clip)


def table(rows: List[Dict[str, Any]]) -> str:
  """Returns the rows as text, and the mean excess over the best of the grid by task."""
  lines = [f'{"task":18} {"eps":>3} {"untrained":>9} {"alone":>7} {"best grid":>10} '
           f'{"recommend":>9} {"excess":>7}  {"seconds":>7}  proposed']
  excess: Dict[str, List[float]] = {}
  for one in rows:
    ends = [one[name]['loss'] for name in ('start', 'alone', 'best', 'end')]
    more = ends[3] / ends[2] - 1
    excess.setdefault(one['task'], []).append(more)
    lines.append(
        f'{one["task"]:18} {one["epsilon"]:3g} {ends[0]:9.4g} {ends[1]:7.4g} {ends[2]:10.4g} '
        f'{ends[3]:9.4g} {100 * more:6.1f}%  {one["seconds"][0]:7.0f}  '
        f'{one["proposed"].split(": ")[1]}')
  mean = 100 * np.mean([np.mean(values) for values in excess.values()])
  return '\n'.join([*lines, '', f'Mean excess over the best of the grid, by task: {mean:.1f}%', ''])


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('tasks', nargs='*', metavar='TASK')
  parser.add_argument('--data', default='../../shared/data', help='folder of the real data')
  parser.add_argument('--out', default='benchmarks/results/recommend.json')
  parser.add_argument('--epsilons', default='1,8')
  parser.add_argument('--seeds', default='0')
  parser.add_argument('--seconds', type=float, default=SECONDS)
  parser.add_argument('--processor', action='store_true',
                      help='count seconds of the processor: for a machine with other work')
  options = parser.parse_args()
  if options.processor:
    settings_lib.now = time.process_time
  tasks = recommend_tasks.all_tasks(options.data)
  for name in options.tasks or list(tasks):
    task = tasks[name]()
    for epsilon in map(float, options.epsilons.split(',')):
      for seed in map(int, options.seeds.split(',')):
        done = kept.read(options.out)
        if any((one['task'], one['epsilon'], one['seed']) == (task.name, epsilon, seed)
               for one in done):
          continue
        try:
          done.append(row(task, epsilon, seed, options.seconds))
        except Exception:  # pylint: disable=broad-except
          traceback.print_exc()
          continue
        print(json.dumps(done[-1]), flush=True)
        kept.write(options.out, done)
        with open(os.path.splitext(options.out)[0] + '.txt', 'w', encoding='utf-8') as stream:
          stream.write(table(done))


if __name__ == '__main__':
  main()
