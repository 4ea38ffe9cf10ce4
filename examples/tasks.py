# SPDX-License-Identifier: Apache-2.0
"""The job itself: which sentences train, which are held out, which words are known."""

from __future__ import annotations

import hashlib
import json
import pathlib
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

import tfdp_adaptive as tfdp
from tfdp_adaptive import errors

from . import corpus as corpus_lib
from . import next_word

EVALUATED = 4000  # Held-out sentences that are looked at, at the most.
Examples = Tuple[np.ndarray, np.ndarray]


class Text(NamedTuple):
  """Where sentences and words come from."""

  data: Optional[pathlib.Path] = None  # None: the standard library's docstrings.
  vocabulary: Optional[pathlib.Path] = None  # None: the frequent words of the same.
  vocabulary_size: int = 1000


class Target(NamedTuple):
  """The run that is asked for."""

  steps: int
  batch_size: int
  epsilon: float
  delta: Optional[float] = None  # None: `tfdp.advice.default_delta`.

  def plan(
      self, population_size: int, limit: str, **fields: Any) -> tfdp.PrivacyPlan:
    """The plan of all private methods; each puts its own clip norm in.

    Args:
      population_size: Number of records.
      limit: Which option must not exceed it, and what the records are.
      **fields: More of the plan.

    Raises:
      errors.UsageError: There is no such plan.
    """
    if self.batch_size > population_size:
      raise errors.UsageError(
          f'{limit}, {population_size}. Received: {self.batch_size}')
    with errors.usage():
      return tfdp.PrivacyPlan.calibrate(
          target_epsilon=self.epsilon,
          target_delta=self.delta or tfdp.advice.default_delta(population_size),
          population_size=population_size, batch_size=self.batch_size, steps=self.steps,
          l2_norm_clip=1.0, **fields)


class Task(NamedTuple):
  """Next-word prediction on one text."""

  name: str
  vocabulary: Tuple[str, ...]  # Public words.
  train: Examples
  validation: Examples  # For choosing settings.
  test: Examples  # For the table.
  clients: Dict[str, Examples]  # Clients of the training sentences.
  log_frequencies: np.ndarray  # [num_ids] of PUBLIC words.
  baseline: Tuple[float, float]  # Loss and accuracy of these frequencies alone.
  notes: List[str]  # For the privacy statement.
  users: Tuple[Optional[str], ...] = ()  # Owner of each training sentence.

  @property
  def num_ids(self) -> int:
    """Vocabulary, unknown word and padding."""
    return len(self.vocabulary) + next_word.FIRST_WORD

  def identity(self) -> Dict[str, str]:
    """Returns the settings that distinguish this task from others, for JSON."""
    sizes = [(client, len(x)) for client, (x, _) in self.clients.items()]
    digest = hashlib.sha256(json.dumps([self.vocabulary, sizes]).encode())
    for array in self.train:
      digest.update(np.ascontiguousarray(array).data)
    return {'data': self.name, 'sha256': digest.hexdigest()}


def load(text: Text, need_client: bool = False) -> Task:
  """Reads text and vocabulary.

  Args:
    text: Where they are.
    need_client: Whether a text without clients is refused.

  Raises:
    corpus_lib.DataError: A file cannot be used, or nothing is left to train on.
  """
  corpus = (corpus_lib.read(text.data, need_client) if text.data
            else corpus_lib.standard_library())
  vocabulary, source = _vocabulary(text)
  public = corpus_lib.standard_library().sentences
  parts = corpus_lib.split(corpus.sentences)
  if not (parts.train and parts.validation and parts.test):
    raise corpus_lib.DataError(
        f'{corpus.name}: there are too few sentences or clients to hold some out: one '
        'client in ten (or one sentence in ten, without clients) is held out for validation, and '
        'as many for the test. Give a text of at least 50 clients, or 50 sentences without any. '
        'Sentences end at . ! ? : ; or a blank line.')
  train = next_word.examples(parts.train, vocabulary)
  test = next_word.examples(_spread(parts.test), vocabulary)
  log_frequencies = next_word.log_frequencies(
      next_word.examples(public, vocabulary)[1], len(vocabulary) + next_word.FIRST_WORD)
  by_client = corpus_lib.by_client(parts.train)
  return Task(
      name=corpus.name,
      vocabulary=tuple(vocabulary),
      train=train,
      validation=next_word.examples(_spread(parts.validation), vocabulary),
      test=test,
      clients={client: next_word.examples(sentences, vocabulary)
               for client, sentences in by_client.items()},
      log_frequencies=log_frequencies,
      baseline=next_word.frequency_baseline(log_frequencies, test[1]),
      notes=_notes(corpus, parts, source, len(vocabulary)),
      users=tuple(sentence.client for sentence in parts.train))


def _vocabulary(text: Text) -> Tuple[Tuple[str, ...], str]:
  if text.vocabulary:
    return next_word.read_vocabulary(text.vocabulary), f'the file {text.vocabulary.name}'
  public = corpus_lib.standard_library()
  return next_word.build_vocabulary(public.sentences, text.vocabulary_size), public.name


def _spread(sentences: Sequence[Any]) -> Sequence[Any]:
  """At most `EVALUATED` sentences, evenly spaced."""
  return sentences[::-(-len(sentences) // EVALUATED)]


def _notes(corpus: Any, parts: Any, source: str, size: int) -> List[str]:
  held_out = ('whole clients' if corpus_lib.by_client(parts.test) else 'sentences')
  notes = [
      f'Data: {corpus.name}, {len(corpus.sentences)} sentences; {len(parts.train)} train, '
      f'{len(parts.validation)} and {len(parts.test)} ({held_out}, by a fixed hash) are held out '
      'for choosing settings and for the table.',
      f'Vocabulary: {size} words from {source}, taken to be public. It is not covered by any '
      'epsilon below.',
      'The frequencies of the words, which every model starts from, are those in '
      f'{corpus_lib.standard_library().name}.']
  if corpus.public:
    notes.append('This text is public: the run shows what the methods do, it protects nobody.')
  else:
    notes.append('The file as such is not changed, copied or sent anywhere. The number of training '
                 'records is used as a public constant.')
  return notes
