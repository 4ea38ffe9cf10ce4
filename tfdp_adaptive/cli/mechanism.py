# SPDX-License-Identifier: Apache-2.0
"""`tfdp mechanism`: design a noise mechanism and see it beside the alternatives."""

from __future__ import annotations

import json
import pathlib
import re
import sys
import time
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple, TYPE_CHECKING

import numpy as np

from tfdp_adaptive import mechanisms
from tfdp_adaptive.cli import folder as folder_lib
from tfdp_adaptive.cli import options
from tfdp_adaptive.mechanisms import progress
from tfdp_adaptive.mechanisms import registry

if TYPE_CHECKING:
  import argparse


_PLOTTED = 1 << 20  # First steps that are drawn of longer runs.
_MEASURED_PASSES = 64  # Streams that draw more rows per step are not timed.
_COLUMNS = ('mechanism', 'mean error', 'max error', 'of independent', 'sensitivity', 'rows kept',
            'draws/step', 'design s')


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
  parser = subparsers.add_parser(
      'mechanism', description=__doc__,
      epilog='NAME is one of ' + ', '.join(
          name if design.size is None else f'{name}:{design.size.upper()}'
          for name, (_, design) in mechanisms.DESIGNS.items())
      + '. Errors are those of the prefix sums of gradients (the iterates of SGD, with --momentum) '
      'per unit noise multiplier and clip norm, sensitivity included.')
  add = parser.add_argument
  add('--steps', type=options.positive_int, required=True, metavar='T')
  add('--design', default='blt:4', metavar='NAME[:SIZE]',
      help='the mechanism to save (default: %(default)s)')
  add('--beside', metavar='NAME[:SIZE],...',
      help='alternatives to show; "none" for none (default: those that fit the number of steps)')
  add('--min-sep', type=options.positive_int, metavar='B',
      help='smallest number of steps between two participations of a record')
  add('--max-participations', type=options.positive_int, default=1, metavar='K',
      help='largest number of steps a record takes part in (default: %(default)s)')
  add('--fixed-order', action='store_true',
      help='all distances are multiples of --min-sep: the same order in every epoch')
  add('--momentum', type=float, default=0.0, metavar='M',
      help='of the optimizer whose iterates must be accurate (default: %(default)s)')
  add('--objective', choices=('mean', 'max', 'last'), default='mean',
      help='the error to minimize (default: %(default)s)')
  add('--parameters', type=options.positive_int, metavar='P',
      help='also show the memory for so many parameters, and time the streams on this machine')
  add('--out', type=options.path, metavar='DIR',
      help='folder for mechanism.json, results.json and errors.png (default: runs/<time>)')
  add('--json', action='store_true', help='print the results as JSON instead of a table')
  return parser


def run(arguments: argparse.Namespace) -> None:
  try:
    rows = [_row(name, mechanism, arguments) for name, mechanism in _designs(arguments)]
  except ValueError as error:
    raise options.UsageError(str(error)) from error
  bound = lower_bound(arguments)
  folder = arguments.out or pathlib.Path('runs', time.strftime('%Y-%m-%d_%H-%M-%S'))
  paths = _save(folder, rows, bound, arguments)
  if arguments.json:
    print(_json(rows, bound, arguments))
  else:
    print(table(rows))
    print(f'\nNo mechanism has a mean error below {bound:.6g}.' if bound else '')
    print(f'{rows[0]["mechanism"]} is in mechanism.json: tfdp.mechanisms.load(...).\n')
  print('\n'.join(map(str, paths)), file=sys.stderr if arguments.json else sys.stdout)


def parse(text: str) -> Tuple[str, Optional[int]]:
  """`(name, size)` of `NAME[:SIZE]`."""
  name, _, size = text.strip().partition(':')
  if name not in mechanisms.DESIGNS:
    raise options.UsageError(
        f'A mechanism must be one of {", ".join(mechanisms.DESIGNS)}. Received: {text}')
  meaning = mechanisms.DESIGNS[name][1].size
  if (meaning is None) != (not size) or not re.fullmatch('[0-9]{0,9}', size):
    wanted = f'{name}:SIZE, SIZE being its `{meaning}`' if meaning else name
    raise options.UsageError(f'The mechanism must be given as {wanted}. Received: {text}')
  return name, int(size) if size else None


def alternatives(steps: int, min_sep: Optional[int] = None) -> List[str]:
  """Names that fit a number of steps, and the distance of participations if there are many."""
  names = ['independent', 'tree', 'banded-inverse:4', 'blt:2', 'blt:3', 'blt:4']
  names += [f'banded-toeplitz:{bands}' for bands in sorted({4, 16, 64, min_sep or 4})
            if bands < steps]
  if steps <= 4096:
    names += ['square-root']
  if steps <= 256:
    names += ['dense']
  return [name for name in names if steps >= 4 or name == 'independent']


def lower_bound(arguments: argparse.Namespace) -> Optional[float]:
  """Of the mean error for prefix sums: `sqrt(k) ||A||_* / T`; None where it is not known."""
  steps, k = arguments.steps, arguments.max_participations
  if arguments.momentum or steps > 10**7 or (k > 1 and steps != k * arguments.min_sep):
    return None
  j = np.arange(1, steps + 1)
  return float(np.sqrt(k) * np.sum(1 / (2 * np.sin((2 * j - 1) * np.pi / (4 * steps + 2)))) / steps)


def table(rows: Sequence[Dict[str, Any]]) -> str:
  """Aligned text; ratios are to independent noise."""
  columns = _COLUMNS + tuple(key for key in ('MB', 'ms/step') if key in rows[0])
  cells = [columns] + [tuple(_cell(row[column]) for column in columns) for row in rows]
  widths = [max(map(len, column)) for column in zip(*cells)]
  lines = ['  '.join(cell.rjust(width) if i else cell.ljust(width)
                     for i, (cell, width) in enumerate(zip(line, widths))) for line in cells]
  lines.insert(1, '-' * len(lines[0]))
  return '\n'.join(lines)


def _cell(value: Any) -> str:
  if value is None:
    return '-'
  if isinstance(value, float):
    return f'{value:.4f}' if 1e-3 <= value < 1e4 else f'{value:.2g}'
  return str(value)


def _designs(arguments: argparse.Namespace) -> Iterator[Tuple[str, mechanisms.Mechanism]]:
  """`(name, mechanism)` of the one to save, then of all others."""
  beside = arguments.beside
  many = arguments.max_participations > 1
  names = (alternatives(arguments.steps, arguments.min_sep if many else None) if beside is None else
           [] if beside == 'none' else beside.split(','))
  wanted = dict.fromkeys(parse(text) for text in [arguments.design] + names)
  design = dict(_pattern(arguments), workload=mechanisms.Workload(arguments.momentum),
                objective=arguments.objective)
  with progress.bar('designs', len(wanted)) as bar:
    for name, size in wanted:
      label = name if size is None else f'{name}:{size}'
      bar.set_description(label)
      yield label, registry.design(name, arguments.steps, size, **design)
      bar.update()


def _pattern(arguments: argparse.Namespace) -> Dict[str, Any]:
  return dict(min_sep=arguments.min_sep, max_participations=arguments.max_participations,
              fixed_order=arguments.fixed_order)


def _row(
    name: str, mechanism: mechanisms.Mechanism, arguments: argparse.Namespace) -> Dict[str, Any]:
  steps = arguments.steps
  pattern = _pattern(arguments)
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
  if arguments.parameters:
    row['MB'] = 4e-6 * mechanism.memory() * arguments.parameters
    row['ms/step'] = _milliseconds(mechanism, arguments.parameters)
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


def _json(
    rows: Sequence[Dict[str, Any]], bound: Optional[float], arguments: argparse.Namespace) -> str:
  about = {key: str(value) if isinstance(value, pathlib.Path) else value
           for key, value in vars(arguments).items() if key not in ('run', 'command')}
  shown = [{key: value for key, value in row.items() if key != 'made'} for row in rows]
  return json.dumps(dict(options=about, lower_bound_of_mean_error=bound, rows=shown), indent=1)


def _save(
    folder: pathlib.Path, rows: Sequence[Dict[str, Any]], bound: Optional[float],
    arguments: argparse.Namespace) -> Sequence[pathlib.Path]:
  folder_lib.make(folder)
  paths = [folder / name for name in ('mechanism.json', 'results.json', 'errors.png')]
  rows[0]['made'].save(paths[0])
  paths[1].write_text(_json(rows, bound, arguments) + '\n', encoding='utf-8')
  return paths if _draw(rows, arguments, paths[2]) else paths[:2]


def _draw(
    rows: Sequence[Dict[str, Any]], arguments: argparse.Namespace, path: pathlib.Path) -> bool:
  """Saves the standard error of every answer; False without matplotlib."""
  try:
    from matplotlib import figure  # pylint: disable=import-outside-toplevel
  except ImportError:
    print('No errors.png: matplotlib is not installed (pip install tfdp-adaptive[plots]).',
          file=sys.stderr)
    return False
  steps = min(arguments.steps, _PLOTTED)
  shown = np.unique(np.geomspace(1, steps, 800).astype(int)) - 1
  canvas = figure.Figure(figsize=(8, 5), layout='constrained')
  panel = canvas.subplots()
  for i, row in enumerate(rows):
    errors = row['sensitivity'] * np.sqrt(row['made'].squared_errors(steps)[shown])
    panel.plot(shown + 1, errors, label=f'{row["mechanism"]}  ({row["mean error"]:.4g})',
               linewidth=1.2 if i else 3, linestyle='-' if i < 10 else '--')
  panel.set(xscale='log', yscale='log', xlabel='step',
            ylabel='standard error, in noise multiplier times clip norm',
            title='Error of the sum of gradients up to each step'
            if not arguments.momentum else 'Error of the iterate of SGD after each step')
  panel.grid(alpha=.3, which='both')
  panel.legend(fontsize='small', title='mechanism (mean error)', title_fontsize='small')
  canvas.savefig(path, dpi=110)
  return True
