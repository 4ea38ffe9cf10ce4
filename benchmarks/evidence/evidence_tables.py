# SPDX-License-Identifier: Apache-2.0
"""Prints what was found on the tasks of `evidence_tasks.py`.

    PYTHONPATH=. python benchmarks/evidence/evidence_tables.py [FILE]
"""

import json
import os
import sys
from typing import Any, Dict, List, Tuple

import evidence_facts
import numpy as np

METHODS = ('DPSGD', 'DPAdam', 'DPAdamBC', 'DPAdamSTP')
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def grouped(rows: List[Dict[str, Any]]) -> Dict[Tuple[str, float], List[Dict[str, Any]]]:
  """Rows of every task and epsilon that are whole."""
  groups: Dict[Tuple[str, float], List[Dict[str, Any]]] = {}
  for one in rows:
    groups.setdefault((one['task'], one['epsilon']), []).append(one)
  return {key: group for key, group in groups.items() if len(group) == 2 * len(METHODS)}


def facts_of(group: List[Dict[str, Any]]) -> evidence_facts.Facts:
  """Of the rows of one task and epsilon."""
  rmse = {one['bands']: one['rmse'] for one in group}
  first = group[0]
  return evidence_facts.Facts(
      first['noise_multiplier'] * np.sqrt(first['parameters']) / first['batch_size'],
      rmse[min(rmse)] / rmse[max(rmse)],
      first['facts']['evenness'], first['facts']['agreement'], first['batch_size'])


def table(rows: List[Dict[str, Any]]) -> str:
  """Losses of all methods."""
  keys = [(m, c) for m in METHODS for c in (False, True)]
  lines = [f'{"task":20} {"eps":>4} ' + ''.join(
      f'{m[2:] + (" banded" if c else ""):>17}' for m, c in keys)]
  for (task, epsilon), group in grouped(rows).items():
    best = min(one['loss'] for one in group)
    cells = {(one['method'], one['bands'] > 1): f'{"*" if one["loss"] == best else " "}'
             f'{one["loss"]:.4f} +-{one["interval"]:.4f}' for one in group}
    lines.append(f'{task:20} {epsilon:4g} ' + ''.join(f'{cells[key]:>17}' for key in keys))
  return '\n'.join(lines)


def main() -> None:
  path = sys.argv[1] if len(sys.argv) > 1 else os.path.join(
      _ROOT, 'benchmarks', 'results', 'evidence.json')
  with open(path, encoding='utf-8') as stream:
    print(table(json.load(stream)))


if __name__ == '__main__':
  main()
