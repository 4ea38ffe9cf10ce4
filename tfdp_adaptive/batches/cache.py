# SPDX-License-Identifier: Apache-2.0
"""Arrays on disk: a `tf.data.Dataset` whose elements are read by number, and rows that are filled.

A data set is read once, in order, into one flat file per tensor. The files are mapped into
memory, so only the elements of a batch are read. They hold the private data in clear.
"""

import contextlib
import hashlib
import pathlib
import shutil
import tempfile
import time
from typing import Any, Optional, Sequence, Tuple, Union
import weakref

import numpy as np
import tensorflow as tf

from tfdp_adaptive import runfolder
from tfdp_adaptive.batches import sources

_INDEX = 'index'
_ROWS = 1024  # Elements written at a time.
_COMPARED = 16


class Cache(sources.Source):
  """The elements of a data set, in files.

  Args:
    data: A finite, unbatched `tf.data.Dataset`.
    folder: Where to write. An existing cache is used again. The first records of `data` must then
      be those of the cache, unless `data` gives others at every pass. With None, a temporary folder
      is used that only this user may read. It is deleted with this object.
  """

  def __init__(self, data: tf.data.Dataset, folder: Optional[str] = None) -> None:
    structure = sources.map_structure(_checked, data.element_spec)
    if folder is None:
      self.folder = pathlib.Path(tempfile.mkdtemp(prefix='tfdp_cache_'))
      weakref.finalize(self, shutil.rmtree, str(self.folder), ignore_errors=True)
    else:
      self.folder = pathlib.Path(folder)
    found = (self.folder / _INDEX).exists()
    if not found:
      _write(data, structure, self.folder)
    try:
      _, index = runfolder.load(self.folder / _INDEX)
      length, saved = index['length'], index['tensors']
      opened = [_opened(self.folder / str(i), length, *one) for i, one in enumerate(saved)]
    except (OSError, ValueError, KeyError) as error:
      raise ValueError(f'The cache in {str(self.folder)!r} must be what was written there: delete '
                       f'it, or name another folder. Received: {error!r}.') from error
    elements = [(leaf.dtype.name, leaf.shape) for leaf in sources.leaves(structure)]
    if len(saved) != len(elements) or not all(
        name == dtype and shape.is_compatible_with(size)
        for (name, shape), (dtype, size) in zip(elements, saved)):
      raise ValueError(
          f'The cache in {str(self.folder)!r} must be of this data set. Received: a cache of '
          f'{saved} for elements of {elements}. Name another folder, or delete it.')
    files = sources.like(structure, opened)
    specs = sources.like(structure, [tf.TensorSpec(shape, dtype) for dtype, shape in saved])
    super().__init__(
        length, specs, lambda indices: sources.map_structure(lambda file: file[indices], files),
        at_hand=True)
    if found:
      self._check_first(data)

  def _check_first(self, data: tf.data.Dataset) -> None:
    """Raises an error if the first records differ from those of the cache."""
    n = min(_COMPARED, len(self))
    first, again = ([sources.fingerprint(one) for one in data.take(n).as_numpy_iterator()]
                    for _ in range(2))
    cached = self.take(np.arange(n))
    of_file = [sources.fingerprint(sources.map_structure(lambda t, i=i: t[i], cached))
               for i in range(n)]
    if first == again != of_file:
      raise ValueError(
          f'The cache in {str(self.folder)!r} must be of this data set. Received: a data set whose '
          'first records are others, or in another order. Name another folder, or delete it.')


def source_of(data: Any, folder: Optional[str] = None) -> sources.Source:
  """Returns the source of an object that holds records; data sets are read into a cache."""
  return Cache(data, folder) if isinstance(data, tf.data.Dataset) else sources.of(data)


class _Text:
  """[n, ...] texts: their concatenated bytes, and where each text ends."""

  def __init__(self, path: pathlib.Path, length: int, shape: Sequence[int]) -> None:
    self._shape = tuple(shape)
    self._ends = _mapped(path.with_suffix('.ends'), 'int64', [length * int(np.prod(shape))])
    self._bytes = _mapped(path, 'uint8', [self._ends[-1]] if len(self._ends) else [-1])

  def __getitem__(self, indices: np.ndarray) -> np.ndarray:
    size = int(np.prod(self._shape))
    places = np.asarray(indices)[:, np.newaxis] * size + np.arange(size)
    result = np.empty(places.size, object)
    for i, place in enumerate(places.ravel()):
      start = self._ends[place - 1] if place else 0
      result[i] = self._bytes[start:self._ends[place]].tobytes()
    return result.reshape((len(indices),) + self._shape)


def _opened(path: pathlib.Path, length: int, dtype: str, shape: Sequence[int]) -> Any:
  """Returns an array or texts [length, *shape]."""
  if dtype == 'string':
    return _Text(path, length, shape)
  return _mapped(path, dtype, [length, *shape])


def _mapped(path: pathlib.Path, dtype: Union[str, np.dtype], shape: Sequence[int]) -> np.ndarray:
  dtype = tf.as_dtype(dtype).as_numpy_dtype
  if not path.stat().st_size:  # An empty file cannot be mapped.
    return np.zeros([0 if size == -1 else size for size in shape], dtype)
  mapped = np.memmap(path, dtype, 'r')
  return mapped.reshape(shape)


def _checked(spec: object) -> tf.TensorSpec:
  if not isinstance(spec, tf.TensorSpec):
    raise ValueError('`data` must be a data set of dense tensors, in tuples and dicts. Received: '
                     f'{type(spec).__name__}.')
  return spec


def _write(data: tf.data.Dataset, structure: sources.Nest, folder: pathlib.Path) -> None:
  """Writes a whole cache or none: the index, without which there is no cache, is written last."""
  if int(data.cardinality()) == tf.data.INFINITE_CARDINALITY:
    raise ValueError('`data` must be finite: the plan draws its own batches. Remove `.repeat()`.')
  folder.mkdir(parents=True, exist_ok=True, mode=0o700)
  specs = sources.leaves(structure)
  if all(spec.shape.is_fully_defined() for spec in specs):
    chunks = data.batch(_ROWS).prefetch(1).as_numpy_iterator()
  else:
    chunks = (sources.map_structure(lambda t: np.asarray(t)[np.newaxis], one)
              for one in data.as_numpy_iterator())
  writers, length, shapes = [], 0, []
  with contextlib.ExitStack() as files:
    for chunk in chunks:
      arrays = sources.leaves(chunk)
      if not length:
        shapes = [list(array.shape[1:]) for array in arrays]
        writers = [_Writer(files, folder / str(i), array.dtype == object)
                   for i, array in enumerate(arrays)]
      if [list(array.shape[1:]) for array in arrays] != shapes:
        raise ValueError('`data` must have elements of one shape; pad them with `.map`, and '
                         'unbatch a batched data set with `.unbatch()`. Received: elements of '
                         'different shapes.')
      for writer, array in zip(writers, arrays):
        writer.write(array)
      length += len(arrays[0])
  if not length:
    raise ValueError('`data` has no examples.')
  runfolder.save(folder / _INDEX, (), {
      'length': length,
      'tensors': [(spec.dtype.name, shape) for spec, shape in zip(specs, shapes)]})


class _Writer:
  """Appends arrays to a file, and for texts their ends to another file."""

  def __init__(self, files: contextlib.ExitStack, path: pathlib.Path, text: bool) -> None:
    self._file = files.enter_context(open(path, 'wb'))
    self._ends = files.enter_context(open(path.with_suffix('.ends'), 'wb')) if text else None

  def write(self, array: np.ndarray) -> None:
    if self._ends is None:
      self._file.write(np.ascontiguousarray(array).tobytes())
      return
    texts = [text if isinstance(text, bytes) else str(text).encode() for text in array.ravel()]
    ends = self._file.tell() + np.cumsum([len(text) for text in texts], dtype=np.int64)
    self._file.write(b''.join(texts))
    self._ends.write(ends.tobytes())


_SAVE_EVERY = 1.0  # Seconds between two notes of how many rows of a file are done.


class Memory:
  """Rows in memory."""

  def __init__(self, array: Any, rows: int = 0) -> None:
    self.array, self.rows = array, rows

  def write(self, places: np.ndarray, values: np.ndarray) -> None:
    if values.shape[1:] != self.array.shape[1:] or len(values) != len(places):
      raise ValueError('`base` must give features of one shape for each record. Received: other '
                       'features than of the first records, or another number of them.')
    self.array[places] = values
    self.rows += len(places)


class File(Memory):
  """Rows in a mapped file, and beside it how many of them are done."""

  def __init__(self, folder: pathlib.Path, key: str, shape: Tuple[int, ...],
               dtype: np.dtype) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    name = hashlib.sha256(key.encode()).hexdigest()[:16]
    self._note, path = folder / f'{name}.rows', folder / f'{name}.npy'
    done = int(self._note.read_text()) if self._note.exists() and path.exists() else 0
    path.touch(0o600)
    super().__init__(np.lib.format.open_memmap(
        path, 'r+' if done else 'w+', None if done else dtype, None if done else shape), done)
    if self.array.shape != shape or self.array.dtype != dtype:
      raise ValueError(f'The cache in {str(folder)!r} must be what was written there. Received: '
                       'features of another shape. Delete it, or name another folder.')
    self._saved = time.monotonic()

  def write(self, places: np.ndarray, values: np.ndarray) -> None:
    super().write(places, values)
    if time.monotonic() - self._saved > _SAVE_EVERY:
      self.save()

  def save(self) -> None:
    """Writes the rows, then their number: a stop in between loses work and nothing else."""
    self.array.flush()
    runfolder.replace(self._note, str(self.rows).encode())
    self._saved = time.monotonic()

  def __enter__(self) -> 'File':
    return self

  def __exit__(self, *_: object) -> None:
    self.save()
