# SPDX-License-Identifier: Apache-2.0
"""The tasks of `recommend.py`: those of development, and those that judge its rules."""

import os
import sys
from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple

import numpy as np

from tfdp_adaptive import compat

keras = compat.keras
layers = keras.layers
Part = Tuple[np.ndarray, np.ndarray]


class Task(NamedTuple):
  """Examples and a model.

  Attributes:
    name: In the table.
    build: Returns the model with the weights that training starts from.
    loss, metrics: As in `compile`.
    public, private, test: `(x, y)` each.
    batch_size, steps: Of the plan; None to have them recommended.
  """

  name: str
  build: Callable[[], Any]
  loss: Any
  metrics: Tuple[str, ...]
  public: Part
  private: Part
  test: Part
  batch_size: Optional[int] = None
  steps: Optional[int] = None


def _split(x: np.ndarray, y: np.ndarray, public: int, test: int, most: int = 20_000
           ) -> Dict[str, Part]:
  order = np.random.default_rng(7).permutation(len(x))[:most + public + test]
  ends = public, public + test
  return {name: (x[rows].astype(np.float32), y[rows])
          for name, rows in zip(('public', 'test', 'private'), np.split(order, ends))}


def _dense(width: int, outputs: int, activation: str, hidden: Tuple[int, ...] = ()
           ) -> Callable[[], Any]:
  def build() -> Any:
    keras.utils.set_random_seed(3)
    return keras.Sequential([
        layers.Input([width]), *(layers.Dense(size, activation='relu') for size in hidden),
        layers.Dense(outputs, activation=activation, kernel_initializer='glorot_uniform' if hidden
                     else 'zeros')])
  return build


def _binary(name: str, x: np.ndarray, y: np.ndarray, public: int, test: int,
            hidden: Tuple[int, ...] = (), **more: Any) -> Task:
  return Task(name, _dense(x.shape[1], 1, 'sigmoid', hidden), 'binary_crossentropy', ('AUC',),
              **_split(x, y.astype(np.float32)[:, None], public, test), **more)


def _classes(name: str, x: np.ndarray, y: np.ndarray, public: int, test: int,
             build: Any = None, hidden: Tuple[int, ...] = (), **more: Any) -> Task:
  build = build or _dense(x.shape[1], int(y.max()) + 1, 'softmax', hidden)
  return Task(name, build, 'sparse_categorical_crossentropy', ('accuracy',),
              **_split(x, y.astype(np.int32), public, test), **more)


def _numbers(name: str, x: np.ndarray, y: np.ndarray, public: int, test: int,
             hidden: Tuple[int, ...] = (), raw: bool = False, **more: Any) -> Task:
  y = (y if raw else (y - y.mean()) / y.std()).astype(np.float32)[:, None]
  return Task(name, _dense(x.shape[1], 1, 'linear', hidden), 'mse', (),
              **_split(x, y, public, test), **more)


# Tasks of development.


def breast_cancer() -> Task:
  from sklearn import datasets  # pylint: disable=import-outside-toplevel
  return _binary('breast cancer', *datasets.load_breast_cancer(return_X_y=True), 80, 120,
                 batch_size=64, steps=200)


def ill_conditioned() -> Task:
  """100 inputs with standard deviations j^-1.5, as in Figure 1 of PAGAN."""
  rng = np.random.default_rng(0)
  x = rng.normal(size=(12_300, 100)) * np.arange(1, 101)**-1.5
  y = x @ rng.choice([-1.0, 1.0], size=100) + rng.laplace(scale=.01, size=len(x))
  return _numbers('ill-conditioned', x, y, 300, 2000, batch_size=100, steps=300)


def digits() -> Task:
  from sklearn import datasets  # pylint: disable=import-outside-toplevel
  x, y = datasets.load_digits(return_X_y=True)
  return _classes('digits', x / 16, y, 200, 400, hidden=(32,), batch_size=128, steps=200)


def unequal() -> Task:
  """20,000 people, few of whom are positive; inputs in raw units, some with heavy tails."""
  rng = np.random.default_rng(3)
  hidden = rng.normal(size=(24_300, 6))
  x = np.concatenate([hidden @ rng.normal(size=(6, 8)), np.exp(1.5 * hidden[:, :4]),
                      rng.integers(0, 2, size=(24_300, 8))], 1)
  x = x * np.geomspace(.1, 1000, 20) + 5 * rng.normal(size=20)
  score = hidden @ np.array([1.0, -.8, .6, .3, 0, 0]) + .5 * hidden[:, 0] * hidden[:, 1]
  y = rng.random(len(x)) < 1 / (1 + np.exp(2.2 - score))
  return _binary('unequal classes', x, y, 300, 4000, batch_size=500, steps=300)


def _stones() -> Tuple[np.ndarray, np.ndarray]:
  """Returns sizes of cut stones in millimetres, percent and kinds, and logarithms of prices."""
  rng = np.random.default_rng(4)
  carat = np.exp(.6 * rng.normal(size=24_300) - .5)
  depth, table = 61.7 + 1.4 * rng.normal(size=(2, len(carat)))
  size = 6.5 * carat**(1 / 3)
  kinds = [rng.integers(0, n, len(carat)) for n in (5, 7, 8)]
  x = np.concatenate([np.stack([carat, depth, table, size, size * 1.01, size * depth / 100], 1),
                      *(np.eye(k.max() + 1)[k] for k in kinds)], 1)
  y = (1.7 * np.log(carat) + .05 * kinds[0] - .08 * kinds[1] + .12 * kinds[2]
       + .13 * rng.normal(size=len(carat)))
  return x, y


def prices() -> Task:
  return _numbers('prices of stones', *_stones(), 300, 4000, hidden=(24, 24), batch_size=256,
                  steps=200)


def convolutions() -> Any:
  keras.utils.set_random_seed(3)
  return keras.Sequential([
      layers.Input((14, 14, 1)), layers.Conv2D(8, 3, 2, 'same', activation='relu'),
      layers.Conv2D(16, 3, 2, 'same', activation='relu'), layers.Flatten(),
      layers.Dense(10, activation='softmax')])


def rare_digits(load: Any) -> Task:
  """Digits of which 8 and 9 are rare, two convolutions."""
  (x, y), _ = load.mnist()
  rows = np.flatnonzero((y < 8) | (np.random.default_rng(1).random(len(y)) < .1))
  x = (x[rows].reshape(-1, 14, 2, 14, 2).mean((2, 4)) / 255).astype(np.float32)[..., None]
  task = _classes('rare digits', x, y[rows], 1000, 4000, convolutions, batch_size=256, steps=150)
  return task._replace(private=tuple(part[:12_000] for part in task.private))


# Tasks that judge: no rule was developed on them.


def diabetes() -> Task:
  from sklearn import datasets  # pylint: disable=import-outside-toplevel
  return _numbers('diabetes', *datasets.load_diabetes(return_X_y=True, scaled=False), 60, 80,
                  batch_size=100, steps=100)


def progress() -> Task:
  """Diabetes with targets from 25 to 346."""
  from sklearn import datasets  # pylint: disable=import-outside-toplevel
  return _numbers('progress', *datasets.load_diabetes(return_X_y=True, scaled=False), 60, 80,
                  raw=True, batch_size=100, steps=100)


def dollars() -> Task:
  """Prices of stones in dollars, with a median of about 2,000."""
  x, y = _stones()
  return _numbers('prices in dollars', x, np.exp(y + 8.3), 300, 4000, hidden=(24, 24), raw=True,
                  batch_size=256, steps=200)


def wine() -> Task:
  from sklearn import datasets  # pylint: disable=import-outside-toplevel
  return _classes('wine', *datasets.load_wine(return_X_y=True), 40, 40, batch_size=49, steps=100)


def hastie() -> Task:
  """Whether the squares of ten inputs add up to much, by a hidden layer."""
  from sklearn import datasets  # pylint: disable=import-outside-toplevel
  x, y = datasets.make_hastie_10_2(16_300, random_state=0)
  return _binary('hastie', x, y > 0, 300, 4000, hidden=(32,), batch_size=256, steps=300)


def friedman() -> Task:
  """An impedance from inputs in raw units, 0 to 100 and 40 pi to 560 pi among them."""
  from sklearn import datasets  # pylint: disable=import-outside-toplevel
  x, y = datasets.make_friedman2(12_300, noise=20, random_state=0)
  return _numbers('friedman 2', x, y, 300, 2000, hidden=(24,), batch_size=200, steps=300)


def sparse_signal() -> Task:
  """Two classes, 200 inputs of which 10 inform, redundant ones and flipped labels."""
  from sklearn import datasets  # pylint: disable=import-outside-toplevel
  x, y = datasets.make_classification(
      14_300, 200, n_informative=10, n_redundant=30, flip_y=.05, random_state=0)
  return _binary('200 inputs', x, y, 300, 4000, batch_size=256, steps=300)


def series() -> Task:
  """Which of four autoregressions a series of 32 values comes from, by a convolution."""
  rng = np.random.default_rng(5)
  y = rng.integers(4, size=12_500)
  one, two = np.array([.9, -.5, .3, 1.2])[y], np.array([0, .3, -.6, -.5])[y]
  x = np.zeros([len(y), 34])
  for t in range(2, 34):
    x[:, t] = one * x[:, t - 1] + two * x[:, t - 2] + rng.normal(size=len(y))

  def build() -> Any:
    keras.utils.set_random_seed(3)
    return keras.Sequential([
        layers.Input([32, 1]), layers.Conv1D(16, 5, activation='relu'),
        layers.GlobalAveragePooling1D(), layers.Dense(4, activation='softmax')])

  return _classes('series', x[:, 2:, None], y, 500, 2000, build, batch_size=256, steps=200)


def waves() -> Task:
  """Whether a wave is faster than another, by an LSTM."""
  rng = np.random.default_rng(6)
  speed = rng.uniform(.2, .6, 8500)
  phase = rng.uniform(0, 6.3, len(speed))
  x = np.sin(phase[:, None] + speed[:, None] * np.arange(16)) + .5 * rng.normal(size=[8500, 16])

  def build() -> Any:
    keras.utils.set_random_seed(3)
    return keras.Sequential([
        layers.Input([16, 1]), layers.LSTM(12), layers.Dense(1, activation='sigmoid')])

  return _binary('waves', x[..., None], speed > .4, 500, 2000, batch_size=256, steps=150)._replace(
      build=build)


def ordinary_digits(load: Any) -> Task:
  """3,000 private digits in raw units, two convolutions."""
  (x, y), _ = load.mnist()
  x = x.reshape(-1, 14, 2, 14, 2).mean((2, 4)).astype(np.float32)[..., None]
  task = _classes('3,000 digits', x, y, 500, 4000, convolutions, batch_size=128, steps=150)
  return task._replace(private=tuple(part[:3000] for part in task.private))


def _bags(texts: Any, words: Any) -> np.ndarray:
  index = {word: i for i, word in enumerate(words)}
  found = np.zeros([len(texts), len(index)], np.float32)
  for row, text in enumerate(texts):
    for word in text.lower().split():
      if word.strip('.,;:!?()"\'') in index:
        found[row, index[word.strip('.,;:!?()"\'')]] = 1
  return found


def _frequent(load: Any, size: int) -> Any:
  counts: Dict[str, int] = {}
  for word in load.wikitext2('valid'):
    word = word.lower()
    counts[word] = counts.get(word, 0) + word.isalpha()
  return sorted(counts, key=lambda word: -counts[word])[:size]


def _whole(task: Task, build: Any) -> Task:
  """Returns the task with whole inputs, and a model for them."""
  return task._replace(build=build, **{
      name: (getattr(task, name)[0].astype(np.int32), getattr(task, name)[1])
      for name in ('public', 'private', 'test')})


def opinions(load: Any) -> Task:
  """Whether a sentence praises a product, from 500 words."""
  rows = load.sentiment('pros_cons')
  x = _bags([text for _, _, text in rows], _frequent(load, 500))
  return _binary('opinions', x, np.array([label for label, _, _ in rows]), 300, 4000,
                 batch_size=256, steps=300)


def sites(load: Any) -> Task:
  """The Stack Exchange site of a post, from 300 words."""
  rows = load.stackexchange()
  names = sorted({row['site'] for row in rows})
  x = _bags([row['text'] for row in rows], _frequent(load, 300))
  return _classes('sites', x, np.array([names.index(row['site']) for row in rows]), 500, 4000,
                  batch_size=256, steps=300)


def films(load: Any) -> Task:
  """Whether a sentence praises a film, from 300 words."""
  rows = load.sentiment()
  x = _bags([text for _, _, text in rows], _frequent(load, 300))
  return _binary('films', x, np.array([label for label, _, _ in rows]), 300, 2000,
                 batch_size=256, steps=200)


def abstracts(load: Any) -> Task:
  """Whether an abstract is about language, by the mean of its embedded words."""
  rows = load.arxiv_abstracts()
  index = {word: i + 1 for i, word in enumerate(_frequent(load, 999))}
  x = np.zeros([len(rows), 40], np.int32)
  for i, row in enumerate(rows):
    words = row['abstract'].lower().split()[:40]
    x[i, :len(words)] = [index.get(word.strip('.,;:()'), 0) for word in words]

  def build() -> Any:
    keras.utils.set_random_seed(3)
    return keras.Sequential([
        layers.Input([40], dtype='int32'), layers.Embedding(1000, 12),
        layers.GlobalAveragePooling1D(), layers.Dense(1, activation='sigmoid')])

  y = np.array(['NLP' in row['listings'] for row in rows])
  return _whole(_binary('abstracts', x, y, 400, 2000, batch_size=256, steps=200), build)


def letters(load: Any) -> Task:
  """The next letter of Shakespeare from the three before it, through an embedding."""
  text = load.tinyshakespeare().lower()
  alphabet = sorted(set(text))
  codes = np.array([alphabet.index(c) for c in text])
  at = np.random.default_rng(5).choice(np.arange(3, len(codes)), 24_500, replace=False)
  x = np.stack([codes[at - i] for i in (3, 2, 1)], 1)

  def build() -> Any:
    keras.utils.set_random_seed(3)
    return keras.Sequential([
        layers.Input([3], dtype='int32'), layers.Embedding(len(alphabet), 12), layers.Flatten(),
        layers.Dense(32, activation='tanh'), layers.Dense(len(alphabet), activation='softmax')])

  return _whole(_classes('letters', x, codes[at], 500, 4000, batch_size=256, steps=200), build)


def frozen_base() -> Task:
  """Which of the digits 5 to 9 it is, by a head on a base that was trained on 0 to 4 and is frozen.

  The base has attention over the rows of an image.
  """
  from sklearn import datasets  # pylint: disable=import-outside-toplevel
  x, y = datasets.load_digits(return_X_y=True)
  x = (x / 16).reshape(-1, 8, 8).astype(np.float32)
  keras.utils.set_random_seed(3)
  entry = layers.Input([8, 8])
  rows = layers.Dense(16)(entry)
  rows = layers.Add()([rows, layers.MultiHeadAttention(2, 8)(rows, rows)])
  base = keras.Model(entry, layers.Dense(48, activation='relu')(layers.Flatten()(rows)))
  full = keras.Model(entry, layers.Dense(5, activation='softmax')(base(entry)))
  full.compile('adam', 'sparse_categorical_crossentropy')
  full.fit(x[y < 5], y[y < 5], epochs=12, verbose=0)
  base.trainable = False

  def build() -> Any:
    keras.utils.set_random_seed(3)
    return keras.Sequential([
        layers.Input([8, 8]), base,
        layers.Dense(5, activation='softmax', kernel_initializer='zeros')])

  return _classes('frozen base', x[y > 4], y[y > 4] - 5, 100, 200, build, batch_size=64, steps=150)


def categories() -> Task:
  """A table of five columns of categories, one of them long, and two numbers; hidden layer."""
  rng = np.random.default_rng(8)
  kinds = [rng.choice(n, 12_300, p=rng.dirichlet(np.ones(n))) for n in (3, 4, 6, 9, 40)]
  numbers = np.stack([rng.gamma(2.0, 20, len(kinds[0])), rng.normal(size=len(kinds[0]))], 1)
  score = sum(rng.normal(size=k.max() + 1)[k] for k in kinds) + .5 * numbers[:, 1]
  score += np.where(kinds[0] == 1, 1, -.5) * (numbers[:, 0] / 40 - 1)
  x = np.concatenate([numbers, *(np.eye(k.max() + 1)[k] for k in kinds)], 1)
  y = rng.random(len(x)) < 1 / (1 + np.exp(-score))
  return _binary('categories', x, y, 400, 3000, hidden=(24,), batch_size=256, steps=200)


def frauds() -> Task:
  """4% of positives among 20,000, linear."""
  from sklearn import datasets  # pylint: disable=import-outside-toplevel
  x, y = datasets.make_classification(
      24_500, 16, n_informative=8, weights=[.97], flip_y=.02, class_sep=1.2, random_state=2)
  return _binary('frauds', x * np.geomspace(1, 50, 16) + 3, y, 500, 4000, batch_size=500,
                 steps=200)


def rolls() -> Task:
  """The angle of points on a roll in three dimensions, by a hidden layer."""
  from sklearn import datasets  # pylint: disable=import-outside-toplevel
  x, y = datasets.make_swiss_roll(8300, noise=.5, random_state=0)
  return _numbers('roll', x, y, 300, 2000, hidden=(32,), batch_size=200, steps=200)


def topics() -> Task:
  """Which of three topics a text has, from 1,500 words of which a text has 30, and 100 examples."""
  rng = np.random.default_rng(11)
  usual = 1 / np.arange(10, 1510)
  y, x = rng.integers(3, size=14_100), np.zeros([14_100, 1500], np.float32)
  for kind in range(3):
    odds = usual * np.exp(.8 * rng.normal(size=1500))
    x[y == kind] = np.minimum(1, rng.multinomial(30, odds / odds.sum(), (y == kind).sum()))
  return _classes('topics', x, y, 100, 4000, batch_size=256, steps=200)


def counts() -> Task:
  """How many visits there are, for a Poisson loss, which can be negative."""
  rng = np.random.default_rng(12)
  x = rng.normal(size=(12_300, 12)) * np.geomspace(.2, 20, 12)
  y = rng.poisson(np.exp(x / np.geomspace(.2, 20, 12) @ rng.normal(scale=.25, size=12) + .3))
  return Task('counts', _dense(12, 1, 'exponential'), 'poisson', (),
              **_split(x, y.astype(np.float32)[:, None], 200, 3000), batch_size=200, steps=200)


def outliers() -> Task:
  """Three outputs of 20 inputs, with errors of heavy tails, by a hidden layer."""
  rng = np.random.default_rng(13)
  x = rng.normal(size=(12_300, 20))
  y = np.tanh(x @ rng.normal(scale=.4, size=(20, 8))) @ rng.normal(size=(8, 3))
  y = (y + .3 * rng.standard_t(1.5, size=y.shape)).astype(np.float32)
  return Task('outliers', _dense(20, 3, 'linear', (24,)), 'mae', (), **_split(x, y, 300, 3000),
              batch_size=200, steps=200)


def rare_kinds() -> Task:
  """Three classes of which two have 5% and 2%, by a hidden layer."""
  from sklearn import datasets  # pylint: disable=import-outside-toplevel
  x, y = datasets.make_classification(
      14_400, 20, n_informative=8, n_classes=3, weights=[.93, .05], class_sep=1.5, random_state=5)
  return _classes('rare kinds', x, y, 400, 4000, hidden=(16,), batch_size=256, steps=200)


def shapes() -> Task:
  """Which of five shapes is in an image of 16 x 16, by two convolutions."""
  rng = np.random.default_rng(14)
  y, (rows, columns) = rng.integers(5, size=8300), np.mgrid[:16, :16]
  row, column = rng.uniform(5, 10, (2, len(y), 1, 1))
  size, a, b = rng.uniform(2, 5, row.shape), abs(rows - row), abs(columns - column)
  far = np.stack([a + b, np.maximum(a, b), np.hypot(a, b), np.minimum(a, b) + 2 * (a + b > 6),
                  abs(a - b) + 2 * (a + b > 6)])[y, np.arange(len(y))]
  x = (abs(far - np.where(y < 3, size[:, 0, 0], 0)[:, None, None]) < 1) + .5 * rng.normal(
      size=far.shape)

  def build() -> Any:
    keras.utils.set_random_seed(3)
    return keras.Sequential([
        layers.Input((16, 16, 1)), layers.Conv2D(8, 5, 2, 'same', activation='relu'),
        layers.Conv2D(16, 3, 2, 'same', activation='relu'), layers.Flatten(),
        layers.Dense(5, activation='softmax')])

  return _classes('shapes', x[..., None], y, 300, 2000, build, batch_size=128, steps=150)


def _numbered(texts: Any, words: Any, length: int) -> np.ndarray:
  index = {word: i + 2 for i, word in enumerate(words)}
  found = np.zeros([len(texts), length], np.int32)
  for row, text in enumerate(texts):
    some = text.lower().split()[:length]
    found[row, :len(some)] = [index.get(word.strip('.,;:!?()"\''), 1) for word in some]
  return found


def answers(load: Any) -> Task:
  """Whether a post is an answer or a question, by an embedding and a GRU."""
  rows = load.stackexchange()
  x = _numbered([row['text'] for row in rows], _frequent(load, 498), 24)
  y = np.array([row['kind'] == rows[0]['kind'] for row in rows])

  def build() -> Any:
    keras.utils.set_random_seed(3)
    return keras.Sequential([
        layers.Input([24], dtype='int32'), layers.Embedding(500, 12), layers.GRU(12),
        layers.Dense(1, activation='sigmoid')])

  return _whole(_binary('answers', x, y, 400, 3000, batch_size=256, steps=150), build)


def reviews(load: Any) -> Task:
  """Whether a sentence praises a film, by a transformer that was trained on opinions of products.

  All of it trains.
  """
  def read(name: str) -> Part:
    rows = load.sentiment(name)
    return (_numbered([row[2] for row in rows], _frequent(load, 998), 20),
            np.array([row[0] for row in rows]))

  keras.utils.set_random_seed(3)
  entry = layers.Input([20], dtype='int32')
  value = layers.Embedding(1000, 16)(entry)
  value = layers.Add()([value, layers.MultiHeadAttention(2, 8)(value, value)])
  value = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(value))
  model = keras.Model(entry, layers.Dense(1, activation='sigmoid')(value))
  model.compile('adam', 'binary_crossentropy')
  model.fit(*read('pros_cons'), batch_size=64, epochs=1, verbose=0)
  weights = model.get_weights()

  def build() -> Any:
    model.set_weights(weights)
    return model

  return _whole(_binary('reviews', *read('sentence_polarity'), 300, 3000, batch_size=256,
                        steps=150), build)


def posts(load: Any) -> Task:
  """Which of eight sites a post is from, by a head on a transformer that is frozen.

  The transformer was trained on the posts of eight other sites, with their names as classes.
  """
  rows, length, width = load.stackexchange(), 40, 48
  counts: Dict[str, int] = {}
  for row in rows:
    counts[row['site']] = counts.get(row['site'], 0) + 1
  names = sorted(counts, key=lambda name: -counts[name])
  names = names[::2] + names[1::2]  # The first half is for the transformer.
  site = np.array([names.index(row['site']) for row in rows])
  words: Dict[str, int] = {}
  for i in np.flatnonzero(site < 8):
    for word in rows[i]['text'].lower().split():
      words[word] = words.get(word, 0) + word.isalpha()
  frequent = sorted(words, key=lambda word: -words[word])[:2998]
  x = _numbered([row['text'] for row in rows], frequent, length)
  keras.utils.set_random_seed(3)
  entry = layers.Input([length], dtype='int32')
  value = layers.Embedding(3000, width)(entry)
  for _ in range(2):
    read = layers.LayerNormalization()(value)
    value = layers.Add()([value, layers.MultiHeadAttention(4, 12)(read, read)])
    read = layers.Dense(2 * width, activation='relu')(layers.LayerNormalization()(value))
    value = layers.Add()([value, layers.Dense(width)(read)])
  value = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(value))
  base = keras.Model(entry, value)
  full = keras.Model(entry, layers.Dense(8, activation='softmax')(value))
  full.compile(keras.optimizers.Adam(2e-3), 'sparse_categorical_crossentropy')
  full.fit(x[site < 8], site[site < 8], batch_size=64, epochs=4, verbose=0)
  base.trainable = False

  def build() -> Any:
    return keras.Sequential([
        layers.Input([length], dtype='int32'), base,
        layers.Dense(8, activation='softmax', kernel_initializer='zeros')])

  return _whole(_classes('posts', x[site > 7], site[site > 7] - 8, 500, 4000,
                         batch_size=256, steps=200), build)


DEVELOPED = (breast_cancer, ill_conditioned, digits, unequal, prices, sparse_signal,
             # First run as judges, then: the rate on the public examples alone.
             topics, counts, outliers, rare_kinds, shapes)
# Opinions and sites: how overfitting is charged. Abstracts: steps on the public examples alone.
DEVELOPED_ON_FILES = (rare_digits, opinions, sites, abstracts)
JUDGES = (categories, frauds, friedman, series, waves, wine, hastie, frozen_base, rolls, diabetes,
          progress, dollars)
JUDGES_ON_FILES = (ordinary_digits, films, letters, answers, reviews, posts)


def all_tasks(data: str) -> Dict[str, Callable[[], Task]]:
  """Returns `{function's name: -> Task}`; those on real data where the folder `data` is."""
  tasks = {make.__name__: make for make in (*DEVELOPED, *JUDGES)}
  if os.path.exists(os.path.join(data, 'load.py')):
    sys.path.insert(0, data)
    import load  # pylint: disable=import-outside-toplevel
    tasks.update({make.__name__: lambda make=make: make(load)
                  for make in (*DEVELOPED_ON_FILES, *JUDGES_ON_FILES)})
  return tasks
