# SPDX-License-Identifier: Apache-2.0
"""This library's steps, and plain Keras' ones, on whichever stack runs this."""

import functools
import os

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import models
import numpy as np
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive import contract
from tfdp_adaptive.clipping import chunks
from tfdp_adaptive.clipping import engines
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.clipping import losses
from tfdp_adaptive.rules import kronecker

keras = compat.keras
BATCHES, BUDGET = (1, 4, 16), 48 * 2**20


def cases(name):
  """{case: () -> (step, bytes of state)}; with XLA where the name says so."""
  result = {}
  for suffix, jit in (('', False), (' xla', True)):
    result['plain' + suffix] = functools.partial(_gradient, name, _plain, jit)
    result['isotropic' + suffix] = functools.partial(_gradient, name, _ours(False), jit)
    result['diagonal' + suffix] = functools.partial(_gradient, name, _ours(True), jit)
    result['Kronecker' + suffix] = functools.partial(_gradient, name, _ours('Kronecker'), jit)
    result['materialized' + suffix] = functools.partial(
        _gradient, name, _ours(False, 'materialized'), jit)
    result['plain fit' + suffix] = functools.partial(_fit, name, keras.optimizers.Adam, jit)
    result['DPAdam fit' + suffix] = functools.partial(_fit, name, tfdp.DPAdam, jit)
    result['STP fit' + suffix] = functools.partial(
        _fit, name, functools.partial(tfdp.DPAdamSTP, scale_epsilon=1e-3), jit)
    result['SOAP fit' + suffix] = functools.partial(_fit, name, tfdp.DPSOAP, jit)
  for times in BATCHES:
    result[f'{times} batches at once'] = functools.partial(
        _gradient, name, _ours(False), False, times)
    result[f'{times} batches in a budget'] = functools.partial(
        _gradient, name, _ours(False, budget=BUDGET), False, times)
  return result


def loss(**kwargs):
  return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **kwargs)


def _gradient(name, make, jit, times=1):
  task = models.MODELS[name]()
  repeat = lambda t: np.tile(t, [times] + [1] * (t.ndim - 1))
  task = task._replace(x=repeat(task.x), y=repeat(task.y))
  model = task.build(keras)
  x, y = tf.constant(task.x), tf.constant(task.y)
  step = tf.function(make(model, task), jit_compile=jit or None, autograph=False)
  return lambda: step(x, y)[0].numpy(), _bytes(model.weights)


def _plain(model, task):
  del task
  function, variables = loss(), [compat.raw_variable(v) for v in model.trainable_variables]

  def step(x, y):
    with tf.GradientTape() as tape:
      value = tf.reduce_mean(function(y, model(x, training=True)))
    # Dense, as an optimizer with moments needs them.
    return [tf.convert_to_tensor(g) for g in tape.gradient(value, variables)]

  return step


def _scale(kind, variables):
  """A geometry that is state, not a constant that could be folded."""
  number = lambda *shape: tf.Variable(tf.ones(shape) + tf.random.uniform(shape))
  if kind != 'Kronecker':
    return [number(*v.shape) for v in variables]
  side = lambda size: number(size, size) if size <= 1024 else number(size)
  scales = []
  for v in variables:
    view = kronecker.matrices(v.shape, 1024)
    scales.append(number(*v.shape) if view is None else contract.Kronecker(*map(side, view[1:])))
  return scales


def _read(scale):
  if isinstance(scale, contract.Kronecker):
    return contract.Kronecker(*map(tf.convert_to_tensor, (scale.left, scale.right)))
  return tf.convert_to_tensor(scale)


def _ours(geometry, engine='bookkeeping', budget=None):
  def make(model, task):
    run = engines.choose(engine, model, [contract.Ask()], tf.constant(task.x))
    example_loss = losses.ExampleLoss(loss())
    scale = _scale(geometry, model.trainable_variables) if geometry else ()

    def step(x, y):
      batch = interface.Batch(x, y, (), tf.ones([x.shape[0]], tf.bool))
      queries = [contract.Query(scale=[_read(s) for s in scale] or ())]
      arguments = model, example_loss, batch, interface.Request([contract.Ask()], queries, [0.1])
      within = run
      if budget is not None:
        rows = chunks.rows_within(budget, run, *arguments, x.shape[0])
        within = chunks.chunked(run, rows=rows, keep_outputs=False)
      return within(*arguments).sums[0].total

    return step

  return make


def _fit(name, optimizer, jit):
  """What `fit` repeats: its compiled function of an iterator over batches."""
  task = models.MODELS[name]()
  model = task.build(keras)
  if optimizer is keras.optimizers.Adam:
    model.compile(optimizer(1e-3), loss(), jit_compile=jit)
  else:
    model = tfdp.make_private(model)
    model.compile(optimizer(1e-3, l2_norm_clip=0.1, noise_multiplier=1.0, batch_size=len(task.x)),
                  loss(), jit_compile=jit)
  return fit_step(model, task)


def fit_step(model, task):
  function = model.make_train_function() or model.train_function
  batches = iter(tf.data.Dataset.from_tensors((task.x, task.y)).repeat())
  def step():
    logs = function(batches)
    logs = logs[0] if isinstance(logs, (list, tuple)) else logs
    return float(np.asarray(tf.nest.flatten(logs)[0]))
  step()
  variables = model.optimizer.variables
  return step, _bytes(model.weights) + _bytes(variables() if callable(variables) else variables)


def _bytes(variables):
  return sum(int(np.prod(v.shape)) * tf.as_dtype(v.dtype).size for v in variables)
