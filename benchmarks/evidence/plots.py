# SPDX-License-Identifier: Apache-2.0
"""Pictures for the documentation of what evidence, studies, abstracts and servers found.

    PYTHONPATH=. python benchmarks/evidence/plots.py [--results FOLDER] [--out FOLDER] [PICTURE ...]

trains nothing.
"""

import argparse
import functools
import json
import math
import pathlib
from typing import Any, Dict, List

import abstracts
import evidence_tables
import matplotlib
import numpy as np
import studies

matplotlib.use('Agg')
from matplotlib import pyplot

import tfdp_adaptive as tfdp

COLORS = {'DPSGD': '#777777', 'DPAdam': '#1f77b4', 'DPAdamBC': '#2ca02c', 'DPAdamSTP': '#d62728'}


def _read(folder: pathlib.Path, name: str) -> List[Dict[str, Any]]:
  return json.loads((folder / f'{name}.json').read_text(encoding='utf-8'))


def evidence(folder: pathlib.Path) -> Any:
  """Every method's loss over that of the best one, a line per task."""
  groups = evidence_tables.grouped(_read(folder, 'evidence'))
  facts = {key: evidence_tables.facts_of(group) for key, group in groups.items()}
  keys = sorted(groups, key=lambda key: facts[key].noise_to_signal)
  figure, axes = pyplot.subplots(figsize=(7.5, .36 * len(keys) + 1.3))
  for y, key in enumerate(keys):
    best = min(one['loss'] for one in groups[key])
    for one in groups[key]:
      banded = one['bands'] > 1
      axes.errorbar(
          one['loss'] / best, y + (.17 if banded else -.17), xerr=one['interval'] / best,
          fmt='D' if banded else 'o', ms=5, lw=.8, color=COLORS[one['method']],
          mfc='white' if banded else None, alpha=.9,
          label=None if y else one['method'] + (', banded' if banded else ''))
  axes.set_yticks(range(len(keys)), [
      f'{key[0]}, {key[1]:g}  ({facts[key].noise_to_signal:.2f}, {facts[key].evenness:.2f})'
      for key in keys])
  axes.set_xscale('log')
  ticks = [1, 1.2, 1.5, 2, 3, 5]
  axes.set_xticks(ticks, [f'{tick:g}' for tick in ticks])
  axes.minorticks_off()
  axes.set_xlabel('test loss over that of the best method (95% intervals)')
  axes.set_title('task, epsilon (noise over signal of a step, evenness of coordinates)', fontsize=9)
  axes.grid(axis='x', alpha=.3)
  axes.legend(fontsize=7, loc='upper right')
  return figure


def of_studies(folder: pathlib.Path) -> Any:
  """Test losses of the methods of every study that is whole."""
  rows = _read(folder, 'studies')
  panels: Dict[Any, List[Dict[str, Any]]] = {}
  for one in rows:
    panels.setdefault((one['study'], one['task'], one['epsilon']), []).append(one)
  panels = {key: found for key, found in panels.items() if len(found) > 2}
  lines = -(-len(panels) // 4)
  figure, every = pyplot.subplots(lines, 4, figsize=(11.4, 2.4 * lines))
  for axes in every.flat[len(panels):]:
    axes.set_axis_off()
  for axes, ((study, task, epsilon), found) in zip(every.flat, panels.items()):
    methods = [m for m in studies.METHODS[study] if any(one['method'] == m for one in found)]
    for y, method in enumerate(methods):
      one = next(one for one in found if one['method'] == method)
      axes.errorbar(one['loss'], -y, xerr=one['interval'], fmt='o', ms=5, color='#1f77b4')
    axes.set_yticks([-y for y in range(len(methods))], [
        m.replace('DP2RMSprop, ', 'DP2, ').replace('DPAdamW, corrected', 'DPAdamW-BC')
        for m in methods], fontsize=7)
    axes.set_ylim(-len(methods) + .5, .5)
    axes.tick_params(axis='x', labelsize=7)
    axes.locator_params(axis='x', nbins=4)
    axes.set_title(f'{study.replace("_", " ")}: {task}, epsilon {epsilon:g}', fontsize=8)
    axes.set_xlabel('test loss', fontsize=8)
    axes.grid(axis='x', alpha=.3)
  return figure


def of_abstracts(study: abstracts.Study, folder: pathlib.Path) -> Any:
  """Figure 3 in miniature, and beside it Figures 4 and 6."""
  rows = [one for one in _read(folder, study.file) if one['seed'] in abstracts.TEST_SEEDS]
  figure, (left, middle, right) = pyplot.subplots(
      1, 3, figsize=(11, 3.1), gridspec_kw=dict(width_ratios=[2.2, 1, 1]))
  methods = [m for m in abstracts.KINDS if any(one['method'] == m for one in rows)]
  styles = dict(independent='o', banded='D', blt='s', none='*')
  for noise, marker in styles.items():
    places, values = [], []
    for y, method in enumerate(methods):
      found = [one['test'] for one in rows if (one['method'], one['noise']) == (method, noise)]
      places += [-y] * len(found)
      values += found
    if not values:
      continue
    left.plot(values, places, marker, ms=6, mfc='none', label=f'{noise} noise' if noise != 'none'
              else 'without noise')
  left.set_yticks([-y for y in range(len(methods))], [
      m + (' (not private)' if m in (*abstracts.IDEALS, *abstracts.WITHOUT_NOISE) else '')
      for m in methods], fontsize=8)
  left.set_xlabel('test loss, nats per word (a point per run)', fontsize=8)
  left.legend(fontsize=7)
  left.grid(axis='x', alpha=.3)
  for one in rows:
    if one['negative'] and one['seed'] == abstracts.TEST_SEEDS[0]:
      middle.plot([int(t) for t in one['negative']], list(one['negative'].values()),
                  styles[one['noise']] + '-', ms=4, mfc='none', label=one['noise'])
  middle.set_title('negative after bias correction', fontsize=8)
  middle.set_xlabel('step', fontsize=8)
  middle.set_ylabel('share of coordinates', fontsize=8)
  middle.legend(fontsize=7)
  roots = next((one['roots'] for one in rows if one['method'] == 'Adam'), None)
  if roots:
    right.plot(np.linspace(0, 1, len(roots)), np.maximum(roots, 1e-6), label='without noise')
    sigma = next(one['noise_multiplier'] for one in rows if one['noise'] == 'independent')
    right.axhline(sigma / study.batch, lw=.8, ls='--', color='black', label='private noise')
    right.set_yscale('log')
    right.set_title('root of second moment', fontsize=8)
    right.set_ylabel('clip norms', fontsize=8)
    right.set_xlabel('share of coordinates below', fontsize=8)
    right.legend(fontsize=7)
  return figure


def of_federated(folder: pathlib.Path) -> Any:
  """Losses of servers, a marker per noise, a panel per population of users."""
  rows = _read(folder, 'federated_servers')
  populations = list(dict.fromkeys(one['users'] for one in rows))
  servers = list(dict.fromkeys(one['server'] for one in rows))
  noises = dict(zip(dict.fromkeys(one['noise'] for one in rows), 'oDs^'))
  figure, every = pyplot.subplots(1, len(populations), figsize=(10, 2.9), squeeze=False)
  for axes, users in zip(every[0], populations):
    for i, (noise, marker) in enumerate(noises.items()):
      found = {one['server']: one['runs'] for one in rows
               if one['users'] == users and one['noise'] == noise}
      for server, runs in found.items():
        y = -servers.index(server) + .12 * (1.5 - i)
        axes.errorbar(np.mean(runs), y, fmt=marker, ms=4, lw=.8, mfc='none', color=f'C{i}',
                      xerr=np.std(runs, ddof=1) / len(runs)**.5, capsize=2,
                      label=noise if server == servers[0] else None)
    axes.set_yticks([-y for y in range(len(servers))], servers, fontsize=8)
    axes.tick_params(axis='x', labelsize=8)
    axes.set_xlabel('test loss, nats per word (mean of ten runs)', fontsize=8)
    axes.set_title(f'users: {users}', fontsize=9)
    axes.grid(axis='x', alpha=.3)
  every[0][-1].legend(fontsize=7, loc='center right')
  return figure


def of_batch_size(folder: pathlib.Path) -> Any:
  """Noise over batch size at one budget of examples; formulas alone."""
  del folder
  sizes = [64 * 2**i for i in range(10)]
  steps = [600_000 // size for size in sizes]
  noises = [tfdp.PrivacyPlan.calibrate(
      population_size=60_000, batch_size=size, steps=count, target_epsilon=2.0, target_delta=1e-5,
      l2_norm_clip=1.0).noise_multiplier / size for size, count in zip(sizes, steps)]
  of_step = [noise * math.sqrt(10_000) / .1 for noise in noises]  # At a signal of .1 clip norms.
  figure, axes = pyplot.subplots(figsize=(7.5, 3.6))
  axes.plot(sizes, of_step, 'o-', color='#1f77b4', label='noise over signal of a step')
  axes.plot(sizes, [noise / math.sqrt(count) for noise, count in zip(of_step, steps)], 'D-',
            color='#d62728', mfc='white', label='noise over signal of the sum of all steps')
  axes.axhline(1, color='#1f77b4', lw=.8, ls=':')
  few = [size for size, count in zip(sizes, steps) if count < 100]
  axes.axvspan(few[0] / math.sqrt(2), sizes[-1] * math.sqrt(2), color='#cccccc', alpha=.5,
               label='fewer than 100 steps')
  clear = next(size for size, noise in zip(sizes, of_step) if noise < 1)
  axes.axvline(clear, color='#2ca02c', lw=6, alpha=.3, label='proposed')
  axes.set_xscale('log', base=2)
  axes.set_yscale('log')
  axes.set_yticks([.03, .1, .3, 1, 3, 10], ['.03', '.1', '.3', '1', '3', '10'])
  axes.set_xticks(sizes, [f'{size:,}\n{count:,}' for size, count in zip(sizes, steps)],
                  fontsize=8)
  axes.minorticks_off()
  axes.set_xlim(sizes[0] / math.sqrt(2), sizes[-1] * math.sqrt(2))
  axes.set_xlabel('batch size, and the steps that the budget leaves')
  axes.grid(alpha=.3)
  axes.legend(fontsize=8)
  return figure


def of_texts(folder: pathlib.Path) -> Any:
  """The accuracy of private text classifiers over epsilon, beside no noise and public records."""
  rows = _read(folder, 'text_vectors')
  tasks = list(dict.fromkeys(row['task'] for row in rows))
  figure, panels = pyplot.subplots(1, len(tasks), figsize=(7.5, 3.1))
  for axes, task in zip(panels, tasks):
    mine = [row for row in rows if row['task'] == task]
    titles = [name for name in mine[0] if name.startswith('eps ')]
    values = np.array([[row[name] for name in titles] for row in mine])
    axes.errorbar([float(name[4:]) for name in titles], values.mean(0), values.std(0), fmt='o-',
                  color='#d62728', ms=5, label='private')
    for name, color, label in (('no noise', '#2ca02c', 'without noise'),
                               ('300 alone', '#1f77b4', '300 public texts alone'),
                               ('majority', '#777777', 'largest class')):
      axes.axhline(np.mean([row[name] for row in mine]), color=color, lw=1.2, ls='--', label=label)
    axes.set_xscale('log')
    axes.set_xticks([.1, .5, 1, 8], ['0.1', '0.5', '1', '8'])
    axes.minorticks_off()
    axes.set_xlabel('epsilon')
    axes.set_title(task, fontsize=10)
    axes.grid(alpha=.3)
  panels[0].set_ylabel('test accuracy')
  panels[-1].legend(fontsize=7, loc=(.46, .2))
  return figure


PICTURES = dict(
    texts=of_texts, evidence=evidence, studies=of_studies, federated=of_federated,
    batch_size=of_batch_size, **{
        study.file: functools.partial(of_abstracts, study) for study in abstracts.STUDIES.values()})


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('pictures', nargs='*', metavar='PICTURE', help=f'of {", ".join(PICTURES)}')
  parser.add_argument('--results', type=pathlib.Path, default=pathlib.Path('benchmarks/results'))
  parser.add_argument('--out', type=pathlib.Path, default=pathlib.Path('docs'))
  options = parser.parse_args()
  for name in options.pictures or PICTURES:
    figure = PICTURES[name](options.results)
    figure.tight_layout()
    figure.savefig(options.out / f'{name}.png', dpi=100)


if __name__ == '__main__':
  main()
