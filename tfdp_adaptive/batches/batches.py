# SPDX-License-Identifier: Apache-2.0
"""The batches of a plan as a `tf.data.Dataset`, padded and masked for Keras."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any, Callable, Iterator, List, Mapping, Optional, Tuple, Union

import numpy as np
import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import errors
from tfdp_adaptive import terms as terms_lib
from tfdp_adaptive.batches import cache as cache_lib
from tfdp_adaptive.batches import checked_source
from tfdp_adaptive.batches import digests
from tfdp_adaptive.batches import padding
from tfdp_adaptive.batches import passes
from tfdp_adaptive.batches import sampling_seed
from tfdp_adaptive.batches import sources
from tfdp_adaptive.batches import tags
from tfdp_adaptive.batches import users as users_lib
from tfdp_adaptive.batches import workers

# The part of an expected batch to whose multiples `fit` pads. What convolutions prepare for each
# size they then find again; the padding is 1.6% on average.
_PARTS = 32


@dataclasses.dataclass(eq=False, repr=False)
class Batches(passes.Lazy):
  """The remaining batches of a run, a data set that `plan.batches(data)` returns.

  Attributes:
    plan: The `PrivacyPlan` that draws them.
    records: Reads the records of a batch.
    seed: The SECRET `SamplingSeed` of the run. All passes share them: steps take a batch once.
    start_step: The step of the first batch, or a function that returns it when a pass begins.
    pad_to: Rows are padded to a multiple of it; None for the sizes of `padding.rows_for`.
    class_weight: Public weights of the labels, or None.
    views: The views of every example, along the second axis of all parts of a batch; or None.
    replica_rows: The replicas whose rows are given, one batch for each.
    beside: Whether weights are `tags.Tagged`, or carry the tags in digits of float64.
    signature: Nest of the specs of one record, `(x, y, sample_weight)` or `(x, sample_weight)`.
    most: The number of rows of every batch, if they are known.
    log: Where digests of the records of every batch are written, or None.
  """

  plan: Any
  records: users_lib.Examples
  seed: sampling_seed.SamplingSeed
  start_step: Union[int, Callable[[], int]] = 0
  pad_to: Optional[int] = None
  class_weight: Optional[Mapping[int, float]] = None
  views: Optional[padding.Views] = None
  replica_rows: workers.ReplicaRows = workers.ReplicaRows()
  beside: bool = False
  signature: Any = None
  most: Optional[int] = None
  log: Optional[digests.Log] = None

  def __post_init__(self) -> None:
    if self.signature is not None:  # A data set of the same records, which was checked.
      return
    if self.pad_to is not None:
      checks.whole(pad_to=self.pad_to)
    self.draw(self.first)  # Fails here, not in a tf.data thread, as reading records does.
    self.signature = tf.nest.map_structure(
        sources.spec, self._untagged(np.arange(0 if self.views is None else 1), 1, self.first))
    self.most = self.plan.sampling.largest_batch(self.plan) if self.pad_to is None else None

  @property
  def first(self) -> int:
    """Returns the step of the first batch, as it is now."""
    return self.start_step() if callable(self.start_step) else self.start_step

  @property
  def steps(self) -> int:
    """Returns the number of batches."""
    return self.plan.steps - self.first

  @property
  def specs(self) -> Tuple[Any, ...]:
    """Nests of the specs of a batch of examples: `(x, y, sample_weight)`."""
    axes = 0 if self.views is None and not self.plan.whole_users else 1
    return tf.nest.map_structure(
        lambda s: tf.TensorSpec([None, *s.shape[axes:]], s.dtype), self.signature)

  def draw(self, start_step: int) -> Iterator[np.ndarray]:
    """Yields the numbers of the records of every step, from a step on."""
    drawn = sampling_seed.drawn(self.plan, len(self.records), start_step, self.seed)
    return drawn if self.plan.sampling.drawn_each_step else self.seed.in_order(
        self.records, start_step, drawn)

  def digest(self) -> str:
    """Returns a SECRET digest of some of the records, in order."""
    return self.records.fingerprint()

  def notes(self) -> List[str]:
    """Returns sentences about the data for the statement."""
    commitment = self.seed.commitment(
        self.first, None if self.plan.sampling.drawn_each_step else self.records)
    return [*self._notes(),
            *([] if commitment is None else [sampling_seed.COMMITTED.format(commitment)])]

  def register(self) -> None:
    """Has the runs of the plan in this process count the data, in loops of one's own."""
    tags.found_data(self.plan, self.records.source.entries, self._notes())

  def _notes(self) -> List[str]:
    return [*self.records.source.notes(), *([] if self.views is None else self.views.notes())]

  def check(self, plan: terms_lib.Terms, steps_done: int, steps: int, epochs: int) -> None:
    """Raises `PrivacyError` if a run that has done some steps may not take so many batches."""
    if self.plan != plan:
      raise errors.PrivacyError(NOT_OF_THE_PLAN.format('batches of another plan'))
    if not plan.sampling.drawn_each_step and self.first != steps_done:
      raise errors.PrivacyError(
          f'{plan.sampling} must go on where the last `fit` stopped: from its start, records would '
          'take part sooner than they are accounted for. Use '
          f'`plan.batches(data, start_step={steps_done})`. Received: start_step={self.first}.')
    left = plan.steps - steps_done
    if epochs * steps > left:
      raise errors.PrivacyError(
          f'The plan covers {plan.steps} steps, of which {steps_done} are done. Received: '
          f'{epochs * steps} more ({epochs} epochs). Use epochs * steps_per_epoch within the plan, '
          + (f'such as steps_per_epoch={left // epochs}, ' if 0 < epochs <= left else '')
          + 'or plan more steps.')

  def resumed(self, start_step: Union[int, Callable[[], int]],
              class_weight: Optional[Mapping[int, float]] = None, tight: bool = False) -> Batches:
    """Returns the batches for `fit`, from a step on.

    Args:
      start_step: The step, unless this data set has a function that returns it.
      class_weight: Weights of the labels in place of those before.
      tight: Whether to pad to many sizes, with the fewest rows.
    """
    if tight and not (self.most is not None and self.most <= self.plan.batch_size):
      pad_to, most = math.ceil(self.plan.batch_size / _PARTS), None
    else:
      pad_to, most = self.pad_to, self.most
    return dataclasses.replace(
        self, start_step=self.start_step if callable(self.start_step) else start_step,
        class_weight=class_weight or self.class_weight, beside=True, pad_to=pad_to, most=most,
        signature=self.signature if class_weight is None else None)

  def make(self) -> tf.data.Dataset:
    if not self.beside:  # `fit` knows its data. A step may be traced before it reads any.
      self.register()
    *data, weight = self.signature
    if self.views is not None or self.beside:
      views = [] if self.views is None else [self.views.count]
      weight = tags.Tagged(weight, tf.TensorSpec(views, tf.int32))
    else:
      weight = tf.nest.map_structure(lambda s: tf.TensorSpec(s.shape, tf.float64), weight)
    rows = None if self.most is None else self.replica_rows.rows(self.most)
    made = passes.dataset(self._generate, tf.nest.map_structure(
        lambda s: tf.TensorSpec([rows, *s.shape], s.dtype), (*data, weight)))
    if not callable(self.start_step):
      made = made.apply(tf.data.experimental.assert_cardinality(self.steps))
    if len(data) == 1:
      made = made.map(lambda x, weight: (x, None, weight))
    return made.prefetch(2)

  def _generate(self) -> Iterator[Any]:
    start = self.first
    for step, drawn in enumerate(self.draw(start), start):
      if self.log is not None:
        self.log.add(step, self.records, drawn)
      if not self.beside:
        tags.drawn(self.plan, step)
      used = self.records.used(drawn, self.seed)
      rows = self.replica_rows.rows(padding.rows_for(self.plan, len(used), self.pad_to))
      for first in self.replica_rows.firsts(rows):
        yield self._batch(used[first:first + rows], rows, step, first)

  def _batch(self, indices: np.ndarray, rows: int, step: int, first: int) -> Tuple[Any, ...]:
    """Returns records, padded to `rows` of them, whose tags begin with the row `first`."""
    *data, weight = self._untagged(indices, rows, step)
    numbers = tags.of_rows(self.plan, step, rows, first, self.seed.draw)
    if self.views is not None:
      numbers = self.views.repeated(numbers, 1)
    if self.views is not None or self.beside:
      return (*data, tags.Tagged(weight, numbers))
    return (*data, sources.map_structure(lambda w: tags.write(w, numbers), weight))

  def _untagged(self, indices: np.ndarray, rows: int, step: int) -> Tuple[Any, ...]:
    taken, used = self.records.take(indices, step, self.seed)
    batch = padding.weighted(taken, used, self.class_weight)
    if self.views is not None:
      batch = self.views.of(batch, used.ndim)
    *data, weight = batch
    return (*sources.map_structure(lambda a: padding.padded(a, rows), tuple(data)),
            sources.map_structure(lambda w: padding.padded(w, rows, padding.EMPTY), weight))


def check_order(run: Any, digest: Callable[[], str], in_file: bool = False) -> None:
  """Refuses records that differ from those of a run's earlier steps, and remembers them.

  Where random numbers are not drawn at every step, the place of a record decides when it takes
  part: moved, it would take part sooner than is accounted for.

  Args:
    run: The `Run` of an optimizer.
    digest: Returns a digest of the records; called where their places decide something.
    in_file: Whether the file of a sampling seed knows the records, too.
  """
  if run.plan.sampling.drawn_each_step:
    return
  steps, before, found = run.steps, run.records, digest()
  if steps and before not in (None, found):
    raise errors.PrivacyError(
        f'A run by {run.plan.sampling} goes on with the records that it began with, in the '
        'same order: by their places they would take part sooner than they are accounted for. '
        f'Received: after {steps} steps, other records, or in another order. Give '
        'those of the first `fit`; for others make a new plan, optimizer and run.')
  if steps and before is None and not in_file:
    errors.caution(
        f'The {steps} steps so far were taken elsewhere, and nothing tells whether the '
        'records are the same, in the same order: in other places they would take part sooner '
        'than is accounted for. Name a SECRET file that knows, when a run begins and when it '
        'goes on: `plan.batches(data, coins=PATH)`; or use `tfdp.callbacks.BackupAndRestore`.')
  run.records = found


NOT_OF_THE_PLAN = (
    'The optimizer has a plan, so the batches must come from that plan: its sampling is '
    'what is accounted for. Received: {}. '
    'Use `model.fit(plan.batches((x, y)))` (without map, batch or shuffle after it); or '
    "`own_sampler='how records were chosen'`, which the statement repeats.")


def of_plan(plan: terms_lib.Terms, data: sources.Data, *, users: Optional[users_lib.IdsLike] = None,
            examples_per_user: Optional[int] = None, record: str = 'mean',
            cache: Optional[str] = None, start_step: Union[int, Callable[[], int]] = 0,
            pad_to: Optional[int] = None, coins: sampling_seed.Coins = None,
            digests_to: Union[str, 'os.PathLike[str]', None] = None, changing: Optional[str] = None,
            augment: Optional[Callable[..., Any]] = None, views: int = 1,
            strategy: Optional[tf.distribute.Strategy] = None) -> Any:
  """Returns the remaining batches of a run, in one pass.

  Batches are padded with empty rows of weight zero, which must not contribute to the sum of
  clipped gradients. No record is dropped. An empty batch is a normal batch of empty rows.

  Args:
    plan: A `PrivacyPlan`.
    data: `(x, y)`, `(x, y, sample_weight)` or `x` alone: arrays, or nested tuples and dicts of
      arrays, whose leading axis is the example. Instead of an array, you can pass a memory map, a
      file that is indexed like an array, a source of records with `__len__` and `__getitem__`, or a
      Keras `Sequence` (`PyDataset`) of batches. A step reads only the records that it needs. A
      `tf.data.Dataset` must be finite and unbatched, see `cache`.
    users: [n] ids of the users of all examples, for a plan with unit 'user'. Batches are then
      [users, examples_per_user, ...], and a user is one record. With `PoissonExamples`
      batches are of examples, and ids may be [n, owners], -1 for none.
    examples_per_user: The largest number of examples that a step takes of a user, drawn again at
      every step.
    record: Whether to clip the 'mean' or the 'sum' of a user's gradients.
    cache: Folder into which a `tf.data.Dataset` is written once, as files of the size of
      the data that hold it as it is, and from which it is read if it is there. By
      default a temporary folder, deleted with the returned data set.
    start_step: Steps that the optimizer has done, or a function that returns them when a pass
      begins. The number of batches is then not known before.
    pad_to: Rows are padded to a multiple of it. Default: the expected batch size, one
      standard deviation above it, and three more for each size after that, so that a run
      has three sizes and hardly ever a fourth. Fixed-order batches are padded to
      `batch_size`, truncated ones to `max_batch_size`. `fit` of a private model pads
      to smaller multiples, unless XLA compiles its step for every size anew.
    coins: Path of a SECRET file, for schemes in which a record's steps depend on each other
      (`MinSeparation`, `BallsInBins` with draws, groups under add_remove): a run that
      begins writes it, one that goes on reads it. Without it such a run cannot be resumed
      by another process. One file, one run. Other schemes without coins at every step, such
      as `FixedOrder`, need none; with one, records in another order are refused. With a file,
      the digest of the coins is in the ledger before the first step, in `fit` and in a loop of your
      own, unless this process draws batches of the plan from several seeds. Whoever is shown the
      file later can draw all batches again.
    digests_to: Path of a new file for digests of the records of every batch, which
      `tfdp verify --opened COINS --digests FILE` compares with the coins. Needs `coins`. The
      digests are keyed by the coins: without them, the file tells only the sizes of batches.
    changing: How a record may differ whenever it is read, where a source augments each record by
      itself. The statement repeats it. By default such a source is refused.
    augment: A function of NumPy or TensorFlow that takes one example, `(x, y)` or x alone, and
      returns a random view of it, of the same shapes and types. It is called anew whenever the
      example is read.
    views: The number of views of an example in a step. The mean of their gradients is clipped once.
    strategy: For a loop of your own on the replicas of a `tf.distribute.Strategy`: iterate over
      the result inside its scope, on every worker, and give each element to `strategy.run`.
      `fit` does it by itself.

  Returns:
    `Batches`, a `tf.data.Dataset` of `(x, y, sample_weight)` with `plan.steps - start_step`
    elements. Every batch is tagged for its step (see `tags`), which takes no other: use them in
    their order, in `fit`, `train_on_batch` or a loop of your own. Every iteration draws new
    batches, so use one pass: `fit(batches, steps_per_epoch=..., epochs=...)` continues through it.
    A later pass needs a new call with `start_step=optimizer.steps_done`.

  Raises:
    ValueError: If the number of records is not the plan's population size, if
      the leading axes differ, or if unit and `users` do not go together.
  """
  workers.refuse_shard(data)
  if cache is not None and not isinstance(data, tf.data.Dataset):
    raise ValueError('`cache` is for a `tf.data.Dataset`: everything else is read where it is. '
                     f'Received: cache={cache!r} and data of type {type(data).__name__}.')
  source = checked_source.CheckedSource(
      cache_lib.source_of(data, cache), changing, counts=plan.unit != 'user')
  run = sampling_seed.of(plan, coins)
  records = users_lib.of(plan, source, users, examples_per_user, record)
  log = None if digests_to is None else digests.Log(digests_to, run, plan, len(records))
  result = Batches(plan, records, run, start_step, pad_to, log=log,
                   views=padding.views_of(source, augment, views))
  source.warn_of_copies()
  return result if strategy is None else workers.Distributed(strategy, result)
