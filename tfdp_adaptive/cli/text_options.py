# SPDX-License-Identifier: Apache-2.0
"""Arguments of the subcommands that train the models of `examples/` on a text."""

from __future__ import annotations

import argparse
from typing import Any, Dict, Iterable, Mapping, Optional

from tfdp_adaptive import errors
from tfdp_adaptive.cli import options
from tfdp_adaptive.examples import compare
from tfdp_adaptive.examples import federated
from tfdp_adaptive.examples import report as report_lib
from tfdp_adaptive.examples import settings as settings_lib
from tfdp_adaptive.examples import tasks


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds arguments for the text, the vocabulary and the output folder."""
  add_text_arguments(parser)
  output = parser.add_argument_group('output')
  output.add_argument(
      '--out', type=options.path, metavar='DIR',
      help='folder for table, curves and statement (default: runs/<time>)')
  output.add_argument(
      '--json', action='store_true', help='print the results as JSON instead of a table')


def add_text_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds arguments for the text and the vocabulary."""
  group = parser.add_argument_group('data')
  group.add_argument(
      '--data', type=options.path, metavar='FILE',
      help='JSON Lines with `text` and optionally `client`, or plain text; also .xz and .gz '
           "(default: the docstrings of Python's standard library)")
  group.add_argument(
      '--vocabulary', type=options.path, metavar='FILE',
      help='one PUBLIC word per line (default: the most frequent words of the standard library; '
           'the frequent words of a private text are private)')
  group.add_argument(
      '--vocabulary-size', type=options.positive_int, default=1000, metavar='N',
      help='number of words from the standard library (default: %(default)s)')


def add_sentence_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds arguments for the length of central training."""
  group = parser.add_argument_group('centralized training')
  group.add_argument('--steps', type=options.positive_int, default=compare.STEPS, metavar='N',
                     help='training steps per method (default: %(default)s)')
  group.add_argument('--batch-size', type=options.positive_int, default=256, metavar='N',
                     help='expected number of sentences per step (default: %(default)s)')


def add_client_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds arguments for the length and the place of federated training."""
  group = parser.add_argument_group('federated training')
  group.add_argument('--rounds', type=options.positive_int, default=federated.ROUNDS, metavar='N',
                     help='rounds per method (default: %(default)s)')
  group.add_argument('--clients-per-round', type=options.positive_int, default=200, metavar='N',
                     help='expected number of clients per round (default: %(default)s)')
  group.add_argument('--workers', type=lambda text: text.split(','), default=[],
                     metavar='HOST:PORT,HOST:PORT',
                     help='addresses of running TFF workers, see docs/guides/workers.md '
                          '(default: clients are trained in this process)')


def add_privacy_arguments(parser: argparse.ArgumentParser, default_epsilon: str) -> None:
  """The guarantee asked for."""
  group = parser.add_argument_group('privacy')
  group.add_argument(
      '--epsilon', type=options.positive_float, metavar='E',
      help=f'target epsilon of every private model (default: {default_epsilon})')
  group.add_argument(
      '--delta', type=options.probability, metavar='D',
      help='target delta (default: the largest power of ten below 1 / number of records)')


def add_method_arguments(parser: argparse.ArgumentParser, methods: Iterable[str]) -> None:
  """Adds arguments for the methods and their settings."""
  group = parser.add_argument_group('methods')
  group.add_argument('--methods', metavar='NAME,...',
                     help=f'some of {", ".join(methods)} (default: all)')
  add_tune_argument(group)


def add_tune_argument(group: Any) -> None:
  group.add_argument('--tune', action='store_true',
                     help='choose the settings again by held-out validation examples')


def add_one_method_arguments(
    parser: argparse.ArgumentParser, methods: Mapping[str, settings_lib.Method],
    more: Iterable[str] = ()) -> None:
  """Adds arguments for one private method and its settings."""
  group = parser.add_argument_group('method')
  known = [*(name for name in methods if methods[name].optimizer), *more]
  group.add_argument('--method', metavar='NAME', default='dp_adam_stp',
                     type=lambda text: options.one_of(text, known),
                     help=f'one of {", ".join(known)} (default: %(default)s)')
  group.add_argument('--set', action='append', default=[], metavar='NAME=VALUE',
                     help="a setting of the method's optimizer, such as learning_rate=0.1; may be "
                          'repeated (default: the recorded settings)')


def report(arguments: argparse.Namespace, state: str = '') -> report_lib.Report:
  """The report of a command, see `Report`."""
  return report_lib.Report(arguments.out, options.asked(arguments), arguments.json, state)


def text(arguments: argparse.Namespace) -> tasks.Text:
  return tasks.Text(arguments.data, arguments.vocabulary, arguments.vocabulary_size)


def by_sentence(arguments: argparse.Namespace) -> tasks.Target:
  return tasks.Target(arguments.steps, arguments.batch_size,
                      arguments.epsilon or compare.EPSILON, arguments.delta)


def by_client(arguments: argparse.Namespace) -> tasks.Target:
  return tasks.Target(arguments.rounds, arguments.clients_per_round,
                      arguments.epsilon or federated.EPSILON, arguments.delta)


def chosen(names: Optional[str], known: Mapping[str, Any], flag: str) -> Dict[str, Any]:
  """The entries of `known` that a comma-separated flag names; all of them for None."""
  if names is None:
    return dict(known)
  wanted = [name.strip() for name in names.split(',') if name.strip()]
  if not wanted:
    raise errors.UsageError(f'{flag} must name some of {", ".join(known)}. Received: {names}')
  try:
    found = {options.one_of(name, list(known)) for name in wanted}
  except argparse.ArgumentTypeError as error:
    raise errors.UsageError(f'{flag} {error}') from error
  return {name: known[name] for name in known if name in found}
