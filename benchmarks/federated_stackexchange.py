# SPDX-License-Identifier: Apache-2.0
"""Next words of real users under user-level privacy: server optimizers and mechanisms.

    python benchmarks/federated_stackexchange.py POSTS [--runs FOLDER]

POSTS is a file of JSON lines with `client` and `text`, such as 4,746 users of small
Stack Exchange sites. The vocabulary is that of another, public text: a file given by
--vocabulary, or else Python's docstrings. All private rows have the same (epsilon,
delta) for users. Where a folder is given, runs that were interrupted go on when the
command is repeated.

Settings of `METHODS` were chosen by hand, by the loss on validation users after a third
of the rounds with independent noise, among values of the grids and near them; --tune
searches the grids. Mechanisms share them. That search is not accounted for: here the
posts are public.
"""

import argparse
import collections
import os
import pathlib
import tempfile

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import rules
from tfdp_adaptive.examples import corpus
from tfdp_adaptive.examples import federated_tasks as tasks
from tfdp_adaptive.examples import language_model
from tfdp_adaptive.examples import next_word
from tfdp_adaptive.examples import settings as settings_lib

WORDS, CLIENTS, BANDS, DELTA = 500, 200, 4, 1e-5
CLIENT_RATE, SENTENCES = 1.0, 16  # Of a client's training; at most so many per round.
HELD_OUT = 4000  # Sentences that are looked at, at the most.

# Clip norms are in the units of the rule's scaled records.
METHODS = collections.OrderedDict((method.label, method) for method in (
    settings_lib.Method(
        'Adam, not private', 'dp_adam',
        dict(server_learning_rate=1., l2_norm_clip=1e6, epsilon=.1),
        dict(server_learning_rate=(.1, 1.), epsilon=(1e-2, .1))),
    settings_lib.Method(
        'DP-SGD, momentum', 'dp_sgd',
        dict(server_learning_rate=1., l2_norm_clip=.5, momentum=.9),
        dict(server_learning_rate=(.3, 1., 3.))),
    settings_lib.Method(
        'DP-Adam', 'dp_adam',
        dict(server_learning_rate=1., l2_norm_clip=.5, epsilon=.1),
        dict(server_learning_rate=(.3, 1.), epsilon=(.03, .1))),
    settings_lib.Method(
        'DP-AdamBC', 'dp_adam_bc',
        dict(server_learning_rate=1., l2_norm_clip=.5, epsilon=.1),
        dict(server_learning_rate=(.3, 1.), epsilon=(.03, .1))),
    settings_lib.Method(
        'DP-AdamSTP', 'scale_then_privatize',
        dict(server_learning_rate=1., l2_norm_clip=50., scale_epsilon=1e-2, epsilon=.1),
        dict(server_learning_rate=(.3, 1.), scale_epsilon=(1e-2, 3e-2))),
))


def make_plan(noise, population, arguments, l2_norm_clip):
  """Poisson sampling of users, or cyclic Poisson sampling with bands; or no privacy."""
  common = dict(population_size=population, batch_size=CLIENTS, steps=arguments.rounds,
                l2_norm_clip=l2_norm_clip, unit='user', target_delta=DELTA)
  if noise == 'none':
    return tfdp.PrivacyPlan(noise_multiplier=0.0, **common)
  if noise == 'banded':
    common.update(mechanism=tfdp.mechanisms.BandedToeplitz(BANDS, arguments.rounds),
                  sampling=tfdp.sampling.CyclicPoisson(cycle=BANDS))
  return tfdp.PrivacyPlan.calibrate(target_epsilon=arguments.epsilon, **common)


def train(task, held_out, method, settings, noise, arguments, folder=None, rounds=None):
  """(metrics on held-out users at the end, seconds per round, plan)."""
  settings = dict(settings)
  plan = make_plan(noise, len(task.users.client_ids), arguments, settings.pop('l2_norm_clip'))
  rate = settings.pop('server_learning_rate')
  process = tfdp.federated.build_private_fed_avg(
      task.model_fn, server_rule=getattr(rules, method.optimizer)(**settings), plan=plan,
      server_learning_rate=rate, loss=task.loss, metrics=task.metrics,
      client_optimizer_fn=tf.keras.optimizers.SGD(CLIENT_RATE))
  result = tfdp.federated.simulate(
      process, task.users, rounds=rounds, out=folder, rounds_per_evaluation=10**9,
      evaluate=tfdp.federated.evaluator(
          task.model_fn, held_out, loss=task.loss, metrics=task.metrics))
  seconds = sorted(result.speed['seconds'])
  return result.history[-1], seconds[len(seconds) // 2], plan


def thin(sentences):
  """At most `HELD_OUT` of them, evenly spaced."""
  return sentences[::-(-len(sentences) // HELD_OUT)]


def tune(task, held_out, arguments):
  """Prints the settings of least validation loss after a third of the rounds."""
  for method in METHODS.values():
    settings_lib.settled(method, True, lambda settings, m=method: train(
        task, held_out, m, settings, noise_of(m)[0], arguments,
        rounds=arguments.rounds // 3)[0]['word_loss'])


def noise_of(method):
  return ('none',) if 'not private' in method.label else ('independent', 'banded')


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('posts')
  parser.add_argument('--vocabulary', metavar='PUBLIC_TEXT')
  parser.add_argument('--rounds', type=int, default=100)
  parser.add_argument('--epsilon', type=float, default=8.0)
  parser.add_argument('--runs', type=pathlib.Path)
  parser.add_argument('--tune', action='store_true')
  arguments = parser.parse_args()
  runs = arguments.runs or pathlib.Path(tempfile.mkdtemp())
  public = (corpus.read(arguments.vocabulary) if arguments.vocabulary
            else corpus.standard_library())
  vocabulary = next_word.build_vocabulary(public.sentences, WORDS)
  sentences = corpus.read(arguments.posts).sentences
  task = tasks.next_word(sentences, vocabulary, language_model.build, max_examples=SENTENCES)
  parts = corpus.split(sentences)
  if arguments.tune:
    tune(task, tasks.held_out_sentences(thin(parts.validation), vocabulary), arguments)
    return
  test = thin(parts.test)
  print(f'{len(task.users.client_ids)} training users, {len(parts.train)} sentences; {CLIENTS} '
        f'users per round expected, {SENTENCES} sentences of each at most; {arguments.rounds} '
        f'rounds; {WORDS} words of {public.name};\nprivate rows: epsilon {arguments.epsilon:g} at '
        f'delta {DELTA:g} for a user; banded: {BANDS} bands. Loss and accuracy per word of '
        f'{len(corpus.by_client(test))} held-out users.\n')
  frequencies = next_word.log_frequencies(
      next_word.examples(parts.train, vocabulary)[1], task.items[0])
  baseline = next_word.frequency_baseline(frequencies, next_word.examples(test, vocabulary)[1])
  print(f'{"server":18} {"noise":12} {"sigma":>6} {"epsilon":>7} {"loss":>7} {"accuracy":>8} '
        f'{"s/round":>8}')
  print(f'{"word frequencies":18} {"exact":12} {"-":>6} {"none":>7} {baseline[0]:7.4f} '
        f'{baseline[1]:8.4f} {"-":>8}')
  for method in METHODS.values():
    for noise in noise_of(method):
      metrics, seconds, plan = train(
          task, tasks.held_out_sentences(test, vocabulary), method, method.settings, noise,
          arguments, runs / f'{method.optimizer}_{noise}')
      epsilon = f'{plan.epsilon():.2f}' if plan.noise_multiplier else 'none'
      print(f'{method.label:18} {noise:12} {plan.noise_multiplier:6.3f} {epsilon:>7} '
            f'{metrics["word_loss"]:7.4f} {metrics["accuracy"]:8.4f} {seconds:8.2f}', flush=True)


if __name__ == '__main__':
  main()
