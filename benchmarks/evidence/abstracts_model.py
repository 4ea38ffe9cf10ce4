# SPDX-License-Identifier: Apache-2.0
"""The transformer of `abstracts.py`: all its weights are matrices, so that clipping is cheap.

A record's gradient of a matrix W in y = x W is the sum over words t of x_t d_t', where d is the
derivative of the record's loss by y. One ordinary backward pass gives all d.
"""

import sys
from typing import Any, Dict, List, NamedTuple, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import contract

PADDING, UNKNOWN, FIRST = 0, 1, 2
VALIDATION, TEST = 500, 1000
Weights = List[tf.Tensor]


class Sizes(NamedTuple):
  """Words that are read, the most frequent of them, which are predicted, and the widths."""

  read: int
  predicted: int
  length: int
  width: int
  hidden: int
  layers: int = 2
  heads: int = 4


def read(folder: str, sizes: Sizes) -> Tuple[List[np.ndarray], np.ndarray]:
  """([train, validation, test, public] of [n, length + 1] words, public log frequencies).

  The public words are WikiText-2's, its sentences from left to right.
  """
  sys.path.insert(0, folder)
  import load  # pylint: disable=import-outside-toplevel
  counts: Dict[str, int] = {}
  public = [word.lower() for word in load.wikitext2()]
  for word in public:
    counts[word] = counts.get(word, 0) + word.isalpha()
  words = sorted(counts, key=lambda w: (-counts[w], w))[:sizes.read]
  ids = {word: i + FIRST for i, word in enumerate(words)}
  records = load.arxiv_abstracts()
  table = np.full([len(records), sizes.length + 1], PADDING, np.int32)
  for row, record in zip(table, records):
    text = record['abstract'].lower().split()[:sizes.length + 1]
    row[:len(text)] = [ids.get(w.strip('.,;:!?()"\''), UNKNOWN) for w in text]
  table = table[np.random.default_rng(7).permutation(len(table))]
  predicted = words[:sizes.predicted]
  frequencies = np.ones(sizes.predicted + FIRST)
  frequencies[PADDING] = 1e-3  # It is never predicted.
  for word in predicted:
    frequencies[ids[word]] += counts[word]
  frequencies[UNKNOWN] += sum(counts.values()) - sum(counts[w] for w in predicted)
  ends = VALIDATION, VALIDATION + TEST
  validation, test, train = np.split(table, ends)
  flat = [ids.get(word, UNKNOWN) for word in public if word.isalpha()]
  rest = len(flat) % (sizes.length + 1)
  texts = np.array(flat[:len(flat) - rest], np.int32).reshape(-1, sizes.length + 1)
  return ([train, validation, test, texts],
          np.log(frequencies / frequencies.sum()).astype(np.float32))


def start(sizes: Sizes, seed: int) -> List[np.ndarray]:
  """Random weights; the last matrix is zero, so that frequencies alone predict."""
  rng = np.random.default_rng(seed)
  width = sizes.width
  shapes = [(sizes.read + FIRST, width)]
  for _ in range(sizes.layers):
    shapes += [(width, 3 * width), (width, width), (width, sizes.hidden), (sizes.hidden, width)]
  made = [rng.normal(size=s) / np.sqrt(s[0] if i else 1) for i, s in enumerate(shapes)]
  return [w.astype(np.float32) for w in [*made, np.zeros([width, sizes.predicted + FIRST])]]


def pretrained(sizes: Sizes, weights: List[np.ndarray], public: np.ndarray,
               log_frequencies: np.ndarray, steps: int, batch: int) -> List[np.ndarray]:
  """Weights after `steps` of Adam without privacy on public words; the rate falls to zero."""
  variables = [tf.Variable(w) for w in weights]
  moments = [[tf.Variable(tf.zeros_like(w)) for w in weights] for _ in range(2)]
  rng = np.random.default_rng(5)

  @tf.function
  def step(words: tf.Tensor, rate: tf.Tensor, t: tf.Tensor) -> None:
    with tf.GradientTape() as tape:
      loss = tf.reduce_mean(forward(sizes, variables, words, log_frequencies)[0])
    gradients = [tf.convert_to_tensor(g) for g in tape.gradient(loss, variables)]
    for w, m, v, g in zip(variables, *moments, gradients):
      m.assign(.9 * m + .1 * g)
      v.assign(.99 * v + .01 * tf.square(g))
      w.assign_sub(rate * m / (1 - .9**t) / (tf.sqrt(v / (1 - .99**t)) + 1e-8))

  for t in range(1, steps + 1):
    words = public[rng.integers(len(public), size=batch)]
    step(tf.constant(words), tf.constant(.003 * (1 - t / steps), tf.float32),
         tf.constant(t, tf.float32))
  return [w.numpy() for w in variables]


def _normalized(x: tf.Tensor) -> tf.Tensor:
  x = x - tf.reduce_mean(x, -1, keepdims=True)
  return x * tf.math.rsqrt(tf.reduce_mean(tf.square(x), -1, keepdims=True) + 1e-5)


def forward(sizes: Sizes, weights: Weights, words: tf.Tensor, log_frequencies: np.ndarray
            ) -> Tuple[tf.Tensor, List[Tuple[tf.Tensor, tf.Tensor]]]:
  """([n] mean losses per word, `(x, y)` of every matrix): pre-normalized blocks, causal.

  The x of the first matrix are words, which stand for rows of the unit matrix.
  """
  inputs, targets = words[:, :-1], words[:, 1:]
  targets = tf.where(targets < sizes.predicted + FIRST, targets, UNKNOWN)
  length, width, heads = sizes.length, sizes.width, sizes.heads
  seen = [(inputs, tf.gather(weights[0], inputs))]

  def dense(x: tf.Tensor) -> tf.Tensor:
    seen.append((x, tf.einsum('bti,io->bto', x, weights[len(seen)])))
    return seen[-1][1]

  places = np.arange(length)[:, None] / 10_000**(np.arange(width) / width)
  later = tf.constant(np.triu(np.full([length, length], -1e9), 1), tf.float32)
  x = seen[0][1] + tf.constant(np.sin(places), tf.float32)
  for _ in range(sizes.layers):
    parts = tf.reshape(dense(_normalized(x)), [-1, length, 3, heads, width // heads])
    query, key, value = tf.unstack(parts, axis=2)
    scores = tf.einsum('bthd,bshd->bhts', query, key) / np.sqrt(width / heads) + later
    mixed = tf.einsum('bhts,bshd->bthd', tf.nn.softmax(scores), value)
    x = x + dense(tf.reshape(mixed, [-1, length, width]))
    x = x + dense(tf.nn.gelu(dense(_normalized(x))))
  losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
      targets, dense(_normalized(x)) + log_frequencies)
  real = tf.cast(targets != PADDING, tf.float32)
  return tf.reduce_sum(losses * real, 1) / tf.maximum(tf.reduce_sum(real, 1), 1), seen


def _square(x: tf.Tensor, d: tf.Tensor, scale: Any) -> tf.Tensor:
  """[n] squared norms of `scale * sum_t x_t d_t'`."""
  if x.dtype.is_integer:  # Rows of the same word add up.
    same = tf.cast(x[:, :, None] == x[:, None, :], tf.float32)
    rows = tf.einsum('bts,bso->bto', same, d) * (1.0 if scale is None else tf.gather(scale, x))
    return tf.reduce_sum(tf.reduce_sum(tf.square(rows), 2) / tf.reduce_sum(same, 2), 1)
  if scale is None:  # A sum over pairs of words.
    return tf.reduce_sum(tf.matmul(x, x, transpose_b=True) * tf.matmul(d, d, transpose_b=True),
                         [1, 2])
  return tf.reduce_sum(tf.square(scale * tf.matmul(x, d, transpose_a=True)), [1, 2])


def clipped(sizes: Sizes, weights: Weights, words: tf.Tensor, log_frequencies: np.ndarray,
            unit: float, query: contract.Query, clip: tf.Tensor
            ) -> Tuple[contract.Sums, tf.Tensor]:
  """(sums of gradients over `unit`, scaled and clipped to `clip`; [n] norms before)."""
  with tf.GradientTape() as tape:
    tape.watch(weights)
    losses, seen = forward(sizes, weights, words, log_frequencies)
  deltas = [d / unit for d in tape.gradient(losses, [y for _, y in seen])]
  scales = tf.nest.flatten(query.scale) or [None] * len(seen)
  norms = tf.sqrt(tf.add_n(
      [_square(x, d, scale) for (x, _), d, scale in zip(seen, deltas, scales)]))
  factor = tf.math.divide_no_nan(tf.minimum(norms, clip), norms)[:, None, None]
  sums = []
  for (x, _), d, scale in zip(seen, deltas, scales):
    flat = tf.reshape(d * factor, [-1, d.shape[2]])
    if x.dtype.is_integer:
      total = tf.math.unsorted_segment_sum(flat, tf.reshape(x, [-1]), sizes.read + FIRST)
    else:
      total = tf.matmul(tf.reshape(x, [-1, x.shape[2]]), flat, transpose_a=True)
    sums.append(total if scale is None else scale * total)
  return contract.Sums(sums), norms
