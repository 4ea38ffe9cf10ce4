# SPDX-License-Identifier: Apache-2.0
"""The one way in which a run is on disk: locked, whole or not there, and there after a power cut.

A state is written before anything of its step is released. If the state could be lost afterwards,
a run would take a released step again, on other data. So every write syncs the file, renames it,
and syncs the FOLDER: without the last, a rename may be undone by a power cut.
"""

import contextlib
import fcntl
import hashlib
import io
import json
import logging
import os
import pathlib
import tempfile
import threading
from typing import Any, Dict, Iterator, List, Sequence, Tuple, Union

import numpy as np

WEIGHTS, STATE = 'weights', 'state'  # Contents of a file that Keras writes.
_DIGEST_BYTES = 32
_LOCK = '.lock'
_SECRET = (
    '%s holds the state of a private optimizer, which is SECRET (noise that is still in the '
    'weights, and statistics of the data), and resumes training. %s. Publish '
    '`model.save_weights("NAME.weights.h5")` or `model.export(folder)`.')
_files = threading.local()
_told: List[str] = []  # Kinds of secret files: once in a process.


class Held(BlockingIOError):
  """Another process has the lock of a folder."""


class Damaged(ValueError):
  """A file is not, byte for byte, what was saved in it."""


def replace(path: pathlib.Path, content: bytes, mode: int = 0o600) -> None:
  """Replaces a file at once. When this returns it is on disk; on failure the old one is.

  Args:
    path: The path of the file.
    content: All of it.
    mode: Permissions; by default those of a SECRET file.
  """
  new = path.with_name(path.name + '.new')
  new.unlink(missing_ok=True)  # One of another mode would keep it.
  try:
    _write(new, content, mode)
    os.replace(new, path)
  except BaseException:
    new.unlink(missing_ok=True)
    raise
  sync(path.parent)


def create(path: pathlib.Path, content: bytes) -> None:
  """Writes a new SECRET file.

  Raises:
    FileExistsError: There is one.
  """
  _write(path, content, 0o600)
  sync(path.parent)


def publish(folder: pathlib.Path, path: pathlib.Path) -> None:
  """Renames a folder that others wrote, once every file of it is on disk."""
  for inner in [folder, *folder.rglob('*')]:
    sync(inner)
  os.rename(folder, path)
  sync(path.parent)


def require_room(folder: pathlib.Path, size: int) -> None:
  """Raises OSError unless so many bytes fit into a folder: HDF5 does not survive a full disk."""
  with tempfile.TemporaryFile(dir=folder) as file:
    os.posix_fallocate(file.fileno(), 0, size)


def sync(path: pathlib.Path) -> None:
  """Waits until a file, or the entries of a folder, are on disk."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def _write(path: pathlib.Path, content: bytes, mode: int) -> None:
  with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), 'wb') as file:
    file.write(content)
    file.flush()
    os.fsync(file.fileno())


def save(path: pathlib.Path, arrays: Sequence[Any], record: Dict[str, Any],
         new: bool = False) -> None:
  """Replaces a SECRET file of arrays.

  Args:
    path: The path of the file.
    arrays: Values that `np.asarray` accepts.
    record: Further values to save, for JSON.
    new: Whether to raise `FileExistsError` if there is a file.
  """
  buffer = io.BytesIO()
  leaves: Any = {f'v{i}': np.asarray(array) for i, array in enumerate(arrays)}
  np.savez(buffer, record=np.frombuffer(json.dumps(record).encode(), np.uint8), **leaves)
  buffer.write(hashlib.sha256(buffer.getbuffer()).digest())
  (create if new else replace)(path, buffer.getvalue())


def load(path: pathlib.Path) -> Tuple[List[np.ndarray], Dict[str, Any]]:
  """Returns `(arrays, record)` as `save` got them.

  Raises:
    FileNotFoundError: There is no such file.
    Damaged: The file cannot be read, or was changed since.
  """
  try:
    content = path.read_bytes()
  except FileNotFoundError:
    raise
  except OSError as error:
    raise Damaged(error.strerror) from error
  body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
  if hashlib.sha256(body).digest() != digest:
    raise Damaged('its bytes are not the ones that were written')
  try:
    with np.load(io.BytesIO(body), allow_pickle=False) as file:
      record = json.loads(file['record'].tobytes())
      return [file[f'v{i}'] for i in range(len(file.files) - 1)], record
  except Exception as error:  # pylint: disable=broad-except
    # Foreign bytes with a digest of their own: zip and NumPy raise whatever they like.
    raise Damaged(repr(error)) from error


class Lock:
  """Keeps other processes out of a folder until it is closed or the process ends.

  Args:
    folder: An existing folder.

  Raises:
    Held: Another process has it.
    OSError: The file system knows no locks.
  """

  def __init__(self, folder: Union[str, 'os.PathLike[str]']) -> None:
    self._path = pathlib.Path(folder) / _LOCK
    self._file = os.fdopen(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600), 'rb')
    try:
      fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      mine = os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._path))
    except (BlockingIOError, FileNotFoundError):
      mine = False
    except OSError:
      self._file.close()
      raise
    if not mine:  # Held, or removed by the one who held it a moment ago.
      self._file.close()
      raise Held(f'Another process works in {folder}. Two of them would use the same noise twice; '
                 'wait for it, or give another folder.')

  def close(self) -> None:
    """Removes the lock; only then another process may have it."""
    if not self._file.closed:
      self._path.unlink(missing_ok=True)
      self._file.close()


@contextlib.contextmanager
def writing(what: str) -> Iterator[None]:
  """Records what the file being written holds: `WEIGHTS`, or also the SECRET `STATE`.

  If one is inside another, the outer one decides.
  """
  before = getattr(_files, 'what', None)
  _files.what = before or what
  try:
    yield
  finally:
    _files.what = before


def may_be_secret() -> bool:
  """Whether the optimizer's state may go into the file being written."""
  return getattr(_files, 'what', None) != WEIGHTS


def in_checkpoint() -> None:
  """Records that the checkpoint of TensorFlow being written holds the state of an optimizer."""
  _files.checkpoint = True


def was_in_checkpoint() -> bool:
  """Whether `in_checkpoint` was called since this was asked last."""
  found = getattr(_files, 'checkpoint', False)
  _files.checkpoint = False
  return found


def tell(what: str, readable: str) -> None:
  """Warns once per process who can read a SECRET file. A backup's folder is its owner's."""
  if readable not in _told and getattr(_files, 'what', None) != STATE:
    _told.append(readable)
    logging.getLogger('tfdp_adaptive').warning(_SECRET, what, readable)
