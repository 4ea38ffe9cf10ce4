# SPDX-License-Identifier: Apache-2.0
"""Finds the installed versions of Keras and tensorflow_privacy.

There are two stacks: TF 2.14 with Keras 2.14 (and TFF), and TF >= 2.16 with Keras 3.
"""

import importlib
import sys
from typing import Any

import tensorflow as tf

KERAS_3 = hasattr(tf.keras.optimizers.Optimizer, 'stateless_apply')
if KERAS_3:
  import keras as _keras  # pylint: disable=g-import-not-at-top
else:
  _keras = tf.keras
keras: Any = _keras
PRIVATE = 'keras.src'  # The private package of Keras.

# Keras has no types that a checker could read.
Model = Any
Layer = Any
Optimizer = Any
Variable = Any
Loss = Any
Metric = Any
Tree = Any  # A nest of tensors, arrays or specs.
Function = Any  # A concrete function of TensorFlow.

serializable = keras.saving.register_keras_serializable('tfdp_adaptive')

if KERAS_3 and keras.backend.backend() != 'tensorflow':
  raise ImportError('tfdp_adaptive needs the TensorFlow backend of Keras. '
                    f'Received: backend={keras.backend.backend()!r}. '
                    "Set KERAS_BACKEND='tensorflow' before Keras is imported.")


def privacy_module(name: str) -> Any:
  """Returns a module of tensorflow_privacy's `dp_query` package, or None where it is absent.

  On TF >= 2.16 tensorflow_privacy cannot be imported as a whole (it needs
  `tensorflow_estimator`), but its DPQuery modules can.
  """
  if KERAS_3:
    sys.skip_tf_privacy_import = True  # type: ignore[attr-defined]
  try:
    return importlib.import_module(f'tensorflow_privacy.privacy.dp_query.{name}')
  except ImportError:
    return None
