# SPDX-License-Identifier: Apache-2.0
"""What an optimizer without a clip norm should do: clip norms beside each other, on many tasks.

    PYTHONPATH=. python benchmarks/evidence/clip_defaults.py [--data FOLDER] [TASK ...]

    PYTHONPATH=. python benchmarks/evidence/clip_defaults.py --scaled [--data FOLDER] [TASK ...]

Tasks of `evidence_tasks` and one of unequal classes, epsilon 1 and 8, constant learning rates,
DP-SGD with momentum .9 and DP-Adam. All trainings of a task are copies that share batches and
noise. A clip norm that follows the quantile q of gradient norms starts at 1. Its count has noise of
max(B / 20, 2 sigma) examples, and log C moves by `gain * (q - fraction)` a step, where gain is
`min(most, B / (10 noise of the count))`. 'units' divides the direction of DP-SGD by the clip norm.
For every choice: the loss above that of the best constant clip norm and rate of the grid, (a) with
the best rate of each task, (b) with the one rate that is best over all tasks.
"""

import argparse
import itertools
from typing import Any, Dict, List

import evidence
import evidence_models as models
import evidence_tasks
import numpy as np

RATES = {'SGD': np.geomspace(.003, 10, 7), 'Adam': np.geomspace(.001, .3, 5)}
CLIPS = (.1, .3, 1.0, 3.0, 10.0)  # Times the median at the start; beside 1 in plain units.
# Name -> (weight, quantile or None, most gain, units).
FOLLOWING = {
    'Quantile(.5) of today': ('hard', .5, None, False),
    'Quantile(.9) of today': ('hard', .9, None, False),
    'Quantile(.5), units': ('hard', .5, 1.0, True),
    'Quantile(.75), units': ('hard', .75, 1.0, True),
    'Quantile(.9), units': ('hard', .9, 1.0, True),
    'Quantile(.97), units': ('hard', .97, 1.0, True),
}


def unequal() -> evidence_tasks.Task:
  """Two classes, of which one has a fifth of the examples; 20 standardized inputs."""
  rng = np.random.default_rng(3)
  hidden = rng.normal(size=(28_000, 6))
  x = np.concatenate([hidden @ rng.normal(size=(6, 8)), np.exp(.7 * hidden[:, :4]),
                      rng.integers(0, 2, size=(28_000, 8))], 1)
  score = hidden @ np.array([1.0, -.8, .6, .3, 0, 0]) - 1.9
  y = (rng.random(len(x)) < 1 / (1 + np.exp(-score))).astype(np.float32)
  return evidence_tasks.Task('unequal', (1.0, 8.0), 256, 300, 'logistic',
                             evidence_tasks.parts((x - x.mean(0)) / x.std(0), y), 1)


def train(task: Any, plan: Any, kind: str, copies: List[Dict[str, Any]], seed: int) -> Any:
  """Returns the test losses of all copies."""
  rng = np.random.default_rng(seed)
  column = lambda name: np.array([one[name] for one in copies], float)
  clips, rates, quantiles = column('clip'), column('rate'), column('quantile')
  auto = np.array([one['weight'] == 'auto' for one in copies])
  units = np.array([one['units'] for one in copies])
  gains = column('gain')
  b, sigma = task.batch_size, plan.noise_multiplier
  spread = max(b / 20, 2 * sigma)
  counted = ~np.isnan(quantiles)
  gains = np.where(np.isnan(gains), .2, np.minimum(gains, b / (10 * spread)))
  factor = np.where(counted, (1 - (sigma / (2 * spread))**2)**-.5, 1.0)
  weights = models.start(task, len(copies))
  first = [np.zeros_like(w) for w in weights]
  second = [np.zeros_like(w) for w in weights]
  wide = lambda v: np.asarray(v, np.float32)[:, None, None]
  x, y = task.parts[0]
  for step, rows in enumerate(evidence.batches(task, 1, rng)):
    layers = models.records(task, weights, x[rows], y[rows])
    norms = np.nan_to_num(models.norms(layers), nan=1e30, posinf=1e30)
    scale = np.where(auto[:, None], clips[:, None] / (norms + .01),
                     np.minimum(1, clips[:, None] / np.maximum(norms, 1e-30))).astype(np.float32)
    std = sigma * factor * clips / b
    for i, (inputs, delta) in enumerate(layers):
      g = models.collected(inputs, np.nan_to_num(delta) * scale[..., None]) / b
      g = g + wide(std) * rng.normal(size=g.shape[1:]).astype(np.float32)
      if kind == 'SGD':
        g = g / wide(np.where(units, clips, 1))
        first[i] = .9 * first[i] + g
        move = first[i]
      else:
        first[i] = .9 * first[i] + .1 * g
        second[i] = .999 * second[i] + .001 * np.square(g)
        move = first[i] / (1 - .9**(step + 1)) / (
            np.sqrt(second[i] / (1 - .999**(step + 1))) + 1e-7)
      with np.errstate(over='ignore', invalid='ignore'):
        weights[i] = np.nan_to_num(weights[i] - wide(rates) * move, nan=1e9, posinf=1e9,
                                   neginf=-1e9)
    fraction = .5 + ((norms <= clips[:, None]) - .5).sum(1) / b + spread / b * rng.normal()
    clips = np.where(counted, clips * np.exp(np.nan_to_num(gains * (quantiles - fraction))), clips)
    clips = np.clip(clips, 1e-4, 1e4)
  with np.errstate(over='ignore', invalid='ignore'):
    return np.minimum(np.nan_to_num(models.evaluate(task, weights, 2), nan=1e3), 1e3)


def train_scaled(task: Any, plan: Any, copies: List[Dict[str, Any]], seed: int) -> Any:
  """The same for DP-AdamSTP, whose clip norms are of scaled gradients."""
  rng = np.random.default_rng(seed)
  column = lambda name: np.array([one[name] for one in copies], float)
  clips, rates, edges, quantiles = map(column, ('clip', 'rate', 'scale_epsilon', 'quantile'))
  b, sigma = task.batch_size, plan.noise_multiplier
  spread, counted = max(b / 20, 2 * sigma), ~np.isnan(quantiles)
  gain = min(1, b / (10 * spread))
  factor = np.where(counted, (1 - (sigma / (2 * spread))**2)**-.5, 1.0)
  wide = lambda v: np.asarray(v, np.float32)[:, None, None]
  weights = models.start(task, len(copies))
  first, second = ([np.zeros_like(w) for w in weights] for _ in range(2))
  x, y = task.parts[0]
  for step, rows in enumerate(evidence.batches(task, 1, rng)):
    layers = models.records(task, weights, x[rows], y[rows])
    scales = [1 / (np.sqrt(v / max(1 - .999**step, 1e-9)) + wide(edges)) for v in second]
    norms = np.nan_to_num(models.norms(layers, scales), nan=1e30, posinf=1e30)
    factors = np.minimum(1, clips[:, None] / np.maximum(norms, 1e-30)).astype(np.float32)
    for i, (inputs, delta) in enumerate(layers):
      g = models.collected(inputs, np.nan_to_num(delta) * factors[..., None]) / b * scales[i]
      g = g + wide(sigma * factor * clips / b) * rng.normal(size=g.shape[1:]).astype(np.float32)
      g = g / scales[i]
      first[i] = .9 * first[i] + .1 * g
      second[i] = np.nan_to_num(.999 * second[i] + .001 * np.square(g), nan=1e9, posinf=1e9)
      move = first[i] / (1 - .9**(step + 1)) / (
          np.sqrt(second[i] / (1 - .999**(step + 1))) + 1e-8)
      weights[i] = np.nan_to_num(weights[i] - wide(rates) * move, nan=1e9, posinf=1e9, neginf=-1e9)
    fraction = .5 + ((norms <= clips[:, None]) - .5).sum(1) / b + spread / b * rng.normal()
    clips = np.clip(np.where(counted, clips * np.exp(np.nan_to_num(
        gain * (quantiles - fraction))), clips), 1e-6, 1e6)
  return np.minimum(np.nan_to_num(models.evaluate(task, weights, 2), nan=1e3), 1e3)


def scaled_table(name: str, task: Any) -> None:
  """Prints the loss of DP-AdamSTP at the best rate for each `scale_epsilon` and clip norm."""
  norm, size = evidence.pilot(task)['norm'], sum(w[0].size for w in models.start(task, 1))
  edges = {'1e-4': 1e-4, '1e-3': 1e-3, '1e-2': 1e-2, '.03 coordinates': .03 * norm / size**.5}
  norms = {'following': (1.0, .9), 'sqrt(m)': (size**.5, None),
           'sqrt(m) B^(1/4)': (size**.5 * task.batch_size**.25, None)}
  some = [dict(name=f'scale_epsilon {edge}, clip {norm}', scale_epsilon=edges[edge], rate=rate,
               clip=norms[norm][0], quantile=norms[norm][1])
          for rate in np.geomspace(.003, .3, 4) for edge in edges for norm in norms]
  for epsilon in (1.0, 8.0):
    with np.errstate(all='ignore'):
      losses = train_scaled(task, evidence.make_plan(task, epsilon, 1), some, 11)
    best: Dict[str, float] = {}
    for one, loss in zip(some, losses):
      best[one['name']] = min(best.get(one['name'], np.inf), float(loss))
    print(f'{name} {epsilon:g} DPAdamSTP, {size} parameters ' + ' | '.join(
        f'{name}: {loss:.4f}' for name, loss in best.items()), flush=True)


def copies_of(kind: str, norm: float) -> List[Dict[str, Any]]:
  found = []
  for rate in RATES[kind]:
    plain = dict(weight='hard', quantile=None, gain=None, units=False)
    found += [dict(plain, name=f'{c:g} medians', clip=c * norm, at=rate,
                   rate=rate / (c * norm) * min(1, c) if kind == 'SGD' else rate) for c in CLIPS]
    found.append(dict(plain, name='clip norm 1', clip=1.0, rate=rate, at=rate))
    found.append(dict(plain, name='AutoS, clip norm 1', clip=1.0, rate=rate, at=rate,
                      weight='auto'))
    found += [dict(name=name, clip=1.0, rate=rate, at=rate, weight=weight, quantile=q, gain=most,
                   units=units) for name, (weight, q, most, units) in FOLLOWING.items()]
  return found


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('tasks', nargs='*', metavar='TASK')
  parser.add_argument('--data', default='../shared/data', help='folder of the real data')
  parser.add_argument('--scaled', action='store_true', help='DP-AdamSTP instead')
  options = parser.parse_args()
  made = {**evidence_tasks.all_tasks(options.data), 'unequal': unequal}
  table: Dict[Any, Any] = {}
  for name in options.tasks or list(made):
    task = made[name]()
    if options.scaled:
      scaled_table(name, task)
      continue
    for epsilon, kind in itertools.product((1.0, 8.0), RATES):
      plan = evidence.make_plan(task, epsilon, 1)
      some = copies_of(kind, evidence.pilot(task)['norm'])
      losses = train(task, plan, kind, some, 11)
      start = float(models.evaluate(task, models.start(task, 1), 2)[0])
      best = min(loss for one, loss in zip(some, losses) if 'median' in one['name'])
      cells = {}
      for one, loss in zip(some, losses):
        cells.setdefault(one['name'], {})[float(one['at'])] = float(loss)
      table[name, epsilon, kind] = dict(best=best, start=start, cells=cells)
      print(f'{name} {epsilon:g} {kind} norm {evidence.pilot(task)["norm"]:.3g} start {start:.4f} '
            f'best {best:.4f} ' + ' '.join(f'{k}: {min(v.values()):.4f}'
                                          for k, v in cells.items()), flush=True)
  for kind in RATES if table else ():
    keys = [key for key in table if key[2] == kind]
    print(f'\n{kind}: loss above the best constant clip norm and rate, means of {len(keys)} rows')
    for choice in table[keys[0]]['cells']:
      lost = lambda key, loss: (loss - table[key]['best']) / table[key]['best']
      own = np.mean([lost(key, min(table[key]['cells'][choice].values())) for key in keys])
      one = {rate: np.array([lost(key, table[key]['cells'][choice][rate]) for key in keys])
             for rate in table[keys[0]]['cells'][choice]}
      rate = min(one, key=lambda r: np.mean(np.minimum(one[r], 2)))
      harmed = sum(table[key]['cells'][choice][rate] > table[key]['start'] for key in keys)
      print(f'{choice:24} own rate {own:7.1%}   one rate ({rate:.3g}) '
            f'{np.mean(np.minimum(one[rate], 2)):7.1%}  median {np.median(one[rate]):6.1%}  worse '
            f'than untrained {harmed}')


if __name__ == '__main__':
  main()
