# SPDX-License-Identifier: Apache-2.0
"""How a setting of private training is judged by few public examples, on tables, in NumPy.

    PYTHONPATH=. python benchmarks/evidence/overfitting.py > benchmarks/results/overfitting.txt

Few examples overfit and many private ones will not. Logistic regression is trained privately with
40 settings (two starts, DP-Adam and DP-SGD, two clip norms, five rates) on parts of the public
examples, with the noise of the plan. With s the mean loss of the examples that were trained on and
u that of the others, every rule below chooses a setting. The excess is the test loss of that
setting, after training on the private examples, over the least of all 40.
"""

import argparse
import os
import sys

import numpy as np
import recommend_tasks

STEPS, BATCH, SMALL = 300, 256, 32
NOISE = {1.0: 1.6, 8.0: 0.7}  # Noise multipliers of about these epsilons, for 10,000 records.
RULES = {
    'u': lambda s, u, s0, u0: u,
    '(u + s) / 2': lambda s, u, s0, u0: (u + s) / 2,
    'u - (u - s) / 2 (s / u)^.5': lambda s, u, s0, u0: u - (u - s) / 2 * np.minimum(1, s / u)**.5,
    'u - (u - s) / 2 (s / u)': lambda s, u, s0, u0: u - (u - s) / 2 * np.minimum(1, s / u),
    '(u0 + s0) / 2 + u - u0': lambda s, u, s0, u0: (u0 + s0) / 2 + u - u0}


def probabilities(weights, x):
  scores = x @ weights
  scores = np.exp(scores - scores.max(1, keepdims=True))
  return scores / scores.sum(1, keepdims=True)


def losses(weights, x, y):
  return -np.log(np.maximum((probabilities(weights, x) * y).sum(1), 1e-30))


def norms(weights, x, y):
  return np.linalg.norm(probabilities(weights, x) - y, axis=1) * np.linalg.norm(x, axis=1)


def train(weights, x, y, batch, steps, clip, rate, stddev, adam, seed):
  """Returns weights after private steps whose rate falls to zero."""
  rng, weights = np.random.default_rng(seed), weights.copy()
  mean, square = np.zeros_like(weights), np.zeros_like(weights)
  for step in range(steps):
    rows = rng.integers(len(x), size=batch)
    some, wanted = x[rows], y[rows]
    errors = probabilities(weights, some) - wanted
    own = np.linalg.norm(errors, axis=1) * np.linalg.norm(some, axis=1)
    errors *= np.minimum(1, clip / np.maximum(own, 1e-12))[:, None]
    direction = some.T @ errors / batch
    direction += stddev * clip * rng.standard_normal(weights.shape, np.float32)
    if adam:
      mean = .9 * mean + .1 * direction
      square = .999 * square + .001 * direction**2
      direction = mean / (1 - .9**(step + 1)) / (
          np.sqrt(square / (1 - .999**(step + 1))) + 1e-8)
    weights -= rate * (1 - step / steps) * direction
  return weights


def public_start(x, y, parts):
  """Returns a training on public examples alone, with the rate and steps of least loss."""
  zero = np.zeros([x.shape[1], y.shape[1]], np.float32)
  unit = 1 / (16 * np.median(norms(zero, x, y)))
  def run(rows, rate, steps):
    return train(zero, x[rows], y[rows], SMALL, steps, 1e9, rate * unit, 0.0, True, 3)
  def unseen(rate, steps):
    return np.mean([losses(run(np.setdiff1d(np.arange(len(x)), part), rate, steps),
                           x[part], y[part]).mean() for part in parts])
  rate, steps = min(((rate, 2**i) for rate in (.3, 3.0) for i in range(4, 10)),
                    key=lambda recipe: unseen(*recipe))
  return lambda rows: run(rows, rate, steps)


def study(task, epsilon):
  """Returns [settings, 5]: s, u, both without noise, and the test loss."""
  (px, py), (tx, ty), (x, y) = [
      (np.concatenate([part[0], np.ones([len(part[0]), 1])], 1).astype(np.float32),
       np.eye(int(task.private[1].max()) + 1, dtype=np.float32)[part[1].astype(int).ravel()])
      for part in (task.public, task.test, task.private)]
  parts = np.array_split(np.random.default_rng(0).permutation(len(px)), 4)
  zero, warm = np.zeros([px.shape[1], py.shape[1]], np.float32), public_start(px, py, parts)
  stddev, found = NOISE[epsilon] / BATCH, []
  for start in (0, 1):
    for adam in (True, False):
      for clip in (1.0, 3.0):
        for rate in 10**(np.arange(-1, 1.1, .5) - start):
          def settled(weights, some, wanted, adam=adam, clip=clip, rate=rate):
            norm = np.median(norms(weights, some, wanted))
            unit = 1 / (norm * np.sqrt(STEPS))
            return clip * norm, rate * unit / (1.0 if adam else norm * min(1.0, clip))
          row = []
          for fold in (0, 2):
            others = [parts[(fold + i) % 4] for i in (1, 2, 3)]
            seen = others[0] if start else np.concatenate(others)
            weights = warm(np.concatenate(others[1:])) if start else zero
            numbers = settled(weights, px[seen], py[seen])
            for noise in (stddev, 0.0):
              end = train(weights, px[seen], py[seen], SMALL, STEPS, *numbers, noise, adam, fold)
              row += [losses(end, px[rows], py[rows]).mean() for rows in (seen, parts[fold])]
          weights = warm(np.arange(len(px))) if start else zero
          end = train(weights, x, y, BATCH, STEPS, *settled(weights, px, py), stddev, adam, 5)
          found.append([*np.reshape(row, [2, 4]).mean(0), losses(end, tx, ty).mean()])
  return np.nan_to_num(np.array(found), nan=1e3)


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--data', default='../../shared/data', help='folder of the real data')
  options = parser.parse_args()
  sys.path.insert(0, options.data)
  tasks = recommend_tasks.all_tasks(os.path.abspath(options.data))
  excess = {name: [] for name in RULES}
  for name in ('sparse_signal', 'opinions', 'sites'):
    for epsilon in NOISE:
      *judged, test = study(tasks[name](), epsilon).T
      for rule, charge in RULES.items():
        excess[rule].append(100 * (test[charge(*judged).argmin()] / test.min() - 1))
        print(f'{name:14} epsilon {epsilon:g}  {rule:28} {excess[rule][-1]:5.1f}%', flush=True)
  for rule, values in excess.items():
    print(f'{"all":14} {"":10} {rule:28} {np.mean(values):5.1f}%  largest {max(values):.1f}%')


if __name__ == '__main__':
  main()
