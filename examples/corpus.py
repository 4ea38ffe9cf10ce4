# SPDX-License-Identifier: Apache-2.0
"""Sentences with the client they belong to, from the standard library or a file.

All sources are tokenized in the same way. A text is cut into sentences at blank lines and after
`.`, `!`, `?`, `:` or `;` followed by white space. Words are lower-cased runs of letters of any
alphabet, with inner apostrophes. Digits, underscores and punctuation separate words and are
dropped, and so are sentences of fewer than `MIN_WORDS` words. In a plain text file, a sentence of
more than `MAX_LINES` lines is a list without punctuation, and each of its lines is a sentence.
"""

import ast
import collections
import functools
import gzip
import json
import lzma
import os
import pathlib
import re
import sysconfig
from typing import (
  Any,
  Callable,
  Dict,
  Iterable,
  Iterator,
  List,
  NamedTuple,
  Optional,
  Sequence,
  Tuple,
  Union,
)
import zlib

from tfdp_adaptive import errors

Path = Union[str, os.PathLike]

MIN_WORDS, MAX_LINES = 3, 8
_BREAK = re.compile(r'(?<=[.!?:;])\s+|\n\s*\n')
_WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)*")
_LONE_SURROGATE = re.compile('[\ud800-\udfff]')  # JSON can write what is no character.
_SKIPPED_FOLDERS = {'site-packages', 'dist-packages', 'test', 'tests', 'idle_test'}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_OPENERS: Dict[str, Callable[..., Any]] = {'.xz': lzma.open, '.gz': gzip.open}
HIDDEN = 'The line is not shown, because it may be private.'
_JSON_SUFFIXES = ('.jsonl', '.ndjson', '.json')


class DataError(errors.UsageError):
  """A file of text or words cannot be used; the message names the file."""


class Sentence(NamedTuple):
  """One example: its words, and who wrote it where that is known."""

  client: Optional[str]
  words: Tuple[str, ...]


class Corpus(NamedTuple):
  """Sentences in a fixed order. `public` says whether anyone may read them."""

  name: str
  sentences: List[Sentence]
  public: bool


class Split(NamedTuple):
  """Disjoint parts of a corpus; no client is in two of them."""

  train: List[Sentence]
  validation: List[Sentence]
  test: List[Sentence]


def tokenize(text: str) -> Iterator[Tuple[str, ...]]:
  """Yields the words of every sentence of `text`; see the module's docstring."""
  for piece in _BREAK.split(text.replace('\u2019', "'")):
    words = tuple(_WORD.findall(piece.lower()))
    if len(words) >= MIN_WORDS:
      yield words


@functools.lru_cache(maxsize=1)
def standard_library() -> Corpus:
  """The docstrings of the running Python's own standard library; client = module.

  Sources are parsed, never imported. Doctest lines and test packages are left out.
  """
  root = pathlib.Path(sysconfig.get_path('stdlib'))
  sentences = []
  for path in sorted(root.rglob('*.py')):
    relative = path.relative_to(root)
    if _SKIPPED_FOLDERS.isdisjoint(relative.parts):
      client = '.'.join(relative.with_suffix('').parts)
      sentences += [Sentence(client, words) for words in _docstring_sentences(path)]
  if not sentences:
    raise DataError(f'{root}: no Python sources with docstrings; give a text with --data FILE.')
  return Corpus("docstrings of Python's standard library", sentences, public=True)


def _docstring_sentences(path: pathlib.Path) -> Iterator[Tuple[str, ...]]:
  try:
    tree = ast.parse(path.read_bytes())
  except (SyntaxError, ValueError):  # Templates and deliberately broken sources.
    return
  for node in ast.walk(tree):
    text = isinstance(node, _DOCUMENTED) and ast.get_docstring(node)
    if text:
      lines = text.split('\n')
      yield from tokenize('\n'.join(
          line for line in lines if not line.lstrip().startswith(('>>> ', '... '))))


def read(path: Path, need_client: bool = False) -> Corpus:
  """Reads a text file, plain or JSON lines, also .xz or .gz.

  JSON lines (suffix .jsonl, .ndjson or .json, or a first line that starts with
  an opening brace) hold objects with `text`, or `speeches`, a list of objects with
  `text`, and optionally `client`, a string or an integer. Anything else is plain
  text, whose sentences have no client.

  Args:
    path: The file.
    need_client: Whether a text without `client` is refused.

  Raises:
    DataError: The file is missing, unreadable, malformed or without sentences.
  """
  path = pathlib.Path(path)
  lines = read_lines(path)
  if _is_json(path, lines):
    sentences = list(_json_sentences(path, lines, need_client))
  elif need_client:
    raise DataError(f'{path}: plain text does not say whose it is; user-level training needs JSON '
                    'lines with `text` and `client`.')
  else:
    sentences = [Sentence(None, words) for piece in _pieces(lines) for words in tokenize(piece)]
  if not sentences:
    raise DataError(f'{path}: no sentence of {MIN_WORDS} or more words.')
  return Corpus(path.name, sentences, public=False)


def _pieces(lines: Sequence[str]) -> Iterator[str]:
  """Yields the sentences of plain text, and the lines of what is too long to be one."""
  for piece in _BREAK.split('\n'.join(lines)):
    within = piece.strip().split('\n')
    yield from within if len(within) > MAX_LINES else [piece]


def read_lines(path: Path) -> List[str]:
  """Returns the lines of a UTF-8 file without their ends, decompressed by suffix."""
  path = pathlib.Path(path)
  try:
    if path.is_char_device():  # Some never end.
      raise OSError('it is a device, not a file')
    with _OPENERS.get(path.suffix, open)(path, 'rb') as stream:
      content = stream.read()
  except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
    reason = getattr(error, 'strerror', None) or error
    raise DataError(f'{path}: cannot be read: {reason}.') from error
  if not content.strip():
    raise DataError(f'{path}: the file is empty.')
  lines: List[str] = []
  for line in content.split(b'\n'):
    try:
      lines.append(line.decode('utf-8' if lines else 'utf-8-sig').rstrip('\r'))
    except UnicodeDecodeError:
      raise DataError(f'{path}: a line is not UTF-8 text. {HIDDEN}') from None
  return lines


def _is_json(path: pathlib.Path, lines: Sequence[str]) -> bool:
  suffixes = [suffix for suffix in path.suffixes if suffix not in _OPENERS]
  if suffixes and suffixes[-1] in _JSON_SUFFIXES:
    return True
  return next(line for line in lines if line.strip()).lstrip().startswith('{')


def _json_sentences(path: Path, lines: Iterable[str], need_client: bool) -> Iterator[Sentence]:
  for line in lines:
    if line.strip():
      client, text = _json_record(path, line)
      if client is None and need_client:
        raise DataError(f'{path}: `client` is missing in a line; user-level training must know '
                        f'whose text it is. {HIDDEN}')
      for words in tokenize(text):
        yield Sentence(client, words)


def _json_record(path: Path, line: str) -> Tuple[Optional[str], str]:
  try:
    record = json.loads(line)
  except (ValueError, RecursionError):
    raise DataError(f'{path}: a line is not valid JSON. {HIDDEN}') from None
  if not isinstance(record, dict):
    raise DataError(f'{path}: every line must be an object with `text`. Received: a '
                    f'{type(record).__name__}. {HIDDEN}')
  texts = record['speeches'] if isinstance(record.get('speeches'), list) else [record]
  if not texts or not all(
      isinstance(text, dict) and isinstance(text.get('text'), str) for text in texts):
    raise DataError(f'{path}: `text` must be a string in every line, or `speeches` a list of '
                    f'objects with one. Received: a line without. {HIDDEN}')
  client = record.get('client')
  if (isinstance(client, bool) or not isinstance(client, (str, int, type(None)))
      or _LONE_SURROGATE.search(str(client))):
    raise DataError(f'{path}: `client` must be a string or an integer. Received: a '
                    f'{type(client).__name__}. {HIDDEN}')
  return (None if client is None else str(client)), '\n\n'.join(text['text'] for text in texts)


def split(sentences: Iterable[Sentence]) -> Split:
  """Splits a corpus into about 80, 10 and 10 percent, by a fixed hash of client or words.

  All sentences of a client fall into one part, so held-out sentences are of unseen people
  (modules). Without clients, sentences with the same words can fall into different parts, since
  they may differ in what is dropped, such as a number.
  """
  parts = Split([], [], [])
  seen: Dict[str, int] = collections.Counter()
  for sentence in sentences:
    key = sentence.client
    if key is None:
      words = ' '.join(sentence.words)
      key = f'{words} {seen[words]}' if seen[words] else words
      seen[words] += 1
    bucket = zlib.crc32(key.encode('utf-8')) % 10
    (parts.test if bucket == 0 else parts.validation if bucket == 1 else parts.train).append(
        sentence)
  return parts


def by_client(sentences: Iterable[Sentence]) -> Dict[str, List[Sentence]]:
  """Returns {client: its sentences}, in order of appearance, of all sentences with a client."""
  clients: Dict[str, List[Sentence]] = {}
  for sentence in sentences:
    if sentence.client is not None:
      clients.setdefault(sentence.client, []).append(sentence)
  return clients


def most_frequent(lists: Iterable[Iterable[str]], size: int) -> Tuple[str, ...]:
  """Returns the `size` most frequent words (or tags), ties in alphabetical order.

  Frequencies reveal the text, so count them in PUBLIC text.
  """
  counts = collections.Counter(item for items in lists for item in items)
  ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
  return tuple(item for item, _ in ranked[:size])
