# SPDX-License-Identifier: Apache-2.0
"""The tag by which a step knows a batch that its plan drew for it.

Every row of a batch of `plan.batches` carries a number that belongs to one plan, one step and one
row of the batch. `fit` and strategies get the numbers beside the weights, as `Tagged`. In batches
of a loop of one's own they are in the digits of float64 sample weights that float32 does not hold:
such a batch has three parts and no more, and rounded to float32, as Keras does before it uses them,
the weights are what they seem.

The tags are public: they guard against honest mistakes (a batch used twice, out of order, of
another plan, of one's own; rows repeated or moved), not against forgery by the curator, who is
trusted. They cannot tell what is in a row: a record may be changed by itself (augmented), and
code that mixes records breaks the guarantee unseen.
"""

from __future__ import annotations  # The command line loads no TensorFlow for `tf.Tensor`.

import collections
import contextlib
import functools
import hashlib
import threading
from typing import Any, Dict, Iterator, List, NamedTuple, Sequence, Set, Tuple, TYPE_CHECKING
import weakref

import numpy as np
import tensorflow as tf

from tfdp_adaptive import terms as terms_lib

if TYPE_CHECKING:
  from tfdp_adaptive import compat
  from tfdp_adaptive import trees

Number = Any  # An int, or an array or tensor of them.
_PRIME = 2**28 - 57  # Tags fit into the 29 digits that float64 has more, without rounding up.
_DIGITS = 2**28 - 1
# Numbers of rows beyond the most that a batch may have tell of one draw for several workers.
MOST_ROWS, DRAWS = 2**17, 2**11 - 1
# Fields of a plan that determine its batches; the noise may differ.
_FIELDS = ('batch_size', 'steps', 'population_size', 'unit', 'adjacency', 'sampling', 'seed')
# Identity -> (weak reference to weights, runs by their identifiers).
_TAKEN: Dict[int, Tuple[Any, Dict[str, Any]]] = {}
# Coefficients of a plan -> what each seed of this process commits to; '' for a seed in no file.
_SEEDS: Dict[Tuple[int, int, int], Set[str]] = {}
_BEGUN: Any = weakref.WeakKeyDictionary()  # Run that has begun a step -> the last one counted.
# Coefficients of a plan -> (step -> batches that no step has taken, identifiers of runs), in loops
# of one's own.
_LOOPS: Any = collections.defaultdict(lambda: (collections.Counter(), set()))
# Coefficients of a plan -> (ledger entries, sentences) of data from which loops of one's own read.
_READ: Dict[Tuple[int, int, int], List[Tuple[Any, Any]]] = {}
_inside = threading.local()


def coefficients(plan: terms_lib.Terms) -> Tuple[int, int, int]:
  """Returns `slope, pace, offset` of `1 + (slope * step + pace * row + offset) % prime`."""
  text = repr([(name, repr(getattr(plan, name, None))) for name in _FIELDS])
  digest = hashlib.sha256(text.encode()).digest()
  slope, offset, pace = (int.from_bytes(digest[i:i + 8], 'big') for i in (0, 8, 16))
  return 1 + slope % (_PRIME - 1), 1 + pace % (_PRIME - 1), offset % _PRIME


def tag(plan: terms_lib.Terms, step: Number, row: Number = 0) -> Any:
  """Returns the tag of a row in a step: an int, or an int64 array or tensor; never zero."""
  slope, pace, offset = coefficients(plan)
  return 1 + (slope * step + pace * row + offset) % _PRIME


def row_of(tagged: Number, plan: terms_lib.Terms, step: Number) -> Any:
  """Returns the row of each tag. Tags of other steps and plans give rows far away."""
  slope, pace, offset = coefficients(plan)
  return (tagged - 1 - slope * step - offset) % _PRIME * pow(pace, -1, _PRIME) % _PRIME


class Tagged(NamedTuple):
  """The sample weights of a batch, and the tags of its rows.

  Attributes:
    weight: Nest of float32 weights [n, ...].
    tag: [n] int32, or None for a batch without tags. If it has K views of every example in a
      row along the second axis of all tensors, [n, K] int32, each tag K times.
  """

  weight: Any
  tag: Any


def of_rows(plan: terms_lib.Terms, step: int, rows: int, first: int = 0,
            draw: int = 0) -> np.ndarray:
  """Returns the int32 tags of `rows` rows of a batch.

  Args:
    plan: The `PrivacyPlan`.
    step: The step.
    rows: How many rows.
    first: The row of the batch that the first of them is.
    draw: Number of the draw that all workers share.
  """
  return tag(plan, step, draw * MOST_ROWS + first + np.arange(rows)).astype(np.int32)


def write(weights: np.ndarray, tags: np.ndarray) -> np.ndarray:
  """Returns float32 weights [n, ...] as float64 that carry tags [n]; zeros stay as they are."""
  wide = np.asarray(weights, np.float32).astype(np.float64)
  bits = wide.view(np.int64) | tags.reshape([-1] + [1] * (wide.ndim - 1)).astype(np.int64)
  return np.where(wide == 0, wide, bits.view(np.float64))


def split(weights: trees.Tree) -> Tagged:
  """Returns the weights of a batch in float32 with the tags that they carry, if all do."""
  if isinstance(weights, Tagged):
    return weights
  if weights is None:
    return Tagged(None, None)
  weights = tf.nest.map_structure(tf.convert_to_tensor, weights)
  flat, tag_of_rows = tf.nest.flatten(weights), None
  if all(w.dtype == tf.float64 for w in flat):
    each = [tf.where(w == 0, tf.zeros_like(w, tf.int64), read(tf.bitcast(w, tf.int64)))
            for w in flat]
    tag_of_rows = tf.cast(functools.reduce(tf.maximum, [
        tf.reduce_max(one, list(range(1, one.shape.rank))) for one in each]), tf.int32)
  return Tagged(tf.nest.map_structure(
      lambda w: tf.cast(w, tf.float32) if w.dtype == tf.float64 else w, weights), tag_of_rows)


def read(bits: tf.Tensor) -> Any:
  """Returns the tags in the bits (int64) of weights."""
  return bits & _DIGITS


def in_place(counted: tf.Tensor, several: bool) -> tf.Tensor:
  """Returns (bool []) whether all replicas have their own rows of one batch, and no others.

  Args:
    counted: [replicas, 3] int64: rows, and the least and the largest number by which the tagged
      rows of records come after their places; the largest is below the least where none is.
    several: Whether workers drew the batch. All of them must then have the seed of one draw.
  """
  count, least, most = tf.unstack(counted, axis=1)
  used = least <= most
  begin = least - tf.cumsum(count, exclusive=True)
  low = tf.reduce_min(tf.where(used, begin, tf.int64.max))
  high = tf.reduce_max(tf.where(used, begin, tf.int64.min))
  whole = tf.reduce_all((least == most) | ~used)
  tagged = ((low > 0) & (low % MOST_ROWS == 0)) if several else (low == 0)
  return (low > high) | (whole & (low == high) & tagged)


def _forget(key: int, reference: 'weakref.ref[Any]') -> None:
  """Drops weights that are gone, unless others have their identity by now."""
  if key in _TAKEN and _TAKEN[key][0] is reference:
    del _TAKEN[key]


def drawn(plan: terms_lib.Terms, step: int) -> None:
  """Registers a batch that is drawn for a loop of one's own."""
  _LOOPS[coefficients(plan)][0][step] += 1


def _take(run: Any, step: int) -> None:
  """Notes if more runs took a step than batches were drawn for it: some had copies of one.

  A run is counted once at a step: its step may be traced twice. A `tf.function` that loops over
  batches is traced before any is drawn. After other runs of the plan, it then counts as if it had
  copies: too much, never too little.
  """
  if _BEGUN[run] == step:
    return
  _BEGUN[run] = step
  left, runs = _LOOPS[coefficients(run.plan)]
  if left[step] < 1:
    run.share(*runs - {run.id})
  else:
    left[step] -= 1
  runs.add(run.id)


def found_seed(plan: terms_lib.Terms, commitment: str) -> None:
  """Registers a seed from which this process draws batches of a plan, by its sentence or ''."""
  _SEEDS.setdefault(coefficients(plan), set()).add(commitment)


def found_data(plan: terms_lib.Terms, entries: Sequence[Any], notes: Sequence[str]) -> None:
  """Registers what data of a plan have cost before, and sentences about them, for its runs.

  Nothing tells which run takes a batch outside `fit`: all runs of the plan in this process count.
  """
  known = _READ.setdefault(coefficients(plan), [])
  if (entries or notes) and (entries, notes) not in known:
    known.append((entries, notes))


def _commit(optimizer: compat.Optimizer) -> None:
  """Notes the digest of the sampling seed before the first step of a loop of one's own.

  With several seeds, nothing tells from which of them a batch came, and nothing is noted.
  """
  found = _SEEDS.get(coefficients(optimizer.plan), set())
  if len(found) != 1 or '' in found or found <= set(optimizer.run.said['notes']):
    return  # `fit` has noted it.
  if tf.distribute.get_strategy().num_replicas_in_sync > 1:
    return
  with tf.init_scope():  # The step may be traced.
    if not optimizer.run.steps:
      optimizer.run.note(*found)


@contextlib.contextmanager
def spending(optimizer: compat.Optimizer, x: trees.Tree, weights: trees.Tree) -> Iterator[None]:
  """Notes that a run takes a step on a batch, unless the step is inside another call.

  Two runs on the same batches have one sample, so that amplification by sampling does not hold for
  both of them together; an entry of the ledger then says so. A batch is known by the identity of
  its sample weights, which `plan.batches` makes anew for every batch. Copies are known where more
  runs take a step than batches were drawn for it.

  Args:
    optimizer: A `DPOptimizer`, or None.
    x: A nest of tensors or arrays of the batch. It is known by them if it has no weights.
    weights: A nest of its sample weights, or None.
  """
  nested, _inside.step = getattr(_inside, 'step', False), True
  counted = not nested and getattr(optimizer, 'plan', None) is not None
  ours = counted and optimizer.own_sampler is None
  if ours and optimizer.run not in _BEGUN:
    _BEGUN[optimizer.run] = -1
    _commit(optimizer)
  if counted and _READ:
    for entries, notes in _READ.get(coefficients(optimizer.plan), ()):
      optimizer.run.reads(entries)
      optimizer.run.note(*notes)
  step = None
  if ours and not isinstance(weights, Tagged) and (
      tf.distribute.get_strategy().num_replicas_in_sync == 1):
    with tf.init_scope():
      step = optimizer.run.steps
  try:
    yield
  finally:
    _inside.step = nested
  if not counted:
    return
  if step is not None:
    _take(optimizer.run, step)
  for one in tf.nest.flatten(x if weights is None else weights):
    if hasattr(one, 'dtype'):
      key = id(one)
      known, runs = _TAKEN.get(key, (lambda: None, {}))
      if known() is not one:
        known, runs = weakref.ref(one, functools.partial(_forget, key)), {}
      for name, run in runs.items():
        run.share(optimizer.run.id)
        optimizer.run.share(name)
      _TAKEN[key] = known, {**runs, optimizer.run.id: optimizer.run}
