# SPDX-License-Identifier: Apache-2.0
"""Next-word prediction: vocabulary, and sentences as windows of a few words.

Word id 0 is padding before and after a sentence. Id 1 is any word that is not in the vocabulary.
The vocabulary follows in its order. Unknown words are predicted like any other word, as one word.
"""

from typing import Dict, Iterable, Sequence, Tuple

import numpy as np

from . import corpus

PADDING, UNKNOWN, FIRST_WORD = 0, 1, 2
CONTEXT = 3  # Words that the next one is predicted from.
LENGTH = 20  # Words of a sentence that are used.


def build_vocabulary(sentences: Iterable[corpus.Sentence], size: int) -> Tuple[str, ...]:
  """Returns the `size` most frequent words of sentences; see `corpus.most_frequent`."""
  return corpus.most_frequent((sentence.words for sentence in sentences), size)


def read_vocabulary(path: corpus.Path) -> Tuple[str, ...]:
  """Reads a file with one word in every line that is not blank.

  Raises:
    corpus.DataError: No file, a line with more than one word, or a word twice.
  """
  words: Dict[str, int] = {}
  for number, line in enumerate(corpus.read_lines(path), 1):
    word = line.strip().lower()
    if not word:
      continue
    if len(word.split()) > 1:
      raise corpus.DataError(f'{path}, line {number}: must be one word. Received: {word[:60]!r}.')
    if word in words:
      raise corpus.DataError(
          f'{path}, line {number}: {word!r} is already in line {words[word]}.')
    words[word] = number
  return tuple(words)


def examples(
    sentences: Sequence[corpus.Sentence],
    vocabulary: Sequence[str],
    length: int = LENGTH,
    context: int = CONTEXT,
) -> Tuple[np.ndarray, np.ndarray]:
  """Makes one example per sentence.

  Returns:
    x: [n, length, context] int32, the words before each position, nearest last.
    y: [n, length] int32, the word there; PADDING after the end of the sentence.
  """
  ids = {word: number for number, word in enumerate(vocabulary, FIRST_WORD)}
  tokens = np.full([len(sentences), context + length], PADDING, np.int32)
  for row, sentence in zip(tokens, sentences):
    words = sentence.words[:length]
    row[context:context + len(words)] = [ids.get(word, UNKNOWN) for word in words]
  windows = np.lib.stride_tricks.sliding_window_view(tokens, context, axis=1)
  return np.ascontiguousarray(windows[:, :length]), tokens[:, context:].copy()


def log_frequencies(targets: np.ndarray, num_ids: int) -> np.ndarray:
  """Returns [num_ids] logs of the frequencies of ids in the targets, each count plus one."""
  counts = np.bincount(targets[targets != PADDING], minlength=num_ids) + 1.0
  counts[PADDING] = 1e-3  # It is never predicted.
  return np.log(counts / counts.sum())


def frequency_baseline(
    log_probabilities: np.ndarray, test_targets: np.ndarray) -> Tuple[float, float]:
  """Returns (loss, accuracy) on the test words if these frequencies alone predict them."""
  words = test_targets[test_targets != PADDING]
  return (float(-log_probabilities[words].mean()),
          float(np.mean(words == log_probabilities.argmax())))
