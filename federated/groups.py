# SPDX-License-Identifier: Apache-2.0
"""Puts the batches of many clients into a few tensors, for one call.

One data set per client would be one graph per client, which must be built, sent, parsed and run.
For small models this takes ten times as long as the training. `local_training` trains a group
client by client.
"""

from __future__ import annotations

from typing import Any, Iterator, List, NamedTuple, Sequence

import numpy as np
import tensorflow as tf

CLIENTS, BYTES = 2048, 64 * 2**20  # Most clients and bytes of a call.


class Group(NamedTuple):
  """The concatenated batches of some clients.

  Attributes:
    rows: A tensor per leaf of a batch, all examples of all batches along its first axis.
    batch_ends: [batches] index in the rows at which each batch ends.
    client_ends: [clients] index in the batches at which each client ends.
  """

  rows: Any
  batch_ends: Any
  client_ends: Any


class NotInGroupsError(ValueError):
  """The clients of this model must be trained one at a time."""


def specs(input_spec: Any) -> Group:
  """Returns the `tf.TensorSpec`s of a group.

  Raises:
    NotInGroupsError: If batches are not tensors that can be concatenated.
  """
  leaves = tf.nest.flatten(input_spec)
  for leaf in leaves:
    if not isinstance(leaf, tf.TensorSpec) or leaf.dtype == tf.string or not (
        leaf.shape.rank and leaf.shape[1:].is_fully_defined()):
      raise NotInGroupsError(f'Batches of {leaf} cannot lie one behind the other.')
  ends = tf.TensorSpec([None], tf.int64)
  return Group(
      tuple(tf.TensorSpec([None] + leaf.shape[1:], leaf.dtype) for leaf in leaves), ends, ends)


def batches_of(users: Any, client_id: Any, input_spec: Any, as_one: bool = False) -> List[Any]:
  """Yields the batches of one client, as tuples of arrays in the order of the flat spec.

  Args:
    users: An object with `create_tf_dataset_for_client`, and `batches` if it needs no data set.
    client_id: Id of the client.
    input_spec: Specs of a batch; any other batch is refused.
    as_one: Whether all of the client's examples make one batch.
  """
  batches = (users.batches(client_id) if hasattr(users, 'batches') else
             users.create_tf_dataset_for_client(client_id).as_numpy_iterator())
  leaves = tf.nest.flatten(input_spec)
  flat = []
  for batch in batches:
    tf.nest.assert_same_structure(batch, input_spec, check_types=False)
    arrays = tuple(np.asarray(x) for x in tf.nest.flatten(batch))
    sizes = {array.shape[:1] for array in arrays}
    if len(sizes) > 1 or any(
        array.dtype != leaf.dtype.as_numpy_dtype or not leaf.shape.is_compatible_with(array.shape)
        for array, leaf in zip(arrays, leaves)):
      raise TypeError(f'A batch must be like {leaves}. '
                      f'Received: {[(a.shape, str(a.dtype)) for a in arrays]}.')
    flat.append(arrays)
  if as_one and flat:
    whole = tuple(np.concatenate(parts) for parts in zip(*flat))
    flat = [whole] if len(whole[0]) else []
  return flat


def pack(clients: Sequence[List[Any]], group_specs: Group) -> Group:
  """Returns the `Group` of some clients' batches."""
  batches = [batch for client in clients for batch in client]
  rows = tuple(
      np.concatenate([np.zeros([0, *spec.shape[1:]], spec.dtype.as_numpy_dtype),
                      *(batch[i] for batch in batches)])
      for i, spec in enumerate(group_specs.rows))
  return Group(rows, np.cumsum([len(batch[0]) for batch in batches], dtype=np.int64),
               np.cumsum([len(client) for client in clients], dtype=np.int64))


def divide(clients: Sequence[List[Any]], count: int) -> List[List[List[Any]]]:
  """Divides clients into `count` lists of about the same work; some may be empty."""
  parts: List[List[Any]] = [[] for _ in range(count)]
  work = [0] * count
  for client in sorted(clients, key=len, reverse=True):
    least = work.index(min(work))
    parts[least].append(client)
    work[least] += 1 + len(client)
  return parts


def calls(clients: Any) -> Iterator[Any]:
  """Divides clients into calls with a bounded number of clients and bytes."""
  call, size = [], 0
  for client, batches in clients:
    call.append((client, batches))
    size += sum(array.nbytes for batch in batches for array in batch)
    if len(call) >= CLIENTS or size >= BYTES:
      yield call
      call, size = [], 0
  if call:
    yield call
