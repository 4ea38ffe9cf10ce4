# SPDX-License-Identifier: Apache-2.0
"""Cards as versioned JSON, read as if a stranger had written them.

Raises `UnreadableCard` for what is no card, and `WrongCard` for a card whose terms this library
would have refused to run under: amplification that the mechanism does not allow, more
participations than claimed, a search that cannot be accounted for.
"""

import dataclasses
import json
import math
import os
import pathlib
import typing
from typing import Any, Dict, List, Tuple, Union

from tfdp_adaptive.privacy import card as card_lib
from tfdp_adaptive.privacy import entry as entry_lib

FORMAT, VERSION = 'tfdp_adaptive.card', 2
NAME = 'card.json'
LARGEST = 4 << 20  # Characters of a file.
# The largest numbers that terms may have, so that whatever follows from them can be computed.
_MOST_STEPS, _MOST_DRAWS = 10**9, 10**8
_MOST_ROWS = {'IndependentGaussian': 10**9, 'Dense': 1 << 12}
_ROWS = 1 << 17  # Most rows of all other mechanisms.
_LARGEST_NUMBER, _LARGEST_COUNT = 1e300, 10**15
_KNOWN = {'trust': ('central', 'federated', 'silo'), 'accountant': ('pld', 'rdp')}
_CLASSES = (card_lib.Card, card_lib.Words, card_lib.Audit)


class UnreadableCard(ValueError):
  """This is no card, or a damaged one."""


class WrongCard(ValueError):
  """The card contradicts itself."""


def to_json(card: card_lib.Card) -> str:
  """Returns the card as indented text without secrets; `from_json` restores it."""
  return json.dumps({'format': FORMAT, 'version': VERSION, 'card': card}, indent=1,
                    allow_nan=False, default=_encode) + '\n'


def _encode(value: Any) -> Dict[str, Any]:
  if isinstance(value, entry_lib.Entry):
    return value.to_dict()
  return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def read(path: Union[str, os.PathLike]) -> card_lib.Card:
  """Returns the card in a file of at most `LARGEST` characters, or the one card of a folder."""
  path = pathlib.Path(path)
  if path.is_dir():
    cards = [path / NAME] if (path / NAME).exists() else sorted(path.glob('card*.json'))
    if len(cards) > 1:
      raise UnreadableCard(f'{path} has several cards. Give the path of one of them: '
                           + ', '.join(map(str, cards)))
    path = cards[0] if cards else path / NAME
  try:
    with open(path, encoding='utf-8') as file:
      text = file.read(LARGEST + 1)
  except (OSError, UnicodeDecodeError) as error:
    raise UnreadableCard(f'{path} must be a card in UTF-8, which `tfdp card MODEL --out FOLDER` '
                         f'writes. Received: {getattr(error, "strerror", error)}.') from error
  if len(text) > LARGEST:
    raise UnreadableCard(f'{path} must be a card, of at most {LARGEST >> 20} MiB. Received: more.')
  return from_json(text)


def from_json(text: str) -> card_lib.Card:
  """Returns the card that `to_json` wrote, after checks of every type and every plan."""
  try:
    content = json.loads(text, object_pairs_hook=_once, parse_constant=_finite, parse_float=_finite)
  except (ValueError, RecursionError, MemoryError) as error:
    raise UnreadableCard(f'The card must be JSON. Received: {_short(error)}.') from error
  if not isinstance(content, dict) or (content.get('format'), content.get('version')) != (
      FORMAT, VERSION):
    raise UnreadableCard(f'The card must be {FORMAT} of version {VERSION}. '
                         f'Received: {_short(text)}.')
  card = _decode(card_lib.Card, content.get('card'), 'card')
  for name, known in _KNOWN.items():
    if getattr(card, name) not in known:
      raise UnreadableCard(f'`{name}` of a card must be one of {known}. '
                           f'Received: {getattr(card, name)[:20]!r}.')
  return card


def _read_run(fields: object) -> entry_lib.Entry:
  try:
    run = _mapping(fields, 'runs')
    _refuse_huge(run)
    entry = entry_lib.Entry.from_dict(run)
    public = card_lib.public(entry)
  except UnreadableCard:
    raise
  except (ValueError, MemoryError) as error:
    raise WrongCard(f'The terms of a run are ones that no plan can have: {_short(error)}'
                    ) from error
  except (TypeError, ArithmeticError, AttributeError, LookupError) as error:
    raise UnreadableCard(f'`runs` must be runs of a ledger. Received: {_short(error)}.') from error
  if entry != public:
    raise UnreadableCard('The runs of a card must have no seed, and printable texts. '
                         'Received: others.')
  return entry


def _refuse_huge(run: Dict[str, Any]) -> None:
  """Raises an error for sizes that are too large, before anything is computed from them."""
  plan = run['plan']
  terms = plan and plan['content']['plan']
  if not terms:
    return
  mechanism = terms['mechanism']
  limits = [(terms['steps'], _MOST_STEPS), (terms['sampling']['config'], _MOST_DRAWS),
            (mechanism['config'], _MOST_ROWS.get(mechanism['kind'], _ROWS))]
  large = [number for value, limit in limits for number in _numbers(value) if number > limit]
  if large:
    raise UnreadableCard('The steps, draws and rows of a run must be few enough to recompute '
                         f'what follows from them. Received: {max(large):g}.')


def _numbers(value: object) -> List[float]:
  if isinstance(value, dict):
    value = list(value.values())
  if isinstance(value, list):
    return [number for item in value for number in _numbers(item)]
  return [abs(value)] if isinstance(value, (int, float)) else []


def _decode(kind: Any, value: object, where: str) -> Any:
  """Returns `value` as a `kind`, a type hint of the card's classes; raises for all others."""
  origin, arguments = typing.get_origin(kind), typing.get_args(kind)
  if kind in _CLASSES:
    hints = typing.get_type_hints(kind)
    fields = _mapping(value, where)
    wrong = set(fields) ^ set(hints)
    if wrong:
      raise UnreadableCard(f'`{where}` must have the fields {sorted(hints)}. '
                           f'Received: {_short(sorted(wrong))} missing or unknown.')
    return kind(**{name: _decode(hint, fields[name], name) for name, hint in hints.items()})
  if kind is entry_lib.Entry:
    return _read_run(value)
  if origin is Union:  # Optional.
    return None if value is None else _decode(arguments[0], value, where)
  if origin is tuple and isinstance(value, list):
    if arguments[-1] is Ellipsis:
      return tuple(_decode(arguments[0], item, where) for item in value)
    if len(value) == len(arguments):
      return tuple(_decode(hint, item, where) for hint, item in zip(arguments, value))
  if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
    if 0 <= value <= _LARGEST_NUMBER:  # No number on a card is below zero.
      return float(value)
  elif kind is str and isinstance(value, str):
    if len(value) <= card_lib.LONGEST and all(map(card_lib.printable, value)):
      return value
  elif kind is int and not isinstance(value, bool) and isinstance(value, int):
    if 0 <= value <= _LARGEST_COUNT:
      return value
  elif kind is bool and isinstance(value, bool):
    return value
  raise UnreadableCard(f'`{where}` of a card must be {getattr(kind, "__name__", kind)}. '
                       f'Received: {_short(value)!r}.')


def _mapping(value: object, where: str) -> Dict[str, Any]:
  if not isinstance(value, dict):
    raise UnreadableCard(f'`{where}` of a card must be a JSON object. Received: {_short(value)}.')
  return value


def _once(pairs: List[Tuple[str, Any]]) -> Dict[str, Any]:
  """Returns an object whose names are unique, so that no two readers read two cards."""
  result = dict(pairs)
  if len(result) < len(pairs):
    raise ValueError('a name that is there twice')
  return result


def _finite(text: str) -> float:
  number = float(text)
  if not math.isfinite(number):
    raise ValueError(f'a number that is not finite, {text[:20]}')
  return number


def _short(value: object) -> str:
  return card_lib.clean(str(value)[:200])[:80]


