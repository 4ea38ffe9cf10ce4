# SPDX-License-Identifier: Apache-2.0
"""Which batches a step takes: those that its plan drew for it, or of the declared size."""

from typing import Any, Dict, List, Optional, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import errors
from tfdp_adaptive import noise as noise_lib
from tfdp_adaptive import trees
from tfdp_adaptive.batches import marks
from tfdp_adaptive.batches import workers
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.keras import optimizer as optimizer_lib
from tfdp_adaptive.privacy import plan as plan_lib

_DRAWN = (
    'The optimizer has a plan, so a step takes the batch that `plan.batches(data)` drew for it, '
    'as it came: `fit(plan.batches(data))`, or each `(x, y, sample_weight)` of it in its order, '
    'from `start_step=optimizer.steps_done` on. Received: {}. If the sampling is your own, say so: '
    "`own_sampler='how records were chosen'`; the statement then says it too.")


def unpack(data: Any, plan: Any = None) -> interface.Batch:
  """The batch of `(x, y, sample_weight)`; masked is where all weights of an example are zero.

  Under a plan for users a record is a user, and all tensors are [users, examples, ...].
  """
  # Eager steps of `train_on_batch` get arrays from Keras 3.
  data = tf.nest.map_structure(
      lambda t: tf.convert_to_tensor(t) if isinstance(t, np.ndarray) else t, data)
  x, y, sample_weight = compat.keras.utils.unpack_x_y_sample_weight(data)
  if plan is not None and plan.whole_users:
    return _of_users(x, y, sample_weight)
  first = tf.nest.flatten(x)[0]
  if sample_weight is None:
    size = first.shape[0] if first.shape[0] is not None else tf.shape(first)[0]
    return interface.Batch(x, y, (), tf.ones([size], tf.bool))
  sample_weight = trees.map(tf.convert_to_tensor, sample_weight)
  mask = None
  for weight in tf.nest.flatten(sample_weight):
    used = tf.reduce_any(tf.not_equal(weight, 0), list(range(1, weight.shape.rank)))
    mask = used if mask is None else mask | used
  return interface.Batch(x, y, sample_weight, mask)


def _of_users(x: Any, y: Any, sample_weight: Any) -> interface.Batch:
  leaves = [tf.convert_to_tensor(t) for t in tf.nest.flatten((x, y, sample_weight))
            if t is not None]
  most = {t.shape[1] if t.shape.rank is not None and t.shape.rank > 1 else None for t in leaves}
  if len(most) != 1 or None in most:
    raise errors.PrivacyError(
        'The plan protects users, so batches must be [users, examples of a user, ...], in x, y and '
        f'sample_weight alike. Received: shapes {[t.shape for t in leaves]}. Use '
        '`plan.batches(data, users=ids, examples_per_user=m)`.')
  if sample_weight is None:
    sample_weight = tf.ones(tf.shape(leaves[0])[:2])
  sample_weight = trees.map(tf.convert_to_tensor, sample_weight)
  examples = tf.zeros([], tf.bool)
  for weight in tf.nest.flatten(sample_weight):
    examples |= tf.reduce_any(tf.not_equal(weight, 0), list(range(2, weight.shape.rank)))
  examples = tf.ensure_shape(examples, [leaves[0].shape[0], most.pop()])
  return interface.Batch(x, y, sample_weight, tf.reduce_any(examples, 1), examples)


def admit(
    optimizer: optimizer_lib.DPOptimizer, batch: interface.Batch,
    noise: noise_lib.State) -> Tuple[interface.Batch, noise_lib.State]:
  """The batch, if it is one that this step may take.

  Assertions vanish under XLA: there, what may not be taken is taken as empty.

  Args:
    optimizer: A `DPOptimizer`.
    batch: As `unpack` returns it.
    noise: The noise's state before the step, whose row counts the steps done so far.

  Returns:
    Both again. All that the step writes depends on the noise, hence on the check: where
    that fails, nothing was written.
  """
  weights = batch.sample_weight
  if optimizer.plan is not None and optimizer.own_sampler is None:
    drawn, *checks = _is_drawn(optimizer.plan, weights, noise.row)
    mask = batch.mask & drawn
  elif optimizer.plan is not None:  # The caller's word, whatever sizes it means.
    checks, mask = [], batch.mask
  else:
    size = tf.reduce_sum(tf.cast(batch.mask, tf.float32))
    exact = trees.absent(weights)
    checks = check_size(optimizer, size, batch.mask.shape[0] if exact else None, exact)
    mask = batch.mask
  with tf.control_dependencies([check for check in checks if check is not None]):
    mask, key, row = (tf.identity(t) for t in (mask, noise.key, noise.row))
  weights = trees.map(lambda w: tf.cast(w, tf.float32) if w.dtype == tf.float64 else w, weights)
  return batch._replace(sample_weight=weights, mask=mask), noise._replace(key=key, row=row)


def _is_drawn(plan: plan_lib.PrivacyPlan, weights: Any, step: tf.Tensor) -> Tuple[tf.Tensor, Any]:
  """`([] bool, assertion)`: whether all weights have the marks of this step and of their rows."""
  if trees.absent(weights) or any(w.dtype != tf.float64 for w in tf.nest.flatten(weights)):
    raise errors.PrivacyError(_DRAWN.format('a batch without the marks of the plan'))
  count = tf.shape(tf.nest.flatten(weights)[0], tf.int64)[0]
  least, most = tf.constant(tf.int64.max), tf.constant(tf.int64.min)
  for weight in tf.nest.flatten(weights):
    rows = marks.row_of(marks.read(tf.bitcast(weight, tf.int64)), plan, tf.cast(step, tf.int64))
    here = tf.range(tf.shape(rows, tf.int64)[0])
    skipped = rows - tf.reshape(here, [-1] + [1] * (rows.shape.rank - 1))
    used = weight != 0
    least = tf.minimum(least, tf.reduce_min(tf.where(used, skipped, tf.int64.max)))
    most = tf.maximum(most, tf.reduce_max(tf.where(used, skipped, tf.int64.min)))
  drawn = workers.in_place(
      compat.gather_replicas(tf.stack([count, least, most])), compat.has_workers())
  return drawn, tf.debugging.assert_equal(drawn, True, message=_DRAWN.format(
      'a batch of another step or plan, used before, with rows repeated, moved or left out, or '
      'of other coins than those of another worker'))


def check_size(
    optimizer: optimizer_lib.DPOptimizer, size: tf.Tensor, static: Optional[int],
    exact: bool = True) -> List[Any]:
  """Assertions that a batch has the declared size, where sizes are fixed.

  Args:
    optimizer: A `DPOptimizer`.
    size: [] number of examples of this replica's part.
    static: The same, where it is known without running.
    exact: Whether fewer examples are wrong, too: rows of weight zero are no records.
  """
  if optimizer.adjacency == 'add_remove' or optimizer.own_sampler is not None:
    return []
  message = (
      f'Batches must have exactly batch_size={optimizer.batch_size} examples under '
      f'{optimizer.adjacency} adjacency. Received: {{}} examples. Drop the remainder, feed '
      "`plan.batches(data)`, or use Poisson sampling with adjacency='add_remove'.")
  if static is not None and not compat.has_replicas():
    if static != optimizer.batch_size:
      raise errors.PrivacyError(message.format(static))
    return []
  check = tf.debugging.assert_equal if exact else tf.debugging.assert_less_equal
  return [check(compat.sum_over_replicas(tf.cast(size, tf.float32)), float(optimizer.batch_size),
                message=message.format('other' if exact else 'more'))]


def check_fit(optimizer: optimizer_lib.DPOptimizer, x: Any, y: Any, kwargs: Dict[str, Any]) -> Any:
  """Refuses data whose sampling is not what the plan accounts for, before anything is read.

  Returns:
    `x`, or its batches from the step on that comes next.
  """
  plan = optimizer.plan
  optimizer.run.refuse_foreign()
  if plan is not None and optimizer.own_sampler is None:
    if getattr(x, 'tfdp_plan', None) != plan:
      raise errors.PrivacyError(
          'The optimizer has a plan, so the batches must come from it: the sampling that is '
          f'accounted for is {plan.sampling}. Received: x of type {type(x).__name__}. '
          'Use `model.fit(plan.batches((x, y)))` (without map, batch or shuffle after it); or '
          "`own_sampler='how records were chosen'`, which the statement repeats.")
    if not plan.sampling.coins and x.tfdp_start_step != optimizer.steps_done:
      raise errors.PrivacyError(
          f'{plan.sampling} must go on where the last `fit` stopped: from its start, records would '
          'take part sooner than they are accounted for. Use '
          f'`plan.batches(data, start_step={optimizer.steps_done})`. '
          f'Received: start_step={x.tfdp_start_step}.')
    if kwargs.get('validation_split'):
      raise errors.PrivacyError('`validation_split` changes the population after the plan was '
                                'made. Split first, then pass `validation_data`.')
    weigh = kwargs.pop('class_weight', None)  # Keras cannot combine it with the plan's weights.
    if weigh is not None:
      optimizer.run.note('The loss was weighted by `class_weight`. If these numbers were computed '
                         'from private labels, no epsilon covers them.')
    epochs = kwargs.get('epochs', 1) - kwargs.get('initial_epoch', 0)
    wanted = epochs * (kwargs.get('steps_per_epoch') or int(x.cardinality()))
    left = plan.steps - optimizer.steps_done
    if wanted > left:
      raise errors.PrivacyError(
          f'The plan covers {plan.steps} steps, of which {optimizer.steps_done} are done. '
          f'Received: {wanted} more ({epochs} epochs). Use epochs * steps_per_epoch within the '
          'plan, '
          + (f'such as steps_per_epoch={left // epochs}, ' if 0 < epochs <= left else '')
          + 'or plan more steps.')
    optimizer.run.same_records(x.tfdp_records(), x.tfdp_coins.in_file)
    restores = compat.keras.callbacks.BackupAndRestore
    if any(isinstance(one, restores) for one in tf.nest.flatten(kwargs.get('callbacks') or [])):
      return x.tfdp_from(lambda: optimizer.steps_done, weigh)  # It restores after this.
    if weigh is not None or x.tfdp_start_step != optimizer.steps_done:
      # Coins are drawn again, for the steps left.
      return x.tfdp_from(optimizer.steps_done, weigh)
  elif plan is None and y is not None and hasattr(x, 'shape') and (
      optimizer.adjacency != 'add_remove'):
    batch = kwargs.get('batch_size') or 32
    if batch != optimizer.batch_size:
      raise errors.PrivacyError(
          f'The optimizer divides by batch_size={optimizer.batch_size}. '
          f'Received: fit(batch_size={batch}). Make them equal.')
    count = int(x.shape[0] * (1 - (kwargs.get('validation_split') or 0)))
    if count % batch:
      raise errors.PrivacyError(
          f'The last batch of an epoch would have {count % batch} of {batch} examples. '
          f'Received: {count} examples. Drop the remainder, or use `plan.batches`.')
  return x
