# SPDX-License-Identifier: Apache-2.0
"""jax_privacy 2.0.0 on the same Keras models, compiled; gradients only."""

import functools
import os

os.environ['KERAS_BACKEND'] = 'jax'
os.environ['JAX_PLATFORMS'] = 'cpu'

import jax
import jax.numpy as jnp
from jax_privacy import clipping
import keras
import models
import numpy as np


def cases(name):
  return {
      'plain': functools.partial(_gradient, name, jax.grad),
      'jax_privacy': functools.partial(_gradient, name, _clipped),
      # Its scan over single examples takes less memory, and often less time.
      'jax_privacy one by one': functools.partial(
          _gradient, name, functools.partial(_clipped, microbatch_size=1)),
  }


def _clipped(loss, **kwargs):
  return clipping.clipped_grad(loss, l2_clip_norm=0.1, batch_argnums=(1, 2), **kwargs)


def _gradient(name, transform):
  task = models.MODELS[name]()
  model = task.build(keras)
  trainable = [v.value for v in model.trainable_variables]
  fixed = [v.value for v in model.non_trainable_variables]

  def loss(weights, x, y):
    logits, _ = model.stateless_call(weights, fixed, x, training=True)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), y[..., None], -1)
    return -jnp.mean(chosen)

  gradient = jax.jit(transform(loss))
  x, y = jnp.asarray(task.x), jnp.asarray(task.y)
  return (lambda: jax.block_until_ready(gradient(trainable, x, y)),
          sum(4 * int(np.prod(w.shape)) for w in trainable + fixed))
