"""A run on disk: one state, replaced atomically, readable by its owner alone.

Only the LAST state is kept, and it is written before anything of its round is
released. Going on from an older one would publish a round twice, with the same
noise around different clients' data.
"""

import fcntl
import io
import json
import os
import pathlib
import zipfile
import zlib

import numpy as np
import tensorflow as tf

from tfdp_adaptive import noise
from tfdp_adaptive.noise import keys

_STATE, _LOCK = 'state.npz', 'lock'


class SavedRunError(ValueError):
  """The run in a folder is not one to go on with."""


class RunFolder:
  """The folder of one run; a context manager that no second process can enter.

  Attributes:
    path: `pathlib.Path`.
  """

  def __init__(self, path):
    self.path = pathlib.Path(path)
    self._lock = None

  def __enter__(self):
    self.path.mkdir(parents=True, exist_ok=True)
    self._lock = open(self.path / _LOCK, 'w', encoding='utf-8')
    try:
      fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
      self._lock.close()
      raise BlockingIOError(
          f'Another process trains in {self.path}. Two of them would use the same noise twice; '
          'wait for it, or give another folder.') from None
    return self

  def __exit__(self, *error):
    self._lock.close()

  def save(self, tree, record):
    """Replaces the saved state; when this returns it is on disk.

    Args:
      tree: SECRET nest of tensors.
      record: What else to remember, JSON-serializable.
    """
    leaves = {f'leaf{i}': np.asarray(x) for i, x in enumerate(tf.nest.flatten(tree))}
    buffer = io.BytesIO()
    np.savez(buffer, record=np.frombuffer(json.dumps(record).encode('utf-8'), np.uint8), **leaves)
    temporary = self.path / (_STATE + '.new')
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, 'wb') as file:
      file.write(buffer.getbuffer())
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, self.path / _STATE)
    folder = os.open(self.path, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)

  def load(self, template):
    """`(tree, record)` as saved, or None if there is nothing.

    Args:
      template: A tree like the one that was saved.
    """
    path = self.path / _STATE
    if not path.exists():
      return None
    try:
      with np.load(path) as file:
        record = json.loads(file['record'].tobytes().decode('utf-8'))
        leaves = [file[f'leaf{i}'] for i in range(len(file.files) - 1)]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
      raise SavedRunError(
          f'{path} must be what a run saved, and cannot be read: {error}. Start anew in another '
          'folder; what was spent in this one then counts as well if any of it was published.'
      ) from error
    wanted = [np.asarray(x) for x in tf.nest.flatten(template)]
    if [(x.shape, x.dtype) for x in leaves] != [(x.shape, x.dtype) for x in wanted]:
      raise SavedRunError(f'The run saved in {self.path} has another model, rule or mechanism. '
                          'Give the process it was started with, or another folder.')
    return tf.nest.pack_sequence_as(template, [tf.constant(x) for x in leaves]), record


def with_fresh_keys(tree):
  """The state with new keys for all noise to come; what past noise it needs stays.

  Whatever became of the rounds after this state, noise used for them is not used
  again.
  """
  if isinstance(tree, noise.State):
    return tree._replace(key=keys.from_system())
  if isinstance(tree, tuple):
    children = [with_fresh_keys(child) for child in tree]
    return type(tree)(*children) if hasattr(tree, '_fields') else tuple(children)
  return tree
