# SPDX-License-Identifier: Apache-2.0
"""Whose data there is: anything with `client_ids` and a data set for each.

`tff.simulation.datasets.ClientData` is one, a `Users` another: it reads a user's arrays
from a `sources.Source` and caps what one user may contribute to a round.
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Mapping, Optional

import numpy as np
import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive.batches import sources as fingerprints

from . import sources

_SAMPLED = 32  # Users whose data a saved run knows again.


class Users:
  """Users and how much of their examples a round uses.

  Args:
    examples: {user: nest of arrays}, equally long along the leading axis; the
      order of the users is kept. `from_sqlite`, `from_json_lines` and `from_rows` read
      users whose examples do not fit into memory.
    batch_size: Examples per local step.
    epochs: Passes over a user's examples in a round.
    max_examples: Examples of one user that a round uses at most, drawn again in
      every round; None for all. Clipping bounds a user's influence anyway: this
      bounds its work.
  """

  def __init__(
      self, examples: Mapping[Any, Any], *, batch_size: int, epochs: int = 1,
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
      cls, path: sources.Path, *, features: Mapping[str, Any], preprocess: sources.Preprocess,
      split: str = 'train', **sizes: Any) -> Users:
    """Reads the SQLite format of `tff.simulation.datasets`, user by user, without TFF.

    Args:
      path: The file, such as TFF's `stackoverflow.sqlite`.
      features: As for `tf.io.parse_example`, which reads its examples.
      preprocess: `{feature: [n, ...] array} -> nest of [n, ...] arrays`.
      split: Value of `split_name`.
      **sizes: `batch_size`, `epochs`, `max_examples`, as for `Users`.

    Raises:
      ValueError: The file or the split is not there.
    """
    return cls(sources.Database(path, split, sources.protos(features), preprocess), **sizes)

  @classmethod
  def from_json_lines(
      cls, path: sources.Path, *, user: str, preprocess: Optional[sources.Preprocess] = None,
      database: Optional[sources.Path] = None, **sizes: Any) -> Users:
    """Reads a file of JSON objects, one example per line, user by user.

    The file is streamed into an SQLite file once, which takes about as much disk again.

    Args:
      path: JSON lines, also .gz or .xz.
      user: Name of what says whose a line is, a text or a whole number.
      preprocess: `{name: list of values} -> nest of arrays`, one example per line; by
        default an array of each.
      database: The SQLite file, `path` with '.sqlite' by default. It holds the users' data.
      **sizes: `batch_size`, `epochs`, `max_examples`, as for `Users`.

    Raises:
      ValueError: A line is no object, or has no user.
    """
    made = sources.json_database(path, user, database)
    return cls(sources.Database(made, 'train', sources.parse_json,
                                preprocess or sources.without(user)), **sizes)

  @classmethod
  def from_rows(
      cls, data: Any, *, user: str, preprocess: Optional[sources.Preprocess] = None,
      **sizes: Any) -> Users:
    """Groups rows by the column that says whose they are.

    Memory: 16 bytes per row besides the data and the users' ids.

    Args:
      data: A data set of Hugging Face, a DataFrame of pandas, or `{column: array}`.
      user: Name of the column of users, texts or whole numbers.
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
  def client_ids(self) -> List[str]:
    return list(self._source)

  @property
  def element_type_structure(self) -> Any:
    """Nest of `tf.TensorSpec` of a batch; what a TFF model takes as `input_spec`."""
    return self._dataset(self._source[next(iter(self._source))]).element_spec

  @property
  def settings(self) -> Dict[str, Any]:
    """What a round uses of a user's examples; a saved run goes on with the same."""
    return dict(batch_size=self._batch_size, epochs=self._epochs, max_examples=self._max_examples)

  def create_tf_dataset_for_client(self, client_id: str) -> tf.data.Dataset:
    return self._dataset(self._drawn(client_id))

  def batches(self, client_id: str) -> Iterator[Any]:
    """The same batches as nests of arrays, for whoever can do without a data set."""
    arrays = self._drawn(client_id)
    if self._epochs > 1:
      arrays = tf.nest.map_structure(lambda a: np.concatenate([a] * self._epochs), arrays)
    size = len(tf.nest.flatten(arrays)[0])
    for start in range(0, size, self._batch_size):
      yield tf.nest.map_structure(lambda a, s=start: a[s:s + self._batch_size], arrays)

  def _drawn(self, client_id: str) -> Any:
    """The examples of a user that a round uses."""
    return self._source.sample(client_id, self._max_examples)

  def sample_digest(self) -> Optional[str]:
    """SECRET digest of some users' examples; None if they change by themselves."""
    client_ids = sorted(self._source, key=repr)  # Their order has a digest of its own.
    places = np.linspace(0, len(client_ids) - 1, min(len(client_ids), _SAMPLED)).round()
    chosen = [client_ids[int(i)] for i in np.unique(places)]
    digest = lambda user: fingerprints.fingerprint(tuple(tf.nest.flatten(self._source[user])))
    first = digest(chosen[0])
    if first != digest(chosen[0]):
      return None
    return fingerprints.fingerprint(np.array([first, *map(digest, chosen[1:])]))

  def all_examples(self, batch_size: int = 256) -> tf.data.Dataset:
    """One data set of everybody's examples, for evaluation; reads one user at a time."""
    return tf.data.Dataset.from_generator(
        lambda: (self._source[user] for user in self._source),
        output_signature=self.element_type_structure).unbatch().batch(batch_size)

  def _dataset(self, arrays: Any) -> tf.data.Dataset:
    dataset = tf.data.Dataset.from_tensor_slices(arrays)
    if self._epochs > 1:
      dataset = dataset.repeat(self._epochs)
    return dataset.batch(self._batch_size).with_options(_as_it_is())


def _as_it_is() -> tf.data.Options:
  """Options of a data set that is read once: optimizing it takes longer than reading it."""
  options = tf.data.Options()
  options.autotune.enabled = False
  options.experimental_optimization.apply_default_optimizations = False
  return options
