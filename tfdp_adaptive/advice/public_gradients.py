# SPDX-License-Identifier: Apache-2.0
"""Gradients of PUBLIC records at the initial weights, for `tfdp.recommend`."""

from typing import Any, Dict, List

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive.clipping import engines
from tfdp_adaptive.clipping import losses as losses_lib

_SQUARED = compat.losses_named('mse', 'mean_squared_error', 'MeanSquaredError')


def public_gradients(
    model: compat.Model, x: Any, y: Any, *, loss: Any = None, columns: int = 8192,
    batch_size: int = 32) -> Dict[str, Any]:
  """Computes what `recommend` wants to know of a model, from PUBLIC records.

  Args:
    model: A Keras model with the weights that training starts from.
    x: Nest of inputs of PUBLIC records, [n, ...] each. A few hundred are enough.
    y: Their targets.
    loss: As in `compile`; by default that of the compiled model.
    columns: Gradients of larger models are cut to so many coordinates, drawn at random.
    batch_size: The number of records whose gradients are computed at once.

  Returns:
    The arguments `parameters`, `gradients`, `losses` and `squared` of `recommend`.

  Examples:
    >>> model = compat.keras.Sequential([compat.keras.layers.Dense(1, activation='sigmoid')])
    >>> x, y = np.random.default_rng(0).normal(size=[50, 4]), np.tile([0.0, 1.0], 25)
    >>> known = public_gradients(model, x, y, loss='binary_crossentropy')
    >>> known['parameters'], known['gradients'].shape, known['losses'].shape
    (5, (50, 5), (50,))
  """
  if loss is None:
    loss = getattr(model, 'loss', None) or None  # Keras 2 has {} for none.
  if not model.built:
    model(tf.nest.map_structure(lambda values: values[:1], x))
  of_example = losses_lib.ExampleLoss(loss, None, compat.output_names(model))
  variables = model.trainable_variables
  parameters = sum(int(np.prod(variable.shape)) for variable in variables)
  kept = np.sort(np.random.default_rng(0).permutation(parameters)[:columns])

  @tf.function(autograph=False)
  def of_records(x: Any, y: Any) -> Any:
    return (engines.record_gradients(model, of_example, x, y),
            of_example(y, model(x, training=True)))

  gradients: List[np.ndarray] = []
  losses: List[np.ndarray] = []
  for first in range(0, len(tf.nest.flatten(y)[0]), batch_size):
    found, some_losses = of_records(*tf.nest.map_structure(
        lambda values: tf.convert_to_tensor(values[first:first + batch_size]), (x, y)))
    flat = np.concatenate([np.reshape(part, [len(part), -1]) for part in found], 1)
    gradients.append(flat[:, kept])
    losses.append(some_losses.numpy())
  return dict(parameters=parameters, gradients=np.concatenate(gradients),
              losses=np.concatenate(losses),
              squared=loss in ('mse', 'mean_squared_error', *_SQUARED) or isinstance(
                  loss, compat.keras.losses.MeanSquaredError))
