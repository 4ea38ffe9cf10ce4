# SPDX-License-Identifier: Apache-2.0
"""What a step costs on several workers, or on several devices of one process.

    PYTHONPATH=. python benchmarks/speed/workers.py [--cases mlp:512,mlp:4096,cnn:512] [--steps 20]
    PYTHONPATH=. python benchmarks/speed/workers.py --devices 1,2,4

The first starts every case as one process and as two workers of this machine, with `--plain` also
by `keras.optimizers.Adam`, which Keras 3 does not train on several workers. It prints processor
time (user and system, of all workers together): of the start, up to the fifth step, and of each
step after it. Bytes are those of the loopback device a step, so nothing else should use it. The
second prints the largest memory of a process whose processor is that many devices, with and
without a `memory_budget` of 64 MiB.
"""

import argparse
import json
import os
import pathlib
import resource
import socket
import subprocess
import sys

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
FIRST, ROWS = 5, 8192


def sent():
  """Bytes that went through the loopback device so far."""
  lines = pathlib.Path('/proc/net/dev').read_text(encoding='utf-8').splitlines()
  return next(int(line.split()[9]) for line in lines if line.strip().startswith('lo:'))


def child(kind, size, private, steps, devices=0, budget=None):
  """One worker, or one process with `devices`; prints what it used as JSON."""
  import numpy as np
  import tensorflow as tf
  if devices:
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices('CPU')[0],
        [tf.config.LogicalDeviceConfiguration()] * devices)
    strategy = tf.distribute.MirroredStrategy([f'CPU:{i}' for i in range(devices)])
  else:  # Before TensorFlow does anything else.
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
  import tfdp_adaptive as tfdp
  from tfdp_adaptive import compat
  keras, layers = compat.keras, compat.keras.layers
  last = FIRST + steps

  class Clock(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
      if batch in (FIRST, last):
        times = os.times()
        now = times.user + times.system, sent()
        self.begin, self.end = (now, now) if batch == FIRST else (self.begin, now)

  stacks = {
      'mlp': lambda: [layers.Input([784]), layers.Dense(768, 'relu'), layers.Dense(512, 'relu'),
                      layers.Dense(10)],
      'wide': lambda: [layers.Input([784]), layers.Dense(2048, 'relu'),
                       layers.Dense(2048, 'relu'), layers.Dense(10)],
      'cnn': lambda: [  # TensorFlow Privacy's tutorial.
          layers.Input([784]), layers.Reshape([28, 28, 1]),
          layers.Conv2D(16, 8, strides=2, padding='same', activation='relu'),
          layers.MaxPool2D(2, 1), layers.Conv2D(32, 4, strides=2, activation='relu'),
          layers.MaxPool2D(2, 1), layers.Flatten(), layers.Dense(32, activation='relu'),
          layers.Dense(10)]}
  plan = tfdp.PrivacyPlan(
      population_size=ROWS, batch_size=size, steps=last + 2, l2_norm_clip=1.0,
      noise_multiplier=1.0, target_delta=1e-6, sampling=tfdp.sampling.FixedOrder())
  with strategy.scope():
    model = (tfdp.DPSequential if private else keras.Sequential)(stacks[kind]())
    performance = tfdp.Performance(memory_budget=budget)
    model.compile(tfdp.DPAdam(plan=plan, performance=performance) if private else
                  keras.optimizers.Adam(),
                  loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
  data = (np.random.default_rng(0).normal(size=(ROWS, 784)).astype(np.float32),
          np.arange(ROWS) % 10)
  batches = plan.batches(data) if private else (
      tf.data.Dataset.from_tensor_slices(data).repeat().batch(size, drop_remainder=True))
  clock = Clock()
  model.fit(batches, steps_per_epoch=last + 2, callbacks=[clock], verbose=0)
  print(json.dumps({
      'start': clock.begin[0], 'step': (clock.end[0] - clock.begin[0]) / steps,
      'bytes': (clock.end[1] - clock.begin[1]) / steps, 'weights': model.count_params(),
      'memory': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}), flush=True)


def run(workers, *arguments, **environment):
  """What each of the workers prints."""
  sockets = [socket.create_server(('127.0.0.1', 0)) for _ in range(workers)]
  cluster = {'worker': [f'127.0.0.1:{one.getsockname()[1]}' for one in sockets]}
  for one in sockets:
    one.close()
  processes = []
  for index in range(workers):
    config = {'cluster': cluster, 'task': {'type': 'worker', 'index': index}}
    own = {} if workers == 1 else {'TF_CONFIG': json.dumps(config)}
    processes.append(subprocess.Popen(
        [sys.executable, __file__, '--child', json.dumps(arguments)], stdout=subprocess.PIPE,
        text=True, env={**os.environ, **own, **environment}))
  printed = [process.communicate()[0].splitlines() for process in processes]
  return [json.loads(lines[-1]) for lines in printed]


def table_of_workers(cases, steps, plain):
  print(f'{"":22}{"weights":>9}{"start, s":>14}{"ms a step":>14}{"ratio":>7}{"MB a step":>11}',
        flush=True)
  for case in cases:
    kind, size = case.split(':')
    for private in (True, False)[:1 + plain]:
      one, two = (run(workers, kind, int(size), private, steps) for workers in (1, 2))
      name = f'{kind} of {size} {"private" if private else "plain"}'
      start, step = ([sum(each[what] for each in some) for some in (one, two)]
                     for what in ('start', 'step'))
      print(f'{name:22}'
            f'{one[0]["weights"]:9,}{start[0]:7.1f}{start[1]:7.1f}{1e3 * step[0]:7.1f}'
            f'{1e3 * step[1]:7.1f}{step[1] / step[0]:7.2f}{two[0]["bytes"] / 1e6:11.2f}',
            flush=True)


def table_of_devices(devices):
  print(f'{"devices":10}{"MiB":>8}{"MiB with a budget":>20}', flush=True)
  for count in devices:
    most = [run(1, 'wide', 2048, True, 2, count, budget, TF_NUM_INTEROP_THREADS='4')[0]['memory']
            for budget in (None, 2**26)]
    print(f'{count:<10}{most[0]:8.0f}{most[1]:20.0f}', flush=True)


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--cases', default='mlp:512,mlp:4096,cnn:512')
  parser.add_argument('--steps', type=int, default=20)
  parser.add_argument('--plain', action='store_true')
  parser.add_argument('--devices')
  parser.add_argument('--child', help=argparse.SUPPRESS)
  arguments = parser.parse_args()
  if arguments.child:
    child(*json.loads(arguments.child))
  elif arguments.devices:
    table_of_devices([int(count) for count in arguments.devices.split(',')])
  else:
    table_of_workers(arguments.cases.split(','), arguments.steps, arguments.plain)


if __name__ == '__main__':
  main()
