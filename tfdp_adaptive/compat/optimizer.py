# SPDX-License-Identifier: Apache-2.0
"""Optimizers of either Keras: construction, variables, updates, loss scaling."""

from typing import Any, Dict, Sequence, Tuple

import tensorflow as tf

from tfdp_adaptive.compat import model as models
from tfdp_adaptive.compat import stack
from tfdp_adaptive.compat import strategy


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


# Arguments of `compile` that turn loss scaling off.
NO_LOSS_SCALING = {'auto_scale_loss': False} if stack.KERAS_3 else {}


def drop_loss_scaling(model: stack.Model) -> None:
  """Removes the `LossScaleOptimizer` that `compile` of Keras 2 adds around the optimizer."""
  if not stack.KERAS_3:
    model.optimizer = unwrap_loss_scaling(model.optimizer)
