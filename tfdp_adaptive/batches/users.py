# SPDX-License-Identifier: Apache-2.0
"""Users as records: the examples of a user in a step are one row.

The examples of a user are along the second axis of a batch [users, examples, ...]. At every step,
at most `m` examples of a user are drawn. The draw depends on this user alone. Missing examples are
filled with one of the user's own examples and weight zero, so that all gradients are finite.
"""

import functools
from typing import Any, Optional, Sequence, Tuple, Union

import numpy as np

from tfdp_adaptive import checks
from tfdp_adaptive import terms as terms_lib
from tfdp_adaptive.accounting import poisson
from tfdp_adaptive.batches import padding
from tfdp_adaptive.batches import sampling_seed
from tfdp_adaptive.batches import sources

_SAMPLED, _AGAIN = 64, 16  # Examples that an order is known by; that are read twice.
RECORDS = ('mean', 'sum')
IdsLike = Union[np.ndarray, Sequence[Any]]  # Integers or strings.


def checked(ids: IdsLike, size: int) -> np.ndarray:
  """Returns the user ids of `size` examples as an array; raises if one is missing."""
  ids = checks.rectangular(ids, '`users` must hold one id for every example.')
  if ids.shape != (size,) or ids.dtype.kind not in 'iuSUO':
    raise ValueError('`users` must hold the id of its user, an integer or a string, for every '
                     f'example. Received: {ids.ndim} axes of {ids.dtype.type.__name__}, or another '
                     'number of ids than of examples.')
  if ids.dtype == object and not any(
      all(isinstance(one, kind) for one in ids) for kind in (str, bytes, int)):
    raise ValueError('`users` must be integers or strings, all of one kind. Received: ids of '
                     f'{sorted({type(one).__name__ for one in ids})}; a user without id would be '
                     'no record, and one with two would be two.')
  return ids


class Examples:
  """Every example is a record.

  Attributes:
    source: The `Source` of the examples.
  """

  def __init__(self, examples: sources.Source) -> None:
    self.source, self.specs = examples, examples.specs

  def __len__(self) -> int:
    return len(self.source)

  def fingerprint(self) -> str:
    """Returns a SECRET digest of some examples in order, or of none if the source is random."""
    n = len(self)
    places = np.unique(np.linspace(0, n - 1, min(n, _SAMPLED)).round().astype(np.int64))
    taken = self.source.take(places)
    first = sources.map_structure(lambda a: a[:_AGAIN], taken)
    if sources.fingerprint(first) != sources.fingerprint(self.source.take(places[:_AGAIN])):
      return sources.fingerprint(np.array(n))  # They are augmented where they are read.
    return sources.fingerprint((np.array(n), taken))

  def used(self, indices: np.ndarray, seed: sampling_seed.SamplingSeed) -> np.ndarray:
    """Returns the drawn records that a step of a run with this seed uses."""
    del seed
    return indices

  def take(self, indices: np.ndarray, step: int,
           seed: sampling_seed.SamplingSeed) -> Tuple[Any, np.ndarray]:
    """Returns `(nest of [n, ...], weights [n])`."""
    del step, seed
    return self.source.take(indices), np.ones(len(indices), np.float32)


class Users(Examples):
  """The users of some examples, in the order of their ids.

  Args:
    examples: A `Source`.
    ids: [n] integers or strings, the user of each example.
    examples_per_user: m, the largest number of examples of a user in a step.
    record: 'mean' or 'sum' of a user's examples, which is then clipped.
  """

  def __init__(self, examples: sources.Source, ids: IdsLike, examples_per_user: int,
               record: str = 'mean') -> None:
    super().__init__(examples)
    checks.whole(examples_per_user=examples_per_user)
    checks.one_of(RECORDS, record=record)
    ids = checked(ids, len(examples))
    self._ids, user_of, counts = np.unique(ids, return_inverse=True, return_counts=True)
    self._of_user = np.argsort(user_of, kind='stable')
    self._first = np.concatenate([[0], np.cumsum(counts)])
    self._most, self._record = int(examples_per_user), record

  def __len__(self) -> int:
    return len(self._first) - 1

  def fingerprint(self) -> str:
    """Returns a SECRET digest of the users' ids, in order."""
    return sources.fingerprint(self._ids)

  def take(self, users: np.ndarray, step: int,
           seed: sampling_seed.SamplingSeed) -> Tuple[Any, np.ndarray]:
    """Returns `(nest of [users, m, ...], weights [users, m])`; the seed chooses the examples."""
    numbers = np.zeros([len(users), self._most], np.int64)
    weights = np.full([len(users), self._most], padding.EMPTY)
    for row, user in enumerate(users):
      own = self._of_user[self._first[user]:self._first[user + 1]]
      if len(own) > self._most:
        rng = np.random.default_rng([seed.of_users(), step, int(user)])  # No other user's.
        own = rng.permutation(own)[:self._most]
      numbers[row] = own[0]
      numbers[row, :len(own)] = own
      weights[row, :len(own)] = 1 if self._record == 'sum' else 1 / len(own)
    read, back = np.unique(numbers, return_inverse=True)
    back = back.reshape(numbers.shape)
    return sources.map_structure(lambda a: a[back], self.source.take(read)), weights


class OwnedExamples(Examples):
  """Every example is a record, of which a run uses a few of every user.

  Args:
    examples: A `Source`.
    owners: [n] ids, or [n, owners] ids with -1 for none.
    most: The largest number of examples of a user.
  """

  def __init__(self, examples: sources.Source, owners: IdsLike, most: int) -> None:
    super().__init__(examples)
    ids = checks.rectangular(owners, '`users` must be [n] or [n, owners] ids.')
    if ids.ndim != 2 or len(ids) != len(examples):
      ids = checked(owners, len(examples))
    self._kept = functools.lru_cache(1)(lambda of_users: poisson.kept(
        ids, most, np.random.default_rng(of_users)))

  def used(self, indices: np.ndarray, seed: sampling_seed.SamplingSeed) -> np.ndarray:
    return indices[self._kept(seed.of_users())[indices]]


def of(plan: terms_lib.Terms, examples: sources.Source, users: Optional[IdsLike],
       examples_per_user: Optional[int], record: str) -> Examples:
  """Returns the records of a plan; see `batches.of_plan`."""
  if plan.sampling.by_example:
    if users is None or examples_per_user not in (None, plan.sampling.examples_per_user):
      raise ValueError(
          'A plan that samples the examples of users needs to know whose each one is: '
          '`plan.batches(data, users=ids)`, with as many of a user as its sampling says. Received: '
          f'users of type {type(users).__name__}, examples_per_user={examples_per_user!r}.')
    return OwnedExamples(examples, users, plan.sampling.examples_per_user)
  if plan.unit == 'user' and (users is None or examples_per_user is None):
    raise ValueError(
        'A plan with unit="user" needs to know whose each example is, and how many of a user a '
        'step may take: `plan.batches(data, users=ids, examples_per_user=m)`. Received: '
        f'users of type {type(users).__name__}, examples_per_user={examples_per_user!r}. For '
        'clients that keep their '
        'data, use `plan.index_batches()` to choose users and train with `tfdp.federated`.')
  if plan.unit != 'user' and (users is not None or examples_per_user is not None):
    raise ValueError(
        '`users` and `examples_per_user` are for a plan with unit="user": this one protects '
        f'single examples. Received: unit={plan.unit!r}. Make the plan with unit="user" and '
        'population_size the number of users.')
  if users is None or examples_per_user is None:
    return Examples(examples)
  return Users(examples, users, examples_per_user, record)
