# SPDX-License-Identifier: Apache-2.0
"""Gradients of PUBLIC records at the initial weights, for `tfdp.recommend`."""

from typing import Any, Dict, List, Optional, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive.clipping import engines
from tfdp_adaptive.clipping import losses as losses_lib

_SQUARED = compat.losses_named('mse', 'mean_squared_error', 'MeanSquaredError')


def public_gradients(
    model: compat.Model, x: Any, y: Any, *, loss: Any = None, columns: int = 32_768,
    batch_size: Optional[int] = None) -> Dict[str, Any]:
  """Computes what `recommend` wants to know of a model, from PUBLIC records.

  Args:
    model: A Keras model with the weights that training starts from.
    x: Nest of inputs of PUBLIC records, [n, ...] each. A few hundred are enough.
    y: Their targets.
    loss: As in `compile`; by default that of the compiled model.
    columns: Gradients of larger models are cut to so many coordinates, drawn at random.
      `recommend` then does not try settings on the model itself.
    batch_size: The number of records whose gradients are computed at once; by default 256, or as
      many as fit into 32 MB.

  Returns:
    The arguments `parameters`, `gradients`, `losses`, `squared` and `look` of `recommend`. The
    weights of the model stay as they are.

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
  ends = np.cumsum([int(np.prod(variable.shape)) for variable in variables])
  parameters = int(ends[-1]) if variables else 0
  if not parameters:
    raise ValueError('`model` must have trainable variables. Received: none.')
  batch_size = batch_size or min(256, max(1, 2**23 // parameters))
  start = [variable.numpy() for variable in variables]
  kept = np.sort(np.random.default_rng(0).permutation(parameters)[:columns])

  @tf.function(autograph=False)
  def of_records(x: Any, y: Any) -> Any:
    return (engines.record_gradients(model, of_example, x, y),
            of_example(y, model(x, training=True)))

  def look(distance: np.ndarray, rows: Optional[np.ndarray] = None) -> Tuple[Any, Any]:
    """Returns gradients and losses at this distance from `start`, whatever was trained since."""
    before = [(variable, variable.numpy()) for variable in model.weights]
    parts = np.split(distance, ends[:-1])
    some = (x, y) if rows is None else tf.nest.map_structure(
        lambda values: np.asarray(values)[rows], (x, y))
    gradients: List[np.ndarray] = []
    losses: List[np.ndarray] = []
    try:
      for variable, values, part in zip(variables, start, parts):
        variable.assign(values + part.reshape(values.shape).astype(values.dtype))
      for first in range(0, len(tf.nest.flatten(some[1])[0]), batch_size):
        found, some_losses = of_records(*tf.nest.map_structure(
            lambda values: tf.convert_to_tensor(values[first:first + batch_size]), some))
        flat = np.concatenate([np.reshape(part, [len(part), -1]) for part in found], 1)
        gradients.append(flat[:, kept])
        losses.append(some_losses.numpy())
    finally:
      for variable, values in before:  # With moving averages, which a call moves.
        variable.assign(values)
    return np.concatenate(gradients), np.concatenate(losses)

  gradients, losses = look(np.zeros(parameters))
  return dict(parameters=parameters, gradients=gradients, losses=losses,
              look=look if parameters <= columns else None,
              squared=loss in ('mse', 'mean_squared_error', *_SQUARED) or isinstance(
                  loss, compat.keras.losses.MeanSquaredError))
