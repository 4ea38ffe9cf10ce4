# SPDX-License-Identifier: Apache-2.0
"""Metrics of the global model on held-out users, computed centrally."""

from __future__ import annotations

import importlib
from typing import Callable, Dict, Optional, Sequence

import tensorflow as tf

from . import keras_model
from . import local_training
from . import server as server_lib


def evaluator(
    model_fn: local_training.ModelFn, dataset: tf.data.Dataset, *,
    loss: Optional[keras_model.Loss] = None, metrics: Sequence[keras_model.Metric] = ()
) -> Callable[[server_lib.ModelWeights], Dict[str, float]]:
  """Returns `weights -> {metric: float}` of a model on a batched `tf.data.Dataset`.

  The metrics are exact: they are private only for users who are not in `dataset`.

  Args:
    model_fn: As given to `build_private_fed_avg`.
    dataset: Batches like those of the clients.
    loss: The loss of a Keras model, as given to `build_private_fed_avg`.
    metrics: The metrics of a Keras model.

  Returns:
    A function of the weights, as `simulate` and `get_model_weights` return them.
  """
  if loss is not None:
    model = keras_model.KerasModel(model_fn, loss, metrics)
  else:
    tff_process = importlib.import_module('.tff_process', __package__)
    model = tff_process.as_function(model_fn)()
  finalizers = local_training.reusable(
      model.metric_finalizers(), model.report_local_unfinalized_metrics())

  @tf.function
  def run() -> local_training.Metrics:
    for batch in dataset:
      model.forward_pass(batch, training=False)
    return model.report_local_unfinalized_metrics()

  def evaluate(weights: server_lib.ModelWeights) -> Dict[str, float]:
    for variable, value in zip(
        tf.nest.flatten([model.trainable_variables, model.non_trainable_variables]),
        tf.nest.flatten(tuple(weights))):
      variable.assign(value)
    model.reset_metrics()
    return {name: float(value)
            for name, value in local_training.finalized(finalizers, run()).items()}

  return evaluate
