# SPDX-License-Identifier: Apache-2.0
"""Checks values of the command line, and holds the shared parts of subcommands."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import pathlib
import re
from typing import Any, Callable, Dict, Mapping, Optional, Sequence, Tuple

import tfdp_adaptive as tfdp
from tfdp_adaptive import checks
from tfdp_adaptive import errors


def path(text: str) -> pathlib.Path:
  if not text or '\0' in text:
    raise argparse.ArgumentTypeError(f'must be a path. Received: {text!r}')
  try:
    text.encode('utf-8')
  except UnicodeEncodeError as error:  # It is named in files that are UTF-8.
    raise argparse.ArgumentTypeError(f'must be UTF-8. Received: {text!r}') from error
  return pathlib.Path(text)


def _number(
    kind: Callable[[str], Any], accepts: Callable[[Any], bool], wanted: str
    ) -> Callable[[str], Any]:
  """Returns a function that reads a number, or raises an error that names `wanted`."""
  def read(text: str) -> Any:
    try:
      value = kind(text)
    except ValueError:
      value = None
    if value is None or not accepts(value):
      raise argparse.ArgumentTypeError(f'must be {wanted}. Received: {text}')
    return value

  return read


def within(least: float, most: float) -> Callable[[str], float]:
  return _number(
      float, lambda value: least <= value <= most, f'a number from {least:g} to {most:g}')


positive_int = _number(int, lambda value: 1 <= value < 2**63, 'an integer >= 1, below 2**63')
positive_float = _number(float, lambda value: 0 < value < float('inf'), 'a positive number')
probability = _number(float, lambda value: 0 < value < 1, 'a number between 0 and 1')
confidence = _number(float, lambda value: 0 < value <= tfdp.audit.LARGEST_CONFIDENCE,
                     'a number above 0, at most 1 - 1e-9')


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


def sized(text: str, sizes: Mapping[str, Optional[str]], thing: str) -> Tuple[str, Optional[int]]:
  """Reads `NAME[:SIZE]` as `(name, size)`.

  Args:
    text: What the user typed.
    sizes: For each known name, the argument that SIZE sets; None for a name without a size.
    thing: The subject of an error message, such as 'A mechanism'.
  """
  name, _, size = text.strip().partition(':')
  if name not in sizes:
    raise errors.UsageError(f'{thing} must be one of {", ".join(sizes)}. Received: {text}')
  meaning = sizes[name]
  if (meaning is None) != (not size) or not re.fullmatch('[0-9]{0,9}', size):
    wanted = f'{name}:SIZE, SIZE being its `{meaning}`' if meaning else name
    raise errors.UsageError(f'{thing} must be given as {wanted}. Received: {text}')
  return name, int(size) if size else None


def changed(
    values: Mapping[str, Any], changes: Sequence[str], more: Sequence[str] = ()) -> Dict[str, Any]:
  """Returns `values` with the `NAME=VALUE` of `--set`, which may also set names in `more`."""
  result, known = dict(values), (*values, *more)
  for text in changes:
    name, _, value = text.partition('=')
    if name not in known:
      raise errors.UsageError(f'--set must name one of {", ".join(known)}. Received: {text}')
    try:
      result[name] = positive_float(value)
    except argparse.ArgumentTypeError as error:
      raise errors.UsageError(f'--set {name} {error}') from error
  return result


def asked(arguments: argparse.Namespace) -> Dict[str, Any]:
  """Returns the arguments of a command, for JSON."""
  return {name: str(value) if isinstance(value, pathlib.Path) else value
          for name, value in vars(arguments).items() if name != 'run'}


def to_json(value: object) -> str:
  """Returns indented JSON without infinite numbers."""
  return json.dumps(checks.for_json(value), indent=1, allow_nan=False)


def show(result: Any, as_json: bool) -> None:
  """Prints a result of the library, which is readable text or JSON."""
  print(to_json(result.to_dict()) if as_json else result)


def check_folder(path: pathlib.Path) -> None:
  """Checks that files can be written in a folder, and leaves everything as it was.

  Raises:
    errors.UsageError: `path` is no folder, cannot be one, or has no room for anything.
  """
  from tfdp_adaptive import runfolder  # NumPy, for which `--help` would wait.
  missing = [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]
  try:
    path.mkdir(parents=True, exist_ok=True)
    runfolder.require_room(path, 4096)
  except OSError as error:
    raise errors.UsageError(
        f'--out must be a folder that files can be written to. Received: {path} '
        f'({error.strerror})') from error
  finally:
    for folder in missing:  # The deepest first.
      try:
        folder.rmdir()
      except OSError:  # Another command has begun to use it.
        break
