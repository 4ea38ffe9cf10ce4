"""`tfdp train`: what it saves, and that it goes on where it was interrupted."""

import json
import zipfile

import numpy as np
import pytest
import tensorflow as tf

from tfdp_adaptive.cli import language_model
from tfdp_adaptive.cli import main
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
      'curves.png', 'model.keras', 'privacy.txt', 'results.json', 'vocabulary.txt']
  assert str(out / 'model.keras') in capsys.readouterr().out
  row = results(folder, 'whole')
  assert row['settings']['learning_rate'] == .25 and row['steps'] == 6
  assert 3.9 <= row['epsilon'] <= 4
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


def test_an_interrupted_run_goes_on(folder, monkeypatch):
  with monkeypatch.context() as patch:
    patch.setattr(train, '_publish', _interrupt)
    assert main.main(command(folder, 'cut')) == 130
  assert not (folder / 'cut' / 'model.keras').exists()
  with monkeypatch.context() as patch:  # All steps are done: none may be taken again.
    patch.setattr(train.training, 'fit', _interrupt)
    assert main.main(command(folder, 'cut')) == 0
  assert not (folder / 'cut' / 'train.state').exists()
  assert results(folder, 'cut')['loss'] < 3


def test_steps_that_were_saved_are_not_taken_again(folder, monkeypatch):
  fit, starts = train.training.fit, []

  def stop_after_four(model, batches, steps, *arguments, callbacks, **more):
    starts.append(steps)
    if len(starts) == 1:
      callbacks = [*callbacks, _StopAt(4)]
    return fit(model, batches, steps, *arguments, callbacks=callbacks, **more)

  monkeypatch.setattr(train.training, 'fit', stop_after_four)
  assert main.main(command(folder, 'killed', '--save-every', '2')) == 130
  assert main.main(command(folder, 'killed', '--save-every', '2')) == 0
  assert starts == [6, 2]
  assert [point[0] for point in results(folder, 'killed')['curve']] == [4, 5, 6]


def test_another_run_does_not_go_on_from_this_one(folder, monkeypatch, capsys):
  with monkeypatch.context() as patch:
    patch.setattr(train, '_publish', _interrupt)
    assert main.main(command(folder, 'other')) == 130
  assert main.main(command(folder, 'other', '--epsilon', '8')) == 2
  assert 'unfinished run with other data or arguments' in capsys.readouterr().err
  for path in (folder / 'other' / 'train.state').glob('ckpt-*'):
    path.write_bytes(b'broken')
  assert main.main(command(folder, 'other')) == 2
  assert 'cannot be read' in capsys.readouterr().err
  for names in (b'', b'broken', b'\xff\xfe\x00'):
    (folder / 'other' / 'train.state' / 'checkpoint').write_bytes(names)
    assert main.main(command(folder, 'other')) == 2
    assert 'cannot be read' in capsys.readouterr().err
  assert list((folder / 'other' / 'train.state').glob('ckpt-*'))


def test_where_no_state_can_be_kept_nothing_is_trained(folder, monkeypatch, capsys):
  (folder / 'full').mkdir()
  (folder / 'full' / 'train.state').write_text('', encoding='utf-8')
  monkeypatch.setattr(train.training, 'fit', _interrupt)
  assert main.main(command(folder, 'full')) == 2
  assert 'train.state (File exists)' in capsys.readouterr().err


@pytest.mark.parametrize('more, message', [
    (['--set', 'beta=1'], '--set must name one of learning_rate, l2_norm_clip'),
    (['--set', 'learning_rate=-1'], '--set learning_rate must be a positive number'),
    (['--set', 'learning_rate'], '--set learning_rate must be a positive number'),
])
def test_wrong_settings(folder, more, message, capsys):
  assert main.main(command(folder, 'wrong', *more)) == 2
  assert message in capsys.readouterr().err
  assert not (folder / 'wrong').exists()


class _StopAt(tf.keras.callbacks.Callback):

  def __init__(self, step):
    super().__init__()
    self._step = step

  def on_train_batch_end(self, batch, logs=None):
    if batch + 1 == self._step:
      raise KeyboardInterrupt


def _interrupt(*_, **__):
  raise KeyboardInterrupt
