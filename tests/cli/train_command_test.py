# SPDX-License-Identifier: Apache-2.0
"""`tfdp train`: what it saves, and that it goes on where it was interrupted."""

import hashlib
import io
import json
import pathlib
import resource
import zipfile

import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive.cli import checkpoint
from tfdp_adaptive.cli import folder as folder_lib
from tfdp_adaptive.cli import language_model
from tfdp_adaptive.cli import main
from tfdp_adaptive.cli import options
from tfdp_adaptive.cli import train
from tfdp_adaptive.data import corpus
from tfdp_adaptive.data import next_word

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


def test_an_interrupted_run_goes_on(folder, monkeypatch, capsys):
  cut = command(folder, 'cut', '--set', 'learning_rate=0.5', '--set', 'epsilon=0.03')
  fit = train.training.fit

  def no_steps(model, batches, recorder):
    assert batches is None  # All steps are done: none may be taken again.
    return fit(model, batches, recorder)

  with monkeypatch.context() as patch:
    patch.setattr(train, 'publish', _interrupt)
    assert main.main(cut) == 130
  assert f'the same command with --out {folder / "cut"} to go on' in capsys.readouterr().err
  assert not (folder / 'cut' / 'model.keras').exists()
  assert (folder / 'cut' / 'train.state').stat().st_mode & 0o777 == 0o700
  monkeypatch.setattr(train.training, 'fit', no_steps)
  assert main.main(cut) == 0
  assert not (folder / 'cut' / 'train.state').exists()
  assert results(folder, 'cut')['loss'] < 3


def test_steps_that_were_saved_or_shown_are_not_taken_again(folder, monkeypatch):
  starts, fit, end = [], train.training.fit, train.training.Recorder.end
  measure, save, saved = train.training.Recorder._measure, train.checkpoint.Checkpoint.save, []

  def recording_fit(model, batches, recorder):
    starts.append((batches.tfdp_start_step, int(batches.cardinality())))
    return fit(model, batches, recorder)

  def stop_in_the_17th(recorder):
    if recorder._done == 16:
      raise KeyboardInterrupt
    end(recorder)

  def measure_what_is_saved(recorder):
    assert recorder._done in saved
    measure(recorder)

  def recording_save(checkpoint_, curve):
    save(checkpoint_, curve)
    saved.append(checkpoint_._optimizer.steps_done)

  monkeypatch.setattr(train.training, 'fit', recording_fit)
  monkeypatch.setattr(train.training.Recorder, '_measure', measure_what_is_saved)
  monkeypatch.setattr(train.checkpoint.Checkpoint, 'save', recording_save)
  whole = command(folder, 'killed', '--steps', '30', '--save-every', '5')
  with monkeypatch.context() as patch:
    patch.setattr(train.training.Recorder, 'end', stop_in_the_17th)
    assert main.main(whole) == 130
  assert main.main(whole) == 0
  assert starts == [(0, 30), (15, 15)]
  assert [point[0] for point in results(folder, 'killed')['curve']] == list(range(0, 31, 3))


@pytest.fixture(scope='module')
def unfinished(folder):
  """A run that was interrupted after all steps."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(train, 'publish', _interrupt)
    assert main.main(command(folder, 'other')) == 130
  return folder / 'other' / 'train.state'


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
def test_no_byte_of_a_saved_state_may_change(tmp_path):
  model, whole = _small(tmp_path), (tmp_path / 'state').read_bytes()
  changed = [whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1:] for i in range(len(whole))]
  shorter = [whole[:i] for i in range(len(whole))]
  for content in [*changed, *shorter, whole + b'0', whole + whole]:
    (tmp_path / 'state').write_bytes(content)
    with pytest.raises(options.UsageError, match='cannot be read'):
      model.restore()
  (tmp_path / 'state').write_bytes(whole)
  assert model.restore() == (0, ((0, 1.5, .25),))


@pytest.mark.pitfall(
    'A saved state from elsewhere runs code.',
    severity='critical', stops='refused; nothing of it is executed')
def test_a_hostile_state_runs_no_code(tmp_path):
  model, fired = _small(tmp_path), tmp_path / 'fired'

  class Bomb:

    def __reduce__(self):
      return pathlib.Path.touch, (fired,)

  for content in (dict(record=np.array([Bomb()], object)), dict(v0=np.array([Bomb()], object)), {}):
    buffer = io.BytesIO()
    np.savez(buffer, **content)
    (tmp_path / 'state').write_bytes(
        hashlib.sha256(buffer.getvalue()).digest() + buffer.getvalue())
    with pytest.raises(options.UsageError, match='cannot be read'):
      model.restore()
  assert not fired.exists()


def test_a_state_of_another_model_is_refused(tmp_path):
  _small(tmp_path)
  with pytest.raises(options.UsageError, match='another version or model'):
    _checkpoint(tmp_path, 3).restore()


@pytest.mark.pitfall(
    'Two runs go on from one state, with the same noise.',
    severity='critical', stops='a lock')
def test_two_cannot_train_in_one_folder(folder, unfinished, monkeypatch, capsys):
  state = {path: path.read_bytes() for path in unfinished.iterdir()}
  held = folder_lib.lock(folder / 'other')
  monkeypatch.setattr(train.training, 'fit', lambda *_: pytest.fail('trained'))
  for name in ('train', 'compare', 'train'):
    assert main.main([name, *command(folder, 'other')[1:]] if name == 'train' else [
        'compare', *command(folder, 'other')[1:-4], '--out', str(folder / 'other')]) == 2
    said = capsys.readouterr().err
    assert 'Another tfdp is at work' in said or 'unfinished run of another command' in said
  assert {path: path.read_bytes() for path in unfinished.iterdir()} == state
  held.close()


def test_a_lock_that_was_removed_while_one_waited_is_none(tmp_path):
  first = folder_lib.lock(tmp_path)
  with pytest.raises(options.UsageError, match='Another tfdp'):
    folder_lib.lock(tmp_path)
  first.close()
  assert not list(tmp_path.iterdir())
  first.close()
  folder_lib.lock(tmp_path).close()


def test_where_no_state_can_be_kept_nothing_is_trained(folder, monkeypatch, capsys):
  (folder / 'full').mkdir()
  (folder / 'full' / 'train.state').write_text('', encoding='utf-8')
  monkeypatch.setattr(train.training, 'fit', _interrupt)
  assert main.main(command(folder, 'full')) == 2
  assert 'train.state (File exists)' in capsys.readouterr().err


@pytest.mark.pitfall(
    'The disk is full in the middle of a run.',
    severity='medium', stops='an error in one line; the run goes on from its last step')
def test_a_full_disk_loses_nothing(folder, capsys):
  """No file may exceed `room`: not even the folder, the state, the model, the picture."""
  out, messages = folder / 'disk', []
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  for room in (0, 5000, 12000, 20000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
      assert main.main(command(folder, 'disk')) == 2
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = capsys.readouterr().err
    assert 'tfdp train: error' in said.splitlines()[-1] and 'File too large' in said
    assert 'Traceback' not in said and not list(out.rglob('*new*'))
    messages.append((out / 'train.state' / 'state').exists())
  assert messages[:2] == [False, False] and messages[-1]
  assert main.main(command(folder, 'disk')) == 0
  assert (out / 'model.keras').exists() and not (out / '.lock').exists()


@pytest.mark.parametrize('more, message', [
    (['--set', 'beta=1'], '--set must name one of learning_rate, l2_norm_clip'),
    (['--set', 'learning_rate=-1'], '--set learning_rate must be a positive number'),
    (['--set', 'learning_rate'], '--set learning_rate must be a positive number'),
])
def test_wrong_settings(folder, more, message, capsys):
  assert main.main(command(folder, 'wrong', *more)) == 2
  assert message in capsys.readouterr().err
  assert not (folder / 'wrong').exists()


def _checkpoint(path, width):
  model = tfdp.make_private(tf.keras.Sequential(
      [tf.keras.layers.Input([width]), tf.keras.layers.Dense(1)]))
  model.compile(tfdp.DPSGD(l2_norm_clip=1., noise_multiplier=1., batch_size=2), 'mse')
  return checkpoint.Checkpoint(path, model)


def _small(path):
  """A saved state."""
  saved = _checkpoint(path, 2)
  saved.save([(0, 1.5, .25)])
  return saved


def _interrupt(*_, **__):
  raise KeyboardInterrupt
