# SPDX-License-Identifier: Apache-2.0
"""A private round beside TFF's own non-private FedAvg round on the same clients.

    python benchmarks/speed/federated_round.py [--parameters 1000000] [--clients 48] [--rounds 8]

All processes run in turns on one worker, so that a busy machine disturbs all
alike; the figures are medians of wall-clock seconds and of the ratio to the
first row of the same turn. That row is TFF's `build_unweighted_fed_avg` with the
training loop that ours has too, DATASET_ITERATOR; the second has TFF's default.

"whole process in TFF" sends the server's state to the worker and back in every
round, as any `tff.learning` process does; "server here" is what `simulate` does:
clients in TFF, the private server beside it. "RuleQuery in TFF" is the query in
TFF's own `DifferentiallyPrivateFactory` and `build_unweighted_fed_avg`.
"""

import argparse
import collections
import functools
import os
import time

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

import tfdp_adaptive as tfdp
from tfdp_adaptive import queries
from tfdp_adaptive import rules
from tfdp_adaptive.federated import rounds as rounds_lib
from tfdp_adaptive.federated import tff_process

FEATURES, CLASSES, EXAMPLES, STEPS = 100, 10, 20, 1000


def model(parameters):
  """One hidden layer, of the width that gives about `parameters` weights."""
  spec = collections.OrderedDict(x=tf.TensorSpec([None, FEATURES]),
                                 y=tf.TensorSpec([None], tf.int32))
  width = parameters // (FEATURES + CLASSES + 1)

  def model_fn():
    return tff.learning.models.from_keras_model(
        tf.keras.Sequential([tf.keras.layers.InputLayer((FEATURES,)),
                             tf.keras.layers.Dense(width, activation='relu'),
                             tf.keras.layers.Dense(CLASSES)]),
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True), input_spec=spec)

  return model_fn


def make_users(count):
  rng = np.random.default_rng(0)
  return tfdp.federated.Users(
      {str(i): collections.OrderedDict(
          x=rng.normal(size=[EXAMPLES, FEATURES]).astype(np.float32),
          y=rng.integers(CLASSES, size=EXAMPLES).astype(np.int32)) for i in range(count)},
      batch_size=EXAMPLES)


def make_plan(clients, mechanism=None, **kwargs):
  correlated = mechanism is not None
  return tfdp.PrivacyPlan(
      batch_size=clients, steps=STEPS, l2_norm_clip=1.0, noise_multiplier=1.0, target_delta=1e-6,
      population_size=10_000, unit='user',
      sampling=tfdp.sampling.FixedOrder() if correlated else tfdp.sampling.Poisson(),
      **(dict(mechanism=mechanism) if correlated else {}), **kwargs)


def contestants(model_fn, clients, users):
  """{name: (function that runs one round, bytes of server state)}; the first is TFF's."""
  optimizer = tff.learning.optimizers.build_sgdm(0.1)
  cohort = users.client_ids
  loop = tff.learning.LoopImplementation.DATASET_ITERATOR
  fed_avg = functools.partial(
      tff.learning.algorithms.build_unweighted_fed_avg, model_fn, optimizer)

  def in_tff(process):
    state = [process.initialize()]

    def run():
      data = [users.create_tf_dataset_for_client(client) for client in cohort]
      state[0], _ = process.next(state[0], data)
    return run, state_bytes(state[0])

  def here(process):
    state = [tf.nest.map_structure(tf.constant, process.initialize())]
    step = tf.function(process.server.step)

    def run():
      with process.reach(1, users) as engine:
        outcome = rounds_lib.run(process, engine, state[0], cohort)
      state[0], _ = step(state[0], outcome.answers)
    return run, state_bytes(state[0])

  build = lambda mechanism=None, rule=None: tfdp.federated.build_private_fed_avg(
      model_fn, server_rule=rule or rules.dp_adam(), plan=make_plan(clients, mechanism),
      server_learning_rate=0.01, client_optimizer_fn=optimizer)
  query = queries.RuleQuery(rules.dp_adam(), tff_process.trainable_specs(model_fn()),
                            plan=make_plan(clients))
  independent, blt = build(), build(tfdp.mechanisms.BLT(3, STEPS))
  return {
      'TFF, not private': in_tff(fed_avg(loop_implementation=loop)),
      'TFF, not private, its default loop': in_tff(fed_avg()),
      'DP-Adam, independent noise, server here': here(independent),
      'DP-Adam, BLT (3 buffers), server here': here(blt),
      'DP-Adam, 8 bands, server here': here(build(tfdp.mechanisms.BandedToeplitz(8, STEPS))),
      'scale-then-privatize, independent, server here': here(
          build(rule=rules.scale_then_privatize(scale_epsilon=1e-3))),
      'DP-Adam, independent, whole process in TFF': in_tff(independent),
      'DP-Adam, independent, RuleQuery in TFF': in_tff(fed_avg(
          tff.learning.optimizers.build_sgdm(0.01), loop_implementation=loop,
          model_aggregator=tff.aggregators.DifferentiallyPrivateFactory(query))),
      'DP-Adam, BLT (3 buffers), whole process in TFF': in_tff(blt),
  }


def state_bytes(state):
  return sum(np.asarray(x).nbytes for x in tf.nest.flatten(state))


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--parameters', type=int, default=1_000_000)
  parser.add_argument('--clients', type=int, default=48)
  parser.add_argument('--rounds', type=int, default=8)
  arguments = parser.parse_args()
  model_fn, users = model(arguments.parameters), make_users(arguments.clients)
  runs = contestants(model_fn, arguments.clients, users)
  seconds = {name: [] for name in runs}
  for _ in range(arguments.rounds + 1):
    for name, (run, _) in runs.items():
      start = time.perf_counter()
      run()
      seconds[name].append(time.perf_counter() - start)
  count = sum(spec.shape.num_elements() for spec in tff_process.trainable_specs(model_fn()))
  print(f'{count:,} parameters, {arguments.clients} clients, {arguments.rounds} rounds each after '
        f'one to warm up, {os.cpu_count()} cores\n')
  print(f'{"round":50} {"seconds":>8} {"ratio":>6} {"clients/s":>9} {"state MB":>9}')
  base = np.array(next(iter(seconds.values()))[1:])
  for name, times in seconds.items():
    times = np.array(times[1:])
    print(f'{name:50} {np.median(times):8.2f} {np.median(times / base):6.2f} '
          f'{arguments.clients / np.median(times):9.1f} {runs[name][1] / 1e6:9.1f}', flush=True)


if __name__ == '__main__':
  main()
