# SPDX-License-Identifier: Apache-2.0
"""What `evidence.py` found: the table that `tfdp.recommend` reads, and how good the choice is.

    PYTHONPATH=. python benchmarks/evidence_tables.py [FILE]

trains nothing. It writes `tfdp_adaptive/advice/evidence.json` and prints all results and,
for every task, what is chosen without it.
"""

import json
import os
import sys
from typing import Any, Dict, List, Tuple

import numpy as np

from tfdp_adaptive.advice import evidence
from tfdp_adaptive.advice import recommendation
from tfdp_adaptive.advice import task_facts

METHODS = ('DPSGD', 'DPAdam', 'DPAdamBC', 'DPAdamSTP')
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def grouped(rows: List[Dict[str, Any]]) -> Dict[Tuple[str, float], List[Dict[str, Any]]]:
  """Rows of every task and epsilon that are whole."""
  groups: Dict[Tuple[str, float], List[Dict[str, Any]]] = {}
  for one in rows:
    groups.setdefault((one['task'], one['epsilon']), []).append(one)
  return {key: group for key, group in groups.items() if len(group) == 2 * len(METHODS)}


def extract(rows: List[Dict[str, Any]]) -> List[evidence.Row]:
  """What the library keeps, in units that other tasks share."""
  result = []
  for (name, epsilon), group in grouped(rows).items():
    rmse = {one['bands']: one['rmse'] for one in group}
    first = group[0]
    facts = (first['noise_multiplier'] * np.sqrt(first['parameters']) / first['batch_size'],
             rmse[min(rmse)] / rmse[max(rmse)],
             first['facts']['evenness'], first['facts']['agreement'], first['batch_size'])
    results = []
    for one in group:
      settings, norm, size = one['settings'], one['facts']['norm'], one['parameters']
      rate, clip, floor = settings['learning_rate'], settings['l2_norm_clip'] / norm, 0.0
      if one['method'] == 'DPSGD':
        rate *= settings['l2_norm_clip']
      elif one['method'] == 'DPAdamSTP':
        clip = settings['l2_norm_clip'] / np.sqrt(size)
        floor = settings['scale_epsilon'] * np.sqrt(size) / norm
      else:
        floor = settings['floors']
      results.append(evidence.Result(one['method'], one['bands'] > 1, *(
          float(f'{v:.4g}') for v in (one['loss'], one['interval'], rate, clip, floor))))
    begun, *facts = (float(f'{v:.4g}') for v in (first['start'], *facts))
    result.append(evidence.Row(name, epsilon, begun, tuple(facts), tuple(results)))
  return result


def text(rows: List[evidence.Row]) -> str:
  """The text of `tfdp_adaptive/advice/evidence.json`: a task a block, a method a line."""
  blocks = []
  for one in rows:
    head = json.dumps({name: getattr(one, name) for name in ('task', 'epsilon', 'start', 'facts')})
    results = ',\n'.join(f'  {json.dumps(result)}' for result in one.results)
    blocks.append(f'{head[:-1]}, "results": [\n{results}]}}')
  return '[\n' + ',\n'.join(blocks) + '\n]\n'


def table(rows: List[evidence.Row]) -> str:
  """Losses of all methods."""
  keys = [(m, c) for m in METHODS for c in (False, True)]
  lines = [f'{"task":20} {"eps":>4} ' + ''.join(
      f'{m[2:] + (" banded" if c else ""):>17}' for m, c in keys)]
  for one in rows:
    best = min(result.loss for result in one.results)
    cells = {(r.method, r.correlated): f'{"*" if r.loss == best else " "}{r.loss:.4f} '
             f'+-{r.interval:.4f}' for r in one.results}
    lines.append(f'{one.task:20} {one.epsilon:4g} ' + ''.join(f'{cells[key]:>17}' for key in keys))
  return '\n'.join(lines)


def left_out(rows: List[evidence.Row]) -> str:
  """Share of the best method's gain that is lost by the choice made without a task's family."""
  lines = [f'{"task left out":20} {"eps":>4}  {"best":18} {"chosen":18} {"lost":>7} {"loss +":>7}  '
           f'{"sizes alone":18} {"lost":>7}  ' + ''.join(f'{m[2:]:>9}' for m in METHODS)]
  totals: List[List[float]] = []
  within = 0
  name = lambda key: key[0][2:] + (', banded' if key[1] else '')
  family = lambda row: row.task.split(',')[0]  # 'scales' and 'scales, narrow' are relatives.
  for one in rows:
    others = [other for other in rows if family(other) != family(one)]
    losses_of = {(r.method, r.correlated): r.loss for r in one.results}
    best = min(losses_of, key=lambda key: losses_of[key])
    chosen = []
    for facts in (task_facts.Facts(*one.facts), task_facts.Facts(*one.facts[:2])):
      expected, _ = recommendation.expected_losses(facts, others)
      chosen.append(recommendation.best_of(facts, expected))
    regrets = [recommendation.lost(one, losses_of[key]) for key in (
        *chosen, *((m, False) for m in METHODS))]
    totals.append(regrets)
    cells = ''.join(f'{regret:9.1%}' for regret in regrets[2:])
    ratio = losses_of[chosen[0]] / losses_of[best] - 1
    within += ratio <= .03
    lines.append(f'{one.task:20} {one.epsilon:4g}  {name(best):18} {name(chosen[0]):18} '
                 f'{regrets[0]:7.1%} {ratio:7.1%}  {name(chosen[1]):18} {regrets[1]:7.1%}  {cells}')
  for title, of in (('mean', np.mean), ('largest', np.max)):
    values = of(np.array(totals), axis=0)
    lines.append(f'{title:20} {"":4}  {"":18} {"":18} {values[0]:7.1%} {"":7}  {"":18} '
                 f'{values[1]:7.1%}  ' + ''.join(f'{value:9.1%}' for value in values[2:]))
  lines.append(f'within 3% of the gain: {sum(r[0] <= .03 for r in totals)} of {len(totals)}, by '
               f'sizes alone {sum(r[1] <= .03 for r in totals)}; of the loss itself: {within}')
  return '\n'.join(lines)


def main() -> None:
  path = sys.argv[1] if len(sys.argv) > 1 else os.path.join(
      _ROOT, 'benchmarks', 'results', 'evidence.json')
  with open(path, encoding='utf-8') as stream:
    rows = extract(json.load(stream))
  evidence.FILE.write_text(text(rows), encoding='utf-8')
  print(table(rows), left_out(rows), sep='\n\n')


if __name__ == '__main__':
  main()
