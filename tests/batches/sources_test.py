# SPDX-License-Identifier: Apache-2.0
"""Records wherever they are kept: the same batches as from arrays, and nothing else read."""

import math
import os

import numpy as np
import pytest
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import errors
from tfdp_adaptive.batches import cache as cache_lib
from tfdp_adaptive.batches import checked_source
from tfdp_adaptive.batches import sources
from tfdp_adaptive.privacy import plan as plan_lib

N, WIDTH = 50, 3
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, WIDTH)).astype(np.float32)
Y = np.arange(N)
WORDS = np.array([f'word {i}' for i in range(N)])


def make_plan(steps=6):
  return plan_lib.PrivacyPlan(
      population_size=N, batch_size=8, steps=steps, l2_norm_clip=1.0, noise_multiplier=1.0,
      target_delta=1e-3, seed=3)


class Records:
  """One record for each number, as grain and HuggingFace have it; keeps what was read."""

  def __init__(self, record, length=N):
    self.read, self._record, self._length = [], record, length

  def __len__(self):
    return self._length

  def __getitem__(self, index):
    assert isinstance(index, int)
    self.read.append(index)
    return self._record(index)


class Several(Records):
  """Records that can also be read several at once."""

  def __getitems__(self, indices):
    return [self[i] for i in indices]


class File:
  """Like an array in a file: indices in order, each once; no way to read the whole."""

  shape, dtype = X.shape, X.dtype

  def __init__(self):
    self.read = []

  def __len__(self):
    return N

  def __getitem__(self, indices):
    assert (np.diff(indices) > 0).all()
    self.read.extend(indices)
    return X[indices]

  def __array__(self, *args, **kwargs):
    raise AssertionError('the whole was read')


class Batches(compat.keras.utils.Sequence):
  """As Keras users write them."""

  def __init__(self, size=8, length=N):
    super().__init__()
    self.read, self._size, self._length = [], size, length

  def __len__(self):
    return math.ceil(self._length / self._size)

  def __getitem__(self, index):
    self.read.append(index)
    rows = slice(index * self._size, min((index + 1) * self._size, self._length))
    return X[rows], Y[rows]


def as_memmap(folder):
  path = folder / 'x.npy'
  np.save(path, X)
  return np.load(path, mmap_mode='r')


def made(kind, folder):
  return {
      'memory map': lambda: (as_memmap(folder), Y),
      'file': lambda: (File(), Y),
      'records': lambda: Records(lambda i: (X[i], int(Y[i]))),
      'several': lambda: Several(lambda i: (X[i], int(Y[i]))),
      'parts': lambda: (Records(lambda i: X[i]), Records(lambda i: Y[i])),
      'batches': Batches,
      'batches without a rest': lambda: Batches(10),
      'data set': lambda: tf.data.Dataset.from_tensor_slices((X, Y)),
      'open shapes': lambda: tf.data.Dataset.from_generator(
          lambda: zip(X, Y), output_signature=(
              tf.TensorSpec([None]), tf.TensorSpec([], tf.int64))),
  }[kind]()


@pytest.mark.parametrize('kind', [
    'memory map', 'file', 'records', 'several', 'parts', 'batches', 'batches without a rest',
    'data set', 'open shapes'])
def test_batches_are_those_of_arrays(kind, tmp_path):
  plan = make_plan()
  batches = list(plan.batches(made(kind, tmp_path)).as_numpy_iterator())
  expected = list(plan.batches((X, Y)).as_numpy_iterator())
  assert len(batches) == len(expected) == plan.steps
  for one, other in zip(batches, expected):
    for a, b in zip(one, other):
      assert a.dtype == b.dtype
      np.testing.assert_array_equal(a, b)


def test_what_is_read_only_once_is_told_what_to_become():
  for data in (zip(X, Y), ((one, other) for one, other in zip(X, Y))):
    with pytest.raises(ValueError, match='read only once.*Make a `tf.data.Dataset`'):
      make_plan().batches(data)


def test_only_records_of_the_batches_are_read():
  plan = make_plan(steps=2)
  records, file = Records(lambda i: (X[i], Y[i])), File()
  for data, seen in ((records, records), ((file, Y), file)):
    list(plan.batches(data).as_numpy_iterator())
    drawn = np.concatenate(list(plan.index_batches()))
    assert sorted(seen.read[seen is records:]) == sorted(drawn)  # The first told the shapes.
  batches = Batches(5)
  list(plan.batches(batches).as_numpy_iterator())
  expected = [number for step in plan.index_batches() for number in sorted(set(step // 5))]
  assert batches.read == [0, 9] + expected


def test_texts_dictionaries_and_weights():
  source = Records(lambda i: ({'text': WORDS[i], 'pair': (X[i], np.float16(i))}, i, 0.5))
  x, y, weight = next(make_plan().batches(source).as_numpy_iterator())
  indices = next(make_plan().index_batches())
  assert [w.decode() for w in x['text'][:len(indices)]] == list(WORDS[indices])
  np.testing.assert_array_equal(x['pair'][0][:len(indices)], X[indices])
  assert x['pair'][1].dtype == np.float16
  np.testing.assert_array_equal(y[:len(indices)], indices)
  np.testing.assert_allclose(weight[:len(indices)], 0.5, rtol=1e-6)


def data_set():
  return tf.data.Dataset.from_tensor_slices((
      {'text': WORDS, 'words': np.stack([WORDS, WORDS], 1)}, tf.cast(X, tf.bfloat16)))


def test_a_data_set_is_written_once_and_read_from_the_folder_named(tmp_path):
  folder, plan = str(tmp_path / 'cache'), make_plan()
  first = list(plan.batches(data_set(), cache=folder).as_numpy_iterator())
  (x, y, _), indices = first[0], next(plan.index_batches())
  assert [w.decode() for w in x['text'][:len(indices)]] == list(WORDS[indices])
  assert [w.decode() for w in x['words'][:len(indices), 1]] == list(WORDS[indices])
  np.testing.assert_array_equal(y[:len(indices)], tf.cast(X, tf.bfloat16).numpy()[indices])
  assert os.stat(folder).st_mode & 0o077 == 0  # The records are private.
  reads = []
  again = data_set().map(lambda x, y: (tf.py_function(reads.append, [0], []), (x, y))[1])
  for one, other in zip(first, plan.batches(again, cache=folder).as_numpy_iterator()):
    tf.nest.map_structure(np.testing.assert_array_equal, one, other)
  assert len(reads) == 32  # The first ones, twice.
  with pytest.raises(ValueError, match='must be of this data set'):
    plan.batches(tf.data.Dataset.from_tensor_slices((X, Y)), cache=folder)


@pytest.mark.pitfall(
    'The `cache` folder already holds other examples or another order.',
    severity='high', stops='ValueError: its first records are compared')
def test_a_cache_of_other_records_is_refused(tmp_path):
  folder, n = str(tmp_path), 50
  of = lambda x: tf.data.Dataset.from_tensor_slices(x)
  cache_lib.Cache(of(np.arange(n)), folder)
  cache_lib.Cache(of(np.arange(n)).shuffle(n), folder)  # Every pass has another order.
  for x in (np.arange(n)[::-1], np.roll(np.arange(n), 1), np.arange(7)):
    with pytest.raises(ValueError, match='first records are others, or in another order'):
      cache_lib.Cache(of(x), folder)


def test_a_cache_that_was_damaged_is_refused(tmp_path):
  """Its index cut at any length, or changed; files of another length than it says."""
  data = tf.data.Dataset.from_tensor_slices((np.ones([10, 2]), [f'{i}' * i for i in range(10)]))
  cache_lib.Cache(data, tmp_path)
  for name in ('index', '0', '1', '1.ends'):
    path = tmp_path / name
    good = path.read_bytes()
    broken = [good[:i] for i in range(1, len(good), 1 if name == 'index' else 7)]
    if name == 'index':
      broken += [good[:i] + bytes([good[i] ^ 1 << i % 8]) + good[i + 1:] for i in range(len(good))]
    for content in broken:
      path.write_bytes(content)
      with pytest.raises(ValueError, match='must be what was written there|of this data set'):
        cache_lib.Cache(data, tmp_path)
    path.write_bytes(good)
  assert len(cache_lib.Cache(data, tmp_path)) == 10


def test_a_cache_that_was_not_finished_is_none(tmp_path):
  def stops():
    yield X[0], 0
    raise RuntimeError('stopped')

  signature = (tf.TensorSpec([WIDTH]), tf.TensorSpec([], tf.int64))
  broken = tf.data.Dataset.from_generator(stops, output_signature=signature)
  with pytest.raises(tf.errors.OpError):
    make_plan().batches(broken, cache=str(tmp_path))
  whole = tf.data.Dataset.from_tensor_slices((X, Y))
  _, y, _ = next(make_plan().batches(whole, cache=str(tmp_path)).as_numpy_iterator())
  indices = next(make_plan().index_batches())
  np.testing.assert_array_equal(y[:len(indices)], indices)


def test_a_temporary_cache_goes_with_its_last_user():
  cache = cache_lib.Cache(tf.data.Dataset.from_tensor_slices((X, Y)))
  folder = cache.folder
  assert folder.stat().st_mode & 0o077 == 0 and len(cache) == N
  del cache
  assert not folder.exists()


def test_memory_does_not_grow_with_the_data():
  """10 GB that nobody has: only what batches need is made."""
  rows, width = 10**7, 256
  source = Records(lambda i: (np.full(width, i, np.float32), i), rows)
  plan = plan_lib.PrivacyPlan(
      population_size=rows, batch_size=16, steps=3, l2_norm_clip=1.0, noise_multiplier=1.0,
      target_delta=1e-9)
  for x, y, _ in plan.batches(source).as_numpy_iterator():
    np.testing.assert_array_equal(x[:, 5].astype(np.int64), y.astype(np.float32))
  assert len(source.read) < 200


@pytest.mark.parametrize('data, message', [
    (Records(lambda i: None), 'a record for every number'),
    (Records(lambda i: X[i, :1 + i % 2]), 'elements of one shape'),
    (Records(lambda i: (X[i], Y[i]) if i < 1 else X[i]), 'elements of one structure'),
    (Records(lambda i: {'a' if i < 1 else 'b': X[i]}), 'elements of one structure'),
    (Records(lambda i: 1 if i < 1 else 1.5), 'elements of one dtype'),
    ((np.ones([4, 2]), None), 'If an input is optional'),
    (Records(lambda i: object()), 'a part of type object'),
    (Records(lambda i: X[i], 0), 'no examples'),
    (Records(lambda i: X[i], N - 1), 'data with another number'),
    (Batches(length=0), 'no examples'),
    ((Records(lambda i: X[i]), Y[1:]), 'Received: 2 arrays of 2 different lengths')])
def test_refused_sources(data, message):
  with pytest.raises((ValueError, tf.errors.OpError), match=message):
    list(make_plan().batches(data).as_numpy_iterator())


def test_batches_must_have_one_size():
  class Uneven(Batches):
    def __getitem__(self, index):
      x, y = super().__getitem__(index)
      return (x[1:], y[1:]) if index == 2 else (x, y)

  source = sources.of(Uneven())
  with pytest.raises(ValueError, match='batches of one size, 8'):
    source.take(np.arange(N))


@pytest.mark.parametrize('changing', [None, 'each is turned'])
@pytest.mark.parametrize('given', [lambda n: n[:1], lambda n: n[1:], lambda n: n + n[:1]])
def test_a_source_gives_one_record_for_each_number(given, changing):
  """One alone would take all places of a batch."""
  class Rows:
    def __len__(self):
      return N

    def __getitem__(self, index):
      return X[index], Y[index]

    def __getitems__(self, numbers):
      return [self[i] for i in given(numbers)]

  for indices in ([3, 5], [1, 2, 8]):
    with pytest.raises(errors.PrivacyError, match='one record for each number'):
      checked_source.CheckedSource(sources.of(Rows()), changing).take(np.array(indices))


def test_a_cache_is_for_data_sets():
  with pytest.raises(ValueError, match='`cache` is for'):
    make_plan().batches((X, Y), cache='somewhere')
