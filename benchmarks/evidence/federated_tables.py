# SPDX-License-Identifier: Apache-2.0
"""The usual tables of federated learning, with user-level privacy: servers at equal epsilon.

    python benchmarks/evidence/federated_tables.py stackexchange posts.jsonl.xz --vocabulary
        train.txt.xz
    python benchmarks/evidence/federated_tables.py shakespeare roles.jsonl.xz --vocabulary
        train.txt.xz
    python benchmarks/evidence/federated_tables.py stackoverflow stackoverflow.sqlite --vocabulary
        words.txt
    python benchmarks/evidence/federated_tables.py emnist emnist_all.sqlite
    python benchmarks/evidence/federated_tables.py cifar100 cifar100.sqlite

Texts of one's own are JSON lines with `client` and `text`. Their next words are predicted from
three; words out of the vocabulary are read and not predicted. The SQLite files are TFF's,
decompressed, with the models that are usual for them. The vocabulary is that of a public text, or a
file of one word per line: its most frequent words. All private rows have the same
(epsilon, delta) for users. `--runs FOLDER` keeps the runs: repeat the command, and they go on where
they were interrupted.

Settings of `METHODS` were chosen by hand for another small model of Stack Exchange. Server learning
rates are chosen among `--rates`, so many times those, by one run each, on every second batch of
held-out examples; the table has the other batches. Clip norms are tuned in `federated_servers.py`.
"""

import argparse
import collections
import functools
import os
import pathlib
import tempfile

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import numpy as np
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import rules
from tfdp_adaptive.examples import corpus
from tfdp_adaptive.examples import federated_tasks
from tfdp_adaptive.examples import next_word

BANDS = 4
# Rounds, expected users in each; words; a client's batch, epochs, cap and learning rate.
Usual = collections.namedtuple('Usual', 'rounds cohort words batch epochs cap rate')
USUAL = dict(
    stackexchange=Usual(100, 100, 1000, 16, 1, 16, 1.0),
    shakespeare=Usual(100, 100, 1000, 16, 1, 16, 1.0),
    stackoverflow=Usual(1500, 100, 10_000, 16, 1, 128, 10**-0.5),
    emnist=Usual(1500, 100, None, 20, 1, 418, 0.1),
    cifar100=Usual(4000, 50, None, 20, 1, 100, 0.1))

# Name: rule, server learning rate, clip norm (of scaled updates: over the root of the parameters).
METHODS = collections.OrderedDict([
    ('Adam, not private', (lambda: rules.dp_adam(epsilon=.1), 1., 1e6)),
    ('DP-SGD, momentum', (lambda: rules.dp_sgd(momentum=.9), 1., .5)),
    ('DP-Adam', (lambda: rules.dp_adam(epsilon=.1), 1., .5)),
    ('DP-AdamSTP', (lambda: rules.scale_then_privatize(scale_epsilon=1e-2, epsilon=.1), 1., .38)),
])


def windows(num_ids, counts):
  """Predicts a word from the three before it, beside the public frequencies of words."""
  layers = tf.keras.layers
  return tf.keras.Sequential([
      layers.Input([None], dtype=tf.int32), layers.Embedding(num_ids, 16),
      layers.Conv1D(16, 3, padding='causal', activation='tanh'),
      layers.Dense(num_ids, use_bias=False),
      layers.Rescaling(1.0, offset=np.log(counts / counts.sum()).tolist())])


def load(arguments):
  """The task."""
  usual = arguments.usual
  sizes = dict(batch_size=usual.batch, max_examples=usual.cap, epochs=usual.epochs)
  if usual.words is None:
    return getattr(federated_tasks, arguments.data)(arguments.file, **sizes)
  public = (corpus.read(arguments.vocabulary) if arguments.vocabulary
            else corpus.standard_library())
  words = next_word.build_vocabulary(public.sentences, usual.words)
  if len(words) < usual.words:  # A list of words has no sentences.
    words = next_word.read_vocabulary(arguments.vocabulary)[:usual.words]
  if arguments.data == 'stackoverflow':
    return tfdp.federated.tasks.stackoverflow(arguments.file, words, **sizes)
  ids = {word: number for number, word in enumerate(words, 1)}
  targets = tfdp.federated.tasks.sequences([one.words for one in public.sentences], ids, 20)['y']
  counts = np.bincount(targets.ravel(), minlength=len(words) + 4) + 1.0
  counts[[0, len(words) + 1]] = 1.0  # Neither padding nor other words are predicted.
  return federated_tasks.next_word(
      corpus.read(arguments.file, need_client=True).sentences, words,
      functools.partial(windows, counts=counts), predict_unknown=False, **sizes)


def make_plan(noise, population, arguments, l2_norm_clip):
  """Poisson sampling of users, or cyclic Poisson sampling with bands; or no privacy."""
  usual = arguments.usual
  common = dict(population_size=population, batch_size=usual.cohort, steps=usual.rounds,
                l2_norm_clip=l2_norm_clip, unit='user', target_delta=arguments.delta)
  if noise == 'none':
    return tfdp.PrivacyPlan(noise_multiplier=0.0, **common)
  if noise == 'banded':
    common.update(mechanism=tfdp.mechanisms.BandedToeplitz(BANDS, usual.rounds),
                  sampling=tfdp.sampling.CyclicPoisson(cycle=BANDS))
  return tfdp.PrivacyPlan.calibrate(target_epsilon=arguments.epsilon, **common)


def train(task, method, noise, arguments, folder, times=1.0, half=1):
  """Metrics on half of the held-out batches at the end, seconds per round, the plan."""
  make_rule, rate, clip = METHODS[method]
  if method == 'DP-AdamSTP':
    clip *= task.model_fn().count_params()**.5
  plan = make_plan(noise, len(task.users.client_ids), arguments, clip)
  process = tfdp.federated.build_private_fed_avg(
      task.model_fn, server_rule=make_rule(), plan=plan, server_learning_rate=times * rate,
      loss=task.loss, metrics=task.metrics,
      client_optimizer_fn=tf.keras.optimizers.SGD(arguments.usual.rate))
  result = tfdp.federated.simulate(
      process, task.users, out=folder, rounds_per_evaluation=10**9, progress=False,
      evaluate=tfdp.federated.evaluator(
          task.model_fn, task.held_out.shard(2, half), loss=task.loss, metrics=task.metrics))
  return result.history[-1], result.speed['seconds'], plan


def written(values):
  """Mean, and the standard error of several."""
  error = np.std(values, ddof=1) / len(values)**.5 if len(values) > 1 else np.nan
  return f'{np.mean(values):.4f}' + ('' if np.isnan(error) else f' +- {error:.4f}')


def main():
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('data', choices=USUAL)
  parser.add_argument('file')
  parser.add_argument('--vocabulary', metavar='PUBLIC_TEXT')
  parser.add_argument('--epsilon', type=float, default=8.0)
  parser.add_argument('--delta', type=float, default=1e-5)
  parser.add_argument('--rounds', type=int)
  parser.add_argument('--cohort', type=int)
  parser.add_argument('--repeats', type=int, default=1, help='independent runs of every row')
  parser.add_argument('--rates', type=float, nargs='+', default=[1.0], metavar='TIMES',
                      help='server learning rates to choose from, times those of METHODS')
  parser.add_argument('--runs', type=pathlib.Path)
  arguments = parser.parse_args()
  given = {name: getattr(arguments, name) for name in ('rounds', 'cohort')}
  arguments.usual = usual = USUAL[arguments.data]._replace(
      **{name: value for name, value in given.items() if value})
  runs = arguments.runs or pathlib.Path(tempfile.mkdtemp())
  task = load(arguments)
  users = len(task.users.client_ids)
  print(f'{arguments.data}: unit of privacy: user, delta {arguments.delta:g}; {users} users, '
        f'{usual.cohort} expected in each of {usual.rounds} rounds;\nclient batch {usual.batch}, '
        f'epochs {usual.epochs}, cap {usual.cap} examples; '
        f'{task.model_fn().count_params():,} parameters'
        + (f'; {usual.words} words' if usual.words else '')
        + f'. Runs per row: {arguments.repeats}.\n'
        f'{"server":18} {"noise":12} {"participation":24} {"sigma":>6} {"epsilon":>7} {"rate":>5} '
        f'{"loss":>17} {"accuracy":>17} {"s/round":>8}')
  loss = 'word_loss' if usual.words else 'loss'
  expected = f'{usual.rounds * usual.cohort / users:.1f} expected'
  for method in METHODS:
    private = 'not private' not in method
    for noise in ('independent', 'banded') if private else ('none',):
      folder = lambda name: runs / f'{method} {noise} {name}'.replace(' ', '_')
      score = lambda times: train(
          task, method, noise, arguments, folder(f'rate {times:g}'), times, half=0)[0][loss]
      rate = min(arguments.rates, key=score) if len(arguments.rates) > 1 else arguments.rates[0]
      results = [train(task, method, noise, arguments, folder(repeat), rate)
                 for repeat in range(arguments.repeats)]
      plan = results[0][2]
      most = -(-usual.rounds // BANDS) if noise == 'banded' else usual.rounds
      seconds = [second for result in results for second in result[1]]
      print(f'{method:18} {noise:12} {f"{expected}, {most} at most":24} '
            f'{plan.noise_multiplier:6.3f} '
            f'{f"{plan.epsilon():.2f}" if private else "none":>7} {rate:5g} '
            f'{written([result[0][loss] for result in results]):>17} '
            f'{written([result[0]["accuracy"] for result in results]):>17} '
            f'{np.median(seconds) if seconds else np.nan:8.2f}', flush=True)


if __name__ == '__main__':
  main()
