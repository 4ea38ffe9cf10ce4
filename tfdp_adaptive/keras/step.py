# SPDX-License-Identifier: Apache-2.0
"""Runs a private step from batch to weights: query, clip, answer, apply, observe.

    fit -> train_step -> clip -> an engine -> answer -> apply -> assign

Nothing here draws noise or clips by itself: `clipping` clips, and `private_rule` adds the noise
and updates the rule, which sees noisy sums only.
"""

import functools
import math
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import errors
from tfdp_adaptive import noise as noise_lib
from tfdp_adaptive import private_rule
from tfdp_adaptive import trees
from tfdp_adaptive.batches import tags
from tfdp_adaptive.clipping import chunks
from tfdp_adaptive.clipping import engines
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.clipping import losses as losses_lib
from tfdp_adaptive.independence import validation
from tfdp_adaptive.keras import diagnostics
from tfdp_adaptive.keras import fixed_part
from tfdp_adaptive.keras import optimizer as optimizer_lib
from tfdp_adaptive.privacy import plan as plan_lib

_DRAWN = (
    'The optimizer has a plan, so a step takes the batch that `plan.batches(data)` drew for it, '
    'as it came: `fit(plan.batches(data))`, or each `(x, y, sample_weight)` of it in its order, '
    'from `start_step=optimizer.steps_done` on. Received: {}. If the sampling is your own, say so: '
    "`own_sampler='how records were chosen'`; the statement then says it too.")
_VIEWS = ('The gradient of an example is the mean over {} views of it, and is clipped once. The '
          'guarantee is for the example with all of its views.')


def train_step(model: compat.Model, data: trees.Tree) -> Dict[str, tf.Tensor]:
  """Runs a private step. Keras calls it for every batch.

  Args:
    model: A compiled `DPModel`.
    data: `(x, y)` or `(x, y, sample_weight)`.

  Returns:
    Logs by name; exact numbers of private data.
  """
  optimizer = model.optimizer
  batch, tag, views = unpack(data, optimizer.plan, compat.output_names(model))
  examples = interface.joined(chunks.with_views(batch, model.example_views))[0]
  loss = model.prepare_step(examples.x)
  model.compare_step(loss, examples)
  variables = model.trainable_variables
  optimizer.check_variables(variables)
  public = None
  if optimizer.rule.public is not None:
    public = functools.partial(
        engines.public_gradients_when_due, optimizer.rule, model, loss, *optimizer.public_batch())
  state, request, public = query(optimizer, variables, batch.x, public)
  if optimizer.plan is not None and optimizer.plan.whole_users:
    optimizer.run.say(examples_per_user=batch.examples.shape[1] // views)
  if views * model.example_views > 1:
    optimizer.run.note(_VIEWS.format(views * model.example_views))
  batch, noise = check_batch(optimizer, batch, tag, state.privatizer.noise)
  state = state._replace(privatizer=state.privatizer._replace(noise=noise))
  clipped = clip(model, loss, batch, request)
  # Over replicas, sums come first: every replica then draws the same noise.
  direction, state = optimizer.private.answer(
      state, request, compat.sum_over_replicas(clipped.sums), public,
      model.regularization_gradients())
  penalty = model.weight_penalty()  # Penalty at the weights of the gradients.
  apply(optimizer, variables, direction, state)
  return diagnostics.observe(model, loss, batch, clipped, request, penalty)


def query(
    optimizer: optimizer_lib.DPOptimizer, variables: Sequence[Any], batch: trees.Tree,
    public_of: Optional[Callable[[trees.Tree], Any]] = None,
) -> Tuple[private_rule.State, interface.Request, Any]:
  """Returns the state, what the rule asks for, and the public gradients it needs, or ().

  It waits for the batch, though it uses none: where data end, `fit` begins a step that has no
  batch, and noise may have no row for it.
  """
  with tf.init_scope():
    optimizer.build(variables)
  with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
    state = optimizer.read_state()
  public = () if public_of is None else public_of(state.rule)
  return state, optimizer.private.query(state, public), public


def clip(
    model: compat.Model, loss: losses_lib.ExampleLoss, batch: interface.Batch,
    request: interface.Request) -> interface.Clipped:
  """Returns the clipped sums of this replica's part of the batch, in chunks if memory is short."""
  speed = model.optimizer.performance
  chosen = engines.choose(speed.engine, model, request.asks, interface.joined(batch)[0].x)
  model.optimizer.run.say(engines=(chosen.name,))  # type: ignore[attr-defined]
  engine = chunks.over_views(chosen, model.example_views, _parts(model))
  rows = None
  if speed.memory_budget is not None:
    rows = _rows_within(engine, model, loss, batch, request)
  return chunks.chunked(engine, speed.accumulation_steps, rows, model.reads_outputs())(
      model, loss, batch, request)


def _parts(model: compat.Model) -> Optional[fixed_part.Parts]:
  """Returns the model's `fixed_part`, which is looked for once, and not on replicas."""
  kinds = model.batch_kinds
  if model.example_views > 1 and not compat.has_replicas() and not kinds.parts:
    kinds.parts.append(validation.on_a_thread(fixed_part.of, model))
  return kinds.parts[0] if kinds.parts else None


def _rows_within(engine: interface.Engine, model: compat.Model, loss: losses_lib.ExampleLoss,
                 batch: interface.Batch, request: interface.Request) -> int:
  """Rows of a chunk within the optimizer's budget, estimated once for every kind of batch.

  Eager steps would trace the engine anew, each of them several times.
  """
  optimizer = model.optimizer
  kind = str((optimizer.performance, trees.map(lambda t: (t.shape, t.dtype), batch)))
  known = model.batch_kinds.rows
  if kind not in known:
    size = batch.mask.shape[0] or math.ceil(optimizer.batch_size)
    known[kind] = chunks.rows_within(
        optimizer.performance.memory_budget, engine, model, loss, batch, request, size)
  return known[kind]


def apply(
    optimizer: optimizer_lib.DPOptimizer, variables: Sequence[Any], direction: trees.Tree,
    state: private_rule.State) -> None:
  """Writes the state and moves the weights; the only place that does.

  All of it waits for the direction, even the decay of weights, which needs none; see `query`.
  """
  with tf.control_dependencies(tf.nest.flatten(direction)):
    optimizer.write_state(state)
    optimizer.move(variables, direction, state)


def unpack(data: trees.Tree, plan: Optional[plan_lib.PrivacyPlan] = None,
           outputs: Optional[Sequence[str]] = None) -> Tuple[interface.Batch, Any, int]:
  """Returns `(batch, tag, views)` of `(x, y, sample_weight)`.

  Examples whose weights are all zero are masked. Under a plan for users a record is a user, and all
  tensors are [users, examples, ...]. If a plan drew several views of every example, all tensors are
  [examples, views, ...] or [users, examples * views, ...].

  Args:
    data: A batch.
    plan: The plan, or None.
    outputs: Names of the model's outputs, if it has several: weights may be of some of them.

  Returns:
    The batch, the tags of its rows or None, and the number of views of every example in it.
  """
  data = tf.nest.map_structure(  # Eager steps of `train_on_batch` get arrays from Keras 3.
      lambda t: tf.convert_to_tensor(t) if isinstance(t, np.ndarray) else t, data)
  x, y, sample_weight = compat.keras.utils.unpack_x_y_sample_weight(data)
  sample_weight, tag = tags.split(sample_weight)
  sample_weight = tf.nest.map_structure(
      lambda t: tf.cast(t, tf.float32) if getattr(t, 'dtype', None) == tf.bool else t,
      sample_weight)
  several, views = plan is not None and plan.whole_users, 1
  if tag is not None and tag.shape.rank == 2:
    tag, views, several = tag[:, 0], tag.shape[1], True
  first = tf.convert_to_tensor(tf.nest.flatten(x)[0])
  if several:
    leaves = [tf.convert_to_tensor(t) for t in tf.nest.flatten((x, y, sample_weight))
              if t is not None]
    most = {t.shape[1] if t.shape.rank is not None and t.shape.rank > 1 else None for t in leaves}
    if len(most) != 1 or None in most:
      raise errors.PrivacyError(
          'The plan protects users, so batches must be [users, examples of a user, ...], in x, y '
          f'and sample_weight alike. Received: shapes {[t.shape for t in leaves]}. Use '
          '`plan.batches(data, users=ids, examples_per_user=m)`.')
  if sample_weight is None:
    size = first.shape[0] if first.shape[0] is not None else tf.shape(first)[0]
    if not several:
      return interface.Batch(x, y, (), tf.ones([size], tf.bool)), None, 1
    sample_weight = tf.ones([size, first.shape[1]])
  if not several:
    used = _used(sample_weight)
    if plan is None and isinstance(sample_weight, dict) and set(sample_weight) < set(outputs or ()):
      used = tf.ones_like(used)  # Outputs that are not named count each example.
    return interface.Batch(x, y, sample_weight, used), tag, 1
  examples = tf.ensure_shape(_used(sample_weight, 2), first.shape[:2])
  return interface.Batch(x, y, sample_weight, tf.reduce_any(examples, 1), examples), tag, views


def _used(weights: trees.Tree, axes: int = 1) -> tf.Tensor:
  """Returns a mask over the first `axes` axes: True where any weight is nonzero."""
  return functools.reduce(tf.logical_or, [
      tf.reduce_any(tf.not_equal(weight, 0), list(range(axes, weight.shape.rank)))
      for weight in tf.nest.flatten(weights)])


def check_batch(
    optimizer: optimizer_lib.DPOptimizer, batch: interface.Batch, tag: Optional[tf.Tensor],
    noise: noise_lib.State) -> Tuple[interface.Batch, noise_lib.State]:
  """Checks that this step may use the batch, and returns it.

  XLA drops assertions. A batch that was not drawn for this step is then masked as empty.

  Args:
    optimizer: A `DPOptimizer`.
    batch: As `unpack` returns it.
    tag: The tags of its rows, or None.
    noise: The noise's state before the step, whose row counts the steps done so far.

  Returns:
    The batch and the noise. Everything the step writes depends on the noise, and so on the check.
  """
  if optimizer.plan is not None and optimizer.own_sampler is None:
    if batch.y is None:
      raise errors.PrivacyError(
          'A model is trained on inputs and targets: `plan.batches((x, y))`. Received: batches '
          'without targets, as of `plan.batches(x)`.')
    drawn, *checks = _is_drawn(optimizer.plan, tag, batch.mask, noise.row)
    mask = batch.mask & drawn
  else:  # With a plan it is the caller's word, whatever sizes it means.
    checks = [] if optimizer.plan is not None else _check_size(optimizer, batch)
    mask = batch.mask
  with tf.control_dependencies([check for check in checks if check is not None]):
    mask, key, row = (tf.identity(t) for t in (mask, noise.key, noise.row))
  return batch._replace(mask=mask), noise._replace(key=key, row=row)


def _is_drawn(plan: plan_lib.PrivacyPlan, tag: Optional[tf.Tensor], used: tf.Tensor,
              step: tf.Tensor) -> Tuple[tf.Tensor, Any]:
  """Returns `(bool [], assertion)`: whether all used rows have the tags of this step and place."""
  if tag is None:
    raise errors.PrivacyError(_DRAWN.format('a batch without the tags of the plan'))
  count = tf.shape(tag, tf.int64)[0]
  skipped = tags.row_of(tf.cast(tag, tf.int64), plan, tf.cast(step, tf.int64)) - tf.range(count)
  least = tf.reduce_min(tf.where(used, skipped, tf.int64.max))
  most = tf.reduce_max(tf.where(used, skipped, tf.int64.min))
  drawn = tags.in_place(
      compat.gather_replicas(tf.stack([count, least, most])), compat.has_workers())
  return drawn, trees.insist(drawn, _DRAWN.format(
      'a batch of another step or plan, used before, with rows repeated, moved or left out, or '
      'of other coins than those of another worker'))


def _check_size(optimizer: optimizer_lib.DPOptimizer, batch: interface.Batch) -> List[Any]:
  """Returns assertions that a batch has the declared size, where sizes are fixed.

  Fewer examples are wrong, too, unless there are weights: rows of weight zero are no records.
  """
  if optimizer.adjacency == 'add_remove':
    return []
  exact, static = trees.absent(batch.sample_weight), batch.mask.shape[0]
  message = (
      f'Batches must have exactly batch_size={optimizer.batch_size} examples under '
      f'{optimizer.adjacency} adjacency. Received: {{}} examples. Drop the remainder, feed '
      "`plan.batches(data)`, or use Poisson sampling with adjacency='add_remove'.")
  if exact and static is not None and not compat.has_replicas():
    if static != optimizer.batch_size:
      raise errors.PrivacyError(message.format(static))
    return []
  size = compat.sum_over_replicas(tf.reduce_sum(tf.cast(batch.mask, tf.float32)))
  fits = size == optimizer.batch_size if exact else size <= optimizer.batch_size
  return [trees.insist(fits, message.format('other' if exact else 'more'), size)]


def refuse_ragged(*data: trees.Tree) -> None:
  """Raises ValueError for examples of different lengths."""
  kinds = (tf.RaggedTensor, tf.RaggedTensorSpec, tf.SparseTensor, tf.SparseTensorSpec)
  for part in data:
    leaves = tf.nest.flatten(part.element_spec if isinstance(part, tf.data.Dataset) else part)
    for leaf in leaves:
      if isinstance(leaf, kinds):
        raise ValueError(
            'A private step needs dense tensors: the gradient of each example is its own. '
            f'Received: a {type(leaf).__name__}. Pad ragged data with `.to_tensor()` (and let '
            'the model mask the padding), or densify sparse data with `tf.sparse.to_dense`.')


def with_shapes(model: compat.Model, data: trees.Tree) -> Any:
  """Returns a batch whose axes have the lengths that the model's inputs tell."""
  refuse_ragged(data)
  x, y, weight = compat.keras.utils.unpack_x_y_sample_weight(data)
  x = trees.given(x)
  leaves = tf.nest.flatten(x)
  inputs = list(getattr(model, 'inputs', None) or ()) if model.built else []
  named = isinstance(x, dict) and not isinstance(compat.input_structure(model), dict)
  if len(leaves) != len(inputs) or named:  # Named inputs have another order.
    return compat.keras.utils.pack_x_y_sample_weight(x, y, weight)
  leaves = [tf.ensure_shape(t, [None, *one.shape[1:]]) if tf.is_tensor(t) and (
      t.shape.rank is None or None in t.shape[1:] and t.shape.rank == len(one.shape)) else t
            for t, one in zip(leaves, inputs)]
  return compat.keras.utils.pack_x_y_sample_weight(tf.nest.pack_sequence_as(x, leaves), y, weight)
