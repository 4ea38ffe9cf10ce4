# SPDX-License-Identifier: Apache-2.0
"""Wraps a Keras model and optimizer as `local_training` uses them, and evaluates the model."""

import collections
import importlib
from typing import Callable, Dict, NamedTuple, Optional, Sequence, Union

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import trees

from . import local_training
from . import server as server_lib

Loss = Union[str, tf.keras.losses.Loss, Callable[..., tf.Tensor]]
Metric = Union[tf.keras.metrics.Metric, Callable[[], tf.keras.metrics.Metric]]


class Output(NamedTuple):
  """The loss of a batch, by the name that it has for a TFF model."""

  loss: tf.Tensor


class KerasModel:
  """A built Keras model with a loss and metrics; the methods are those of a TFF model.

  Args:
    make: `() -> Keras model`, built.
    loss: Keras loss, its name, or a function `(y_true, y_pred) -> losses`.
    metrics: Keras metrics, copied; or functions that make them.
  """

  def __init__(self, make: Callable[[], tf.keras.Model], loss: Loss,
               metrics: Sequence[Metric] = ()) -> None:
    self.keras = make()
    if not getattr(self.keras, 'built', False) or not hasattr(self.keras, 'trainable_weights'):
      raise ValueError('`model_fn` must make a Keras model that has its weights: begin it with '
                       f'`tf.keras.Input`, or call it once. Received: {self.keras!r}.')
    self.trainable_variables = [
        compat.raw_variable(v) for v in self.keras.trainable_weights]
    self.non_trainable_variables = [
        compat.raw_variable(v) for v in self.keras.non_trainable_weights]
    self._loss = _loss(loss)
    self._metrics = {metric.name: metric for metric in map(_copied, metrics)}
    self.seeds = compat.seeds(self.keras)
    self._loss_mean = tf.keras.metrics.Mean(name='loss')
    self._means = {**self._metrics, 'loss': self._loss_mean}
    self._counts = tf.Variable(tf.zeros([2], tf.int64), trainable=False)  # Examples, batches.

  def forward_pass(self, batch: trees.Tree, training: bool = True) -> Output:
    x, y = (batch['x'], batch['y']) if hasattr(batch, 'keys') else batch
    predictions = self.keras(x, training=training)
    loss = tf.reduce_mean(self._loss(y, predictions))
    size = tf.shape(tf.nest.flatten(x)[0])[0]
    for metric in self._metrics.values():
      metric.update_state(y, predictions)
    self._loss_mean.update_state(loss, size)
    self._counts.assign_add(tf.cast(tf.stack([size, 1]), tf.int64))
    return Output(tf.add_n([loss, *self.keras.losses]))

  def report_local_unfinalized_metrics(self) -> local_training.Metrics:
    """Returns {metric: its variables' values}; those of several clients add up."""
    values = collections.OrderedDict(
        (name, [compat.raw_variable(v).read_value() for v in metric.variables])
        for name, metric in self._means.items())
    values['num_examples'], values['num_batches'] = tf.unstack(self._counts)
    return values

  def metric_finalizers(self) -> Dict[str, local_training.Finalizer]:
    """Returns {metric: function of its values}; it writes them into the metric's variables."""
    finalizers = {name: _finalizer(metric) for name, metric in self._means.items()}
    return {**finalizers, 'num_examples': lambda count: count, 'num_batches': lambda count: count}

  def reset_metrics(self) -> None:
    for metric in self._means.values():
      metric.reset_state()
    self._counts.assign(tf.zeros_like(self._counts))


class KerasOptimizer(local_training.FunctionalOptimizer):
  """A Keras optimizer; its variables are set back with the model's."""

  def __init__(self, optimizer: tf.keras.optimizers.Optimizer, model: tf.keras.Model) -> None:
    self._optimizer = type(optimizer).from_config(optimizer.get_config())
    self._variables = model.trainable_weights
    self._optimizer.build(self._variables)

  def start(self, variables: Sequence[tf.Variable]) -> trees.Tree:
    del variables  # `local_training.loop` does it.
    return ()

  def apply(self, state: trees.Tree, gradients: Sequence[tf.Tensor],
            variables: Sequence[tf.Variable]) -> trees.Tree:
    del variables
    self._optimizer.apply_gradients(list(zip(gradients, self._variables)))
    return state


def evaluator(
    model_fn: local_training.ModelFn, dataset: tf.data.Dataset, *,
    loss: Optional[Loss] = None, metrics: Sequence[Metric] = ()
) -> Callable[[server_lib.ModelWeights], Dict[str, float]]:
  """Returns `weights -> {metric: float}` of a model on a batched `tf.data.Dataset`.

  The metrics are exact: they are private only for users who are not in `dataset`.

  Args:
    model_fn: As given to `build_private_fed_avg`.
    dataset: Batches in the format of the clients' batches.
    loss: The loss of a Keras model, as given to `build_private_fed_avg`.
    metrics: The metrics of a Keras model.

  Returns:
    A function of the weights, as `simulate` and `get_model_weights` return them.
  """
  if loss is not None:
    model: local_training.Model = KerasModel(model_fn, loss, metrics)
  else:
    model = importlib.import_module('.tff_process', __package__).as_function(model_fn)()
  finalizers = local_training.reusable(model)

  @tf.function
  def run() -> local_training.Metrics:
    for batch in dataset:
      model.forward_pass(batch, training=False)
    return model.report_local_unfinalized_metrics()

  def evaluate(weights: server_lib.ModelWeights) -> Dict[str, float]:
    variables = [model.trainable_variables, model.non_trainable_variables]
    trees.assign(zip(tf.nest.flatten(variables), tf.nest.flatten(tuple(weights))))
    model.reset_metrics()
    return {name: float(value)
            for name, value in local_training.finalized(finalizers, run()).items()}

  return evaluate


def _loss(loss: Loss) -> Callable[..., tf.Tensor]:
  try:
    return tf.keras.losses.get(loss)
  except ValueError as error:
    raise ValueError('`loss` must be a Keras loss, its name, or a function of labels and '
                     f'predictions. Received: loss={loss!r}.') from error


def _copied(metric: Metric) -> tf.keras.metrics.Metric:
  if isinstance(metric, tf.keras.metrics.Metric):
    return type(metric).from_config(metric.get_config())
  made = metric() if callable(metric) else None
  if not isinstance(made, tf.keras.metrics.Metric):
    raise ValueError('`metrics` must be Keras metrics, or functions that make them. '
                     f'Received: {metric!r}.')
  return made


def _finalizer(metric: tf.keras.metrics.Metric) -> local_training.Finalizer:
  def finalize(values: Sequence[tf.Tensor]) -> tf.Tensor:
    trees.assign(zip(metric.variables, values))
    return metric.result()

  return finalize
