# SPDX-License-Identifier: Apache-2.0
"""Arguments that several subcommands share."""

from __future__ import annotations

import argparse
import difflib
import json
import math
import pathlib
import textwrap
from typing import Any, Callable, Dict, Iterable, Mapping, Optional, Sequence, TYPE_CHECKING

import tfdp_adaptive as tfdp

if TYPE_CHECKING:
  from tfdp_adaptive.cli import settings as settings_lib


class UsageError(ValueError):
  """The command line cannot be carried out; the message says how to put it right."""


def path(text: str) -> pathlib.Path:
  if not text or '\0' in text:
    raise argparse.ArgumentTypeError(f'must be a path. Received: {text!r}')
  try:
    text.encode('utf-8')
  except UnicodeEncodeError as error:  # It is named in files that are UTF-8.
    raise argparse.ArgumentTypeError(f'must be UTF-8. Received: {text!r}') from error
  return pathlib.Path(text)


def positive_int(text: str) -> int:
  return number(int, text, lambda value: 1 <= value < 2**63, 'an integer >= 1, below 2**63')


def positive_float(text: str) -> float:
  return number(float, text, lambda value: 0 < value < float('inf'), 'a positive number')


def noise_multiplier(text: str) -> float:
  return number(float, text, lambda value: 1e-5 <= value <= 1e13, 'a number from 1e-5 to 1e13')


def probability(text: str) -> float:
  return number(float, text, lambda value: 0 < value < 1, 'a number between 0 and 1')


def confidence(text: str) -> float:
  return number(float, text, lambda value: 0 < value <= tfdp.audit.LARGEST_CONFIDENCE,
                 'a number above 0, at most 1 - 1e-9')


def number(
    kind: Callable[[str], Any], text: str, accepts: Callable[[Any], bool], wanted: str) -> Any:
  """A number of the command line, or the error that says what is `wanted`."""
  try:
    value = kind(text)
  except ValueError:
    value = None
  if value is None or not accepts(value):
    raise argparse.ArgumentTypeError(f'must be {wanted}. Received: {text}')
  return value


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
  """Where text and vocabulary come from, and where results go."""
  add_text_arguments(parser)
  output = parser.add_argument_group('output')
  output.add_argument(
      '--out', type=path, metavar='DIR',
      help='folder for table, curves and statement (default: runs/<time>)')
  output.add_argument(
      '--json', action='store_true', help='print the results as JSON instead of a table')


def add_text_arguments(parser: argparse.ArgumentParser) -> None:
  """Where text and vocabulary come from."""
  group = parser.add_argument_group('data')
  group.add_argument(
      '--data', type=path, metavar='FILE',
      help='JSON lines with `text` and optionally `client`, or plain text; also .xz and .gz '
           "(default: the docstrings of Python's standard library)")
  group.add_argument(
      '--vocabulary', type=path, metavar='FILE',
      help='one PUBLIC word per line (default: the most frequent words of the standard library, '
           'also with --data, because the frequent words of a private text are private)')
  group.add_argument(
      '--vocabulary-size', type=positive_int, default=1000, metavar='N',
      help='words to take from the standard library (default: %(default)s)')


def add_privacy_arguments(parser: argparse.ArgumentParser, default_epsilon: str) -> None:
  """The guarantee asked for."""
  group = parser.add_argument_group('privacy')
  group.add_argument(
      '--epsilon', type=positive_float, metavar='E',
      help=f'target epsilon of every private model (default: {default_epsilon})')
  group.add_argument(
      '--delta', type=probability, metavar='D',
      help='target delta (default: the largest power of ten below 1 / number of records)')


def add_method_arguments(parser: argparse.ArgumentParser, methods: Iterable[str]) -> None:
  """Which methods, with which settings."""
  group = parser.add_argument_group('methods')
  group.add_argument('--methods', metavar='NAME,...',
                     help=f'some of {", ".join(methods)} (default: all)')
  add_tune_argument(group)


def add_tune_argument(group: Any) -> None:
  group.add_argument('--tune', action='store_true',
                     help='choose the settings again, on held-out validation examples')


def add_one_method_arguments(
    parser: argparse.ArgumentParser, methods: Mapping[str, settings_lib.Method],
    more: Iterable[str] = ()) -> None:
  """One private method, and settings other than the recorded ones."""
  group = parser.add_argument_group('method')
  known = [*(name for name in methods if methods[name].optimizer), *more]
  group.add_argument('--method', metavar='NAME', default='dp_adam_stp',
                     type=lambda text: one_of(text, known),
                     help=f'one of {", ".join(known)} (default: %(default)s)')
  group.add_argument('--set', action='append', default=[], metavar='NAME=VALUE',
                     help="a setting of the method's optimizer, such as learning_rate=0.1; may be "
                          'repeated (default: the recorded settings)')


def one_of(text: str, known: Sequence[str]) -> str:
  """Returns the known name that `text` is, or spells in another way: DPAdam is dp_adam.

  Raises:
    argparse.ArgumentTypeError: There is none; the message names the closest ones.
  """
  if text in known:
    return text
  plain = {name.replace('_', '').lower(): name for name in reversed(known)}
  key = text.replace('_', '').replace('-', '').lower()
  if key in plain:
    return plain[key]
  close = [plain[one] for one in difflib.get_close_matches(key, plain, 3, 0.7)]
  raise argparse.ArgumentTypeError(
      f'must name one of {", ".join(known)}. Received: {text}.'
      + (f' Did you mean {" or ".join(close)}?' if close else ''))


def settings(method: settings_lib.Method, changes: Any) -> Dict[str, Any]:
  """The method's settings with the `NAME=VALUE` of the command line put in."""
  return changed(method.settings, changes)


def changed(
    values: Mapping[str, Any], changes: Any, more: Sequence[str] = ()) -> Dict[str, Any]:
  """`values` with the `NAME=VALUE` of the command line put in, of their names or `more`."""
  result = dict(values)
  for change in changes:
    name, _, value = change.partition('=')
    if name not in result and name not in more:
      raise UsageError(
          f'--set must name one of {", ".join((*values, *more))}. Received: {change}')
    try:
      result[name] = positive_float(value)
    except argparse.ArgumentTypeError as error:
      raise UsageError(f'--set {name} {error}') from error
  return result


def unreadable(saved: Any, error: Any) -> UsageError:
  """The error that what an unfinished run saved is broken."""
  return UsageError(
      f'{saved} cannot be read: {error}. Start again in another --out DIR; what was spent in this '
      'one then counts as well if any of it was published.')


def default_delta(population_size: int) -> float:
  """The largest power of ten below `1 / population_size`."""
  return float(f'1e-{len(str(population_size))}')


def wrap(text: Optional[str]) -> Optional[str]:
  """Text of a help page in lines of a terminal's width; None stays."""
  return text and textwrap.fill(text, 80)


def to_json(value: Any) -> str:
  """Indented JSON that every reader takes: numbers that are not finite are null."""
  return json.dumps(_finite(value), indent=1, allow_nan=False)


def _finite(value: Any) -> Any:
  if isinstance(value, dict):
    return {key: _finite(item) for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    return [_finite(item) for item in value]
  return None if isinstance(value, float) and not math.isfinite(value) else value


def calibrate(**fields: Any) -> tfdp.PrivacyPlan:
  """`PrivacyPlan.calibrate`; what it refuses can be put right on the command line."""
  try:
    return tfdp.PrivacyPlan.calibrate(**fields)
  except ValueError as error:
    raise UsageError(str(error)) from error


def chosen(names: Optional[str], known: Mapping[str, Any], flag: str) -> Dict[str, Any]:
  """The entries of `known` that a comma-separated flag names; all of them for None."""
  if names is None:
    return dict(known)
  wanted = [name.strip() for name in names.split(',') if name.strip()]
  if not wanted:
    raise UsageError(f'{flag} must name some of {", ".join(known)}. Received: {names}')
  try:
    found = {one_of(name, list(known)) for name in wanted}
  except argparse.ArgumentTypeError as error:
    raise UsageError(f'{flag} {error}') from error
  return {name: known[name] for name in known if name in found}
