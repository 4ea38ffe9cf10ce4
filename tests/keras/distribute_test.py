# SPDX-License-Identifier: Apache-2.0
"""Two replicas (logical CPU devices): sums first, one noise, the single device's result."""

import subprocess
import sys

import pytest

# Logical devices must be made before TensorFlow starts, hence processes of their own.
_TWO = '''
import tempfile
import numpy as np
import tensorflow as tf
devices = tf.config.list_physical_devices('CPU')
tf.config.set_logical_device_configuration(devices[0], [tf.config.LogicalDeviceConfiguration()] * 2)
import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
keras = compat.keras
mirrored = tf.distribute.MirroredStrategy(['/cpu:0', '/cpu:1'])
zeros = tf.data.Dataset.from_tensors((np.zeros((8, 3000), 'float32'), np.zeros((8, 1), 'float32')))
'''
_EQUAL = '''
rng = np.random.default_rng(0)
x, y = rng.normal(size=(32, 3)).astype('float32'), rng.normal(size=(32, 1)).astype('float32')

def train(strategy, seed, steps=4, learning_rate=0.1, x=x, y=y):
  with strategy.scope():
    keras.utils.set_random_seed(1)
    model = tfdp.DPSequential([keras.layers.Input((3,)), keras.layers.Dense(400),
                               keras.layers.Dense(1)])
    model.compile(optimizer=tfdp.DPAdam(learning_rate, l2_norm_clip=0.5, noise_multiplier=1.0,
                                        batch_size=8, seed=seed), loss='mse')
  start = model.get_weights()
  model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(8), verbose=0, epochs=1)
  assert model.optimizer.steps_done == steps, model.optimizer.steps_done
  return model, start

assert mirrored.num_replicas_in_sync == 2
one, _ = train(tf.distribute.get_strategy(), 5)
two, _ = train(mirrored, 5)
for a, b in zip(one.get_weights(), two.get_weights()):
  np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
for variable in two.trainable_variables:
  values = [np.asarray(v) for v in mirrored.experimental_local_results(
      getattr(variable, 'value', variable) if compat.KERAS_3 else variable)]
  for value in values[1:]:
    np.testing.assert_array_equal(values[0], value)
# Files hold no exact metrics, and writing them inside the scope leaves the metrics as they are.
metrics = lambda: [float(compat.read(v)) for metric in two.metrics for v in metric.variables]
shown = metrics()
with mirrored.scope(), tempfile.TemporaryDirectory() as folder:
  two.save_weights(f'{folder}/two.weights.h5')
assert any(shown) and metrics() == shown, (shown, metrics())
# Without a seed, the noise is drawn once and has the accounted size: DP-SGD on zero gradients.
with mirrored.scope():
  model = tfdp.DPSequential([keras.layers.Input((3000,)), keras.layers.Dense(1, use_bias=False)])
  model.compile(optimizer=tfdp.DPSGD(1.0, l2_norm_clip=0.5, noise_multiplier=2.0, batch_size=8),
                loss='mse')
before = model.get_weights()[0]
model.fit(zeros, verbose=0)
std = np.std(model.get_weights()[0] - before)
assert abs(std / (2.0 * 0.5 / 8) - 1) < 0.1, std
try:
  model.fit(zeros.unbatch().batch(6), verbose=0)
except Exception as error:
  assert 'exactly batch_size=8' in str(error), error
else:
  raise AssertionError('a wrong global batch size was accepted')
'''
_REFUSED = '''
with mirrored.scope():  # Built already, so it is validated here, where there is no replica.
  tfdp.make_private(keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)]))
class Centre(keras.layers.Layer):
  def call(self, x):
    return x - tf.reduce_mean(x, 0, keepdims=True)

with mirrored.scope():
  model = tfdp.DPSequential([keras.layers.Input((3000,)), Centre(), keras.layers.Dense(1)])
  model.compile(optimizer=tfdp.DPSGD(1.0, l2_norm_clip=0.5, noise_multiplier=2.0, batch_size=8),
                loss='mse')
try:
  model.fit(zeros, verbose=0)
except tfdp.PrivacyError as error:
  assert 'mixes examples' in str(error), error
else:
  raise AssertionError('a layer that mixes examples was not found')
class Late(keras.Model):  # Tells nothing of its inputs.
  def __init__(self, *stack):
    super().__init__()
    self.stack = stack

  def call(self, x, training=False):
    for layer in self.stack:
      x = layer(x)
    return x

def late(*stack):
  model = tfdp.make_private(Late(*stack))
  model.compile(optimizer=tfdp.DPSGD(1.0, l2_norm_clip=0.5, noise_multiplier=2.0, batch_size=8),
                loss='mse')
  return model

with mirrored.scope():
  bad, good, mute = [late(Centre(), keras.layers.Dense(1)), late(keras.layers.Dense(1)),
                     late(keras.layers.Dense(1))]
def refused(model, data, why, **kwargs):
  try:
    model.fit(data, verbose=0, **kwargs)
  except tfdp.PrivacyError as error:
    assert why in str(error), error
  else:
    raise AssertionError('a model that could not be validated was trained')
refused(bad, zeros, 'mixes examples')
refused(mute, (batch for batch in zeros), 'neither the model nor the data', steps_per_epoch=1)
good.fit(zeros, verbose=0)
assert good.optimizer.steps_done == 1
'''
# Batches of any size over two replicas, noise that has a state, chunks for memory.
_PLANNED = '''
rng = np.random.default_rng(0)
x, y = rng.normal(size=(32, 3)).astype('float32'), rng.normal(size=(32, 1)).astype('float32')

def private(strategy, **kwargs):
  plan = tfdp.PrivacyPlan(
      population_size=32, batch_size=9, steps=5, l2_norm_clip=0.5, noise_multiplier=1.0,
      target_delta=1e-3, seed=3, sampling=tfdp.sampling.FixedOrder(), adjacency='zero_out',
      mechanism=tfdp.mechanisms.BandedToeplitz(bands=2, steps=5))
  with strategy.scope():
    keras.utils.set_random_seed(1)
    model = tfdp.DPSequential([keras.layers.Input((3,)), keras.layers.Dense(8, 'tanh'),
                               keras.layers.Dense(1)])
    model.compile(tfdp.DPAdam(0.1, plan=plan, seed=5, **kwargs), loss='mse')
  return plan, model

def same(model, other):
  for a, b in zip(model.get_weights(), other.get_weights()):
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)

plan, alone = private(tf.distribute.get_strategy())
alone.fit(plan.batches((x, y)), verbose=0)
_, both = private(mirrored)
both.fit(plan.batches((x, y)), verbose=0)
same(both, alone)
assert both.ledger == alone.ledger and both.optimizer.steps_done == 5
_, chunked = private(mirrored, performance=tfdp.Performance(memory_budget=600))
chunked.fit(plan.batches((x, y)), verbose=0)
same(chunked, alone)

# Each device has its own copy of weights and of every state, and draws its noise by itself.
devices = ['CPU:0', 'CPU:1']
def places(values):
  return [value.device.rpartition('device:')[2] for value in values]
state = tf.nest.flatten(both.optimizer.run.state)
assert sum(v.shape.num_elements() for v in state) > 3 * both.count_params()  # Noise of the past.
for variable in [*both.trainable_variables, *state]:
  raw = compat.raw_variable(variable)
  assert places(mirrored.experimental_local_results(raw)) == devices, raw

# A loop of one's own.
plan, loop = private(mirrored)
tfdp.validate_model(loop)
def stepped(model):
  return tf.function(lambda batch: mirrored.run(model.train_step, args=(batch,)))

step = stepped(loop)
with mirrored.scope():
  for batch in plan.batches((x, y), strategy=mirrored):
    step(batch)
same(loop, alone)
def operations(model, kind):
  found = stepped(model).get_concrete_function(batch).graph.get_operations()
  return [op for op in found if kind in op.type]

draws = places(operations(loop, 'StatelessRandomUniformFullInt'))
assert draws and sorted(draws) == sorted(devices * (len(draws) // 2)), draws
assert [len(operations(model, 'While')) for model in (loop, chunked)] == [0, 2]

# Made outside the scope, a model is on one device only.
_, outside = private(tf.distribute.get_strategy())
try:
  with mirrored.scope():
    outside.fit(plan.batches((x, y)), verbose=0)
except tfdp.PrivacyError as error:
  assert 'strategy.scope()' in str(error), error
else:
  raise AssertionError('a model of one device was trained on two')
'''


def _run(program):
  done = subprocess.run([sys.executable, '-c', f'{_TWO}{program}print("done")'],
                        capture_output=True, text=True, timeout=500, check=False)
  assert done.returncode == 0 and done.stdout.strip().endswith('done'), done.stderr[-3000:]


def test_two_replicas_equal_one_device():
  _run(_EQUAL)


@pytest.mark.thorough
def test_what_mixes_examples_is_refused_before_replicas_see_it():
  _run(_REFUSED)


@pytest.mark.thorough
def test_a_plan_takes_the_steps_of_one_device_in_fit_and_in_a_loop():
  _run(_PLANNED)
