# SPDX-License-Identifier: Apache-2.0
"""What a run keeps is on disk before anything goes on: file, then name, then folder."""

import os
import pathlib
import stat

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import runfolder
from tfdp_adaptive.batches import sampling_seed
from tfdp_adaptive.compat import keras

PLAN = tfdp.PrivacyPlan(
    batch_size=2, steps=4, l2_norm_clip=1.0, noise_multiplier=1.0, target_delta=1e-3,
    population_size=8, sampling=tfdp.sampling.BallsInBins(cycle=4))


@pytest.fixture
def calls(monkeypatch):
  """The calls that decide what is left after a power cut: ('sync', inode) and ('name', path)."""
  log = []
  fsync, replace, rename = os.fsync, os.replace, os.rename

  def synced(descriptor):
    fsync(descriptor)
    log.append(('sync', os.fstat(descriptor).st_ino))

  def named(move):
    def call(source, target, **more):
      files = [path.stat().st_ino for path in [pathlib.Path(source)] + list(
          pathlib.Path(source).rglob('*'))]
      move(source, target, **more)
      log.append(('name', files, pathlib.Path(target).parent.stat().st_ino))
    return call

  monkeypatch.setattr(os, 'fsync', synced)
  monkeypatch.setattr(os, 'replace', named(replace))
  monkeypatch.setattr(os, 'rename', named(rename))
  return log


def compiled():
  model = tfdp.DPSequential([keras.Input([1]), keras.layers.Dense(1)])
  model.compile(tfdp.DPSGD(0.1, plan=PLAN), 'mse')
  return model


def back_up(folder):
  model = compiled()
  model.fit(PLAN.batches((np.ones([8, 1]), np.ones([8, 1]))), epochs=1, verbose=0, callbacks=[
      tfdp.callbacks.BackupAndRestore(folder / 'backup', delete_checkpoint=False)])


def search(folder):
  from tfdp_adaptive import tuning  # pylint: disable=import-outside-toplevel
  with tuning._State(folder / 'search', ['identity']) as state:
    state.candidates, state.weights = [0], compiled().weights
    state.save()
    state.done, state.best = 1, {'setting': 0, 'score': 1.0}
    state.save()


def simulate(folder):
  storage = pytest.importorskip('tfdp_adaptive.federated.storage')
  with storage.RunFolder(folder / 'run') as run:
    run.save([tf.constant([1.0])], {'rounds': 1})


WRITERS = {
    'replace': lambda folder: runfolder.replace(folder / 'file', b'content'),
    'create': lambda folder: runfolder.create(folder / 'file', b'content'),
    'coins': lambda folder: sampling_seed.SamplingSeed(PLAN, folder / 'coins').key(0),
    'fit': back_up, 'tune': search, 'federated': simulate}


@pytest.mark.pitfall(
    'After a power cut the saved state is older than the released step, so the step is taken '
    'again.',
    severity='critical', stops='the folder is synced to disk before the run continues')
@pytest.mark.parametrize('writer', sorted(WRITERS))
def test_a_state_is_on_disk_when_its_writer_returns(writer, tmp_path, calls):
  WRITERS[writer](tmp_path)
  synced = [i for i, call in enumerate(calls) if call[0] == 'sync']
  assert synced, 'nothing was synced'
  named = [(i, call) for i, call in enumerate(calls) if call[0] == 'name']
  for i, (_, files, parent) in named:
    before = {calls[j][1] for j in synced if j < i}
    assert set(files) <= before, 'renamed before all of it was on disk'
    assert ('sync', parent) in calls[i + 1:], 'the folder was not synced after a renaming'
  if not named:  # A new file: itself, then its folder.
    assert ('sync', tmp_path.stat().st_ino) == calls[-1] and len(synced) == 2


def test_arrays_come_back(tmp_path):
  arrays = [np.arange(6.0).reshape(2, 3), np.int64(4), np.zeros([0, 2], np.float32)]
  runfolder.save(tmp_path / 'state', arrays, {'steps': 3})
  loaded, record = runfolder.load(tmp_path / 'state')
  assert record == {'steps': 3} and len(loaded) == 3
  for one, other in zip(arrays, loaded):
    np.testing.assert_array_equal(one, other)
    assert np.asarray(one).dtype == other.dtype
  assert stat.S_IMODE((tmp_path / 'state').stat().st_mode) == 0o600
  assert [path.name for path in tmp_path.iterdir()] == ['state']
  with pytest.raises(FileNotFoundError):
    runfolder.load(tmp_path / 'other')


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  path = tmp_path_factory.mktemp('saved') / 'state'
  runfolder.save(path, [np.arange(4.0)], {'steps': 3})
  return path, path.read_bytes()


@pytest.mark.pitfall(
    'A saved state was damaged.',
    severity='critical', stops='an error, because a digest covers the whole file')
@given(place=st.integers(0, 10**6), bit=st.integers(0, 7), cut=st.booleans())
def test_every_change_is_seen(saved, place, bit, cut):
  path, whole = saved
  place %= len(whole)
  path.write_bytes(whole[:place] if cut else
                   whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1:])
  with pytest.raises(runfolder.Damaged):
    runfolder.load(path)


@pytest.mark.pitfall(
    'The disk is full in the middle of a run.',
    severity='medium', stops='an error in one line; what was saved before stays')
@pytest.mark.parametrize('place', ['open', 'write', 'replace'])
def test_a_full_disk_leaves_what_was_there(place, tmp_path, monkeypatch):
  path = tmp_path / 'state'
  runfolder.replace(path, b'old')

  def full(*_, **__):
    raise OSError(28, 'No space left on device')

  name = {'open': 'open', 'write': 'fsync', 'replace': 'replace'}[place]
  with monkeypatch.context() as patch:
    patch.setattr(os, name, full)
    with pytest.raises(OSError, match='No space'):
      runfolder.replace(path, b'new')
  assert path.read_bytes() == b'old' and len(list(tmp_path.iterdir())) == 1


def test_a_file_that_is_there_is_not_created(tmp_path):
  runfolder.create(tmp_path / 'coins', b'first')
  with pytest.raises(FileExistsError):
    runfolder.create(tmp_path / 'coins', b'second')
  assert (tmp_path / 'coins').read_bytes() == b'first'


@pytest.mark.pitfall(
    'Two runs resume from one state and use the same noise.',
    severity='critical', stops='a lock on the folder')
def test_one_process_at_a_time(tmp_path):
  first = runfolder.Lock(tmp_path)
  with pytest.raises(runfolder.Held):
    runfolder.Lock(tmp_path)
  first.close()
  first.close()
  assert not list(tmp_path.iterdir())
  runfolder.Lock(tmp_path).close()
