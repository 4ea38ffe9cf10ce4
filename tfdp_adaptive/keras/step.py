# SPDX-License-Identifier: Apache-2.0
"""Runs a private step from batch to weights: query, clip, answer, apply, observe.

    fit -> train_step -> clip -> an engine -> answer -> apply -> assign

Nothing here draws noise or clips by itself: `clipping` clips, and `private_rule` adds the noise
and updates the rule, which sees noisy sums only.
"""

import functools
import math
from typing import Any, Callable, Dict, Optional, Sequence, Tuple
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
from tfdp_adaptive.keras import logs
from tfdp_adaptive.keras import optimizer as optimizer_lib

_VIEWS = ('The gradient of an example is the mean over {} views of it, and is clipped once. The '
          'guarantee is for the example with all of its views.')
_ROWS: Any = weakref.WeakKeyDictionary()  # model -> {kind of batch: rows of a chunk}.


def train_step(model: compat.Model, data: Any) -> Dict[str, tf.Tensor]:
  """Runs a private step. Keras calls it for every batch.

  Args:
    model: A compiled `DPModel`.
    data: `(x, y)` or `(x, y, sample_weight)`.

  Returns:
    Logs by name; exact numbers of private data.
  """
  optimizer = model.optimizer
  batch, tag, views = admission.unpack(data, optimizer.plan, compat.output_names(model))
  examples = interface.joined(views_lib.of(batch, model.example_views))[0]
  loss = model.prepare_step(examples.x)
  model.compare_step(loss, examples)
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
  batch, noise = admission.admit(optimizer, batch, tag, state.privatizer.noise)
  state = state._replace(privatizer=state.privatizer._replace(noise=noise))
  clipped = clip(model, loss, batch, request)
  # Over replicas, sums come first: every replica then draws the same noise.
  direction, state = optimizer.private.answer(
      state, request, compat.sum_over_replicas(clipped.sums), public,
      model.regularization_gradients())
  penalty = model.weight_penalty()  # Penalty at the weights of the gradients.
  apply(optimizer, variables, direction, state)
  return logs.observe(model, loss, batch, clipped, request, penalty)


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
  return state, optimizer.private.query(state, public), public


def clip(
    model: compat.Model, loss: Any, batch: interface.Batch,
    request: interface.Request) -> interface.Clipped:
  """The clipped sums of this replica's part of the batch, chunk by chunk if memory asks for it."""
  speed = model.optimizer.performance
  chosen = engines.choose(speed.engine, model, request.asks, interface.joined(batch)[0].x)
  model.optimizer.run.engines[chosen.name] = None  # type: ignore[attr-defined]
  engine = views_lib.repeated(chosen, model.example_views)
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
