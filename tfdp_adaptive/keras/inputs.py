# SPDX-License-Identifier: Apache-2.0
"""What users hand to `compile` and `fit`: taken as Keras takes it, or refused in one sentence.

The batches of a plan go to Keras without their padding where steps are traced for any size, and
over the replicas of a `tf.distribute` strategy, in one process or several: all workers begin a
`fit` alike, with the same weights, steps and records, and with the coins that the chief drew.
"""

import dis
import functools
import inspect
import itertools
import math
from typing import Any, Callable, Dict, Optional, Sequence, Tuple
import warnings

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import errors
from tfdp_adaptive.batches import sources
from tfdp_adaptive.batches import workers

Shapes = Optional[Callable[[], Any]]  # Of a nest; hidden from Keras, which tracks attributes.


def by_name(function: Callable[..., Any], skip: int, args: Sequence[Any],
            kwargs: Dict[str, Any]) -> Dict[str, Any]:
  """Keyword arguments for what was given by position, in the order of this Keras.

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


def refuse_changed(model: Any) -> None:
  """Raises `PrivacyError` where Keras would train what is frozen now, or leave out what is not."""
  changed = compat.changed_since_compile(model)
  if changed:
    raise errors.PrivacyError(
        'Keras 2 trains what was trainable when the model was compiled. Received: layers '
        f'{changed}, frozen or thawed since. Compile again, with a new optimizer (and plan) if '
        'this one has taken steps: what was spent stays in `model.ledger`.')


def on_host(optimizer: Any, kwargs: Dict[str, Any]) -> Dict[str, Any]:
  """`compile`'s arguments, without XLA where noise comes from the operating system."""
  mechanism = getattr(optimizer, 'mechanism', None)
  if getattr(mechanism, 'rounding', None) is None:
    return kwargs
  if kwargs.get('jit_compile') not in (None, False, 'auto'):
    raise ValueError('Noise of the operating system is drawn in Python, which XLA cannot compile. '
                     f'Received: jit_compile={kwargs["jit_compile"]} with {mechanism!r}. Use '
                     'jit_compile=False, or IndependentGaussian() without `rounding`.')
  return {**kwargs, 'jit_compile': False}


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
  """Warns of metrics of one's own that take no notice of weights, which tell what is padding."""
  names = [type(metric).__name__ for metric in tf.nest.flatten(metrics)
           if _ignores_weights(getattr(type(metric), 'update_state', None))]
  if compat.overrides(model, 'compute_metrics') and _ignores_weights(type(model).compute_metrics):
    names.append('compute_metrics')
  if names:
    warnings.warn(
        f'{", ".join(names)}: under a plan batches are padded with empty rows, which metrics count '
        'unless they read `sample_weight`, zero for padding. These do not, so what they say is '
        'wrong. Multiply by the weights, and divide by their sum.',
        errors.Caution, stacklevel=3)


def _ignores_weights(function: Any) -> bool:
  """Whether a function has an argument `sample_weight` that it never reads.

  A signature does not tell, and the padding cannot be left out instead: XLA, which Keras 3 uses on
  a GPU, wants batches of one size. So the instructions of the function are looked at.
  """
  code = getattr(inspect.unwrap(function), '__code__', None) if callable(function) else None
  if code is None or 'sample_weight' not in code.co_varnames[:code.co_argcount
                                                              + code.co_kwonlyargcount]:
    return False
  return not any(
      'sample_weight' in (one.argval if isinstance(one.argval, tuple) else (one.argval,))
      for one in dis.get_instructions(code) if 'LOAD' in one.opname or 'CELL' in one.opname)


def first_shapes(x: Any) -> Tuple[Any, Shapes]:
  """`(x, shapes)` of batches from a generator or Sequence, of which Keras 2 tells ranks only."""
  if compat.TELLS_SHAPES or isinstance(x, tf.data.Dataset) or hasattr(x, 'element_spec'):
    return x, None
  if isinstance(x, compat.keras.utils.Sequence):
    first = x[0]
  elif hasattr(x, '__next__'):
    first = next(x, None)
    if first is None:
      return x, None
    x = itertools.chain([first], x)
  else:
    return x, None
  if not all(hasattr(leaf, 'shape') for leaf in tf.nest.flatten(first)):
    return x, None
  shapes = tf.nest.map_structure(lambda t: tf.TensorShape([None, *t.shape[1:]]), first)
  return x, lambda: shapes


def with_shapes(model: Any, data: Any) -> Any:
  """Batches whose axes have the lengths that the model's inputs, or the first batch, say."""
  refuse_ragged(data)
  x, y, weight = compat.keras.utils.unpack_x_y_sample_weight(data)
  unknown = [t for t in tf.nest.flatten(x) if tf.is_tensor(t) and (
      t.shape.rank is None or None in t.shape[1:])]
  inputs = getattr(model, 'inputs', None) if model.built else None
  get_shapes = getattr(model, '_first_shapes', None)
  if not unknown or not inputs and get_shapes is None:
    return data
  if inputs and isinstance(x, dict) and not isinstance(compat.input_structure(model), dict):
    return data  # By the inputs' names, in another order than theirs.
  shapes = None if get_shapes is None else get_shapes()
  if inputs:
    known = [t.shape for t in inputs]
  else:
    known = tf.nest.flatten(shapes[0] if isinstance(shapes, tuple) else shapes)
  leaves = tf.nest.flatten(x)
  if len(leaves) != len(known):
    return data
  leaves = [tf.ensure_shape(t, [None, *shape[1:]]) if shape.rank is not None and (
      t.shape.rank in (None, shape.rank)) else t for t, shape in zip(leaves, known)]
  x = tf.nest.pack_sequence_as(x, leaves)
  if isinstance(shapes, tuple) and len(shapes) > 1 and y is not None:
    y = tf.nest.map_structure(_column, y, shapes[1])
  return compat.keras.utils.pack_x_y_sample_weight(x, y, weight)


def _column(target: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
  """Targets of shape [n, 1] are classes or numbers, where [n, k] are not."""
  if shape.rank and shape.rank > 1 and shape[-1] == 1 and target.shape.rank in (None, shape.rank):
    return tf.ensure_shape(target, [None] * (shape.rank - 1) + [1])
  return target


# The batches of a plan, without their padding.

# Of an expected batch: rows are left out in multiples of a part. What convolutions prepare for
# every size of batch they then find again; the rows that stay are 1.6% on average.
_PARTS = 32


def cropped(model: Any, x: Any) -> Any:
  """`x` without most empty rows at the end of its batches; what is no plan's is left as it is.

  So is what XLA compiles for each size anew, eager steps examine for each, or replicas share.
  The rows that stay depend on the number of records drawn alone.
  """
  plan = getattr(x, 'tfdp_plan', None)
  if plan is None or model.jit_compile or model.run_eagerly or (
      model.distribute_strategy.num_replicas_in_sync > 1):
    return x
  rows = tf.nest.flatten(x.element_spec)[-1].shape[0]
  if rows is not None and rows <= plan.batch_size:
    return x
  return x.map(functools.partial(_crop, math.ceil(plan.batch_size / _PARTS)))


@tf.autograph.experimental.do_not_convert
def _crop(multiple: int, *batch: Any) -> Any:
  used = tf.zeros([], tf.bool)
  for weight in tf.nest.flatten(batch[-1]):
    used |= tf.reduce_any(tf.not_equal(weight, 0), list(range(1, weight.shape.rank)))
  rows = tf.range(1, tf.shape(used)[0] + 1)
  count = tf.maximum(1, tf.reduce_max(tf.where(used, rows, 0)))
  count = -(-count // multiple) * multiple  # Slices end where their tensor does.
  return tf.nest.map_structure(lambda t: None if t is None else t[:count], batch)


# Replicas.

_TRIED = (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy,
          tf.distribute.OneDeviceStrategy)
# Of an optimizer: what decides by how much one record moves a sum, and how many sums there are.
_DECIDE = ('l2_norm_clip', 'noise_multiplier', 'batch_size', 'adjacency', 'clipping',
           'own_sampler')


def check_strategy(strategy: Any, variables: Sequence[Any] = ()) -> None:
  """Refuses what spreads a model in a way of which nobody knows that its steps are private.

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
  """What Keras is to be given for batches `x` of a plan; other data are left as they are.

  Args:
    model: A `DPModel`.
    x: What `fit` was given.
    kwargs: Other arguments of `fit`; steps and callbacks are added to them.
  """
  strategy = model.distribute_strategy
  plan = getattr(x, 'tfdp_plan', None)
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
  if plan is None:
    kwargs['callbacks'] = [*callbacks, _Begin()]
    return x
  distributed = workers.Distributed(strategy, x)
  # Data on replicas do not tell how many there are.
  kwargs['steps_per_epoch'] = kwargs.get('steps_per_epoch') or (
      plan.steps - optimizer.steps_done)
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
