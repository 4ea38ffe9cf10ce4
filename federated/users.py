# SPDX-License-Identifier: Apache-2.0
"""Whose data there is: anything with `client_ids` and a data set for each.

`tff.simulation.datasets.ClientData` is one, a `Users` another: it keeps arrays
per user and caps what one user may contribute to a round.
"""

from __future__ import annotations

import collections.abc
from typing import Any, Dict, Iterator, List, Mapping, Optional

import numpy as np
import tensorflow as tf

from tfdp_adaptive import checks


class Users:
  """Users with their examples in memory.

  Args:
    examples: {user: nest of arrays}, equally long along the leading axis; the
      order of the users is kept.
    batch_size: Examples per local step.
    epochs: Passes over a user's examples in a round.
    max_examples: Examples of one user that a round uses at most, drawn again in
      every round; None for all. Clipping bounds a user's influence anyway: this
      bounds its work.
  """

  def __init__(
      self, examples: Mapping[str, Any], *, batch_size: int, epochs: int = 1,
      max_examples: Optional[int] = None) -> None:
    if not isinstance(examples, collections.abc.Mapping) or not examples:
      raise ValueError('`examples` must map users to nests of arrays, one user at least. '
                       f'Received: {examples!r:.60}.')
    for user, arrays in examples.items():
      if len({np.shape(a)[:1] for a in tf.nest.flatten(arrays)} | {()}) != 2:
        raise ValueError('`examples` must hold arrays that are equally long along their first axis '
                         'for every user. Received: shapes '
                         f'{[np.shape(a) for a in tf.nest.flatten(arrays)]} for {user!r}.')
    sizes = dict(batch_size=batch_size, epochs=epochs)
    if max_examples is not None:
      sizes.update(max_examples=max_examples)
    checks.whole(**sizes)
    if max(sizes.values()) >= 2**31:
      raise ValueError(f'Sizes must be below 2**31. Received: {sizes}.')
    self._examples = dict(examples)
    self._batch_size, self._epochs, self._max_examples = batch_size, epochs, max_examples

  @property
  def client_ids(self) -> List[str]:
    return list(self._examples)

  @property
  def element_type_structure(self) -> Any:
    """Nest of `tf.TensorSpec` of a batch; what a TFF model takes as `input_spec`."""
    return self._dataset(next(iter(self._examples.values()))).element_spec

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
    arrays = self._examples[client_id]
    size = len(tf.nest.flatten(arrays)[0])
    if self._max_examples is not None and size > self._max_examples:
      chosen = np.random.default_rng().permutation(size)[:self._max_examples]
      return tf.nest.map_structure(lambda a: np.asarray(a)[chosen], arrays)
    return tf.nest.map_structure(np.asarray, arrays)

  def all_examples(self, batch_size: int = 256) -> tf.data.Dataset:
    """One data set of everybody's examples, for evaluation."""
    together = tf.nest.map_structure(
        lambda *arrays: np.concatenate(arrays), *self._examples.values())
    return tf.data.Dataset.from_tensor_slices(together).batch(batch_size)

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
