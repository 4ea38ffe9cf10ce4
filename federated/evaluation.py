# SPDX-License-Identifier: Apache-2.0
"""Metrics of the global model on held-out users, computed centrally."""

from __future__ import annotations

import importlib
from typing import Any, Callable, Dict, Sequence

import tensorflow as tf

from . import in_process


def evaluator(
    model_fn: Any, dataset: tf.data.Dataset, *, loss: Any = None,
    metrics: Sequence[Any] = ()) -> Callable[[Any], Dict[str, float]]:
  """`weights -> {metric: float}` of a model on a batched `tf.data.Dataset`.

  The metrics are exact: they are private only for users who are not in `dataset`.

  Args:
    model_fn: As given to `build_private_fed_avg`.
    dataset: Batches like those of the clients.
    loss: The loss of a Keras model, as given to `build_private_fed_avg`.
    metrics: The metrics of a Keras model.

  Returns:
    A function of the weights, as `simulate` and `get_model_weights` return them.
  """
  model = (in_process.KerasModel(model_fn, loss, metrics) if loss is not None
           else importlib.import_module('.tff_process', __package__).make_model(model_fn))

  @tf.function
  def run() -> Any:
    for batch in dataset:
      model.forward_pass(batch, training=False)
    return model.report_local_unfinalized_metrics()

  def evaluate(weights: Any) -> Dict[str, float]:
    for variable, value in zip(
        tf.nest.flatten([model.trainable_variables, model.non_trainable_variables]),
        tf.nest.flatten(tuple(weights))):
      variable.assign(value)
    model.reset_metrics()
    unfinalized = run()
    # The finalizers of Keras metrics make variables at every call, which a
    # tf.function may not; run them eagerly.
    return {name: float(getattr(finalize, 'python_function', finalize)(unfinalized[name]))
            for name, finalize in model.metric_finalizers().items()}

  return evaluate
