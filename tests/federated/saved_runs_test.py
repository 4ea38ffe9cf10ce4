# SPDX-License-Identifier: Apache-2.0
"""No byte of a saved run can change unnoticed, and nobody else can read it."""

import contextlib
import csv
import itertools
import os
import stat

import hypothesis
from hypothesis import strategies
import pytest
import regression
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import rules
from tfdp_adaptive import runfolder
from tfdp_adaptive.federated import run as run_lib
from tfdp_adaptive.federated import simulation
from tfdp_adaptive.federated import storage
from tfdp_adaptive.privacy import ledger as ledger_lib

TREE = (tf.range(3), tf.ones([2]))
RECORD = {'identity': {'plan': 1}, 'history': [{'round': 1}], 'failed': {}, 'pending': {}}


@contextlib.contextmanager
def other_umask(mask):
  old = os.umask(mask)
  try:
    yield
  finally:
    os.umask(old)


@pytest.fixture
def saved(tmp_path):
  with storage.RunFolder(tmp_path / 'run') as folder:
    folder.save(TREE, RECORD)
    yield folder


def refused(folder, data):
  (folder.path / 'state.npz').write_bytes(data)
  with pytest.raises(tfdp.federated.SavedRunError, match='state.npz must be what a run saved'):
    folder.load()


@pytest.mark.pitfall(
    "A federated run's state was damaged.",
    severity='critical', stops='an error that says so')
def test_every_flipped_byte_and_every_truncation_is_noticed(saved):
  whole = (saved.path / 'state.npz').read_bytes()
  for place in range(len(whole)):
    refused(saved, whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1:])
    refused(saved, whole[:place])
  refused(saved, whole + b'\0')
  refused(saved, whole + whole)
  (saved.path / 'state.npz').write_bytes(whole)
  assert saved.load()[1] == RECORD


@hypothesis.given(strategies.binary(max_size=300))
@hypothesis.settings(max_examples=50, suppress_health_check=list(hypothesis.HealthCheck))
def test_foreign_bytes_with_a_digest_of_their_own(saved, data):
  import hashlib  # pylint: disable=import-outside-toplevel
  for body in (data, b'PK\x03\x04' + data, b'\x93NUMPY' + data):
    refused(saved, body + hashlib.sha256(body).digest())


@pytest.mark.pitfall(
    'Secrets of a run can be read by other users of the machine.',
    severity='high', stops='files are created with mode 0600')
def test_only_its_owner_can_read_it_from_the_first_byte_on(tmp_path, monkeypatch):
  modes = []
  opened = os.open

  def spy(path, flags, mode=0o777, **kwargs):
    descriptor = opened(path, flags, mode, **kwargs)
    if str(path).endswith('state.npz.new'):
      modes.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
    return descriptor

  monkeypatch.setattr(os, 'open', spy)
  with other_umask(0):
    with storage.RunFolder(tmp_path / 'a' / 'run') as folder:
      left = folder.path / 'state.npz.new'  # Left by a killed run of an older version.
      left.write_bytes(b'secret')
      left.chmod(0o666)
      folder.save(TREE, RECORD)
      assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
      files = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.path.iterdir()}
  assert modes == [0o600] and files == {'state.npz': 0o600, '.lock': 0o600}


def rows_of(count):
  return [{'round': number, 'loss': 0.5} for number in range(1, count + 1)]


@pytest.mark.pitfall(
    'The state is lost after rounds were released, so the run would start again and state too '
    'small an epsilon.',
    severity='critical', stops='an error')
@pytest.mark.parametrize('state', [None, 2])
def test_rounds_that_the_state_knows_nothing_of(state, tmp_path):
  for path in (tmp_path / 'csv', tmp_path / 'events'):
    path.mkdir()
    run_lib._check_released(path, state)
    released = run_lib.Releases(path)
    run_lib._check_released(path, state)  # Nothing was released yet.
    for rounds_ in (1, 2, 3):
      released.release(rows_of(rounds_))
    run_lib._check_released(path, 3)
  (tmp_path / 'events' / 'metrics.csv').unlink()
  with pytest.raises(tfdp.federated.SavedRunError, match='3 rounds were released .* state is'):
    run_lib._check_released(tmp_path / 'csv', state)
  if state is None:
    with pytest.raises(tfdp.federated.SavedRunError, match='its state is gone'):
      run_lib._check_released(tmp_path / 'events', None)


def test_a_run_that_is_killed_while_it_writes_leaves_a_whole_table(tmp_path, monkeypatch):
  released = run_lib.Releases(tmp_path)
  for rounds_ in (9, 10, 11):
    released.release(rows_of(rounds_))
  before = (tmp_path / 'metrics.csv').read_bytes()

  def half(path, content, mode):
    del mode
    path.write_bytes(content[:len(content) // 2])
    raise OSError('killed')

  with monkeypatch.context() as patch:
    patch.setattr(runfolder, '_write', half)
    with pytest.raises(OSError):
      released.release(rows_of(12))
  assert (tmp_path / 'metrics.csv').read_bytes() == before
  assert run_lib.last_round(tmp_path) == 11
  run_lib.Releases(tmp_path).release(rows_of(12))
  assert run_lib.last_round(tmp_path) == 12
  assert (tmp_path / 'metrics.csv').read_bytes().startswith(before)


def test_no_corruption_of_what_was_released_is_an_error_of_others(tmp_path):
  released = run_lib.Releases(tmp_path)
  for rounds_ in (1, 2):
    released.release(rows_of(rounds_))
  whole = (tmp_path / 'metrics.csv').read_bytes()
  noticed = 0
  for place in range(len(whole)):
    for broken in (whole[:place], whole[:place] + b'\xff' + whole[place + 1:],
                   whole[:place] + b'"' + whole[place + 1:],
                   whole[:place] + b'\0' + whole[place + 1:]):
      (tmp_path / 'metrics.csv').write_bytes(broken)
      try:
        run_lib.last_round(tmp_path)
        run_lib.Releases(tmp_path)
      except storage.SavedRunError as error:
        noticed += 1
        assert 'metrics.csv must be what a run released' in str(error)
  assert noticed > len(whole)


@pytest.mark.pitfall(
    'A metric of `evaluate` overwrites the private one of the same name.',
    severity='high', stops='private metrics have a prefix, which `evaluate` may not use')
def test_no_number_overwrites_another():
  process = regression.build(
      rules.dp_sgd(), regression.make_plan(steps=2),
      private_metrics=tfdp.federated.PrivateMetrics({'loss': (0.0, 50.0)}))
  users = tfdp.federated.Users(regression.make_users(), batch_size=4)
  row, = tfdp.federated.simulate(process, users, rounds=1, progress=False,
                                 evaluate=lambda weights: {'loss': 0.5}).history
  assert len({row[name] for name in ('loss', 'private/loss')}) == 2
  for name in ('round', 'private/loss', 'not_private/loss', 'private/other'):
    with pytest.raises(ValueError, match='must return names other than'):
      simulation._evaluated({name: 0.5})


@pytest.mark.pitfall(
    'The duration of a round reveals whether a user with many examples took part.',
    severity='high', stops='durations are only in `result.speed`, not in the history or in files')
def test_no_time_of_a_round_is_in_what_is_released(tmp_path, monkeypatch):
  """Neither as a number nor as the time of an event: clocks differ, and no file does."""
  process = regression.build(rules.dp_sgd(), regression.make_plan(steps=2))
  users = tfdp.federated.Users(regression.make_users(), batch_size=4)
  contents, results = [], []
  for seconds in (0.25, 33.0):
    ticks = itertools.count(0, seconds)
    out = tmp_path / str(seconds)
    with monkeypatch.context() as patch:
      patch.setattr(simulation.time, 'monotonic', lambda t=ticks: next(t))
      patch.setattr(ledger_lib, 'new_run', lambda: 'a random name')
      results.append(tfdp.federated.simulate(
          process, users, out=out, progress=False, rounds_per_evaluation=1,
          evaluate=lambda weights: {'loss': 0.5}))
    assert set(results[-1].speed['seconds']) == {seconds}
    contents.append({file.relative_to(out): file.read_bytes()
                     for file in out.rglob('*') if file.is_file()})
  assert results[0].history == results[1].history
  assert contents[0] == contents[1] and len(contents[0]) == 3
  with open(out / 'metrics.csv', encoding='utf-8') as file:
    assert next(csv.reader(file)) == ['round', 'loss']
  (events,) = (out / 'tensorboard').iterdir()
  records = [tf.compat.v1.Event.FromString(record.numpy())
             for record in tf.data.TFRecordDataset(str(events))]
  assert [(record.step, value.tag, value.simple_value) for record in records
          for value in record.summary.value] == [(1, 'loss', 0.5), (2, 'loss', 0.5)]
