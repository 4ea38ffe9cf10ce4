# SPDX-License-Identifier: Apache-2.0
"""The batches of a plan as a `tf.data.Dataset`, padded and masked for Keras."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any, Callable, Iterator, Mapping, Optional, Tuple, Union

import numpy as np
import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import terms as terms_lib
from tfdp_adaptive.accounting import user_examples
from tfdp_adaptive.batches import cache as cache_lib
from tfdp_adaptive.batches import coins as coins_lib
from tfdp_adaptive.batches import marks
from tfdp_adaptive.batches import passes as passes_lib
from tfdp_adaptive.batches import sources
from tfdp_adaptive.batches import users as users_lib
from tfdp_adaptive.batches import workers

# Of an expected batch: `fit` takes batches that are padded to multiples of a part. What
# convolutions prepare for each size they then find again; the padding is 1.6% on average.
_PARTS = 32


def of_plan(
    plan: terms_lib.Terms, data: Any, *, users: Any = None,
    examples_per_user: Optional[int] = None, record: str = 'mean', cache: Optional[str] = None,
    start_step: Union[int, Callable[[], int]] = 0, pad_to: Optional[int] = None,
    coins: Any = None, class_weight: Optional[Mapping[int, float]] = None,
    changing: Optional[str] = None, strategy: Any = None,
    share: workers.Share = workers.Share()) -> Any:
  """The remaining batches of a run, in one pass.

  Batches are padded with empty rows of weight zero; a row of weight zero must not
  contribute to the sum of clipped gradients. No record is ever dropped to fit: that
  would not be what was accounted for. An empty batch is a normal batch of empty rows.

  Args:
    plan: A `PrivacyPlan`.
    data: `(x, y)`, `(x, y, sample_weight)` or `x` alone, of arrays or nested
      tuples and dicts of arrays whose leading axis is the example. In the place of an
      array may stand a memory map or file that is indexed alike, a source with
      `__len__` and `__getitem__` that gives such records, or a Keras `Sequence`
      (`PyDataset`) that gives batches of them: no more of it is read than a batch
      needs. Or a finite, unbatched `tf.data.Dataset` of records, see `cache`.
    users: [n] ids: whose each example is, for a plan with unit 'user'. Batches are then
      [users, examples_per_user, ...], and a user is one record. With `PoissonExamples`
      batches are of examples, and ids may be [n, owners], -1 for none.
    examples_per_user: How many of a user's examples a step takes at most, drawn again at
      every step from the user's own.
    record: Whether to clip the 'mean' or the 'sum' of a user's gradients.
    cache: Folder into which a `tf.data.Dataset` is written once, as files of the size of
      the data that hold it as it is, and from which it is read if it is there. By
      default a temporary folder, deleted with the returned data set.
    start_step: Steps that the optimizer has done already, or a function that tells when
      a pass begins; the number of batches is then not known before.
    pad_to: Rows are padded to a multiple of it. Default: the expected batch size, one
      standard deviation above it, and three more for each size after that, so that a run
      has three sizes and hardly ever a fourth. Fixed-order batches are padded to
      `batch_size`, truncated ones to `max_batch_size`. `fit` of a private model pads
      to smaller multiples, unless XLA compiles its step for every size anew.
    coins: Path of a SECRET file, for schemes in which a record's steps depend on each other
      (`MinSeparation`, `BallsInBins` with draws, groups under add_remove): a run that
      begins writes it, one that goes on reads it. Without it such a run cannot be resumed
      by another process. One file, one run. Other schemes without coins at every step, such
      as `FixedOrder`, need none; with one, records in another order are refused.
    class_weight: `{class: weight}`, public constants, by the labels y; 1 for other classes.
    changing: How a record may differ whenever it is read, where a source augments each record by
      itself. The statement repeats it. By default such a source is refused.
    strategy: For a loop of your own on the replicas of a `tf.distribute.Strategy`: iterate over
      the result inside its scope, on every worker, and give each element to `strategy.run`.
      `fit` does it by itself.
    share: The replicas whose rows are given, one batch for each; see `workers.Distributed`.

  Returns:
    A data set of `(x, y, sample_weight)` with `plan.steps - start_step`
    elements; its attributes `tfdp_plan`, `tfdp_start_step`, ... say what it is
    for. Every batch is marked for its step (see `marks`), which takes no other:
    use them in their order, in `fit`, `train_on_batch` or a loop of your own.
    Every iteration draws new coins, so use one pass: `fit(batches,
    steps_per_epoch=..., epochs=...)` continues through it. A later pass needs
    a new call with `start_step=optimizer.steps_done`.

  Raises:
    ValueError: If the number of records is not the plan's population size, if
      the leading axes differ, or if unit and `users` do not go together.
  """
  _check_unit(plan, users, examples_per_user)
  if isinstance(data, tf.data.Dataset):
    data = cache_lib.Cache(data, cache)
  elif cache is not None:
    raise ValueError('`cache` is for a `tf.data.Dataset`: everything else is read where it is. '
                     f'Received: cache={cache!r} and data of type {type(data).__name__}.')
  source = sources.of(data)
  if not isinstance(source, sources.Watched):
    source = sources.Watched(source, changing, counts=plan.unit != 'user')
  kept = coins_lib.of(plan, coins)  # All passes share them: steps take each batch once.
  records: Union[users_lib.Examples, users_lib.Users] = users_lib.Examples(source)
  chosen: Optional[Callable[[], np.ndarray]] = None
  if plan.sampling.by_example:
    chosen = _chosen(plan, users, len(source), kept)
  elif users is not None and examples_per_user is not None:
    records = users_lib.Users(source, users, examples_per_user, record, kept)
  if pad_to is not None:
    checks.whole(pad_to=pad_to)
  later = callable(start_step)  # Known when a pass begins: a run may be restored before.
  now = start_step() if callable(start_step) else start_step
  size = len(records)

  def draw(start: int) -> Iterator[np.ndarray]:
    drawn = coins_lib.drawn(plan, size, start, kept)
    return drawn if plan.sampling.coins else kept.in_order(records, start, drawn)

  begun = draw(now)  # Fails here, not in a tf.data thread.
  passes = itertools.chain([begun], (draw(now) for _ in itertools.count()))
  source.look()

  def padded(pad_to: Optional[int]) -> tf.data.Dataset:
    """Returns the data set of these passes, padded to these rows."""

    def generate() -> Iterator[Any]:
      start = start_step() if callable(start_step) else now
      indices_of_steps = draw(start) if later else next(passes)
      for step, indices in enumerate(indices_of_steps, start):
        indices = indices if chosen is None else indices[chosen()[indices]]
        rows = share.rows(_rows(plan, len(indices), pad_to))
        for first in share.firsts(rows):
          yield _batch(records, indices[first:first + rows], rows, plan, step, class_weight,
                       first, kept.tag)

    none = _batch(records, np.zeros([0], np.int64), 1, plan, now, class_weight)
    largest = _largest(plan) if pad_to is None else None
    rows = None if largest is None else share.rows(largest)
    signature = sources.map_structure(
        lambda a: tf.TensorSpec((rows,) + a.shape[1:], sources.spec(a).dtype), none)
    result = passes_lib.dataset(generate, signature)
    if not later:
      result = result.apply(tf.data.experimental.assert_cardinality(plan.steps - now))
    if not _is_pair(records.specs):
      result = result.map(lambda x, weight: (x, None, weight))
    result = result.prefetch(2)
    result.tfdp_plan = plan
    result.tfdp_start_step = now
    result.tfdp_coins = kept
    result.tfdp_notes = source.notes
    result.tfdp_digest = records.fingerprint
    result.tfdp_draw = draw
    result.tfdp_from = lambda step, weights=None, coins=kept, share=share: of_plan(
        plan, source, users=users, examples_per_user=examples_per_user, record=record,
        start_step=step, pad_to=pad_to, coins=coins, class_weight=weights or class_weight,
        share=share)
    return result

  result = padded(pad_to)
  result.tfdp_tight = padded(math.ceil(plan.batch_size / _PARTS))
  return result if strategy is None else workers.Distributed(strategy, result)


def _chosen(plan: terms_lib.Terms, users: Any, size: int, coins: coins_lib.Coins
            ) -> Callable[[], np.ndarray]:
  """Selects the examples of a pass if users are protected by sampling examples."""
  ids = np.asarray(users)
  if ids.ndim != 2 or len(ids) != size:
    ids = users_lib.checked(users, size)
  return functools.lru_cache(1)(lambda: user_examples.kept(
      ids, plan.sampling.examples_per_user, np.random.default_rng(coins.of_users())))


def _check_unit(plan: terms_lib.Terms, users: Any, examples_per_user: Optional[int]) -> None:
  if plan.sampling.by_example:
    if users is None or examples_per_user not in (None, plan.sampling.examples_per_user):
      raise ValueError(
          'A plan that samples the examples of users needs to know whose each one is: '
          '`plan.batches(data, users=ids)`, with as many of a user as its sampling says. Received: '
          f'users={users!r:.60}, examples_per_user={examples_per_user!r}.')
    return
  if plan.unit == 'user' and (users is None or examples_per_user is None):
    raise ValueError(
        'A plan with unit="user" needs to know whose each example is, and how many of a user a '
        'step may take: `plan.batches(data, users=ids, examples_per_user=m)`. Received: '
        f'users={users!r}, examples_per_user={examples_per_user!r}. For clients that keep their '
        'data, use `plan.index_batches()` to choose users and train with `tfdp.federated`.')
  if plan.unit != 'user' and (users is not None or examples_per_user is not None):
    raise ValueError(
        '`users` and `examples_per_user` are for a plan with unit="user": this one protects '
        f'single examples. Received: unit={plan.unit!r}. Make the plan with unit="user" and '
        'population_size the number of users.')


def _batch(
    records: Union[users_lib.Examples, users_lib.Users], indices: np.ndarray, rows: int,
    plan: terms_lib.Terms, step: int, class_weight: Optional[Mapping[int, float]],
    first: int = 0, tag: int = 0) -> Tuple[Any, ...]:
  """`(x, y, weight)`, or `(x, weight)`, padded to `rows` records and marked from `first` on."""
  taken, used = records.take(indices, step)

  def padded(array: np.ndarray) -> np.ndarray:
    value = np.zeros((rows,) + array.shape[1:], array.dtype)
    if array.dtype == object:
      value[...] = b''
    value[:len(indices)] = array
    return value

  *batch, weight = _with_weights(
      sources.map_structure(padded, taken), padded(used), class_weight)
  weight = sources.map_structure(lambda w: marks.write(w, plan, step, first, tag), weight)
  return (*batch, weight)


def _with_weights(
    batch: Any, used: np.ndarray, class_weight: Optional[Mapping[int, float]]) -> Tuple[Any, ...]:
  """Adds weights to a batch: `used` (0 for padding) times the weights of data and classes."""
  if class_weight is not None:
    used = used * _of_class(batch, used, class_weight)
  if not _is_pair(batch):
    return batch, used
  if len(batch) == 2:
    return (*batch, used)
  return *batch[:2], sources.map_structure(
      lambda w: w.astype(np.float32) * used.reshape(used.shape + (1,) * (w.ndim - used.ndim)),
      batch[2])


def _of_class(batch: Any, used: np.ndarray, class_weight: Mapping[int, float]) -> np.ndarray:
  """The weight of each example's class, as Keras has it."""
  labels = batch[1] if _is_pair(batch) else None
  if isinstance(labels, np.ndarray) and labels.ndim == used.ndim + 1:
    labels = labels.argmax(-1) if labels.shape[-1] > 1 else labels[..., 0]
  if not isinstance(labels, np.ndarray) or labels.shape != used.shape:
    raise ValueError('`class_weight` needs one class per example. Received: labels that are not. '
                     'Weight the examples instead: `plan.batches((x, y, weights))`.')
  weights = [class_weight.get(int(label), 1) for label in labels.ravel()]
  return np.array(weights, np.float32).reshape(used.shape)


def _is_pair(data: Any) -> bool:
  return isinstance(data, tuple) and len(data) in (2, 3)


def _rows(plan: terms_lib.Terms, count: int, pad_to: Optional[int]) -> int:
  """Returns the padded number of rows of a batch of `count` records, at least 1."""
  largest, expected = _largest(plan), math.ceil(plan.batch_size)
  if pad_to is not None:
    first = step = pad_to
  elif largest is not None:
    first = step = largest
  elif count <= expected:
    return expected
  else:
    # The best three sizes have 1% fewer rows, and show the largest for the first time later.
    deviation = math.sqrt(plan.batch_size)
    first, step = math.ceil(plan.batch_size + deviation), math.ceil(3 * deviation)
  return int(first + step * max(0, math.ceil((count - first) / step)))


def _largest(plan: terms_lib.Terms) -> Optional[int]:
  """Returns the rows of the largest batch, or None if sampling determines it."""
  largest = getattr(plan.sampling, 'max_batch_size', None)
  if largest is None and plan.sampling.fixed_order and not plan.sampling.claims(plan) and (
      plan.adjacency != 'add_remove'):
    cycle = getattr(plan.sampling, 'cycle', None)
    largest = plan.batch_size if cycle is None else -(-(plan.population_size or 0) // cycle)
  return None if largest is None else int(largest)
