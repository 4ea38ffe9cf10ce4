# SPDX-License-Identifier: Apache-2.0
"""`tfdp train`: what it saves, and that it goes on where it was interrupted."""

import hashlib
import io
import json
import pathlib
import pickle
import resource
import shutil
import zipfile

import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import errors
from tfdp_adaptive import runfolder
from tfdp_adaptive.cli import main
from tfdp_adaptive.examples import corpus
from tfdp_adaptive.examples import language_model
from tfdp_adaptive.examples import next_word
from tfdp_adaptive.examples import report as report_lib
from tfdp_adaptive.examples import train
from tfdp_adaptive.examples import training
from tfdp_adaptive.keras import backups
from tfdp_adaptive.privacy import card_json

WORDS = ('the', 'cat', 'dog', 'sees', 'and', 'runs', 'away')


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """400 sentences of 40 clients, and a public vocabulary."""
  path = tmp_path_factory.mktemp('data')
  rng = np.random.default_rng(0)
  (path / 'text.jsonl').write_text('\n'.join(
      json.dumps({'client': i % 40, 'text': f'The {rng.choice(WORDS[1:3])} sees and runs away.'})
      for i in range(400)), encoding='utf-8')
  (path / 'words.txt').write_text('\n'.join(WORDS), encoding='utf-8')
  return path


def command(folder, out, *more):
  return ['train', '--data', str(folder / 'text.jsonl'), '--vocabulary',
          str(folder / 'words.txt'), '--batch-size', '32', '--steps', '6', '--method', 'dp_adam',
          '--out', str(folder / out), *more]


def results(folder, out):
  return json.loads((folder / out / 'results.json').read_text(encoding='utf-8'))['rows'][1]


def test_the_saved_model_is_the_one_reported_and_holds_no_secret(folder, capsys):
  assert main.main(command(folder, 'whole', '--set', 'learning_rate=0.25')) == 0
  out = folder / 'whole'
  assert sorted(p.name for p in out.iterdir()) == [
      'card.html', 'card.json', 'card.md', 'curves.png', 'model.keras', 'privacy.txt',
      'results.json', 'vocabulary.txt']
  assert str(out / 'model.keras') in capsys.readouterr().out
  row = results(folder, 'whole')
  assert row['settings']['learning_rate'] == .25 and row['steps'] == 6
  assert 3.9 <= row['epsilon'] <= 4
  assert main.main(['verify', str(out / 'card.json'), '--weights', str(out / 'model.keras')]) == 0
  assert 'Guarantee: (' in (out / 'privacy.txt').read_text(encoding='utf-8')
  model = tf.keras.models.load_model(out / 'model.keras', compile=True)
  assert getattr(model, 'optimizer', None) is None
  with zipfile.ZipFile(out / 'model.keras') as archive:
    assert 'DPAdam' not in archive.read('config.json').decode()
  vocabulary = (out / 'vocabulary.txt').read_text(encoding='utf-8').split()
  assert vocabulary == list(WORDS)
  held_out = corpus.split(corpus.read(folder / 'text.jsonl').sentences).test
  evaluate = language_model.Evaluator(model, next_word.examples(held_out, vocabulary))
  np.testing.assert_allclose(evaluate(), (row['loss'], row['accuracy']), rtol=1e-5)


def watched(monkeypatch, stop=None):
  """`(step, what happened)` of a run; the step `stop` is taken, but never ends."""
  seen = []
  begin, measure = training.Recorder.begin_step, training.Recorder._measure
  publish = runfolder.publish

  def begin_step(recorder):
    seen.append((recorder._done, 'begins'))
    if recorder._done == stop:
      raise KeyboardInterrupt
    begin(recorder)

  def recorded_measure(recorder):
    measure(recorder)
    seen.append((recorder._done, 'shown'))

  def recorded_publish(folder, path):
    publish(folder, path)
    seen.append((max(step for step, _ in seen) + 1, 'saved'))

  monkeypatch.setattr(training.Recorder, 'begin_step', begin_step)
  monkeypatch.setattr(training.Recorder, '_measure', recorded_measure)
  monkeypatch.setattr(runfolder, 'publish', recorded_publish)
  return seen


def test_an_interrupted_run_goes_on(folder, monkeypatch, capsys):
  cut = command(folder, 'cut', '--set', 'learning_rate=0.5', '--set', 'epsilon=0.03')
  with monkeypatch.context() as patch:
    patch.setattr(train, 'publish', _interrupt)
    assert main.main(cut) == 130
  assert f'the same command with --out {folder / "cut"} to go on' in capsys.readouterr().err
  assert not (folder / 'cut' / 'model.keras').exists()
  state = folder / 'cut' / 'train.state'
  assert state.stat().st_mode & 0o777 == 0o700
  assert (state / 'backup').stat().st_mode & 0o777 == 0o700
  seen = watched(monkeypatch)
  assert main.main(cut) == 0
  assert not seen  # All steps are done: none may be taken again.
  assert not state.exists()
  assert results(folder, 'cut')['loss'] < 3


def test_steps_that_were_saved_or_shown_are_not_taken_again(folder, monkeypatch):
  whole = command(folder, 'killed', '--steps', '30', '--save-every', '5')
  with monkeypatch.context() as patch:
    first = watched(patch, stop=17)
    assert main.main(whole) == 130
  second = watched(monkeypatch)
  assert main.main(whole) == 0
  taken = lambda seen: [step for step, what in seen if what == 'begins']
  assert taken(first) == list(range(18)) and taken(second) == list(range(15, 30))
  for seen in (first, second):
    for place, (step, what) in enumerate(seen):
      if what == 'shown' and step:
        assert (step, 'saved') in seen[:place], 'shown before it was saved'
  saved = [step for step, what in first if what == 'saved']
  assert saved == [3, 5, 6, 9, 10, 12, 15]
  assert [point[0] for point in results(folder, 'killed')['curve']] == list(range(0, 31, 3))


@pytest.fixture(scope='module')
def interrupted(folder, tmp_path_factory):
  """The folder of a run that was interrupted after all steps."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(train, 'publish', _interrupt)
    assert main.main(command(folder, 'other')) == 130
  return (folder / 'other').rename(tmp_path_factory.mktemp('interrupted') / 'other')


@pytest.fixture
def unfinished(folder, interrupted):
  """The state of this run, as it was left, whatever tests before this one did to it."""
  shutil.rmtree(folder / 'other', ignore_errors=True)
  return shutil.copytree(interrupted, folder / 'other') / 'train.state'


def test_another_run_does_not_go_on_from_this_one(folder, unfinished, capsys):
  for change in (['--epsilon', '8'], ['--method', 'dp_sgd'], ['--set', 'learning_rate=1']):
    assert main.main(command(folder, 'other', *change)) == 2
    assert 'unfinished run with other data or arguments' in capsys.readouterr().err
  (unfinished / 'run.json').rename(unfinished / 'elsewhere')
  assert main.main(command(folder, 'other')) == 2
  assert 'cannot be read' in capsys.readouterr().err
  (unfinished / 'elsewhere').rename(unfinished / 'run.json')


@pytest.mark.pitfall(
    'A saved state was damaged.',
    severity='critical', stops='refused: a digest over all of it')
def test_no_byte_of_a_saved_state_may_change(folder, unfinished, capsys):
  """`callbacks_test` changes many more bytes of a backup: here it is the command that refuses."""
  rng = np.random.default_rng(0)
  paths = [path for path in unfinished.rglob('*') if path.is_file() and path.name != 'run.json']
  assert len(paths) >= 4 and 'curve' in [path.name for path in paths]
  for path in paths:
    whole = path.read_bytes()
    i = int(rng.integers(len(whole)))
    for content in (whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1:], whole[:i], whole + b'0'):
      path.write_bytes(content)
      assert main.main(command(folder, 'other')) == 2
      assert 'cannot be read' in capsys.readouterr().err
    path.write_bytes(whole)
  assert not (folder / 'other' / 'model.keras').exists()


@pytest.mark.pitfall(
    'A saved state from elsewhere runs code.',
    severity='critical', stops='refused; nothing of it is executed')
def test_a_hostile_state_runs_no_code(folder, unfinished, tmp_path, capsys):
  """Every file is one that runs code where it is unpickled, under digests that are right."""
  fired = tmp_path / 'fired'

  class Bomb:

    def __reduce__(self):
      return pathlib.Path.touch, (fired,)

  buffer = io.BytesIO()
  np.savez(buffer, record=np.array([Bomb()], object), v0=np.array([Bomb()], object))
  (backup,) = (unfinished / 'backup').glob('whole-*')
  whole = {path: path.read_bytes() for path in unfinished.rglob('*') if path.is_file()}
  for content in (pickle.dumps(Bomb()), buffer.getvalue()):
    for path in backup.rglob('*'):
      if path.is_file() and path.name != backups._DIGESTS:
        path.write_bytes(content)
    (backup / backups._DIGESTS).write_text(json.dumps(backups._digests(backup)), encoding='utf-8')
    assert main.main(command(folder, 'other')) == 2
    capsys.readouterr()
    for path, was in whole.items():
      path.write_bytes(was)
    (unfinished / 'curve').write_bytes(content + hashlib.sha256(content).digest())
    assert main.main(command(folder, 'other')) == 2
    assert 'cannot be read' in capsys.readouterr().err
    (unfinished / 'curve').write_bytes(whole[unfinished / 'curve'])
  assert not fired.exists()


def test_steps_that_were_shown_are_not_taken_again_without_their_backup(
    folder, unfinished, tmp_path, capsys):
  (unfinished / 'backup').rename(tmp_path / 'backup')
  assert main.main(command(folder, 'other')) == 2
  assert 'are not in the backup' in capsys.readouterr().err
  shutil.rmtree(unfinished / 'backup')
  (tmp_path / 'backup').rename(unfinished / 'backup')


def test_a_state_of_another_model_is_refused(folder, unfinished, monkeypatch, capsys):
  width = language_model.WIDTH
  monkeypatch.setattr(language_model, 'WIDTH', width + 1)
  assert main.main(command(folder, 'other')) == 2
  assert 'cannot be read' in capsys.readouterr().err


@pytest.mark.pitfall(
    'Two runs go on from one state, with the same noise.',
    severity='critical', stops='a lock')
def test_two_cannot_train_in_one_folder(folder, unfinished, monkeypatch, capsys):
  read = lambda: {path: path.read_bytes() for path in unfinished.rglob('*') if path.is_file()}
  state = read()
  held = report_lib.lock(folder / 'other')
  monkeypatch.setattr(training, 'fit', lambda *_: pytest.fail('trained'))
  for name in ('train', 'compare', 'train'):
    assert main.main([name, *command(folder, 'other')[1:]] if name == 'train' else [
        'compare', *command(folder, 'other')[1:-4], '--out', str(folder / 'other')]) == 2
    said = capsys.readouterr().err
    assert 'Another tfdp is at work' in said or 'unfinished run of another command' in said
  assert read() == state
  held.close()


def test_a_lock_that_was_removed_while_one_waited_is_none(tmp_path):
  first = report_lib.lock(tmp_path)
  with pytest.raises(errors.UsageError, match='Another tfdp'):
    report_lib.lock(tmp_path)
  first.close()
  assert not list(tmp_path.iterdir())
  first.close()
  report_lib.lock(tmp_path).close()


def test_where_no_state_can_be_kept_nothing_is_trained(folder, monkeypatch, capsys):
  (folder / 'full').mkdir()
  (folder / 'full' / 'train.state').write_text('', encoding='utf-8')
  monkeypatch.setattr(training, 'fit', _interrupt)
  assert main.main(command(folder, 'full')) == 2
  said = capsys.readouterr().err
  assert 'File exists' in said and 'train.state' in said and said.count('\n') == 1


@pytest.mark.pitfall(
    'The disk is full in the middle of a run.',
    severity='medium', stops='an error in one line; the run goes on from its last step')
def test_a_full_disk_loses_nothing(folder, monkeypatch, capsys):
  """No file may exceed the room: not even the folder, the state, then the model, the picture."""
  out, (_, hard) = folder / 'disk', resource.getrlimit(resource.RLIMIT_FSIZE)

  def refused():
    try:
      assert main.main(command(folder, 'disk')) == 2
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    said = capsys.readouterr().err
    assert 'tfdp train: error' in said.splitlines()[-1] and 'File too large' in said
    assert 'Traceback' not in said and not list(out.rglob('*new*'))
    return bool(list(out.glob('train.state/backup/whole-*')))

  for room in (0, 5000, 12000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    assert not refused()
  for module, name in ((train, 'publish'), (report_lib, '_draw')):
    late = getattr(module, name)

    def full(*arguments, late=late):
      resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
      return late(*arguments)

    with monkeypatch.context() as patch:
      patch.setattr(module, name, full)
      assert refused()
  seen = watched(monkeypatch)
  assert main.main(command(folder, 'disk')) == 0
  assert not seen  # No step was taken again.
  assert (out / 'model.keras').exists() and not (out / '.lock').exists()


def test_users_are_protected_by_their_examples(folder, monkeypatch, capsys):
  users = command(folder, 'users', '--epsilon', '8', '--examples-per-user', '3')
  with monkeypatch.context() as patch:
    first = watched(patch, stop=4)
    assert main.main([*users, '--save-every', '1']) == 130
  assert main.main([*users[:-1], '4', '--save-every', '1']) == 2
  assert 'unfinished run with other data or arguments' in capsys.readouterr().err
  second = watched(monkeypatch)
  assert main.main([*users, '--save-every', '1']) == 0
  assert [[step for step, what in seen if what == 'begins'] for seen in (first, second)] == [
      [0, 1, 2, 3, 4], [4, 5]]
  row, out = results(folder, 'users'), folder / 'users'
  card = card_json.read(out / 'card.json')
  assert row['unit'] == card.unit == 'user' and 7.9 < row['epsilon'] == card.epsilon <= 8
  (run,) = card.runs
  assert (run.entry.plan.unit, run.entry.plan.sampling) == (
      'user', tfdp.sampling.PoissonExamples(examples_per_user=3))
  assert 'At most 3 examples of a user' in (folder / 'users' / 'privacy.txt').read_text('utf-8')


def test_users_need_names(folder, tmp_path, capsys):
  text = tmp_path / 'text.jsonl'
  text.write_text('{"text": "The cat sees. The dog runs."}', encoding='utf-8')
  assert main.main(['train', '--data', str(text), '--examples-per-user', '2',
                    '--out', str(tmp_path / 'out')]) == 2
  assert '`client` is missing' in capsys.readouterr().err


@pytest.mark.parametrize('more, message', [
    (['--set', 'beta=1'], '--set must name one of learning_rate, l2_norm_clip'),
    (['--set', 'learning_rate=-1'], '--set learning_rate must be a positive number'),
    (['--set', 'learning_rate'], '--set learning_rate must be a positive number'),
])
def test_wrong_settings(folder, more, message, capsys):
  assert main.main(command(folder, 'wrong', *more)) == 2
  assert message in capsys.readouterr().err
  assert not (folder / 'wrong').exists()


def _interrupt(*_, **__):
  raise KeyboardInterrupt
