# SPDX-License-Identifier: Apache-2.0
"""Checks the arguments of `compile` and `fit`, and the batches of a step.

Arguments are taken as Keras takes them, or refused in one sentence. A step takes batches that its
plan drew for it, or batches of the declared size. The batches of a plan go to Keras, or over the
replicas of a `tf.distribute` strategy.
"""

import functools
import inspect
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple
import warnings

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import errors
from tfdp_adaptive import noise as noise_lib
from tfdp_adaptive import trees
from tfdp_adaptive.batches import batches as batches_lib
from tfdp_adaptive.batches import sources
from tfdp_adaptive.batches import tags
from tfdp_adaptive.batches import workers
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.independence import captured
from tfdp_adaptive.keras import optimizer as optimizer_lib
from tfdp_adaptive.keras import same_records
from tfdp_adaptive.privacy import plan as plan_lib

_DRAWN = (
    'The optimizer has a plan, so a step takes the batch that `plan.batches(data)` drew for it, '
    'as it came: `fit(plan.batches(data))`, or each `(x, y, sample_weight)` of it in its order, '
    'from `start_step=optimizer.steps_done` on. Received: {}. If the sampling is your own, say so: '
    "`own_sampler='how records were chosen'`; the statement then says it too.")


def unpack(data: Any, plan: Any = None,
           outputs: Any = None) -> Tuple[interface.Batch, Any, int]:
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
  # Eager steps of `train_on_batch` get arrays from Keras 3.
  data = tf.nest.map_structure(
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


def _used(weights: Any, axes: int = 1) -> tf.Tensor:
  """Along the first axes: whether any weight is not zero."""
  return functools.reduce(tf.logical_or, [
      tf.reduce_any(tf.not_equal(weight, 0), list(range(axes, weight.shape.rank)))
      for weight in tf.nest.flatten(weights)])


def admit(
    optimizer: optimizer_lib.DPOptimizer, batch: interface.Batch, tag: Any,
    noise: noise_lib.State) -> Tuple[interface.Batch, noise_lib.State]:
  """The batch, if it is one that this step may take.

  Assertions vanish under XLA: there, what may not be taken is taken as empty.

  Args:
    optimizer: A `DPOptimizer`.
    batch: As `unpack` returns it.
    tag: The tags of its rows, or None.
    noise: The noise's state before the step, whose row counts the steps done so far.

  Returns:
    Batch and noise again. All that the step writes depends on the noise, hence on the check: where
    that fails, nothing was written.
  """
  if optimizer.plan is not None and optimizer.own_sampler is None:
    if batch.y is None:
      raise errors.PrivacyError(
          'A model is trained on inputs and targets: `plan.batches((x, y))`. Received: batches '
          'without targets, as of `plan.batches(x)`.')
    drawn, *checks = _is_drawn(optimizer.plan, tag, batch.mask, noise.row)
    mask = batch.mask & drawn
  elif optimizer.plan is not None:  # The caller's word, whatever sizes it means.
    checks, mask = [], batch.mask
  else:
    size = tf.reduce_sum(tf.cast(batch.mask, tf.float32))
    exact = trees.absent(batch.sample_weight)
    checks = check_size(optimizer, size, batch.mask.shape[0] if exact else None, exact)
    mask = batch.mask
  with tf.control_dependencies([check for check in checks if check is not None]):
    mask, key, row = (tf.identity(t) for t in (mask, noise.key, noise.row))
  return batch._replace(mask=mask), noise._replace(key=key, row=row)


def _is_drawn(plan: plan_lib.PrivacyPlan, tag: Any, used: tf.Tensor,
              step: tf.Tensor) -> Tuple[tf.Tensor, Any]:
  """`([] bool, assertion)`: whether all used rows have the tags of this step and their place."""
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
  size = compat.sum_over_replicas(tf.cast(size, tf.float32))
  fits = size == optimizer.batch_size if exact else size <= optimizer.batch_size
  return [trees.insist(fits, message.format('other' if exact else 'more'), size)]


def check_fit(optimizer: Any, x: Any, y: Any, kwargs: Dict[str, Any], tight: bool = False) -> Any:
  """Refuses data that is not sampled as accounted for, before reading it.

  Returns:
    `x`, or its batches from the step on that comes next, with the fewest padding rows if `tight`.
  """
  plan = optimizer.plan
  optimizer.run.refuse_foreign()
  if plan is not None and optimizer.own_sampler is None:
    if not isinstance(x, batches_lib.Batches):
      raise errors.PrivacyError(
          batches_lib.NOT_OF_THE_PLAN.format(f'x of type {type(x).__name__}'))
    x.check(plan, optimizer.steps_done, kwargs.get('steps_per_epoch') or x.steps,
            kwargs.get('epochs', 1) - kwargs.get('initial_epoch', 0))
    if kwargs.get('validation_split'):
      raise errors.PrivacyError('`validation_split` changes the population after the plan was '
                                'made. Split first, then pass `validation_data`.')
    weigh = kwargs.pop('class_weight', None)  # Keras cannot combine it with the plan's weights.
    if weigh is not None:
      optimizer.run.note('The loss was weighted by `class_weight`. If these numbers were computed '
                         'from private labels, no epsilon covers them.')
    same_records.check(optimizer.run, x.digest, x.seed.in_file)
    restores = any(isinstance(one, compat.keras.callbacks.BackupAndRestore)
                   for one in tf.nest.flatten(kwargs.get('callbacks') or []))
    return x.resumed((lambda: optimizer.steps_done) if restores else optimizer.steps_done,
                     weigh, tight)
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


def by_name(function: Callable[..., Any], skip: int, args: Sequence[Any],
            kwargs: Dict[str, Any]) -> Dict[str, Any]:
  """Returns positional arguments as keyword arguments, in the order of this Keras.

  Args:
    function: A method of `keras.Model`.
    skip: How many of its parameters, `self` included, were taken before `args`.
    args: By position.
    kwargs: By name.
  """
  names = list(inspect.signature(function).parameters)[skip:]
  if len(args) > len(names):
    raise TypeError(f'`{function.__name__}` takes at most {skip - 1 + len(names)} arguments. '
                    f'Received: {skip - 1 + len(args)}.')
  placed = dict(zip(names, args))
  twice = sorted(set(placed) & set(kwargs))
  if twice:
    raise TypeError(f'`{function.__name__}` was given {twice} by position and by name.')
  return {**kwargs, **placed}


def loss_weights(value: Any) -> Any:
  """As they are, if they are numbers: in Keras 3 metrics stand in another place."""
  for weight in tf.nest.flatten(value):
    if isinstance(weight, str) or callable(weight):
      raise ValueError(
          '`loss_weights` must be numbers, one per output. Received: '
          f'{value!r}. In Keras 3 they come after `loss` by position; pass `metrics=` by name.')
  return value


def refuse_ragged(*data: Any) -> None:
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


def warn_of_padding(model: Any, metrics: Any) -> None:
  """Warns of custom metrics without `sample_weight`, which see a plan's padding."""
  names = [type(metric).__name__ for metric in tf.nest.flatten(metrics)
           if isinstance(metric, compat.keras.metrics.Metric) and captured.is_own(metric)]
  names += ['compute_metrics'] * compat.overrides(model, 'compute_metrics')
  if names:
    warnings.warn(
        f'{", ".join(names)}: under a plan, batches are padded with empty rows, whose '
        '`sample_weight` is zero. A metric that does not read it counts them, so what it reports '
        'is wrong. Multiply by the weights, and divide by their sum.', errors.Caution, stacklevel=3)


def with_shapes(model: Any, data: Any) -> Any:
  """Returns a batch whose axes have the lengths that the model's inputs tell."""
  refuse_ragged(data)
  x, y, weight = compat.keras.utils.unpack_x_y_sample_weight(data)
  leaves = tf.nest.flatten(x)
  inputs = list(getattr(model, 'inputs', None) or ()) if model.built else []
  named = isinstance(x, dict) and not isinstance(compat.input_structure(model), dict)
  if len(leaves) != len(inputs) or named:  # By name, they come in another order than the inputs.
    return data
  leaves = [tf.ensure_shape(t, [None, *one.shape[1:]]) if tf.is_tensor(t) and (
      t.shape.rank is None or None in t.shape[1:] and t.shape.rank == len(one.shape)) else t
            for t, one in zip(leaves, inputs)]
  return compat.keras.utils.pack_x_y_sample_weight(tf.nest.pack_sequence_as(x, leaves), y, weight)


# Replicas.

_TRIED = (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy,
          tf.distribute.OneDeviceStrategy)
# Optimizer attributes that set the sensitivity and the number of releases; equal on all workers.
_DECIDE = ('l2_norm_clip', 'noise_multiplier', 'batch_size', 'adjacency', 'clipping',
           'own_sampler')


def check_strategy(strategy: Any, variables: Sequence[Any] = ()) -> None:
  """Refuses strategies under which private steps have not been tested.

  Args:
    strategy: The `tf.distribute.Strategy` of a model, or of a step.
    variables: The model's.

  Raises:
    PrivacyError: For a strategy that was not tried, variables that are not spread by it, or a
      distribution of Keras 3.
  """
  if compat.is_strategy(strategy) and not isinstance(strategy, _TRIED):
    why = ('Its workers take steps at different times, on one state of the noise'
           if 'ParameterServer' in type(strategy).__name__ else
           'Private steps were not tried under it')
    raise errors.PrivacyError(
        f'{why}. Received: {type(strategy).__name__}. Use tf.distribute.MirroredStrategy for the '
        'devices of one machine, or tf.distribute.MultiWorkerMirroredStrategy for several.')
  if strategy.num_replicas_in_sync > 1 and not all(
      strategy.extended.variable_created_in_scope(compat.raw_variable(v)) for v in variables):
    raise errors.PrivacyError(
        'A model trains on the replicas of a strategy if they all have its weights. Received: a '
        'model that was made elsewhere. Make, compile and load it under `with strategy.scope():`.')
  if compat.keras_distribution() is not None:
    raise errors.PrivacyError(
        'A distribution of Keras trains on one device with the TensorFlow backend, and says '
        f'nothing of it. Received: {type(compat.keras_distribution()).__name__}. Take it back by '
        '`keras.distribution.set_distribution(None)`, and use tf.distribute.MirroredStrategy or '
        'MultiWorkerMirroredStrategy.')


def fed(model: compat.Model, x: Any, kwargs: Dict[str, Any]) -> Any:
  """Returns the data to pass to Keras for batches `x` of a plan; other data unchanged.

  Args:
    model: A `DPModel`.
    x: What `fit` was given.
    kwargs: Other arguments of `fit`; steps and callbacks are added to them.
  """
  strategy = model.distribute_strategy
  if strategy.num_replicas_in_sync == 1:
    return x
  callbacks = [one for one in tf.nest.flatten(kwargs.get('callbacks')) if one is not None]
  backup = compat.keras.callbacks.BackupAndRestore
  if not compat.BACKUPS_KNOW_WORKERS and compat.has_workers(strategy) and any(
      type(one) is backup for one in callbacks):
    raise errors.PrivacyError(
        'A backup must be written by one worker, or steps are lost or taken twice. Received: '
        '`keras.callbacks.BackupAndRestore`, which every worker would write. Use '
        '`tfdp.callbacks.BackupAndRestore`.')
  optimizer = model.optimizer
  if compat.has_workers(strategy):
    settings = {name: getattr(optimizer, name) for name in _DECIDE}
    workers.agree(
        strategy, optimizer=repr((type(optimizer).__name__, optimizer.rule.name, settings)),
        fit=repr([kwargs.get(name) for name in ('epochs', 'initial_epoch', 'steps_per_epoch')]),
        backups=repr([isinstance(one, backup) for one in callbacks].count(True)))
  if not isinstance(x, batches_lib.Batches):
    kwargs['callbacks'] = [*callbacks, _Begin()]
    return x
  distributed = workers.Distributed(strategy, x)
  # Data on replicas do not tell how many there are.
  kwargs['steps_per_epoch'] = kwargs.get('steps_per_epoch') or x.steps
  kwargs['callbacks'] = [*callbacks, _Begin(distributed)]
  return distributed.batches


class _Begin(compat.keras.callbacks.Callback):
  """Lets all workers begin together, when a backup was restored and no batch was read."""

  def __init__(self, distributed: Optional[workers.Distributed] = None) -> None:
    super().__init__()
    self._distributed = distributed

  def on_train_begin(self, logs: Any = None) -> None:
    optimizer, strategy = self.model.optimizer, self.model.distribute_strategy
    if self._distributed is not None:
      self._distributed.begin(optimizer.steps_done)
    if not compat.has_workers(strategy):
      return
    state = [*self.model.trainable_variables]
    if optimizer.run.state is not None:
      state += tf.nest.flatten(optimizer.rule_state)
    workers.agree(strategy, steps_done=repr(optimizer.steps_done), weights=sources.fingerprint(
        tuple(compat.read(v) for v in state)))
