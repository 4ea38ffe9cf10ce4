# SPDX-License-Identifier: Apache-2.0
"""Puts the batches of many clients into a few tensors, for one call.

One data set per client would be one graph per client, which must be built, sent, parsed and run.
For small models this takes ten times as long as the training. `local_training` trains a group
client by client.
"""

from typing import Callable, Iterable, List, NamedTuple, Optional, Sequence, Tuple, TypeVar

import numpy as np
import tensorflow as tf

from tfdp_adaptive import trees

from . import engines

Client = TypeVar('Client')
Batch = Tuple[np.ndarray, ...]  # The leaves of a batch, in the order of its flat spec.
CLIENTS, BYTES = 2048, 64 * 2**20  # Most clients and bytes of a call.


class Group(NamedTuple):
  """The concatenated batches of some clients.

  Attributes:
    rows: A tensor per leaf of a batch, all examples of all batches along its first axis.
    batch_ends: [batches] index in the rows at which each batch ends.
    client_ends: [clients] index in the batches at which each client ends.
  """

  rows: Tuple[trees.Tree, ...]
  batch_ends: trees.Tree
  client_ends: trees.Tree


class NotInGroupsError(ValueError):
  """The clients of this model must be trained one at a time."""


def specs(input_spec: trees.Tree) -> Group:
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


def batches_of(
    users: engines.ClientData, client_id: object, input_spec: trees.Tree, as_one: bool = False
) -> List[Batch]:
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


def pack(clients: Sequence[List[Batch]], group_specs: Group) -> Group:
  """Returns the `Group` of some clients' batches."""
  batches = [batch for client in clients for batch in client]
  rows = tuple(
      np.concatenate([np.zeros([0, *spec.shape[1:]], spec.dtype.as_numpy_dtype),
                      *(batch[i] for batch in batches)])
      for i, spec in enumerate(group_specs.rows))
  return Group(rows, np.cumsum([len(batch[0]) for batch in batches], dtype=np.int64),
               np.cumsum([len(client) for client in clients], dtype=np.int64))


def size(client: Tuple[object, Sequence[Batch]]) -> int:
  """Returns the number of bytes of a client's batches."""
  return sum(array.nbytes for batch in client[1] for array in batch)


def calls(clients: Iterable[Client], most: Optional[int] = None,
          size: Callable[[Client], int] = lambda client: 0) -> Iterable[List[Client]]:
  """Divides clients into calls.

  Args:
    clients: Pairs of a client's id and data.
    most: The largest number of clients of a call; `CLIENTS` by default.
    size: The number of bytes of a client's data. A call ends at `BYTES`.
  """
  call: List[Client] = []
  total = 0
  for client in clients:
    call.append(client)
    total += size(client)
    if len(call) >= (most or CLIENTS) or total >= BYTES:
      yield call
      call, total = [], 0
  if call:
    yield call
