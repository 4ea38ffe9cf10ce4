# SPDX-License-Identifier: Apache-2.0
"""Hooks into the files of weights and models that Keras writes and reads."""

import contextlib
import functools
import glob
import importlib
import os
import threading
from typing import Any, Callable, Iterator

import tensorflow as tf

from tfdp_adaptive.compat import model as models
from tfdp_adaptive.compat import stack

# Whether Keras' own backups are written by one worker.
BACKUPS_KNOW_WORKERS = not stack.KERAS_3
# Whether Keras' own backups of a `fit` are files of weights.
BACKUPS_ARE_WEIGHTS = stack.KERAS_3

_Own = Callable[..., Any]  # A function of Keras.


@contextlib.contextmanager
def owner_only(path: str) -> Iterator[None]:
  """Creates the file with permissions for its owner only."""
  mask = os.umask(0o077)
  try:
    yield
  finally:
    os.umask(mask)
    if os.path.exists(path):
      os.chmod(path, 0o700 if os.path.isdir(path) else 0o600)


def on_files(
    writing: Callable[..., Any], read: Callable[..., Any], whole: Callable[..., Any],
    legacy: Callable[..., Any]) -> None:
  """Calls a caller's functions for every file of weights that Keras writes or reads, of any model.

  Args:
    writing: `(saved, store) -> context` while weights are written to a store of Keras.
    read: `(saved, store, partly)`, after they were read.
    whole: `(model, path or file object) -> context` while a `.keras` file is written.
    legacy: `(model, wanted suffix)`, before another format is written.
  """
  lib: Any = importlib.import_module(f'{stack.PRIVATE}.saving.saving_lib')
  copying = threading.local()

  def around(module: object, name: str, wrap: Callable[..., Any]) -> None:
    own = getattr(module, name)
    setattr(module, name, functools.wraps(own)(functools.partial(wrap, own)))

  def save_state(own: _Own, saved: object, weights_store: object, assets_store: object,
                 inner_path: str, *args: object, **kwargs: object) -> Any:
    outermost = weights_store is not None and not inner_path
    with writing(saved, weights_store) if outermost else contextlib.nullcontext():
      return own(saved, weights_store, assets_store, inner_path, *args, **kwargs)

  def load_state(own: _Own, saved: object, weights_store: object, assets_store: object,
                 inner_path: str, skip_mismatch: bool = False, *args: object,
                 **kwargs: object) -> Any:
    result = own(saved, weights_store, assets_store, inner_path, skip_mismatch, *args, **kwargs)
    if weights_store is not None and not inner_path:
      read(saved, weights_store, skip_mismatch)
    return result

  def save_model(
      own: _Own, model: stack.Model, filepath: object, *args: object, **kwargs: object) -> Any:
    temporary = getattr(copying, 'now', False)
    with contextlib.nullcontext() if temporary else whole(model, filepath):
      return own(model, filepath, *args, **kwargs)

  def save_legacy(wanted: str, own: _Own, *args: object, **kwargs: object) -> Any:
    legacy(next(a for a in (*args, *kwargs.values()) if models.is_model(a)), wanted)
    return own(*args, **kwargs)

  def pickled(own: _Own, model: stack.Model) -> Any:
    copying.now = True
    try:
      return own(model)
    finally:
      copying.now = False

  around(lib, '_save_state', save_state)
  around(lib, '_load_state', load_state)
  around(lib, 'save_model', save_model)
  if stack.KERAS_3:
    module: Any = importlib.import_module(f'{stack.PRIVATE}.legacy.saving.legacy_h5_format')
    around(module, 'save_model_to_hdf5', functools.partial(save_legacy, '.keras'))
    around(module, 'save_weights_to_hdf5_group', functools.partial(save_legacy, '.weights.h5'))
  else:
    module = importlib.import_module(f'{stack.PRIVATE}.saving.legacy.save')
    around(module, 'save_model', functools.partial(save_legacy, '.keras'))
    around(module, 'save_weights', functools.partial(save_legacy, '.weights.h5'))
    module = importlib.import_module(f'{stack.PRIVATE}.saving.pickle_utils')
    around(module, 'serialize_model_as_bytecode', pickled)


def around_saves(checkpoint: Any, context: Callable[[], Any]) -> None:
  """Has a `ModelCheckpoint` of Keras decide and write inside a context."""
  own = type(checkpoint)._save_model

  def save(*args: object, **kwargs: object) -> Any:
    with context():
      return own(checkpoint, *args, **kwargs)

  checkpoint._save_model = save


def on_checkpoints(secret: Callable[[], bool]) -> None:
  """Makes files of `tf.train.Checkpoint` readable for their owner only.

  Args:
    secret: Whether the checkpoint that was just written must not be read by others.
  """
  own = tf.train.Checkpoint._write

  @functools.wraps(own)
  def write(checkpoint: tf.train.Checkpoint, *args: object, **kwargs: object) -> Any:
    path = own(checkpoint, *args, **kwargs)
    if secret():
      for file in glob.glob(f'{glob.escape(str(path))}.*'):
        os.chmod(file, 0o600)
    return path

  tf.train.Checkpoint._write = write
