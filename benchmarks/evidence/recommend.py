# SPDX-License-Identifier: Apache-2.0
"""`tfdp.recommend` as given: what it proposes, and what that comes to on test examples.

    PYTHONPATH=. python benchmarks/evidence/recommend.py [--out FILE] [--epsilons 1,8] [TASK ...]

Every row trains what is handed over, by `fit` on the private examples, and judges it on test
examples. Beside it:

* what is declined: the public examples alone, or the best private setting;
* the model as it is;
* plain Keras on the public examples alone: Adam at rate 0.005, scaled inputs, early stopping on a
  fifth of the examples;
* the best of a grid of 12 private settings, chosen by the test examples themselves: from the
  weights as given or from those of plain Keras, DP-Adam with clip norm 1 or DP-SGD with clip norm
  3 (in medians of public gradients), three learning rates that fall to zero.

The grid takes the steps, the expected batch size and the noise of the same plan, and the scaled
inputs, or features of frozen layers. With `--wide`, the grid has 36 settings, and beside it are
the setting with the best metric and plain Keras on the private examples.

The interval is that which `recommend` prints beside the public examples alone, or beside
the model as it is where it proposes the former. A row that is in FILE already is not made again,
so that an interrupted run goes on. The text beside FILE has the table. `--page` prints the table of
`docs/evidence.md` and runs nothing.
"""

import argparse
import dataclasses
import functools
import json
import math
import os
import time
import traceback
from typing import Any, Dict, List, Sequence, Tuple
from unittest import mock

import kept
import numpy as np
import recommend_tasks
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive import rules
from tfdp_adaptive.advice import inputs as inputs_lib
from tfdp_adaptive.advice import recommend as recommend_lib
from tfdp_adaptive.advice import settings as settings_lib
from tfdp_adaptive.advice import trial as trial_lib

SECONDS = 60.0
RULES = 4  # Number of the rules of `recommend` that a row was made by, see docs/evidence.md.
KERAS_RATE = 5e-3
SETTINGS = [  # Start from public weights, optimizer, clip norm, rates.
    (False, 'adam', 1.0, (.3, 1.0, 3.0)), (False, 'sgd', 3.0, (.3, 1.0, 3.0)),
    (True, 'adam', 1.0, (.01, .03, .1)), (True, 'sgd', 3.0, (.01, .03, .1))]


def evaluate(outputs: Any, task: recommend_tasks.Task) -> Dict[str, float]:
  """Returns loss and metric on the test examples."""
  judge = compat.keras.Sequential([
      compat.keras.layers.Input(outputs.shape[1:]), compat.keras.layers.Activation('linear')])
  judge.compile(loss=task.loss, metrics=list(task.metrics))
  logs = judge.evaluate(outputs, task.test[1], batch_size=len(outputs), verbose=0, return_dict=True)
  return {name: round(float(value), 4) for name, value in logs.items()}


def scaled(task: recommend_tasks.Task) -> recommend_tasks.Task:
  """Returns the task with inputs scaled by the public examples, if they can be."""
  maps = inputs_lib.all_of(task.public[0])
  scale = maps.get(inputs_lib.SCALED, maps[inputs_lib.AS_GIVEN])
  return task._replace(**{name: (scale(getattr(task, name)[0]), getattr(task, name)[1])
                          for name in ('public', 'private', 'test')})


def behind_frozen(task: recommend_tasks.Task) -> recommend_tasks.Task:
  """Returns the task of the layers that train, by features of the frozen ones in front of them."""
  model, x = task.build(), task.public[0]
  part = functools.partial(inputs_lib.behind_frozen, inputs_lib.chain(model, x), model)
  trained, _, front = part(x)
  given = trained.get_weights()

  def build() -> Any:
    trained.set_weights(given)
    return trained

  return task if not front else task._replace(build=build, **{
      name: (part(getattr(task, name)[0])[1], getattr(task, name)[1])
      for name in ('public', 'private', 'test')})


def alone(task: recommend_tasks.Task) -> List[np.ndarray]:
  """Returns weights that plain Keras learned from the public examples."""
  (x, y), model = task.public, task.build()
  rows = np.random.default_rng(1).permutation(len(x))
  held, seen = rows[:len(x) // 5], rows[len(x) // 5:]
  model.compile(compat.keras.optimizers.Adam(KERAS_RATE), task.loss)
  stop = compat.keras.callbacks.EarlyStopping(patience=4, restore_best_weights=True)
  model.fit(x[seen], y[seen], batch_size=max(32, len(seen) // 64), epochs=200, verbose=0,
            callbacks=[stop], validation_data=(x[held], y[held]), validation_freq=5)
  return model.get_weights()


def peers(task: recommend_tasks.Task, plan: Any, weights: List[np.ndarray],
          factors: Sequence[float]) -> Dict[str, Any]:
  """Returns test results without training, of the public examples alone, and of the grid.

  Args:
    task: The task.
    plan: The plan of the grid.
    weights: What plain Keras learned from the public examples.
    factors: Of the learning rates of the grid. With several, there are also the results of the
      setting with the best metric, and of plain Keras on the private examples.
  """
  model = task.build()
  start = evaluate(model.predict(task.test[0], batch_size=1000, verbose=0), task)
  task = scaled(task)
  given = [v.numpy() for v in model.trainable_variables]
  model.set_weights(weights)
  public = [v.numpy() for v in model.trainable_variables]
  x, y = task.public
  trial = trial_lib.Trial(model, task.loss, {'sgd': rules.dp_sgd()}, int(plan.batch_size))
  held, data = tf.convert_to_tensor(task.test[0]), tf.convert_to_tensor(task.private[0])
  found = []
  for from_public, rule, clip, rates in SETTINGS if factors else ():
    weights = public if from_public else given
    norm = float(np.median(trial.norms(tf.convert_to_tensor(x), y, weights, 'sgd')))
    trial.rules['adam'] = rules.dp_adam(epsilon=1e-3 * norm / math.sqrt(trial.size))
    unit = 1 / (norm * math.sqrt(plan.steps) * (norm if rule == 'sgd' else 1))
    for rate in np.outer(factors, rates).ravel():
      falling = rate * unit * (1 - np.arange(plan.steps) / plan.steps)
      course = trial_lib.Course(
          rule, clip * norm, falling, plan.noise_multiplier / plan.batch_size, plan.mechanism, 11)
      state = trial.advance(course, trial.begin(course, weights), data, task.private[1],
                            np.arange(len(data)), plan.steps, .9)
      outputs, losses = trial.judge(held, task.test[1], state.weights)
      name = f'{rule} {rate:g}' + ' from public' * from_public
      found.append((float(np.nan_to_num(losses.mean(), nan=np.inf)), outputs, name))
  outputs, _ = trial.judge(held, task.test[1], public)
  done: Dict[str, Any] = dict(start=start, alone=evaluate(outputs, task))
  if found:
    best = min(found, key=lambda row: row[0])
    done.update(best=evaluate(best[1], task), setting=best[2],
                grid={row[2]: round(row[0], 4) for row in found})
  if len(factors) > 1:
    ends = [evaluate(outputs, task) for _, outputs, _ in found]
    done['tuned'] = max(ends, key=lambda end: end[task.metrics[0]])
    model.set_weights(alone(task._replace(public=task.private)))
    done['not private'] = evaluate(model.predict(task.test[0], batch_size=1000, verbose=0), task)
  return done


def plan_of(task: recommend_tasks.Task, epsilon: float) -> Any:
  return tfdp.PrivacyPlan.calibrate(
      population_size=len(task.private[0]), batch_size=task.batch_size, steps=task.steps,
      target_epsilon=epsilon, target_delta=tfdp.advice.default_delta(len(task.private[0])),
      l2_norm_clip=1.0)


def recommended(task: recommend_tasks.Task, epsilon: float, seed: int, seconds: float
                ) -> Dict[str, Any]:
  """Returns test results of what is recommended, and of what it declines.

  Where a private setting is proposed, it declines the public examples alone; else the best private
  setting.
  """
  model, made, found = task.build(), recommend_lib.proposed, {}
  weights, began = model.get_weights(), settings_lib.now()
  trainable = [layer.trainable for layer in model.layers]

  def both(origin: Any, search: Any) -> Any:
    found['proposed'] = made(origin, search)
    found['took'] = settings_lib.now() - began
    with mock.patch.object(recommend_lib, '_ERRORS', -1e9):
      found['declined'] = made(origin, search)
    if found['proposed'].plan is not None:
      kind = search.kinds[0]
      found['declined'] = dataclasses.replace(
          found['proposed'], plan=None, _origin=origin._replace(
              inputs=search.experiment.map(kind),
              weights=search.experiment.weights(kind, settings_lib.PUBLIC, None)))
    return found['proposed']

  with mock.patch.object(recommend_lib, 'proposed', both):
    tfdp.recommend(
        model, task.public, loss=task.loss, metrics=task.metrics, seed=seed, verbose=0,
        population_size=len(task.private[0]), target_epsilon=epsilon, seconds=seconds,
        batch_size=task.batch_size, steps=task.steps)

  def trained(one: Any) -> Dict[str, float]:
    model.set_weights(weights)
    for layer, value in zip(model.layers, trainable):  # The other one may have frozen some.
      layer.trainable = value
    private = one.model
    if one.plan is not None:
      private.compile(one.optimizer(), task.loss)
      private.fit(one.plan.batches(task.private), epochs=1, steps_per_epoch=one.plan.steps,
                  verbose=0)
      if 'calibrated' in one.reasons[0]:
        one.calibrate(private)
    return evaluate(private.predict(task.test[0], batch_size=1000, verbose=0), task)

  one = found['proposed']
  print(one, flush=True)
  declined = trained(found['declined'])
  return dict(end=trained(one), proposed=one.reasons[0].split(': ')[1], declined=declined,
              estimates={row.name: round(row.loss, 4) for row in one.rows},
              interval=round(one.rows[1].interval or one.rows[0].interval, 4),
              seconds=[seconds, round(found['took'], 1)], settings=dict(one.settings),
              clip=one.plan and one.plan.l2_norm_clip, rules=RULES)


def table(rows: List[Dict[str, Any]], beside: Dict[Tuple[Any, ...], Dict[str, Any]]) -> str:
  """Returns the rows as text, and the mean excess over the best of the grid by task."""
  lines = [f'{"task":16} {"eps":>3} {"seed":>4} {"untrained":>9} {"alone":>8} {"best grid":>9} '
           f'{"recommend":>9} {"declined":>8} {"excess":>7}  {"seconds":>7} rules  proposed']
  excess: Dict[str, List[float]] = {}
  worse = []
  for one in rows:
    peer = beside.get((one['task'], one['epsilon']), {})
    ends = [*(peer.get(name, {}) for name in ('start', 'alone', 'best')), one['end'],
            one.get('declined', {})]
    losses = [end.get('loss', np.nan) for end in ends]
    more = losses[3] / losses[2] - 1
    if np.isfinite(more):
      excess.setdefault(one['task'], []).append(more)
    if losses[3] > np.nanmin(losses[:2]) + one.get('interval', np.inf):
      worse.append(f'{one["task"]} (epsilon {one["epsilon"]:g}, seed {one["seed"]})')
    wide = list(zip(ends, (9, 8, 9, 9, 8)))
    columns = lambda name: ' '.join(f'{end.get(name, np.nan):{width}.4g}' for end, width in wide)
    lines.append(f'{one["task"]:16} {one["epsilon"]:3g} {one["seed"]:4} {columns("loss")} '
                 f'{100 * more:6.1f}%  {one["seconds"][1]:3.0f}/{one["seconds"][0]:<3.0f} '
                 f'{one["rules"]:5}  {one["proposed"]}')
    lines += [f'{"  " + name:25} {columns(name)}' for name in one['end'] if name != 'loss']
  if excess:
    mean = 100 * np.mean([np.mean(values) for values in excess.values()])
    lines.append(f'\nMean excess over the best of the grid, by task: {mean:.1f}%')
  known = sum('interval' in one for one in rows)
  lines.append(f'Worse than untrained or alone by more than the interval, in {known} rows: '
               + (', '.join(worse) or 'none'))
  return '\n'.join([*lines, ''])


def page(rows: List[Dict[str, Any]], beside: Dict[Tuple[Any, ...], Dict[str, Any]]) -> str:
  """Returns the table of `docs/evidence.md`: a line for a task at an epsilon, with all seeds."""
  def ends(found: List[Dict[str, float]]) -> str:
    texts = [f'{one["loss"]:.4g}' + ''.join(
        f' ({value:.3f})' for name, value in one.items() if name != 'loss') for one in found if one]
    return ' / '.join(texts)

  lines = ['| task | epsilon | untrained | public alone, plain Keras | best of the grid '
           '| test loss | declined | proposed | rules |', '|' + 9 * '---|']
  seeds: Dict[Tuple[Any, ...], List[Dict[str, Any]]] = {}
  for one in sorted(rows, key=lambda one: (one['epsilon'], one['task'], one['seed'])):
    seeds.setdefault((one['task'], one['epsilon']), []).append(one)
  for (task, epsilon), found in seeds.items():
    peer = beside.get((task, epsilon), {})
    proposed = dict.fromkeys(one['proposed'].rstrip('.') for one in found)
    cells = [task, f'{epsilon:g}', *(ends([peer.get(name, {})]) for name in (
        'start', 'alone', 'best')), *(ends([one[name] for one in found]) for name in (
            'end', 'declined')), ' / '.join(proposed),
             ' / '.join(str(one['rules']) for one in found)]
    lines.append('| ' + ' | '.join(cells) + ' |')
  return '\n'.join([*lines, ''])


def peers_by_task(path: str) -> Dict[Tuple[Any, ...], Dict[str, Any]]:
  return {(one['task'], one['epsilon']): one for one in kept.read(path)}


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('tasks', nargs='*', metavar='TASK')
  parser.add_argument('--data', default='../../shared/data', help='folder of the real data')
  parser.add_argument('--out', default='benchmarks/results/recommend.json')
  parser.add_argument('--epsilons', default='1,8')
  parser.add_argument('--seeds', default='0')
  parser.add_argument('--seconds', type=float, default=SECONDS)
  parser.add_argument('--peers', default='benchmarks/results/recommend_peers.json',
                      help='file of the results beside the recommendations')
  parser.add_argument('--only-peers', action='store_true')
  parser.add_argument('--no-peers', action='store_true')
  parser.add_argument('--no-grid', action='store_true')
  parser.add_argument('--wide', action='store_true', help='a grid of 36 settings')
  parser.add_argument('--page', action='store_true', help='print the table of docs/evidence.md')
  parser.add_argument('--processor', action='store_true',
                      help='count seconds of the processor: for a machine with other work')
  options = parser.parse_args()
  if options.page:
    print(page(kept.read(options.out), peers_by_task(options.peers)), end='')
    return
  if options.processor:
    settings_lib.now = time.process_time
  tasks = recommend_tasks.all_tasks(options.data)
  for name in options.tasks or list(tasks):
    task = tasks[name]()
    head = functools.lru_cache(1)(lambda: behind_frozen(task))  # pylint: disable=cell-var-from-loop
    public = functools.lru_cache(1)(lambda: alone(scaled(head())))  # pylint: disable=cell-var-from-loop
    factors = () if options.no_grid else (1.0, .1, 10.0) if options.wide else (1.0,)
    for epsilon in map(float, options.epsilons.split(',')):
      key = dict(task=task.name, epsilon=epsilon)
      wanted: List[Tuple[str, Dict[str, Any], Any]] = []
      if not options.no_peers:
        wanted = [(options.peers, key, lambda: peers(
            head(), plan_of(task, epsilon), public(), factors))]  # pylint: disable=cell-var-from-loop
      if not options.only_peers:
        wanted += [(options.out, dict(key, seed=seed), lambda seed=seed: recommended(
            task, epsilon, seed, options.seconds)) for seed in map(int, options.seeds.split(','))]  # pylint: disable=cell-var-from-loop
      for path, key, make in wanted:
        if any(key.items() <= one.items() for one in kept.read(path)):
          continue
        try:
          done = dict(key, **make())
        except Exception:  # pylint: disable=broad-except
          traceback.print_exc()
          continue
        print(json.dumps(done), flush=True)
        kept.write(path, [*kept.read(path), done])
      if not options.only_peers:
        with open(os.path.splitext(options.out)[0] + '.txt', 'w', encoding='utf-8') as stream:
          stream.write(table(kept.read(options.out), peers_by_task(options.peers)))


if __name__ == '__main__':
  main()
