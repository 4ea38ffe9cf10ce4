# SPDX-License-Identifier: Apache-2.0
"""`tfdp.recommend` as given: what it proposes, and what that comes to on test examples.

    PYTHONPATH=. python benchmarks/recommend.py [--out FILE] [--epsilons E ...] [TASK ...]

Every row trains what is handed over, by `fit` on the private examples, and judges it on test
examples. Beside it: the model as it is, and the model trained on the public examples alone.
"""

import argparse
import json
import time
import traceback
from typing import Any, Dict

import kept
import recommend_tasks

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat

SECONDS = 120.0


def evaluate(model: Any, task: recommend_tasks.Task) -> Dict[str, float]:
  """Returns loss and metric on the test examples."""
  outputs = model.predict(task.test[0], batch_size=1000, verbose=0)
  judge = compat.keras.Sequential([
      compat.keras.layers.Input(outputs.shape[1:]), compat.keras.layers.Activation('linear')])
  judge.compile(loss=task.loss, metrics=list(task.metrics))
  logs = judge.evaluate(outputs, task.test[1], batch_size=len(outputs), verbose=0, return_dict=True)
  return {name: round(float(value), 4) for name, value in logs.items()}


def alone(task: recommend_tasks.Task) -> Dict[str, float]:
  """Trains on the public examples alone by plain Keras: scaled inputs, early stopping."""
  keras = compat.keras
  x, y = task.public
  axis = -1 if x.ndim == 2 else None
  scale = keras.layers.Normalization(axis=axis)
  scale.adapt(x)
  best: Any = None
  for layers in ((), (scale,)):
    for rate in (3e-3, 3e-2):
      model = keras.Sequential([keras.layers.Input(x.shape[1:]), *layers, *task.build().layers])
      model.compile(keras.optimizers.Adam(rate), task.loss)
      stop = keras.callbacks.EarlyStopping(patience=8, restore_best_weights=True)
      kept = len(x) // 5
      history = model.fit(x[kept:], y[kept:], validation_data=(x[:kept], y[:kept]), epochs=80,
                          callbacks=[stop], verbose=0)
      least = min(history.history['val_loss'])
      if best is None or least < best[0]:
        best = least, model
  return evaluate(best[1], task)


def row(task: recommend_tasks.Task, epsilon: float, seed: int, seconds: float) -> Dict[str, Any]:
  model = task.build()
  start, plain = evaluate(model, task), alone(task)
  began = time.monotonic()
  found = tfdp.recommend(
      model, task.public, loss=task.loss, metrics=task.metrics, seed=seed, verbose=0,
      population_size=len(task.private[0]), target_epsilon=epsilon, seconds=seconds,
      batch_size=task.batch_size, steps=task.steps)
  took = time.monotonic() - began
  print(found, flush=True)
  made = found.model
  if found.plan is not None:
    made.compile(found.optimizer(), task.loss)
    made.fit(found.plan.batches(task.private), epochs=1, steps_per_epoch=found.plan.steps,
             verbose=0)
    if 'calibrated' in found.reasons[0]:
      found.calibrate(made)
  end = evaluate(made, task)
  rows = {one.name: (round(one.loss, 4), one.metric and round(one.metric, 4))
          for one in found.rows}
  return dict(task=task.name, epsilon=epsilon, seed=seed, method=found.method, start=start,
              alone=plain, end=end, proposed=found.reasons[0], rows=rows, seconds=round(took, 1),
              settings={k: v for k, v in found.settings.items()},
              clip=found.plan and found.plan.l2_norm_clip)


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('tasks', nargs='*', metavar='TASK')
  parser.add_argument('--data', default='../../shared/data', help='folder of the real data')
  parser.add_argument('--out', default='benchmarks/results/recommend.json')
  parser.add_argument('--epsilons', type=float, nargs='+', default=[1.0, 8.0])
  parser.add_argument('--seeds', type=int, nargs='+', default=[0])
  parser.add_argument('--seconds', type=float, default=SECONDS)
  options = parser.parse_args()
  done = kept.read(options.out)
  tasks = recommend_tasks.all_tasks(options.data)
  for name in options.tasks or list(tasks):
    task = tasks[name]()
    for epsilon in options.epsilons:
      for seed in options.seeds:
        try:
          done.append(row(task, epsilon, seed, options.seconds))
        except Exception:  # pylint: disable=broad-except
          traceback.print_exc()
          continue
        print(json.dumps(done[-1]), flush=True)
        kept.write(options.out, done)


if __name__ == '__main__':
  main()
