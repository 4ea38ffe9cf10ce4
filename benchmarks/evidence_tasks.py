# SPDX-License-Identifier: Apache-2.0
"""The tasks of `evidence.py`: small, made up or real, a linear model or one hidden layer each."""

import os
import sys
from typing import Any, Callable, Dict, NamedTuple, Tuple

import numpy as np

from tfdp_adaptive.cli import showcases

_HELD_OUT = 4000


class Task(NamedTuple):
  """Records and a model.

  Attributes:
    name: In the table.
    epsilons: At which it is trained, delta 1e-5.
    batch_size: Expected.
    steps: Of every method.
    loss: 'softmax', 'logistic' or 'squares'.
    parts: `(x, y)` of training, validation and test.
    outputs: Of the model.
    hidden: Width of the hidden layer; 0 for none.
    offset: [outputs] public, added to the outputs.
  """

  name: str
  epsilons: Tuple[float, ...]
  batch_size: int
  steps: int
  loss: str
  parts: Tuple[Tuple[np.ndarray, np.ndarray], ...]
  outputs: int
  hidden: int = 0
  offset: Any = 0.0


def _parts(x: np.ndarray, y: np.ndarray, most: int = 20_000) -> Tuple[Any, ...]:
  """Training, validation and test records of one shuffled set; a constant input is added."""
  order = np.random.default_rng(7).permutation(len(x))[:most + 2 * _HELD_OUT]
  x = np.concatenate([x, np.ones([len(x), 1])], 1).astype(np.float32)[order]
  y = np.asarray(y)[order]
  ends = len(order) - 2 * _HELD_OUT, len(order) - _HELD_OUT
  return tuple((x[a:b], y[a:b]) for a, b in ((0, ends[0]), ends, (ends[1], len(order))))


def scales() -> Task:
  x, y = showcases.make_scales(28_000, 1)
  return Task('scales', (1.0, 4.0), 256, 300, 'logistic', _parts(x, y[:, 0]), 1)


def scales_narrow() -> Task:
  """The same in units from 3 to .3."""
  x, y = showcases.make_scales(28_000, 1)
  x = x / x.std(0) * np.geomspace(3, .3, x.shape[1])
  return Task('scales, narrow', (1.0, 4.0), 256, 300, 'logistic', _parts(x, y[:, 0]), 1)


def zipf() -> Task:
  """Class k of 32 comes with frequency proportional to 1/k, in noise as large as distances."""
  frequencies = (1 / np.arange(1, 33)) / np.sum(1 / np.arange(1, 33))
  rng = np.random.default_rng(1)
  labels = rng.choice(32, 28_000, p=frequencies)
  points = rng.normal(size=[32, 32])
  x = (points[labels] + rng.normal(size=[28_000, 32])) / np.sqrt(32)
  return Task('zipf classes', (4.0, 1.0), 200, 300, 'softmax', _parts(x, labels), 32,
              offset=np.log(frequencies))


def _relabelled(task: Task, name: str, label: Callable[..., np.ndarray]) -> Task:
  """At epsilon 4, with `label(rng, x, y)` for y."""
  rng = np.random.default_rng(9)
  return task._replace(name=name, epsilons=(4.0,), parts=tuple(
      (x, label(rng, x, y)) for x, y in task.parts))


def zipf_noisy() -> Task:
  """A fifth of the labels is drawn from the frequencies."""
  return _relabelled(
      zipf(), 'zipf classes, noisy',
      lambda rng, x, y: np.where(rng.random(len(y)) < .2, rng.permutation(y), y))


def scales_clean() -> Task:
  """Labels without noise: those of a linear model that was fitted to all records."""
  task = scales()
  x, y = (np.concatenate(values) for values in zip(*task.parts))
  size = x[:, :-1].std(0)
  fitted = np.linalg.lstsq(x[:, :-1] / size, y - .5, rcond=None)[0]
  return _relabelled(
      task, 'scales, clean',
      lambda rng, x, y: ((x[:, :-1] / size) @ fitted > 0).astype(np.float32))


def regression() -> Task:
  """100 inputs with standard deviations j^-1.5, as in Figure 1 of PAGAN, squared loss."""
  rng = np.random.default_rng(0)
  x = rng.normal(size=(18_000, 100)) * np.arange(1, 101)**-1.5
  y = x @ rng.choice([-1.0, 1.0], size=100) + rng.laplace(scale=.01, size=len(x))
  return Task('regression', (1.0, 4.0), 100, 300, 'squares', _parts(x, y, 10_000), 1)


def _mnist(load: Any) -> Tuple[np.ndarray, np.ndarray]:
  (x, y), _ = load.mnist()
  return x.reshape(-1, 14, 2, 14, 2).mean((2, 4)).reshape(-1, 196) / 255.0, y


def mnist(load: Any) -> Task:
  return Task('mnist, linear', (.5, 4.0, 1.0), 256, 300, 'softmax', _parts(*_mnist(load)), 10)


def mnist_hidden(load: Any) -> Task:
  return Task('mnist, hidden layer', (1.0, 8.0), 256, 300, 'softmax', _parts(*_mnist(load)), 10, 24)


def _bags(load: Any, texts: Any, size: int) -> np.ndarray:
  """Which of the most frequent words of WikiText-2 (public) each text has."""
  counts: Dict[str, int] = {}
  for word in load.wikitext2():
    word = word.lower()
    counts[word] = counts.get(word, 0) + word.isalpha()
  words = {w: i for i, w in enumerate(sorted(counts, key=lambda w: -counts[w])[:size])}
  bags = np.zeros([len(texts), size], np.float32)
  for row, text in enumerate(texts):
    for word in text.lower().split():
      index = words.get(word.strip('.,;:!?()"\''))
      if index is not None:
        bags[row, index] = 1
  return bags


def sentiment(load: Any) -> Task:
  records = load.sentiment('pros_cons')
  bags = _bags(load, [text for _, _, text in records], 1000)
  labels = np.array([label for label, _, _ in records], np.float32)
  return Task('pros and cons', (1.0, 4.0, .25), 256, 300, 'logistic', _parts(bags, labels), 1)


def sites(load: Any) -> Task:
  """The Stack Exchange site of a post, from its words."""
  records = load.stackexchange()
  names = sorted({record['site'] for record in records})
  bags = _bags(load, [record['text'] for record in records], 500)
  labels = np.array([names.index(record['site']) for record in records])
  return Task('sites of posts', (1.0, 4.0), 256, 300, 'softmax', _parts(bags, labels), len(names))


def ratings(load: Any) -> Task:
  """Whether a rating is 8 or more, by one weight for each of the 500 films rated most."""
  data = load.ratings()
  items, counts = np.unique(data['item'], return_counts=True)
  kept = items[np.argsort(-counts)[:500]]
  index = np.full(data['item'].max() + 1, -1)
  index[kept] = np.arange(len(kept))
  rows = index[data['item']] >= 0
  x = np.eye(500, dtype=np.float32)[index[data['item'][rows]]]
  return Task('ratings of films', (1.0, 4.0, .25), 256, 300, 'logistic',
              _parts(x, (data['rating'][rows] >= 8).astype(np.float32)), 1)


def letters(load: Any) -> Task:
  """The next character of Shakespeare from the two before it."""
  text = load.tinyshakespeare().lower()
  alphabet = sorted(set(text))
  codes = np.array([alphabet.index(c) for c in text])
  at = np.random.default_rng(5).choice(np.arange(2, len(codes)), 28_000, replace=False)
  one = np.eye(len(alphabet), dtype=np.float32)
  x = np.concatenate([one[codes[at - 1]], one[codes[at - 2]]], 1)
  return Task('letters', (1.0, 4.0), 256, 300, 'softmax', _parts(x, codes[at]), len(alphabet))


MADE_UP: Tuple[Callable[[], Task], ...] = (
    scales, scales_narrow, zipf, regression, zipf_noisy, scales_clean)
REAL: Tuple[Callable[[Any], Task], ...] = (mnist, mnist_hidden, sentiment, sites, ratings, letters)


def all_tasks(data: str) -> Dict[str, Callable[[], Task]]:
  """`{function's name: -> Task}`; those on real data where the folder `data` is."""
  tasks = {make.__name__: make for make in MADE_UP}
  if os.path.exists(os.path.join(data, 'load.py')):
    sys.path.insert(0, data)
    import load  # pylint: disable=import-outside-toplevel
    tasks.update({make.__name__: lambda make=make: make(load) for make in REAL})
  else:
    print(f'{data} has no load.py: tasks on real data are left out', file=sys.stderr)
  return tasks
