# SPDX-License-Identifier: Apache-2.0
"""What a sentence of StackOverflow costs the usual LSTM: a client in process, and plain `fit`.

    python benchmarks/evidence/federated_sentences.py [--clients 4] [--sentences 64] [--repeats 3]

The model of `tfdp.federated.tasks.stackoverflow` has 4,050,748 parameters for 10,000 words. Ids are
random: what they are does not change the work. The usual table has 1,500 rounds of 100 clients of
at most 128 sentences.
"""

import argparse
import collections
import os
import time

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import numpy as np
import tensorflow as tf

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)

# pylint: disable=wrong-import-position
import tfdp_adaptive as tfdp  # noqa: E402
from tfdp_adaptive.federated import rounds  # noqa: E402
from tfdp_adaptive.federated import tasks  # noqa: E402

WORDS, BATCH, LENGTH, USUAL = 10_000, 16, 20, 1500 * 100 * 128


def in_process(examples, repeats):
  """Yields CPU seconds of rounds of all clients; the first of them traces."""
  plan = tfdp.PrivacyPlan(
      batch_size=len(examples), steps=10, l2_norm_clip=1.0, noise_multiplier=1.0,
      target_delta=1e-6, population_size=10**6, unit='user')
  process = tfdp.federated.build_private_fed_avg(
      lambda: tasks.usual_lstm(WORDS + 4), loss=tasks.WordLoss(),
      server_rule=tfdp.rules.dp_adam(), plan=plan, server_learning_rate=.01,
      client_optimizer_fn=tf.keras.optimizers.SGD(.3))
  users, state = tfdp.federated.Users(examples, batch_size=BATCH), process.initialize()
  with process.reach(1, users) as engine:
    for _ in range(1 + repeats):
      start = time.process_time()
      rounds.run(process, engine, state, users.client_ids)
      yield time.process_time() - start


def plain(examples, repeats):
  """Yields CPU seconds of plain Keras training on the same sentences."""
  model = tasks.usual_lstm(WORDS + 4)
  model.compile(tf.keras.optimizers.SGD(.3), tasks.WordLoss())
  x, y = (np.concatenate([one[name] for one in examples.values()]) for name in 'xy')
  for _ in range(1 + repeats):
    start = time.process_time()
    model.fit(x, y, batch_size=BATCH, verbose=0, shuffle=False)
    yield time.process_time() - start


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--clients', type=int, default=4)
  parser.add_argument('--sentences', type=int, default=64)
  parser.add_argument('--repeats', type=int, default=3)
  arguments = parser.parse_args()
  rng = np.random.default_rng(0)
  draw = lambda: rng.integers(1, WORDS + 4, [arguments.sentences, LENGTH], np.int32)
  examples = {f'{i}': collections.OrderedDict(x=draw(), y=draw())
              for i in range(arguments.clients)}
  pairs = list(zip(*(run(examples, arguments.repeats) for run in (in_process, plain))))[1:]
  sentences = arguments.clients * arguments.sentences
  ours, fit = (np.median(seconds) / sentences for seconds in zip(*pairs))
  parameters = tasks.usual_lstm(WORDS + 4).count_params()
  print(f'TensorFlow {tf.__version__}, {parameters:,} parameters, {sentences} sentences '
        f'of {LENGTH} ids,\nmedian of {arguments.repeats}, one thread an operation; CPU ms a '
        f'sentence\n\nclients in process {1e3 * ours:6.1f}\nplain fit          '
        f'{1e3 * fit:6.1f}\nratio              {ours / fit:6.2f}\n\nthe usual table, '
        f'{USUAL / 1e6:.1f} million sentences: {USUAL * ours / 3600:.0f} CPU hours')


if __name__ == '__main__':
  main()
