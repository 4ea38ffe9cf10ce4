# SPDX-License-Identifier: Apache-2.0
"""Sources of users' examples: memory, SQLite, JSON lines, or rows with a user column.

A source maps each user to the nest of arrays of that user's examples. Only the ids of the
users are in memory. The examples of a user are read when a round draws the user.
"""

from __future__ import annotations

import abc
import collections.abc
import contextlib
import functools
import gzip
import json
import lzma
import math
import os
import pathlib
import sqlite3
import tempfile
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union
import urllib.parse

import numpy as np
import tensorflow as tf

from tfdp_adaptive import trees

Path = Union[str, 'os.PathLike[str]']
User = Union[str, int]
Table = Any  # A data set of Hugging Face, a DataFrame of pandas, or {column: array}.
Preprocess = Callable[[Dict[str, Any]], trees.Tree]

Features = Mapping[str, Any]  # {name: `tf.io.FixedLenFeature` or the like}
_OPENERS: Dict[str, Callable[..., Any]] = {'.xz': lzma.open, '.gz': gzip.open}
SPLIT = 'train'  # The only split of a database that is made of JSON lines.
_READ = 'SELECT serialized_example_proto FROM examples WHERE '
_OF_USER = 'client_id = ? AND split_name = ?'
_BLOCK = 100_000  # Rows whose users are read at a time.
_FEW_BYTES = 2**16  # Rows up to here are parsed by protobuf: it takes about as long as TensorFlow.
_VALUES = {tf.float32: lambda feature: feature.float_list.value,
           tf.int64: lambda feature: feature.int64_list.value,
           tf.string: lambda feature: feature.bytes_list.value}


class Source(collections.abc.Mapping):
  """`{user: nest of arrays}`; the arrays of a user are equally long along the first axis."""

  _ids: collections.abc.Collection[User]

  def __len__(self) -> int:
    return len(self._ids)

  def __iter__(self) -> Iterator[User]:
    return iter(self._ids)

  @abc.abstractmethod
  def read(self, user: User, most: Optional[int]) -> trees.Tree:
    """Returns a user's examples, or only `most` random ones if that saves work."""

  def __getitem__(self, user: User) -> trees.Tree:
    return self.sample(user, None)

  def sample(self, user: User, most: Optional[int]) -> trees.Tree:
    """Returns all examples of a user, or `most` of them, drawn again at every call."""
    nest = self.read(user, most)
    arrays = [np.asarray(array) for array in tf.nest.flatten(nest)]
    sizes = {array.shape[:1] for array in arrays}
    if len(sizes) != 1 or sizes == {()}:
      raise ValueError('`examples` must hold arrays that are equally long along their first axis '
                       'for every user. Received: a user with others.')
    (size,), = sizes
    if most is not None and size > most:
      chosen = _drawn(size, most)
      arrays = [array[chosen] for array in arrays]
    return tf.nest.pack_sequence_as(nest, arrays)


class Memory(Source):
  """Examples of a mapping in memory."""

  def __init__(self, examples: Mapping[User, trees.Tree]) -> None:
    self._ids = self._examples = dict(examples)
    for user in self:
      self.sample(user, None)

  def read(self, user: User, most: Optional[int]) -> trees.Tree:
    return self._examples[user]


class Database(Source):
  """Reads one split of an SQLite file in the format of `tff.simulation.datasets`.

  Its table `examples` has the columns `split_name`, `client_id` (indexed) and
  `serialized_example_proto`; `client_metadata` has `split_name` and `client_id`.

  Args:
    path: The file; it is only read.
    split: Value of `split_name`.
    parse: `rows (bytes or texts) -> {column: values}`.
    preprocess: `{column: values} -> nest of arrays`, one example per row.
  """

  def __init__(
      self, path: Path, split: str, parse: Callable[[Sequence[Any]], Dict[str, Any]],
      preprocess: Preprocess) -> None:
    self._path, self._split = str(pathlib.Path(path).resolve()), split
    self._parse, self._preprocess = parse, preprocess
    address = f'file:{urllib.parse.quote(self._path)}?mode=ro'
    try:
      # Rounds read from several threads, one at a time.
      self._connection = sqlite3.connect(address, uri=True, check_same_thread=False)
      self._ids = [row[0] for row in self._query(
          'SELECT DISTINCT client_id FROM client_metadata WHERE split_name = ? ORDER BY client_id',
          split)]
      splits = [row[0] for row in self._query('SELECT DISTINCT split_name FROM client_metadata')]
    except sqlite3.Error as error:
      raise ValueError('`path` must be an SQLite file with tables `examples` and '
                       f'`client_metadata`, as TFF writes them. Received: {path} ({error}).'
                       ) from error
    if not self._ids:
      raise ValueError(f'`split` must be one of {sorted(splits)}, which {path} holds. '
                       f'Received: split={split!r}.')

  def __reduce__(self) -> Any:
    # It is opened where it is read.
    return Database, (self._path, self._split, self._parse, self._preprocess)

  def read(self, user: User, most: Optional[int]) -> trees.Tree:
    if most is None:
      rows = self._query(_READ + _OF_USER, user, self._split)
    else:  # A few users have a million rows: they are drawn before they are read.
      rows = self._query(f'{_READ} rowid IN (SELECT rowid FROM examples WHERE {_OF_USER} '
                         'ORDER BY RANDOM() LIMIT ?) ORDER BY rowid', user, self._split, most)
    if not rows:
      raise KeyError(user)
    return self._preprocess(self._parse([row for row, in rows]))

  def _query(self, query: str, *values: User) -> List[Tuple[Any, ...]]:
    return self._connection.execute(query, values).fetchall()


class Rows(Source):
  """Rows with a column that says whose they are, in any order.

  Args:
    data: A data set of Hugging Face, a DataFrame of pandas, or `{column: array}`.
    user: Name of the column of the users' ids, texts or whole numbers.
    preprocess: `{column: values} -> nest of arrays`, one example per row.
  """

  def __init__(self, data: Table, user: str, preprocess: Preprocess) -> None:
    self._data, self._preprocess = data, preprocess
    size = len(data[user]) if isinstance(data, collections.abc.Mapping) else len(data)
    self._ids: Dict[User, int] = {}
    owners = np.empty([size], np.int64)
    for start in range(0, size, _BLOCK):
      block = np.arange(start, min(start + _BLOCK, size))
      owners[block] = [self._ids.setdefault(user_id(one, user), len(self._ids))
                       for one in _columns(data, block)[user]]
    self._order = np.argsort(owners, kind='stable')
    self._first = np.searchsorted(owners[self._order], np.arange(len(self._ids) + 1))

  def read(self, user: User, most: Optional[int]) -> trees.Tree:
    number = self._ids[user]
    rows = self._order[self._first[number]:self._first[number + 1]]
    if most is not None and len(rows) > most:
      rows = rows[_drawn(len(rows), most)]
    return self._preprocess(_columns(self._data, rows))


def of(examples: Mapping[User, trees.Tree]) -> Source:
  """Returns the source of what `Users` is given."""
  if isinstance(examples, Source):
    return examples
  if not isinstance(examples, collections.abc.Mapping) or not examples:
    raise ValueError('`examples` must map users to nests of arrays, one user at least. '
                     f'Received: {type(examples).__name__}.')
  return Memory(examples)


def without(column: str) -> Preprocess:
  """Returns the default `preprocess`: the arrays of all columns but one, as they are."""
  return lambda columns: {name: np.asarray(values) for name, values in columns.items()
                          if name != column}


class Protos:
  """A parser of `tf.train.Example`s.

  A call of TensorFlow's parser costs 0.8 ms, so protobuf parses the few rows of a small user. Rows
  in which it finds anything unusual go to TensorFlow's parser, which reads or refuses them.

  Args:
    features: As for `tf.io.parse_example`.
  """

  def __init__(self, features: Features) -> None:
    self._features = dict(features)

  def __reduce__(self) -> Tuple[Callable[..., Protos], Tuple[Features]]:
    return Protos, (self._features,)  # It is traced where it is used.

  @functools.cached_property
  def _parse(self) -> Callable[[Sequence[bytes]], Dict[str, Any]]:
    # Traced once: an eager call prepares the features again.
    return tf.function(lambda rows: tf.io.parse_example(rows, self._features), autograph=False,
                       input_signature=[tf.TensorSpec([None], tf.string)])

  def __call__(self, rows: Sequence[bytes]) -> Dict[str, np.ndarray]:
    if sum(map(len, rows)) <= _FEW_BYTES:
      with contextlib.suppress(Exception):  # TensorFlow decides about anything unusual.
        return self._small(rows)
    return {name: values.numpy() for name, values in self._parse(tf.constant(rows)).items()}

  def _small(self, rows: Sequence[bytes]) -> Dict[str, np.ndarray]:
    """Returns the columns of rows. Raises for rows that TensorFlow might read in another way."""
    examples = [tf.train.Example.FromString(row) for row in rows]
    if [one.ByteSize() for one in examples] != [*map(len, rows)]:
      raise ValueError  # A field is repeated, left out or not packed.
    features, columns = [one.features.feature for one in examples], {}
    for name, spec in sorted(self._features.items()):
      size = math.prod(spec.shape) if isinstance(spec, tf.io.FixedLenFeature) else 0
      found = [_VALUES[spec.dtype](one[name]) for one in features]
      if not size or {*map(len, found)} != {size}:
        raise ValueError  # Features that are missing have no values, and their default may be used.
      array = functools.partial(np.array, dtype=spec.dtype.as_numpy_dtype)
      columns[name] = array([one[0] if size == 1 else array(one) for one in found]).reshape(
          [len(rows), *spec.shape])
    return columns


def parse_json(rows: Sequence[str]) -> Dict[str, Any]:
  """Returns `{column: values}` of objects that all have the same names."""
  objects = [json.loads(row) for row in rows]
  names = set(objects[0])
  if any(set(one) != names for one in objects):
    raise ValueError('All JSON objects of a user must have the same names. Received: '
                     f'{sorted({tuple(sorted(one)) for one in objects})[:2]}.')
  return {name: [one[name] for one in objects] for name in objects[0]}


def database_of(
    path: Path, user: str, database: Optional[Path] = None) -> pathlib.Path:
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


def user_id(value: Union[User, np.generic], column: str) -> User:
  value = value.item() if isinstance(value, np.generic) else value
  if isinstance(value, bool) or not isinstance(value, (str, int)):
    raise ValueError(f'{column!r} must hold texts or whole numbers: a row without user belongs to '
                     f'no record. Received: a {type(value).__name__}.')
  return value


def _columns(data: Table, rows: np.ndarray) -> Dict[str, Any]:
  """Returns `{column: values}` of some rows."""
  if isinstance(data, collections.abc.Mapping):
    return {name: np.asarray(values)[rows] for name, values in data.items()}
  return data.iloc[rows].to_dict('list') if hasattr(data, 'iloc') else data[rows.tolist()]


def _drawn(size: int, most: int) -> np.ndarray:
  return np.random.default_rng().permutation(size)[:most]


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
    for line in file:
      if line.strip():
        try:
          one = json.loads(line)
          yield str(user_id(one[user], user)), line.strip()
        except (ValueError, KeyError, TypeError):
          raise ValueError(f'{path}: every line must be a JSON object with {user!r}, a text or a '
                           'whole number. Received: another line, which is not printed, because '
                           'it may be private.') from None
