# SPDX-License-Identifier: Apache-2.0
"""Audits a user's model with its loss, records and private training step.

A record is a place in the data. Everything is run on copies of the state: the model, its
optimizer and its ledger are what they were when the audit is over.
"""

import contextlib
from typing import Any, Iterator, List, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import errors
from tfdp_adaptive.audit import subjects
from tfdp_adaptive.audit import watched as watched_lib
from tfdp_adaptive.batches import marks
from tfdp_adaptive.keras import model as model_lib

_HUGE = 1e4  # Records are tried as they are, and this many times as large.


@contextlib.contextmanager
def of(model: Any, data: Any) -> Iterator[subjects.Subject]:
  """Returns the subject of an audit. The model is not changed.

  Args:
    model: A compiled `tfdp.DPModel`.
    data: `(x, y)` of arrays, or nests of them, whose first axis is the record.
  """
  if not isinstance(model, model_lib.DPModel) or getattr(model, 'optimizer', None) is None:
    raise ValueError('`subject` must be a compiled private model where `data` is given, such as '
                     f'tfdp.make_private(model). Received: {model!r}.')
  own: Any = model
  data, count = _checked(data)
  x, y = (tf.nest.map_structure(tf.constant, part) for part in data)
  optimizer = own.optimizer
  if not own.built:
    own(tf.nest.map_structure(lambda t: t[:1], x), training=False)
  optimizer.build(own.trainable_variables)
  if optimizer.steps_done:
    raise ValueError('`subject` must be a model that was not trained yet: compile it again, with a '
                     f'new optimizer. Received: a model after {optimizer.steps_done} steps.')
  hidden, plan = optimizer._hidden, optimizer.plan
  watched = watched_lib.Watched(optimizer.rule, optimizer.l2_norm_clip)
  variables = list({id(v): v for v in [
      *tf.nest.flatten(optimizer.run.state), optimizer.run.watched, *own.variables,
      optimizer.iterations]}.values())
  before = [tf.convert_to_tensor(v) for v in variables]
  marked = plan is not None and optimizer.own_sampler is None
  others: List[Any] = []

  @tf.function(reduce_retracing=True)
  def step(tensors: Any, places: tf.Tensor, weights: tf.Tensor) -> Any:
    watched.seen = ()
    for variable, value in zip(variables, tensors):
      variable.assign(value)
    own.train_step((*(tf.nest.map_structure(lambda t: tf.gather(t, places), part)
                        for part in (x, y)), weights))
    return watched.seen, [tf.convert_to_tensor(v) for v in variables]

  def fresh(key: tf.Tensor) -> Any:
    return [key if v is optimizer.run.state[1].noise.key else value
            for v, value in zip(variables, before)]

  def run(tensors: Any, records: np.ndarray, weights: np.ndarray, row: int) -> Any:
    weights = marks.write(weights, plan, row) if marked else np.asarray(weights, np.float32)
    given = tensors, tf.constant(records[:, 0].astype(np.int64)), tf.constant(weights)
    if not others:
      others.extend(watched_lib.captured(step.get_concrete_function(*given), variables))
    return step(*given)

  update, public = hidden.update, own._public_penalty
  held = '' if public is not None else _held(own)
  model_lib.AUDITED.add(own)
  try:
    hidden.update = watched.update
    own._public_penalty = public or 'not said; under audit'
    own.leaves_out_penalties = not held  # What reads weights alone is public.
    subject = subjects.Subject(
        subjects.claims_of(optimizer)._replace(name=f'{own.name} with '
                                                    f'{type(optimizer).__name__}'),
        1, optimizer.rule.asks, subjects.Run(
            fresh, run, lambda state, other: state, sized=True, written=watched.written(
                own, optimizer, variables, run, others)),
        count, held)
    yield subject
  finally:
    hidden.update = update
    for variable, value in [*zip(variables, before), *others]:
      variable.assign(value)
    own.reset_metrics()
    own.leaves_out_penalties, own._public_penalty = False, public
    model_lib.AUDITED.discard(own)


def _held(model: Any) -> str:
  """Returns the problem with arrays in a loss, penalty, constraint or schedule, or ''."""
  try:
    model.check_held()
  except errors.PrivacyError as error:
    return str(error)
  return ''


def passed(model: Any) -> None:
  """Lets a model train, though it replaces a part of the private step, until compiled again."""
  model_lib.AUDITED.add(model)


def _checked(data: Any) -> Tuple[Any, int]:
  """`(x, y)` with larger copies of what is floating-point and a blank, and how many were copied."""
  if not isinstance(data, tuple) or len(data) != 2:
    raise ValueError('`data` must be a pair (x, y) of arrays whose first axis is the record. '
                     f'Received: {type(data).__name__}.')
  arrays = tuple(tf.nest.map_structure(np.asarray, part) for part in data)
  lengths = {a.shape[0] if a.ndim else 0 for a in tf.nest.flatten(arrays)}
  if len(lengths) != 1 or not min(lengths):
    raise ValueError('`data` must be a pair (x, y) of arrays with the same number of records, at '
                     f'least one. Received: lengths {sorted(lengths)}.')
  larger = lambda a: a * np.asarray(_HUGE, a.dtype) if a.dtype.kind == 'f' else a
  blank = lambda a: np.full((1, *a.shape[1:]), '' if a.dtype.kind in 'OSU' else 0, a.dtype)
  together = lambda a: np.concatenate([a, larger(a), blank(a)])
  return tf.nest.map_structure(together, arrays), 2 * lengths.pop()
