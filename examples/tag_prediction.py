# SPDX-License-Identifier: Apache-2.0
"""Tag prediction: bags of words in, any number of tags out (Li et al., ICLR 2023, section 5)."""

import json
from typing import List, NamedTuple, Sequence, Tuple

import numpy as np

from . import corpus


class Question(NamedTuple):
  """One example: who asked it, its words (title included) and its tags."""

  client: str
  words: Tuple[str, ...]
  tags: Tuple[str, ...]


def read(path: corpus.Path) -> List[Question]:
  """Reads JSON lines with `client`, `text`, `tags` and optionally `title`.

  Lines without `tags` (answers, comments) are skipped.

  Raises:
    corpus.DataError: The file is missing or malformed, or has no tagged line.
  """
  questions = []
  for line in corpus.read_lines(path):
    if not line.strip():
      continue
    try:
      record = json.loads(line)
    except (ValueError, RecursionError):
      raise corpus.DataError(f'{path}: a line is not valid JSON. {corpus.HIDDEN}') from None
    if not isinstance(record, dict) or not record.get('tags'):
      continue
    tags, text = record['tags'], f"{record.get('title', '')}.\n\n{record.get('text')}"
    if not (isinstance(tags, list) and all(isinstance(tag, str) for tag in tags)
            and isinstance(record.get('text'), str) and 'client' in record):
      raise corpus.DataError(f'{path}: every line with `tags` must have `client`, a string `text` '
                             f'and a list of strings `tags`. Received: another. {corpus.HIDDEN}')
    words = tuple(word for sentence in corpus.tokenize(text) for word in sentence)
    questions.append(Question(str(record['client']), words, tuple(tags)))
  if not questions:
    raise corpus.DataError(f'{path}: no line has `tags`.')
  return questions


def examples(questions: Sequence[Question], vocabulary: Sequence[str],
             tags: Sequence[str]) -> Tuple[np.ndarray, np.ndarray]:
  """Makes one example per question.

  Returns:
    x: [n, words] float32, frequencies of the vocabulary's words in the question.
    y: [n, tags] float32, 1 for the tags it has.
  """
  word_ids = {word: number for number, word in enumerate(vocabulary)}
  tag_ids = {tag: number for number, tag in enumerate(tags)}
  x = np.zeros([len(questions), len(vocabulary)], np.float32)
  y = np.zeros([len(questions), len(tags)], np.float32)
  for row, target, question in zip(x, y, questions):
    for word in question.words:
      if word in word_ids:
        row[word_ids[word]] += 1 / len(question.words)
    for tag in question.tags:
      if tag in tag_ids:
        target[tag_ids[tag]] = 1
  return x, y
