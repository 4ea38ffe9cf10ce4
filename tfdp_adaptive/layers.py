# SPDX-License-Identifier: Apache-2.0
"""Layers that private models train well with and Keras does not have."""

from typing import Any, Optional, Sequence

import numpy as np
import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import compat
from tfdp_adaptive.clipping import factors
from tfdp_adaptive.clipping.layers import convolution
from tfdp_adaptive.clipping.layers import registry

_Conv2D: Any = compat.keras.layers.Conv2D


@compat.serializable
class WSConv2D(_Conv2D):
  """`keras.layers.Conv2D` with weight standardization of its filters.

  A filter w of N numbers acts as `gain * (w - mean(w)) / sqrt(N var(w) + epsilon)`, with a trained
  gain per filter. Together with GroupNormalization it replaces BatchNormalization, which mixes
  the examples of a batch (De et al., arXiv:2204.13650). Its clipping rule forms the gradients of
  all examples together.

  Args:
    *args: Positional arguments of `keras.layers.Conv2D`.
    epsilon: Added under the square root, > 0.
    **kwargs: Keyword arguments of `keras.layers.Conv2D`.

  Examples:
    >>> WSConv2D(8, 3, padding='same')(np.ones([2, 5, 5, 1], np.float32)).shape[1:]
    TensorShape([5, 5, 8])
  """

  def __init__(self, *args: object, epsilon: float = 1e-4, **kwargs: object) -> None:
    checks.positive(epsilon=epsilon)
    super().__init__(*args, **kwargs)
    self.epsilon = epsilon

  def build(self, input_shape: Sequence[Optional[int]]) -> None:
    super().build(input_shape)
    if getattr(self, 'gain', None) is None:
      self.gain = self.add_weight(name='gain', shape=(self.filters,), initializer='ones')

  def convolution_op(self, inputs: tf.Tensor, kernel: tf.Tensor) -> Any:
    kernel = tf.convert_to_tensor(kernel)
    unit, _ = standardized(kernel, self.epsilon)
    return super().convolution_op(inputs, unit * tf.cast(self.gain, kernel.dtype))

  # The methods of a convolution save kernel and bias only.
  save_own_variables = compat.keras.layers.Layer.save_own_variables
  load_own_variables = compat.keras.layers.Layer.load_own_variables

  def get_config(self) -> Any:
    return {**super().get_config(), 'epsilon': self.epsilon}


def standardized(kernel: tf.Tensor, epsilon: float) -> Any:
  """Returns (u, r): filters of mean zero and norm one, and their ratios to `kernel`."""
  axes = list(range(kernel.shape.rank - 1))
  centered = kernel - tf.reduce_mean(kernel, axes, keepdims=True)
  root = tf.math.rsqrt(tf.reduce_sum(tf.square(centered), axes, keepdims=True) + epsilon)
  return centered * root, root


@registry.register(WSConv2D, tap=registry.at_activation, why=convolution.why)
def _ws_conv2d(
    layer: compat.Layer, call: registry.Call, cotangents: tf.Tensor) -> registry.Factors:
  """Yields gain r (g - mean(g) - u <u, g>) by w, from the gradient g by the standardized filter."""
  (_, inner), *others = convolution.convolution(layer, call, cotangents)
  g = inner.gradient()
  unit, root = standardized(tf.cast(tf.convert_to_tensor(layer.kernel), g.dtype), layer.epsilon)
  axes = list(range(1, g.shape.rank - 1))
  along = tf.reduce_sum(g * unit, axes, keepdims=True)
  gain = tf.cast(tf.convert_to_tensor(layer.gain), g.dtype)
  mean = tf.reduce_sum(g, axes, keepdims=True) / float(np.prod(layer.kernel.shape[:-1]))
  yield layer.kernel, factors.explicit(gain * root * (g - mean - unit * along))
  yield layer.gain, factors.explicit(tf.squeeze(along, axes))
  yield from others
