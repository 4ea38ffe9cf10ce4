# SPDX-License-Identifier: Apache-2.0
"""Users in files: the examples that were written, read one user at a time."""

import collections
import gzip
import importlib.util
import json
import pathlib
import sqlite3
import stat

import numpy as np
import pytest
import tensorflow as tf

from tfdp_adaptive.federated import identity
from tfdp_adaptive.federated import users as users_lib

FEATURES = {'tokens': tf.io.FixedLenFeature([], tf.string),
            'score': tf.io.FixedLenFeature([], tf.int64)}
SENTENCES = {'b': [b'so long', b'and thanks'], 'a': [b'for'], 'ö\'; --': [b'all', b'the', b'fish']}


def proto(tokens, score):
  return tf.train.Example(features=tf.train.Features(feature={
      'tokens': tf.train.Feature(bytes_list=tf.train.BytesList(value=[tokens])),
      'score': tf.train.Feature(int64_list=tf.train.Int64List(value=[score])),
  })).SerializeToString()


def write(path, rows):
  """A file as TFF's are, of `(split, client, bytes)`."""
  with sqlite3.connect(path) as connection:
    connection.execute(
        'CREATE TABLE examples (split_name TEXT, client_id TEXT, serialized_example_proto BLOB)')
    connection.execute(
        'CREATE TABLE client_metadata (client_id TEXT, split_name TEXT, num_examples INTEGER)')
    connection.executemany('INSERT INTO examples VALUES (?, ?, ?)', rows)
    connection.execute('CREATE INDEX of_client ON examples (client_id)')
    connection.execute('INSERT INTO client_metadata SELECT client_id, split_name, COUNT(*) '
                       'FROM examples GROUP BY client_id, split_name')
  connection.close()


@pytest.fixture(name='path')
def _path(tmp_path):
  path = tmp_path / 'a file?.sqlite'
  write(path, [('train', user, proto(tokens, i)) for user, mine in SENTENCES.items()
               for i, tokens in enumerate(mine)] + [('test', 'a', proto(b'later', 7))])
  return path


def lengths(columns):
  return collections.OrderedDict(
      x=columns['score'], y=np.array([len(one) for one in columns['tokens']], np.int32))


def from_sqlite(path, **kwargs):
  return users_lib.Users.from_sqlite(
      path, **{'features': FEATURES, 'preprocess': lengths, 'batch_size': 2, **kwargs})


def test_sqlite_holds_what_was_written(path):
  users = from_sqlite(path)
  assert users.client_ids == sorted(SENTENCES)
  for user, mine in SENTENCES.items():
    batches = list(users.batches(user))
    assert [len(batch['x']) for batch in batches] == [2] * (len(mine) // 2) + [1] * (len(mine) % 2)
    np.testing.assert_array_equal(np.concatenate([b['x'] for b in batches]), np.arange(len(mine)))
    np.testing.assert_array_equal(
        np.concatenate([b['y'] for b in batches]), [len(one) for one in mine])
  assert from_sqlite(path, split='test').client_ids == ['a']
  spec = users.element_type_structure
  assert spec['x'] == tf.TensorSpec([None], tf.int64) and spec['y'].dtype == tf.int32
  everything = [int(x) for batch in users.all_examples(4) for x in batch['y']]
  assert sorted(everything) == sorted(len(one) for mine in SENTENCES.values() for one in mine)


@pytest.mark.skipif(importlib.util.find_spec('tensorflow_federated') is None, reason='needs TFF')
def test_tff_reads_the_same(path):
  import tensorflow_federated as tff  # pylint: disable=g-import-not-at-top
  theirs = tff.simulation.datasets.SqlClientData(str(path), 'train')
  ours = from_sqlite(path, preprocess=lambda columns: columns['tokens'], batch_size=10)
  assert theirs.client_ids == ours.client_ids
  for user in ('a', 'b'):  # It writes an id into its query as it is.
    expected = [tf.io.parse_example(row, FEATURES)['tokens'].numpy()
                for row in theirs.create_tf_dataset_for_client(user)]
    assert next(ours.batches(user)).tolist() == expected


def test_what_is_no_such_file(path, tmp_path):
  with pytest.raises(ValueError, match=r"one of \['test', 'train'\].*split='heldout'"):
    from_sqlite(path, split='heldout')
  (tmp_path / 'text').write_text('no database', encoding='utf-8')
  for wrong in (tmp_path / 'nothing', tmp_path / 'text'):
    with pytest.raises(ValueError, match='must be an SQLite file'):
      from_sqlite(wrong)
  assert not (tmp_path / 'nothing').exists()


def test_a_cap_reads_no_more_rows_and_draws_them_again(tmp_path):
  path = tmp_path / 'one.sqlite'
  write(path, [('train', 'a', proto(b'x', i)) for i in range(1000)])
  seen = []

  def preprocess(columns):
    seen.append(columns['score'])
    return columns['score']

  users = from_sqlite(path, preprocess=preprocess, max_examples=5, batch_size=5)
  drawn = [next(users.batches('a')) for _ in range(400)]
  assert all(len(one) == 5 for one in seen)
  assert all(len(set(one.tolist())) == 5 for one in drawn)
  counts = np.bincount(np.concatenate(drawn) // 100, minlength=10)
  assert np.all(np.abs(counts - 200) < 5 * np.sqrt(200))  # Each tenth as often.
  # A line that becomes several examples is capped all the same.
  many = from_sqlite(path, preprocess=lambda columns: np.repeat(columns['score'], 3),
                     max_examples=5, batch_size=100)
  assert len(next(many.batches('a'))) == 5


ROWS = [{'who': 7, 'x': [1.0, 2.0], 'y': 0}, {'who': 3, 'x': [3.0, 4.0], 'y': 1},
        {'who': 7, 'x': [5.0, 6.0], 'y': 2}]


class HuggingFaceLike:
  """Rows by a list of numbers, columns of lists."""

  def __len__(self):
    return len(ROWS)

  def __getitem__(self, rows):
    assert isinstance(rows, list)
    return {name: [ROWS[i][name] for i in rows] for name in ROWS[0]}


class PandasLike(HuggingFaceLike):

  @property
  def iloc(self):
    return self

  def __getitem__(self, rows):
    return self if isinstance(rows, np.ndarray) and not setattr(self, 'rows', rows) else None

  def to_dict(self, orient):
    assert orient == 'list'
    return {name: [ROWS[i][name] for i in self.rows] for name in ROWS[0]}


@pytest.mark.parametrize('kind', ['json', 'gz', 'columns', 'hugging_face', 'pandas'])
def test_rows_with_a_user_column(kind, tmp_path):
  if kind in ('json', 'gz'):
    path = tmp_path / ('lines.jsonl' + ('.gz' if kind == 'gz' else ''))
    opened = gzip.open if kind == 'gz' else open
    with opened(path, 'wt', encoding='utf-8') as file:
      file.write('\n'.join(map(json.dumps, ROWS)) + '\n\n')
    users = users_lib.Users.from_json_lines(path, user='who', batch_size=4)
    names = {'3': 3, '7': 7}
  else:
    data = {'columns': {name: np.array([row[name] for row in ROWS]) for name in ROWS[0]},
            'hugging_face': HuggingFaceLike(), 'pandas': PandasLike()}[kind]
    users = users_lib.Users.from_rows(data, user='who', batch_size=4)
    names = {7: 7, 3: 3}  # In order of appearance.
  assert users.client_ids == list(names)
  for name, user in names.items():
    (batch,) = users.batches(name)
    assert set(batch) == {'x', 'y'}
    np.testing.assert_array_equal(batch['x'], [row['x'] for row in ROWS if row['who'] == user])
    np.testing.assert_array_equal(batch['y'], [row['y'] for row in ROWS if row['who'] == user])


@pytest.mark.parametrize('wrong', [None, True, 1.5, ['a']])
def test_every_row_must_say_whose_it_is(wrong, tmp_path):
  rows = [*ROWS, {**ROWS[0], 'who': wrong}]
  with pytest.raises(ValueError, match="'who' must hold texts or whole numbers"):
    users_lib.Users.from_rows(
        {'who': np.array([row['who'] for row in rows], object), 'x': np.zeros(4)}, user='who',
        batch_size=1)
  path = tmp_path / 'lines.jsonl'
  path.write_text('\n'.join(map(json.dumps, rows)), encoding='utf-8')
  with pytest.raises(ValueError, match='every line must be a JSON object with .who.'):
    users_lib.Users.from_json_lines(path, user='who', batch_size=1)
  assert [one.name for one in tmp_path.iterdir()] == ['lines.jsonl']  # Nothing half made is left.


def test_json_lines_are_streamed_once_and_again_when_they_change(tmp_path):
  path, database = tmp_path / 'lines.jsonl', tmp_path / 'kept'
  path.write_text('\n'.join(map(json.dumps, ROWS)), encoding='utf-8')

  def read(**kwargs):
    return users_lib.Users.from_json_lines(
        path, **{'user': 'who', 'batch_size': 4, 'database': database, **kwargs})

  assert read().client_ids == ['3', '7']
  assert stat.S_IMODE(database.stat().st_mode) == 0o600
  first = database.stat().st_mtime_ns
  read()
  assert database.stat().st_mtime_ns == first
  path.write_text(json.dumps({**ROWS[0], 'who': 'new'}), encoding='utf-8')
  assert read().client_ids == ['new']
  with pytest.raises(ValueError, match='every line must be a JSON object with .x.'):
    read(user='x')  # Another column is another file.
  other = tmp_path / 'other'
  other.write_text('something else', encoding='utf-8')
  with pytest.raises(ValueError, match='must be a new file, or one made from JSON lines'):
    read(database=other)
  assert other.read_text(encoding='utf-8') == 'something else'


def resident(name):
  """MiB of this process."""
  text = pathlib.Path('/proc/self/status').read_text(encoding='ascii')
  return int(text.split(f'{name}:')[1].split()[0]) / 1024


@pytest.mark.thorough
def test_a_hundred_thousand_users_need_no_memory(tmp_path):
  """300,000 rows, 150 MB: what stays is the ids."""
  path = tmp_path / 'large.sqlite'
  row = proto(b'w' * 400, 1)
  write(path, (('train', f'user{i // 3:06}', row) for i in range(300_000)))
  assert path.stat().st_size > 120 * 2**20
  from_sqlite(path, split='train').element_type_structure  # Whatever TensorFlow needs once.
  pathlib.Path('/proc/self/clear_refs').write_text('5', encoding='ascii')
  before = resident('VmRSS')
  users = from_sqlite(path)
  client_ids = users.client_ids
  assert len(client_ids) == 100_000
  for user in client_ids[::100]:
    assert sum(len(batch['x']) for batch in users.batches(user)) == 3
  assert resident('VmHWM') - before < 40


def test_changed_examples_are_noticed(path, tmp_path):
  with sqlite3.connect(path) as connection:
    users = from_sqlite(path)
    before = identity.of_data(users)
    assert before['sample'] and before == identity.of_data(from_sqlite(path))
    connection.execute("UPDATE examples SET serialized_example_proto = ? WHERE client_id = 'a' "
                       "AND split_name = 'train'", [proto(b'four', 0)])
  connection.close()
  after = identity.of_data(from_sqlite(path))
  assert {name for name in before if before[name] != after[name]} == {'sample'}
  # Data that are drawn again at every call have no digest.
  rng = np.random.default_rng(0)
  random = from_sqlite(path, preprocess=lambda columns: rng.normal(size=len(columns['score'])))
  assert identity.of_data(random)['sample'] is None
