# SPDX-License-Identifier: Apache-2.0
"""The tasks of `evidence.py`: small, made up or real, a linear model or one hidden layer each."""

import collections
import os
import sys
from typing import Any, Callable, Dict, Iterable, NamedTuple, Tuple

import numpy as np

from tfdp_adaptive.examples import showcases


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
    public: Records `(x, y)` of the same kind that need no privacy, or None.
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
  public: Any = None


def parts(x: np.ndarray, y: np.ndarray, most: int = 20_000, held_out: int = 4000
           ) -> Tuple[Any, ...]:
  """Training, validation and test records of one shuffled set; a constant input is added."""
  order = np.random.default_rng(7).permutation(len(x))[:most + 2 * held_out]
  x = np.concatenate([x, np.ones([len(x), 1])], 1).astype(np.float32)[order]
  y = np.asarray(y)[order]
  ends = len(order) - 2 * held_out, len(order) - held_out
  return tuple((x[a:b], y[a:b]) for a, b in ((0, ends[0]), ends, (ends[1], len(order))))


def scales() -> Task:
  x, y = showcases.make_scales(28_000, 1)
  return Task('scales', (1.0, 4.0, 8.0), 256, 300, 'logistic', parts(x, y[:, 0]), 1)


def scales_narrow() -> Task:
  """The same in units from 3 to .3."""
  x, y = showcases.make_scales(28_000, 1)
  x = x / x.std(0) * np.geomspace(3, .3, x.shape[1])
  return Task('scales, narrow', (1.0, 4.0), 256, 300, 'logistic', parts(x, y[:, 0]), 1)


def zipf() -> Task:
  """Class k of 32 comes with frequency proportional to 1/k, in noise as large as distances."""
  frequencies = (1 / np.arange(1, 33)) / np.sum(1 / np.arange(1, 33))
  rng = np.random.default_rng(1)
  labels = rng.choice(32, 28_000, p=frequencies)
  points = rng.normal(size=[32, 32])
  x = (points[labels] + rng.normal(size=[28_000, 32])) / np.sqrt(32)
  return Task('zipf classes', (4.0, 1.0), 200, 300, 'softmax', parts(x, labels), 32,
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
  return Task('regression', (1.0, 4.0), 100, 300, 'squares', parts(x, y, 10_000), 1)


def _mnist(load: Any) -> Tuple[np.ndarray, np.ndarray]:
  (x, y), _ = load.mnist()
  return x.reshape(-1, 14, 2, 14, 2).mean((2, 4)).reshape(-1, 196) / 255.0, y


def mnist(load: Any) -> Task:
  return Task('mnist, linear', (.5, 4.0, 1.0, 8.0), 256, 300, 'softmax', parts(*_mnist(load)), 10)


def mnist_hidden(load: Any) -> Task:
  return Task('mnist, hidden layer', (1.0, 8.0), 256, 300, 'softmax', parts(*_mnist(load)), 10, 24)


def bags(texts: Iterable[str], words: Iterable[str]) -> np.ndarray:
  """Which of these words each text has."""
  texts, indices = list(texts), {word: i for i, word in enumerate(words)}
  found = np.zeros([len(texts), len(indices)], np.float32)
  for row, text in enumerate(texts):
    for word in text.lower().split():
      index = indices.get(word.strip('.,;:!?()"\''))
      if index is not None:
        found[row, index] = 1
  return found


def _bags(load: Any, texts: Any, size: int, also: Iterable[str] = ()) -> np.ndarray:
  """Of the most frequent words of WikiText-2 (public), and of others."""
  counts: Dict[str, int] = {}
  for word in load.wikitext2():
    word = word.lower()
    counts[word] = counts.get(word, 0) + word.isalpha()
  kept = sorted(counts, key=lambda w: -counts[w])[:size]
  return bags(texts, dict.fromkeys([*kept, *also]))


def sentiment(load: Any) -> Task:
  records = load.sentiment('pros_cons')
  words = _bags(load, [text for _, _, text in records], 1000)
  labels = np.array([label for label, _, _ in records], np.float32)
  return Task('pros and cons', (1.0, 4.0, .25), 256, 300, 'logistic', parts(words, labels), 1)


def sites(load: Any) -> Task:
  """The Stack Exchange site of a post, from its words."""
  records = load.stackexchange()
  names = sorted({record['site'] for record in records})
  words = _bags(load, [record['text'] for record in records], 500)
  labels = np.array([names.index(record['site']) for record in records])
  return Task('sites of posts', (1.0, 4.0), 256, 300, 'softmax', parts(words, labels), len(names))


def tags(load: Any) -> Task:
  """The tag of the question that a post of Stack Exchange is, answers or comments on.

  A post counts for the most frequent tag of its question, of the 20 most frequent ones;
  'discussion', which half of the posts have, is left out. Words in names of tags are inputs, too.
  """
  records = load.stackexchange()
  of_question = {(one['site'], one['id']): one['tags'] for one in records if one.get('tags')}
  answered = {(one['site'], one['id']): (one['site'], one['parent'])
              for one in records if one['kind'] == 'answer'}
  found = []
  for one in records:
    post = one['site'], one['parent' if one['kind'] == 'comment' else 'id']
    some = of_question.get(answered.get(post, post))
    found += [(one['text'], set(some) - {'discussion'})] if some else []
  counts = collections.Counter(tag for _, some in found for tag in some)
  ranks = {tag: i for i, (tag, _) in enumerate(counts.most_common(20))}
  texts, labels = zip(*(
      (text, min(ranks[tag] for tag in some & ranks.keys())) for text, some in found
      if some & ranks.keys()))
  names = sorted(part for tag, _ in counts.most_common(200) for part in tag.split('-'))
  return Task('tags of posts', (4.0,), 256, 300, 'softmax',
              parts(_bags(load, texts, 200, names), np.array(labels), held_out=2000), 20)


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
              parts(x, (data['rating'][rows] >= 8).astype(np.float32)), 1)


def letters(load: Any) -> Task:
  """The next character of Shakespeare from the two before it."""
  text = load.tinyshakespeare().lower()
  alphabet = sorted(set(text))
  codes = np.array([alphabet.index(c) for c in text])
  at = np.random.default_rng(5).choice(np.arange(2, len(codes)), 28_000, replace=False)
  one = np.eye(len(alphabet), dtype=np.float32)
  x = np.concatenate([one[codes[at - 1]], one[codes[at - 2]]], 1)
  return Task('letters', (1.0, 4.0), 256, 300, 'softmax', parts(x, codes[at]), len(alphabet))


def polarity(load: Any) -> Task:
  """Whether a snippet of a film review is positive: 1000 embeddings of width 16, their mean, tanh.

  Embeddings begin at standard deviation 1.
  """
  records = load.sentiment('sentence_polarity')
  words = _bags(load, [text for _, _, text in records], 1000)
  mean = words / np.maximum(words.sum(1, keepdims=True), 1) * np.sqrt(words.shape[1])
  labels = np.array([label for label, _, _ in records], np.float32)
  return Task('polarity, embedding', (6.4,), 256, 520, 'logistic',
              parts(mean, labels, held_out=2000), 1, 16)


def words(load: Any) -> Task:
  """The next word of WikiText-2 from the one before, through an embedding of width 16.

  The 299 most frequent words of the public part, valid.txt, and one for all others.
  """
  public, private, test = (load.wikitext2(part) for part in ('valid', 'train', 'test'))
  kept = [word for word, _ in collections.Counter(public).most_common(300) if word != '<unk>']
  index = {word: i for i, word in enumerate(kept[:299], 1)}

  def pairs(text: Any, size: int) -> Tuple[np.ndarray, np.ndarray]:
    codes = np.array([index.get(word, 0) for word in text])
    at = np.random.default_rng(5).choice(len(codes) - 1, size, replace=False)
    x = np.sqrt(300) * np.eye(300, dtype=np.float32)[codes[at]]
    return np.concatenate([x, np.ones([size, 1], np.float32)], 1), codes[at + 1]

  (x, y), train = pairs(test, 8000), pairs(private, 59_674)
  return Task('words', (3.0,), 256, 120, 'softmax', (
      train, (x[:4000], y[:4000]), (x[4000:], y[4000:])), 300, 16,
              public=pairs(public, 59_674))


MADE_UP: Tuple[Callable[[], Task], ...] = (
    scales, scales_narrow, zipf, regression, zipf_noisy, scales_clean)
REAL: Tuple[Callable[[Any], Task], ...] = (
    mnist, mnist_hidden, sentiment, sites, ratings, letters, tags, polarity,
    words)


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
