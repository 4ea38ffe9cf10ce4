"""Next words of real users under user-level privacy: server optimizers and mechanisms.

    python benchmarks/federated_stackexchange.py POSTS [--rounds 100] [--runs FOLDER]

POSTS is a file of JSON lines with `client` and `text`, such as 4,746 users of small
Stack Exchange sites. The vocabulary is that of another, public text: a file given by
--vocabulary, or else Python's docstrings. All rows but the first have the same (epsilon, delta) for users. Where a
folder is given, runs that were interrupted go on when the command is repeated.

Learning rates were chosen among the values in `RATES` by the loss on validation
users (--tune), with independent noise; mechanisms share them.
"""

import argparse
import collections
import os
import pathlib
import tempfile
import time

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import tensorflow_federated as tff

import tfdp_adaptive as tfdp
from tfdp_adaptive import rules
from tfdp_adaptive.cli import language_model
from tfdp_adaptive.data import corpus
from tfdp_adaptive.data import next_word
from tfdp_adaptive.federated import tasks

WORDS, CLIENTS, BANDS = 1000, 40, 8
CLIENT_RATE = 1.0
# Rule, clip norm in its units, server learning rate.
METHODS = collections.OrderedDict([
    ('DP-SGD, momentum', (lambda: rules.dp_sgd(momentum=0.9), 0.5, 1.0)),
    ('DP-Adam', (rules.dp_adam, 0.5, 0.02)),
    ('DP-AdamBC', (rules.dp_adam_bc, 0.5, 0.02)),
    ('DP-AdamSTP', (lambda: rules.scale_then_privatize(scale_epsilon=3e-2), 20.0, 0.02)),
])
RATES = {name: (rate, 3 * rate) for name, (_, _, rate) in METHODS.items()}


def make_plan(mechanism, population, arguments, l2_norm_clip):
  """Independent noise with Poisson sampling, or bands with cyclic Poisson sampling."""
  arguments_of = {
      'independent': lambda: {},
      'banded': lambda: dict(
          mechanism=tfdp.mechanisms.BandedToeplitz(BANDS, arguments.rounds),
          sampling=tfdp.sampling.CyclicPoisson(cycle=BANDS)),
  }[mechanism]()
  return tfdp.PrivacyPlan.calibrate(
      target_epsilon=arguments.epsilon, target_delta=1e-5, population_size=population,
      batch_size=CLIENTS, steps=arguments.rounds, l2_norm_clip=l2_norm_clip, unit='user',
      **arguments_of)


def train(task, held_out, rule, plan, rate, folder, rounds=None):
  """(metrics on held-out users at the end, seconds per round)."""
  process = tfdp.federated.build_private_fed_avg(
      task.model_fn, server_rule=rule, plan=plan, server_learning_rate=rate,
      client_optimizer_fn=tff.learning.optimizers.build_sgdm(CLIENT_RATE))
  result = tfdp.federated.simulate(
      process, task.users, rounds=rounds, out=folder, rounds_per_evaluation=50,
      evaluate=tfdp.federated.evaluator(task.model_fn, held_out))
  seconds = sorted(row['seconds'] for row in result.history)
  return result.history[-1], seconds[len(seconds) // 2]


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
  task = tasks.next_word(sentences, vocabulary, language_model.build, max_examples=16)
  population = len(task.users.client_ids)
  parts = corpus.split(sentences)
  print(f'{population} training users, {len(parts.train)} sentences, expected {CLIENTS} users per '
        f'round, {arguments.rounds} rounds, epsilon {arguments.epsilon:g} at delta 1e-5\n')
  if arguments.tune:
    return tune(task, parts, vocabulary, population, arguments, runs)
  baseline = next_word.frequency_baseline(
      next_word.examples(parts.train, vocabulary)[1], next_word.examples(parts.test, vocabulary)[1],
      task.items[0])
  print(f'{"server":20} {"noise":12} {"sigma":>6} {"loss":>7} {"accuracy":>8} {"s/round":>8}')
  print(f'{"word frequencies":20} {"(exact)":12} {"":6} {baseline[0]:7.4f} {baseline[1]:8.4f}')
  for name, (rule, clip, rate) in METHODS.items():
    for mechanism in ('independent', 'banded'):
      plan = make_plan(mechanism, population, arguments, clip)
      metrics, seconds = train(task, task.held_out, rule(), plan, rate,
                               runs / f'{name} {mechanism}'.replace(' ', '_'))
      print(f'{name:20} {mechanism:12} {plan.noise_multiplier:6.3f} {metrics["word_loss"]:7.4f} '
            f'{metrics["accuracy"]:8.4f} {seconds:8.2f}', flush=True)


def tune(task, parts, vocabulary, population, arguments, runs):
  """Prints the validation loss of every learning rate after a third of the rounds."""
  validation = tasks.held_out_sentences(parts.validation, vocabulary)
  for name, (rule, clip, _) in METHODS.items():
    for rate in RATES[name]:
      start = time.monotonic()
      plan = make_plan('independent', population, arguments, clip)
      metrics, _ = train(task, validation, rule(), plan, rate,
                         runs / f'tune {name} {rate:g}'.replace(' ', '_'), arguments.rounds // 3)
      print(f'{name:20} {rate:8.4g} {metrics["word_loss"]:7.4f} {metrics["accuracy"]:8.4f} '
            f'({time.monotonic() - start:.0f} s)', flush=True)


if __name__ == '__main__':
  main()
