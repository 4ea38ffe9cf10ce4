# SPDX-License-Identifier: Apache-2.0
"""Metrics of the global model on held-out users, computed centrally."""

from __future__ import annotations

from typing import Any, Callable, Dict

import tensorflow as tf

from . import tff


def evaluator(model_fn: Any, dataset: tf.data.Dataset) -> Callable[[Any], Dict[str, float]]:
  """`weights -> {metric: float}` of a TFF model on a batched `tf.data.Dataset`.

  The metrics are exact: they are private only for users who are not in `dataset`.

  Args:
    model_fn: As given to `build_private_fed_avg`.
    dataset: Batches in the structure of the model's `input_spec`.

  Returns:
    A function of `tff.learning.models.ModelWeights`.
  """
  model = (tff.model_from_functional(model_fn)
           if isinstance(model_fn, tff.FunctionalModel) else model_fn())

  @tf.function
  def run() -> Any:
    for batch in dataset:
      model.forward_pass(batch, training=False)
    return model.report_local_unfinalized_metrics()

  def evaluate(weights: Any) -> Dict[str, float]:
    weights.assign_weights_to(model)
    model.reset_metrics()
    unfinalized = run()
    # The finalizers of Keras metrics make variables at every call, which a
    # tf.function may not; run them eagerly.
    return {name: float(getattr(finalize, 'python_function', finalize)(unfinalized[name]))
            for name, finalize in model.metric_finalizers().items()}

  return evaluate
