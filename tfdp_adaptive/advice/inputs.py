# SPDX-License-Identifier: Apache-2.0
"""What lies in front of the layers that train: frozen layers, and scales of PUBLIC examples."""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive.advice import outputs as outputs_lib
from tfdp_adaptive.independence import disclosures
from tfdp_adaptive.trees import Tree

AS_GIVEN, SCALED, WHITENED = 'as given', 'scaled', 'whitened'
_RARE = .05  # A column that differs from its most frequent value less often keeps its scale.
_WIDEST = 1024  # Inputs of more columns are not whitened.
_LEAST = 1e-3  # Least ridge of a correlation matrix, over its mean eigenvalue.


class Inputs(NamedTuple):
  """An affine map of the inputs.

  Attributes:
    kind: 'as given', 'scaled' or 'whitened'.
    mean: Subtracted from the last axis.
    variance: Its root divides the last axis.
    matrix: [d, d], multiplies the scaled inputs from the right; or None.
    ridge: Added to the eigenvalues of the covariance that the matrix whitens.
  """

  kind: str = AS_GIVEN
  mean: Optional[np.ndarray] = None
  variance: Optional[np.ndarray] = None
  matrix: Optional[np.ndarray] = None
  ridge: float = 0.0

  def __call__(self, x: Tree) -> Tree:
    if self.mean is None or self.variance is None:
      return x
    x = ((x - self.mean) / np.sqrt(self.variance)).astype(np.float32)
    return x if self.matrix is None else x @ self.matrix

  def layers(self, source: str) -> List[compat.Layer]:
    """Returns frozen Keras layers that compute the same; the statement names them as public."""
    if self.kind == AS_GIVEN:
      return []
    layers = compat.keras.layers
    found = [layers.Normalization(mean=self.mean, variance=self.variance, name='public_scale')]
    if self.matrix is not None:
      found.append(layers.Dense(len(self.matrix), use_bias=False, trainable=False,
                                name='public_whitening'))
      found[-1].build([None, len(self.matrix)])
      found[-1].set_weights([self.matrix])
    for layer in found:
      disclosures.say_public(layer, source)
    return found


def all_of(x: Tree) -> Dict[str, Inputs]:
  """Returns the maps to try, by kind, with the statistics of these examples."""
  found = {AS_GIVEN: Inputs()}
  if not isinstance(x, np.ndarray) or x.dtype.kind != 'f' or x.ndim < 2:
    return found
  flat = x.reshape(-1, x.shape[-1]).astype(np.float64)
  mean, variance = flat.mean(0), flat.var(0)
  if x.ndim > 2:  # Channels of images keep their ratios.
    mean, variance = np.full_like(mean, flat.mean()), np.full_like(mean, flat.var())
  else:
    usual = np.array([np.unique(column, return_counts=True)[1].max() for column in flat.T])
    kept = (usual > (1 - _RARE) * len(flat)) | ~(variance > 0)
    mean, variance = np.where(kept, 0, mean), np.where(kept, 1, variance)
  if not (variance > 0).all() or np.allclose(mean, 0) and np.allclose(variance, 1):
    return found
  scaled = Inputs(SCALED, mean.astype(np.float32), variance.astype(np.float32))
  found[SCALED] = scaled
  width = x.shape[-1]
  if x.ndim == 2 and 1 < width <= min(_WIDEST, 2 * len(x)):
    values, vectors = np.linalg.eigh(np.cov(scaled(x).astype(np.float64).T))
    ridge = float(max(_LEAST, .5 * width / len(x)) * max(values.mean(), 1e-12))
    matrix = vectors / np.sqrt(np.maximum(values, 0) + ridge) @ vectors.T
    found[WHITENED] = scaled._replace(
        kind=WHITENED, matrix=matrix.astype(np.float32), ridge=ridge)
  return found


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
