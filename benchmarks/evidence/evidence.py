# SPDX-License-Identifier: Apache-2.0
"""Which method is best on which task, every method tuned over a grid of the same size.

    PYTHONPATH=. python benchmarks/evidence/evidence.py [--data FOLDER] [--out FILE] [TASK ...]

It goes on where it was interrupted: FILE has a row per task, epsilon and method. The
rules, mechanisms and accounting are the library's; gradients of these small models are
written out in NumPy, for all learning rates and clip norms at once. Settings are chosen
by the loss of one run on validation records, with the same draws for all; losses are of five
other runs, on test records. Settings are in the units that `tfdp` takes.
`evidence_tables.py` makes tables of them.
"""

import argparse
import itertools
import json
import os
import time
from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Tuple

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import evidence_facts
import evidence_models as models
import evidence_tables
import evidence_tasks
import numpy as np
from scipy import stats
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import contract

DELTA = 1e-5
BANDS = 16
TUNING_SEED, TEST_SEEDS = 1, (11, 12, 13, 14, 15)
PILOT = 512  # Validation records whose gradients at the start give the units of the grids.
SGD_STEPS = np.geomspace(.01, 10, 7)  # Learning rate times clip norm.
ADAM_STEPS = np.geomspace(.003, 3, 7)  # Learning rate.
CLIPS = (.1, .3, 1.0)  # Times the median norm of a gradient at the start.
METHODS = evidence_tables.METHODS


class Grid(NamedTuple):
  """The settings of one method: here 2 rules x 3 clip norms x 7 rates."""

  rules: Tuple[Tuple[contract.Rule, Dict[str, float]], ...]
  clips: np.ndarray
  rates: np.ndarray
  scaled: bool = False  # Whether clip norms are in scaled units.
  decays: Tuple[float, ...] = (0.0,)  # Weights shrink by `rate * decay` of themselves a step.


def grid(method: str, norm: float, floor: float, size: int, batch_size: int) -> Grid:
  """Of a task with gradients of `norm`; `floor` is noise per coordinate over the clip norm."""
  clips = np.array(CLIPS) * norm
  if method == 'DPSGD':
    made = tuple((tfdp.rules.dp_sgd(m), dict(momentum=m)) for m in (0.0, .9))
    return Grid(made, clips, SGD_STEPS)
  if method == 'DPAdamSTP':
    coordinate = norm / np.sqrt(size)
    made = tuple((tfdp.rules.scale_then_privatize(
        epsilon=1e-8, scale_epsilon=r * coordinate), dict(scale_epsilon=r * coordinate))
                 for r in (.003, .1))
    return Grid(made, np.sqrt(size) * np.array([1, batch_size**.25, batch_size**.5]),
                ADAM_STEPS, True)
  if method == 'DPAdam':
    return Grid(tuple((tfdp.rules.dp_adam(epsilon=e * floor), dict(floors=e))
                      for e in (.01, 1.0)), clips, ADAM_STEPS)
  return Grid(tuple((tfdp.rules.dp_adam_bc(epsilon=e * floor), dict(floors=e))
                    for e in (.3, 1.0)), clips, ADAM_STEPS)


# One run.


def make_plan(task: evidence_tasks.Task, epsilon: float, bands: int) -> tfdp.PrivacyPlan:
  noise: Dict[str, Any] = {} if bands == 1 else dict(
      mechanism=tfdp.mechanisms.BandedToeplitz(bands, task.steps),
      sampling=tfdp.sampling.CyclicPoisson(cycle=bands))
  return tfdp.PrivacyPlan.calibrate(
      target_epsilon=epsilon, target_delta=DELTA, population_size=len(task.parts[0][0]),
      batch_size=task.batch_size, steps=task.steps, l2_norm_clip=1.0, **noise)


def batches(task: evidence_tasks.Task, bands: int, rng: np.random.Generator) -> Any:
  """Rows of every step: (cyclic) Poisson sampling."""
  size = len(task.parts[0][0])
  groups = rng.permutation(size) % bands
  for step in range(task.steps):
    taken = rng.random(size) < bands * task.batch_size / size
    yield np.flatnonzero(taken & (groups == step % bands))


def train(task: evidence_tasks.Task, rule: contract.Rule, plan: tfdp.PrivacyPlan, scaled: bool,
          clips: np.ndarray, rates: np.ndarray, bands: int, seed: int, decays: Any = 0.0,
          last: float = 1.0) -> List[np.ndarray]:
  """Weights of all (clip norm, rate, weight decay) after the last step; the same draws for each.

  Rates fall linearly to `last` times their first value.

  Gradients are handed to rules in units of the clip norm, unless clip norms are in `scaled` units.
  """
  rng = np.random.default_rng(seed)
  weights = models.start(task, len(clips))
  specs = tuple(tf.TensorSpec(w.shape, tf.float32) for w in weights)
  state = rule.init(specs)
  row_norms = plan.mechanism.row_norms(task.steps)
  bands_of: Any = plan.mechanism.coefficients if bands > 1 else np.ones(1)
  past: List[List[np.ndarray]] = [[] for _ in range(len(weights) * len(rule.asks))]
  wide = lambda v: np.asarray(v, np.float32)[:, None, None]
  unit = np.ones_like(clips) if scaled else clips
  shrunk = wide(1 - rates * np.broadcast_to(decays, rates.shape))
  x, y = task.parts[0]
  for step, rows in enumerate(batches(task, bands, rng)):
    layers = models.records(task, weights, x[rows], y[rows])
    releases = []
    for ask, query in enumerate(rule.query(state)):
      scales = [np.asarray(s) for s in query.scale] if query.scale else None
      bound, share = clips / unit * float(query.relative_clip), float(query.share)
      std = plan.noise_multiplier / task.batch_size * bound / np.sqrt(share or 1)
      with np.errstate(over='ignore', invalid='ignore', divide='ignore'):
        found = models.norms(layers, scales) / unit[:, None]
        factor = np.minimum(1, bound[:, None] / np.maximum(found, 1e-30)) / unit[:, None]
      factor = np.nan_to_num(factor).astype(np.float32)
      means = []
      for i, (inputs, delta) in enumerate(layers):
        earlier = past[ask * len(weights) + i]  # The last rows of C^-1 Z.
        z = rng.normal(size=weights[i].shape[1:])
        z -= sum(c * row for c, row in zip(bands_of[1:], earlier))
        earlier.insert(0, z / bands_of[0])
        total = models.collected(inputs, np.nan_to_num(delta) * factor[..., None])
        if scales is not None:
          total = total * scales[i]
        mean = total / task.batch_size + wide(std) * earlier[0].astype(np.float32)
        del earlier[len(bands_of) - 1:]
        means.append(tf.constant(mean if share else 0 * mean, tf.float32))
      variance = np.square(wide(std) * row_norms[step])
      releases.append(contract.Release(tuple(means), tf.constant(variance, tf.float32)))
    direction, state = rule.update(state, tuple(releases), ())
    now = rates * (1 + (last - 1) * step / task.steps)
    weights = [w * shrunk - wide(now) * d.numpy() for w, d in zip(weights, direction)]
  return weights


def pilot(task: evidence_tasks.Task) -> Dict[str, float]:
  """What the gradients of some records say at the start."""
  x, y = (part[:PILOT] for part in task.parts[1])
  layers = models.records(task, models.start(task, 1), x, y)
  gradients = np.concatenate([
      (np.broadcast_to(a, (1, *a.shape[-2:]))[0][:, :, None] * d[0][:, None, :]).reshape(len(x), -1)
      for a, d in layers], 1)
  return dict(norm=float(np.median(np.linalg.norm(gradients, axis=1))),
              **evidence_facts.facts_of(gradients))


class Found(NamedTuple):
  """The best settings of a grid, and what they reach with other draws."""

  clip: float
  rate: float
  decay: float
  more: Dict[str, float]
  validation: float
  tried: int
  loss: float  # Mean of `runs`, on test records.
  interval: float  # Half the 95% interval of that mean (Student).
  runs: List[float]
  accuracy: float  # Mean of the same runs; of a classification.


def search(task: evidence_tasks.Task, tried: Grid, plan: tfdp.PrivacyPlan, bands: int = 1,
           kept: Callable[[int, Callable[[], Any]], Any] = lambda i, make: make(),
           last: float = 1.0, seeds: Sequence[int] = TEST_SEEDS) -> Found:
  """Tunes by one run on validation records, then trains `TEST_SEEDS` more.

  `kept` may have the losses of rule `i` from before, and else makes them.
  """
  triples = np.array(list(itertools.product(tried.clips, tried.rates, tried.decays)))
  best = (np.inf, 0, 0)
  made = [rule._replace(update=tf.function(rule.update)) for rule, _ in tried.rules]

  def trained(rule: contract.Rule, chosen: np.ndarray, seed: int) -> List[np.ndarray]:
    clips, rates, decays = chosen.T
    return train(task, rule, plan, tried.scaled, clips, rates, bands, seed, decays, last)

  for i, rule in enumerate(made):
    losses = kept(i, lambda rule=rule: models.evaluate(
        task, trained(rule, triples, TUNING_SEED), 1).tolist())
    best = min(best, (min(losses), i, losses.index(min(losses))))
  validation, i, j = best
  ends = [trained(made[i], triples[j:j + 1], seed) for seed in seeds]
  runs = [float(models.evaluate(task, weights, 2)[0]) for weights in ends]
  clip, rate, decay = (float(v) for v in triples[j])
  return Found(clip, rate, decay, tried.rules[i][1], validation, len(triples) * len(made),
               float(np.mean(runs)),
               float(stats.t.ppf(.975, len(runs) - 1) * stats.sem(runs)), runs,
               float(np.mean([models.accuracy(task, weights, 2) for weights in ends])))


def row(task: evidence_tasks.Task, epsilon: float, method: str, bands: int) -> Dict[str, Any]:
  """Tunes, then trains again."""
  began = time.process_time()
  plan = make_plan(task, epsilon, bands)
  facts = pilot(task)
  size = sum(w[0].size for w in models.start(task, 1))
  floor = plan.noise_multiplier / task.batch_size
  tried = grid(method, facts['norm'], floor, size, task.batch_size)
  found = search(task, tried, plan, bands)
  clip, rate, more = found.clip, found.rate, found.more
  settings: Dict[str, float] = dict(
      more, learning_rate=rate / clip if method == 'DPSGD' else rate, l2_norm_clip=clip)
  settings = {name: float(f'{value:.6g}') for name, value in settings.items()}
  if 'floors' in settings:
    settings['epsilon'] = settings['floors'] * clip * floor
  return dict(
      task=task.name, epsilon=epsilon, method=method, bands=bands,
      noise_multiplier=plan.noise_multiplier, population_size=len(task.parts[0][0]),
      batch_size=task.batch_size, steps=task.steps, parameters=size, facts=facts,
      rmse=float(plan.noise_multiplier * plan.mechanism.rmse(task.steps)),
      tried=found.tried, settings=settings, validation=found.validation,
      loss=found.loss, runs=found.runs, interval=found.interval,
      start=float(models.evaluate(task, models.start(task, 1), 2)[0]),
      seconds=round(time.process_time() - began, 1))


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('tasks', nargs='*', metavar='TASK')
  parser.add_argument('--data', default='shared/data', help='folder of the real data')
  parser.add_argument('--out', default='benchmarks/results/evidence.json')
  parser.add_argument('--epsilons', type=int, nargs='+', default=[0, 1, 2], metavar='I',
                      help='0 for the first epsilon of a task, 1 for the second, ...')
  options = parser.parse_args()
  rows: List[Dict[str, Any]] = []
  if os.path.exists(options.out):
    with open(options.out, encoding='utf-8') as stream:
      rows = json.load(stream)
  made = evidence_tasks.all_tasks(options.data)
  if set(options.tasks) - set(made):
    parser.error(f'tasks are {", ".join(made)}')
  names = options.tasks or list(made)
  for i, name in itertools.product(options.epsilons, names):  # First all tasks, then the next.
    task = made[name]()
    if i >= len(task.epsilons):
      continue
    for method, bands in itertools.product(METHODS, (1, BANDS)):
      epsilon = task.epsilons[i]
      key = dict(task=task.name, epsilon=epsilon, method=method, bands=bands)
      if any(key.items() <= done.items() for done in rows):
        continue
      rows.append(row(task, epsilon, method, bands))
      print('{task:20} {epsilon:g} {method:10} {bands:3} {loss:.4f} +- {interval:.4f} '
            '{seconds:.0f} s {settings}'.format(**rows[-1]), flush=True)
      with open(options.out + '.new', 'w', encoding='utf-8') as stream:
        stream.write('[\n' + ',\n'.join(json.dumps(r) for r in rows) + '\n]\n')
      os.replace(options.out + '.new', options.out)


if __name__ == '__main__':
  main()
