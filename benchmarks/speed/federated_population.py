# SPDX-License-Identifier: Apache-2.0
"""How a private round in process grows with the cohort, out of a million users of Zipf sizes.

    python benchmarks/speed/federated_population.py [--users 1000000] [--cohorts
        100,1000,10000,50000]

User i has `largest / i` examples (at least one), made up when the user is drawn, so memory is that
of a call. Cohorts are Poisson samples. Medians over the rounds of the CPU seconds of all threads;
"resident" is by how much the largest resident memory so far is above that before the first round.
"""

import argparse
import os
import resource
import time

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import numpy as np
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import rules

FEATURES, CLASSES, BATCH = 100, 10, 20


class ZipfUsers:
  """`Users` that exist only when they are drawn."""

  element_type_structure = dict(
      x=tf.TensorSpec([None, FEATURES]), y=tf.TensorSpec([None], tf.int32))

  def __init__(self, count, largest, cap):
    self.client_ids = list(range(1, count + 1))
    self.sizes = np.minimum(np.maximum(1, largest // np.arange(1, count + 1)), cap)
    self.drawn = []

  def batches(self, client):
    """Yields the batches of a user."""
    size = int(self.sizes[client - 1])
    self.drawn.append(size)
    rng = np.random.default_rng(client)
    x = rng.normal(size=[size, FEATURES]).astype(np.float32)
    y = rng.integers(CLASSES, size=size).astype(np.int32)
    for i in range(0, size, BATCH):
      yield dict(x=x[i:i + BATCH], y=y[i:i + BATCH])

  def create_tf_dataset_for_client(self, client):
    """A data set of the same."""
    return tf.data.Dataset.from_generator(
        lambda: self.batches(client), output_signature=self.element_type_structure)


def resident():
  """The most memory that the process has had, in MB."""
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--users', type=int, default=1_000_000)
  parser.add_argument('--largest', type=int, default=50_000)
  parser.add_argument('--cap', type=int, default=256)
  parser.add_argument('--parameters', type=int, default=10_000)
  parser.add_argument('--cohorts', default='100,1000,10000,50000')
  parser.add_argument('--rounds', type=int, default=3)
  arguments = parser.parse_args()
  width = arguments.parameters // (FEATURES + CLASSES + 1)
  layers = tf.keras.layers
  print(f'{arguments.users:,} users of {arguments.cap} examples at most, {arguments.parameters:,} '
        f'parameters, {arguments.rounds} rounds each after one to warm up\n')
  print(f'{"clients":>8} {"examples":>9} {"CPU s":>7} {"clients/s":>9} {"resident MB":>11}')
  for expected in map(int, arguments.cohorts.split(',')):
    users = ZipfUsers(arguments.users, arguments.largest, arguments.cap)
    plan = tfdp.PrivacyPlan(
        batch_size=expected, steps=arguments.rounds + 1, l2_norm_clip=1.0, noise_multiplier=1.0,
        target_delta=1e-7, population_size=arguments.users, unit='user')
    process = tfdp.federated.build_private_fed_avg(
        lambda: tf.keras.Sequential([
            layers.Input((FEATURES,)), layers.Dense(width, activation='relu'),
            layers.Dense(CLASSES)]),
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        server_rule=rules.dp_adam(), plan=plan, server_learning_rate=0.01,
        client_optimizer_fn=lambda: tf.keras.optimizers.SGD(0.1))
    before, rows = resident(), []
    tfdp.federated.simulate(
        process, users, progress=False, rounds_per_evaluation=1,
        evaluate=lambda weights, u=users, r=rows: r.append(
            (len(u.drawn), sum(u.drawn), time.process_time())) or {})
    clients, examples, seconds = np.diff(np.array(rows), axis=0)[-arguments.rounds:].T
    print(f'{np.median(clients):8.0f} {np.median(examples):9.0f} {np.median(seconds):7.2f} '
          f'{clients.sum() / seconds.sum():9.0f} {resident() - before:11.0f}', flush=True)


if __name__ == '__main__':
  main()
