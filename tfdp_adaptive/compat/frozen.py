# SPDX-License-Identifier: Apache-2.0
"""Frozen single weights, and copies of layers in float64."""

from typing import Iterable, List

from tfdp_adaptive.compat import model
from tfdp_adaptive.compat import stack


def trained_variables(layer: stack.Layer) -> List[stack.Variable]:
  """Returns the variables that are trained, also inside a frozen layer (Keras 3)."""
  return [v for v in layer.weights if v.trainable] if stack.KERAS_3 else unfrozen(
      layer.trainable_variables)


def called(layer: stack.Layer) -> str:
  """Returns the name of the method that a layer's `__call__` calls."""
  return 'quantized_call' if getattr(layer, 'quantization_mode', None) else 'call'


def freeze(variable: stack.Variable, frozen: bool = True) -> None:
  """Freezes one variable of a layer that trains, or unfreezes it again."""
  if frozen or is_frozen(variable):
    model.raw_variable(variable)._tfdp_frozen = frozen
    if stack.KERAS_3:
      variable.trainable = not frozen  # Keras 2 freezes layers only.


def is_frozen(variable: stack.Variable) -> bool:
  """Returns whether `freeze` froze a variable."""
  return getattr(model.raw_variable(variable), '_tfdp_frozen', False)


def unfrozen(variables: Iterable[stack.Variable]) -> List[stack.Variable]:
  """Returns the variables without those that `freeze` froze."""
  return [v for v in variables if not is_frozen(v)]


def leaf_name(variable: stack.Variable) -> str:
  """Returns the name of a variable in its layer, such as 'bias'."""
  return variable.name.split('/')[-1].split(':')[0]


def in_float64(layer: stack.Layer, *args: stack.Tree, **kwargs: stack.Tree) -> stack.Layer:
  """Returns a copy of a layer, with its weights, that computes in float64.

  Raises:
    Exception: Of any kind, if the layer cannot be created from its config.
  """
  copy = type(layer).from_config({**layer.get_config(), 'dtype': 'float64'})
  copy(*args, **kwargs)
  copy.set_weights(layer.get_weights())
  return copy
