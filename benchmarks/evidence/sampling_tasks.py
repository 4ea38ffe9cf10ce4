# SPDX-License-Identifier: Apache-2.0
"""What sampling laws and correlated noise are worth to a model: two convex tasks, at one epsilon.

    PYTHONPATH=. python benchmarks/evidence/sampling_tasks.py --data FOLDER

prints benchmarks/results/sampling_tasks.txt but for its last paragraph; a minute of one core.
Softmax regression by DP-SGD: *mnist* on images of 14 x 14, *polarity* on which of 1,000 words a
sentence has. Epsilon 1, delta 1e-5, batches of 256. Batches, noise multipliers and strategies are
the library's. Learning rate and clip norm of each method are chosen among 15 settings by one run on
validation records; losses are of eight other runs on test records, with the standard error.

*NoiseCurve* (arXiv 2510.05416) designs C for what a quadratic with the curvature of the loss makes
of the noise, and not for prefix sums: along an eigenvector with curvature h, the noise of a step is
remembered as (1 - eta h)^(age), and costs h times its square. Curvatures are those of the start,
from 1,000 PUBLIC inputs, that are in none of the other sets.
"""

import argparse
import collections
import itertools
import lzma
import pathlib
import re
from typing import Any, List, NamedTuple, Tuple

import numpy as np
from scipy import optimize
from scipy import signal

from tfdp_adaptive import mechanisms
from tfdp_adaptive.accounting import sampling
from tfdp_adaptive.privacy import plan as plan_lib

BATCH, SEEDS, WORDS, PUBLIC, LEVELS = 256, 8, 1000, 1000, 16
RATES, CLIPS = (0.3, 1.0, 3.0, 10.0, 30.0), (0.1, 0.3, 1.0)


class Task(NamedTuple):
  """Records [n, d] and labels [n] for training, validation and test; public inputs."""

  name: str
  sets: List[Tuple[np.ndarray, np.ndarray]]
  public: np.ndarray
  classes: int
  groups: int
  rounds: int


def mnist(folder: pathlib.Path) -> Task:
  def read(name: str) -> np.ndarray:
    with lzma.open(folder / 'mnist' / f'{name}.npy.xz') as file:
      return np.load(file)

  x, y = read('x_train'), read('y_train')
  x = x.reshape(-1, 14, 2, 14, 2).mean(axis=(2, 4)).reshape(len(x), -1) / 255.0
  return split('mnist', x / 6.0, y.astype(int), 78, 10, 6, 4)


def polarity(folder: pathlib.Path) -> Task:
  with lzma.open(folder / 'sentiment' / 'sentence_polarity.tsv.xz', 'rt', encoding='utf8') as file:
    rows = [line.rstrip('\n').split('\t', 2) for line in file if line.strip()]
  words = [set(re.findall(r"[a-z']+", text.lower())) for _, _, text in rows]
  common = [word for word, _ in collections.Counter(
      word for one in words for word in one).most_common(WORDS)]
  column = {word: i for i, word in enumerate(common)}
  x = np.zeros((len(rows), WORDS))
  for i, one in enumerate(words):
    x[i, [column[word] for word in one if word in column]] = 1
  return split('polarity', x / 4.0, np.array([int(row[0]) for row in rows]), 27, 2, 3, 10)


def split(name: str, x: np.ndarray, y: np.ndarray, bins: int, classes: int, groups: int,
          rounds: int) -> Task:
  order = np.random.default_rng(0).permutation(len(x))
  x = np.concatenate([x[order], np.ones((len(x), 1)) / 4], axis=1)
  y, size, sets, at = y[order], bins * BATCH, [], PUBLIC
  rest = min(5000, (len(x) - PUBLIC - size) // 2)
  for count in (size, rest, rest):
    sets.append((x[at:at + count], y[at:at + count]))
    at += count
  return Task(name, sets, x[:PUBLIC], classes, groups, rounds)


def curvatures(task: Task) -> Tuple[np.ndarray, np.ndarray]:
  """Of the loss at the start, and how many directions have each: H = E x x^T (x) (1 / K)."""
  values = np.linalg.eigvalsh(task.public.T @ task.public / len(task.public)) / task.classes
  values = np.maximum(values, 1e-7)
  edges = np.geomspace(values.min(), values.max() * 1.001, LEVELS + 1)
  level = np.clip(np.searchsorted(edges, values, 'right') - 1, 0, LEVELS - 1)
  counts = np.bincount(level, minlength=LEVELS)
  means = np.bincount(level, values, LEVELS) / np.maximum(counts, 1)
  return means[counts > 0], counts[counts > 0]


def noise_curve(task: Task, rate: float, bands: int, steps: int) -> mechanisms.Mechanism:
  """The banded C of least loss of a quadratic with these curvatures."""
  values, counts = curvatures(task)
  kept = np.maximum(1 - rate * values, -1)[:, None] ** np.arange(steps)
  weights = (values * counts)[:, None] * (1 - np.arange(steps) / steps)

  def loss(logits: np.ndarray) -> float:
    c = np.concatenate([[1.0], logits])
    inverse = signal.lfilter([1.0], c, np.eye(1, steps)[0])
    with np.errstate(over='ignore', invalid='ignore'):
      left = signal.fftconvolve(kept, inverse[None], axes=1)[:, :steps]
      value = float(np.log(np.sum(weights * left**2) * (c @ c)))
    return value if np.isfinite(value) else 1e3

  start = mechanisms.BandedToeplitz(bands, steps).strategy(bands)[1:bands]
  start = np.asarray(start) / np.asarray(mechanisms.BandedToeplitz(bands, steps).strategy(1))[0]
  best = min((optimize.minimize(loss, share * start, method='L-BFGS-B') for share in (1.0, 0.3)),
             key=lambda found: found.fun)
  c = np.concatenate([[1.0], best.x])
  return mechanisms.BandedToeplitz(
      bands, steps, coefficients=tuple((c / np.linalg.norm(c)).tolist()))


def methods(task: Task) -> List[Tuple[str, Any, Any]]:
  """(name, sampling, mechanism of a learning rate and the steps)."""
  bins, p = len(task.sets[0][0]) // BATCH, task.groups
  independent = lambda rate, steps: mechanisms.IndependentGaussian()
  banded = lambda rate, steps: mechanisms.BandedToeplitz(p, steps)
  curved = lambda rate, steps: noise_curve(task, rate, p, steps)
  return [
      ('Poisson, independent', sampling.Poisson(), independent),
      (f'RandomAllocation({bins}), independent', sampling.RandomAllocation(bins), independent),
      (f'CyclicPoisson({p}), {p} bands', sampling.CyclicPoisson(p), banded),
      (f'RandomAllocation({bins}, groups={p}), {p} bands',
       sampling.RandomAllocation(bins, groups=p), banded),
      (f'RandomAllocation({bins}, groups={p}), {p} bands by NoiseCurve',
       sampling.RandomAllocation(bins, groups=p), curved)]


def train(task: Task, plan: plan_lib.PrivacyPlan, rate: float, clip: float, seed: int,
          scored: int) -> Tuple[float, float]:
  """(loss, accuracy) on set number `scored` after one run of DP-SGD."""
  rng = np.random.default_rng([seed, 77])
  x, y = task.sets[0]
  theta = np.zeros((x.shape[1], task.classes))
  noise = plan.noise_multiplier * signal.lfilter(
      [1.0], np.asarray(plan.mechanism.strategy(min(plan.steps, plan.mechanism.bands or 1))),
      rng.standard_normal((plan.steps, theta.size)), axis=0)
  for batch, row in zip(plan.index_batches(), noise):
    errors = softmax(x[batch] @ theta) - np.eye(task.classes)[y[batch]]
    norms = np.linalg.norm(x[batch], axis=1) * np.linalg.norm(errors, axis=1)
    weights = np.minimum(1, clip / np.maximum(norms, 1e-12))
    total = x[batch].T @ (weights[:, None] * errors) + clip * row.reshape(theta.shape)
    theta -= rate * total / (clip * BATCH)
  x, y = task.sets[scored]
  p = softmax(x @ theta)
  return float(-np.mean(np.log(np.maximum(p[np.arange(len(y)), y], 1e-12)))), float(
      np.mean(p.argmax(axis=1) == y))


def softmax(scores: np.ndarray) -> np.ndarray:
  p = np.exp(scores - scores.max(axis=1, keepdims=True))
  return p / p.sum(axis=1, keepdims=True)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--data', type=pathlib.Path, required=True)
  for make in (mnist, polarity):
    folder = parser.parse_args().data
    task = make(folder)
    size = len(task.sets[0][0])
    steps = task.rounds * size // BATCH
    print(f'\n{task.name}: {size} records, {steps} steps, {task.classes} classes\n\n'
          f'{"":52}{"sigma":>7}{"error":>7}{"rate":>6}{"clip":>6}{"test loss":>17}{"accuracy":>10}')
    for name, scheme, mechanism_of in methods(task):
      plans, found = {}, []
      for rate, clip in itertools.product(RATES, CLIPS):
        mechanism = mechanism_of(rate / clip, steps)
        if mechanism not in plans:
          plans[mechanism] = plan_lib.PrivacyPlan.calibrate(
              target_epsilon=1.0, target_delta=1e-5, population_size=size, batch_size=BATCH,
              steps=steps, l2_norm_clip=1.0, sampling=scheme, mechanism=mechanism)
        found.append((train(task, plans[mechanism], rate, clip, 0, 1)[0], rate, clip,
                      plans[mechanism]))
      _, rate, clip, plan = min(found, key=lambda one: one[0])
      scores = np.array([train(task, plan, rate, clip, 1 + seed, 2) for seed in range(SEEDS)])
      mean, error = scores.mean(axis=0), scores.std(axis=0, ddof=1) / SEEDS**0.5
      print(f'{name:52}{plan.noise_multiplier:7.3f}'
            f'{plan.noise_multiplier * plan.mechanism.rmse(steps):7.2f}{rate:6g}{clip:6g}'
            f'{mean[0]:10.4f} ± {error[0]:.4f}{mean[1]:10.4f}', flush=True)


if __name__ == '__main__':
  main()
