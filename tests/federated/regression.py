# SPDX-License-Identifier: Apache-2.0
"""A federated regression that is small enough for NumPy."""

import collections
import importlib

import numpy as np
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import noise as noise_lib
from tfdp_adaptive.mechanisms import toeplitz
from tfdp_adaptive.noise import keys

CLIENT_RATE, SEED = 0.1, 7
SPEC = collections.OrderedDict(
    x=tf.TensorSpec([None, 3], tf.float32), y=tf.TensorSpec([None, 1], tf.float32))


def model_fn():
  """Linear regression from zero weights."""
  return tf.keras.Sequential([
      tf.keras.layers.Input((3,)), tf.keras.layers.Dense(1, kernel_initializer='zeros')])


def tff_model_fn():
  return importlib.import_module('tensorflow_federated').learning.models.from_keras_model(
      model_fn(), loss=tf.keras.losses.MeanSquaredError(), input_spec=SPEC)


def client_optimizer():
  return tf.keras.optimizers.SGD(CLIENT_RATE)


def tff_client_optimizer():
  optimizers = importlib.import_module('tensorflow_federated').learning.optimizers
  return optimizers.build_sgdm(CLIENT_RATE)


def of_engine(engine):
  """Returns the arguments that pass the regression to an engine."""
  if engine == 'tff':
    return dict(model_fn=tff_model_fn)
  return dict(model_fn=model_fn, loss=tf.keras.losses.MeanSquaredError())


def make_users(count=6, seed=0):
  """{user: examples} of unequal sizes; user 1 has no examples."""
  rng = np.random.default_rng(seed)
  users = {}
  for i in range(count):
    x = rng.normal(size=(0 if i == 1 else 2 + 3 * i, 3)).astype(np.float32)
    y = (x @ [[1.0], [-2.0], [0.5]] + 0.3 * i).astype(np.float32)
    users[f'user{i}'] = collections.OrderedDict(x=x, y=y)
  return users


def make_plan(**kwargs):
  arguments = dict(batch_size=3, steps=10, l2_norm_clip=0.2, noise_multiplier=0.5,
                   target_delta=1e-3, population_size=6, unit='user', seed=SEED)
  arguments.update(kwargs)
  return tfdp.PrivacyPlan(**arguments)


def build(rule, plan, engine='in_process', **kwargs):
  optimizer = tff_client_optimizer if engine == 'tff' else client_optimizer
  return tfdp.federated.build_private_fed_avg(**{
      **of_engine(engine), **dict(client_optimizer_fn=optimizer, server_rule=rule, plan=plan,
                                  server_learning_rate=0.5, seed=SEED), **kwargs})


def delta(weights, examples, batch_size=4):
  """[4] float64 `initial - final` of one user's epoch of SGD on the squared error."""
  w = weights.copy()
  for start in range(0, len(examples['x']), batch_size):
    x = np.asarray(examples['x'][start:start + batch_size], np.float64)
    residual = x @ w[:3] + w[3] - examples['y'][start:start + batch_size, 0]
    w -= CLIENT_RATE * 2 * np.append(x.T @ residual, residual.sum()) / len(x)
  return weights - w


def noise_rows(count, mechanism=toeplitz.IndependentGaussian()):
  """[count, 4] the rows of the fixed seed."""
  specs = (([tf.TensorSpec([3, 1]), tf.TensorSpec([1])], ()),)
  stream = noise_lib.stream(mechanism, lambda: keys.from_seed(SEED))
  state, rows = stream.init(specs), []
  for _ in range(count):
    row, _, state = stream.next(state, specs)
    rows.append(np.concatenate([np.ravel(leaf) for leaf in tf.nest.flatten(row)]))
  return np.asarray(rows, np.float64)


def flat(weights):
  return np.concatenate([np.ravel(w) for w in weights.trainable]).astype(np.float64)
