# SPDX-License-Identifier: Apache-2.0
"""The batches of one run for all replicas and workers of a `tf.distribute` strategy.

A step has one batch, whoever works on it. The chief draws the sampling seed of the run, and the
other workers get it through the strategy, never by a file. Every worker then draws the same
indices, pads the same batch, and reads the rows of its own replicas, which nobody else reads.
"""

import dataclasses
import json
import os
from typing import Any, Callable, Iterator, NamedTuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import errors
from tfdp_adaptive import version
from tfdp_adaptive.batches import sampling_seed


class ReplicaRows(NamedTuple):
  """The rows of a batch for this worker; by default, all rows in one batch.

  Attributes:
    replicas: The number of all replicas. Each has equally many consecutive rows.
    first: The number of the first replica whose rows are given.
    here: The number of replicas on this worker. Each gets a batch.
  """

  replicas: int = 1
  first: int = 0
  here: int = 1

  def rows(self, all_rows: int) -> int:
    """Returns the rows of one replica, for a batch that is padded to at least `all_rows`."""
    return -(-all_rows // self.replicas)

  def firsts(self, rows: int) -> Iterator[int]:
    """Returns the first row of each replica that has `rows`."""
    return iter(range(self.first * rows, (self.first + self.here) * rows, rows))


class Distributed:
  """The batches of a plan on the replicas of a strategy.

  Attributes:
    batches: The `tf.distribute.DistributedDataset`. It may be iterated when `begin` was called.
  """

  def __init__(self, strategy: tf.distribute.Strategy, drawn: Any) -> None:
    """
    Args:
      strategy: A `tf.distribute.Strategy`.
      drawn: The `Batches` that `plan.batches` returned.
    """
    self._strategy, self._drawn, self._start = strategy, drawn, drawn.first
    self._seed: Any = (
        sampling_seed.ReceivedSeed(drawn.plan) if compat.has_workers(strategy) else drawn.seed)

    def of_worker(context: tf.distribute.InputContext) -> tf.data.Dataset:
      here = context.num_replicas_in_sync // context.num_input_pipelines
      rows = ReplicaRows(context.num_replicas_in_sync, context.input_pipeline_id * here, here)
      return dataclasses.replace(
          drawn, start_step=lambda: self._start, seed=self._seed, replica_rows=rows, beside=True,
          log=drawn.log if strategy.extended.should_checkpoint else None)  # The chief writes it.

    self.batches = strategy.distribute_datasets_from_function(of_worker)

  def __iter__(self) -> Iterator[Any]:
    """Yields batches for a custom loop, from the `start_step` of `plan.batches`."""
    self.begin(self._start)
    self._drawn.register()
    return iter(self.batches)

  def begin(self, start_step: int) -> None:
    """Shares the sampling seed of a pass from `start_step` on; all workers call it.

    Args:
      start_step: Steps done so far.

    Raises:
      PrivacyError: If workers have different plans, records or steps.
    """
    self._start = start_step
    drawn = self._drawn
    if not compat.has_workers(self._strategy):
      return
    versions = version.__version__, tf.__version__, np.__version__  # These draw the batches.
    agree(self._strategy, plan=repr(drawn.plan), records=drawn.digest(),
          start_step=str(start_step), versions=repr(versions))
    received = from_chief(self._strategy, lambda: json.dumps(sampling_seed.for_workers(
        drawn.seed, lambda: drawn.draw(start_step))).encode())
    self._seed.receive(json.loads(received))


def agree(strategy: tf.distribute.Strategy, **facts: str) -> None:
  """Raises `PrivacyError` on all workers if their secret `facts` differ."""
  chiefs = json.loads(from_chief(strategy, lambda: json.dumps(facts).encode()))
  other = sorted(name for name in facts if facts[name] != chiefs.get(name))
  wrong = int(_sum(strategy, np.array([bool(other)], np.int32), everybody=True)[0])
  if wrong:
    raise errors.PrivacyError(
        'All workers take rows of one batch of one run, so each needs the same program, and all '
        'records in the same order (not a part of them: every worker reads the '
        f'rows it needs). Received: {other or "what is the same here"}, which differ from the '
        f"chief's on {wrong} replica(s). Run one script with the same data everywhere.")


def refuse_shard(data: object) -> None:
  """Raises for data that a launcher has divided among the workers, as Ray Train does."""
  cluster = json.loads(os.environ.get('TF_CONFIG') or '{}').get('cluster', {})
  count = sum(len(cluster.get(kind, ())) for kind in ('chief', 'worker'))
  divided = hasattr(data, 'iter_tf_batches') or (
      count > 1 and isinstance(data, tf.data.Dataset)
      and data.options().experimental_distribute.auto_shard_policy
      == tf.data.experimental.AutoShardPolicy.OFF)
  if divided:
    raise errors.PrivacyError(
        'A plan draws each batch from ALL records, so every worker needs the same whole data. '
        'Received: what looks like the shard of a worker (`get_dataset_shard`, '
        '`prepare_dataset_shard`, or a data set without automatic sharding). Give every worker the '
        'same arrays, file or data set; each reads only the rows that its devices need.')


def from_chief(strategy: tf.distribute.Strategy, make: Callable[[], bytes]) -> bytes:
  """Returns the chief's value on every worker. If the chief fails, all workers raise an error."""
  if not compat.has_workers(strategy):
    return make()
  error, content = None, b''
  if strategy.extended.should_checkpoint:
    try:
      content = b'1' + make()
    except (ValueError, OSError, StopIteration, errors.PrivacyError) as failure:
      error, content = failure, b'0' + repr(failure).encode()
  size = int(_sum(strategy, np.array([len(content)], np.int32))[0])
  padded = np.zeros([-(-size // 4)], np.int32)
  padded.view(np.uint8)[:len(content)] = np.frombuffer(content, np.uint8)
  content = _sum(strategy, padded).tobytes()[:size]
  if error is not None:
    raise error
  if content[:1] == b'0':
    raise errors.PrivacyError(f'The chief cannot go on: {content[1:].decode()}')
  return content[1:]


def _sum(strategy: tf.distribute.Strategy, value: np.ndarray,
         everybody: bool = False) -> np.ndarray:
  """Returns the sum of integers over all replicas; by default, the value of the chief's first."""
  def of_replica(context: tf.distribute.ReplicaContext) -> tf.Tensor:
    return tf.constant(
        value if everybody or context.replica_id_in_sync_group == 0 else np.zeros_like(value))

  values = strategy.experimental_distribute_values_from_function(of_replica)
  return np.asarray(strategy.reduce(tf.distribute.ReduceOp.SUM, values, axis=None))
