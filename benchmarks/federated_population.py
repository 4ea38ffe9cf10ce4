# SPDX-License-Identifier: Apache-2.0
"""How a private round grows with the cohort, out of 100,000 users of Zipf sizes.

    python benchmarks/federated_population.py [--users 100000] [--cohorts 10,30,100,300,1000]

User i has `largest / i` examples (at least one), made up when the user is drawn,
so memory is that of the cohort's. Cohorts are Poisson samples. Medians over the
rounds; "worker" is the largest resident memory of the TFF worker so far.
"""

import argparse
import collections
import os

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import federated_round
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

import tfdp_adaptive as tfdp
from tfdp_adaptive import rules


class ZipfUsers:
  """`Users` that exist only when they are drawn."""

  def __init__(self, count, largest, cap, batch_size=20):
    self.client_ids = list(range(1, count + 1))
    self.sizes = np.maximum(1, largest // np.arange(1, count + 1))
    self._cap, self._batch_size = cap, batch_size
    self.drawn = []

  def create_tf_dataset_for_client(self, client_id):
    size = int(self.sizes[client_id - 1])
    size = min(size, self._cap) if self._cap else size
    self.drawn.append(size)
    rng = np.random.default_rng(client_id)
    return tf.data.Dataset.from_tensor_slices(collections.OrderedDict(
        x=rng.normal(size=[size, federated_round.FEATURES]).astype(np.float32),
        y=rng.integers(federated_round.CLASSES, size=size).astype(np.int32))).batch(
            self._batch_size)


def peak_memory(process):
  """Of the worker, which is the child of what isolates it, in MB."""
  with open(f'/proc/{process.pid}/task/{process.pid}/children', encoding='ascii') as children:
    worker = (children.read().split() or [process.pid])[0]
  with open(f'/proc/{worker}/status', encoding='utf-8') as status:
    return int(next(line for line in status if line.startswith('VmHWM')).split()[1]) / 1024


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--users', type=int, default=100_000)
  parser.add_argument('--largest', type=int, default=50_000)
  parser.add_argument('--parameters', type=int, default=10_000)
  parser.add_argument('--cohorts', default='10,30,100,300,1000')
  parser.add_argument('--rounds', type=int, default=3)
  arguments = parser.parse_args()
  model_fn = federated_round.model(arguments.parameters)
  print(f'{arguments.users:,} users, {arguments.parameters:,} parameters, '
        f'{arguments.rounds} rounds each after one to warm up\n')
  print(f'{"clients":>8} {"cap":>6} {"examples":>9} {"seconds":>8} {"clients/s":>9} '
        f'{"worker MB":>9}')
  for expected in map(int, arguments.cohorts.split(',')):
    for cap in (256, None):
      users = ZipfUsers(arguments.users, arguments.largest, cap)
      plan = tfdp.PrivacyPlan(
          batch_size=expected, steps=arguments.rounds + 1, l2_norm_clip=1.0, noise_multiplier=1.0,
          target_delta=1e-6, population_size=arguments.users, unit='user')
      process = tfdp.federated.build_private_fed_avg(
          model_fn, server_rule=rules.dp_adam(), plan=plan, server_learning_rate=0.01,
          client_optimizer_fn=tff.learning.optimizers.build_sgdm(0.1))
      sizes = []
      with tfdp.federated.Workers() as workers:
        result = tfdp.federated.simulate(
            process, users, workers=workers, progress=False, rounds_per_evaluation=1,
            evaluate=lambda weights, u=users, s=sizes: s.append(len(u.drawn)) or {})
        memory = peak_memory(workers.processes[0])
      counts = np.diff([0] + sizes)[1:]
      seconds = result.speed['seconds'][1:]
      print(f'{np.median(counts):8.0f} {cap or "none":>6} {sum(users.drawn) / len(sizes):9.0f} '
            f'{np.median(seconds):8.2f} {np.sum(counts) / np.sum(seconds):9.1f} {memory:9.0f}',
            flush=True)


if __name__ == '__main__':
  main()
