# SPDX-License-Identifier: Apache-2.0
"""Users as records: the examples of a user in a step are one row.

The examples of a user are along the second axis of a batch [users, examples, ...]. At every step,
at most `m` examples of a user are drawn. The draw depends on this user alone. Missing examples are
filled with one of the user's own examples and weight zero, so that all gradients are finite.
"""

from typing import Any, Tuple

import numpy as np

from tfdp_adaptive import checks
from tfdp_adaptive.batches import sources

_SAMPLED, _AGAIN = 64, 16  # Examples that an order is known by; that are read twice.
RECORDS = ('mean', 'sum')


def checked(ids: Any, size: int) -> np.ndarray:
  """Returns the user ids of `size` examples as an array; raises if one is missing."""
  ids = np.asarray(ids)
  if ids.shape != (size,) or ids.dtype.kind not in 'iuSUO':
    raise ValueError('`users` must hold the id of its user, an integer or a string, for every '
                     f'example. Received: shape {ids.shape} of {ids.dtype} for {size} '
                     'examples.')
  if ids.dtype == object and not any(
      all(isinstance(one, kind) for one in ids) for kind in (str, bytes, int)):
    raise ValueError('`users` must be integers or strings, all of one kind. Received: ids of '
                     f'{sorted({type(one).__name__ for one in ids})}; a user without id would be '
                     'no record, and one with two would be two.')
  return ids


class Users:
  """The users of some examples, in the order of their ids.

  Args:
    examples: A `Source`.
    ids: [n] integers or strings, the user of each example.
    examples_per_user: m, the largest number of examples of a user in a step.
    record: 'mean' or 'sum' of a user's examples, which is then clipped.
    coins: The coins of the run, which choose the examples.
  """

  def __init__(
      self, examples: sources.Source, ids: Any, examples_per_user: int, record: str = 'mean',
      coins: Any = None) -> None:
    checks.whole(examples_per_user=examples_per_user)
    checks.one_of(RECORDS, record=record)
    ids = checked(ids, len(examples))
    self._ids, user_of, counts = np.unique(ids, return_inverse=True, return_counts=True)
    self._of_user = np.argsort(user_of, kind='stable')
    self._first = np.concatenate([[0], np.cumsum(counts)])
    self._examples, self._most, self._record = examples, int(examples_per_user), record
    self._coins = coins
    self.specs = examples.specs

  def __len__(self) -> int:
    return len(self._first) - 1

  def fingerprint(self) -> str:
    """SECRET digest of the users' ids, in order."""
    return sources.fingerprint(self._ids)

  def take(self, users: np.ndarray, step: int) -> Tuple[Any, np.ndarray]:
    """Returns `(nest of [users, m, ...], weights [users, m])`."""
    numbers = np.zeros([len(users), self._most], np.int64)
    weights = np.zeros([len(users), self._most], np.float32)
    for row, user in enumerate(users):
      own = self._of_user[self._first[user]:self._first[user + 1]]
      if len(own) > self._most:
        coins = np.random.default_rng([self._coins.of_users(), step, int(user)])  # No other user's.
        own = coins.permutation(own)[:self._most]
      numbers[row] = own[0]
      numbers[row, :len(own)] = own
      weights[row, :len(own)] = 1 if self._record == 'sum' else 1 / len(own)
    read, back = np.unique(numbers, return_inverse=True)
    back = back.reshape(numbers.shape)
    return sources.map_structure(lambda a: a[back], self._examples.take(read)), weights


class Examples:
  """Every example is a record."""

  def __init__(self, examples: sources.Source) -> None:
    self._examples, self.specs = examples, examples.specs

  def __len__(self) -> int:
    return len(self._examples)

  def fingerprint(self) -> str:
    """Returns a SECRET digest of some examples in order, or of none if the source is random."""
    n = len(self)
    places = np.unique(np.linspace(0, n - 1, min(n, _SAMPLED)).round().astype(np.int64))
    taken = self._examples.take(places)
    first = sources.map_structure(lambda a: a[:_AGAIN], taken)
    if sources.fingerprint(first) != sources.fingerprint(self._examples.take(places[:_AGAIN])):
      return sources.fingerprint(np.array(n))  # They are augmented where they are read.
    return sources.fingerprint((np.array(n), taken))

  def take(self, indices: np.ndarray, step: int) -> Tuple[Any, np.ndarray]:
    """Returns `(nest of [n, ...], weights [n])`."""
    del step
    return self._examples.take(indices), np.ones(len(indices), np.float32)
