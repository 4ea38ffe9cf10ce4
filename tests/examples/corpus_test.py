# SPDX-License-Identifier: Apache-2.0
"""Sentences come out as documented, whatever the source, and errors name the line."""

import gzip
import json
import lzma
import pathlib
import sys

import pytest

from tfdp_adaptive.examples import corpus

SHARED = pathlib.Path(__file__).parents[2] / '..' / 'shared' / 'data'


def write(path, *lines):
  path.write_text('\n'.join(lines), encoding='utf-8')
  return path


def test_tokenize_by_hand():
  text = ("It's the caller's job, e.g. of main().\n"
          'Return x_2 when done: the 3 other words\n\nTwo left')
  assert list(corpus.tokenize(text)) == [
      ("it's", 'the', "caller's", 'job', 'e', 'g'),
      ('return', 'x', 'when', 'done'),
      ('the', 'other', 'words'),
  ]


def test_tokenize_keeps_letters_of_any_alphabet():
  assert list(corpus.tokenize('Das Äußere täuscht – сегодня’s «ok»')) == [
      ('das', 'äußere', 'täuscht', "сегодня's", 'ok')]


@pytest.mark.thorough
def test_standard_library_is_read_without_importing_it():
  before = set(sys.modules)
  library = corpus.standard_library()
  assert not {'turtle', 'antigravity', 'this'} & (set(sys.modules) - before)
  assert library.public
  clients = corpus.by_client(library.sentences)
  assert len(clients) > 300 and len(library.sentences) > 10_000
  argparse = [' '.join(sentence.words) for sentence in clients['argparse']]
  assert 'command line parsing library' in [line[-28:] for line in argparse]
  assert not any(client.startswith('test.') for client in clients)


def test_docstrings_by_hand(tmp_path, monkeypatch):
  (tmp_path / 'site-packages').mkdir()
  source = ['''"""The module does things."""''', 'class A:', '  """A class of things.', '',
            '  >>> secret doctest words', '  Even more of it.', '  """', '  def f(self):',
            '    # No comment is read.', '    "A method of it."',
            '    return "nor any string here"']
  write(tmp_path / 'site-packages' / 'b.py', *source)
  write(tmp_path / 'broken.py', *source, 'def')
  write(tmp_path / 'a.py', *source)
  monkeypatch.setattr(corpus.sysconfig, 'get_path', lambda name: tmp_path)
  sentences = corpus.standard_library.__wrapped__().sentences
  assert [(s.client, ' '.join(s.words)) for s in sentences] == [
      ('a', 'the module does things'), ('a', 'a class of things'), ('a', 'even more of it'),
      ('a', 'a method of it')]


@pytest.mark.parametrize('name, opener', [
    ('a.jsonl', open), ('a.jsonl.xz', lzma.open), ('a.json.gz', gzip.open), ('unnamed', open)])
def test_json_lines(tmp_path, name, opener):
  records = [{'text': 'One two three. Four five six.', 'client': 'ann'}, {'text': 'a b c d'},
             {'speeches': [{'text': 'seven eight'}, {'text': 'seven eight nine'}], 'client': 7},
             {'text': ''}]
  with opener(tmp_path / name, 'wt', encoding='utf-8') as stream:
    stream.write('\n\n'.join(map(json.dumps, records)) + '\n')
  content = corpus.read(tmp_path / name)
  assert content.sentences == [
      ('ann', ('one', 'two', 'three')), ('ann', ('four', 'five', 'six')),
      (None, ('a', 'b', 'c', 'd')), ('7', ('seven', 'eight', 'nine'))]
  assert not content.public and content.name == name


def test_plain_text_joins_lines_within_a_sentence(tmp_path):
  path = write(tmp_path / 'a.txt', 'To be, or not', 'to be. That is the', 'question', '', 'a b c')
  assert [' '.join(s.words) for s in corpus.read(path).sentences] == [
      'to be or not to be', 'that is the question', 'a b c']
  assert {s.client for s in corpus.read(path).sentences} == {None}


@pytest.mark.parametrize('lines, message', [
    (['{"text": "one two three"}', '', '{"text": '], 'a line is not valid JSON. .*not shown'),
    (['{"text": "one two three"}', '["text"]'], 'every line must be an object.* a list'),
    (['{"title": "x", "tags": 3}'], '`text` must be a string'),
    (['{"text": 3}'], '`text` must be a string'),
    (['{"text": "x", "client": [1]}'], '`client` must be .* a list'),
    (['{"text": "x", "client": true}'], '`client` must be .* a bool'),
    (['{"text": "x", "client": "\\ud800"}'], '`client` must be .* a str'),
    (['[' * 100_000], 'a line is not valid JSON'),
    (['{"text": "too short"}'], 'no sentence of 3 or more words'),
    (['', '  '], 'the file is empty'),
])
def test_malformed_files_say_what_is_wrong(tmp_path, lines, message):
  with pytest.raises(corpus.DataError, match=message):
    corpus.read(write(tmp_path / 'bad.jsonl', *lines))


def test_a_missing_client_is_refused_where_it_matters(tmp_path):
  lines = ['{"text": "one two three", "client": 1}', '', '{"text": "one two three"}']
  path = write(tmp_path / 'a.jsonl', *lines)
  assert len(corpus.read(path).sentences) == 2
  with pytest.raises(corpus.DataError, match='`client` is missing in a line'):
    corpus.read(path, need_client=True)
  with pytest.raises(corpus.DataError, match='plain text does not say whose it is'):
    corpus.read(write(tmp_path / 'a.txt', 'one two three'), need_client=True)


def test_unreadable_files(tmp_path):
  with pytest.raises(corpus.DataError, match='missing.txt: cannot be read: No such file'):
    corpus.read(tmp_path / 'missing.txt')
  with pytest.raises(corpus.DataError, match='cannot be read: Is a directory'):
    corpus.read(tmp_path)
  (tmp_path / 'bytes.txt').write_bytes(b'fine here\n\xff\xfe\n')
  with pytest.raises(corpus.DataError, match='a line is not UTF-8'):
    corpus.read(tmp_path / 'bytes.txt')
  (tmp_path / 'cut.txt.xz').write_bytes(lzma.compress(b'one two three ' * 99)[:-20])
  with pytest.raises(corpus.DataError, match='cut.txt.xz: cannot be read'):
    corpus.read(tmp_path / 'cut.txt.xz')


def test_split_is_fixed_disjoint_and_keeps_clients_together():
  sentences = [corpus.Sentence(f'c{i % 500}', (f'w{i}', 'b', 'c')) for i in range(3000)]
  parts = corpus.split(sentences)
  assert parts == corpus.split(sentences)
  clients = [set(corpus.by_client(part)) for part in parts]
  assert sum(map(len, parts)) == 3000
  assert sum(map(len, clients)) == len(set.union(*clients)) == 500
  assert .7 < len(parts.train) / 3000 < .9 and min(map(len, parts)) > 150
  anonymous = [s._replace(client=None) for s in sentences]
  assert min(map(len, corpus.split(anonymous))) > 150 and not corpus.by_client(anonymous)


@pytest.mark.thorough
@pytest.mark.skipif(not SHARED.exists(), reason='the shared data sets are not here')
def test_real_files():
  posts = corpus.read(SHARED / 'stackexchange' / 'posts.jsonl.xz')
  assert len(corpus.by_client(posts.sentences)) > 4_000 and len(posts.sentences) > 100_000
  plays = corpus.read(SHARED / 'shakespeare' / 'tinyshakespeare.txt.xz')
  assert ' '.join(plays.sentences[0].words) == 'before we proceed any further hear me speak'
  roles = corpus.read(SHARED / 'shakespeare' / 'roles.jsonl.xz')
  assert len(corpus.by_client(roles.sentences)) > 1_200 and len(roles.sentences) > 50_000


@pytest.mark.parametrize('count', [corpus.MAX_LINES, corpus.MAX_LINES + 1, 3000])
def test_a_text_of_lines_is_a_text_of_sentences(count, tmp_path):
  path = tmp_path / 'lines.txt'
  path.write_text('\n'.join(f'line number {"abc"[i % 3]}' for i in range(count)))
  read = corpus.read(path).sentences
  if count > corpus.MAX_LINES:
    assert read == [corpus.Sentence(None, ('line', 'number', 'abc'[i % 3])) for i in range(count)]
  else:
    assert len(read) == 1 and len(read[0].words) == 3 * count


def test_records_that_differ_in_a_number_are_held_out_fairly(tmp_path):
  path = tmp_path / 'numbers.jsonl'
  path.write_text(''.join(f'{{"text": "order {i} was late"}}\n' for i in range(1000)))
  parts = corpus.split(corpus.read(path).sentences)
  assert 750 < len(parts.train) < 850 and 60 < len(parts.test) < 140
  assert sum(map(len, parts)) == 1000
