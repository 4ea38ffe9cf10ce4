# SPDX-License-Identifier: Apache-2.0
"""Noise mechanisms beside one another: numbers, a table and a picture."""

from __future__ import annotations

import pathlib
import time
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from tfdp_adaptive import mechanisms
from tfdp_adaptive.mechanisms import progress
from tfdp_adaptive.mechanisms import registry

from . import report

_PLOTTED = 1 << 20  # First steps that are drawn of longer runs.
_MEASURED_PASSES = 64  # Streams that draw more rows per step are not timed.
_COLUMNS = ('mechanism', 'mean error', 'max error', 'of independent', 'sensitivity', 'rows kept',
            'draws/step', 'design s')


class Wanted(NamedTuple):
  """The workload that mechanisms are designed for, see `tfdp mechanism --help`."""

  steps: int
  min_sep: Optional[int] = None
  max_participations: int = 1
  fixed_order: bool = False
  momentum: float = 0.0
  objective: str = 'mean'
  parameters: Optional[int] = None  # Parameters of the model that streams are timed for.


def alternatives(wanted: Wanted) -> List[str]:
  """Names that fit a number of steps, and the distance of participations if there are many."""
  steps = wanted.steps
  bands = {4, 16, 64, wanted.min_sep if wanted.max_participations > 1 and wanted.min_sep else 4}
  names = ['independent', 'tree', 'banded-inverse:4']
  if steps <= mechanisms.BLT.most_steps:
    names += ['blt:2', 'blt:3', 'blt:4']
  names += [f'banded-toeplitz:{count}' for count in sorted(bands) if count < steps]
  if steps <= 4096:
    names += ['square-root']
  if steps <= 256:
    names += ['dense']
  return [name for name in names if steps >= 4 or name == 'independent']


def lower_bound(wanted: Wanted) -> Optional[float]:
  """Returns a lower bound of the mean error for prefix sums, `sqrt(k) ||A||_* / T`, or None."""
  steps, k = wanted.steps, wanted.max_participations
  if wanted.momentum or steps > 10**7 or (k > 1 and steps != k * (wanted.min_sep or 0)):
    return None
  j = np.arange(1, steps + 1)
  return float(np.sqrt(k) * np.sum(1 / (2 * np.sin((2 * j - 1) * np.pi / (4 * steps + 2)))) / steps)


def compare(
    wanted: Wanted, names: Sequence[Tuple[str, Optional[int]]]) -> List[Dict[str, Any]]:
  """Designs mechanisms of names and sizes; returns what is known of each, the first one first."""
  names = list(dict.fromkeys(names))
  pattern = dict(min_sep=wanted.min_sep, max_participations=wanted.max_participations,
                 fixed_order=wanted.fixed_order)
  rows = []
  with progress.bar('designs', len(names)) as bar:
    for name, size in names:
      label = name if size is None else f'{name}:{size}'
      bar.set_description(label)
      made = registry.design(
          name, wanted.steps, size, workload=mechanisms.Workload(wanted.momentum),
          objective=wanted.objective, **pattern)
      rows.append(_row(label, made, wanted, pattern))
      bar.update()
  return rows


def _row(
    name: str, mechanism: mechanisms.Mechanism, wanted: Wanted,
    pattern: Dict[str, Any]) -> Dict[str, Any]:
  steps = wanted.steps
  start = time.perf_counter()
  mechanism.sensitivity()
  seconds = time.perf_counter() - start
  independent = mechanisms.IndependentGaussian(workload=mechanism.workload)
  row = {
      'mechanism': name, 'mean error': mechanism.rmse(steps, **pattern),
      'max error': mechanism.max_error(steps, **pattern),
      'of independent': mechanism.rmse(steps, **pattern) / independent.rmse(steps, **pattern),
      'sensitivity': mechanism.sensitivity(**pattern), 'rows kept': mechanism.memory(),
      'draws/step': mechanism.passes(), 'design s': seconds, 'made': mechanism}
  if wanted.parameters:
    row['MB'] = 4e-6 * mechanism.memory() * wanted.parameters
    row['ms/step'] = _milliseconds(mechanism, wanted.parameters)
  return row


def _milliseconds(
    mechanism: mechanisms.Mechanism, parameters: int, rows: int = 5) -> Optional[float]:
  """Median time of a noise row of so many float32 values; None where it takes too long."""
  if mechanism.passes() > _MEASURED_PASSES:
    return None
  import tensorflow as tf  # pylint: disable=import-outside-toplevel

  from tfdp_adaptive import noise  # pylint: disable=import-outside-toplevel
  specs = (tf.TensorSpec([parameters], tf.float32),)
  stream = noise.stream(mechanism)
  draw = tf.function(lambda state: stream.next(state, specs))
  state = stream.init(specs)
  times = []
  for _ in range(min(rows + 1, mechanism.steps or rows + 1)):
    start = time.perf_counter()
    values, _, state = draw(state)
    values[0][-1].numpy()
    times.append(time.perf_counter() - start)
  return 1e3 * float(np.median(times[1:] or times))


def table(rows: Sequence[Dict[str, Any]]) -> str:
  """Aligned text; ratios are to independent noise."""
  columns = _COLUMNS + tuple(key for key in ('MB', 'ms/step') if key in rows[0])
  cells = [columns] + [tuple(_cell(row[column]) for column in columns) for row in rows]
  head, *lines = report.aligned(cells)
  return '\n'.join([head, '-' * len(head), *lines])


def _cell(value: Any) -> str:
  if value is None:
    return '-'
  if isinstance(value, float):
    return f'{value:.4f}' if 1e-3 <= value < 1e4 else f'{value:.2g}'
  return str(value)


def save(
    folder: pathlib.Path, rows: Sequence[Dict[str, Any]], results: str,
    wanted: Wanted) -> Sequence[pathlib.Path]:
  """Writes the first mechanism, the results and the picture; returns their paths."""
  folder.mkdir(parents=True, exist_ok=True)
  paths = [folder / name for name in ('mechanism.json', 'results.json', 'errors.png')]
  rows[0]['made'].save(paths[0])
  paths[1].write_text(results + '\n', encoding='utf-8')
  return paths if _draw(rows, wanted, paths[2]) else paths[:2]


def _draw(rows: Sequence[Dict[str, Any]], wanted: Wanted, path: pathlib.Path) -> bool:
  """Saves the standard error of every answer; False without matplotlib."""
  canvas = report.canvas(path.name, figsize=(8, 5))
  if canvas is None:
    return False
  steps = min(wanted.steps, _PLOTTED)
  shown = np.unique(np.geomspace(1, steps, 800).astype(int)) - 1
  panel = canvas.subplots()
  for i, row in enumerate(rows):
    errors = row['sensitivity'] * np.sqrt(row['made'].squared_errors(steps)[shown])
    panel.plot(shown + 1, errors, label=f'{row["mechanism"]}  ({row["mean error"]:.4g})',
               linewidth=1.2 if i else 3, linestyle='-' if i < 10 else '--')
  panel.set(xscale='log', yscale='log', xlabel='step',
            ylabel='standard error, in noise multiplier times clip norm',
            title='Error of the sum of gradients up to each step'
            if not wanted.momentum else 'Error of the iterate of SGD after each step')
  panel.grid(alpha=.3, which='both')
  panel.legend(fontsize='small', title='mechanism (mean error)', title_fontsize='small')
  canvas.savefig(path, dpi=110)
  return True
