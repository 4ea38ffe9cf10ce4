# SPDX-License-Identifier: Apache-2.0
"""Reads records by their number, and only the requested ones.

A source is an array or memory map; an object whose `__len__` and `__getitem__` give single records
(a grain source, a Hugging Face data set); a Keras `Sequence` or `PyDataset`, which gives batches;
or a tuple or dict of these. `columns_of` chooses columns of records that are dicts, as those of
Hugging Face data sets and grain.
"""

import hashlib
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

import numpy as np
import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import compat
from tfdp_adaptive import errors
from tfdp_adaptive import trees

Nest = Any  # Arrays, specs or sources in tuples and dicts.
Array = Any  # An array of NumPy, or an object indexed like one.
Data = Any  # An argument of `of`.
_READ = 4096  # Examples that are read at once.
_NOT_ARRAYS = ('`data` must be numeric or string arrays with the example as leading axis, or a '
               'source of records: an object with `__len__` and `__getitem__`. ')
FEATURES = 'Records are features of the frozen base {}.'


class Source:
  """Some records.

  Args:
    length: The number of records.
    specs: Nest of the shapes and dtypes of one record.
    read: `indices -> nest of arrays [len(indices), ...]`; arrays of text have the dtype `object`.
    at_hand: Whether records may be read besides those of the batches, at no cost.
    entries: Ledger entries of what the records were computed by, as features are by their base.
  """

  views: Optional[int] = None  # Along the first axis of each input, where those are stored.
  base: Optional[str] = None  # Digest of the base whose features the records are.

  def __init__(self, length: int, specs: Nest, read: Callable[[np.ndarray], Any],
               at_hand: bool = False, entries: Sequence[Any] = ()) -> None:
    self.specs, self.at_hand, self.entries = specs, at_hand, tuple(entries)
    self._length, self._read = length, read

  def __len__(self) -> int:
    return self._length

  def take(self, indices: np.ndarray) -> Any:
    """Returns the records of these numbers, one for each."""
    taken = self._read(indices)
    # NumPy would repeat a single one in all places of a batch.
    if {len(leaf) for leaf in leaves(taken)} != {len(indices)}:
      raise errors.PrivacyError('`data` must give one record for each number. Received: more '
                                'records than numbers, or fewer.')
    return taken

  def notes(self) -> List[str]:
    """Returns sentences about the records for the statement."""
    return [] if self.base is None else [FEATURES.format(self.base)]


def of(data: object) -> Source:
  """Returns the source of an object that holds records.

  Raises:
    ValueError: If it holds no records, or if its parts differ in length.
  """
  if isinstance(data, Source):
    return data
  if isinstance(data, (tuple, dict)):
    return _of_parts(map_structure(of, trees.given(data)))
  if isinstance(data, compat.keras.utils.Sequence):
    return _of_batches(data)
  if isinstance(data, (tf.RaggedTensor, tf.SparseTensor)):
    raise ValueError('`data` must be dense arrays with the example as leading axis; pad or '
                     f'densify it first. Received: {type(data).__name__}.')
  if _is_lazy(data):
    return _of_array(data) if _is_array(data) else _of_records(data)
  return _of_array(_array(data))


def fingerprint(data: Nest) -> str:
  """Returns a digest of a nest of arrays, including shapes and types."""
  digest = hashlib.sha256()
  for leaf in leaves(data):
    array = np.asarray(leaf)
    digest.update(repr((array.shape, array.dtype.kind)).encode())
    digest.update(trees.content(array))
  return digest.hexdigest()


def check_apart(public: Nest, inputs: Data) -> None:
  """Raises a ValueError if private inputs in memory contain public ones, which it names."""
  source, public = of(inputs), map_structure(np.asarray, public)
  known = set(trees.contents(public))
  numbers = np.arange(len(source) if source.at_hand else 0)
  found = {one for part in np.array_split(numbers, 1 + len(numbers) // _READ)
           for one in trees.contents(source.take(part)) if one in known}
  shared = [i for i, one in enumerate(trees.contents(public)) if one in found]
  if shared:
    raise ValueError(
        'Public examples must not be among the private ones, which would be used twice. '
        f'Received: {len(shared)} public examples that are in `data`, with the numbers '
        f'{shared[:10]}. Take them out of either.')


def map_structure(function: Callable[..., Any], data: Nest) -> Any:
  """Maps a function over tuples and dicts; lists count as arrays."""
  if isinstance(data, tuple):
    return tuple(map_structure(function, value) for value in data)
  if isinstance(data, dict):
    return {name: map_structure(function, value) for name, value in data.items()}
  return function(data)


def like(data: Nest, values: Sequence[Any]) -> Any:
  """Returns tuples and dicts like those of `data` that hold these values."""
  following = iter(values)
  return map_structure(lambda _: next(following), data)


def leaves(data: Nest) -> list:
  if isinstance(data, (tuple, dict)):
    values = data.values() if isinstance(data, dict) else data
    return [leaf for value in values for leaf in leaves(value)]
  return [data]


def spec(array: Array) -> tf.TensorSpec:
  """Returns the spec of one record of an array."""
  kind = np.dtype(array.dtype)
  return tf.TensorSpec(array.shape[1:], tf.string if kind.kind in 'OSU' else tf.as_dtype(kind))


def _of_parts(parts: Nest) -> Source:
  """Returns one source for tuples and dicts of sources of one length."""
  lengths = {len(part) for part in leaves(parts)}
  if len(lengths) != 1:
    raise ValueError('All arrays of `data` must have the same number of examples. Received: '
                     f'{len(leaves(parts))} arrays of {len(lengths)} different lengths. (Several '
                     'inputs are a tuple or a dict; a list is one array.)')
  found = Source(lengths.pop(), map_structure(lambda part: part.specs, parts),
                 lambda indices: map_structure(lambda part: part.take(indices), parts),
                 all(part.at_hand for part in leaves(parts)),
                 [entry for part in leaves(parts) for entry in part.entries])
  found.views = next((part.views for part in leaves(parts) if part.views), None)
  found.base = next((part.base for part in leaves(parts) if part.base), None)
  return found


def _of_array(array: Array) -> Source:
  """Returns a source of what is indexed like an array, in memory, mapped or in a file."""
  in_memory = isinstance(array, np.ndarray)

  def read(indices: np.ndarray) -> np.ndarray:
    if in_memory:
      rows = array[indices]
    else:  # Files want indices in their order, each once.
      places, back = np.unique(np.asarray(indices, np.int64), return_inverse=True)
      rows = (np.asarray(array[places])[back] if len(places) else
              np.zeros((0,) + tuple(array.shape[1:]), array.dtype))
    return rows.astype(object) if rows.dtype.kind in 'SU' else rows

  return Source(len(array), spec(array), read, in_memory)


def _of_records(records: Any) -> Source:
  """Returns a source of an object that has the record of each number."""
  if not len(records):
    raise ValueError('`data` has no examples.')
  specs = map_structure(lambda a: spec(a[np.newaxis]), record(records[0]))
  read = lambda indices: stacked([record(one) for one in rows(records, indices)], specs)
  return Source(len(records), specs, read)


def rows(records: Array, indices: Sequence[int]) -> Sequence[Any]:
  """Returns the records of some numbers, read at once where the source can."""
  numbers = [int(i) for i in indices]
  if numbers and hasattr(records, '__getitems__'):
    return records.__getitems__(numbers)
  return [records[i] for i in numbers]


def _of_batches(batches: Any) -> Source:
  """Returns a source that reads whole batches of one size. The last batch may be smaller."""
  count = len(batches)
  if not count:
    raise ValueError('`data` has no examples.')
  first = _batch(batches[0])
  size, specs = _rows(first), map_structure(spec, first)
  length = (count - 1) * size + _rows(_batch(batches[count - 1]))

  def read(indices: np.ndarray) -> Any:
    indices = np.asarray(indices, np.int64)
    by_place: Dict[int, Any] = {}
    for number in np.unique(indices // size):
      batch = _batch(batches[int(number)])
      expected = min(size, length - number * size)
      if _rows(batch) != expected:
        raise ValueError(f'`data` must have batches of one size, {size}, but for the last. '
                         'Received: a batch of another size.')
      for place in np.flatnonzero(indices // size == number):
        row = indices[place] % size
        by_place[int(place)] = map_structure(lambda a: np.array(a[row], a.dtype), batch)
    return stacked([by_place[place] for place in range(len(indices))], specs)

  return Source(length, specs, read)


def _batch(batch: Nest) -> Any:
  """Returns a batch of Keras as a nest of arrays."""
  if isinstance(batch, (list, tuple)):
    batch = tuple(part for part in batch if part is not None)
  return map_structure(_array, batch)


def stacked(records: list, specs: Nest) -> Any:
  """Stacks records, nests of arrays, into one nest of arrays [n, ...] as `specs` say."""
  columns: List[List[Any]] = [[] for _ in tf.nest.flatten(specs)]
  for one in records:
    try:
      tf.nest.assert_same_structure(specs, one)
    except (TypeError, ValueError):
      # The error of `tf.nest` prints the values of the record.
      raise ValueError('`data` must have elements of one structure. Received: an element of '
                       'another structure than the first.') from None
    for column, value in zip(columns, tf.nest.flatten(one)):
      column.append(value)
  return tf.nest.pack_sequence_as(
      specs, [_column(*pair) for pair in zip(columns, tf.nest.flatten(specs))])


def _column(arrays: List[Any], spec_of_one: tf.TensorSpec) -> np.ndarray:
  wanted = object if spec_of_one.dtype == tf.string else spec_of_one.dtype.as_numpy_dtype
  shape = tuple(spec_of_one.shape)
  for one in arrays:
    if one.shape != shape:
      raise ValueError(
          '`data` must have elements of one shape; pad them with `.map`, and unbatch a batched '
          'data set with `.unbatch()`. Received: elements of different shapes, with '
          f'{one.ndim} and {len(shape)} axes.')
    if one.dtype != wanted and not (
        one.dtype.kind in 'SUO' if wanted is object else
        np.can_cast(one.dtype, wanted, 'same_kind')):
      raise ValueError('`data` must have elements of one dtype. Received: '
                       f'{one.dtype.type.__name__} after {np.dtype(wanted).type.__name__}.')
  result = np.zeros((len(arrays),) + shape, wanted)
  for i, one in enumerate(arrays):
    result[i] = one if wanted is not object or shape else one.item()
  return result


def record(parts: Nest) -> Any:
  """Returns a record as a nest of arrays."""
  def leaf(value: object) -> np.ndarray:
    if value is None:
      raise ValueError('`data` must have a record for every number. Received: None. Leave out what '
                       'is filtered before the plan is made; of rows with empty columns, choose '
                       "others: `columns=('image', 'label')`.")
    return _array(value, axes=0)

  return map_structure(leaf, parts)


def _rows(batch: Nest) -> int:
  sizes = {len(leaf) for leaf in leaves(batch)}
  if len(sizes) != 1:
    raise ValueError('All arrays of a batch of `data` must have the same number of examples. '
                     f'Received: arrays of {len(sizes)} different lengths.')
  return sizes.pop()


def _is_lazy(data: object) -> bool:
  """Returns whether to index `data` where it is, without copying it."""
  known = (np.ndarray, tf.Tensor, tf.Variable, list, str, bytes)
  return (hasattr(data, '__len__') and hasattr(data, '__getitem__')
          and not isinstance(data, known)
          and not any(hasattr(data, name) for name in ('iloc', 'numpy')))  # pandas, torch.


def _is_array(data: Data) -> bool:
  return hasattr(data, 'shape') and hasattr(data, 'dtype') and len(data.shape) > 0


def _array(value: Data, axes: int = 1) -> np.ndarray:
  """Returns numbers or texts with at least so many axes; 0 of a part of one record."""
  if value is None:
    raise ValueError(f'{_NOT_ARRAYS}Received: None among its parts. If an input is optional, leave '
                     'it out of a dictionary of inputs.')
  array = checks.rectangular(
      value, '`data` must be rectangular arrays with the example as leading axis; pad examples of '
      'different lengths first. (Inputs and labels are a tuple `(x, y)`; a list is one array.)')
  held = array.dtype != object or all(isinstance(item, (str, bytes)) for item in array.ravel())
  if array.ndim < axes or not held:
    once = hasattr(value, '__next__')
    raise ValueError(f'{_NOT_ARRAYS}Received: a part of type {type(value).__name__}' + (
        ', which can be read only once, and in its order. Make a `tf.data.Dataset` of it, or '
        'arrays.' if once else f', {array.ndim} axes of {array.dtype.type.__name__}.'))
  return array


def columns_of(data: Any, columns: Nest) -> Any:
  """Returns data whose records are the named columns of the rows of `data`.

  Args:
    data: A source whose rows are dicts, a `tf.data.Dataset` of dicts, or a dict of arrays.
    columns: Names in the structure that `fit` takes, such as `('image', 'label')`,
      `(('title', 'text'), 'label')`, or `'text'` for x alone. Other columns are not read.

  Examples:
    >>> columns_of({'image': [[1.]], 'label': [2], 'id': [3]}, ('image', 'label'))
    ([[1.0]], [2])
  """
  checks.require(all(isinstance(name, str) for name in leaves(columns)),
                 "be names, such as ('image', 'label')", columns=columns)
  if isinstance(data, tf.data.Dataset):
    _pick(data.element_spec, columns)
    return data.map(lambda row: _pick(row, columns))
  if isinstance(data, Mapping):
    return _pick(data, columns)
  if not hasattr(data, '__getitem__') or isinstance(data, (tuple, compat.keras.utils.Sequence)):
    raise ValueError(
        '`columns` needs data whose rows are dicts: a source with `__len__` and `__getitem__`, a '
        f'`tf.data.Dataset`, or a dict of arrays. Received: {type(data).__name__}.')
  return _Columns(data, columns)


class _Columns:
  """Some columns of a source of rows."""

  def __init__(self, rows: Any, columns: Nest) -> None:
    self._rows, self._columns = rows, columns

  def __len__(self) -> int:
    return len(self._rows)

  def __getitem__(self, number: int) -> Any:
    return _pick(self._rows[number], self._columns)

  def __getitems__(self, numbers: Sequence[int]) -> List[Any]:
    return [_pick(row, self._columns) for row in rows(self._rows, numbers)]


def _pick(row: object, columns: Nest) -> Any:
  if not isinstance(row, Mapping):
    raise ValueError(f'`columns` needs rows that are dicts. Received: a {type(row).__name__}.')
  found: Dict[str, Any] = dict(row)

  def column(name: str) -> Any:
    if name not in found:
      raise ValueError(f'`columns` must name columns of every row, of {sorted(found)}. '
                       f'Received: columns={columns!r}.')
    return found[name]

  return map_structure(column, columns)
