# SPDX-License-Identifier: Apache-2.0
"""TimeDistributed: on Keras 3 a call per step; on Keras 2 steps joined with the batch."""

from typing import Any, Iterable

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive.clipping.layers import registry

if compat.TIME_DISTRIBUTED_FOLDS:

  @registry.register(compat.keras.layers.TimeDistributed, folds=True)
  def time_distributed(
      layer: compat.Layer, call: registry.Call, cotangents: tf.Tensor) -> Iterable[Any]:
    """Has no variables but those of the layer inside."""
    del layer, call, cotangents
    return ()
