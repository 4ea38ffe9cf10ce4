# SPDX-License-Identifier: Apache-2.0
"""tensorflow_privacy 0.9.0, three ways, as whole training steps with noise and update."""

import functools

import models
import steps_ours
import tensorflow as tf
import tensorflow_privacy as tfp
from tensorflow_privacy.privacy.fast_gradient_clipping import layer_registry

keras = tf.keras
_PRIVATE = {'l2_norm_clip': 0.1, 'noise_multiplier': 1.0}


def cases(name):
  return {
      'DPKerasAdam': functools.partial(_optimizer, name, tfp.DPKerasAdamOptimizer),
      'vectorized': functools.partial(_optimizer, name, tfp.VectorizedDPKerasAdamOptimizer),
      'DPModel': functools.partial(_model, name, None),
      'DPModel fast': functools.partial(_model, name, layer_registry.make_default_layer_registry()),
  }


def _optimizer(name, optimizer):
  """Every example a microbatch, from unreduced losses."""
  task = models.MODELS[name]()
  model = task.build(keras)

  class PerExample(keras.losses.Loss):
    """[n] losses: of sequences, the mean over time."""

    def call(self, y_true, y_pred):
      values = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
      return tf.reduce_mean(tf.reshape(values, [tf.shape(values)[0], -1]), 1)

  model.compile(
      optimizer(**_PRIVATE, num_microbatches=len(task.x), learning_rate=1e-3),
      PerExample(reduction=keras.losses.Reduction.NONE))
  return steps_ours.fit_step(model, task)


def _model(name, registry):
  task = models.MODELS[name]()
  plain = task.build(keras)
  # Microbatches of one; it compiles its steps with XLA by default.
  kwargs = {**_PRIVATE, 'layer_registry': registry, 'use_xla': True}
  model = tfp.DPModel(inputs=plain.inputs, outputs=plain.outputs, **kwargs)
  if registry is not None and not model._enable_fast_peg_computation:
    raise NotImplementedError('not every layer is in its registry')
  model.compile(keras.optimizers.Adam(1e-3), steps_ours.loss(
      **({} if registry is not None else {'reduction': keras.losses.Reduction.NONE})))
  return steps_ours.fit_step(model, task)
