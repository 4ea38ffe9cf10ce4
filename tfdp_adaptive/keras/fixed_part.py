# SPDX-License-Identifier: Apache-2.0
"""The layers of a model that give all views of an example the same: they run once for each.

A model begins with them: one after the other, without weights that train or random draws. The
layers behind them are a model of their own, whose gradients are those of the whole.
"""

from typing import Any, List, NamedTuple, Optional

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive.independence import probes

keras: Any = compat.keras


class Parts(NamedTuple):
  """Two models that share the layers of a third: `model(x)` is `rest(fixed(x))`."""

  fixed: compat.Model
  rest: compat.Model


def of(model: compat.Model) -> Optional[Parts]:
  """Returns the parts of a functional or Sequential model; None if it has no fixed part."""
  cuts = _cuts(model)
  parts = None
  while cuts:  # If one draws, those behind it do.
    middle = len(cuts) // 2
    found = _parts(model, cuts[middle])
    parts, cuts = (parts, cuts[:middle]) if found is None else (found, cuts[middle + 1:])
  return parts


def _cuts(model: compat.Model) -> List[Any]:
  """Returns the symbolic outputs of the first layers, as far as no weights train in them."""
  cuts: List[Any] = []
  if len(getattr(model, 'inputs', None) or ()) == 1:
    tensor = model.inputs[0]
    for layer in compat.sequential_layers(model):
      if isinstance(layer, keras.layers.InputLayer):
        continue
      tensor = compat.called_on(layer, tensor)
      if tensor is None or compat.unfrozen(layer.trainable_variables):
        break
      cuts.append(tensor)
  return cuts


def _parts(model: compat.Model, cut: Any) -> Optional[Parts]:
  outputs = compat.output_structure(model)
  try:
    parts = Parts(keras.Model(model.inputs[0], cut),
                  keras.Model(cut, model.outputs[0] if outputs is None else outputs))
  except ValueError:  # Other layers read what comes before the cut.
    return None
  keys = [[compat.variable_key(v) for v in compat.unfrozen(one.trainable_variables)]
          for one in (model, parts.rest)]
  # Ids out of range are replaced where a model begins, before an engine sees them.
  looks_up = any(isinstance(one, keras.layers.Embedding) for one in compat.all_layers(parts.fixed))
  own = type(model).call not in (keras.Sequential.call, type(parts.rest).call)
  if keys[0] != keys[1] or looks_up or own or not tf.as_dtype(cut.dtype).is_floating:
    return None
  masks: List[Any] = []

  def run(x: tf.Tensor) -> Any:
    found = parts.fixed(x, training=True)
    masks.append(getattr(found, '_keras_mask', None))
    return found

  concrete = tf.function(run, autograph=False).get_concrete_function(
      tf.TensorSpec([None, *model.inputs[0].shape[1:]], model.inputs[0].dtype))
  return None if probes.has_draws(concrete) or masks[-1] is not None else parts
