# SPDX-License-Identifier: Apache-2.0
"""Files of JSON lines as SQLite files of the format that `sources.Database` reads."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import pathlib
import sqlite3
import tempfile
from typing import Any, Callable, Dict, Iterator, Optional, Sequence, Tuple

from . import sources

_OPENERS: Dict[str, Callable[..., Any]] = {'.xz': lzma.open, '.gz': gzip.open}
SPLIT = 'train'  # The only split of a database that is made here.


def parse(rows: Sequence[str]) -> Dict[str, Any]:
  """Returns `{column: values}` of objects that all have the same names."""
  objects = [json.loads(row) for row in rows]
  names = set(objects[0])
  if any(set(one) != names for one in objects):
    raise ValueError('All JSON objects of a user must have the same names. Received: '
                     f'{sorted({tuple(sorted(one)) for one in objects})[:2]}.')
  return {name: [one[name] for one in objects] for name in objects[0]}


def database_of(
    path: sources.Path, user: str, database: Optional[sources.Path] = None) -> pathlib.Path:
  """Returns the SQLite file that holds a file of JSON lines by user, made once.

  Lines are read one at a time. The file holds the users' data and is readable by its owner
  alone. It is made again if the JSON file has changed.

  Args:
    path: JSON lines, also .gz or .xz: an object per line.
    user: Name of what says whose a line is, a text or a whole number.
    database: The path of the database; by default, `path` with '.sqlite'.
  """
  path = pathlib.Path(path)
  target = pathlib.Path(f'{path}.sqlite' if database is None else database)
  facts = path.stat()
  made_from = json.dumps([facts.st_size, facts.st_mtime_ns, user])
  if target.exists() and _made_from(target) == made_from:
    return target
  descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name)  # Mode 0600.
  os.close(descriptor)
  try:
    _fill(temporary, _lines(path, user), made_from)
    os.replace(temporary, target)
  except BaseException:
    os.unlink(temporary)
    raise
  return target


def _fill(database: str, lines: Iterator[Tuple[str, str]], made_from: str) -> None:
  connection = sqlite3.connect(database)
  connection.executescript(
      'PRAGMA journal_mode=OFF; CREATE TABLE made_from (fact TEXT); CREATE TABLE examples '
      '(split_name TEXT, client_id TEXT, serialized_example_proto TEXT); CREATE TABLE '
      'client_metadata (client_id TEXT, split_name TEXT, num_examples INTEGER);')
  with connection:
    connection.execute('INSERT INTO made_from VALUES (?)', [made_from])
    connection.executemany(f"INSERT INTO examples VALUES ('{SPLIT}', ?, ?)", lines)
    connection.execute('CREATE INDEX of_client ON examples (client_id)')
    connection.execute(f"INSERT INTO client_metadata SELECT client_id, '{SPLIT}', COUNT(*) "
                       'FROM examples GROUP BY client_id')
  connection.close()


def _made_from(database: pathlib.Path) -> str:
  try:
    connection = sqlite3.connect(database)
    ((fact,),) = connection.execute('SELECT fact FROM made_from').fetchall()
    connection.close()
  except (sqlite3.Error, ValueError) as error:
    raise ValueError(f'`database` must be a new file, or one made from JSON lines before. '
                     f'Received: {database} ({error}).') from error
  return fact


def _lines(path: pathlib.Path, user: str) -> Iterator[Tuple[str, str]]:
  with _OPENERS.get(path.suffix, open)(path, 'rt', encoding='utf-8') as file:
    for number, line in enumerate(file, 1):
      if line.strip():
        try:
          one = json.loads(line)
          yield str(sources.user_id(one[user], user)), line.strip()
        except (ValueError, KeyError, TypeError) as error:
          raise ValueError(f'{path}, line {number}: must be a JSON object with {user!r}, a text or '
                           f'a whole number. Received: {line.strip()[:60]!r} ({error!r:.80}).'
                           ) from error
