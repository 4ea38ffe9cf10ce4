# SPDX-License-Identifier: Apache-2.0
"""Claims of papers on small tasks: weight decay, delays, what to subtract, text, public geometry.

    PYTHONPATH=. python benchmarks/evidence/studies.py [--data FOLDER] [--out FILE] [STUDY ...]

*weight_decay*: DP-Adam and DP-AdamW, each with and without the noise subtracted from the second
moment (arXiv:2511.07843 says that subtracting it hurts with weight decay). *delays*: DP2, its two
ablations and what it is compared with in its Table 1, on 10 epochs of batches of 128 (tags: 10
of 256).
*subtracted*: DP-AdamBC that subtracts none of the noise's variance, half, all or twice of it
(Figure 3 of Tang and Lecuyer says that all is best). *embedding*: an embedding, its mean and a
hidden layer on snippets of film reviews, at the epsilon of Opacus' IMDb example. *ellipsoids*:
Table 1 of PAGAN in miniature, the next word of WikiText-2 with ellipsoids of public gradients.
Training is that of `evidence.py`, with its rules for tuning: within a study every method has
a grid of the same size, chosen by one run, and five further runs are reported. It goes
on where it was interrupted, and prints tables of all that is there.
"""

import argparse
import itertools
import json
import os
import time
from typing import Any, Callable, Dict, List, Tuple

import evidence
import evidence_models as models
import evidence_tasks
import numpy as np

import tfdp_adaptive as tfdp
from tfdp_adaptive import contract

RATES = evidence.ADAM_STEPS
SIX = tuple(np.geomspace(.03, 3, 6))  # Clip norms, times the median norm of a gradient.
DELAYS = (.5, 1.0, 2.0)  # In epochs.
EMBEDDING = 6.4  # Epsilon: 20 epochs of batches of 64 of 25,000 records with noise multiplier .56.
EPOCHS = dict(tags=(10, 256))  # Epochs of *delays*, and batch size; else 10 of 128.
METHODS = dict(
    weight_decay=('DPAdam', 'DPAdamBC', 'DPAdamW', 'DPAdamW, corrected'),
    delays=('DPSGD', 'DPRMSprop', 'DPAdamSTP', 'DP2RMSprop', 'DP2RMSprop, extra query',
            'DP2RMSprop, noise first'),
    subtracted=('none', 'half', 'all', 'twice'),
    embedding=('DPSGD', 'DPAdaGrad', 'DPAdam', 'DPAdamBC', 'DPAdamSTP'),
    ellipsoids=('DPSGD', 'DPAdaGrad', 'PAGAN, small', 'PAGAN, large', 'DPAdam', 'DPAdamSTP'))
TASKS = dict(
    weight_decay=(('sentiment', 1.0), ('mnist', 1.0), ('mnist_hidden', 1.0)),
    delays=(('ratings', 3.0), ('sentiment', 3.0), ('tags', 3.0)),
    subtracted=(('scales', 1.0), ('regression', 1.0), ('mnist', 1.0)),
    embedding=(('polarity', EMBEDDING),),
    ellipsoids=(('words', 3.0),))


def weight_decay(
    method: str, task: evidence_tasks.Task, norm: float, floor: float) -> evidence.Grid:
  """126 settings: 2 epsilons x 3 clip norms x 7 rates x 3 decays, or 9 clip norms and no decay."""
  del task
  corrected = method in ('DPAdamBC', 'DPAdamW, corrected')
  make = tfdp.rules.dp_adam_bc if corrected else tfdp.rules.dp_adam
  rules = tuple((make(epsilon=e * floor), dict(floors=e))
                for e in ((.3, 1.0) if corrected else (.01, 1.0)))
  if 'W' in method:
    return evidence.Grid(rules, norm * np.array(evidence.CLIPS), RATES, decays=(.01, .1, 1.0))
  return evidence.Grid(rules, norm * np.geomspace(.05, 2, 9), RATES)


def delays(method: str, task: evidence_tasks.Task, norm: float, floor: float) -> evidence.Grid:
  """84 settings: 12 for DP2's delay, epsilon and clip norm, or 2 rules x 6 clip norms; 7 rates.

  Epsilon of DP2 is in units of the noise in its averages. Its adaptive steps have a clip norm
  of `kept / epsilon`, and a rate with which their noise is that of the other steps.
  """
  rules: Any
  if method == 'DPSGD':
    rules = tuple((tfdp.rules.dp_sgd(m), dict(momentum=m)) for m in (0.0, .9))
    return evidence.Grid(rules, norm * np.array(SIX), evidence.SGD_STEPS)
  if method == 'DPRMSprop':
    rules = tuple((tfdp.rules.dp_rmsprop(epsilon=e * floor), dict(floors=e)) for e in (.01, 1.0))
    return evidence.Grid(rules, norm * np.array(SIX), RATES)
  if method == 'DPAdamSTP':
    size = sum(w[0].size for w in models.start(task, 1))
    coordinate = norm / np.sqrt(size)
    rules = tuple((tfdp.rules.scale_then_privatize(epsilon=1e-8, scale_epsilon=r * coordinate),
                   dict(scale_epsilon=r * coordinate)) for r in (.003, .1))
    return evidence.Grid(
        rules, np.sqrt(size) * task.batch_size**np.linspace(-.25, 1, 6), RATES, True)
  epoch = len(task.parts[0][0]) / task.batch_size
  rules = []
  for delay, e, kept in itertools.product(DELAYS, (.3, 3.0), (.03, .3)):
    steps = round(delay * epoch)
    epsilon = e * floor / np.sqrt(steps)
    clip = kept / epsilon
    more: Dict[str, Any] = dict(relative_adaptive_clip=clip, epsilon=epsilon)
    if method.endswith('noise first'):  # Clips once; kept is then another decay of the squares.
      more = dict(epsilon=epsilon, ablation='noise_first', rho=.9 if kept < .1 else .5)
    elif method.endswith('extra query'):
      more['ablation'] = 'extra_query'
    rules.append((tfdp.rules.dp2_rmsprop(
        steps, steps, relative_adaptive_learning_rate=epsilon if 'rho' in more else 1 / clip,
        **more), dict(delay=delay, floors=e, kept=kept)))
  return evidence.Grid(tuple(rules), norm * np.ones(1), evidence.SGD_STEPS)


def subtracted(
    method: str, task: evidence_tasks.Task, norm: float, floor: float) -> evidence.Grid:
  """84 settings: 2 epsilons x 6 clip norms x 7 rates."""
  del task
  share = dict(zip(METHODS['subtracted'], (0.0, .5, 1.0, 2.0)))[method]

  def make(epsilon: float) -> Any:
    rule = tfdp.rules.dp_adam_bc(epsilon=epsilon)
    return rule._replace(update=lambda state, releases, public=(): rule.update(
        state, tuple(r._replace(variance=share * r.variance) for r in releases), public))

  rules = tuple((make(e * floor), dict(floors=e)) for e in (.1, 1.0))
  return evidence.Grid(rules, norm * np.array(SIX), RATES)


def embedding(method: str, task: evidence_tasks.Task, norm: float, floor: float) -> evidence.Grid:
  """42 settings: those of `evidence.grid`; AdaGrad has 6 clip norms and 7 rates."""
  if method == 'DPAdaGrad':
    return evidence.Grid(((tfdp.rules.pagan(projection='rescale'), {}),), norm * np.array(SIX),
                         RATES)
  size = sum(w[0].size for w in models.start(task, 1))
  return evidence.grid(method, norm, floor, size, task.batch_size)


def ellipsoids(method: str, task: evidence_tasks.Task, norm: float, floor: float) -> evidence.Grid:
  """42 settings; PAGAN's are 2 least standard deviations x 3 clip norms x 7 rates.

  Its ellipsoid is that of public gradients; 'small' has a fifth as many records as training.
  """
  if 'PAGAN' not in method:
    return embedding(method, task, norm, floor)
  x, y = task.public or task.parts[1]
  few = len(task.parts[0][0]) // (5 if 'small' in method else 1)
  roots = models.square_roots(task, x[:few], y[:few])
  typical = np.sqrt(np.mean(np.concatenate([np.square(r).ravel() for r in roots])))

  def make(least: float) -> contract.Rule:
    found = tfdp.rules.pagan_ellipsoid([np.maximum(r, least * typical) for r in roots])
    rule = tfdp.rules.pagan(projection='rescale')
    # Every copy of the model has the same ellipsoid.
    return rule._replace(init=lambda specs: tfdp.rules.pagan(
        [np.broadcast_to(a, s.shape) for a, s in zip(found, specs)], 'rescale').init(specs))

  rules = tuple((make(least), dict(least=least)) for least in (.003, .1))
  return evidence.Grid(rules, np.array(evidence.CLIPS), RATES, True)


def keeper(path: str, key: Dict[str, Any]) -> Callable[[int, Callable[[], Any]], Any]:
  """Of `evidence.search`: what was found of rows that are not finished is in the file at `path`."""
  name = json.dumps(key)

  def kept(i: int, make: Callable[[], Any]) -> Any:
    if str(i) not in unfinished(path).get(name, {}):
      made, rows = make(), unfinished(path)
      rows.setdefault(name, {})[str(i)] = made
      _write(path, json.dumps(rows))
    return unfinished(path)[name][str(i)]

  return kept


def unfinished(path: str) -> Dict[str, Any]:
  """`{JSON of a row's key: {rule: losses}}`."""
  if not os.path.exists(path):
    return {}
  with open(path, encoding='utf-8') as stream:
    return json.load(stream)


def _write(path: str, text: str) -> None:
  with open(path + '.new', 'w', encoding='utf-8') as stream:
    stream.write(text)
  os.replace(path + '.new', path)


def row(study: str, name: str, task: evidence_tasks.Task, epsilon: float, method: str,
        kept: Callable[[int, Callable[[], Any]], Any]) -> Dict[str, Any]:
  began = time.process_time()
  if study == 'delays':
    epochs, size = EPOCHS.get(name, (10, 128))
    task = task._replace(batch_size=size, steps=epochs * len(task.parts[0][0]) // size)
  plan = evidence.make_plan(task, epsilon, 1)
  floor = plan.noise_multiplier / task.batch_size
  grid = globals()[study](method, task, evidence.pilot(task)['norm'], floor)
  found = evidence.search(task, grid, plan, kept=kept)
  return dict(
      study=study, task=task.name, epsilon=epsilon, method=method,
      noise_multiplier=plan.noise_multiplier, batch_size=task.batch_size, steps=task.steps,
      population_size=len(task.parts[0][0]), clip=found.clip, rate=found.rate, decay=found.decay,
      **found.more, tried=found.tried, validation=found.validation, loss=found.loss,
      interval=found.interval, runs=found.runs, accuracy=found.accuracy,
      start=float(models.evaluate(task, models.start(task, 1), 2)[0]),
      seconds=round(time.process_time() - began, 1))


def table(rows: List[Dict[str, Any]], study: str) -> str:
  """A line per task, a column per method."""
  groups: Dict[Tuple[str, float], Dict[str, Dict[str, Any]]] = {}
  for one in rows:
    if one['study'] == study:
      groups.setdefault((one['task'], one['epsilon']), {})[one['method']] = one
  methods = METHODS[study]
  lines = [f'{study:20} {"eps":>4} {"start":>7} ' + ''.join(
      f'{m.replace("2RMSprop,", "2,").replace(", corrected", "-BC"):>18}' for m in methods)]
  for (task, epsilon), found in groups.items():
    least = min(one['loss'] for one in found.values())
    cells = [f'{"*" if found[m]["loss"] == least else " "}{found[m]["loss"]:.4f} '
             f'+-{found[m]["interval"]:.4f}' if m in found else '-' for m in methods]
    start = next(iter(found.values()))['start']
    lines.append(f'{task:20} {epsilon:4g} {start:7.4f} ' + ''.join(f'{c:>18}' for c in cells))
    if any('accuracy' in one for one in found.values()):
      lines.append(f'{"  right answers":33} ' + ''.join(
          f'{found[m]["accuracy"]:18.3f}' if 'accuracy' in found.get(m, {}) else f'{"-":>18}'
          for m in methods))
  return '\n'.join(lines)


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('studies', nargs='*', metavar='STUDY', help=f'of {", ".join(METHODS)}')
  parser.add_argument('--methods', nargs='+', metavar='METHOD', help='only these')
  parser.add_argument('--data', default='shared/data', help='folder of the real data')
  parser.add_argument('--out', default='benchmarks/results/studies.json')
  parser.add_argument('--only-tables', action='store_true', help='trains nothing')
  options = parser.parse_args()
  if set(options.studies) - set(METHODS):
    parser.error(f'studies are {", ".join(METHODS)}')
  rows: List[Dict[str, Any]] = []
  part = options.out + '.part'  # Gone once all rows are whole.
  if os.path.exists(options.out):
    with open(options.out, encoding='utf-8') as stream:
      rows = json.load(stream)
  made = {} if options.only_tables else evidence_tasks.all_tasks(options.data)
  for study in options.studies or METHODS:
    for name, epsilon in TASKS[study]:
      if name not in made:
        continue
      task = made[name]()
      for method in METHODS[study]:
        key = dict(study=study, task=task.name, epsilon=epsilon, method=method)
        if (any(key.items() <= done.items() for done in rows)
            or method not in (options.methods or [method])):
          continue
        rows.append(row(study, name, task, epsilon, method, keeper(part, key)))
        print(json.dumps({k: v for k, v in rows[-1].items() if k != 'runs'}), flush=True)
        _write(options.out, '[\n' + ',\n'.join(json.dumps(r) for r in rows) + '\n]\n')
        rest = unfinished(part)
        del rest[json.dumps(key)]
        if rest:
          _write(part, json.dumps(rest))
        else:
          os.remove(part)
    if any(one['study'] == study for one in rows):
      print(table(rows, study), '', sep='\n')


if __name__ == '__main__':
  main()
