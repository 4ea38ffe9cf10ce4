# SPDX-License-Identifier: Apache-2.0
"""Arguments of the subcommands that train the models of `examples/` on a text."""

from __future__ import annotations

import argparse
from typing import Any, Dict, Iterable, List, Mapping, Sequence

from tfdp_adaptive.cli import options
from tfdp_adaptive.examples import compare
from tfdp_adaptive.examples import federated
from tfdp_adaptive.examples import report as report_lib
from tfdp_adaptive.examples import settings as settings_lib
from tfdp_adaptive.examples import tasks

_NUMBER: Dict[str, Any] = dict(type=options.positive_int, metavar='N')
_FILE: Dict[str, Any] = dict(type=options.path, metavar='FILE')
_GROUPS: Dict[str, Dict[str, Dict[str, Any]]] = {
    'centralized training': {
        '--steps': dict(
            _NUMBER, default=compare.STEPS,
            help='training steps per method (default: %(default)s)'),
        '--batch-size': dict(
            _NUMBER, default=256,
            help='expected number of sentences per step (default: %(default)s)')},
    'federated training': {
        '--rounds': dict(
            _NUMBER, default=federated.ROUNDS, help='rounds per method (default: %(default)s)'),
        '--clients-per-round': dict(
            _NUMBER, default=200,
            help='expected number of clients per round (default: %(default)s)')},
    'data': {
        '--data': dict(
            _FILE, help='JSON Lines with `text` and optionally `client`, or plain text; also .xz '
                        "and .gz (default: the docstrings of Python's standard library)"),
        '--vocabulary': dict(
            _FILE, help='one PUBLIC word per line (default: the most frequent words of the '
                        'standard library; the frequent words of a private text are private)'),
        '--vocabulary-size': dict(
            _NUMBER, default=1000,
            help='number of words from the standard library (default: %(default)s)')},
    'output': {
        '--out': dict(
            type=options.path, metavar='DIR',
            help='folder for table, curves and statement (default: runs/<time>)'),
        '--json': dict(
            action='store_true', help='print the results as JSON instead of a table')},
    'privacy': {
        '--epsilon': dict(
            type=options.positive_float, metavar='E',
            help=f'target epsilon of every private model (default: {compare.EPSILON:g} per '
                 f'sentence, {federated.EPSILON:g} per client)'),
        '--delta': dict(
            type=options.probability, metavar='D',
            help='target delta (default: the largest power of ten below 1 / number of records)')},
}


def add_arguments(parser: argparse.ArgumentParser, *groups: str) -> None:
  """Adds groups of arguments, by their titles."""
  for title in groups:
    group = parser.add_argument_group(title)
    for flag, settings in _GROUPS[title].items():
      group.add_argument(flag, **settings)


def add_method_arguments(parser: argparse.ArgumentParser, methods: Iterable[str]) -> None:
  """Adds arguments for the methods and their settings."""
  group, known = parser.add_argument_group('methods'), list(methods)
  group.add_argument('--methods', metavar='NAME,...', type=lambda text: chosen(text, known),
                     default=known, help=f'some of {", ".join(known)} (default: all)')
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
  """Returns the report of a command, see `Report`."""
  return report_lib.Report(arguments.out, options.asked(arguments), arguments.json, state)


def text(arguments: argparse.Namespace) -> tasks.Text:
  return tasks.Text(arguments.data, arguments.vocabulary, arguments.vocabulary_size)


def by_sentence(arguments: argparse.Namespace) -> tasks.Target:
  return tasks.Target(arguments.steps, arguments.batch_size,
                      arguments.epsilon or compare.EPSILON, arguments.delta)


def by_client(arguments: argparse.Namespace) -> tasks.Target:
  return tasks.Target(arguments.rounds, arguments.clients_per_round,
                      arguments.epsilon or federated.EPSILON, arguments.delta)


def chosen(text: str, known: Sequence[str]) -> List[str]:
  """Returns the known names that a comma-separated text names, in their order."""
  found = {options.one_of(name.strip(), known) for name in text.split(',') if name.strip()}
  if not found:
    raise argparse.ArgumentTypeError(
        f'must name some of {", ".join(known)}. Received: {text}')
  return [name for name in known if name in found]
