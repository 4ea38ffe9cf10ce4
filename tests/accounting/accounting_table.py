# SPDX-License-Identifier: Apache-2.0
"""Writes docs/accounting.md: `make accounting-table`, about twenty minutes of one core.

With `--found FILE` what is found is kept there, one line a plan, and is not computed again: the
work may be done in parts, `--first` and `--last` of the plans at a time.
"""

import argparse
import json
import math
import pathlib
import time

import accounting_oracle
import composition_test
import dp_accounting
import numpy as np

from tfdp_adaptive.accounting import allocation
from tfdp_adaptive.accounting import cost
from tfdp_adaptive.accounting import poisson

BOUNDS = (1e-5, 1e-4, 1e-3, 1e-2, math.inf)
# Law -> its plans, and what they are.
LAWS = {
    'poisson': (range(1000), '''Poisson sampling

The plans have Poisson-sampled Gaussian noise, delta from 1e-15 to 1e-3, 1 to {most:.0e} steps,
records that take part 0.3 to 1,000 times, and any size of epsilon. `composition_test.random_plan`
draws them.'''),
    'allocation': (range(1000, 1100), '''Random allocation

2 to 200 batches in a round, up to {most:.0f} rounds, delta from 1e-8 to 1e-3. The distribution of
the loss in one round comes from a Fourier transform of lognormals.'''),
    'examples': (range(1100, 1200), '''Users whose examples are sampled

2 to 8 examples of a user, 10 to {most:.0f} steps, delta from 1e-8 to 1e-3. For two
plans the table below counts an epsilon below the truth, but the error is the oracle's. On a grid
of 5e-4, dp_accounting has the upper bounds 11.58251 and 7.03681. The library's epsilons are
11.58256 and 7.03684.''')}
PLANS = 1200
TEXT = '''# Epsilon against an independent accountant

`make accounting-table` makes this page from random plans. It compares the library's accountant with
`tests/accounting/accounting_oracle.py`, which shares no method with it. The library transforms a
grid of losses. The oracle integrates the moment generating function.
'''
SECTION = '''
## {title}

| epsilon above the truth by at most | of {count} plans |
|---|---|
{table}

Worst: {worst}

Number of epsilons below the truth by more than the error of the independent accountant: {below}.
This error is {error:g} in the logarithm of delta, and smaller if records take part more than once.
Plans for which the independent accountant gave no answer: {open}.
Median time of an epsilon: {median:.2g} seconds of one core, at most {slowest:.2g}.
'''


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--first', type=int, default=0)
  parser.add_argument('--last', type=int, default=PLANS)
  parser.add_argument('--seconds', type=float, default=math.inf, help='stop after so many')
  parser.add_argument('--found', type=pathlib.Path)
  parser.add_argument('--out', type=pathlib.Path,
                      default=pathlib.Path(__file__).parents[2] / 'docs' / 'accounting.md')
  arguments = parser.parse_args()
  rows = {}
  if arguments.found is not None and arguments.found.exists():
    lines = arguments.found.read_text(encoding='utf-8').splitlines()
    rows = {row['seed']: row for row in map(json.loads, lines)}
  stop = time.time() + arguments.seconds
  for seed in range(arguments.first, arguments.last):
    if seed in rows or time.time() > stop:
      continue
    rows[seed] = measured(seed)
    if arguments.found is not None:
      with open(arguments.found, 'a', encoding='utf-8') as file:
        file.write(json.dumps(rows[seed]) + '\n')
  if all(seed in rows for seed in range(PLANS)):
    arguments.out.write_text(TEXT + ''.join(
        section(title, [rows[seed] for seed in seeds]) for seeds, title in LAWS.values()),
                             encoding='utf-8')


def section(title, rows):
  decided = [row for row in rows if row['truth'] is not None and row['epsilon']]
  above = {row['seed']: row['epsilon'] / row['truth'] - 1 for row in decided}
  table, least = [], -math.inf
  for most in BOUNDS:
    count = sum(least < one <= most for one in above.values())
    table.append(f'| {f"{most:.3%}" if most < 1 else "more"} | {count} |')
    least = most
  worst = max(decided, key=lambda row: above[row['seed']])
  error = composition_test.ORACLE
  seconds = sorted(row['seconds'] for row in rows)
  return SECTION.format(
      count=len(rows), title=title.format(most=max(row['count'] for row in rows)),
      table='\n'.join(table),
      worst='{:.2%} above, at sampling probability {q:.2g}, noise multiplier {sigma:.3g}, {count} '
            'steps, delta {delta:.2g}.'.format(above[worst['seed']], **worst),
      error=error, open=len(rows) - len(decided),
      below=sum(row['log_delta'] > math.log(row['delta']) + error for row in decided),
      median=seconds[len(seconds) // 2], slowest=seconds[-1])


def drawn(seed, law):
  """A random plan: (q, noise multiplier, count, delta, event, oracle)."""
  if law == 'poisson':
    q, sigma, count, delta = composition_test.random_plan(seed)
    return q, sigma, count, delta, composition_test.sampled(q, sigma, count), lambda: (
        accounting_oracle.Oracle(q, sigma, count, 'remove'))
  rng = np.random.default_rng(seed)
  delta = float(10**rng.uniform(-8, -3))
  if law == 'allocation':
    bins, count = int(10**rng.uniform(0.3, 2.3)), int(10**rng.uniform(0, 2))
    sigma = float(0.9 + 10**rng.uniform(-0.5, 0.7) * math.sqrt(count / bins))
    event = allocation.AllocationDpEvent(sigma, ((bins, 1.0),))
    oracle = lambda: accounting_oracle.Allocation(bins, sigma, count)
    q = 1 / bins
  else:
    q, count, most = float(10**rng.uniform(-3, -0.3)), int(10**rng.uniform(1, 3)), int(
        rng.integers(2, 9))
    sigma = float(0.5 + most * q * 10**rng.uniform(-0.3, 0.7) * math.sqrt(count))
    event = poisson.UserExamplesDpEvent(sigma, q, most)
    oracle = lambda: accounting_oracle.Examples(q, sigma, count, most)
  return q, sigma, count, delta, dp_accounting.SelfComposedDpEvent(event, count), oracle


def measured(seed):
  law = next(law for law, (seeds, _) in LAWS.items() if seed in seeds)
  q, sigma, count, delta, event, oracle_of = drawn(seed, law)
  start = time.process_time()
  epsilon = cost.epsilon(event, delta)
  middle = time.process_time()
  oracle = oracle_of()
  try:
    log_delta = oracle.log_delta(epsilon)
    truth = solved(oracle.log_delta, math.log(delta), epsilon, log_delta) if epsilon else 0.0
  except (RuntimeError, ValueError) as e:
    log_delta, truth = str(e), None
  return dict(seed=seed, law=law, q=q, sigma=sigma, count=count, delta=delta, epsilon=epsilon,
              log_delta=log_delta, truth=truth, seconds=middle - start,
              oracle_seconds=time.process_time() - middle)


def solved(of, target, high, value):
  """Where a falling function is `target`, by secants below `high`, where it is `value`."""
  low, lower = high * (1 - 1e-4), None
  for _ in range(30):
    lower = of(low)
    if abs(lower - value) < 1e-9 * abs(target):
      return low
    new = low + (target - lower) * (high - low) / (value - lower)
    high, value = low, lower
    low = max(new, low / 2)
    if abs(low - high) < 1e-8 * high:
      return low
  return low


if __name__ == '__main__':
  main()
