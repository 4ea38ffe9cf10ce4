# SPDX-License-Identifier: Apache-2.0
"""`tfdp.recommend` as given, beside every method tuned, on tasks that packages bundle.

    PYTHONPATH=. python benchmarks/choices.py --packages FOLDER [--more] [--out FILE] [TASK ...]
    PYTHONPATH=. python benchmarks/choices.py --table [--out FILE]

`evidence_packages` says what FOLDER needs. Every method is tuned over 54 settings by one run on
validation records, and runs three times more, on test records. What is recommended is not tuned,
and runs three times. Rates fall linearly to zero. Public gradients are those of 300 records that
are not trained on; with --more, other rows say how many. FILE keeps what is done; start several
with tasks and files of their own, and join these.
"""

import argparse
import os
import time
from typing import Any, Dict, List

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import evidence
import evidence_models as models
import evidence_packages
import evidence_tasks
import kept
import numpy as np
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive.accounting import private_search

SEEDS = 11, 12, 13
PUBLIC = 300  # Records.
RUNS, AROUND = 10, (.3, 1.0, 3.0)  # Of a private search: expected runs, times the rate.
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


def public(task: evidence_tasks.Task, count: int = PUBLIC) -> Dict[str, Any]:
  """Gradients and losses of validation records, at the start and elsewhere."""
  x, y = (part[:count] for part in task.parts[1])
  start = models.start(task, 1)
  ends = np.cumsum([w[0].size for w in start])

  def look(distance: np.ndarray, rows: Any = None) -> Any:
    rows = slice(None) if rows is None else rows
    weights = [w + part.reshape(w.shape).astype(np.float32)
               for w, part in zip(start, np.split(distance, ends[:-1]))]
    gradients = np.concatenate([
        (np.broadcast_to(a, (1, *a.shape[-2:]))[0][:, :, None] * d[0][:, None, :]).reshape(
            len(d[0]), -1) for a, d in models.records(task, weights, x[rows], y[rows])], 1)
    losses, _ = models.losses(task, models.outputs(weights, x[rows]), y[rows])
    return gradients, losses[0]

  gradients, losses = look(np.zeros(ends[-1]))
  return dict(gradients=gradients, losses=losses, squared=task.loss == 'squares',
              look=look if ends[-1] <= 32_768 else None)


def made(found: Any, scale: float = 1.0) -> Any:
  """(rule, whether scaled, clip norm, rate) as `evidence.train` takes them; of a larger rate."""
  clip = found.plan.l2_norm_clip
  rate = scale * found.settings['learning_rate'].initial_learning_rate
  rule = {'DPSGD': lambda: tfdp.rules.dp_sgd(found.settings['momentum']),
          'DPAdam': lambda: tfdp.rules.dp_adam(epsilon=found.settings['epsilon'] / clip),
          'DPAdamSTP': lambda: tfdp.rules.scale_then_privatize(
              epsilon=1e-8, scale_epsilon=found.settings['scale_epsilon'])}[found.method]()
  return (rule._replace(update=tf.function(rule.update)), found.method == 'DPAdamSTP', clip,
          rate * clip if found.method == 'DPSGD' else rate)


def searched(task: evidence_tasks.Task, epsilon: float, seen: Dict[str, Any]) -> Dict[str, Any]:
  """The best of a random number of runs around what is recommended, by private scores.

  All runs together cost epsilon. Scores are of validation records, which are private here: a record
  adds 1 - loss / (3 start), from 0 to 1.
  """
  start = float(models.evaluate(task, models.start(task, 1), 1)[0])
  search = tfdp.privacy.Search(runs=RUNS)
  found = recommend(task, epsilon, seen, search=search)
  (x, y), bands = task.parts[1], getattr(found.plan.mechanism, 'bands', 1)
  (rule, scaled, clip, _), rates = made(found), np.array([made(found, s)[-1] for s in AROUND])
  settings = np.array([(c * clip, rate) for c in (.3, 1.0) for rate in rates])
  ends = []
  for seed in SEEDS:
    best = -np.inf, np.inf
    for run in range(search.draw()):
      clips, rates = settings[np.random.default_rng().integers(len(settings), size=1)].T
      weights = evidence.train(task, rule, found.plan, scaled, clips, rates, bands,
                               1000 * seed + run, last=0.0)
      values = 1 - models.losses(task, models.outputs(weights, x), y)[0][0] / (3 * start)
      best = max(best, (private_search.noisy_score(values, search.score_noise),
                        float(models.evaluate(task, weights, 2)[0])))
    ends.append(best[1])
  return dict(chosen=found.method, bands=bands, loss=float(np.mean(ends)), runs=ends, clip=clip,
              rate=float(rates[0]))


def recommend(task: evidence_tasks.Task, epsilon: float, seen: Dict[str, Any], **more: Any) -> Any:
  return tfdp.recommend(
      population_size=len(task.parts[0][0]), batch_size=task.batch_size, steps=task.steps,
      target_epsilon=epsilon, target_delta=evidence.DELTA,
      parameters=sum(w[0].size for w in models.start(task, 1)), **seen, **more)


def recommended(task: evidence_tasks.Task, epsilon: float, seen: Dict[str, Any]) -> Dict[str, Any]:
  """What is recommended, as given."""
  began = time.process_time()
  found = recommend(task, epsilon, seen)
  seconds = time.process_time() - began
  rule, scaled, clip, rate = made(found)
  bands = getattr(found.plan.mechanism, 'bands', 1)
  runs = [float(models.evaluate(task, evidence.train(
      task, rule, found.plan, scaled, np.array([clip]), np.array([rate]), bands, seed, last=0.0),
                                2)[0]) for seed in SEEDS]
  return dict(chosen=found.method, bands=bands, loss=float(np.mean(runs)), runs=runs, clip=clip,
              rate=rate, seconds=round(seconds, 1),
              simulated=[one.loss for one in found.tried[:1]], helps=found.start is None or
              found.tried[0].loss < found.start)


def known(task: evidence_tasks.Task, more: bool) -> Dict[str, Dict[str, Any]]:
  """`{row: what `recommend` is told}`."""
  if not more:
    return {'as given': public(task)}
  norm = float(np.median(np.linalg.norm(public(task)['gradients'], axis=1)))
  seen = {'as given': public(task), 'its norm alone': dict(gradient_norm=norm)}
  return dict(seen, **{f'{count} records': public(task, count) for count in (30, 100, 1000)})


def rows(task: evidence_tasks.Task, done: List[Dict[str, Any]], more: bool) -> Any:
  start = float(models.evaluate(task, models.start(task, 1), 2)[0])
  told = known(task, more)
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
    for name, seen in told.items():
      key = dict(task=task.name, epsilon=epsilon, method=name)
      if (epsilon > 1 and name.endswith('records')) or any(
          key.items() <= one.items() for one in done):
        continue
      yield dict(key, start=start, **recommended(task, epsilon, seen))
    key = dict(task=task.name, epsilon=epsilon, method='private search')
    if more and not any(key.items() <= one.items() for one in done):
      yield dict(key, start=start, **searched(task, epsilon, told['as given']))


def table(done: List[Dict[str, Any]]) -> str:
  """A line per task and epsilon, and means."""
  names = list(dict.fromkeys(one['method'] for one in done if 'chosen' in one))
  lines = [f'{"task":27} {"eps":>3} {"start":>6} {"best":>6}  {"tuned":14}'
           f'{"as given":>9}  {"chosen":14}' + ''.join(f'{name:>16}' for name in names[1:])]
  ratios: Dict[str, List[float]] = {name: [] for name in ('its method, tuned', *names)}
  lost: Dict[str, List[float]] = {name: [] for name in ratios}
  worse = dict.fromkeys(ratios, 0)  # By more than .0001.
  for task, epsilon in dict.fromkeys((one['task'], one['epsilon']) for one in done):
    group = [one for one in done if (one['task'], one['epsilon']) == (task, epsilon)]
    best = min((one for one in group if 'chosen' not in one), key=lambda one: one['loss'])
    given = {one['method']: one for one in group if 'chosen' in one}
    if 'as given' not in given:
      continue
    label = lambda name, one: name[2:] + (', banded' if one['bands'] > 1 else '')
    first = given['as given']
    alike = [one for one in group if one['method'] == first['chosen']]
    same = [one for one in alike if (one['bands'] > 1) == (first['bands'] > 1)] or alike
    for name, one in dict(given, **{'its method, tuned': same[0]}).items():
      ratios[name].append(one['loss'] / best['loss'] - 1)
      lost[name].append((one['loss'] - best['loss']) / (best['start'] - best['loss']))
      worse[name] += one['loss'] > best['start'] + 1e-4
    lines.append(f'{task:27} {epsilon:3g} {best["start"]:6.4f} {best["loss"]:6.4f}  '
                 f'{label(best["method"], best):14}{first["loss"]:9.4f}  '
                 f'{label(first["chosen"], first):14}' + ''.join(
                     f'{given[name]["loss"]:16.4f}' if name in given else ' ' * 16
                     for name in names[1:]))
  lines += ['', f'{"":20} {"rows":>5} {"loss over best":>15} {"median":>7} {"gain lost":>10} '
            f'{"worse than untrained":>21}']
  for name, values in ratios.items():
    lines.append(f'{name:20} {len(values):5} {np.mean(values):15.1%} {np.median(values):7.1%} '
                 f'{np.mean(lost[name]):10.1%} {worse[name]:21}')
  return '\n'.join(lines)


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('tasks', nargs='*', metavar='TASK')
  parser.add_argument('--packages', default='build/data', help='folder of the packages')
  parser.add_argument('--out', default='benchmarks/results/choices.json')
  parser.add_argument('--more', action='store_true',
                      help='also other public records, and private searches')
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
    for one in rows(tasks[name](), done, options.more):
      done.append(one)
      print('{task:24} {epsilon:g} {method:14} {bands:3} {loss:.4f} of {start:.4f} {clip:.3g} '
            '{rate:.3g}'.format(**one), flush=True)
      kept.write(options.out, done)


if __name__ == '__main__':
  main()
