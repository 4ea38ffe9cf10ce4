# SPDX-License-Identifier: Apache-2.0
"""The users of a simulation and their data.

Any object with `client_ids` and a data set for each of them works, such as
`tff.simulation.datasets.ClientData`. `Users` reads the arrays of a user from a `sources.Source` and
limits how many examples of a user take part in a round.
"""

from __future__ import annotations

from typing import Dict, Iterator, List, Mapping, Optional

import numpy as np
import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import trees
from tfdp_adaptive.batches import passes
from tfdp_adaptive.batches import sources as fingerprints

from . import engines
from . import sources

_SAMPLED = 32  # Users whose data a saved run knows again.


class Users:
  """Users, their examples, and how many of them a round uses.

  Args:
    examples: `{user: nest of arrays}`, equally long along the leading axis. The order of the users
      is kept. `from_sqlite`, `from_json_lines` and `from_rows` read users whose examples do not fit
      into memory.
    batch_size: Examples per local step.
    epochs: The number of passes over a user's examples in a round.
    max_examples: The largest number of examples of one user in a round; None for all. A user with
      more examples gets a new random choice in every round. This bounds the time that a user takes.
      Clipping bounds the influence.
  """

  def __init__(
      self, examples: Mapping[engines.Client, trees.Tree], *, batch_size: int, epochs: int = 1,
      max_examples: Optional[int] = None) -> None:
    self._source = sources.of(examples)
    sizes = dict(batch_size=batch_size, epochs=epochs)
    if max_examples is not None:
      sizes.update(max_examples=max_examples)
    checks.whole(**sizes)
    if max(sizes.values()) >= 2**31:
      raise ValueError(f'Sizes must be below 2**31. Received: {sizes}.')
    self._batch_size, self._epochs, self._max_examples = batch_size, epochs, max_examples

  @classmethod
  def from_sqlite(
      cls, path: sources.Path, *, features: sources.Features, preprocess: sources.Preprocess,
      split: str = 'train', **sizes: int) -> Users:
    """Reads the SQLite format of `tff.simulation.datasets`, user by user, without TFF.

    Args:
      path: The file, such as TFF's `stackoverflow.sqlite`.
      features: The features of an example, as for `tf.io.parse_example`.
      preprocess: `{feature: [n, ...] array} -> nest of [n, ...] arrays`.
      split: Value of `split_name`.
      **sizes: `batch_size`, `epochs`, `max_examples`, as for `Users`.

    Raises:
      ValueError: If the file or the split does not exist.
    """
    return cls(sources.Database(path, split, sources.Protos(features), preprocess), **sizes)

  @classmethod
  def from_json_lines(
      cls, path: sources.Path, *, user: str, preprocess: Optional[sources.Preprocess] = None,
      database: Optional[sources.Path] = None, **sizes: int) -> Users:
    """Reads a file of JSON objects, one example per line, user by user.

    The file is copied once into an SQLite file of about the same size.

    Args:
      path: JSON lines, also .gz or .xz.
      user: Name of the field with the user of a line. Its value is a text or a whole number.
      preprocess: `{name: list of values} -> nest of arrays`, one example per line; by
        default an array of each.
      database: The SQLite file, `path` with '.sqlite' by default. It holds the users' data.
      **sizes: `batch_size`, `epochs`, `max_examples`, as for `Users`.

    Raises:
      ValueError: If a line is not an object, or has no user.
    """
    return cls(sources.Database(sources.database_of(path, user, database), sources.SPLIT,
                                sources.parse_json, preprocess or sources.without(user)), **sizes)

  @classmethod
  def from_rows(
      cls, data: sources.Table, *, user: str, preprocess: Optional[sources.Preprocess] = None,
      **sizes: int) -> Users:
    """Groups rows by a column of users.

    Memory: It takes 16 bytes per row in addition to the data and the users' ids.

    Args:
      data: A data set of Hugging Face, a DataFrame of pandas, or `{column: array}`.
      user: Name of the column of users. Its values are texts or whole numbers.
      preprocess: `{column: values} -> nest of arrays`, one example per row; by default an
        array of each.
      **sizes: `batch_size`, `epochs`, `max_examples`, as for `Users`.

    Examples:
      >>> data = {'who': ['b', 'a', 'b'], 'x': np.array([1., 2., 3.])}
      >>> users = Users.from_rows(data, user='who', batch_size=2)
      >>> [(user, next(users.batches(user))['x'].tolist()) for user in users.client_ids]
      [('b', [1.0, 3.0]), ('a', [2.0])]
    """
    return cls(sources.Rows(data, user, preprocess or sources.without(user)), **sizes)

  @property
  def client_ids(self) -> List[engines.Client]:
    return list(self._source)

  @property
  def element_type_structure(self) -> trees.Tree:
    """Returns the nest of `tf.TensorSpec` of a batch, which is the `input_spec` of a TFF model."""
    return self._dataset(self._source[next(iter(self._source))]).element_spec

  @property
  def settings(self) -> Dict[str, Optional[int]]:
    """Returns the settings of a round, which must be the same when a saved run resumes."""
    return dict(batch_size=self._batch_size, epochs=self._epochs, max_examples=self._max_examples)

  def create_tf_dataset_for_client(self, client_id: engines.Client) -> tf.data.Dataset:
    return self._dataset(self._drawn(client_id))

  def batches(self, client_id: engines.Client) -> Iterator[trees.Tree]:
    """Yields the batches of a user as nests of arrays, without a data set."""
    nest = self._drawn(client_id)
    arrays = tf.nest.flatten(nest)
    if self._epochs > 1:
      arrays = [np.concatenate([array] * self._epochs) for array in arrays]
    for start in range(0, len(arrays[0]), self._batch_size):
      yield tf.nest.pack_sequence_as(
          nest, [array[start:start + self._batch_size] for array in arrays])

  def _drawn(self, client_id: engines.Client) -> trees.Tree:
    """Returns the examples of a user that a round uses."""
    return self._source.sample(client_id, self._max_examples)

  def sample_digest(self) -> Optional[str]:
    """Returns a SECRET digest of some users' examples, or None if the examples change."""
    client_ids = sorted(self._source, key=repr)  # Their order has a digest of its own.
    places = np.linspace(0, len(client_ids) - 1, min(len(client_ids), _SAMPLED)).round()
    chosen = [client_ids[int(i)] for i in np.unique(places)]
    digest = lambda user: fingerprints.fingerprint(tuple(tf.nest.flatten(self._source[user])))
    first = digest(chosen[0])
    if first != digest(chosen[0]):
      return None
    return fingerprints.fingerprint(np.array([first, *map(digest, chosen[1:])]))

  def all_examples(self, batch_size: int = 256) -> tf.data.Dataset:
    """Returns a data set of all users' examples for evaluation; it reads one user at a time."""
    return passes.dataset(
        lambda: (self._source[user] for user in self._source),
        self.element_type_structure).unbatch().batch(batch_size)

  def _dataset(self, arrays: trees.Tree) -> tf.data.Dataset:
    dataset = tf.data.Dataset.from_tensor_slices(arrays)
    if self._epochs > 1:
      dataset = dataset.repeat(self._epochs)
    return dataset.batch(self._batch_size)
