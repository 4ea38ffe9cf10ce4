# SPDX-License-Identifier: Apache-2.0
"""Every name of TensorFlow Federated that this package uses, for release 0.87.

A port to another release is this file: later ones have the language of computations in a
package of its own, `federated_language`, and no DPQuery of another package.
"""

from __future__ import annotations

# pylint: disable=invalid-name
import atexit
import gc

import tensorflow_federated as _tff

# The language: types, places, and what moves values between them.
CLIENTS, SERVER = _tff.CLIENTS, _tff.SERVER
FederatedType, SequenceType = _tff.FederatedType, _tff.SequenceType
federated_broadcast = _tff.federated_broadcast
federated_computation = _tff.federated_computation
federated_eval = _tff.federated_eval
federated_map = _tff.federated_map
federated_sum = _tff.federated_sum
federated_value = _tff.federated_value
federated_zip = _tff.federated_zip

# TensorFlow in it.
tf_computation = _tff.tensorflow.computation
tensorflow_to_type = _tff.types.tensorflow_to_type
type_to_tf_tensor_specs = _tff.types.type_to_tf_tensor_specs

# Learning: models, optimizers, the training of a client, the process.
FunctionalModel = _tff.learning.models.FunctionalModel
VariableModel = _tff.learning.models.VariableModel
ModelWeights = _tff.learning.models.ModelWeights
model_from_functional = _tff.learning.models.model_from_functional
model_from_keras = _tff.learning.models.from_keras_model
weights_type_from_model = _tff.learning.models.weights_type_from_model
Optimizer = _tff.learning.optimizers.Optimizer
build_sgdm = _tff.learning.optimizers.build_sgdm
ClientWeighting = _tff.learning.ClientWeighting
LoopImplementation = _tff.learning.LoopImplementation
build_client_work = _tff.learning.templates.build_model_delta_client_work
build_functional_client_work = _tff.learning.templates.build_functional_model_delta_client_work
LearningProcess = _tff.learning.templates.LearningProcess
LearningProcessOutput = _tff.learning.templates.LearningProcessOutput
sum_then_finalize = _tff.learning.metrics.sum_then_finalize

# Where computations run.
get_context_stack = _tff.framework.get_context_stack


@atexit.register
def _end_worker() -> None:
  """Ends TFF's worker, which has Python's output: whoever reads it would wait for ever."""
  _tff.test.set_no_default_context()
  gc.collect()
