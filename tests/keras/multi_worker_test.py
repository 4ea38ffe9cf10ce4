# SPDX-License-Identifier: Apache-2.0
"""Two processes under MultiWorkerMirroredStrategy: one sum, one noise, one device's steps."""

import json
import os
import signal
import socket
import subprocess
import sys

import numpy as np

# Devices and the cluster are fixed when TensorFlow starts, hence processes of their own.
_PROGRAM = '''
import sys
import numpy as np
import tensorflow as tf
alone = sys.argv[2] == 'alone'
# Before anything else touches TensorFlow: it starts the collectives.
strategy = tf.distribute.get_strategy() if alone else tf.distribute.MultiWorkerMirroredStrategy()
import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
keras = compat.keras
assert strategy.num_replicas_in_sync == (1 if alone else 2)
rng = np.random.default_rng(0)
x, y = rng.normal(size=(32, 3)).astype('float32'), rng.normal(size=(32, 1)).astype('float32')

def fit(model, batches):
  if alone or not compat.KERAS_3:
    model.fit(batches, verbose=0)
    return
  try:  # The `fit` of Keras 3 does not know several workers; its pieces do.
    model.fit(batches, verbose=0)
  except NotImplementedError as error:
    assert 'model.train_step' in str(error), error
  else:
    raise AssertionError('fit went on')
  stepper = lambda: tf.function(lambda batch: strategy.run(model.train_step, args=(batch,)))
  for i, batch in enumerate(strategy.experimental_distribute_dataset(batches)):
    if not i:
      try:
        stepper()(batch)
      except tfdp.PrivacyError as error:
        assert 'tfdp.validate_model' in str(error), error
      else:
        raise AssertionError('a model that nobody has validated was trained')
      tfdp.validate_model(model)
      step = stepper()
    step(batch)

def train(optimizer, x, y, width):
  with strategy.scope():
    keras.utils.set_random_seed(1)
    model = tfdp.DPSequential([keras.layers.Input((x.shape[1],)), keras.layers.Dense(width),
                               keras.layers.Dense(1)])
    model.compile(optimizer=optimizer(), loss='mse')
  start = model.get_weights()
  fit(model, tf.data.Dataset.from_tensor_slices((x, y)).batch(8))
  assert model.optimizer.steps_done == len(x) // 8, model.optimizer.steps_done
  return model.get_weights(), start

private = dict(l2_norm_clip=0.5, noise_multiplier=2.0, batch_size=8)
seeded, _ = train(lambda: tfdp.DPAdam(0.1, seed=5, **private), x, y, 40)
# Fresh noise, on no gradients at all: the step of DP-SGD is the noise.
after, start = train(lambda: tfdp.DPSGD(1.0, **private), 0 * x[:8], 0 * y[:8], 2000)
np.savez(sys.argv[1], *seeded, noise=after[0] - start[0])
'''


def _ports(count):
  sockets = [socket.socket() for _ in range(count)]
  try:
    for one in sockets:
      one.bind(('127.0.0.1', 0))
    return [one.getsockname()[1] for one in sockets]
  finally:
    for one in sockets:
      one.close()


def test_two_workers_equal_one_device(tmp_path):
  workers = [f'127.0.0.1:{port}' for port in _ports(2)]
  started = {}
  try:
    for name in ('alone', '0', '1'):
      environment = {key: value for key, value in os.environ.items() if key != 'TF_CONFIG'}
      environment.update(TF_CPP_MIN_LOG_LEVEL='2', CUDA_VISIBLE_DEVICES='')
      if name != 'alone':
        environment['TF_CONFIG'] = json.dumps({
            'cluster': {'worker': workers}, 'task': {'type': 'worker', 'index': int(name)}})
      with open(tmp_path / f'{name}.log', 'wb') as log:
        started[name] = subprocess.Popen(
            [sys.executable, '-c', _PROGRAM, tmp_path / f'{name}.npz', name], env=environment,
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    for name, process in started.items():
      assert process.wait(400) == 0, (name, (tmp_path / f'{name}.log').read_text()[-3000:])
  finally:
    for process in started.values():
      if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

  results = {name: dict(np.load(tmp_path / f'{name}.npz')) for name in started}
  trained = [key for key in results['alone'] if key.startswith('arr_')]
  assert len(trained) == 4
  for key in trained:
    np.testing.assert_allclose(results['0'][key], results['alone'][key], rtol=1e-4, atol=1e-5)
  for key in results['0']:  # Every worker has drawn the same noise.
    np.testing.assert_array_equal(results['0'][key], results['1'][key])
  noise = results['0']['noise']
  assert noise.size == 6000
  assert abs(np.std(noise) / (2.0 * 0.5 / 8) - 1) < 0.05  # Drawn once: not sqrt(2) of it.
  assert np.abs(noise - results['alone']['noise']).max() > 0.1  # Nor twice in two runs.
