# SPDX-License-Identifier: Apache-2.0
"""Keras' backups of a `fit`, saved so that no moment exists at which a kill loses them.

Keras 3 writes over the only backup it has, and what it was writing when it was killed can
not be read: the run has to begin again, and its steps are paid for twice.
"""

import contextlib
import hashlib
import io
import json
import math
import os
import pathlib
import shutil
import tarfile
import tempfile
from typing import Any, Callable, Dict, List, Optional, Union

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import errors
from tfdp_adaptive import runfolder
from tfdp_adaptive.batches import batches as batches_lib
from tfdp_adaptive.batches import workers
from tfdp_adaptive.keras import optimizer as optimizer_lib
from tfdp_adaptive.keras import run as run_lib

_LOCKED: Dict[str, runfolder.Lock] = {}  # Folders that this process works in.
_WRITING, _WHOLE, _DIGESTS = 'writing', 'whole-', 'digests.json'
_RUN = 'run.json'  # Fingerprint of the run, and digest of its records.
_OF_A_VARIABLE = 2048  # Bytes that a file has besides its values, at the most.


class BackupAndRestore(compat.keras.callbacks.BackupAndRestore):
  """`keras.callbacks.BackupAndRestore` that survives `kill -9` while it writes.

  A backup is written beside the last one. Once it is on disk, it replaces the last one in one
  operation. It holds the optimizer's state, which is SECRET: the folder is made for its owner only.
  With several workers, only the chief writes and reads the folder. The other workers get the
  restored values through the strategy.

  Args:
    backup_dir: Folder of this run alone.
    save_freq: 'epoch', or a number of batches.
    delete_checkpoint: Whether to remove the backup when `fit` has ended.
    **kwargs: As of Keras' class.

  Raises:
    ValueError: From `fit`, for a model that is not built, or if a file of the backup was changed.
    BlockingIOError: From `fit`, if another process works in the folder.
    PrivacyError: From `fit`, if the backup belongs to a run with another plan, or with other
      records where the order of records counts.
  """

  def __init__(self, backup_dir: Union[str, 'os.PathLike[str]'],
               save_freq: Union[str, int] = 'epoch', delete_checkpoint: bool = True,
               **kwargs: object) -> None:
    if not isinstance(backup_dir, (str, os.PathLike)) or not str(backup_dir):
      raise ValueError('`backup_dir` must be the path of a folder of this run alone. Received: '
                       f'backup_dir={backup_dir!r}.')
    self._folder = pathlib.Path(backup_dir)
    self._arguments = dict(kwargs, save_freq=save_freq, delete_checkpoint=delete_checkpoint)
    self._work_in(self._folder / _WRITING)

  def _work_in(self, folder: pathlib.Path) -> None:
    model = getattr(self, 'model', None)
    self._working = folder
    super().__init__(str(folder), **self._arguments)
    if model is not None:
      self.set_model(model)

  def on_train_begin(self, logs: Optional[Dict[str, Any]] = None) -> None:
    if not self.model.built:
      raise ValueError('`BackupAndRestore` needs a model that is built before `fit`, or there is '
                       f'nothing to restore into. Received: {self.model.name}, which is not. Give '
                       'it an `Input`, or call `model.build(shape)`.')
    optimizer = self.model.optimizer
    private = isinstance(optimizer, optimizer_lib.DPOptimizer)
    if private:  # Variables that do not exist yet are restored too late, or not at all.
      with self.model.distribute_strategy.scope():
        optimizer.build(self.model.trainable_variables)
    strategy = self.model.distribute_strategy
    self._writes = strategy.extended.should_checkpoint
    if not self._writes:
      self._work_in(pathlib.Path(tempfile.mkdtemp()) / _WRITING)
    packed = workers.from_chief(strategy, self._take_last)
    if not self._writes and packed:
      with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(self._working)
    saved: Dict[str, Any] = {}
    if private and (self._working / _RUN).exists():
      saved = json.loads((self._working / _RUN).read_text(encoding='utf-8'))
      self._refuse_others(saved['fingerprint'], optimizer.run)
    super().on_train_begin(logs)
    if private:
      optimizer.run.earlier.refuse_foreign()
      found = optimizer.run.records
      if found is not None and saved.get('records') is not None:
        optimizer.run.records = saved['records']
        batches_lib.check_order(optimizer.run, lambda: found)
    shutil.rmtree(self._working, ignore_errors=True)

  def _refuse_others(self, fingerprint: Dict[str, Any], run: run_lib.Run) -> None:
    """Raises if the backup was made with another optimizer or other trained variables."""
    differs = run_lib.differences(fingerprint, run_lib.fingerprint(run))
    if differs:
      raise errors.PrivacyError(
          'A backup must be restored into the optimizer and trained variables it was made with. '
          f'Received: a backup in {self._folder} of {differs}. Compile the model as before and '
          'freeze the same layers, or begin in another folder.')

  def _take_last(self) -> bytes:
    """Puts the last backup where Keras restores it from; returns it for other workers."""
    self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    self._lock()
    shutil.rmtree(self._working, ignore_errors=True)  # It may be incomplete after a kill.
    packed = io.BytesIO()
    for whole in self._wholes()[-1:]:
      _check(whole)
      shutil.copytree(whole, self._working)
      if compat.has_workers(self.model.distribute_strategy):
        with tarfile.open(fileobj=packed, mode='w') as archive:
          archive.add(whole, '.')
    return packed.getvalue()

  def on_train_batch_end(self, batch: int, logs: Optional[Dict[str, Any]] = None) -> None:
    if self.save_freq != 'epoch':
      self._require_room()
    self._save(super().on_train_batch_end, batch, logs)

  def on_epoch_end(self, epoch: int, logs: Optional[Dict[str, Any]] = None) -> None:
    if self.save_freq == 'epoch':
      self._require_room()
    self._save(super().on_epoch_end, epoch, logs)

  def _require_room(self) -> None:
    """Raises OSError if a backup does not fit, because HDF5 crashes on a full disk."""
    if self._writes:
      runfolder.require_room(self._folder, sum(
          _OF_A_VARIABLE + math.prod(v.shape) * tf.as_dtype(v.dtype).size
          for v in (*self.model.variables, *self.model.optimizer.variables)))

  def on_train_end(self, logs: Optional[Dict[str, Any]] = None) -> None:
    super().on_train_end(logs)
    if not self._writes:
      shutil.rmtree(self._working.parent, ignore_errors=True)
      return
    if self.delete_checkpoint:
      for whole in self._wholes():
        shutil.rmtree(whole)
      shutil.rmtree(self._working, ignore_errors=True)
    with contextlib.suppress(KeyError):
      _LOCKED.pop(str(self._folder.resolve())).close()
    if self.delete_checkpoint and not any(self._folder.iterdir()):
      self._folder.rmdir()

  def _lock(self) -> None:
    """Locks the folder until the process or its `fit` ends."""
    name = str(self._folder.resolve())
    if name in _LOCKED:
      return
    try:
      _LOCKED[name] = runfolder.Lock(name)
    except runfolder.Held:
      raise
    except OSError:  # A file system without locks.
      pass

  def _save(self, save: Callable[..., None], *arguments: object) -> None:
    """Lets Keras save, and makes the saved file the backup."""
    with runfolder.writing(runfolder.STATE):
      save(*arguments)
    if not self._working.exists():
      return
    if not self._writes:  # It took part where Keras reads what is spread over workers.
      shutil.rmtree(self._working)
      return
    if isinstance(self.model.optimizer, optimizer_lib.DPOptimizer):
      run = self.model.optimizer.run
      (self._working / _RUN).write_text(json.dumps(
          {'fingerprint': run_lib.fingerprint(run), 'records': run.records}), encoding='utf-8')
    (self._working / _DIGESTS).write_text(json.dumps(_digests(self._working)), encoding='utf-8')
    before = self._wholes()
    number = int(before[-1].name[len(_WHOLE):]) + 1 if before else 1
    runfolder.publish(self._working, self._folder / f'{_WHOLE}{number}')
    for whole in before:
      shutil.rmtree(whole)

  def _wholes(self) -> List[pathlib.Path]:
    """Returns the complete backups, latest last. After a kill there may be two."""
    found = [path for path in self._folder.glob(_WHOLE + '*')
             if path.name[len(_WHOLE):].isdecimal()]
    return sorted(found, key=lambda path: int(path.name[len(_WHOLE):]))


def _digests(folder: pathlib.Path) -> Dict[str, str]:
  """Returns the content of every file of a backup."""
  return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
          for path in sorted(folder.rglob('*')) if path.is_file() and path.name != _DIGESTS}


def _check(whole: pathlib.Path) -> None:
  """Raises an error if a backup is damaged. Keras would read most damaged files."""
  try:
    saved = json.loads((whole / _DIGESTS).read_text(encoding='utf-8'))
  except (OSError, ValueError, RecursionError) as error:
    saved = error
  found = _digests(whole)
  if saved != found:
    changed = sorted(name for name in found if not isinstance(saved, dict)
                     or saved.get(name) != found[name])
    raise ValueError(
        f'The backup in {whole} must be what was written there. Received: other files than its '
        f'{_DIGESTS} says{f": {changed}" if changed else ""}. Begin anew in another folder: what '
        'the run has cost so far stays spent if anything of it was released.')
