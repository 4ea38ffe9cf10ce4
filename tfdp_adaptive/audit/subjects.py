# SPDX-License-Identifier: Apache-2.0
"""Subjects of an audit: a DPQuery, an optimizer with a small model, or the user's own model.

The gradient of a record of the small model is the record itself, so the audit can make any
gradient. A record of the user's model is an index into the user's data. The audit runs on copies
of the state, so the user's model, its optimizer and its ledger do not change.
"""

import contextlib
import copy
import math
from typing import Any, Callable, Dict, Iterator, List, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import contract
from tfdp_adaptive import errors
from tfdp_adaptive import trees
from tfdp_adaptive.audit import interface
from tfdp_adaptive.batches import tags
from tfdp_adaptive.keras import model as model_lib
from tfdp_adaptive.keras import optimizer as optimizer_lib
from tfdp_adaptive.keras import private as private_lib

keras = compat.keras
_FAR = -1e30  # A target that no output reaches: the absolute error's gradient is the record.
# A user's examples, in parts of the record; the last one has no weight.
_PARTS, _THERE = (0.5, 0.375, 0.125, 1.0), (1.0, 1.0, 1.0, 0.0)
_HUGE = 1e4  # Records are tried as they are, and this many times as large.


def of(subject: Any, size: int) -> interface.Subject:
  """Returns the subject of an audit.

  Args:
    subject: A private optimizer that is not built yet, or a `RuleQuery`.
    size: The number of coordinates of a record, for an optimizer. A query has its own.
  """
  if isinstance(subject, optimizer_lib.DPOptimizer):
    return _of_optimizer(subject, size)
  if hasattr(subject, 'preprocess_record') and hasattr(subject, '_private'):
    return _Query(subject)
  raise ValueError('An audit is of a private optimizer, such as tfdp.DPAdam, or of a '
                   f'tfdp.queries.RuleQuery. Received: {subject!r}.')


class _Query(interface.Subject):
  """A `RuleQuery`: a record is what a client sends."""

  def __init__(self, query: Any) -> None:
    private = query._private
    self._specs = tf.nest.flatten(query._specs)
    self._sizes = [spec.shape.num_elements() for spec in self._specs]
    super().__init__(
        f'RuleQuery({private.rule.name})', private.privatizer, query._mechanism, private.rule,
        private.privatizer.steps, sum(self._sizes), private.privatizer._l2_norm_clip)
    self._query = copy.copy(query)
    self._query._private = private.watched(self._update)
    self._traced = tf.function(self._round, autograph=False, reduce_retracing=True)

  def _fresh(self, key: tf.Tensor) -> Any:
    state = self._query.initial_global_state()
    noise = state.privatizer.noise._replace(key=key)
    return state._replace(privatizer=state.privatizer._replace(noise=noise))

  def _step(self, tensors: trees.Tree, records: np.ndarray, weights: np.ndarray,
            row: int) -> Tuple[Any, Any]:
    return self._traced(tensors, tf.constant(records * (weights != 0)[:, np.newaxis]))

  def _round(self, state: trees.Tree, records: tf.Tensor) -> Tuple[Any, Any]:
    self._seen = ()
    query = self._query
    params = query.derive_sample_params(state)

    def accumulate(sums: trees.Tree, record: tf.Tensor) -> Any:
      leaves = [tf.reshape(part, spec.shape)
                for part, spec in zip(tf.split(record, self._sizes), self._specs)]
      return query.accumulate_record(
          params, sums, tf.nest.pack_sequence_as(query._specs, leaves))

    sums = tf.foldl(accumulate, records, query.initial_sample_state())
    _, state, _ = query.get_noised_result(sums, state)
    return self._seen, state

  def with_secret_of(self, state: interface.State, other: interface.State) -> Any:
    tensors, row = state
    secret = other[0].privatizer.secret
    return tensors._replace(privatizer=tensors.privatizer._replace(secret=secret)), row


class _Model(interface.Subject):
  """A compiled private model that was not trained yet, by its training step.

  Args:
    model: The model.
    name: Its name in the report.
    batch_of: `(records, weights) -> (x, y, weights)`, tensors of [n, size] and [n].
    size: See `Subject`.
    any_rows: Whether to trace the step once for any number of records.
    **more: Further arguments of `Subject`.
  """

  writes = True

  def __init__(self, model: compat.Model, name: str, batch_of: Callable[[Any, Any], Any], size: int,
               any_rows: bool = False, **more: Any) -> None:
    optimizer = model.optimizer
    optimizer.build(model.trainable_variables)
    plan = self.plan = optimizer.plan
    super().__init__(
        name, optimizer, optimizer.mechanism, optimizer.rule, optimizer.private.privatizer.steps,
        size, optimizer.l2_norm_clip, **more)
    if plan is None and optimizer.adjacency != 'add_remove':
      self.largest_batch = self.batch_size
    self._model, self._batch_of = model, batch_of
    self._tagged = None if optimizer.own_sampler is not None else plan
    state = optimizer.run.state
    self._key = state[1].noise.key
    self._secrets = {id(v) for v in tf.nest.flatten(state[1].secret)}
    self._variables = list({id(v): v for v in [
        *tf.nest.flatten(state), optimizer.run.step_counts.variable, *model.variables,
        optimizer.iterations]}.values())
    self._initial = [tf.convert_to_tensor(v) for v in self._variables]
    self._others: List[Any] = []  # Further variables that a step reads or writes, and values.
    signature = None if not any_rows else [
        [tf.TensorSpec(t.shape, t.dtype) for t in self._initial],
        tf.TensorSpec([None, size], tf.float32),
        tf.TensorSpec([None], tf.float32 if self._tagged is None else tf.float64)]
    self._traced = tf.function(
        self._trained, input_signature=signature, reduce_retracing=not any_rows,
        autograph=not any_rows)  # A user's step may branch on tensors.
    self._unwatched = optimizer.private
    optimizer.run.private = self._unwatched.watched(self._update)

  def _trained(
      self, tensors: trees.Tree, records: tf.Tensor, weights: tf.Tensor
      ) -> Tuple[contract.Releases, trees.Tree]:
    self._seen = ()
    trees.assign(zip(self._variables, tensors))
    self._model.train_step(self._batch_of(records, weights))
    return self._seen, [tf.convert_to_tensor(v) for v in self._variables]

  def _fresh(self, key: tf.Tensor) -> Any:
    return [key if v is self._key else value
            for v, value in zip(self._variables, self._initial)]

  def _step(self, tensors: trees.Tree, records: np.ndarray, weights: np.ndarray,
            row: int) -> Tuple[Any, Any]:
    if self._tagged is not None:
      weights = tags.write(weights, tags.of_rows(self._tagged, row, len(weights)))
    given = tensors, tf.constant(records), tf.constant(weights)
    if not self._others:
      known = {id(compat.raw_variable(v)) for v in self._variables}
      graph = self._traced.get_concrete_function(*given).graph
      self._others = [(v, tf.convert_to_tensor(v)) for v in graph.variables
                      if id(compat.raw_variable(v)) not in known]
    return self._traced(*given)

  def with_secret_of(self, state: interface.State, other: interface.State) -> Any:
    return [secret if id(v) in self._secrets else value
            for v, value, secret in zip(self._variables, state[0], other[0])], state[1]

  def written(
      self, state: interface.State, records: np.ndarray, weights: np.ndarray
      ) -> Dict[str, np.ndarray]:
    if not self._others:
      self.step(state, records, weights)
    trees.assign(self._others)
    self._fixed.assign(True)
    _, (after, _) = self.step(state, records, weights)
    self._fixed.assign(False)
    left = [*zip(self._variables, after), *((v, tf.convert_to_tensor(v)) for v, _ in self._others)]
    private = {id(compat.raw_variable(v)) for v in (
        self._fixed, *(v for metric in self._model.metrics for v in metric.variables))}
    return {f'{getattr(v, "path", v.name)} ({i})': np.asarray(value)
            for i, (v, value) in enumerate(left)
            if id(v) not in self._secrets and id(compat.raw_variable(v)) not in private}

  def restore(self) -> None:
    """Makes the model what it was."""
    self._model.optimizer.run.private = self._unwatched
    trees.assign([*zip(self._variables, self._initial), *self._others])
    self._model.reset_metrics()


def _of_optimizer(optimizer: optimizer_lib.DPOptimizer, size: int) -> _Model:
  """Returns a small model with an optimizer. A record is any gradient of its `size` weights."""
  if optimizer.run.state is not None:
    raise ValueError('`subject` must be an optimizer that no model has used yet: the audit trains '
                     f'a model of its own with it. Received: {optimizer.name}, which is built.')
  if optimizer.rule.public is not None and optimizer.public_data is None:
    rng = np.random.default_rng(0)
    optimizer.public_data = (rng.standard_normal((8, size)).astype(np.float32),
                             np.full((8, 1), _FAR, np.float32))
  rows = next(d for d in range(math.isqrt(size), 0, -1) if size % d == 0)
  model = private_lib.DPSequential([
      keras.layers.Input((size,)),
      keras.layers.Reshape((rows, size // rows)),  # Some rules have a scale on either side.
      keras.layers.EinsumDense('bij,ijk->bk', output_shape=1, kernel_initializer='zeros')])
  model.compile(optimizer=optimizer, loss='mean_absolute_error')

  def batch_of(records: tf.Tensor, weights: tf.Tensor) -> Any:
    if optimizer.plan is not None and optimizer.plan.whole_users:
      records = records[:, tf.newaxis] * tf.constant(_PARTS)[:, tf.newaxis]
      weights = weights[:, tf.newaxis] * tf.constant(_THERE, weights.dtype)
    targets = tf.fill(tf.concat([tf.shape(records)[:-1], [1]], 0), _FAR)
    return records, tf.ensure_shape(targets, records.shape[:-1] + [1]), weights

  return _Model(model, type(optimizer).__name__, batch_of, size, any_rows=True)


@contextlib.contextmanager
def of_model(model: compat.Model, data: Any) -> Iterator[interface.Subject]:
  """Opens a user's model, whose records are places in the data, and leaves it unchanged.

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
  if not own.built:
    own(tf.nest.map_structure(lambda t: t[:1], x), training=False)
  if own.optimizer.steps_done:
    raise ValueError('`subject` must be a model that was not trained yet: compile it again, with a '
                     f'new optimizer. Received: a model after {own.optimizer.steps_done} steps.')

  def batch_of(places: tf.Tensor, weights: tf.Tensor) -> Any:
    places = tf.cast(places[:, 0], tf.int64)
    return *(tf.nest.map_structure(lambda t: tf.gather(t, places), part)
             for part in (x, y)), weights

  public = own._public_penalty
  problem = '' if public is not None else _data_problem(own)
  subject = _Model(own, f'{own.name} with {type(own.optimizer).__name__}', batch_of, 1,
                  count=count, data_problem=problem)
  model_lib.AUDITED.add(own)
  own._public_penalty = public or 'not said; under audit'
  own.leaves_out_penalties = not problem  # Penalties that read weights alone are public.
  try:
    yield subject
  finally:
    subject.restore()
    own.leaves_out_penalties, own._public_penalty = False, public
    model_lib.AUDITED.discard(own)


def _data_problem(model: compat.Model) -> str:
  """Returns the problem with arrays in a loss, penalty, constraint or schedule, or ''."""
  try:
    model.check_held()
  except errors.PrivacyError as error:
    return str(error)
  return ''


def passed(model: compat.Model) -> None:
  """Lets a model train, though it replaces a part of the private step, until compiled again."""
  model_lib.AUDITED.add(model)


def _checked(data: Any) -> Tuple[Any, int]:
  """Returns `(x, y)` with larger copies of floating-point parts and a blank, and their number."""
  if not isinstance(data, tuple) or len(data) != 2:
    raise ValueError('`data` must be a pair (x, y) of arrays whose first axis is the record. '
                     f'Received: {type(data).__name__}.')
  arrays = tuple(tf.nest.map_structure(np.asarray, part) for part in data)
  lengths = {a.shape[0] if a.ndim else 0 for a in tf.nest.flatten(arrays)}
  if len(lengths) != 1 or not min(lengths):
    raise ValueError('`data` must be a pair (x, y) of arrays with the same number of records, at '
                     f'least one. Received: {len(lengths)} numbers of records.')
  larger = lambda a: a * np.asarray(_HUGE, a.dtype) if a.dtype.kind == 'f' else a
  blank = lambda a: np.full((1, *a.shape[1:]), '' if a.dtype.kind in 'OSU' else 0, a.dtype)
  together = lambda a: np.concatenate([a, larger(a), blank(a)])
  return tf.nest.map_structure(together, arrays), 2 * lengths.pop()
