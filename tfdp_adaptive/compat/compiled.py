# SPDX-License-Identifier: Apache-2.0
"""Losses, metrics and optimizers that were given to `compile`, in either Keras."""

from concurrent import futures
import contextlib
import functools
import importlib
import operator
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import tensorflow as tf

from tfdp_adaptive.compat import model as models
from tfdp_adaptive.compat import stack
from tfdp_adaptive.compat import strategy


def has_own_call(loss: stack.Loss) -> bool:
  """Returns whether a loss object overrides how Keras reduces batches."""
  own = stack.keras.losses.Loss
  return isinstance(loss, own) and type(loss).__call__ is not own.__call__


def named_loss(name: str, target: Any = None, output: Any = None) -> stack.Loss:
  """Returns Keras' loss of a name.

  Keras 3 chooses the cross entropy by the shapes of targets and outputs: without them the name of
  such a loss is returned.
  """
  if not stack.KERAS_3 or name.lower() not in ('crossentropy', 'ce'):
    return stack.keras.losses.get(name)
  if output is None:
    return name
  lib: Any = importlib.import_module(f'{stack.PRIVATE}.trainers.compile_utils')
  return lib.get_loss(name, target, output).fn


def loss_of_batch(
    loss: stack.Loss, target: tf.Tensor, output: tf.Tensor,
    sample_weight: Optional[tf.Tensor] = None) -> tf.Tensor:
  """Returns the loss of a batch as Keras computes it."""
  if not stack.KERAS_3:
    loss._allow_sum_over_batch_size = True  # `compile` sets it, for strategies.
  kwargs = {} if sample_weight is None else {'sample_weight': sample_weight}
  return loss(target, output, **kwargs)


def compiled_loss(
    loss: stack.Tree, loss_weights: stack.Tree,
    names: Optional[List[str]]) -> Callable[..., tf.Tensor]:
  """Returns Keras' own loss of a batch, `(y, outputs, sample_weight) -> scalar`."""
  if stack.KERAS_3:
    lib: Any = importlib.import_module(f'{stack.PRIVATE}.trainers.compile_utils')
    return lib.CompileLoss(loss, loss_weights, output_names=names)
  lib = importlib.import_module(f'{stack.PRIVATE}.engine.compile_utils')
  return lib.LossesContainer(loss, loss_weights, output_names=names)


def nested_losses(
    loss: stack.Tree, loss_weights: stack.Tree, names: List[str], y: stack.Tree,
    outputs: stack.Tree) -> List[Tuple[stack.Loss, Any, Callable[[stack.Tree], Any]]]:
  """Returns `(loss, weight, outputs -> its outputs)` of each loss in a structure of losses."""
  def build() -> Any:
    compiled: Any = compiled_loss(loss, loss_weights, names or None)
    compiled.build(*[y] * stack.KERAS_3, outputs)
    return compiled

  with futures.ThreadPoolExecutor(1) as thread:  # Traces may not make the variables of metrics.
    compiled = thread.submit(build).result()
  if stack.KERAS_3:
    return [(one.loss, one.loss_weights,
             functools.partial(functools.reduce, operator.getitem, one.path))
            for one in compiled._flat_losses]
  return [(one, weight, functools.partial(_leaf, place))
          for place, (one, weight) in enumerate(zip(compiled._losses, compiled._loss_weights))
          if one is not None]


def _leaf(place: int, tree: stack.Tree) -> Any:
  return tf.nest.flatten(tree)[place]


def output_loss_trackers(
    model: stack.Model, y: stack.Tree, outputs: stack.Tree) -> Dict[str, stack.Metric]:
  """Returns the metrics that `fit` shows as the losses of several outputs, by output name."""
  with tf.init_scope():
    if stack.KERAS_3:
      compiled = model._compile_loss
      if not compiled.built:
        with contextlib.suppress(TypeError, ValueError):  # A flat tuple is in the outputs' order.
          y = tf.nest.pack_sequence_as(outputs, tf.nest.flatten(y))
        compiled.build(y, outputs)
      found = compiled.metrics
    else:
      if not model.compiled_loss.built:
        model.compiled_loss.build(outputs)
      found = [metric for metric in model.compiled_loss._per_output_metrics if metric is not None]
  return {metric.name[:-len('_loss')]: metric for metric in found}


@contextlib.contextmanager
def counting(
    model: stack.Model, y: stack.Tree, outputs: stack.Tree, weights: stack.Tree) -> Iterator[None]:
  """Gives other weights to the unweighted metrics of `compile`, in the structure of outputs."""
  compiled = model._compile_metrics if stack.KERAS_3 else model.compiled_metrics
  if compiled is None or weights is None:
    yield
    return
  if stack.KERAS_3 and not compiled.built:
    compiled.build(y, outputs)
  if not stack.KERAS_3 and not compiled._built:
    compiled.build(outputs, y)
  unweighted = compiled._flat_metrics if stack.KERAS_3 else compiled._metrics
  of_outputs = compiled._flatten_y(weights) if stack.KERAS_3 else tf.nest.flatten(weights)
  with contextlib.ExitStack() as swapped:
    for some, weight in zip(unweighted, of_outputs):
      for metric in tf.nest.flatten(some):
        if metric is not None:
          swapped.enter_context(models.swapped(metric, update_state=(
              lambda y, p, sample_weight=None, own=metric.update_state, weight=weight: own(
                  y, p, sample_weight=weight))))
    yield


def init_optimizer(
    optimizer: stack.Optimizer, learning_rate: object, name: str, **kwargs: object) -> None:
  """Calls the base class constructor; learning rate schedules work on both."""
  kwargs.setdefault('weight_decay', None)  # Keras 2 would subtract zeros.
  if stack.KERAS_3:
    stack.keras.optimizers.Optimizer.__init__(
        optimizer, learning_rate=learning_rate, name=name, **kwargs)
  else:
    stack.keras.optimizers.Optimizer.__init__(optimizer, name=name, jit_compile=False, **kwargs)
    optimizer._learning_rate = optimizer._build_learning_rate(learning_rate)


def base_config(optimizer: stack.Optimizer) -> Dict[str, Any]:
  """Returns the base class's `get_config` without options that are refused or fixed."""
  config = stack.keras.optimizers.Optimizer.get_config(optimizer)
  for key in ('jit_compile', 'is_legacy_optimizer', 'clipnorm', 'clipvalue', 'global_clipnorm',
              'gradient_accumulation_steps', 'loss_scale_factor'):
    config.pop(key, None)
  if not stack.KERAS_3:
    config['learning_rate'] = optimizer._serialize_hyperparameter(optimizer._learning_rate)
  return config


def mark_built(optimizer: stack.Optimizer) -> None:
  """Marks an optimizer as built if its base class does not."""
  if not stack.KERAS_3:
    optimizer._built = True


def add_optimizer_variable(
    optimizer: stack.Optimizer, value: stack.Tree, name: str = 'private_state') -> stack.Variable:
  """Creates a variable that is saved with the optimizer, from a NumPy value."""
  if stack.KERAS_3:
    name = f'{name}_{len(optimizer.variables)}'  # `model.variable_mapping` asks for unique paths.
    return optimizer.add_variable(
        shape=value.shape, dtype=value.dtype.name, name=name, aggregation='only_first_replica',
        initializer=lambda shape, dtype=None, **_: tf.constant(value))
  variable = strategy.replicated_variable(value, name)
  optimizer._variables.append(variable)
  return variable


class GlobalOptimizer(stack.keras.optimizers.Optimizer):
  """A Keras optimizer whose gradients are already summed over all replicas."""

  def _all_reduce_sum_gradients(self, grads_and_vars: Sequence[Any]) -> Sequence[Any]:
    return grads_and_vars  # Otherwise Keras 3 would sum them over all replicas.


def apply_direction(
    optimizer: stack.Optimizer, grads_and_vars: Sequence[Tuple[tf.Tensor, stack.Variable]]) -> None:
  """Calls the base class update (learning rate, weight decay, EMA) with global gradients."""
  kwargs = {} if stack.KERAS_3 else {'skip_gradients_aggregation': True}
  stack.keras.optimizers.Optimizer.apply_gradients(optimizer, grads_and_vars, **kwargs)


def descend(variable: stack.Variable, rate: tf.Tensor, direction: tf.Tensor) -> None:
  """Subtracts `rate * direction` from a variable, in one pass over its memory."""
  tf.raw_ops.ResourceApplyGradientDescent(
      var=models.raw_variable(variable).handle, alpha=rate, delta=direction)


def learning_rate_schedule(optimizer: stack.Optimizer) -> Any:
  """Returns the learning rate as a function of steps, or None if it is a variable."""
  rate = optimizer._learning_rate
  return None if models.is_variable(rate) else rate


def unwrap_loss_scaling(optimizer: stack.Optimizer) -> stack.Optimizer:
  """Returns the optimizer in a `LossScaleOptimizer`; clipping needs unscaled gradients."""
  wrapper = getattr(stack.keras.mixed_precision, 'LossScaleOptimizer', ())
  return optimizer.inner_optimizer if isinstance(optimizer, wrapper) else optimizer
