# SPDX-License-Identifier: Apache-2.0
"""Checks the arguments of `compile` and `fit`, and prepares the data that Keras' `fit` gets.

Arguments are taken as Keras takes them, or refused in one sentence. The batches of a plan go to
Keras, or over the replicas of a `tf.distribute` strategy.
"""

import contextlib
import inspect
import json
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import errors
from tfdp_adaptive import trees
from tfdp_adaptive.batches import batches as batches_lib
from tfdp_adaptive.batches import sources
from tfdp_adaptive.batches import workers
from tfdp_adaptive.independence import disclosures
from tfdp_adaptive.keras import callbacks as callbacks_lib
from tfdp_adaptive.keras import optimizer as optimizer_lib
from tfdp_adaptive.keras import step


@contextlib.contextmanager
def training(model: compat.Model, x: trees.Tree, y: trees.Tree,
             kwargs: Dict[str, Any]) -> Iterator[Any]:
  """Yields the data to pass to Keras' `fit`, and notes in the statement how training ended.

  Args:
    model: A compiled `DPModel`.
    x: Inputs, or the batches of a plan.
    y: Targets.
    kwargs: Other arguments of `fit`, which are changed into those for Keras.
  """
  drawn = isinstance(x, batches_lib.Batches)
  if not drawn:  # They are dense, and are not made yet.
    step.refuse_ragged(x, y)
  check_strategy(model.distribute_strategy, model.trainable_variables if model.built else ())
  model.build_optimizer()  # A checkpoint may have been restored, which knows the steps done.
  replicas = model.distribute_strategy.num_replicas_in_sync
  # XLA compiles for each size anew, eager steps examine the model for each, replicas share rows.
  x = check_fit(model.optimizer, x, y, kwargs, tight=not (
      model.jit_compile or model.run_eagerly or replicas > 1))
  run = model.optimizer.run
  if drawn:
    run.reads(x.records.source.entries)
  if isinstance(x, tf.data.Dataset) or hasattr(x, '__next__'):
    kwargs['shuffle'] = False  # It is as it comes; Keras 3 would warn of it.
  kwargs['callbacks'] = callbacks_lib.with_divergence_check(kwargs.get('callbacks'))
  specs = model.batch_kinds.specs = x.specs if drawn else getattr(x, 'element_spec', None)
  if replicas > 1:
    known = compat.input_specs(model) is not None
    model.validate_for_replicas(None if known else _specs(x, specs))
  notes = _notes(model.distribute_strategy, x) if drawn else []
  callbacks_lib.before_fit(model, kwargs['callbacks'], notes)
  prepared = model.prepare_data(fed(model, x, kwargs), y, kwargs)
  try:
    with errors.unwrapped(tf.errors.OpError):
      yield prepared
  except KeyboardInterrupt:
    run.note(f'Training was interrupted after {run.steps} steps. If numbers of this run decided '
             'that, the epsilon of all planned steps holds.')
    raise
  finally:
    found = x.records.source.notes() if drawn else []
    callbacks_lib.after_fit(model, kwargs['callbacks'], found)


def _notes(strategy: tf.distribute.Strategy, drawn: batches_lib.Batches) -> List[str]:
  """Returns sentences about batches, on all workers those of the chief, which draws them."""
  if not compat.has_workers(strategy):
    return drawn.notes()
  return json.loads(workers.from_chief(strategy, lambda: json.dumps(drawn.notes()).encode()))


def check_fit(optimizer: optimizer_lib.DPOptimizer, x: trees.Tree, y: trees.Tree,
              kwargs: Dict[str, Any], tight: bool = False) -> Any:
  """Refuses data that is not sampled as accounted for, before reading it.

  Returns:
    `x`, or its batches from the step on that comes next, with the fewest padding rows if `tight`.
  """
  plan = optimizer.plan
  optimizer.run.earlier.refuse_foreign()
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
    batches_lib.check_order(optimizer.run, x.digest, x.seed.in_file)
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

  Raises:
    TypeError: If there are too many, or one of them twice.
  """
  signature = inspect.signature(function)
  known = {name: kwargs[name] for name in kwargs if name in signature.parameters}
  placed = signature.bind_partial(*[None] * skip, *args, **known).arguments
  return {**kwargs, **dict([*placed.items()][skip:])}


def loss_weights(value: trees.Tree) -> Any:
  """Returns loss weights, which must be numbers. By position, Keras 2 has `metrics` there."""
  for weight in tf.nest.flatten(value):
    if isinstance(weight, str) or callable(weight):
      raise ValueError(
          '`loss_weights` must be numbers, one per output. Received: '
          f'{value!r}. In Keras 3 they come after `loss` by position; pass `metrics=` by name.')
  return value


def warn_of_padding(model: compat.Model, metrics: trees.Tree) -> None:
  """Warns of custom metrics without `sample_weight`, which see a plan's padding."""
  names = [type(metric).__name__ for metric in tf.nest.flatten(metrics)
           if isinstance(metric, compat.keras.metrics.Metric) and disclosures.is_own(metric)]
  names += ['compute_metrics'] * compat.overrides(model, 'compute_metrics')
  if names:
    errors.caution(
        f'{", ".join(names)}: under a plan, batches are padded with empty rows, whose '
        '`sample_weight` is zero. A metric that does not read it counts them, so what it reports '
        'is wrong. Multiply by the weights, and divide by their sum.')


# Replicas.

_TRIED = (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy,
          tf.distribute.OneDeviceStrategy)
# Optimizer attributes that set the sensitivity and the number of releases; equal on all workers.
_DECIDE = ('l2_norm_clip', 'noise_multiplier', 'batch_size', 'adjacency', 'clipping',
           'own_sampler')


def check_strategy(strategy: tf.distribute.Strategy, variables: Sequence[Any] = ()) -> None:
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


def fed(model: compat.Model, x: trees.Tree, kwargs: Dict[str, Any]) -> Any:
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
  # Keras cannot tell the number of batches of data on replicas.
  kwargs['steps_per_epoch'] = kwargs.get('steps_per_epoch') or x.steps
  kwargs['callbacks'] = [*callbacks, _Begin(distributed)]
  return distributed.batches


class _Begin(compat.keras.callbacks.Callback):
  """Lets all workers begin together, when a backup was restored and no batch was read."""

  def __init__(self, distributed: Optional[workers.Distributed] = None) -> None:
    super().__init__()
    self._distributed = distributed

  def on_train_begin(self, logs: Optional[Dict[str, Any]] = None) -> None:
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


def _specs(x: trees.Tree, specs: trees.Tree) -> Any:
  """Returns the specs of one batch of inputs, from `x` or the known specs of its batches."""
  if specs is not None:
    return specs[0] if isinstance(specs, tuple) else specs
  if x is None or not all(hasattr(t, 'shape') for t in tf.nest.flatten(x)):
    raise errors.PrivacyError(
        'With several replicas the model is validated before `fit` begins, but neither the model '
        f'nor the data tell the inputs. Received: x of type {type(x).__name__}. Give the model an '
        '`Input`, or pass a `tf.data.Dataset` or arrays.')
  return tf.nest.map_structure(lambda t: tf.TensorSpec(
      t.shape, compat.keras.backend.floatx() if tf.as_dtype(t.dtype).is_floating else t.dtype), x)
