# SPDX-License-Identifier: Apache-2.0
"""Takes models apart: what lies in front of the layers that train is computed once."""

from __future__ import annotations

from typing import List, Sequence, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive.advice import outputs as outputs_lib
from tfdp_adaptive.trees import Tree


def chain(model: compat.Model, x: Tree) -> List[compat.Layer]:
  """Returns the layers that a model applies one after the other; [] for other models.

  A graph of layers that ends in a `Dense` layer is a model in front of this layer.
  """
  keras = compat.keras
  if isinstance(model, keras.Sequential):
    return list(model.layers)
  layers = [one for one in getattr(model, 'layers', ())
            if not isinstance(one, keras.layers.InputLayer)]
  try:
    value = tf.convert_to_tensor(x[:4])
    wanted = model(value)
    for layer in layers:
      value = layer(value)
    if value.shape == wanted.shape and np.allclose(value, wanted, atol=1e-5):
      return layers
  except Exception:  # pylint: disable=broad-except  # It is no chain.
    pass
  try:
    last = outputs_lib.last_dense(model)
    if last is layers[-1] and isinstance(x, np.ndarray):
      return [keras.Model(model.inputs, last.input), last]
  except Exception:  # pylint: disable=broad-except  # Its layers are called elsewhere, too.
    pass
  return []


def behind_frozen(layers: Sequence[compat.Layer], model: compat.Model, x: Tree
                   ) -> Tuple[compat.Model, Tree, int]:
  """Returns the model behind its frozen layers, their features of x, and how many they are.

  The features are computed once. Layers count as frozen if none draws random numbers.
  """
  count = 0
  while count < len(layers) - 1 and not layers[count].trainable_variables and not (
      compat.seeds(layers[count])):
    count += 1
  if not any(layer.weights for layer in layers[:count]):
    return model, x, 0
  keras = compat.keras
  features = keras.Sequential(layers[:count]).predict(x, verbose=0)
  return (keras.Sequential([keras.layers.Input(features.shape[1:]), *layers[count:]]), features,
          count)
