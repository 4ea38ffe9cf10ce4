# SPDX-License-Identifier: Apache-2.0
"""What reading the users of a first cohort from TFF's SQLite format costs, by the parser of rows.

    python benchmarks/speed/federated_reading.py [--users 10000] [--turns 3]

Users have 11 sentences on average, one of 64 numbers an example, or 100 examples. Every turn opens
the file anew, so tracing is included, and reads all users once in the form in which a round packs
them. CPU seconds of all threads, medians over turns that take turns in one process.
"""

import argparse
import os
import pathlib
import sqlite3
import tempfile
import time
from unittest import mock

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import numpy as np
import tensorflow as tf

from tfdp_adaptive.federated import groups
from tfdp_adaptive.federated import sources
from tfdp_adaptive.federated import users as users_lib

WORDS = [f'word{i}'.encode() for i in range(2000)]
NUMBERS = 64


def texts(rng):
  """A sentence with the fields of StackOverflow, as bytes."""
  sentence = b' '.join(WORDS[i] for i in rng.integers(2000, size=rng.integers(3, 25)))
  fields = {'tokens': sentence, 'creation_date': b'2009-01-01 00:00:00.0 UTC', 'type': b'question',
            'title': sentence[:40], 'tags': b'python|numpy'}
  feature = {name: tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
             for name, value in fields.items()}
  feature['score'] = tf.train.Feature(int64_list=tf.train.Int64List(value=[3]))
  return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()


def numbers(rng):
  """An example of numbers and a label, as bytes."""
  return tf.train.Example(features=tf.train.Features(feature={
      'x': tf.train.Feature(float_list=tf.train.FloatList(value=rng.normal(size=NUMBERS))),
      'y': tf.train.Feature(int64_list=tf.train.Int64List(value=[1]))})).SerializeToString()


KINDS = {  # {what: (an example, its features, examples of a user)}
    'sentences, 11 a user': (
        texts, {'tokens': tf.io.FixedLenFeature([], tf.string)},
        lambda rng: 1 + int(rng.geometric(0.1))),
    '64 numbers, 11 a user': (
        numbers, {'x': tf.io.FixedLenFeature([NUMBERS], tf.float32),
                  'y': tf.io.FixedLenFeature([], tf.int64)},
        lambda rng: 1 + int(rng.geometric(0.1))),
    'sentences, 100 a user': (
        texts, {'tokens': tf.io.FixedLenFeature([], tf.string)}, lambda rng: 100)}


def write(path, example, size, count):
  """A file of so many users. They share 1,000 different examples."""
  rng = np.random.default_rng(0)
  different = [example(rng) for _ in range(1000)]
  with sqlite3.connect(path) as connection:
    connection.execute(
        'CREATE TABLE examples (split_name TEXT, client_id TEXT, serialized_example_proto BLOB)')
    connection.execute(
        'CREATE TABLE client_metadata (client_id TEXT, split_name TEXT, num_examples INTEGER)')
    connection.executemany(
        "INSERT INTO examples VALUES ('train', ?, ?)",
        ((f'{user:07}', different[i]) for user in range(count)
         for i in rng.integers(1000, size=size(rng))))
    connection.execute('CREATE INDEX of_client ON examples (client_id)')
    connection.execute("INSERT INTO client_metadata SELECT client_id, 'train', COUNT(*) "
                       'FROM examples GROUP BY client_id')
  connection.close()


def read(path, features):
  """CPU seconds of reading all users, from opening the file."""
  start = time.process_time()
  preprocess = lambda columns: {
      name: np.array([len(one) for one in values], np.int32) if values.dtype == object else values
      for name, values in columns.items()}
  users = users_lib.Users.from_sqlite(
      path, features=features, preprocess=preprocess, batch_size=16, max_examples=128)
  spec = users.element_type_structure
  for user in users.client_ids:
    groups.batches_of(users, user, spec)
  return time.process_time() - start


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--users', type=int, default=10_000)
  parser.add_argument('--turns', type=int, default=3)
  arguments = parser.parse_args()
  print(f'TensorFlow {tf.__version__}, {arguments.users:,} users, {arguments.turns} turns\n')
  print(f'{"":24} {"TensorFlow alone":>16} {"now":>6} {"ratio":>6}')
  for kind, (example, features, size) in KINDS.items():
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder, 'users.sqlite')
      write(path, example, size, arguments.users)
      rows = []
      for _ in range(arguments.turns):
        with mock.patch.object(sources, '_FEW_BYTES', -1):
          before = read(path, features)
        rows.append((before, read(path, features)))
    before, now = np.median(rows, 0)
    print(f'{kind:24} {before:14.2f} s {now:4.2f} s {now / before:6.2f}', flush=True)


if __name__ == '__main__':
  main()
