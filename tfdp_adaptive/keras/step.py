# SPDX-License-Identifier: Apache-2.0
"""Runs a private step from batch to weights: query, clip, answer, apply, observe.

    fit -> train_step -> clip -> an engine -> answer -> apply -> assign

Nothing here draws noise or clips by itself: `clipping` clips, and `private_rule` adds the noise
and updates the rule, which sees noisy sums only.
"""

import contextlib
import functools
import math
from typing import Any, Callable, Dict, Iterator, Optional, Sequence, Tuple
import weakref

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import private_rule
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import chunks
from tfdp_adaptive.clipping import engines
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.clipping import public as public_lib
from tfdp_adaptive.clipping import views as views_lib
from tfdp_adaptive.keras import admission
from tfdp_adaptive.keras import diagnostics
from tfdp_adaptive.keras import optimizer as optimizer_lib

_VIEWS = ('The gradient of an example is the mean over {} views of it, and is clipped once. The '
          'guarantee is for the example with all of its views.')
_ROWS: Any = weakref.WeakKeyDictionary()  # Of models: kind of batch -> rows of a chunk.


def train_step(model: compat.Model, data: Any) -> Dict[str, tf.Tensor]:
  """Runs a private step. Keras calls it for every batch.

  Args:
    model: A compiled `DPModel`.
    data: `(x, y)` or `(x, y, sample_weight)`.

  Returns:
    Logs by name; exact numbers of private data.
  """
  optimizer = model.optimizer
  batch, mark, views = admission.unpack(data, optimizer.plan)
  loss = model.prepare_step(interface.joined(views_lib.of(batch, model.example_views))[0].x)
  variables = model.trainable_variables
  optimizer.check_variables(variables)
  public = None
  if optimizer.rule.public is not None:
    public = functools.partial(
        public_lib.when_due, optimizer.rule, model, loss, *optimizer.public_batch())
  state, request, public = query(optimizer, variables, batch.x, public)
  if optimizer.plan is not None and optimizer.plan.whole_users:
    optimizer.run.examples_per_user = max(
        optimizer.run.examples_per_user, batch.examples.shape[1] // views)
  if views * model.example_views > 1:
    optimizer.run.note(_VIEWS.format(views * model.example_views))
  batch, noise = admission.admit(optimizer, batch, mark, state.privatizer.noise)
  state = state._replace(privatizer=state.privatizer._replace(noise=noise))
  clipped = clip(model, loss, batch, request)
  # Over replicas, sums come first: every replica then draws the same noise.
  direction, state = optimizer.private.answer(
      state, request, compat.sum_over_replicas(clipped.sums), public,
      model.regularization_gradients())
  apply(optimizer, variables, direction, state)
  return observe(model, batch, clipped, request)


def query(
    optimizer: optimizer_lib.DPOptimizer, variables: Sequence[Any], batch: Any,
    public_of: Optional[Callable[[trees.Tree], Any]] = None,
) -> Tuple[private_rule.State, interface.Request, Any]:
  """Returns the state, what the rule asks for, and the public gradients it needs, or ().

  It waits for the tensors of a batch, though it uses none: where data end, `fit` begins a step
  that has no batch, and noise may have no row for it.
  """
  with tf.init_scope():
    optimizer.build(variables)
  with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
    state = optimizer.read_state()
  public = () if public_of is None else public_of(state.rule)
  return state, optimizer.private.ask(state, public), public


def clip(
    model: compat.Model, loss: Any, batch: interface.Batch,
    request: interface.Request) -> interface.Clipped:
  """The clipped sums of this replica's part of the batch, chunk by chunk if memory asks for it."""
  speed = model.optimizer.performance
  engine = views_lib.repeated(engines.choose(
      speed.engine, model, request.asks, interface.joined(batch)[0].x), model.example_views)
  rows = None
  if speed.memory_budget is not None:
    rows = _rows_within(engine, model, loss, batch, request)
  return engines.chunked(engine, speed.accumulation_steps, rows, model.reads_outputs())(
      model, loss, batch, request)


def _rows_within(
    engine: interface.Engine, model: compat.Model, loss: Any, batch: interface.Batch,
    request: interface.Request) -> int:
  """Rows of a chunk within the optimizer's budget, estimated once for every kind of batch.

  Eager steps would trace the engine anew, each of them several times.
  """
  optimizer = model.optimizer
  kind = str((optimizer.performance, trees.map(lambda t: (t.shape, t.dtype), batch)))
  known = _ROWS.setdefault(model, {})
  if kind not in known:
    size = batch.mask.shape[0] or math.ceil(optimizer.batch_size)
    known[kind] = chunks.rows_within(
        optimizer.performance.memory_budget, engine, model, loss, batch, request, size)
  return known[kind]


def forget(model: compat.Model) -> None:
  """Deletes the estimates of a model's steps, because the steps have changed."""
  _ROWS.pop(model, None)


def apply(
    optimizer: optimizer_lib.DPOptimizer, variables: Sequence[Any], direction: trees.Tree,
    state: private_rule.State) -> None:
  """Writes the state and moves the weights; the only place that does.

  All of it waits for the direction, even the decay of weights, which needs none; see `query`.
  """
  with tf.control_dependencies(tf.nest.flatten(direction)):
    optimizer.write_state(state)
    optimizer.move(variables, direction, state)


def observe(
    model: compat.Model, batch: interface.Batch, clipped: interface.Clipped,
    request: interface.Request) -> Dict[str, tf.Tensor]:
  """Loss, metrics and diagnostics: exact, NOT private."""
  outputs, present = clipped.outputs, batch.mask
  examples, _ = interface.joined(batch)
  if not trees.absent(batch.examples):
    outputs = interface.joined(batch._replace(x=outputs))[0].x
    present = tf.reshape(batch.examples & batch.mask[:, tf.newaxis], [-1])
  if model.reads_outputs():
    outputs = trees.map(lambda t: _blank(t, present), outputs)
  count = tf.reduce_sum(tf.cast(batch.mask, clipped.losses.dtype))
  mean = tf.math.divide_no_nan(tf.reduce_sum(clipped.losses), count)
  # Keras would compare the lengths of losses and weights in every step.
  compat.loss_tracker(model, outputs).update_state(mean, sample_weight=count)
  # As in Keras, metrics get no weights where nothing is left out.
  present = None if trees.absent(batch.sample_weight) else tf.cast(present, tf.float32)
  with _kept(model):
    logs = dict(model.compute_metrics(
        examples.x, _targets(examples.y, outputs), outputs, present) or {})
  optimizer = model.optimizer
  if optimizer.diagnostics:
    logs.update(diagnostics.of_step(
        clipped, request.clips, batch.mask, optimizer.batch_size, optimizer.rule_state))
  return logs


@contextlib.contextmanager
def _kept(model: compat.Model) -> Iterator[None]:
  """Undoes whatever metrics that are not of Keras write into weights."""
  metrics = {id(v) for metric in model.metrics for v in metric.variables}
  own = compat.overrides(model, 'compute_metrics') or model.has_own_metrics
  weights = [v for v in model.variables if id(v) not in metrics] if own else []
  before = [tf.identity(v) for v in weights]
  yield
  for weight, value in zip(weights, before):
    weight.assign(value)


def _targets(y: Any, outputs: Any) -> Any:
  """Adds an entry for outputs without a loss, because Keras 3 expects targets for all outputs."""
  if not isinstance(y, dict) or not isinstance(outputs, dict):
    return y
  return {**{name: output for name, output in outputs.items() if name not in y}, **y}


def _blank(tensor: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
  """Zeros for padding: whatever it holds, even NaN, reaches no metric."""
  mask = tf.reshape(mask, [-1] + [1] * (tensor.shape.rank - 1))
  return tf.where(mask, tensor, tf.zeros_like(tensor))
