# SPDX-License-Identifier: Apache-2.0
"""Whose weights were trained how often: the ledger hangs on the variables themselves.

Two optimizers, two models that share layers, a model wrapped again: whoever moves a
variable leaves a line on it. The lines are saved with a private model's weights, see
`carried.py`. Steps that are undone, by loading what was saved before them, stay counted as
a run of their own. Values that are copied by hand carry no line. Steps that an optimizer of
another plan is restored with have no known cost: no epsilon is stated then.
"""

import dataclasses
import functools
import hashlib
import json
from typing import Any, List, Optional, Sequence

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive.privacy import ledger as ledger_lib

_NAME = '_tfdp_runs'


class Run:
  """One optimizer's steps on some weights."""

  def __init__(self, plan: Any, rule: Any, row: Any = None, own_sampler: str = '',
               entry: Optional[ledger_lib.Entry] = None):
    self._plan, self._rule, self._row, self._entry = plan, rule, row, entry
    self._own_sampler = own_sampler
    self.examples_per_user = 0  # The most that a step took of one, where users are records.
    self.restored = False  # Whether its steps were read from a file, history and all.
    self.watched: Any = None  # See `watch`; no file holds or restores it.
    self.mark: Any = None  # `mark_of` the plan of all its steps, a variable of checkpoints.

  @property
  def living(self) -> bool:
    """Whether its optimizer may still take steps; else it was read from a file."""
    return self._row is not None

  @property
  def steps(self) -> int:
    if self._row is not None:
      return int(compat.read(self._row))
    assert self._entry is not None  # A run has one or the other.
    return self._entry.steps

  @functools.cached_property
  def own_mark(self) -> np.ndarray:
    """`mark_of` its plan."""
    return mark_of(self._plan)

  @property
  def foreign(self) -> bool:
    """Whether its steps were restored from a checkpoint of another plan."""
    return self.mark is not None and not np.array_equal(compat.read(self.mark), self.own_mark)

  def undone(self) -> List[ledger_lib.Entry]:
    """What was trained before older steps were put back, from above: all steps there ever were."""
    if self.watched is None:
      return []
    last, most, times = compat.read(self.watched).tolist()
    unknown = [ledger_lib.Entry(None, max(1, self.steps))] if self.foreign else []
    return unknown + (times + (self.steps < last)) * [self.entry(most)]

  def entry(self, steps: Optional[int] = None) -> ledger_lib.Entry:
    if self._entry is not None:
      return self._entry
    begun = ledger_lib.Ledger().begin(self._plan, self._rule, self._own_sampler)
    done = self.steps if steps is None else steps
    if self._plan is not None:
      done = min(done, self._plan.steps)  # Later steps release nothing of the data.
    return dataclasses.replace(
        begun.done(done).entries[0], examples_per_user=self.examples_per_user)


def mark_of(plan: Any) -> np.ndarray:
  """[2] int64 by which a plan is known; its clip norm, in units of which noise comes, apart."""
  if plan is None:
    return np.zeros([2], np.int64)
  fields = json.loads(plan.to_json())
  del fields['plan']['l2_norm_clip']
  text = json.dumps(fields, sort_keys=True)
  return np.frombuffer(hashlib.sha256(text.encode()).digest()[:16], np.int64)


def watch(watched: tf.Tensor, row: tf.Tensor) -> tf.Tensor:
  """`[last, most, times]`: the last step, the highest, and how often earlier ones came again.

  Args:
    watched: What it was before, zeros at first.
    row: [] int64, the number of steps with this one.
  """
  last, most, times = tf.unstack(watched)
  return tf.stack([row, tf.maximum(most, row), times + tf.cast(row <= last, row.dtype)])


def begin(variables: Sequence[Any], run: Run) -> None:
  """Leaves a line on every variable."""
  for variable in variables:
    raw = compat.raw_variable(variable)
    setattr(raw, _NAME, getattr(raw, _NAME, []) + [run])


def runs(variables: Sequence[Any]) -> List[Run]:
  """All runs on any of the variables, in order, each once."""
  distinct: List[Run] = []
  for variable in variables:
    for run in getattr(compat.raw_variable(variable), _NAME, []):
      if not any(run is other for other in distinct):
        distinct.append(run)
  return distinct


def before(variables: Sequence[Any], run: Optional[Run]) -> ledger_lib.Ledger:
  """What the weights have cost apart from `run`."""
  if run is None:
    return ledger(variables)
  entries = [(other, other.entry()) for other in runs(variables) if other is not run]
  if run.restored:  # The file tells of it twice: in the history, and as the optimizer's state.
    mine = run.entry()
    same = [i for i, (_, entry) in enumerate(entries)
            if (entry.rule, entry.own_sampler) == (mine.rule, mine.own_sampler)
            and np.array_equal(mark_of(entry.plan), mark_of(mine.plan))
            and entry.steps <= mine.steps]
    if same:
      _, told = entries.pop(same[-1])
      run.examples_per_user = max(run.examples_per_user, told.examples_per_user)
  undone = [entry for other in runs(variables) for entry in other.undone()]
  return ledger_lib.Ledger(tuple(
      [entry for _, entry in entries if entry.steps] + undone))


def ledger(variables: Sequence[Any], current: Optional[Run] = None) -> ledger_lib.Ledger:
  """Everything the weights have cost so far."""
  if current is None:
    return ledger_lib.Ledger(tuple(
        entry for run in runs(variables)
        for entry in run.undone() + ([run.entry()] if run.steps else [])))
  so_far = before(variables, current)
  mine = current.entry()
  return ledger_lib.Ledger(so_far.entries + ((mine,) if mine.steps else ()))


def load(variables: Sequence[Any], values: Any) -> None:
  """Hangs a ledger on the variables, in the place of what hung there.

  Args:
    variables: Any of them, the trainable ones among them.
    values: The bytes of its JSON.
  """
  try:
    text = bytes(np.asarray(values, np.uint8)).decode()
  except (TypeError, ValueError, OverflowError) as error:
    raise ValueError('The ledger in the file must be what was saved. Received: '
                     f'{str(values)[:60]} ({error}).') from error
  entries = ledger_lib.Ledger.from_json(text).entries
  saved = [Run(entry.plan, None, entry=entry) for entry in entries]
  for variable in variables:
    raw = compat.raw_variable(variable)
    living = [run for run in getattr(raw, _NAME, []) if run.living]
    setattr(raw, _NAME, saved + living)
