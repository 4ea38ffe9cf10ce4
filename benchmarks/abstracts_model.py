# SPDX-License-Identifier: Apache-2.0
"""The transformer of `abstracts.py`: all its weights are matrices, so that clipping is cheap.

A record's gradient of a matrix W in y = x W is the sum over words t of x_t d_t', where d is the
derivative of the record's loss by y. One ordinary backward pass gives all d.
"""

import sys
from typing import Any, Dict, List, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import contract

WORDS, LENGTH, WIDTH, HIDDEN, LAYERS, HEADS = 800, 16, 48, 96, 2, 4
PADDING, UNKNOWN, FIRST = 0, 1, 2
VALIDATION, TEST = 500, 1000
Weights = List[tf.Tensor]


def read(folder: str) -> Tuple[List[np.ndarray], np.ndarray]:
  """([train, validation, test] of [n, LENGTH + 1] words, [words] public log frequencies)."""
  sys.path.insert(0, folder)
  import load  # pylint: disable=import-outside-toplevel
  counts: Dict[str, int] = {}
  for word in load.wikitext2():
    word = word.lower()
    counts[word] = counts.get(word, 0) + word.isalpha()
  words = sorted(counts, key=lambda w: (-counts[w], w))[:WORDS]
  ids = {word: i + FIRST for i, word in enumerate(words)}
  records = load.arxiv_abstracts()
  table = np.full([len(records), LENGTH + 1], PADDING, np.int32)
  for row, record in zip(table, records):
    text = record['abstract'].lower().split()[:LENGTH + 1]
    row[:len(text)] = [ids.get(w.strip('.,;:!?()"\''), UNKNOWN) for w in text]
  table = table[np.random.default_rng(7).permutation(len(table))]
  frequencies = np.ones(WORDS + FIRST)
  frequencies[PADDING] = 1e-3  # It is never predicted.
  for word, i in ids.items():
    frequencies[i] += counts[word]
  frequencies[UNKNOWN] += sum(counts.values()) - sum(counts[w] for w in words)
  ends = VALIDATION, VALIDATION + TEST
  validation, test, train = np.split(table, ends)
  return [train, validation, test], np.log(frequencies / frequencies.sum()).astype(np.float32)


def start(seed: int) -> List[np.ndarray]:
  """Random weights; the last matrix is zero, so that frequencies alone predict."""
  rng = np.random.default_rng(seed)
  shapes = [(WORDS + FIRST, WIDTH)]
  for _ in range(LAYERS):
    shapes += [(WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, HIDDEN), (HIDDEN, WIDTH)]
  made = [rng.normal(size=s) / np.sqrt(s[0] if i else 1) for i, s in enumerate(shapes)]
  return [w.astype(np.float32) for w in [*made, np.zeros([WIDTH, WORDS + FIRST])]]


def _normalized(x: tf.Tensor) -> tf.Tensor:
  x = x - tf.reduce_mean(x, -1, keepdims=True)
  return x * tf.math.rsqrt(tf.reduce_mean(tf.square(x), -1, keepdims=True) + 1e-5)


def forward(weights: Weights, words: tf.Tensor, log_frequencies: np.ndarray
            ) -> Tuple[tf.Tensor, List[Tuple[tf.Tensor, tf.Tensor]]]:
  """([n] mean losses per word, `(x, y)` of every matrix): pre-normalized blocks, causal.

  The x of the first matrix are words, which stand for rows of the unit matrix.
  """
  inputs, targets = words[:, :-1], words[:, 1:]
  seen = [(inputs, tf.gather(weights[0], inputs))]

  def dense(x: tf.Tensor) -> tf.Tensor:
    seen.append((x, tf.einsum('bti,io->bto', x, weights[len(seen)])))
    return seen[-1][1]

  places = np.arange(LENGTH)[:, None] / 10_000**(np.arange(WIDTH) / WIDTH)
  later = tf.constant(np.triu(np.full([LENGTH, LENGTH], -1e9), 1), tf.float32)
  x = seen[0][1] + tf.constant(np.sin(places), tf.float32)
  for _ in range(LAYERS):
    parts = tf.reshape(dense(_normalized(x)), [-1, LENGTH, 3, HEADS, WIDTH // HEADS])
    query, key, value = tf.unstack(parts, axis=2)
    scores = tf.einsum('bthd,bshd->bhts', query, key) / np.sqrt(WIDTH / HEADS) + later
    mixed = tf.einsum('bhts,bshd->bthd', tf.nn.softmax(scores), value)
    x = x + dense(tf.reshape(mixed, [-1, LENGTH, WIDTH]))
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


def clipped(weights: Weights, words: tf.Tensor, log_frequencies: np.ndarray, unit: float,
            query: contract.Query, clip: tf.Tensor) -> Tuple[contract.Sums, tf.Tensor]:
  """(sums of gradients over `unit`, scaled and clipped to `clip`; [n] norms before)."""
  with tf.GradientTape() as tape:
    tape.watch(weights)
    losses, seen = forward(weights, words, log_frequencies)
  deltas = [d / unit for d in tape.gradient(losses, [y for _, y in seen])]
  scales = tf.nest.flatten(query.scale) or [None] * len(seen)
  norms = tf.sqrt(tf.add_n(
      [_square(x, d, scale) for (x, _), d, scale in zip(seen, deltas, scales)]))
  factor = tf.math.divide_no_nan(tf.minimum(norms, clip), norms)[:, None, None]
  sums = []
  for (x, _), d, scale in zip(seen, deltas, scales):
    flat = tf.reshape(d * factor, [-1, d.shape[2]])
    if x.dtype.is_integer:
      total = tf.math.unsorted_segment_sum(flat, tf.reshape(x, [-1]), WORDS + FIRST)
    else:
      total = tf.matmul(tf.reshape(x, [-1, x.shape[2]]), flat, transpose_a=True)
    sums.append(total if scale is None else scale * total)
  return contract.Sums(sums), norms
