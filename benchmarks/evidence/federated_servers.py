# SPDX-License-Identifier: Apache-2.0
"""Servers and noises for two populations of users, equal epsilon, equal tuning.

    PYTHONPATH=. python benchmarks/evidence/federated_servers.py [--data FOLDER] [--out FILE]
        [USERS ...]

The task is that of `federated_bigrams.py`, so small that all can be tuned; `--check` compares its
rounds with TFF's. Every server has twelve settings with every noise, chosen by the loss of one run
on validation users; losses are of ten other runs, on test users. It goes on where it was
interrupted.
"""

import argparse
import itertools
import json
import os
import time
from typing import Any, Dict, Iterator, List, Tuple

import federated_bigrams as bigrams
import numpy as np
import tensorflow as tf

from tfdp_adaptive import rules

TUNING_SEED, TEST_SEEDS = 1, tuple(range(11, 21))
PILOT = 200  # Validation users whose updates at the start give the units of the grids.
NOISES = ('independent', 'banded', 'blt', 'tree')
SERVERS = ('DP-SGD', 'DP-Adam', 'DP-AdamBC', 'DP-AdamSTP', 'DP2')


def grid(server: str, norm: float, noise: float) -> Iterator[Tuple[Any, Dict[str, float], Any]]:
  """Twice (rule, what it is made of with the clip norm, six server learning rates).

  Of updates of `norm` at the start; `noise` is that of a coordinate of a release, in clip norms.
  Nearly all updates are clipped, so that a smaller clip norm would be a smaller rate.
  """
  size = sum(int(tf.size(w)) for w in bigrams.initial().trainable)
  clip = .3 * norm
  made: Dict[str, Any]
  if server == 'DP-SGD':
    for momentum in (0.0, .9):
      rates = (1 - momentum) * norm / clip * np.array(SGD_RATES)
      yield rules.dp_sgd(momentum), dict(momentum=momentum, l2_norm_clip=clip), rates
  elif server == 'DP-AdamSTP':
    for radius in (.3, 1.0):
      made = dict(epsilon=1e-8, scale_epsilon=.01 * norm / size**.5)
      yield (rules.scale_then_privatize(**made),
             dict(made, l2_norm_clip=radius * size**.5), ADAM_RATES)
  elif server == 'DP2':  # Its adaptive rounds have noise as large as the others.
    for floors in (.3, 3.0):
      epsilon = floors * noise * clip / DELAY**.5
      made = dict(epsilon=epsilon, relative_adaptive_clip=.03 / epsilon,
                  relative_adaptive_learning_rate=epsilon / .03)
      yield (rules.dp2_rmsprop(DELAY, DELAY, **made),
             dict(made, delay=DELAY, floors=floors, l2_norm_clip=clip),
             norm / clip * np.array(SGD_RATES))
  else:
    corrected = server == 'DP-AdamBC'
    for floors in (.3 if corrected else .1, 1.0):
      made = dict(epsilon=floors * noise * clip)
      yield ((rules.dp_adam_bc if corrected else rules.dp_adam)(**made),
             dict(made, floors=floors, l2_norm_clip=clip), ADAM_RATES)


DELAY = 5
SGD_RATES, ADAM_RATES = (1.5, 3.0, 6.0, 12.0, 24.0, 48.0), (.04, .08, .16, .32, .64, 1.28)


def row(task: bigrams.Task, noise: str, names: Any) -> Iterator[Dict[str, Any]]:
  """Tunes, and trains again with other draws; a row per server."""
  plans = {seed: bigrams.make_plan(noise, task, seed) for seed in (TUNING_SEED, *TEST_SEEDS)}
  plan = plans[TUNING_SEED]
  people = list(task.users.values())
  drawn = {seed: [[people[i] for i in batch] for batch in one.index_batches()]
           for seed, one in plans.items()}
  size = max(len(cohort) for run in drawn.values() for cohort in run)
  cohorts = {}
  for seed, run in drawn.items():
    rng = np.random.default_rng(seed)
    cohorts[seed] = tf.constant(np.stack([bigrams.packed(cohort, rng, size) for cohort in run]))
  first = list(task.validation.values())[:PILOT]
  found = bigrams.updates(
      task, bigrams.initial().trainable[0],
      tf.constant(bigrams.packed(first, np.random.default_rng(0), len(first))))
  norm = float(np.median(np.linalg.norm(np.reshape(found, [len(first), -1]), axis=1)))
  spread = plan.noise_multiplier * float(np.median(plan.mechanism.row_norms(bigrams.ROUNDS)))
  for server in names:
    began, tried = time.process_time(), []
    for rule, settings, rates in grid(server, norm, spread / bigrams.CLIENTS):
      train = bigrams.Run(task, rule, plan, settings['l2_norm_clip'])
      for rate in map(float, rates):
        weights = train(cohorts[TUNING_SEED], rate, TUNING_SEED)
        tried.append((bigrams.loss_of(task, weights, task.validation), train,
                      dict(settings, server_learning_rate=rate)))
    validation, train, settings = min(tried, key=lambda one: one[0])
    runs = [bigrams.loss_of(
        task, train(cohorts[seed], settings['server_learning_rate'], seed), task.test)
            for seed in TEST_SEEDS]
    yield dict(
        users=task.name, noise=noise, server=server, epsilon=bigrams.EPSILON, delta=bigrams.DELTA,
        rounds=bigrams.ROUNDS, population_size=len(task.users), clients=bigrams.CLIENTS,
        parameters=weights.size, noise_multiplier=plan.noise_multiplier,
        release_noise=spread / bigrams.CLIENTS, norm=norm,
        rmse=float(plan.noise_multiplier * plan.mechanism.rmse(bigrams.ROUNDS)),
        start=bigrams.loss_of(task, np.zeros_like(weights), task.test), tried=len(tried),
        settings={name: float(f'{value:.4g}') for name, value in settings.items()},
        validation=validation, all_validation=[round(one, 4) for one, *_ in tried],
        seeds=[TUNING_SEED, *TEST_SEEDS], runs=runs, loss=float(np.mean(runs)),
        seconds=round(time.process_time() - began, 1))


def standard_error(runs: List[float]) -> float:
  """Of the mean of independent runs."""
  return float(np.std(runs, ddof=1) / len(runs)**.5)


def table(rows: List[Dict[str, Any]], users: str) -> str:
  """A line per server, a column per noise."""
  found = {(one['server'], one['noise']): one for one in rows if one['users'] == users}
  one = next(iter(found.values()))
  lines = [
      f'{users}: {one["population_size"]} users, {one["clients"]} in a round, {one["rounds"]} '
      f'rounds, {one["parameters"]} parameters, epsilon {one["epsilon"]:g} at delta '
      f'{one["delta"]:g}; public frequencies alone {one["start"]:.4f}.',
      f'{"":12}' + ''.join(f'{noise:>20}' for noise in NOISES)]
  for name, key in (('noise', 'release_noise'), ('in sums', 'rmse')):
    lines.append(f'{name:12}' + ''.join(
        '{:20.4g}'.format(next(row[key] for row in found.values() if row['noise'] == noise))
        if any(row['noise'] == noise for row in found.values()) else f'{"-":>20}'
        for noise in NOISES))
  for server in SERVERS:
    cells = [found.get((server, noise)) for noise in NOISES]
    lines.append(f'{server:12}' + ''.join(
        f'{"-":>20}' if cell is None else
        f'{cell["loss"]:11.4f} +- {standard_error(cell["runs"]):.4f}'.rjust(20)
        for cell in cells))
  return '\n'.join(lines)


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('users', nargs='*', metavar='USERS', help='stackexchange, shakespeare')
  parser.add_argument('--data', default='shared/data', help="folder of the users' texts")
  parser.add_argument('--out', default='benchmarks/results/federated_servers.json')
  parser.add_argument('--noises', nargs='+', choices=NOISES, default=NOISES)
  parser.add_argument('--check', action='store_true', help="compare two rounds with TFF's")
  parser.add_argument('--table', action='store_true', help='print what is there, train nothing')
  options = parser.parse_args()
  rows: List[Dict[str, Any]] = []
  if os.path.exists(options.out):
    with open(options.out, encoding='utf-8') as stream:
      rows = json.load(stream)
  wanted = list(itertools.product(options.users or bigrams.FILES, options.noises, SERVERS))
  done = {(one['users'], one['noise'], one['server']) for one in rows}
  for threads in (tf.config.threading.set_intra_op_parallelism_threads,
                  tf.config.threading.set_inter_op_parallelism_threads):
    threads(1)  # Operations this small are dearer with more.
  for users in () if options.table else dict.fromkeys(users for users, *_ in wanted):
    left = [one for one in wanted if one[0] == users and one not in done]
    if not left and not options.check:
      continue
    task = bigrams.load(users, options.data)
    if options.check:
      print(f'{users}: after two rounds here and in TFF weights differ by '
            f'{bigrams.check(task):.1e} of the largest.')
      continue
    for noise in dict.fromkeys(noise for _, noise, _ in left):
      for one in row(task, noise, [server for _, other, server in left if other == noise]):
        rows.append(one)
        print('{users:14} {noise:12} {server:12} {loss:.4f} {runs} {seconds:.0f} s {settings} '
              '{all_validation}'.format(**one), f'{len(rows)} of {len(wanted)}', flush=True)
        with open(options.out + '.new', 'w', encoding='utf-8') as stream:
          stream.write('[\n' + ',\n'.join(json.dumps(r) for r in rows) + '\n]\n')
        os.replace(options.out + '.new', options.out)
  for users in dict.fromkeys(one['users'] for one in rows):
    print('\n' + table(rows, users))


if __name__ == '__main__':
  main()
